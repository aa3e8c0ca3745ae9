"""Loads the compiled Metal extension if there is one."""

import importlib.machinery
import warnings
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
SHADERS = PACKAGE / "shaders"
BUILD = (
    "`pip install --no-build-isolation --no-deps --force-reinstall --no-cache-dir .` in a checkout of "
    "torch_moe_mps"
)


def extension_name() -> str:
    """The module that setup.py builds: a library fits the minor version of torch it was compiled against."""
    major, minor = torch.__version__.split(".")[:2]
    return f"_C_torch{major}_{minor}"


def load_extension() -> bool:
    """Load the library built on macOS and tell it where the shaders lie. False where there is none."""
    library = PACKAGE / (extension_name() + importlib.machinery.EXTENSION_SUFFIXES[0])
    others = sorted(path.name for path in PACKAGE.glob("_C_torch*.so"))
    if not others:
        return False
    if library.name not in others:
        _warn(f"{', '.join(others)} is for another torch or Python than torch {torch.__version__}")
        return False
    try:
        activate(library)
    except OSError as error:
        _warn(f"{library.name} does not load into torch {torch.__version__} ({error})")
        return False
    return True


def _warn(fault: str) -> None:
    warnings.warn(f"torch_moe_mps: {fault}; build it again: {BUILD}", stacklevel=3)


def activate(library: Path) -> None:
    """Load a host library and point it to the shader sources."""
    torch.ops.load_library(str(library))
    torch.ops.moe_mps._set_shader_directory(str(SHADERS))
