"""Whether a kernel writes lists: integers in device memory on which the flow of later dispatches may depend.

Such a kernel is always run whole. Others may be sampled, as what they write changes no count.
"""

from .flow import Flow
from .ir import Instruction, element

_MOVES = {
    "or",
    "shl",
    "zext",
    "trunc",
    "freeze",
    "phi",
    "select",
    "insertelement",
    "extractelement",
    "shufflevector",
}
_INTEGERS = {"i8", "i16", "i32", "i64"}


def writes_lists(flow: Flow) -> bool:
    return any(
        _is_atomic(i) or (i.op == "store" and _stores_integers(flow, i)) for i in flow.function.instructions
    )


def _is_atomic(i: Instruction) -> bool:
    return i.op == "call" and "msl13atomic_update" in i.callee


def _stores_integers(flow: Flow, i: Instruction) -> bool:
    base = flow.definition(flow.base(i.pointer))
    private = base is not None and base.op == "alloca"
    if element(i.type)[0] not in _INTEGERS or private or i.pointer in flow.threadgroup:
        return False
    return not _is_of_floats(flow, i.operands[0], set())


def _is_of_floats(flow: Flow, value: str, seen: set[str]) -> bool:
    """Whether an integer is made of the bits of floats, or is a literal."""
    i = flow.definition(value)
    if i is None or value in seen:
        return True
    seen.add(value)
    if i.op == "bitcast":
        return element(i.source)[0] not in _INTEGERS or _is_of_floats(flow, i.operands[0], seen)
    operands = i.operands[1:] if i.op == "select" else i.operands
    return i.op in _MOVES and all(_is_of_floats(flow, o, seen) for o in operands)
