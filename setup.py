"""Builds the Metal extension on macOS; elsewhere the package is pure Python."""

import sys
from pathlib import Path

from setuptools import setup


def metal_extension() -> dict:
    """The keyword arguments that make setup() build torch_moe_mps/_C from csrc/*.mm."""
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        raise SystemExit(
            "torch_moe_mps: the Metal extension is compiled against the torch it will run with; "
            "install torch first and use `pip install --no-build-isolation .`"
        ) from error
    oldest = "-mmacosx-version-min=14.0"
    extension = CppExtension(
        "torch_moe_mps._C",
        sorted(str(path) for path in Path("torch_moe_mps/csrc").glob("*.mm")),
        extra_compile_args=["-O2", "-fblocks", "-fobjc-exceptions", "-fno-objc-arc", oldest],
        extra_link_args=["-framework", "Foundation", "-framework", "Metal", oldest],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


setup(**(metal_extension() if sys.platform == "darwin" else {}))
