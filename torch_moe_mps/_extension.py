"""Loads the compiled Metal extension if there is one for this version of torch."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ._environment import TENSOR_UNITS, choice, commit_interval
from ._install import pip_install
from ._weight_formats import ROWS, LikeActivations

# Without MOE_MPS_COMMIT_EVERY, csrc/metal/encoder.mm commits by what dispatches take. Committing early took
# executorch#17671 from 125 to 85 ms a token.
COMMIT_BY_WORK = -1

PACKAGE = Path(__file__).parent
_loaded: Path | None = None  # see host_library
SHADERS = PACKAGE / "shaders"


def torch_version() -> tuple[int, int]:
    """Its major and minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def load_extension() -> bool:
    """Load the library for this minor version of torch, and tell it where the shaders are.

    False if there is none: away from a Mac, or with a torch newer than this package.
    """
    minors = sorted(tuple(map(int, re.findall(r"\d+", path.name))) for path in PACKAGE.glob("_C_torch*.so"))
    if not minors:
        return False
    major, minor = torch_version()
    if (major, minor) not in minors:
        known = [".".join(map(str, numbers)) for numbers in minors]
        _warn(
            f"has no Metal kernels for torch {torch.__version__}, only for {', '.join(known)}: "
            f"a newer torch-moe-mps may bring them, `{pip_install(f'torch=={known[-1]}.*')}` fits this one"
        )
        return False
    library = PACKAGE / f"_C_torch{major}_{minor}.so"
    try:
        activate(library)
    except OSError as error:
        _warn(f"cannot load {library.name} into torch {torch.__version__}: {error}; install it again")
        return False
    return True


def _warn(fault: str) -> None:
    warnings.warn(f"torch_moe_mps {fault}", stacklevel=3)


def activate(library: Path) -> None:
    """Load a host library; tell it where the shaders are, the formats of weights and the environment."""
    global _loaded
    torch.ops.load_library(str(library))
    _loaded = library
    torch.ops.moe_mps._set_shader_directory(str(SHADERS))
    for arguments in format_arguments():
        torch.ops.moe_mps._add_format(*arguments)
    torch.ops.moe_mps._commit_every(commit_setting())
    torch.ops.moe_mps._set_tensor_units(use_of_tensor_units())


def format_arguments() -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of `_add_format` for each format: its name, shader template and sizes."""
    for name, row in ROWS.items():
        yield name, *row.template, row.bits, row.group_size, isinstance(row.scales, LikeActivations)


@contextmanager
def setting(name: str, inside: Any, after: Any) -> Iterator[None]:
    """Sets a host setting, by the name of its function, inside the block and after it."""
    change = getattr(torch.ops.moe_mps, name)
    change(inside)
    try:
        yield
    finally:
        change(after)


def host_library() -> Path | None:
    """The library that is loaded."""
    return _loaded


def use_of_tensor_units() -> str:
    """Setting of the environment: "0", "1" or "auto"."""
    return choice(TENSOR_UNITS)


def commit_setting() -> int:
    """Interval that the environment sets, or COMMIT_BY_WORK."""
    interval = commit_interval()
    return COMMIT_BY_WORK if interval is None else interval
