"""The classes of instructions (facts.COSTS) that an Apple GPU would execute for each instruction of the IR.

Operations that the instruction set folds cost nothing: half operands of float instructions, negation,
absolute value,
16-bit halves of registers, small shifts in front of an add, one index of an address, a compare in front of a
select or branch, a multiply in front of an add. Loads and stores are counted by their sites.
"""

from collections.abc import Mapping

from .facts import BF16_ROUNDING, BF16_WIDENING
from .flow import Flow, is_power_of_two
from .ir import Instruction, element, size_of

PRODUCT = "apple_tensor_product"  # of tensor units: include/msl_tensor.h
_FREE = {
    *(
        "bitcast",
        "trunc",
        "freeze",
        "phi",
        "alloca",
        "extractelement",
        "insertelement",
        "extractvalue",
        "insertvalue",
    ),
    *("shufflevector", "fneg", "ptrtoint", "inttoptr", "ret", "unreachable", "fence", "load", "store"),
}
_ROUND = ["bfround"] * BF16_ROUNDING
_WIDEN = ["bfwiden"] * BF16_WIDENING


class ByPrefix(dict[str, list[str]]):
    """The classes of functions, by the longest prefix of a name that fits.

    Args:
        lines: {prefixes: classes}, each with spaces between.
    """

    def __init__(self, lines: Mapping[str, str]):
        super().__init__({name: each.split() for names, each in lines.items() for name in names.split()})

    def of(self, name: str, error: str) -> list[str]:
        """Raises: ValueError with the error, where no prefix fits."""
        fitting = [prefix for prefix in self if name.startswith(prefix)]
        if not fitting:
            raise ValueError(error)
        return self[max(fitting, key=len)]


_INTRINSICS = ByPrefix(
    {
        "lifetime experimental.noalias assume fabs memcpy": "",
        "fma fmuladd": "fma",
        "copysign": "logic",
        "umin umax smin smax maxnum minnum maximum minimum abs uadd.sat usub.sat": "select",
        "ctpop ctlz cttz bitreverse bswap fshl fshr": "popcount",
        "exp2 log2 sin cos": "transc",
        "exp log": "fmul transc",
        "sqrt": "rsqrt fmul",
        "floor ceil rint round trunc nearbyint": "convert",
        "pow": "transc fmul transc",
        "tanh": "fmul transc fadd recip fma",
        "memset memmove": "private",
    }
)
_FUNCTIONS = {
    "expf": ["fmul", "transc"],
    "exp2f": ["transc"],
    "logf": ["fmul", "transc"],
    "log2f": ["transc"],
    "powf": ["transc", "fmul", "transc"],
    "tanhf": _INTRINSICS["tanh"],
    "erff": ["fma"] * 8 + ["transc"],
    "msl_threadgroup_barrier": ["barrier"],
    "msl_simdgroup_barrier": ["simdbarrier"],
    "msl_atomic_access": [],
    "msl_buffer_argument": [],
    "msl_threadgroup_argument": [],
    "msl_threadgroup_variable": [],
    "msl_unset_constant": [],
    PRODUCT: [],
}
# The kinds of msl::shuffle whose source lane any lane may choose, and which the GPU has no instruction for.
_ANY_LANE = "shuffleE0ELj32"
_FLOAT_READERS = {"fadd", "fsub", "fmul", "fcmp", "fneg", "fptrunc", "select", "phi"}


class Lowering:
    """`classes(instruction)` for one kernel; `native` says whether the GPU has bfloat16 arithmetic."""

    def __init__(self, flow: Flow, native: bool):
        self.flow, self.native = flow, native

    def classes(self, i: Instruction) -> list[str]:
        if id(i) in self.flow.absorbed or i.op in _FREE:
            return []
        if i.name in self.flow.uniform and i.name not in self.flow.arguments:
            return []
        handler = _HANDLERS.get(i.op)
        if handler is None:
            raise ValueError(f"an instruction without a cost: {i.text}")
        return handler(self, i)

    # Numbers --------------------------------------------------------------------------------------

    def _extend(self, i: Instruction) -> list[str]:
        return ["select"] if i.source == "i1" else []

    def _widen(self, i: Instruction) -> list[str]:
        scalar, count = element(i.source)
        if scalar == "bfloat":
            return [] if self.native else _WIDEN * count
        read_by_floats = all(
            u.op in _FLOAT_READERS or (u.op == "call" and "llvm." in u.callee) for u in i.users
        )
        return [] if read_by_floats else ["mov"] * count

    def _round(self, i: Instruction) -> list[str]:
        scalar, count = element(i.type)
        if scalar == "bfloat":
            return (["mov"] if self.native else _ROUND) * count
        source = self.flow.definition(i.operands[0])
        arithmetic = source is not None and (
            source.op in ("fadd", "fsub", "fmul")
            or (source.op == "call" and source.callee.startswith("llvm.fm"))
        )
        return [] if arithmetic and len(source.users) == 1 else ["fadd"] * count

    def _float(self, i: Instruction) -> list[str]:
        scalar, count = element(i.type)
        own = {
            "fadd": ["fadd"],
            "fsub": ["fadd"],
            "fmul": ["fmul"],
            "fdiv": ["recip", "fmul"],
            "frem": ["fother"] * 4,
        }
        name = self.flow.fused.get(id(i))
        return self._in_bfloat(scalar, ([name] if name else own[i.op]) * count)

    def _in_bfloat(self, scalar: str, classes: list[str]) -> list[str]:
        return classes if scalar != "bfloat" or self.native else [*classes, *_ROUND, *_WIDEN]

    def _add(self, i: Instruction) -> list[str]:
        scalar, count = element(i.type)
        if scalar != "i64":
            return [self.flow.fused.get(id(i), "iadd")] * count
        if self._only_addresses(i):
            return []
        return ["iadd" if i.name in self.flow.threadgroup_indices else "iadd64"] * count

    def _multiply(self, i: Instruction) -> list[str]:
        scalar, count = element(i.type)
        if is_power_of_two(i.literal):
            return self._shift(i)
        return [
            "imul64" if scalar == "i64" and i.name not in self.flow.threadgroup_indices else "imul"
        ] * count

    def _divide(self, i: Instruction) -> list[str]:
        if is_power_of_two(i.literal):
            return ["logic"] if i.op == "urem" else ["shift"]
        if i.literal is None:
            return ["imul64", "imul", "shift", "iadd", "convert", "recip"]
        return ["imul64", "shift"] + (["imul"] if i.op.endswith("rem") else [])

    def _logic(self, i: Instruction) -> list[str]:
        scalar, count = element(i.type)
        if scalar == "i1":
            return ["logic"]
        if id(i) in self.flow.fused:
            return [self.flow.fused[id(i)]]
        lower_half = i.op == "and" and scalar == "i32" and i.literal == 0xFFFF
        if lower_half or (i.op == "or" and self._is_pair(i)):
            return []
        return ["logic"] * count * (2 if scalar == "i64" else 1)

    def _is_pair(self, i: Instruction) -> bool:
        """Whether two registers are put side by side: (high << 16) | low."""
        parts = [self.flow.definition(o) for o in i.operands]
        return all(
            p is not None
            and (
                (p.op == "zext" and p.source in ("i16", "i32"))
                or (p.op == "shl" and p.literal in (16, 32, 48))
                or (p.op == "or" and self._is_pair(p))
            )
            for p in parts
        )

    def _shift(self, i: Instruction) -> list[str]:
        scalar, count = element(i.type)
        amount = i.literal.bit_length() - 1 if i.op == "mul" else i.literal
        if amount is None:
            return ["shift" if i.op == "shl" else "shiftvar"] * count
        if (
            i.op in ("shl", "mul")
            and amount <= 2
            and all(u.op in ("zext", "sext", "getelementptr") for u in i.users)
        ):
            return []  # of an index
        if scalar == "i64":
            return (
                [] if amount % 16 == 0 else ["shift"] * (1 if i.name in self.flow.threadgroup_indices else 2)
            )
        if scalar != "i32" or amount != 16:
            return ["shift"] * count
        if i.op != "shl" or all(u.op == "or" for u in i.users):
            return []  # a half of a register
        return (["mov"] if self.native else _WIDEN) * count  # bits of a bfloat become a float

    def _compare(self, i: Instruction) -> list[str]:
        return ["cmp"]

    def _select(self, i: Instruction) -> list[str]:
        scalar, count = element(i.type)
        return ["select"] * count * (2 if scalar in ("i64", "ptr") else 1)

    def _convert(self, i: Instruction) -> list[str]:
        integer = element(i.source if i.op.endswith("fp") else i.type)[0]
        return ["select"] if integer == "i1" else ["convert"] * element(i.type)[1]

    # Control and addresses ------------------------------------------------------------------------

    def _branch(self, i: Instruction) -> list[str]:
        return ["branch"] if i.operands else []

    def _switch(self, i: Instruction) -> list[str]:
        return ["branch", "branch"]

    def _only_addresses(self, i: Instruction) -> bool:
        return all(u.op == "getelementptr" for u in i.users)

    def _address(self, i: Instruction) -> list[str]:
        classes = self._address64(i)
        if i.name in self.flow.threadgroup:
            return ["iadd" if c == "iadd64" else c for c in classes]
        return classes

    def _address64(self, i: Instruction) -> list[str]:
        indices = [o for o in i.operands[1:] if o.startswith("%")]
        base = self.flow.definition(i.operands[0])
        on_index = base is not None and base.op == "getelementptr" and self._has_index(base)
        if not indices:
            moves = i.operands[1:] != ["0"] * len(i.operands[1:])
            # The constant goes to the 32-bit index of the base, unless that is a 64-bit pointer anyway.
            return (
                ["iadd"]
                if on_index and moves and not self._is_pointer(base) and base.block is i.block
                else []
            )
        if i.operands[0] in self.flow.uniform and all(o in self.flow.uniform for o in indices):
            return []
        if self._is_pointer(i):
            return ["iadd64"]
        return ["iadd"] if on_index and not self._is_pointer(base) else []

    @staticmethod
    def _has_index(i: Instruction) -> bool:
        return any(o.startswith("%") for o in i.operands[1:])

    def _is_pointer(self, i: Instruction) -> bool:
        """Whether an indexed address is kept as a pointer, as more than this block's accesses read it."""
        others = [u for u in i.users if u.op not in ("load", "store")]
        constant = all(u.op == "getelementptr" and not self._has_index(u) for u in others)
        return (
            self._has_index(i)
            and bool(others)
            and (not constant or any(u.block is not i.block for u in i.users))
        )

    # Calls ----------------------------------------------------------------------------------------

    def _call(self, i: Instruction) -> list[str]:
        scalar, count = element(i.type)
        if i.callee.startswith("llvm."):
            name = i.callee[len("llvm.") :]
            classes = _INTRINSICS.of(name, f"an intrinsic without a cost: {i.text}")
            return self._in_bfloat(scalar, classes * count) if classes == ["fma"] else classes * count
        if i.callee in _FUNCTIONS:
            return _FUNCTIONS[i.callee]
        return self._simulator_call(i)

    def _simulator_call(self, i: Instruction) -> list[str]:
        """A function of the simulator's metal_stdlib, by its mangled name."""
        words = max(1, (size_of(i.type) + 3) // 4)
        if "matrix_place_here" in i.callee or "is_first" in i.callee:
            return []
        if "16simdgroup_matrix" in i.callee:  # its constructor, from a diagonal
            return ["select", "select"]
        if "3msl8multiply" in i.callee:
            return ["mma16" if "DF16" in i.callee.split("multiply")[1] else "mma32"]
        if "3msl10collective" in i.callee:
            combine = next(o for o in i.operands if "combine" in o)
            if "prefix" in combine:
                return ["scan"]
            return ["simdsum"] * words if "Lj32" in combine else ["shuffle", "fadd"] * 2 * words
        if "3msl8exchange" in i.callee:
            any_lane = _ANY_LANE in i.callee and i.operands[-4].startswith("%")
            return ["anyshuffle" if any_lane else "shuffle"] * words
        if "3msl4vote" in i.callee:
            return ["ballot"]
        if "3msl" in i.callee and "atomic_" in i.callee:
            return ["atomic"]
        raise ValueError(f"a call without a cost: {i.text}")


_HANDLERS = {
    name: handler
    for names, handler in {
        "zext sext": Lowering._extend,
        "fpext": Lowering._widen,
        "fptrunc": Lowering._round,
        "fadd fsub fmul fdiv frem": Lowering._float,
        "add sub": Lowering._add,
        "mul": Lowering._multiply,
        "udiv urem sdiv srem": Lowering._divide,
        "and or xor": Lowering._logic,
        "shl lshr ashr": Lowering._shift,
        "icmp fcmp": Lowering._compare,
        "select": Lowering._select,
        "uitofp sitofp fptoui fptosi": Lowering._convert,
        "br": Lowering._branch,
        "switch": Lowering._switch,
        "getelementptr": Lowering._address,
        "call": Lowering._call,
    }.items()
    for name in names.split()
}
