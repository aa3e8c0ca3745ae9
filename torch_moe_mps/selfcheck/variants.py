"""Kernels that the tuner may take in place of planned ones: `torch-moe-mps check` compares them, too."""

import functools
from collections.abc import Collection, Iterator

import torch

from .._extension import setting
from ..ops._formats import FORMATS, Format
from .calls import DTYPES, Call, Subject
from .calls import calls as planned_calls
from .once import CallsToCheck

PREFIX = "quantized_variants_"


def libraries(dtypes: Collection[torch.dtype], formats: Collection[Format]) -> list[str]:
    """The names of the libraries for activations of these dtypes and weights in these formats."""
    wanted = {f"{PREFIX}{format}_{DTYPES[dtype]}" for format in formats for dtype in dtypes}
    return [name for name in torch.ops.moe_mps._libraries() if name in wanted]


def check_of(library: str) -> CallsToCheck:
    return CallsToCheck(library, library, functools.partial(calls, library), library)


def calls(library: str) -> Iterator[Call]:
    """Calls that launch every kernel of a library, in place of planned ones while the iterator is open."""
    weights, _, ending = library.removeprefix(PREFIX).rpartition("_")
    dtype = next(dtype for dtype, name in DTYPES.items() if name == ending)
    with setting("_take_variants", True, False):
        yield from planned_calls(Subject("_moe_experts_quantized", dtype, FORMATS[weights]))
