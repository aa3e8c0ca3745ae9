"""Tensors and quantised matrices on the device, of random numbers that are the same every time; warnings."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from support.quantized_layers import place, random_matrix

INT4 = "affine4_64"


def tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to("mps")


def matrix(rows: int, columns: int, form=INT4) -> list:
    return place(random_matrix(rows, columns, form, torch.float16, 0), "mps")


@contextlib.contextmanager
def warnings_of_operators(capfd: pytest.CaptureFixture) -> Iterator[Callable[[], str]]:
    """Each of them, where torch says one once in a process. Afterwards the function gives their text."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Before torch 2.15 they are printed.
            yield lambda: capfd.readouterr().err + "".join(str(each.message) for each in caught)
    finally:
        torch.set_warn_always(always)
