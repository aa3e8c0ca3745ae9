"""Instructions of a kernel's blocks and of its main loop, without running it."""

from collections import Counter

from .flow import Flow
from .ir import Function
from .lower import Lowering
from .model import class_of
from .sites import find_sites

# Multiply-adds of a lane. Products without a sum count as well, so that neither side gains by fusing them.
_MACS = {"fma": 1, "fmul": 1, "mma16": 16, "mma32": 16}


def macs(classes: Counter) -> int:
    return sum(_MACS.get(name, 0) * count for name, count in classes.items())


def block_classes(flow: Flow, lowering: Lowering) -> list[Counter]:
    """The classes of each block's instructions, with its loads and stores by the pointers that they go
    through."""
    found = [Counter(c for i in b.instructions for c in lowering.classes(i)) for b in flow.function.blocks]
    for site in find_sites(flow):
        found[site.block][class_of(_space(flow, site.pointer) or "device", site.op)] += site.instructions
    return found


def _space(flow: Flow, pointer: str, seen: frozenset[str] = frozenset()) -> str | None:
    """Where a pointer goes; None where only itself says it, as in a loop."""
    base = flow.base(pointer)
    origin = flow.definition(base)
    if base.startswith("@"):
        return "module"
    if base in seen or origin is None:
        return None
    if origin.op == "alloca":
        return "private"
    if origin.name in flow.arguments:
        if "threadgroup" in origin.callee:
            return "threadgroup"
        return "constant" if origin.literal in flow.constants else "device"
    if origin.op not in ("phi", "select"):
        return None
    spaces = (_space(flow, value, seen | {base}) for value in origin.locals)
    return next(filter(None, spaces), None)


def loops(function: Function) -> list[set[int]]:
    """The numbers of the blocks of each loop, with those of loops inside of it."""
    numbers = {block.label: block.number for block in function.blocks}
    after = [[numbers[label] for label in block.successors] for block in function.blocks]
    before: list[set[int]] = [set() for _ in after]
    for number, successors in enumerate(after):
        for successor in successors:
            before[successor].add(number)
    above = _dominators(before)
    found: dict[int, set[int]] = {}
    for number, successors in enumerate(after):
        for head in above[number].intersection(successors):
            body, ahead = found.setdefault(head, {head}), [number]
            while ahead:
                block = ahead.pop()
                if block not in body:
                    body.add(block)
                    ahead += before[block]
    return list(found.values())


def _dominators(before: list[set[int]]) -> list[set[int]]:
    """For each block those that every way to it goes through, itself too."""
    every = set(range(len(before)))
    found = [{0}, *(every for _ in before[1:])]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(before)):
            common = set.intersection(*(found[b] for b in before[number])) if before[number] else set()
            if (own := common | {number}) != found[number]:
                found[number], changed = own, True
    return found


def main_loop(function: Function, classes: list[Counter]) -> Counter:
    """The classes of the loop with the most multiply-adds, of those without a loop inside."""
    every = loops(function)
    inner = [body for body in every if not any(other < body for other in every)]
    sums = [sum((classes[block] for block in body), Counter()) for body in inner]
    return max(sums, key=macs, default=Counter())
