"""Loads and stores as the GPU has them: neighbours of a block become one access of up to four components."""

from dataclasses import dataclass

from .facts import LOAD_COMPONENTS
from .flow import Flow
from .ir import Block, Instruction, element, size_of

_ACCESS_BYTES = 4 * LOAD_COMPONENTS


@dataclass(eq=False)
class Site:
    """One access. `leader` is its first instruction; `pointer` is `back` bytes behind the first byte."""

    op: str  # load or store
    space: str  # "private", "module" (a constant of the source), "" where the address tells
    bytes: int
    back: int
    leader: Instruction
    pointer: str

    @property
    def block(self) -> int:
        return self.leader.block.number

    @property
    def instructions(self) -> int:
        return -(-self.bytes // _ACCESS_BYTES)


@dataclass
class _Access:
    instruction: Instruction
    offset: int
    size: int
    limit: int  # of what it can be part of


def find_sites(flow: Flow) -> list[Site]:
    return [site for block in flow.function.blocks for site in _sites_of(flow, block)]


def _sites_of(flow: Flow, block: Block) -> list[Site]:
    accesses: dict[tuple, list[_Access]] = {}
    for i in block.instructions:
        if i.op in ("load", "store") and not flow.is_position(i.pointer):
            root, offset = flow.root(i.pointer)
            scalar = min(4, size_of(element(i.type)[0]))
            component = 4 if i.align >= 4 and size_of(i.type) >= 4 else scalar
            access = _Access(i, offset, size_of(i.type), LOAD_COMPONENTS * component)
            accesses.setdefault((root, i.op, scalar), []).append(access)
    found = [site for i in block.instructions for site in _copy_sites(flow, i)]
    for (_, op, _), parts in accesses.items():
        space = _static_space(flow, parts[0].instruction.pointer)
        if space != "artefact":
            found += [_site(op, space, group) for group in _neighbours(parts)]
    return sorted(found, key=lambda s: s.leader.line)


def _copy_sites(flow: Flow, i: Instruction) -> list[Site]:
    """A copy of a struct is a load and a store."""
    if i.op != "call" or not i.callee.startswith("llvm.memcpy"):
        return []
    target, source, size = i.operands[:3]
    spaces = [(op, p, _static_space(flow, p)) for op, p in (("load", source), ("store", target))]
    return [Site(op, space, int(size), 0, i, p) for op, p, space in spaces if space != "artefact"]


def _static_space(flow: Flow, pointer: str) -> str:
    base = flow.base(pointer)
    if base.startswith("@"):
        return "module"
    origin = flow.definition(base)
    if origin is None or origin.op != "alloca":
        return ""
    # The simulator's functions take structs in memory, which the GPU has in registers.
    simulated = (u.op == "call" and u.callee.startswith(("_ZN3msl", "_ZN5metal")) for u in origin.users)
    return "artefact" if any(simulated) else "private"


def _neighbours(accesses: list[_Access]) -> list[list[_Access]]:
    """Groups that one access can serve; a mask skips the bytes between them."""
    groups: list[list[_Access]] = []
    for a in sorted(accesses, key=lambda a: a.offset):
        if groups and a.offset + a.size - groups[-1][0].offset <= a.limit:
            groups[-1].append(a)
        else:
            groups.append([a])
    return groups


def _site(op: str, space: str, group: list[_Access]) -> Site:
    leader = min(group, key=lambda a: a.instruction.line)
    low, high = group[0].offset, max(a.offset + a.size for a in group)
    first = leader.instruction
    return Site(op, space, high - low, leader.offset - low, first, first.pointer)
