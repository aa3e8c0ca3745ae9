"""Loads the compiled Metal kernels' host where there is one."""

import warnings
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
SHADERS = PACKAGE / "shaders"


def load_extension() -> bool:
    """Load the `_C` library built on macOS and tell it where the shaders lie. False where there is none."""
    libraries = sorted(PACKAGE.glob("_C*.so"))
    if not libraries:
        return False
    try:
        activate(libraries[0])
    except OSError as error:
        warnings.warn(
            f"torch_moe_mps: {libraries[0].name} does not load into torch {torch.__version__} ({error}); "
            "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps torch-moe-mps`",
            stacklevel=2,
        )
        return False
    return True


def activate(library: Path) -> None:
    """Load a host library and point it to the shader sources."""
    torch.ops.load_library(str(library))
    torch.ops.moe_mps._set_shader_directory(str(SHADERS))
