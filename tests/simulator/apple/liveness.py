"""The registers of a thread: the most 16-bit halves that are live at once, in the order of the IR.

A value that the instruction set reads as a part of another (a half of a register, an element of a vector, a
narrower or wider number) takes no room of its own: it stands for a piece of the value that it is read from.
Values that are the same in all threads are in uniform registers, and addresses of a thread's own variables
are constants: neither is counted. Apple's compiler orders instructions by other rules: the figure is an
estimate, which ptxas confirms to 25 %.
"""

import functools
from dataclasses import dataclass, replace

from .flow import Flow
from .ir import Block, Instruction, element, size_of
from .lower import Lowering

_PARTS = {"bitcast", "trunc", "freeze", "extractelement", "extractvalue", "ptrtoint", "inttoptr"}
_SELECTING = {"extractelement", "extractvalue", "lshr"}

Piece = tuple[str, tuple]  # a value, and what of it


@dataclass(frozen=True)
class Registers:
    """`halves` of 16 bits that a thread needs, and the number of the block where it does. `arrays`: how many
    of its variables are in memory instead, because their elements are chosen at run time."""

    halves: int
    block: int
    arrays: int = 0

    @property
    def registers(self) -> float:
        return self.halves / 2


def halves_of(i: Instruction) -> int:
    if not i.name or i.type == "void":
        return 0
    if i.type == "i1":
        return 1
    return max(1, size_of(i.type) // 2)


class _Liveness:
    def __init__(self, flow: Flow, lowering: Lowering):
        self.flow, self.lowering = flow, lowering
        self.numbers: dict[Piece, int] = {}
        self.widths: list[int] = []
        self.of_value: dict[str, int] = {}  # value -> bits of its pieces
        self.resolved: dict[tuple[str, int], list[tuple[str, tuple, int]]] = {}
        self.parts: dict[str, tuple[int, int]] = {}  # value -> its piece that is all of it, and the others

    def halves(self, i: Instruction) -> int:
        """Halves of a value. Pointers into threadgroup memory, and what only makes them, have 32 bits."""
        narrow = i.name in self.flow.threadgroup or i.name in self.flow.threadgroup_indices
        return min(2, halves_of(i)) if narrow else halves_of(i)

    def is_part(self, i: Instruction) -> bool:
        """Whether the value is read from its source's register."""
        if i.op in _PARTS:
            return True
        if i.op in ("zext", "sext"):
            return i.source != "i1"
        if i.op == "fpext":
            return element(i.source)[0] == "half" or self.lowering.native
        if i.op == "lshr":
            return i.literal is not None and i.literal % 16 == 0
        return i.op == "getelementptr" and not self.lowering.classes(i)

    def pieces(self, value: str, width: int) -> list[tuple[str, tuple, int]]:
        """(value, what of it, halves) that must be live for `value` to be read."""
        key = (value, width)
        if key not in self.resolved:
            self.resolved[key] = []  # phis may lead back
            self.resolved[key] = self._resolve(value, width)
        return self.resolved[key]

    def _resolve(self, value: str, width: int) -> list[tuple[str, tuple, int]]:
        i = self.flow.definition(value)
        if i is None or value in self.flow.uniform or (i.op == "load" and i.pointer == "@msl_self"):
            return []
        if i.op == "alloca":  # the address of a thread's own variable is a constant
            return []
        if not self.is_part(i):
            return [(value, (), min(width, self.halves(i)))]
        found = []
        for operand in i.locals:
            source = self.flow.definition(operand)
            if source is not None:
                room = self.halves(source)
                if i.op != "getelementptr":
                    room = min(width, self.halves(i), room)
                found += [
                    (root, (*part, *self._selects(i)), w) for root, part, w in self.pieces(operand, room)
                ]
        return found

    @staticmethod
    def _selects(i: Instruction) -> tuple:
        if i.op in _SELECTING:
            return ((i.op, i.operands[-1]),)
        return (("low", i.type),) if i.op == "trunc" else ()

    def bits(self, value: str) -> int:
        """The set of pieces that reading `value` keeps alive."""
        i = self.flow.definition(value)
        found = 0
        for root, part, width in self.pieces(value, self.halves(i)) if i is not None else []:
            number = self.numbers.setdefault((root, part), len(self.numbers))
            if number == len(self.widths):
                self.widths.append(0)
                self.of_value[root] = self.of_value.get(root, 0) | 1 << number
                self._note(root, part, 1 << number)
            self.widths[number] = max(self.widths[number], width)
            found |= 1 << number
        return found

    def _note(self, root: str, part: tuple, piece: int) -> None:
        whole, parts = self.parts.get(root, (0, 0))
        self.parts[root] = (whole, parts | piece) if part else (piece, parts)

    def apart(self, pieces: int) -> int:
        """Those of `pieces` that are not parts of others."""
        for whole, parts in self.both:
            if pieces & whole:
                pieces &= ~parts
        return pieces

    @functools.cached_property
    def both(self) -> list[tuple[int, int]]:
        """The values that are read as a whole and in parts; once all are known."""
        return [(whole, parts) for whole, parts in self.parts.values() if whole and parts]


def _uses(live: _Liveness, i: Instruction) -> int:
    if i.op == "phi" or live.is_part(i):
        return 0
    found = 0
    for operand in i.locals:
        found |= live.bits(operand)
    return found


def _phi_uses(live: _Liveness, blocks: list[Block], labels: dict[str, Block]) -> dict[int, int]:
    found = {b.number: 0 for b in blocks}
    for block in blocks:
        for i in block.instructions:
            for value, label in i.incoming:
                if label in labels and value.startswith("%"):
                    found[labels[label].number] |= live.bits(value)
    return found


def estimate(flow: Flow, native: bool) -> Registers:
    """`native`: on a GPU with bfloat16 arithmetic (from the M3 on), where a bfloat16 is read as a float from
    its own half; before that it becomes another register."""
    live = _Liveness(flow, Lowering(flow, native))
    blocks = flow.function.blocks
    labels = {b.label: b for b in blocks}
    uses = {id(i): _uses(live, i) for i in flow.function.instructions}
    phi_uses = _phi_uses(live, blocks, labels)
    gone = {i.name: ~live.of_value.get(i.name, 0) for i in flow.function.instructions if i.name}
    before = _live_in(blocks, labels, uses, phi_uses, gone)
    best = Registers(0, 0)
    for block in blocks:
        now = _live_out(block, labels, phi_uses, before)
        held = live.apart(now)
        halves = _width(held, live.widths)
        for i in reversed(block.instructions):
            now = (now & gone[i.name] if i.name else now) | uses[id(i)]
            after, held = held, live.apart(now)
            halves += _width(held & ~after, live.widths) - _width(after & ~held, live.widths)
            if halves > best.halves:
                best = Registers(halves, block.number)
    return replace(best, arrays=len(_indexed_arrays(flow)))


def _indexed_arrays(flow: Flow) -> set[str]:
    arrays = {i.name: i.name for i in flow.function.instructions if i.op == "alloca"}  # of pointers into them
    found, size = set(), -1
    while size != len(arrays):
        size = len(arrays)
        for i in flow.function.instructions:
            of = {arrays[o] for o in i.locals if o in arrays}
            if not of or i.op not in ("getelementptr", "select", "phi"):
                continue
            if i.op == "getelementptr" and not any(o.startswith("%") for o in i.operands[1:]):
                arrays[i.name] = arrays[i.operands[0]]
            else:
                found |= of
    return found


def _live_out(block: Block, labels: dict, phi_uses: dict, before: dict) -> int:
    found = phi_uses[block.number]
    for label in block.successors:
        found |= before[labels[label].number]
    return found


def _live_in(blocks: list[Block], labels: dict, uses: dict, phi_uses: dict, gone: dict) -> dict[int, int]:
    before, changed = {b.number: 0 for b in blocks}, True
    through = {b.number: _through(b, uses, gone) for b in blocks}
    while changed:
        changed = False
        for block in reversed(blocks):
            read, kept = through[block.number]
            now = read | (_live_out(block, labels, phi_uses, before) & kept)
            changed = changed or now != before[block.number]
            before[block.number] = now
    return before


def _through(block: Block, uses: dict, gone: dict) -> tuple[int, int]:
    """(what a block reads from before, a mask of what lives through it)."""
    read, kept = 0, -1
    for i in reversed(block.instructions):
        if i.name:
            read, kept = read & gone[i.name], kept & gone[i.name]
        read |= uses[id(i)]
    return read, kept


def _width(pieces: int, widths: list[int]) -> int:
    total = 0
    while pieces:
        low = pieces & -pieces
        total += widths[low.bit_length() - 1]
        pieces ^= low
    return total
