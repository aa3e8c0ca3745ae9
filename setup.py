"""Builds the Metal extension on macOS; elsewhere the package is pure Python."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import setuptools

INSTALL = 'run `pip install "setuptools>=77" ninja` first'
if int(setuptools.__version__.partition(".")[0]) < 77:  # older ones do not read pyproject.toml
    raise SystemExit(
        f"torch_moe_mps: the build needs setuptools 77 or newer, got {setuptools.__version__}: {INSTALL}"
    )

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402
from setuptools.dist import Distribution  # noqa: E402

VERSIONS = runpy.run_path("torch_moe_mps/_versions.py")
MACOS = VERSIONS["MACOS"]


class WithoutTorch(build_ext):
    """Metadata and source distributions need no torch; the build does."""

    def run(self):
        raise SystemExit(
            "torch_moe_mps: the Metal extension is compiled against the torch it will run with; "
            "install torch first and use `pip install --no-build-isolation .`"
        )


class Anew(build_py):
    """Without what an earlier build of the checkout left: modules that are gone would be installed again."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "torch_moe_mps"), ignore_errors=True)
        super().run()


class Platform(Distribution):
    """For one platform, also without the extension: a wheel of Linux must not be installed on a Mac."""

    def has_ext_modules(self):
        return True


class EveryPython(bdist_wheel):
    """The extension uses nothing of Python: its version does not matter."""

    def get_tag(self):
        platform = f"macosx_{MACOS[0]}_{MACOS[1]}_arm64" if sys.platform == "darwin" else super().get_tag()[2]
        return "py3", "none", platform


def metal_extension() -> dict:
    """The keyword arguments that make setup() build torch_moe_mps/_C_torch<version>.so from csrc/*.mm."""
    os.environ.setdefault("ARCHFLAGS", "-arch arm64")  # a universal Python would also build for Intel
    sources = sorted(str(path) for path in Path("torch_moe_mps/csrc").rglob("*.mm"))
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available
    except ImportError:
        extension = Extension("torch_moe_mps._C", sources)
        return {"ext_modules": [extension], "cmdclass": {**wheels, "build_ext": WithoutTorch}}
    major, minor = torch.__version__.split(".")[:2]
    oldest = f"-mmacosx-version-min={MACOS[0]}.{MACOS[1]}"
    extension = CppExtension(
        f"torch_moe_mps._C_torch{major}_{minor}",  # _extension.py loads it into no other torch
        sources,
        depends=sorted(str(path) for path in Path("torch_moe_mps").rglob("*.h")),
        extra_compile_args=["-O2", "-fblocks", "-fobjc-exceptions", "-fno-objc-arc", oldest],
        extra_link_args=["-framework", "Foundation", "-framework", "Metal", oldest],
        py_limited_api=True,  # the extension uses nothing of Python, and is not linked with libtorch_python
    )

    class WithNinja(BuildExtension.with_options(no_python_abi_suffix=True)):
        def run(self):
            if not is_ninja_available():
                raise SystemExit(f"torch_moe_mps: the build needs ninja, got none: {INSTALL}")
            super().run()

    return {"ext_modules": [extension], "cmdclass": {**wheels, "build_ext": WithNinja}}


def description() -> str:
    """README.md with absolute links, once there is an address: PyPI has no other file of the repository."""
    found = re.search(r'^Source = "(.*)"$', Path("pyproject.toml").read_text(), re.MULTILINE)
    version = re.findall(
        r'^__version__ = "(.*)"$', Path("torch_moe_mps/__init__.py").read_text(), re.MULTILINE
    )
    text = Path("README.md").read_text()
    if found is None:
        return text
    source = found[1]
    text = re.sub(r"(!\[[^\]]*\]\()(?!https://)", rf"\1{source}/raw/v{version[0]}/", text)
    return re.sub(r"\]\((?!https://|#)", f"]({source}/blob/v{version[0]}/", text)


wheels = {"bdist_wheel": EveryPython, "build_py": Anew}
setup(
    distclass=Platform,
    long_description=description(),
    long_description_content_type="text/markdown",
    **(metal_extension() if sys.platform == "darwin" else {"cmdclass": wheels}),
)
