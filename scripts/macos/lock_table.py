"""Writes tests/pinned/locked.txt: functions of torch's Python that may wait for the GPU with Python's lock.

`scripts/macos/lock_table [VERSION ...]`, found in torch's wheels for macOS. While one of them waits, no other
thread of Python's runs, nor does one that the GPU waits for. A function is read in the order of its
instructions: it holds the lock up to where it saves the thread's state. Left out are compilers and exporters.

The first line of a version names the operators that take a number from the pool of scalars. Giving it back
waits for the stream's queue, and so for whoever waits in it for the GPU. A function that calls one of them
with the lock held has it among what it may wait in.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import macos
from aten_table import (
    COMMIT_AND_WAIT,
    OPERATOR,
    READS,
    VERSIONS,
    WAITS,
    Library,
    by_operators,
    demangled,
    torch_cpu,
)
from simulator import aten
from simulator.build import run, tool
from support.pinned import pinned

PINNED = Path(__file__).parents[2] / "tests" / "pinned" / "locked.txt"
_HOOKS = "at::detail::getMPSHooks()"
_NEAR = 64  # bytes of instructions between that and the call of a hook
_RELEASES = re.compile(r"^_PyEval_SaveThread$|gil_scoped_release::gil_scoped_release")
_TAKES = re.compile(
    r"^_PyEval_RestoreThread$|^_PyGILState_Ensure$|gil_scoped_release::~|gil_scoped_acquire::gil_scoped"
)
# Functions that Python calls, and those that read a number or a size among their arguments.
_ENTRY = re.compile(
    r"^(?:torch::\w+::)?((?:THP|MPSModule_)\w+)\((?:_object|_typeobject|THPVariable)\*"
    r"|^torch::(PythonArgs::\w+)\("
)
_COPIES = re.compile(r"^(copy_|_to_copy|to_(dtype|device|other|dtype_layout))$")
_COPY = re.compile(r"^at::(storage_copy|Tensor::(to|toType|item))\b")
# What a hook reaches is read up to containers, errors, operators, and what is made once.
_BEHIND_HOOKS = re.compile(
    r"^(std::|c10::|at::_ops::|fmt::|operator |at::mps::MPSStream::)|.*::~|.*\b(\w+)::\2\("
)
_SCALAR = re.compile(r"allocScalarBufferWithValue|getMPSGraphTensorFromScalar")
_ENDS = re.compile(r"^(std::|c10|pybind11::|_|torch::(PythonArgs|jit|dynamo|inductor|profiler|functorch)::)")


class Binding(Library):
    """The functions of libtorch_python.dylib for arm64, with the names of what they call elsewhere."""

    def __init__(self, version: str):
        wheel = macos.unpacked(f"torch=={version}", r"torch/lib/libtorch_python\.dylib$", "-python")
        super().__init__(wheel / "torch" / "lib" / "libtorch_python.dylib")
        self.waits = Waits(version)
        stubs = run([tool("llvm-objdump"), "--macho", "--indirect-symbols", self.path], "listing symbols")
        addresses, mangled = zip(*re.findall(r"^0x([0-9a-f]+) +\d+ (\S+)$", stubs, re.MULTILINE), strict=True)
        names = demangled("\n".join(mangled))
        self.names |= {int(address, 16): name for address, name in zip(addresses, names, strict=True)}

    def _calls(self, start: int) -> Iterator[tuple[str, int | None]]:
        """(name of a function that is called with the lock held, its address); a hook has no address."""
        is_held, hooks, place = True, 0, 0
        for word, address in self.words(start):
            if word & 0x7C000000 == 0x14000000:  # b, bl
                target = address + 4 * ((word & 0x3FFFFFF) - ((word & 0x2000000) << 1))
                name = self.names.get(target)
                if name is None or target == start:
                    continue
                hooks = address if name == _HOOKS else hooks
                if _RELEASES.search(name):
                    is_held = False
                elif _TAKES.search(name):
                    is_held = True
                elif is_held:
                    yield name, target
            elif word & 0xFFC00000 == 0xF9400000:  # ldr
                place = 8 * (word >> 10 & 0xFFF)
            elif word & 0xFFFFFC1F == 0xD63F0000 and is_held and address - hooks < _NEAR:  # blr
                yield self.waits.hooks.get(place, ""), None

    def rows(self) -> dict[str, list[str]]:
        """{function that Python calls: what it may wait in}"""
        rows: dict[str, set[str]] = {}
        for start, name in self.names.items():
            if (match := _ENTRY.match(name)) and (waits := self._waits_of(start)):
                rows.setdefault(match[1] or match[2], set()).update(waits)
        return {name: sorted(waits) for name, waits in sorted(rows.items())}

    def _waits_of(self, start: int) -> set[str]:
        found, seen, todo = set(), {start}, [start]
        while todo:
            for name, address in self._calls(todo.pop()):
                if address is None:
                    found |= {name} - {""}
                elif (waits := self.waits.of(name)) is not None:
                    found.add(waits)
                elif address not in seen and not _ENDS.match(name):
                    seen.add(address)
                    todo.append(address)
        return found


class Waits:
    """Functions of libtorch_cpu that wait for the GPU: hooks, by their place in a table, and operators."""

    def __init__(self, version: str):
        library = torch_cpu(version)
        addresses = {name: address for address, name in library.names.items()}
        self.hooks = {
            place: name
            for place, name in _hooks(library, addresses["vtable for at::mps::MPSHooks"])
            if _waits(library, name)
        }
        self.scalars = _of_scalars(library, aten.table()[version])
        own = {_called(name): (aten.row_of(name), row) for name, row in aten.operators(version)}
        self._operators = READS | {
            name for name, (_, row) in own.items() if row.get("waits") or row.get("reads")
        }
        self._frees = {name for name, (row, _) in own.items() if row in self.scalars}

    def of(self, called: str) -> str | None:
        """Name of a function that waits; None for any other."""
        if match := OPERATOR.match(called):
            if match[1] in self._operators or _COPIES.match(match[1]):
                return match[1]
            return f"{match[1]} gives back a scalar" if match[1] in self._frees else None
        return match[1] if (match := _COPY.match(called)) else None


def _called(operator: str) -> str:
    return operator.removeprefix("aten::").replace(".", "_")


def _of_scalars(library: Library, rows: dict[str, dict[str, Any]]) -> list[str]:
    """Operators that take a number from the pool of scalars."""
    wrappers = by_operators({name: {"wrapper": name} for name in library.wrappers})
    return [
        name
        for name, row in rows.items()
        if row.get("host")
        and any(
            _SCALAR.search(called)
            for called, _, _ in library.reached(library.wrappers[wrappers[name]["wrapper"]])
        )
    ]


def _hooks(library: Library, table: int) -> Iterator[tuple[int, str]]:
    """(place in the table, name) of the hooks of mps."""
    for place in range(0, 64 * 8, 8):
        function = library.names.get(library.pointer(table + 16 + place), "")
        if function.startswith("typeinfo"):
            return
        if match := re.match(r"at::mps::MPSHooks::(\w+)\(", function):
            yield place, match[1]


def _waits(library: Library, hook: str) -> bool:
    """Whether a hook waits, or what it calls by a table: the function of that name of its allocator."""
    pattern = re.compile(rf"at::mps::(MPSHooks|MPSAllocator|MPSEventPool)::{hook}\(")
    for start in [address for address, name in library.names.items() if pattern.match(name)]:
        for name, _, numbers in library.reached(start, _BEHIND_HOOKS):
            if WAITS.search(name) or name.startswith("std::__1::condition_variable::wait("):
                return True
            if name.startswith("at::mps::MPSStream::synchronize(") and numbers.get(1) == COMMIT_AND_WAIT:
                return True
    return False


def text_of(version: str) -> str:
    """The section of a version: a line for each function."""
    binding = Binding(version)
    rows = {"scalar pool": binding.waits.scalars} | binding.rows()
    return "".join(f"{name}: {', '.join(waits)}\n" for name, waits in rows.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="lock_table", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=VERSIONS)
    PINNED.touch()
    sections = pinned("locked")
    for version in parser.parse_args().versions:
        sections[f"torch {version}"] = text_of(version)
        print(f"torch {version}: {sections[f'torch {version}'].count(chr(10))} functions", flush=True)
    PINNED.write_text("".join(f"== {name} ==\n{text}" for name, text in sorted(sections.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
