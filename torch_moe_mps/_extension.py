"""Loads the compiled Metal extension if there is one for this version of torch."""

import re
import warnings
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
SHADERS = PACKAGE / "shaders"
# Both bring a library for the torch that is there.
REINSTALL = (
    "`pip install --force-reinstall --no-deps torch-moe-mps`, or in a checkout `pip install "
    "--force-reinstall --no-deps --no-build-isolation .`"
)


def load_extension() -> bool:
    """Load the library for this minor version of torch, and tell it where the shaders are.

    False where there is no library: everywhere but on a Mac, and with a version of torch that came later.
    """
    minors = sorted(tuple(map(int, re.findall(r"\d+", path.name))) for path in PACKAGE.glob("_C_torch*.so"))
    if not minors:
        return False
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) not in minors:
        known = [".".join(map(str, numbers)) for numbers in minors]
        _warn(
            f"has no Metal kernels for torch {torch.__version__}, only for {', '.join(known)}: `pip install "
            f"--upgrade torch-moe-mps` may bring them, `pip install 'torch=={known[-1]}.*'` fits this one"
        )
        return False
    library = PACKAGE / f"_C_torch{major}_{minor}.so"
    try:
        activate(library)
    except OSError as error:
        _warn(f"cannot load {library.name} into torch {torch.__version__} ({error}): {REINSTALL}")
        return False
    return True


def _warn(fault: str) -> None:
    warnings.warn(f"torch_moe_mps {fault}", stacklevel=3)


def activate(library: Path) -> None:
    """Load a host library and point it to the shader sources."""
    torch.ops.load_library(str(library))
    torch.ops.moe_mps._set_shader_directory(str(SHADERS))
