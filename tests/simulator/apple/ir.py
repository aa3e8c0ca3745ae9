"""LLVM's textual IR, as far as translated shaders use it: functions, blocks, instructions."""

import functools
import re
from dataclasses import dataclass, field

LOCAL = r'%(?:"[^"]+"|[\w.$-]+)'
GLOBAL = r'@(?:"[^"]+"|[\w.$-]+)'
_DEFINITION = re.compile(rf"({LOCAL}) = (.*)")
_LABEL = re.compile(r'("[^"]+"|[\w.$-]+):')
_METADATA = re.compile(r"(?:, ![\w.]+ !\d+)+$")
_VALUE = re.compile(rf"{LOCAL}|{GLOBAL}")
_FLAGS = {
    *(
        "contract",
        "reassoc",
        "nnan",
        "ninf",
        "nsz",
        "arcp",
        "afn",
        "fast",
        "nuw",
        "nsw",
        "nusw",
        "exact",
        "nneg",
    ),
    *("inbounds", "disjoint", "samesign", "tail", "notail", "musttail", "volatile", "atomic"),
}
_CASTS = {
    *("trunc", "zext", "sext", "fpext", "fptrunc", "uitofp", "sitofp", "fptoui", "fptosi"),
    *("bitcast", "ptrtoint", "inttoptr", "addrspacecast"),
}
_OPEN, _CLOSE = "([{<", ")]}>"


@dataclass(eq=False, repr=False)  # users and operands are a graph
class Instruction:
    """One instruction. `operands` are the texts of its values in order: locals, globals and literals."""

    name: str  # "" where there is no result
    op: str
    type: str  # of the result; of a store, of what is stored
    operands: list[str]
    text: str
    line: int  # in the file, from 0
    block: "Block" = None
    source: str = ""  # the type that a cast, a comparison or extractelement reads; an address's element type
    callee: str = ""
    incoming: list[tuple[str, str]] = field(default_factory=list)  # phi: value and label
    align: int = 1
    users: list["Instruction"] = field(default_factory=list)

    @property
    def locals(self) -> list[str]:
        return [o for o in self.operands if o.startswith("%")]

    @property
    def pointer(self) -> str:
        """Where a load or store goes."""
        return self.operands[-1]

    @property
    def literal(self) -> int | None:
        """The last operand, where it is an integer literal."""
        last = self.operands[-1] if self.operands else ""
        return int(last) if re.fullmatch(r"-?\d+", last) else None

    @property
    def contracts(self) -> bool:
        return " contract " in self.text or " fast " in self.text


@dataclass(eq=False, repr=False)
class Block:
    label: str
    number: int
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[str] = field(default_factory=list)

    @property
    def body(self) -> list[Instruction]:
        """What follows the phis."""
        return [i for i in self.instructions if i.op != "phi"]


@dataclass(eq=False)
class Function:
    """A function's blocks, the entry first; `first` and `last` are the lines of its head and its brace."""

    name: str
    first: int
    last: int
    blocks: list[Block]
    definitions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def instructions(self):
        return (i for b in self.blocks for i in b.instructions)

    def definition(self, value: str) -> Instruction | None:
        return self.definitions.get(value)


def function_lines(lines: list[str], name: str) -> tuple[int, int]:
    """The lines of a definition's head and of its closing brace. Raises KeyError."""
    for first, line in enumerate(lines):
        if line.startswith("define ") and f"@{name}(" in line:
            return first, next(i for i in range(first, len(lines)) if lines[i].startswith("}"))
    raise KeyError(f"the IR defines no function {name}")


def parse_function(lines: list[str], name: str) -> Function:
    first, last = function_lines(lines, name)
    function = Function(name, first, last, [Block("", 0)])
    for number, text in _statements(lines, first + 1, last):
        label = _LABEL.match(text)
        if label and not lines[number].startswith(" "):
            _start_block(function, label.group(1).strip('"'))
        else:
            _add(function.blocks[-1], text, number)
    _link(function)
    return function


def _statements(lines: list[str], start: int, end: int):
    """(line number, text) of each label and instruction; a switch's cases are joined."""
    number = start
    while number < end:
        text, first = lines[number].strip(), number
        if text.startswith("switch") and not text.endswith("]"):
            while not lines[number].strip().startswith("]"):
                number += 1
                text += " " + lines[number].strip()
        number += 1
        if text and not text.startswith(";"):
            yield first, text


def _start_block(function: Function, label: str) -> None:
    current = function.blocks[-1]
    if not current.label and not current.instructions:
        current.label = label
    else:
        function.blocks.append(Block(label, len(function.blocks)))


def _add(block: Block, text: str, line: int) -> None:
    text = _METADATA.sub("", text)
    match = _DEFINITION.match(text)
    name, rest = match.groups() if match else ("", text)
    words = rest.split()
    op = next(w for w in words if w not in _FLAGS)
    rest = rest.split(op, 1)[1].strip()
    while rest.split(" ", 1)[0] in _FLAGS:
        rest = rest.split(" ", 1)[1]
    instruction = Instruction(name, op, "void", [], text, line, block)
    _READERS.get(op, _cast if op in _CASTS else _plain)(instruction, rest)
    block.instructions.append(instruction)


def split(text: str) -> list[str]:
    """The parts between commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in _OPEN:
            depth += 1
        elif c in _CLOSE:
            depth -= 1
        elif c == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def _take_type(text: str) -> tuple[str, str]:
    """The type that a text starts with, and what follows."""
    if text[0] in _OPEN:
        depth = 0
        for i, c in enumerate(text):
            depth += (c in _OPEN) - (c in _CLOSE)
            if not depth:
                return text[: i + 1], text[i + 1 :].strip()
    word, _, rest = text.partition(" ")
    return word, rest.strip()


def _value(text: str) -> str:
    """The value at the end of "type attributes value"; of a constant expression, its global."""
    if "getelementptr" in text:
        return re.search(GLOBAL, text).group(0)
    found = _VALUE.findall(text)
    return found[-1] if found and text.endswith(found[-1]) else text.rsplit(" ", 1)[-1]


def _plain(i: Instruction, rest: str) -> None:
    """Operations whose first operand has the type of the result, such as binary ones."""
    parts = split(rest)
    i.type, first = _take_type(parts[0])
    i.operands = [_value(p) for p in [first, *parts[1:]] if p]


def _cast(i: Instruction, rest: str) -> None:
    value, _, i.type = rest.rpartition(" to ")
    i.source, value = _take_type(value)
    i.operands = [_value(value)]


def _compare(i: Instruction, rest: str) -> None:
    _plain(i, rest.split(" ", 1)[1])
    i.source, i.type = i.type, "i1"


def _select(i: Instruction, rest: str) -> None:
    parts = split(rest)
    i.type = _take_type(parts[1])[0]
    i.operands = [_value(p) for p in parts]


def _phi(i: Instruction, rest: str) -> None:
    i.type, rest = _take_type(rest)
    for part in split(rest):
        value, label = split(part.strip("[] "))
        i.incoming.append((value, label.lstrip("%").strip('"')))
    i.operands = [value for value, _ in i.incoming]


def _load(i: Instruction, rest: str) -> None:
    parts = split(rest)
    i.type, i.operands = parts[0], [_value(parts[1])]
    i.align = _alignment(parts)


def _store(i: Instruction, rest: str) -> None:
    parts = split(rest)
    i.type, value = _take_type(parts[0])
    i.operands = [_value(value), _value(parts[1])]
    i.align = _alignment(parts)


def _alignment(parts: list[str]) -> int:
    return next((int(p.split()[1]) for p in parts if p.startswith("align ")), 1)


def _address(i: Instruction, rest: str) -> None:
    parts = split(rest)
    i.type, i.source = "ptr", parts[0]
    i.operands = [_value(p) for p in parts[1:]]


def _alloca(i: Instruction, rest: str) -> None:
    i.type, i.source = "ptr", split(rest)[0]


def _extract(i: Instruction, rest: str) -> None:
    _plain(i, rest)
    i.source = i.type
    i.type = re.search(r"x (\w+)>", i.source).group(1)


def _extract_value(i: Instruction, rest: str) -> None:
    parts = split(rest)
    i.source, value = _take_type(parts[0])
    i.type = split(i.source.strip("{} "))[int(parts[1])]
    i.operands = [_value(value)]


def _branch(i: Instruction, rest: str) -> None:
    i.block.successors = [label.strip('"') for label in re.findall(r'label %("[^"]+"|[\w.$-]+)', rest)]
    head = split(rest)[0]
    i.operands = [] if head.startswith("label") else [_value(head)]


def _return(i: Instruction, rest: str) -> None:
    i.operands = [] if rest in ("", "void") else [_value(rest)]


_CALL = re.compile(rf"(?:(?P<type>\S.*?) )?(?P<callee>{GLOBAL}|{LOCAL})\((?P<arguments>.*)\)[^()]*$")


def _call(i: Instruction, rest: str) -> None:
    match = _CALL.match(rest)
    i.callee = match["callee"].lstrip("@").strip('"')
    # The type follows calling convention and return attributes.
    i.type = re.sub(r"\s+\([^()]*\)$", "", match["type"] or "void").split(" ")[-1]
    if i.type.endswith((">", "}", "]")):
        opening = {">": "<", "}": "{", "]": "["}[i.type[-1]]
        i.type = match["type"][match["type"].index(opening) :]
    i.operands = [_value(p) for p in split(match["arguments"]) if p]


_READERS = {
    "icmp": _compare,
    "fcmp": _compare,
    "select": _select,
    "phi": _phi,
    "load": _load,
    "store": _store,
    "getelementptr": _address,
    "alloca": _alloca,
    "extractelement": _extract,
    "extractvalue": _extract_value,
    "br": _branch,
    "switch": _branch,
    "ret": _return,
    "unreachable": _return,
    "call": _call,
}


def _link(function: Function) -> None:
    for instruction in function.instructions:
        if instruction.name:
            function.definitions[instruction.name] = instruction
    for instruction in function.instructions:
        for value in instruction.locals:
            if value in function.definitions:
                function.definitions[value].users.append(instruction)


_BYTES = {
    "i1": 1,
    "i8": 1,
    "i16": 2,
    "half": 2,
    "bfloat": 2,
    "i32": 4,
    "float": 4,
    "i64": 8,
    "ptr": 8,
    "double": 8,
}


@functools.cache
def element(type_: str) -> tuple[str, int]:
    """(scalar type, count) of a scalar or vector type."""
    match = re.fullmatch(r"<(\d+) x (\w+)>", type_)
    return (match.group(2), int(match.group(1))) if match else (type_, 1)


@functools.cache
def size_of(type_: str) -> int:
    """Bytes of a type."""
    if type_.startswith("["):
        count, inner = re.fullmatch(r"\[(\d+) x (.+)\]", type_).groups()
        return int(count) * size_of(inner)
    if type_.startswith("{"):
        return sum(size_of(part) for part in split(type_.strip("{} ")))
    scalar, count = element(type_)
    return count * _BYTES.get(scalar, 8)
