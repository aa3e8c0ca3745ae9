"""Writes tests/simulator/aten.json: what torch's own operators do on a Mac, found in its wheels.

`scripts/macos/aten_table [VERSION ...]`. For each operator with a kernel for mps, the code that its wrapper
reaches is read, up to where another operator is called:

    kernel        it encodes a Metal kernel of torch's
    graph         it runs MPSGraph, which ends the encoder; with `kernel`, one or the other
    waits         it waits for the GPU: `commitAndWait`, on some path
    commits       it gives the command buffer to the GPU
    threadgroup   the most bytes of threadgroup memory that a kernel whose name it has declares
    host          it makes a buffer of the host's own, for a number or bytes
    reads         it calls an operator whose value the host waits for, on some path
"""

import argparse
import json
import mmap
import re
import struct
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import macos
import torch
from simulator import metallib
from simulator.aten import TABLE, row_of
from simulator.build import run, tool

READS = {"item", "_local_scalar_dense", "equal", "is_nonzero", "nonzero"}
VERSIONS = ("2.13.0", "2.14.1", "2.15.0")
_COMMIT, COMMIT_AND_WAIT, _COMMIT_AND_CONTINUE = 1, 2, 3  # at::mps::SyncType
_TARGET = (1 << 36) - 1  # of a pointer in a file; the rest is a chain
_GRAPH = re.compile(
    r"^at::native::mps::runMPSGraph\(|^at::mps::MPSStream::executeMPSGraph\(|encodeToCommandBuffer"
)
_KERNEL = re.compile(
    r"^at::mps::MPSStream::commandEncoder|^at::native::mps::MetalShaderLibrary::exec_|"
    r"^at::native::mps::MetalKernelFunction::|MetalKernelFunction::dispatch"
)
WAITS = re.compile(r"_objc_msgSend\$waitUntilCompleted|MPSStream::commitAndWait|MPSHooks::deviceSynchronize")
_HOST = re.compile(r"allocScalarBufferWithValue|newBufferWithBytes|getMPSGraphTensorFromScalar")
OPERATOR = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\(")
# The end of what is read: containers, errors, other devices, and what each operator does.
_ENDS = re.compile(
    r"^(std::|c10::|void std::|at::_ops::|torch::|fmt::|operator |at::mps::MPSStream::|"
    r"at::mps::HeapAllocator|at::mps::Profiler|at::native::mps::MetalShaderLibrary::|at::native::mps::MetalKernelFunction|"
    r"at::native::DispatchStubImpl|at::TensorIterator|at::TensorBase::|at::Tensor::|at::Context)"
)


class Library:
    """The functions of a library of torch's for arm64, as far as their calls go."""

    def __init__(self, path: Path):
        self.path = path
        with self.path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        sections = [*self._read_sections()]
        self._ranges = [(start, start + size, at) for _, start, size, at in sections]
        self._sections = {name: (start, size, at) for name, start, size, at in sections}
        listed = run([tool("llvm-nm"), "-n", "--defined-only", self.path], "listing symbols").splitlines()
        fields = [line.split(" ", 2) for line in listed]
        mangled = "\n".join(name for _, _, name in fields)
        self.names: dict[int, str] = {}
        for (address, _, _), name in zip(fields, demangled(mangled), strict=True):
            self.names.setdefault(int(address, 16), name)
        self._starts = sorted(self.names)

    def _read_sections(self) -> Iterator[tuple[str, int, int, int]]:
        """(name, address, bytes, place in the file)"""
        (commands,) = struct.unpack_from("<I", self.data, 16)
        at = 32
        for _ in range(commands):
            kind, size = struct.unpack_from("<II", self.data, at)
            if kind == 0x19:  # LC_SEGMENT_64
                (count,) = struct.unpack_from("<I", self.data, at + 64)
                for number in range(count):
                    place = at + 72 + 80 * number
                    name = self.data[place : place + 16].rstrip(b"\0").decode()
                    address, length, offset = struct.unpack_from("<QQI", self.data, place + 32)
                    yield name, address, length, offset
            at += size

    def _in(self, section: str, address: int) -> int | None:
        start, size, at = self._sections[section]
        return address - start + at if start <= address < start + size else None

    def text(self, address: int) -> str | None:
        """The string at an address."""
        place = self._in("__cstring", address)
        if place is None:
            return None
        return self.data[place : self.data.find(b"\0", place)].decode(errors="replace")

    def pointer(self, address: int) -> int | None:
        """The address at an address of data, which the loader moves."""
        for first, end, at in self._ranges:
            if first <= address < end:
                (word,) = struct.unpack_from("<Q", self.data, address - first + at)
                return word & _TARGET
        return None

    def references(self, start: int) -> Iterator[tuple[int, dict[int, int]]]:
        """(address that the function calls or takes, {register: small number in it})"""
        end = self._starts[bisect_right(self._starts, start)]
        pages: dict[int, int] = {}
        numbers: dict[int, int] = {}
        for word, address in self.words(start):
            if word & 0x7C000000 == 0x14000000:  # b, bl
                target = address + 4 * ((word & 0x3FFFFFF) - ((word & 0x2000000) << 1))
                if not start <= target < end:
                    yield target, numbers
            elif word & 0x9F000000 == 0x90000000:  # adrp
                pages[word & 31] = _page(word, address)
            elif word & 0xFFC00000 == 0x91000000 and word >> 5 & 31 in pages:  # add, of a page
                yield pages[word >> 5 & 31] + (word >> 10 & 0xFFF), {}
            elif word & 0x7FE00000 == 0x52800000:  # movz
                numbers[word & 31] = word >> 5 & 0xFFFF

    def _stores(self, start: int) -> Iterator[tuple[int, int]]:
        """(stub, what a function stores in it for mps)"""
        registers: dict[int, int] = {}
        for word, address in self.words(start):
            if word & 0x9F000000 == 0x90000000:
                registers[word & 31] = _page(word, address)
            elif word & 0xFFC00000 == 0x91000000:
                registers[word & 31] = registers.get(word >> 5 & 31, 0) + (word >> 10 & 0xFFF)
            elif word & 0xFFC00000 == 0xF9000000:  # str
                place = registers.get(word >> 5 & 31, 0) + 8 * (word >> 10 & 0xFFF)
                yield place - 24, registers.get(word & 31, 0)

    def words(self, start: int) -> Iterator[tuple[int, int]]:
        """(instruction, its address) of a function."""
        end = self._starts[bisect_right(self._starts, start)]
        place = self._in("__text", start)
        if place is not None:
            words = struct.iter_unpack("<I", self.data[place : place + end - start])
            yield from ((word, start + 4 * index) for index, (word,) in enumerate(words))

    @cached_property
    def wrappers(self) -> dict[str, int]:
        """{name: address} of what the dispatcher calls for mps."""
        own: dict[str, int] = {}
        inlined: dict[str, int] = {}
        for address, name in self.names.items():
            if "wrapper_MPS_" not in name or "[clone" in name:
                continue
            if match := re.match(r"at::[^<]*wrapper_MPS_(\w+)\(", name):
                own.setdefault(match[1], address)
            elif match := re.match(r"c10::impl::wrap_kernel_functor_unboxed_<.*?wrapper_MPS_(\w+)", name):
                inlined.setdefault(match[1], address)
        return inlined | own

    @cached_property
    def stubs(self) -> dict[int, int]:
        """{stub of a kernel that devices share: the function of mps}"""
        found = {}
        for start, name in self.names.items():
            if name.startswith("__GLOBAL__sub_I_") and name.endswith(".mm"):
                for stub, function in self._stores(start):
                    if self.names.get(stub, "").endswith("_stub"):
                        found[stub] = function
        return found

    def reached(
        self, start: int, ends: re.Pattern[str] = _ENDS
    ) -> Iterator[tuple[str, int | None, dict[int, int]]]:
        """(name of a function, or a string; its address; numbers in registers) that a function reaches."""
        seen, todo = {start}, [start]
        while todo:
            for address, numbers in self.references(todo.pop()):
                name = self.names.get(address)
                if name is None:
                    if (text := self.text(address)) is not None:
                        yield "text: " + text, None, {}
                    continue
                yield name, address, numbers
                address = self.stubs.get(address, address)
                if address not in seen and not ends.match(self.names.get(address, "")):
                    seen.add(address)
                    todo.append(address)


def _page(word: int, address: int) -> int:
    """The page that adrp computes."""
    pages = (word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3
    return (address & ~0xFFF) + ((pages - ((pages & 0x100000) << 1)) << 12)


def torch_cpu(version: str) -> Library:
    return Library(macos.torch_wheel(version) / "lib" / "libtorch_cpu.dylib")


def demangled(names: str) -> list[str]:
    """Names of C++, a line each, as people write them."""
    command = [str(tool("llvm-cxxfilt")), "--strip-underscore"]
    return subprocess.run(
        command, input=names, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def memory_of_kernels(library: Library) -> dict[str, int]:
    """{kernel: bytes of threadgroup memory that it declares}"""
    bitcodes = metallib.kernels(library.path)
    memory = {}
    names = sorted(bitcodes)
    for first in range(0, len(names), 500):
        part = {name: bitcodes[name] for name in names[first : first + 500]}
        for name, text in metallib.assembly(part).items():
            memory[name] = sum(
                _bytes(t) for t in re.findall(r"addrspace\(3\) global (.+?) (?:undef|zeroinit)", text)
            )
    return memory


_SIZES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4, "i64": 8, "i1": 1}


def _bytes(kind: str) -> int:
    """Size of a type of LLVM's, arrays and vectors among them."""
    if match := re.fullmatch(r"[\[<](\d+) x (.+)[\]>]", kind):
        return int(match[1]) * _bytes(match[2])
    return _SIZES.get(kind, 0)


def row(library: Library, wrapper: str, memory: dict[str, int]) -> dict[str, Any]:
    """The row of a wrapper."""
    found: dict[str, Any] = defaultdict(bool)
    bytes_ = 0
    for name, _, numbers in library.reached(library.wrappers[wrapper]):
        if name.startswith("text: "):
            pattern = name.removeprefix("text: ")
            if len(pattern) > 5 and re.fullmatch(r"[a-z][\w{}:]*", pattern):
                bytes_ = max([bytes_, *_memory(pattern, memory)])
            continue
        found["graph"] |= bool(_GRAPH.search(name))
        found["kernel"] |= bool(_KERNEL.search(name))
        found["waits"] |= bool(WAITS.search(name))
        found["host"] |= bool(_HOST.search(name))
        if name.startswith("at::mps::MPSStream::synchronize("):
            found["waits"] |= numbers.get(1) == COMMIT_AND_WAIT
            found["commits"] |= numbers.get(1) in (_COMMIT, _COMMIT_AND_CONTINUE)
        if name.startswith("at::mps::MPSStream::copy_and_sync("):
            found["commits"] = True
        if match := OPERATOR.match(name):
            found["reads"] |= match[1].removesuffix("_out") in READS
    made: dict[str, Any] = {key: True for key, value in found.items() if value}
    if bytes_:
        made["threadgroup"] = bytes_
    return made


_matched: dict[str, list[int]] = {}


def _memory(pattern: str, memory: dict[str, int]) -> list[int]:
    if pattern not in _matched:
        wanted = re.compile(
            "".join(r"\w*" if "{" in p else re.escape(p) for p in re.split(r"(\{[^}]*\})", pattern))
        )
        match = wanted.fullmatch if "{" in pattern else wanted.match
        _matched[pattern] = [size for name, size in memory.items() if size and match(name)]
    return _matched[pattern]


def by_operators(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{operator: its row} of rows by wrappers, which are named by the operator in one of two orders.

    An operator that returns its results has the row of the one that writes them where it has none.
    """
    made: dict[str, dict[str, Any]] = {}
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("aten::")]
    for schema in sorted(schemas, key=lambda each: each.is_mutable):
        base, overload = schema.name.removeprefix("aten::"), schema.overload_name
        names = (f"{base}_{overload}" if overload else base, f"{overload}_{base}", f"{overload}_{base}_out")
        found = [rows[name] for name in names if name in rows]
        if found:
            full_name = f"aten::{base}" + (f".{overload}" if overload else "")
            made.setdefault(row_of(full_name), found[0])
    return dict(sorted(made.items()))


def rows_of(version: str) -> dict[str, dict[str, Any]]:
    """{operator: its row} of a version of torch."""
    library = torch_cpu(version)
    memory = memory_of_kernels(library)
    _matched.clear()
    return by_operators({name: row(library, name, memory) for name in library.wrappers})


def main() -> int:
    parser = argparse.ArgumentParser(prog="aten_table", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=VERSIONS)
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for version in parser.parse_args().versions:
        table[version] = rows_of(version)
        print(f"torch {version}: {len(table[version])} operators", flush=True)
    TABLE.write_text(as_text(table))
    return 0


def as_text(table: dict[str, dict[str, dict[str, Any]]]) -> str:
    """JSON with a line for each operator."""
    versions = []
    for version, rows in sorted(table.items()):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in rows.items())
        versions.append(f" {json.dumps(version)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(versions) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
