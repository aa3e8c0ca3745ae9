"""Registers of kernels on the GPUs of M1 to M5, as Apple's own compiler allocates them.

Xcode's `metal-tt` runs the back end for any generation, on a Mac without such a GPU, too. It writes a
Mach-O file whose section __GPU_METADATA is a FlatBuffer: field 0 of its root is a table, whose field 0 is the
number of registers of a thread, and field 14 the bytes that a thread spills to memory. Apple documents
neither: both were read off such files by independent studies. A file without them is an error here, never 0.
"""

import json
import runpy
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paths import REPOSITORY

# The package itself imports torch.
MACOS = runpy.run_path(str(REPOSITORY / "torch_moe_mps" / "_versions.py"))["MACOS"]

# The options of compile_options() in csrc/metal/library.mm: safe math, and the languages.
COMPILER = ("xcrun", "-sdk", "macosx", "metal", "-fno-fast-math", "-Wmetal-addr-spaces", "-c")
LINKER = ("xcrun", "-sdk", "macosx", "metallib")
LANGUAGE = ("-std=metal3.1", "-mmacosx-version-min={}.{}".format(*MACOS))
LANGUAGE_WITH_TENSORS = ("-std=metal4.0",)
SDK_WITH_TENSORS = 26


class Generation(NamedTuple):
    """GPUs of one architecture, as metal-tt names it, and of one family of Metal's, Apple7 to Apple10."""

    architecture: str
    family: int


GENERATIONS = {
    "M1": Generation("applegpu_g13s", 7),
    "M2": Generation("applegpu_g14s", 8),
    "M3": Generation("applegpu_g15s", 9),
    "M4": Generation("applegpu_g16s", 9),
    "M5": Generation("applegpu_g17s", 10),
}
TENSOR_FAMILY = 10  # the first one with tensor units
BACK_END = ("xcrun", "metal-tt")
SECTION = b"__GPU_METADATA"
THREADS = 384  # asked for where a kernel declares no bound: the least that the compiler may allow
_FAT = {0xCAFEBABE: ">IIIII", 0xCAFEBABF: ">IIQQII"}  # {magic: an entry of its table}
_MACHO = 0xFEEDFACF
_SEGMENT = 0x19  # LC_SEGMENT_64


class Use(NamedTuple):
    """Resources of a kernel's thread: 32-bit registers, and bytes of memory for values that did not fit."""

    registers: int
    spilled: int


def use_of(binary: bytes) -> Use:
    """The registers and spills of the one kernel in a file of metal-tt's.

    Raises: ValueError for another file, naming its contents.
    """
    sections = dict(_sections(binary))
    if SECTION not in sections:
        names = ", ".join(name.decode() for name in sections) or "none"
        raise ValueError(f"metal-tt's file must have a section {SECTION.decode()}, got {names}")
    data = sections[SECTION]
    try:
        root = _Table(data, struct.unpack_from("<I", data)[0])
        kernel = _Table(data, root.reference(0))
        return Use(kernel.number(0), kernel.number(14))
    except struct.error as error:
        raise ValueError(
            f"{SECTION.decode()} must be a FlatBuffer, got {len(data)} bytes ({error})"
        ) from None


def _sections(binary: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(name, content) of each section of a Mach-O file, or of each file in a universal one."""
    try:
        (magic,) = struct.unpack_from(">I", binary)
        if magic in _FAT:
            (count,) = struct.unpack_from(">I", binary, 4)
            size = struct.calcsize(_FAT[magic])
            for i in range(count):
                _, _, offset, length, *_ = struct.unpack_from(_FAT[magic], binary, 8 + i * size)
                yield from _sections(binary[offset : offset + length])
            return
        magic, _, _, _, commands, *_ = struct.unpack_from("<8I", binary)
        if magic != _MACHO:
            raise ValueError(f"metal-tt's file must be a Mach-O file of 64 bits, got magic {magic:#x}")
        place = 32
        for _ in range(commands):
            command, length = struct.unpack_from("<II", binary, place)
            if command == _SEGMENT:
                (count,) = struct.unpack_from("<I", binary, place + 64)
                for i in range(count):
                    fields = struct.unpack_from("<16s16sQQI", binary, place + 72 + 80 * i)
                    name, size, offset = fields[0].rstrip(b"\0"), fields[3], fields[4]
                    yield name, binary[offset : offset + size]
            place += length
    except struct.error as error:
        raise ValueError(f"metal-tt must write a Mach-O file, got {len(binary)} bytes ({error})") from None


class _Table:
    """A table of a FlatBuffer: a number of fields, some of them absent."""

    def __init__(self, data: bytes, place: int):
        self.data, self.place = data, place
        (back,) = struct.unpack_from("<i", data, place)
        self.fields = place - back
        self.size, self.length = struct.unpack_from("<HH", data, self.fields)

    def _offset(self, field: int) -> int:
        """Offset of a field in the table, or 0 if absent."""
        entry = 4 + 2 * field
        return struct.unpack_from("<H", self.data, self.fields + entry)[0] if entry < self.size else 0

    def reference(self, field: int) -> int:
        """Position of the table that a field refers to. Raises: ValueError if the field is absent."""
        if not (offset := self._offset(field)):
            raise ValueError(f"{SECTION.decode()} must have field {field} in its root, got none")
        return self.place + offset + struct.unpack_from("<I", self.data, self.place + offset)[0]

    def number(self, field: int) -> int:
        """Unsigned integer that extends to the next field, or 0 if absent."""
        if not (offset := self._offset(field)):
            return 0
        begins = [self._offset(other) for other in range((self.size - 4) // 2)]
        room = min([begin for begin in begins if begin > offset], default=self.length) - offset
        width = max(width for width in (1, 2, 4) if width <= room)
        return int.from_bytes(self.data[self.place + offset :][:width], "little")


def sdk_version() -> int:
    """The major version of the SDK; 0 without one."""
    try:
        command = ("xcrun", "-sdk", "macosx", "--show-sdk-version")
        text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except OSError:
        return 0
    return int(text.partition(".")[0].strip() or 0)


def compile_source(source: Path, has_tensors: bool) -> str:
    """The compiler's message about a source that it refuses; empty if it takes it."""
    language = LANGUAGE_WITH_TENSORS if has_tensors else LANGUAGE
    return said(*COMPILER, source, "-o", source.with_suffix(".air"), *language)


def link(source: Path, target: Path) -> str:
    """The linker's message about a compiled source that it refuses; empty if the library is written."""
    return said(*LINKER, source.with_suffix(".air"), "-o", target)


def said(*command: object) -> str:
    """The message of a program that fails; empty if it succeeds."""
    try:
        result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return "no end after 600 s"
    return "" if result.returncode == 0 else result.stderr or f"exit code {result.returncode}"


def compiled(kernel: str, threads: int, library: Path, architecture: str) -> Use:
    """A kernel as the back end has it for a GPU. Raises: ValueError with what the back end says."""
    pipeline = {"compute_function": kernel, "max_total_threads_per_threadgroup": threads or THREADS}
    with tempfile.TemporaryDirectory() as folder:
        asked, target = Path(folder, "pipelines.mtlp-json"), Path(folder, "kernel.gpubin")
        asked.write_text(json.dumps({"pipelines": {"compute_pipelines": [pipeline]}}))
        if refused := said(*BACK_END, "-arch", architecture, "-o", target, asked, library):
            raise ValueError(refused.strip().replace("\n", "; "))
        return use_of(target.read_bytes())


def of_library(source: Path, has_tensors: bool, kernels: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """{kernel: {generation: its registers and spills, or the error}} of a Metal source, compiled beside it.

    Args:
        kernels: {name: the most threads that it declares, or 0}.

    Raises: ValueError with what the compiler says of a source that it refuses.
    """
    library = source.with_suffix(".metallib")
    if refused := compile_source(source, has_tensors) or link(source, library):
        raise ValueError(refused)
    table: dict[str, dict[str, Any]] = {}
    for kernel, threads in kernels.items():
        table[kernel] = row = {}
        for generation, (architecture, family) in GENERATIONS.items():
            if has_tensors and family < TENSOR_FAMILY:
                continue
            try:
                row[generation] = compiled(kernel, threads, library, architecture)._asdict()
            except (OSError, ValueError) as error:
                row[generation] = {"error": str(error)}
    return table
