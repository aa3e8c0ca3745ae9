"""Builds the wheel for macOS and the source distribution, and checks them.

The wheel has one Metal extension for each minor version of torch. On a Mac, torch's own way to compile
extensions builds each, in an environment with that torch. Elsewhere --cross takes the compiler of
scripts/macos/check_macos: the same files by the same steps, for tests; such a wheel was never run and must
not be published. --metallibs adds what `scripts/macos/compile_shaders --release` has compiled.
"""

import argparse
import hashlib
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from macholib import mach_o
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable

REPOSITORY = Path(__file__).resolve().parents[2]
OLDEST_MACOS = runpy.run_path(str(REPOSITORY / "torch_moe_mps" / "_versions.py"))["MACOS"]
TAG = f"py3-none-macosx_{OLDEST_MACOS[0]}_{OLDEST_MACOS[1]}_arm64"
# What the extension may need: torch, and what every Mac has. Nothing of Python, whatever its version.
NEEDED = re.compile(
    r"@rpath/lib(c10|torch|torch_cpu)\.dylib"
    r"|/System/Library/Frameworks/(Foundation|CoreFoundation|Metal)\.framework/.*"
    r"|/usr/lib/lib(System\.B|c\+\+\.1|objc\.A)\.dylib"
)
OF_PYTHON = re.compile(r"_{1,2}Py[A-Z_]|__Z.*(8pybind11|6python)")
CPU_ARM64 = 0x0100000C  # of a Mach-O header
# Of a code signature: Apple's cs_blobs.h.
CODE_DIRECTORY, AD_HOC, SHA256 = 0xFADE0C02, 0x2, 2
ADDRESSES = ("Source", "Documentation", "Issues", "Changelog")  # that PyPI's page needs
COMPILED = Path("torch_moe_mps", "shaders", "compiled")
MOST_BYTES = 100_000_000  # of a file on PyPI


class WheelError(RuntimeError):
    """Fault of a wheel, a library or a release; the text is for the user."""


def run(*command: object, cwd: Path = REPOSITORY, **variables: str) -> str:
    """The output of a command; WheelError with its messages where it fails or takes half an hour."""
    line, environment = [str(word) for word in command], {**os.environ, **variables}
    try:
        result = subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=environment, timeout=1800)
    except subprocess.TimeoutExpired as error:
        raise WheelError(str(error)) from None
    if result.returncode != 0:
        raise WheelError(f"{' '.join(line)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def copy_sources(folder: Path) -> Path:
    """A copy of the checkout's files: what an earlier build left there would get into the wheel."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


def build_wheel(sources: Path, folder: Path, python: str | Path = sys.executable) -> Path:
    """The wheel that pip builds for one Python and the torch in it; only on a Mac it has an extension."""
    folder.mkdir()
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    run(python, "-m", "pip", "wheel", *options, "--wheel-dir", folder, sources)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_sdist(sources: Path, output: Path) -> Path:
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    return output / run(sys.executable, "-c", code, output, cwd=sources).split()[-1]


def build_on_mac(version: str, sources: Path, folder: Path) -> Path:
    """The wheel with the extension for one minor version of torch, from a new environment."""
    environment = folder / f"torch{version}"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", f"torch=={version}.*", "setuptools>=77", "numpy", "ninja")
    return build_wheel(sources, folder / f"wheel{version}", python)


def cross_compile(version: str, folder: Path) -> Path:
    """The extension for one minor version of torch, by the compiler of scripts/macos/check_macos."""
    import macos

    return macos.build(macos.resolve(version), folder / library_name(version))


def library_name(version: str) -> str:
    return f"_C_torch{version.replace('.', '_')}.so"


def libraries_of(wheel: Path, folder: Path) -> list[Path]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        return [Path(archive.extract(name, folder)) for name in names]


def assemble(wheel: Path, libraries: Sequence[Path], output: Path, metallibs: Sequence[Path] = ()) -> Path:
    """The wheel with these libraries and the tag for Macs, in `output`."""
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", scratch)
        (content,) = Path(scratch).iterdir()
        for library in libraries:
            target = content / "torch_moe_mps" / library.name
            if not target.exists():
                shutil.copy(library, target)
        for library in metallibs:
            (content / COMPILED).mkdir(exist_ok=True)
            shutil.copy(library, content / COMPILED)
        packed = Path(scratch, "packed")
        packed.mkdir()
        run(sys.executable, "-m", "wheel", "pack", content, "--dest-dir", packed)
        (made,) = packed.iterdir()
        tags = dict(zip(("--python-tag", "--abi-tag", "--platform-tag"), TAG.split("-"), strict=True))
        words = [word for pair in tags.items() for word in pair]
        name = run(sys.executable, "-m", "wheel", "tags", "--remove", *words, made).split()[-1]
        return Path(shutil.copy(packed / name, output))


def check_wheel(wheel: Path, versions: Sequence[str]) -> None:
    """Raise WheelError unless names, tag, RECORD and every library are as they should be."""
    if not wheel.name.endswith(f"-{TAG}.whl"):
        raise WheelError(f"{wheel.name} is not for {TAG}")
    if wheel.stat().st_size > MOST_BYTES:
        raise WheelError(f"{wheel.name} has {wheel.stat().st_size} bytes, PyPI takes {MOST_BYTES}")
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", scratch)  # checks RECORD
        (content,) = Path(scratch).iterdir()
        (information,) = content.glob("*.dist-info")
        stated = re.findall(r"^Tag: (.*)$", (information / "WHEEL").read_text(), re.MULTILINE)
        if stated != [TAG]:
            raise WheelError(f"the file WHEEL of {wheel.name} has the tags {stated}, expected {TAG}")
        found = sorted(path.name for path in content.rglob("*.so"))
        expected = sorted(map(library_name, versions))
        if found != expected:
            raise WheelError(f"{wheel.name} has the libraries {found}, expected {expected}")
        for name in found:
            faults = library_faults(content / "torch_moe_mps" / name)
            if faults:
                raise WheelError(f"{name} in {wheel.name} {'; '.join(faults)}")


def library_faults(library: Path) -> list[str]:
    """Faults that keep a library from loading on a Mac with its version of torch, whatever the Python."""
    headers = MachO(str(library)).headers
    if [header.header.cputype for header in headers] != [CPU_ARM64]:
        return ["is not for arm64 alone"]
    (header,) = headers
    faults = []
    commands = {type(command): command for _, command, _ in header.commands}
    version = commands.get(mach_o.build_version_command)
    oldest = (version.minos >> 16, version.minos >> 8 & 0xFF) if version else None
    if oldest != OLDEST_MACOS:
        faults.append(f"needs macOS {oldest}, expected {OLDEST_MACOS}")
    if header.header.filetype != mach_o.MH_BUNDLE:
        faults.append("is no bundle: it has an install name, by which another library could be taken for it")
    for _, _, name in header.walkRelocatables():
        if not NEEDED.fullmatch(name):
            faults.append(f"needs {name}")
    symbols = [name.decode() for _, name in SymbolTable(MachO(str(library))).undefsyms]
    faults += [f"imports {name} of Python" for name in symbols if OF_PYTHON.match(name)]
    return faults + signature_faults(library, header)


def signature_faults(library: Path, header: object) -> list[str]:
    """Apple silicon loads no code without a signature; one of no one in particular (ad hoc) is enough."""
    places = [command for load, command, _ in header.commands if load.cmd == mach_o.LC_CODE_SIGNATURE]
    if not places:
        return ["has no signature"]
    content = library.read_bytes()
    start = places[0].dataoff
    _, _, blobs = struct.unpack_from(">3I", content, start)
    for index in range(blobs):
        _, offset = struct.unpack_from(">2I", content, start + 12 + 8 * index)
        directory = start + offset
        fields = struct.unpack_from(">9I4BI", content, directory)
        magic, _, _, flags, hashes, _, _, slots, limit, size, kind, _, page_bits, _ = fields
        if magic == CODE_DIRECTORY:
            if not flags & AD_HOC or kind != SHA256:
                return ["has a signature that is not ad hoc, or without SHA-256"]
            page = 1 << page_bits
            for slot in range(slots):
                digest = hashlib.sha256(content[slot * page : min((slot + 1) * page, limit)]).digest()
                place = directory + hashes + slot * size
                if digest != content[place : place + size]:
                    return [f"was changed after it was signed (page {slot})"]
            return []
    return ["has a signature without a code directory"]


def release_faults(tag: str) -> list[str]:
    """Steps that were forgotten before the release with this tag."""
    version = re.search(r'^__version__ = "(.*)"$', _read("torch_moe_mps/__init__.py"), re.MULTILINE)[1]
    faults = []
    if tag != f"v{version}":
        faults.append(f"the tag is {tag}, the version of torch_moe_mps is {version}")
    if not re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", _read("CHANGELOG.md"), re.MULTILINE
    ):
        faults.append(f"CHANGELOG.md has no date for {version}")
    addresses = tomllib.loads(_read("pyproject.toml")).get("project", {}).get("urls", {})
    if missing := [name for name in ADDRESSES if name not in addresses]:
        faults.append(f"pyproject.toml has no address for {', '.join(missing)}")
    return faults


def _read(name: str) -> str:
    return (REPOSITORY / name).read_text()


def main() -> int:
    from macos import SUPPORTED

    parser = argparse.ArgumentParser(prog="build_wheel", description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", default=SUPPORTED, metavar="VERSION", help="minor versions")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "dist", help="folder, dist unless given")
    parser.add_argument("--cross", action="store_true", help="without a Mac, for tests")
    parser.add_argument("--metallibs", type=Path, metavar="FOLDER", help="compiled shaders to add")
    parser.add_argument("--release", metavar="TAG", help="first check that a release can have this tag")
    options = parser.parse_args()
    if not options.cross and sys.platform != "darwin":
        parser.error("this needs a Mac; elsewhere --cross builds a wheel for tests")
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        faults = release_faults(options.release) if options.release else []
        if faults:
            raise WheelError("; ".join(faults))
        metallibs = _metallibs(options.metallibs)
        made = build(options.torch, options.output, options.cross, metallibs)
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*made, sep="\n")
    return 0


def _metallibs(folder: Path | None) -> list[Path]:
    found = [] if folder is None else sorted(folder.glob("*.metallib"))
    if folder is not None and not found:
        raise WheelError(f"{folder} has no compiled shaders")
    return found


def build(versions: Sequence[str], output: Path, cross: bool, metallibs: Sequence[Path] = ()) -> list[Path]:
    """The wheel and the source distribution in `output`, checked."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sources = copy_sources(folder / "sources")
        if cross:
            wheel = build_wheel(sources, folder / "wheel")
            libraries = [cross_compile(version, folder) for version in versions]
        else:
            wheels = [build_on_mac(version, sources, folder) for version in versions]
            libraries = [library for wheel in wheels for library in libraries_of(wheel, folder)]
            wheel = wheels[0]
        made = [assemble(wheel, libraries, output, metallibs), build_sdist(sources, output)]
    check_wheel(made[0], versions)
    return made


if __name__ == "__main__":
    sys.exit(main())
