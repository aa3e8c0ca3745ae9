"""Kernels by Apple's own compiler, as the model reads IR: AIR after the passes that our IR goes through.

AIR is LLVM's IR for Apple's GPUs. Memory of the device is in address space 1, constants in 2, threadgroup
memory in 3; what Metal adds to C++ are functions named air.*.
"""

import re
from collections.abc import Mapping

from .compile import optimised, without_target
from .flow import Flow
from .ir import Instruction, function_lines, parse_function
from .lower import ByPrefix, Lowering

_CONVERSION = re.compile(
    r"(?:tail )?call (?:\w+ )*?(?P<to>\w+|<[^>]+>) @air\.convert\.(?P<kinds>[fsu]\.\w+\.[fsu])\.\w+"
    r"\((?P<source>\w+|<[^>]+>) (?P<value>[^)]+)\)(?: #\d+)?"
)
_CONVERSIONS = {
    **{("f", "s"): "sitofp", ("f", "u"): "uitofp"},
    **{("s", "f"): "fptosi", ("u", "f"): "fptoui"},
}
_DOT = re.compile(
    r"^ *(?P<result>%\S+) = (?:tail )?call (?:\w+ )*(?P<type>\w+) @air\.dot\.v(?P<size>\d)\w+"
    r"\((?P<vector><[^>]+>) (?P<left>[^,]+), <[^>]+> (?P<right>[^)]+)\).*$",
    re.M,
)
_POINTER = re.compile(r"ptr addrspace\((\d)\)[^%,]*(%[\w.]+)")
_FUNCTION_CONSTANT = re.compile(r"^@_Z(\d\S*)\.MTL_FC_INIT_(\d+)_", re.M)
_THREADGROUP = re.compile(r"^(@[^ ]+) = .*\baddrspace\(3\) global", re.M)
_FUNCTIONS = ByPrefix(
    {
        "is_uniform": "",
        "min max fmin fmax": "select",
        "simd_sum simd_max": "simdsum",
        "simd_prefix_inclusive_sum": "scan",
        "simd_shuffle_down simd_shuffle_xor": "shuffle",
        "simd_shuffle": "anyshuffle",
        "simdgroup_matrix_8x8_multiply_accumulate": "mma32",
        "wg.barrier": "barrier",
        "simdgroup.barrier": "simdbarrier",
        "fast_exp2": "transc",
        "fast_exp": "fmul transc",
    }
)


class AirLowering(Lowering):
    """Instructions for the functions of AIR."""

    def _simulator_call(self, i: Instruction) -> list[str]:
        return _FUNCTIONS.of(i.callee.removeprefix("air."), f"a function of AIR without a cost: {i.text}")


def flow_of(assembly: str, name: str, values: Mapping[int, int]) -> Flow:
    """The kernel `name` of a module in AIR, with the `values` of function constants by number. Its arguments
    and threadgroup memory are calls, as in the IR of a translated shader."""
    for constant, number in _FUNCTION_CONSTANT.findall(assembly):
        if int(number) in values:
            variable = rf"^(@_ZL{constant}(?:\.\d+)? = .*)\bglobal (i\d+) undef"
            assembly = re.sub(variable, rf"\1constant \2 {int(values[int(number)])}", assembly, flags=re.M)
    assembly = _DOT.sub(_multiplied, _CONVERSION.sub(_converted, assembly))
    text = optimised(without_target(assembly), "scalarizer,instnamer")
    lines = text.splitlines()
    first, last = function_lines(lines, name)
    arguments, constants = [], set()
    for number, (space, value) in enumerate(_POINTER.findall(lines[first])):
        kind = "threadgroup" if space == "3" else "buffer"
        arguments.append(f"  {value} = call ptr @msl_{kind}_argument(i32 {number})")
        if space == "2":
            constants.add(number)
    body = "\n".join(lines[first + 1 : last])
    for number, variable in enumerate(_THREADGROUP.findall(text)):
        own = f"%threadgroup.{number}"
        arguments.append(f"  {own} = call ptr @msl_threadgroup_variable(i32 0)")
        body = re.sub(rf"{re.escape(variable)}(?![\w.$])", own, body)
    entry, body = re.sub(r" addrspace\(\d\)", "", body).split("\n", 1)  # a label, as every block has a name
    kernel = ["define void @kernel() {", entry, *arguments, *body.split("\n"), "}"]
    return Flow(parse_function(kernel, "kernel"), frozenset(constants))


def _converted(call: re.Match) -> str:
    to, source, kinds = call["to"], call["source"], call["kinds"]
    operation = _CONVERSIONS.get((kinds[0], kinds[-1]))
    if operation is None:
        operation = "fpext" if "float" in to else "fptrunc"
    return f"{operation} {source} {call['value'].split()[-1]} to {to}"


def _multiplied(call: re.Match) -> str:
    """A scalar product, written out."""
    type_, vector, own = call["type"], call["vector"], f"%dot{call['result'].lstrip('%')}"
    lines = []
    for i in range(int(call["size"])):
        for name in ("left", "right"):
            lines.append(f"{own}.{name}{i} = extractelement {vector} {call[name]}, i64 {i}")
        lines.append(f"{own}.product{i} = fmul contract {type_} {own}.left{i}, {own}.right{i}")
        if i:
            result = call["result"] if i == int(call["size"]) - 1 else f"{own}.sum{i}"
            before = f"{own}.sum{i - 1}" if i > 1 else f"{own}.product0"
            lines.append(f"{result} = fadd contract {type_} {before}, {own}.product{i}")
    return "\n".join(f"  {line}" for line in lines)
