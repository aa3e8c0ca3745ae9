"""The wheel for macOS, built with the cross-compiler, and the checks that a release has to pass."""

import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools.command.bdist_wheel  # before a test pretends to be on a Mac
import torch.utils.cpp_extension
from setuptools.dist import Distribution
from support import installed
from support.installed import build_wheel
from support.processes import REPOSITORY

if sys.platform == "darwin":
    pytest.skip("a Mac builds its own wheel", allow_module_level=True)

import macos

MINORS = ("2.13", "2.14")


SMALL = """
#include <string>
namespace at::mps { class MPSStream; MPSStream* getCurrentMPSStream(); }
extern "C" void* PyInit__C() { return at::mps::getCurrentMPSStream(); }
std::string text(long number) { return std::to_string(number); }
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory) -> Path:
    """An extension of one small source for the torch of the tests."""
    folder = tmp_path_factory.mktemp("macos")
    source = folder / "small.mm"
    source.write_text(SMALL)
    return macos.build(macos.DEFAULT, folder / "_C_torch2_13.so", [source])


@pytest.fixture
def wheel(tmp_path_factory, extension) -> Path:
    """Of one torch's extension under two names: a wheel for as many versions."""
    folder = tmp_path_factory.mktemp("dist")
    other = shutil.copy(extension, extension.with_name("_C_torch2_14.so"))
    return build_wheel.assemble(installed.wheel(tmp_path_factory), [extension, Path(other)], folder)


def test_the_wheel(wheel):
    """Where the extension is the package's own, test_macos.py has the same faults of its symbols."""
    build_wheel.check_wheel(wheel, MINORS)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert {
        "torch_moe_mps/_C_torch2_13.so",
        "torch_moe_mps/_C_torch2_14.so",
        "torch_moe_mps_command.py",
    } < names
    shaders = (REPOSITORY / "torch_moe_mps" / "shaders").rglob("*.*")
    assert {str(path.relative_to(REPOSITORY)) for path in shaders} < names
    assert not [name for name in names if re.search(r"csrc|tests|\.mm$", name)]
    assert "Requires-Dist: torch<2.16,>=2.13\n" in metadata
    links = re.findall(r"\]\(([^)]*)\)", metadata)
    are_absolute = all(link.startswith(("https://", "#")) for link in links)
    has_address = "[project.urls]" in (REPOSITORY / "pyproject.toml").read_text()
    assert len(links) > 5 and are_absolute == has_address


def test_compiled_shaders_lie_beside_their_sources(extension, tmp_path, tmp_path_factory, monkeypatch):
    """RECORD has them; a wheel that PyPI would not take, and a folder without any, are one line."""
    library = tmp_path / "norms_bf16-0123456789abcdef.metallib"
    library.write_bytes(b"MTLB")
    (tmp_path / "dist").mkdir()
    plain = installed.wheel(tmp_path_factory)
    made = build_wheel.assemble(plain, [extension], tmp_path / "dist", build_wheel._metallibs(tmp_path))
    build_wheel.check_wheel(made, MINORS[:1])
    with zipfile.ZipFile(made) as archive:
        assert archive.read(f"torch_moe_mps/shaders/compiled/{library.name}") == b"MTLB"
    with pytest.raises(build_wheel.WheelError, match="dist has no compiled shaders"):
        build_wheel._metallibs(tmp_path / "dist")
    monkeypatch.setattr(build_wheel, "MOST_BYTES", 1000)
    with pytest.raises(build_wheel.WheelError, match=r"\.whl has \d+ bytes, PyPI takes 1000"):
        build_wheel.check_wheel(made, MINORS[:1])


def test_wheels_that_must_not_be_published(wheel, tmp_path, tmp_path_factory):
    def refused(path, message, versions=MINORS):
        with pytest.raises(build_wheel.WheelError, match=message):
            build_wheel.check_wheel(path, versions)

    refused(installed.wheel(tmp_path_factory), r"linux\S+\.whl is not for py3-none-macosx_14_0_arm64")
    refused(wheel, r"has the libraries \[.*2_13.so', .*\], expected \[.*2_15.so", (*MINORS, "2.15"))
    renamed = shutil.copy(installed.wheel(tmp_path_factory), tmp_path / wheel.name)
    refused(Path(renamed), r"has the tags \['py3-none-linux_x86_64'\]")
    changed = tmp_path / "changed" / wheel.name
    changed.parent.mkdir()
    with zipfile.ZipFile(shutil.copy(wheel, changed), "a") as archive:
        archive.writestr("torch_moe_mps/more.py", "")
    refused(changed, "wheel unpack .* failed(.|\n)*No hash found for file 'torch_moe_mps/more.py'")


def check_symbols(extension: Path) -> None:
    """Symbols are those of torch, Objective-C, C and C++ alone: the linker names the library of each."""
    assert build_wheel.library_faults(extension) == []
    symbols = macos.run([macos.tool("llvm-nm"), "-m", "-u", extension], "listing symbols")
    assert "(from libtorch_cpu)" in symbols and "Py" not in re.sub(r"__Z\S*", "", symbols)


def test_an_extension_for_every_python(extension):
    check_symbols(extension)


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """Links a function that calls one of Python's, with these options of the linker."""
    folder = tmp_path_factory.mktemp("small")
    source, binary = folder / "small.c", folder / "small.o"
    source.write_text("extern long PyLong_AsLong(void*); long f(void* p) { return PyLong_AsLong(p); }\n")
    macos.run([macos.zig() / "zig", "cc", "-target", macos.TARGET, "-c", source, "-o", binary], "compiling")

    def run(*options: object, oldest: str = "14.0", name: str = "small.so") -> Path:
        library = folder / name
        command = [macos.tool("ld64.lld"), "-arch", "arm64", "-platform_version", "macos", oldest, oldest]
        command += ["-undefined", "dynamic_lookup", "-o", library, binary, *options]
        macos.run([*command, f"-L{macos.system_library().parent}", "-lSystem"], "linking")
        return library

    return run


PYTHON = "imports _PyLong_AsLong of Python"


def test_faults_of_libraries(link, extension, tmp_path):
    faults = build_wheel.library_faults
    assert faults(link("-bundle")) == [PYTHON]
    assert faults(link("-bundle", oldest="15.2")) == ["needs macOS (15, 2), expected (14, 0)", PYTHON]
    assert faults(link("-bundle", "-no_adhoc_codesign")) == [PYTHON, "has no signature"]
    other = link("-dylib", "-install_name", "/build/other.dylib", name="other.dylib")
    assert faults(other)[0].startswith("is no bundle: it has an install name")
    assert faults(link("-bundle", other)) == ["needs /build/other.dylib", PYTHON]
    changed = bytearray(extension.read_bytes())
    changed[len(changed) // 2] ^= 1
    (tmp_path / "changed.so").write_bytes(changed)
    (fault,) = faults(tmp_path / "changed.so")
    assert re.fullmatch(r"was changed after it was signed \(page \d+\)", fault)


def test_the_source_distribution(tmp_path):
    sources = build_wheel.copy_sources(tmp_path / "sources")
    path = build_wheel.build_sdist(sources, tmp_path)
    shutil.unpack_archive(path, tmp_path / "unpacked")
    (root,) = (tmp_path / "unpacked").iterdir()
    wanted = [
        path.relative_to(REPOSITORY)
        for path in (REPOSITORY / "torch_moe_mps").rglob("*.*")
        if path.suffix in (".mm", ".h", ".metal", ".py", ".txt")
    ]
    assert len(wanted) > 100
    assert not [
        name for name in [*wanted, "torch_moe_mps_command.py", "setup.py"] if not (root / name).exists()
    ]


def test_what_a_mac_builds(monkeypatch):
    """One library for a version of torch, whatever the Python, not linked with torch's library for Python."""
    made = {}
    monkeypatch.setattr(setuptools, "setup", made.update)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("ARCHFLAGS", "-arch arm64")  # which setup.py would set
    monkeypatch.chdir(REPOSITORY)
    exec(compile((REPOSITORY / "setup.py").read_text(), "setup.py", "exec"), {})
    (extension,) = made["ext_modules"]
    assert extension.libraries == ["c10", "torch", "torch_cpu"]
    distribution = Distribution({key: made[key] for key in ("ext_modules", "cmdclass")})
    command = distribution.get_command_obj("build_ext")
    command.finalize_options()
    major, minor = torch.__version__.split(".")[:2]
    assert command.get_ext_filename(extension.name) == f"torch_moe_mps/_C_torch{major}_{minor}.so"
    wheels = distribution.get_command_obj("bdist_wheel")
    wheels.ensure_finalized()
    assert "-".join(wheels.get_tag()) == build_wheel.TAG
    monkeypatch.setattr(torch.utils.cpp_extension, "is_ninja_available", lambda: False)
    exec(compile((REPOSITORY / "setup.py").read_text(), "setup.py", "exec"), {})
    with pytest.raises(SystemExit) as ended:
        Distribution({key: made[key] for key in ("ext_modules", "cmdclass")}).run_command("build_ext")
    assert str(ended.value) == (
        'torch_moe_mps: the build needs ninja, got none: run `pip install "setuptools>=77" ninja` first'
    )


def test_an_older_setuptools(monkeypatch):
    """Which has neither what setup.py imports nor what pyproject.toml says."""
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit) as ended:
        exec(compile((REPOSITORY / "setup.py").read_text(), "setup.py", "exec"), {})
    assert str(ended.value) == (
        "torch_moe_mps: the build needs setuptools 77 or newer, got 65.5.0: "
        'run `pip install "setuptools>=77" ninja` first'
    )


def test_what_is_forgotten_before_a_release(monkeypatch, tmp_path):
    monkeypatch.setattr(build_wheel, "REPOSITORY", tmp_path)
    files = {
        "torch_moe_mps/__init__.py": '__version__ = "1.2.0"\n',
        "CHANGELOG.md": "## 1.2.0 (unreleased)\n",
        "pyproject.toml": '[project.urls]\nSource = "https://example.com"\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert build_wheel.release_faults("v1.3.0") == [
        "the tag is v1.3.0, the version of torch_moe_mps is 1.2.0",
        "CHANGELOG.md has no date for 1.2.0",
        "pyproject.toml has no address for Documentation, Issues, Changelog",
    ]
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.0 (2027-01-31)\n")
    addresses = [f'{name} = "https://example.com"' for name in build_wheel.ADDRESSES]
    (tmp_path / "pyproject.toml").write_text("\n".join(["[project.urls]", *addresses]))
    assert build_wheel.release_faults("v1.2.0") == []
