"""Builds the Metal extension on macOS; elsewhere the package is pure Python."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class WithoutTorch(build_ext):
    """Metadata and source distributions need no torch; the build does."""

    def run(self):
        raise SystemExit(
            "torch_moe_mps: the Metal extension is compiled against the torch it will run with; "
            "install torch first and use `pip install --no-build-isolation .`"
        )


class PlatformWheel(bdist_wheel):
    """A wheel without the extension must not be installed on a Mac."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False


def metal_extension() -> dict:
    """The keyword arguments that make setup() build torch_moe_mps/_C_torch<version> from csrc/*.mm."""
    sources = sorted(str(path) for path in Path("torch_moe_mps/csrc").rglob("*.mm"))
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        extension = Extension("torch_moe_mps._C", sources)
        return {"ext_modules": [extension], "cmdclass": {"build_ext": WithoutTorch}}
    major, minor = torch.__version__.split(".")[:2]
    oldest = "-mmacosx-version-min=14.0"
    extension = CppExtension(
        f"torch_moe_mps._C_torch{major}_{minor}",  # _extension.py loads it into no other torch
        sources,
        depends=sorted(str(path) for path in Path("torch_moe_mps").rglob("*.h")),
        extra_compile_args=["-O2", "-fblocks", "-fobjc-exceptions", "-fno-objc-arc", oldest],
        extra_link_args=["-framework", "Foundation", "-framework", "Metal", oldest],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


options = metal_extension() if sys.platform == "darwin" else {"cmdclass": {"bdist_wheel": PlatformWheel}}
setup(**options)
