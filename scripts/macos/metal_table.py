"""Writes tests/simulator/metal.json: classes, methods and constants of Apple's Metal.

`scripts/macos/metal_table`. Names of classes, their parents and selectors are those of metal-cpp (in MLX's
wheel for macOS). Types and values are metal-cpp's, and those that PyObjC has read from Apple's headers: what
both have must be the same, but PyObjC takes some unsigned enumerations for signed.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import macos
import paths
from simulator.apple_metal import TABLE, plain
from simulator.errors import BuildError

PYOBJC = "pyobjc-framework-Metal==12.2.2"
CLASSES = (
    "Allocation",
    "BlitCommandEncoder",
    "Buffer",
    "CommandBuffer",
    "CommandBufferDescriptor",
    "CommandEncoder",
    "CommandQueue",
    "CompileOptions",
    "ComputeCommandEncoder",
    "ComputePipelineDescriptor",
    "ComputePipelineState",
    "Device",
    "Event",
    "Fence",
    "Function",
    "Heap",
    "HeapDescriptor",
    "Library",
    "ResidencySet",
    "ResidencySetDescriptor",
    "Resource",
    "SharedEvent",
    "SharedEventListener",
)
_ERRORS = ("CommandBufferError", "LibraryError")  # which no method names
_SIMPLE = {
    "void": "v",
    "bool": "B",
    "NS::UInteger": "Q",
    "NS::Integer": "q",
    "uint64_t": "Q",
    "uint32_t": "I",
    "float": "f",
    "double": "d",
    "CFTimeInterval": "d",
    "void*": "^v",
    "NS::Range": "{?=QQ}",
    "MTL::Size": "{?=QQQ}",
    "NS::Error**": "^@",
}
_CHOICES = {"selAorI": 0, "sel32or64": 1}  # which argument is that of arm64
_METHOD = re.compile(
    r"_MTL_INLINE ([^\n]+?) ?MTL::(\w+)::\w+\(([^\n]*)\)(?: const)?\n\{\n"
    r"    (?:return )?Object::sendMessage(?:Safe)?<[^;]*?>\(this, _MTL_PRIVATE_SEL\((\w+)\)"
)


class MetalCpp:
    """The declarations in metal-cpp's headers."""

    def __init__(self) -> None:
        folder = macos.unpacked(macos.METAL_CPP, r"mlx/include/metal_cpp/.*\.hpp$")
        self._text = "\n".join(
            path.read_text() for path in sorted((folder / "mlx/include/metal_cpp/Metal").glob("*.hpp"))
        )
        self._selectors = dict(re.findall(r'_PRIVATE_DEF_SEL\(\s*(\w+)\s*,\s*"([^"]+)"', self._text))
        enums = re.findall(r"_MTL_(?:ENUM|OPTIONS)\(NS::(\w+), (\w+)\) \{(.*?)\n\}", self._text, re.S)
        self.types = {name: _SIMPLE[f"NS::{integer}"] for integer, name, _ in enums}
        self.constants = {name: [*_constants(text)] for _, name, text in enums}
        self.parents = {
            name: [each for each in bases.split(", ")[1:] if not each.startswith("NS::")]
            for name, bases in re.findall(r"^class (\w+) : public NS::\w+<([\w:, ]+)>", self._text, re.M)
        }

    def methods(self, of: str) -> Iterator[tuple[str, str | None, set[str]]]:
        """(selector, its types, names of the enumerations among them)"""
        for returned, name, arguments, selector in _METHOD.findall(self._text):
            if name == of:
                types = [_type_of(text) for text in [returned, *_arguments(arguments)]]
                encoded = [self._encoded(text) for text in types]
                known = None if None in encoded else "".join(map(str, encoded))
                yield self._selectors[selector], known, {t[5:] for t in types if t[5:] in self.types}

    def _encoded(self, text: str) -> str | None:
        if text in _SIMPLE:
            return _SIMPLE[text]
        if text[5:] in self.types:
            return self.types[text[5:]]
        is_object = text.startswith("NS::") or text[5:-1] in self.parents
        return "@" if is_object and text.endswith("*") and not text.endswith("**") else None


def _arguments(text: str) -> list[str]:
    """The parameters; one that is unknown, where there is a block among them."""
    return ["block"] if "(^" in text else text.split(", ") if text else []


def _type_of(text: str) -> str:
    """The type of a parameter: "MTL::Buffer*" for "const MTL::Buffer* buffer"."""
    return re.sub(r"^const |(?<=[\w*]) \w+$", "", text.strip())


def _constants(text: str) -> Iterator[tuple[str, int]]:
    for name, value in re.findall(r"^    (\w+) = ([^,\n]+),", text, re.M):
        if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+[uUlL]*", value):
            yield name, int(value.rstrip("uUlL"), 0)


class PyObjC:
    """The types and values in PyObjC's metadata of the framework."""

    def __init__(self) -> None:
        wheel = macos.unpacked(PYOBJC, r"Metal/_metadata\.py$")
        text = (wheel / "Metal/_metadata.py").read_text()
        self.constants = {name: int(value) for name, value in re.findall(r"\$(MTL\w+)@(-?\d+)", text)}
        self.structs = {
            name: plain(types)
            for name, types in re.findall(
                r'"(MTL\w+)": objc\.createStructType\(\s*"[\w.]+",\s*b"([^"]+)"', text
            )
        }
        self._methods: dict[tuple[str, str], dict[str, Any]] = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "r":
                owner, selector, described = (_literal(argument) for argument in node.args)
                self._methods[owner.decode(), selector.decode()] = described

    def types(self, owner: str, selector: str) -> str | None:
        """Types of a method; None unless all of them are known."""
        described = self._methods.get((owner, selector)) or self._methods.get(("NSObject", selector))
        if described is None or "retval" not in described:
            return None
        arguments = described.get("arguments", {})
        parts = [described["retval"], *(arguments.get(2 + n) for n in range(selector.count(":")))]
        if any(part is None or "type" not in part for part in parts):
            return None
        return plain("".join(_text(part["type"]) for part in parts))


def _text(types: bytes | str) -> str:
    return types if isinstance(types, str) else types.decode()


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):  # a choice by the machine
        return _literal(node.args[_CHOICES[ast.unparse(node.func)]])
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(key): _literal(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)


def table() -> dict[str, Any]:
    cpp, pyobjc = MetalCpp(), PyObjC()
    classes: dict[str, Any] = {}
    named = set(_ERRORS)
    for name in CLASSES:
        methods = {}
        for selector, types, enums in cpp.methods(name):
            known = pyobjc.types(f"MTL{name}", selector)
            if known and types and known.lower() != types.lower():
                raise BuildError(f"{name} {selector}: PyObjC has {known}, metal-cpp {types}")
            methods[selector] = types or known or ""
            named |= enums
        parents = [f"MTL{parent}" for parent in cpp.parents[name]]
        classes[f"MTL{name}"] = {"is": parents, "methods": dict(sorted(methods.items()))}
    constants = {}
    for enum in sorted(named):
        for short, value in cpp.constants[enum]:
            constants[f"MTL{short}"] = value
    for name in constants.keys() & pyobjc.constants.keys():
        if constants[name] != pyobjc.constants[name]:
            raise BuildError(f"{name}: PyObjC has {pyobjc.constants[name]}, metal-cpp {constants[name]}")
    enums = {f"MTL{name}": cpp.types[name] for name in sorted(named)}
    return {"classes": classes, "types": enums, "constants": constants, "structs": pyobjc.structs}


def main() -> int:
    paths.words(__doc__ or "")
    made = table()
    TABLE.write_text(json.dumps(made, indent=0) + "\n")
    methods = sum(len(row["methods"]) for row in made["classes"].values())
    print(f"{len(made['classes'])} classes, {methods} methods, {len(made['constants'])} constants")
    return 0


if __name__ == "__main__":
    sys.exit(main())
