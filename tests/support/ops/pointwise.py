"""Operators of the family pointwise: valid arguments, results in float64, and invalid arguments."""

import itertools

import numpy as np
import torch

from support import oracles
from support.ops import wrong
from support.oracles import FLOAT32_EPS
from support.oracles_operators import Expected
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops.families.pointwise import BINARY, OPERATIONS

# Options that depend on each other: draw__pointwise gives all that is no required tensor.
WHOLE = ("_pointwise",)


def draw__pointwise(d):
    *outer, width = d.one((3, 1, 2, 33), (5, 64), (130,), (2, 0, 7), (1, 1))
    shapes = [(*outer, width), (width,), (*(1 for _ in outer), width), (*outer, 1), (*outer, width)]
    inputs = {name: d.values(*d.one(*shapes)) for name in "bcdef" if d.flag()}
    if d.flag():
        inputs["f"] = d.ids(*outer, width, experts=9).clamp(-9, 9)
    steps: list[str] = []
    for number in range(d.one(2, 1, 5)):
        operation = d.one(*OPERATIONS)
        known = ["a", *inputs, *(f"%{n}" for n in range(number)), "0.75", "-2.0"]
        operands = [d.one(*known) for _ in range(2 if operation in BINARY else 1)]
        steps.append(" ".join((operation, *operands, d.one("f32", "f16", "bf16"))))
    options = {"dtype": dtype_name(d.dtype()), "mean": outer[-1:] > [0] and d.flag()}
    return {"a": d.values(*outer, width), "formula": "; ".join(steps), **options, **inputs}


POINTWISE = {
    "to": lambda x: x,
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, 0),
    "tanh": np.tanh,
    "relu": lambda x: np.where(x < 0, 0, x),
    "cos": np.cos,
    "sin": np.sin,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}


_INEXACT = ("log", "log1p", "exp", "tanh", "softplus", "cos", "sin")


_SILU_LEAST = -1.2784645427610738  # where silu has its minimum


def expected__pointwise(a):
    """Each step on both ends of what its operands may be, and rounded at both."""
    names = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    given = {name: getattr(a, name) for name in "abcdef" if getattr(a, name) is not None}
    inputs = {name: tensor.double().numpy() for name, tensor in given.items()}
    shape = np.broadcast_shapes(*(value.shape for value in inputs.values()))
    ends = {name: (value, value) for name, value in inputs.items()}
    known: np.ndarray = np.ones(shape, bool)
    for number, line in enumerate(a.formula.split("; ")):
        operation, *operands, dtype = line.split(" ")
        sides = [ends[name] if name in ends else (np.float64(name),) * 2 for name in operands]
        results = [POINTWISE[operation](*values) for values in itertools.product(*sides)]
        if operation == "silu":
            turns = (sides[0][0] < _SILU_LEAST) & (sides[0][1] > _SILU_LEAST)
            results.append(np.where(turns, POINTWISE["silu"](_SILU_LEAST), results[0]))
        if operation in ("cos", "sin"):  # which may turn between the ends, but change no more than they do
            spread = sides[0][1] - sides[0][0]
            results += [results[0] - spread, results[0] + spread]
        low, high = np.minimum.reduce(results), np.maximum.reduce(results)
        if operation == "div":  # its denominator may be on both sides of zero
            known = known & ~((sides[1][0] < 0) & (sides[1][1] > 0))
        low, high = (np.broadcast_to(end, shape) for end in (low, high))
        slack = 4 * FLOAT32_EPS * np.maximum(abs(low), abs(high)) if operation not in ("to", "neg") else 0.0
        slack = slack + (8 * FLOAT32_EPS if operation in _INEXACT else 0.0)
        low, high = (oracles.round_to(end, names[dtype]) for end in (low - slack, high + slack))
        some_nan = [np.broadcast_to(np.isnan(each), shape) for each in results]
        known = known & (np.logical_and.reduce(some_nan) == np.logical_or.reduce(some_nan))
        known = known & (np.isfinite(low) == np.isfinite(high))
        ends[f"%{number}"] = low, high
    middle = np.where(low == high, low, (low + high) / 2)
    error = np.where(np.isfinite(middle), (high - low) / 2, 0.0)
    if a.mean:
        error = (error + shape[-2] * FLOAT32_EPS * abs(middle)).mean(-2)
        middle, known = middle.mean(-2), known.all(-2)
    return [Expected(middle, error, known)]


def invalid__pointwise(zeros):
    return [
        wrong("0-D or 1-D or 2-D or 3-D or 4-D", b=zeros(1, 1, 1, 1, 1)),
        *(
            wrong(f"steps such as 'mul a %0 bf16', joined by '; ', got {line!r}", formula=line)
            for line in ("", "tan a f32", "mul a f32", "neg a f64")
        ),
        *(
            wrong(f"of inputs that are given, steps before and numbers, got {line!r}", formula=line)
            for line in ("neg f f32", "neg %0 f32", "neg 1e39 f32", "neg nan f32")
        ),
        wrong(
            "formula's number of steps must be between 1 and 32, got 33",
            formula="; ".join(["neg a f32"] * 33),
        ),
        wrong(
            "formula's number of different numbers must be between 0 and 12, got 13",
            formula="; ".join(f"add a {n} f32" for n in range(13)),
        ),
        wrong(
            "mean must be of a last dimension but one with elements, got (3,)",
            **{"a": zeros(3), "formula": "neg a f32", "b": None, "c": None, "mean": True},
        ),
    ]
