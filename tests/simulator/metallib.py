"""Kernels that Apple's compiler has made: in a .metallib, or in a program with Metal libraries inside.

A library begins with a head that says where its parts lie. Its list of functions has tagged fields for each:
NAME, MDSZ (the bytes of its bitcode), and OFFT, whose last number is where among all bitcode it begins.
"""

import mmap
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import build

_HEAD = b"MTLB\x01\x80"  # for macOS
_PARTS = struct.Struct("<9Q")  # the whole size; offset and size of functions, two kinds of metadata, bitcode
_PARTS_AT = 16


def kernels(file: Path, wanted: str = "") -> dict[str, bytes]:
    """{name: bitcode} of the functions in all Metal libraries of a file whose names match `wanted`; of equal
    names the last one's."""
    with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {
            name: data[begin : begin + size]
            for found in re.finditer(re.escape(_HEAD), data)
            for name, begin, size in _functions(data, found.start())
            if re.search(wanted, name)
        }


def _functions(data: mmap.mmap, start: int) -> Iterator[tuple[str, int, int]]:
    """Name, place and bytes of each function of the library at `start`."""
    _, functions, *_, bitcode, _ = _PARTS.unpack_from(data, start + _PARTS_AT)
    at = start + functions
    (count,) = struct.unpack_from("<I", data, at)
    at += 4
    for _ in range(count):
        (size,) = struct.unpack_from("<I", data, at)
        fields = dict(_fields(data, at + 4))
        (length,) = struct.unpack("<Q", fields[b"MDSZ"])
        *_, begin = struct.unpack("<3Q", fields[b"OFFT"])
        yield fields[b"NAME"].rstrip(b"\0").decode(), start + bitcode + begin, length
        at += size


def _fields(data: mmap.mmap, at: int) -> Iterator[tuple[bytes, bytes]]:
    while (tag := data[at : at + 4]) != b"ENDT":
        (size,) = struct.unpack_from("<H", data, at + 4)
        yield tag, data[at + 6 : at + 6 + size]
        at += 6 + size


def assembly(bitcodes: Mapping[str, bytes]) -> dict[str, str]:
    """{name: LLVM's text} of bitcode by name."""
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, f"{number}.bc") for number in range(len(bitcodes))]
        for file, bitcode in zip(files, bitcodes.values(), strict=True):
            file.write_bytes(bitcode)
        if files:
            build.run([build.tool("llvm-dis"), *files], "reading bitcode")
        texts = (file.with_suffix(".ll").read_text() for file in files)
        return dict(zip(bitcodes, texts, strict=True))
