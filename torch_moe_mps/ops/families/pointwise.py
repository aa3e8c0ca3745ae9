"""Fused elementwise formulas: a chain of additions, products, activations and casts in one dispatch."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import NAMED_DTYPES, Check, dtype_name
from .._registry import operator
from .._sample import Calls, Changes

MAX_STEPS, MAX_NUMBERS, MAX_RANK = 32, 12, 4
INPUTS = "abcdef"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x,
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "cos": torch.cos,
    "sin": torch.sin,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
}
OPERATIONS = (*UNARY, *BINARY)  # shaders/params/pointwise.h numbers them in this order


def _check_formula(formula: str, given: dict[str, Tensor | None], check: Check) -> None:
    """Checks the steps of a formula: operations, dtypes, operands, and how many there are."""
    lines = formula.split("; ")
    numbers: set[str] = set()
    for before, line in enumerate(lines):
        operation, *operands, dtype = line.split(" ") if " " in line else ("", "", "")
        count = 1 if operation in UNARY else 2
        if operation not in OPERATIONS or len(operands) != count or dtype not in DTYPES:
            check.fail("formula", "steps such as 'mul a %0 bf16', joined by '; '", repr(line))
        for operand in operands:
            known = given.get(operand) is not None or operand in [f"%{n}" for n in range(before)]
            if not known and not _is_number(operand):
                check.fail("formula", "of inputs that are given, steps before and numbers", repr(line))
            numbers.update(() if known else (operand,))
    check.between("formula's number of steps", len(lines), 1, MAX_STEPS)
    check.between("formula's number of different numbers", len(numbers), 0, MAX_NUMBERS)


def _is_number(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return math.isfinite(value) and abs(value) <= torch.finfo(torch.float32).max


def _meta_pointwise(check, formula, dtype, mean, **given):
    """Empty result of a formula, in `dtype` and of the broadcast shape; `mean` drops a dimension."""
    _check_formula(formula, given, check)
    present = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in present.items():
        check.rank(name, tensor, range(MAX_RANK + 1))
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in present.values()))
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in present.values())
        check.fail("a", "of a shape that broadcasts with the others", shapes)
    if all(type(size) is int for size in shape):  # a bound would be one of torch.export's dimensions, too
        check.between("the result's number of elements", math.prod(shape), 0, 2**31 - 1)
    if mean:
        if len(shape) < 2 or shape[-2] == 0:
            check.fail("mean", "of a last dimension but one with elements", tuple(shape))
        shape = torch.Size((*shape[:-2], *shape[-1:]))
    return given["a"].new_empty(shape, dtype=NAMED_DTYPES[dtype])


@operator("a:number b:number c:number d:number e:number f:number", _meta_pointwise)
def _pointwise(
    a: Tensor,
    formula: str,
    dtype: str,
    b: Tensor | None = None,
    c: Tensor | None = None,
    d: Tensor | None = None,
    e: Tensor | None = None,
    f: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """A fused elementwise formula, such as "sigmoid a bf16; mul %0 b bf16", in one dispatch.

    Each step is computed in float32 and rounded to its dtype, like a chain of aten operators. Such chains
    occur between the operators of many models; for one token, a dispatch takes longer than their arithmetic.

    Args:
        a, b, c, d, e, f: float32, float16 or bfloat16, or int32 or int64, which become float32; up to 4-D,
            any strides; they broadcast with each other.
        formula: up to 32 steps, joined by "; ", of an operation, its operands and the dtype of its result:
            f32, f16 or bf16. Operands are the inputs, %n for the result of step n (the first is %0), and up
            to 12 different numbers. Operations of one operand: to, neg, exp, log, log1p, sqrt, rsqrt,
            sigmoid, silu, softplus, tanh, relu, cos, sin; of two: add, sub, mul, div, max and min, which give
            NaN for NaN.
        dtype: of the result: "float32", "float16" or "bfloat16".
        mean: averages the last step's result over the second to last dimension, in float32.

    Returns: the result of the last step, in `dtype` and the shape that all inputs broadcast to, without the
        last dimension but one if it is the mean.

    Raises: ValueError for a dtype, rank, shape, device or formula that does not fit.
    """
    arguments = {"a": a, "b": b, "c": c, "d": d, "e": e, "f": f}
    values = {name: tensor.float() for name, tensor in arguments.items() if tensor is not None}
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in values.values()))
    result = a
    for number, line in enumerate(formula.split("; ")):
        operation, *names, rounded_to = line.split(" ")
        for name in names:
            if name not in values:
                values[name] = torch.tensor(float(name), dtype=torch.float32, device=a.device)
        operands = [values[name] for name in names]
        made = UNARY[operation](*operands) if operation in UNARY else BINARY[operation](*operands)
        result = made.to(DTYPES[rounded_to])
        values[f"%{number}"] = result.float()
    result = result.expand(shape)
    return (result.float().mean(-2) if mean else result).to(NAMED_DTYPES[dtype])


CALLS: Calls = {
    "_pointwise": lambda s: {
        **s.of("a[2, T, 1, H] b[T, 4, H]", formula="silu a f32; mul %0 b f32; sub c %1 bf16; div %2 1.5 f32"),
        **{"dtype": dtype_name(s.dtype), "c": s.integers(9, 4, s.H, dtype=torch.int64)},
    },
}
CHANGES: Changes = {}
