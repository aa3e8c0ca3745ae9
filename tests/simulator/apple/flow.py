"""Which values of a kernel are the same in all threads, point into threadgroup memory, or are folded into
another instruction."""

import re

from .facts import ADDRESS_SHIFT
from .ir import Function, Instruction, size_of

# A threadgroup's place in the grid: the first three words of msl_group.
_POSITION = re.compile(r"@msl_group(, align|, i64 [48]\))")
_ARGUMENTS = ("msl_buffer_argument", "msl_threadgroup_argument", "msl_threadgroup_variable")


def is_power_of_two(number: int | None) -> bool:
    return number is not None and number > 0 and not number & (number - 1)


def is_low_mask(number: int) -> bool:
    number &= 0xFFFFFFFF
    return number != 0 and not number & (number + 1)


class Flow:
    """Sets of values' names, and of instructions that another one absorbs (by identity).

    `constants`: the buffers that are references into constant memory.
    """

    def __init__(self, function: Function, constants: frozenset[int] = frozenset()):
        self.function, self.constants = function, constants
        self.arguments = {i.name for i in function.instructions if i.op == "call" and i.callee in _ARGUMENTS}
        self.uniform = self._uniform()
        self.threadgroup = self._threadgroup_pointers()
        self.threadgroup_indices = self._threadgroup_indices()
        self.absorbed: set[int] = set()
        self.fused: dict[int, str] = {}  # what an instruction becomes by absorbing another: fma, imul, bfe
        for instruction in function.instructions:
            self._absorb(instruction)
        self._absorb_grid_position()

    def definition(self, value: str) -> Instruction | None:
        return self.function.definition(value)

    def _closure(self, start: set[str], belongs) -> set[str]:
        """`start`, extended by results that belong to the set until nothing is added."""
        found, size = set(start), -1
        while size != len(found):
            size = len(found)
            found |= {i.name for i in self.function.instructions if i.name and belongs(i, found)}
        return found

    def _uniform(self) -> set[str]:
        """Values that are computed once for a dispatch: from arguments, constant memory and the grid's
        size."""
        references = {
            i.name
            for i in self.function.instructions
            if i.callee == "msl_buffer_argument" and i.literal in self.constants
        }

        def belongs(i: Instruction, found: set[str]) -> bool:
            if i.op == "load":
                of_grid = i.pointer == "@msl_group" and not _POSITION.search(i.text)
                return of_grid or (i.pointer in found and self.base(i.pointer) in references)
            if i.op in ("phi", "alloca") or (
                i.op == "call" and not re.match(r"llvm\.[us](min|max)", i.callee)
            ):
                return False
            return bool(i.locals) and all(o in found for o in i.locals)

        return self._closure(self.arguments, belongs)

    def _threadgroup_pointers(self) -> set[str]:
        """Pointers of 32 bits."""
        roots = {
            i.name
            for i in self.function.instructions
            if i.op == "call" and i.callee in _ARGUMENTS and "threadgroup" in i.callee
        }

        def belongs(i: Instruction, found: set[str]) -> bool:
            if i.op == "getelementptr":
                return i.operands[0] in found
            return i.type == "ptr" and i.op in ("phi", "select") and any(o in found for o in i.locals)

        return self._closure(roots, belongs)

    def _threadgroup_indices(self) -> set[str]:
        """64-bit numbers that only make such pointers."""

        def belongs(i: Instruction, found: set[str]) -> bool:
            return (
                i.type == "i64"
                and bool(i.users)
                and all(u.name in found or u.name in self.threadgroup for u in i.users)
            )

        return self._closure(set(), belongs)

    # Absorption -----------------------------------------------------------------------------------

    def _take(self, by: Instruction, absorbed: Instruction, becomes: str = "") -> None:
        self.absorbed.add(id(absorbed))
        if becomes:
            self.fused[id(by)] = becomes

    def _absorb(self, i: Instruction) -> None:
        if i.op in ("fadd", "fsub") and i.contracts:
            self._absorb_product(i)
        elif i.op in ("add", "sub") and i.type == "i32":
            self._absorb_factor(i)
        elif i.op == "and" and i.literal is not None and is_low_mask(i.literal):
            shift = self.definition(i.operands[0])
            if (
                shift is not None
                and shift.op == "lshr"
                and shift.literal is not None
                and len(shift.users) == 1
            ):
                self._take(i, shift, "bfe")
        elif i.op in ("select", "br") and i.locals:
            compare = self.definition(i.operands[0])
            if compare is not None and compare.op in ("icmp", "fcmp") and self._only_chooses(compare):
                self._take(i, compare)

    @staticmethod
    def _only_chooses(compare: Instruction) -> bool:
        return all(u.op in ("select", "br") for u in compare.users)

    def _absorb_product(self, i: Instruction) -> None:
        for operand in i.locals:
            product = self.definition(operand)
            while product is not None and product.op == "fneg" and len(product.users) == 1:
                product = self.definition(product.operands[0])
            if product is not None and product.op == "fmul" and product.contracts and len(product.users) == 1:
                return self._take(i, product, "fma")

    def _absorb_factor(self, i: Instruction) -> None:
        for operand in i.locals:
            factor = self.definition(operand)
            if factor is None or len(factor.users) != 1:
                continue
            if factor.op == "mul":
                return self._take(i, factor, "" if is_power_of_two(factor.literal) else "imul")
            if factor.op == "shl" and factor.literal is not None and factor.literal <= ADDRESS_SHIFT:
                return self._take(i, factor)

    def _absorb_grid_position(self) -> None:
        """thread_position_in_grid is a register: threadgroup times size plus the thread's own place."""
        for i in self.function.instructions:
            sources = [self.definition(o) for o in i.operands]
            if i.op == "mul" and all(
                s is not None and s.op == "load" and s.pointer == "@msl_group" for s in sources
            ):
                self.absorbed.add(id(i))
                self.absorbed |= {
                    id(u) for u in i.users if u.op == "add" and any(map(self._is_own_place, u.locals))
                }

    def _is_own_place(self, value: str) -> bool:
        load = self.definition(value)
        return load is not None and load.op == "load" and self.is_position(load.pointer)

    # Addresses ------------------------------------------------------------------------------------

    def root(self, pointer: str) -> tuple[str, int]:
        """Where an address starts, and the bytes that constant steps add.

        Constants in a pointer's index count where they cannot carry: base[i + 1] lies behind base[i].
        """
        offset = 0
        while True:
            step = self.definition(pointer)
            if step is None or step.op != "getelementptr" or len(step.operands) != 2:
                return pointer, offset
            size = size_of(step.source)
            if step.literal is None:
                index, constant = self._index(step.operands[1])
                return f"{step.operands[0]} {size} {index}", offset + constant * size
            offset += step.literal * size
            pointer = step.operands[0]

    def _index(self, value: str) -> tuple[str, int]:
        """The index split into a variable part and a constant that is added to it."""
        step, extension = self.definition(value), ""
        if step is not None and step.op in ("zext", "sext"):
            extension, value = step.op, step.operands[0]
            step = self.definition(value)
        if step is None or step.literal is None:
            return value + extension, 0
        flag = {"zext": " nuw ", "sext": " nsw ", "": " "}[extension]
        carries_nowhere = (step.op == "or" and " disjoint " in step.text) or (
            step.op == "add" and flag in step.text
        )
        return (step.operands[0] + extension, step.literal) if carries_nowhere else (value + extension, 0)

    def base(self, pointer: str) -> str:
        """The pointer that all steps start from."""
        step = self.definition(pointer)
        while step is not None and step.op == "getelementptr":
            pointer = step.operands[0]
            step = self.definition(pointer)
        return pointer

    def is_position(self, pointer: str) -> bool:
        """Whether a load from there gives the thread's place in the grid, which is in registers."""
        base = self.base(pointer)
        step = self.definition(base)
        return base.startswith("@msl_") or (
            step is not None and step.op == "load" and step.pointer == "@msl_self"
        )
