"""Random calls of every operator, with valid or spoilt arguments in random layouts, and their outcomes."""

import math
import re
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from support.any_arguments import Draws
from support.layouts import LAYOUTS, surroundings
from support.oracles_operators import check_tensor, expected, written
from support.quantized_layers import lay_words
from support.values import DTYPES
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops._samples import packet

WRONG_DTYPES = (*DTYPES, torch.int16, torch.int32, torch.int64)
NUMBERS = {
    "float": (math.nan, math.inf, 1e39, -1e39),
    "int": (0, -1, 1, 3, 65, 1025, 2**31, 2**40),
    "str": ("", "other", "affine", "softmax", "half"),
}


class Call(NamedTuple):
    """Arguments on the CPU and where each tensor lies. `good`: nothing is spoilt."""

    name: str
    arguments: dict[str, Any]
    layouts: dict[str, Any]
    good: bool

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}

    def __repr__(self) -> str:
        """Without the elements of tensors."""
        arguments = (
            f"{n}={v.dtype}{tuple(v.shape)} {self.layouts[n]}" if isinstance(v, Tensor) else f"{n}={v!r}"
            for n, v in self.arguments.items()
        )
        return f"{self.name}({', '.join(arguments)})"

    def on(self, device: str) -> dict[str, Any]:
        placed = {}
        for name, value in self.arguments.items():
            placed[name] = (
                place(value, self.layouts.get(name), device) if isinstance(value, Tensor) else value
            )
        for name, layout in self.layouts.items():
            if isinstance(layout, Alias):
                placed[name] = placed[layout.of]
        return placed


class Alias(NamedTuple):
    """The same tensor as another argument."""

    of: str


class Expanded(NamedTuple):
    """Stride 0 along a dimension."""

    dim: int


def place(values: Tensor, layout: Any, device: str) -> Tensor:
    """A copy, on the device."""
    values = values.clone()
    if layout == "meta":
        return values.to("meta")
    if isinstance(layout, Expanded):
        row = values.select(layout.dim, 0).clone(memory_format=torch.contiguous_format)
        return row.to(device).unsqueeze(layout.dim).expand(values.shape)
    if isinstance(layout, Alias) or values.dim() == 0:
        return values.to(device)
    return lay_words(values, layout, device).view(values.dtype)


@st.composite
def calls(draw, name: str, faults: tuple[int, ...] = (0, 0, 1, 1, 2)) -> Call:
    d = Draws(draw)
    arguments = d.arguments_of(name)
    layouts = {n: d.one(*LAYOUTS) for n, v in arguments.items() if isinstance(v, Tensor)}
    faults = d.one(*faults)
    for _ in range(faults):
        spoil(d, name, arguments, layouts)
    return Call(name, arguments, layouts, good=faults == 0)


def spoil(d: Draws, name: str, arguments: dict[str, Any], layouts: dict[str, Any]) -> None:
    """Change one argument, mostly to a value that the operator must refuse."""
    schema = d.one(*packet(name).default._schema.arguments)
    kind = str(schema.type).removeprefix("Optional[").removesuffix("]")
    value = arguments.get(schema.name)
    if schema.name.endswith("dtype"):
        arguments[schema.name] = d.one("float64", "int32", "nonsense", *map(dtype_name, DTYPES))
    elif kind == "bool":
        arguments[schema.name] = not value
    elif kind in NUMBERS:
        arguments[schema.name] = d.one(*NUMBERS[kind])
    elif kind == "Tensor" and value is None:
        arguments[schema.name], layouts[schema.name] = d.values(*d.one((1,), (2, 3))), "contiguous"
    elif kind == "Tensor" and schema.name in layouts:
        aliases = [
            other for pair in layouts.items() if isinstance(pair[1], Alias) for other in (pair[0], pair[1].of)
        ]
        if schema.name not in aliases:
            spoil_tensor(d, schema.name, arguments, layouts)


def spoil_tensor(d: Draws, name: str, arguments: dict[str, Any], layouts: dict[str, Any]) -> None:
    value = arguments[name]
    fault = d.one("dtype", "rank", "size", "none", "meta", "expanded", "alias")
    sizes = [i for i, size in enumerate(value.shape) if size > 1]
    same = [n for n, v in arguments.items() if isinstance(v, Tensor) and n != name and v.shape == value.shape]
    same = [n for n in same if arguments[n].dtype == value.dtype and layouts[n] in LAYOUTS]
    layouts[name] = layouts[name] if layouts[name] in LAYOUTS else "contiguous"
    if fault == "dtype":
        arguments[name] = value.to(d.one(*WRONG_DTYPES))
    elif fault == "rank":
        arguments[name] = value.unsqueeze(0) if d.flag() else value.flatten()
    elif fault == "size" and value.dim() > 0:
        dim = d.one(*range(value.dim()))
        half = value.narrow(dim, 0, value.shape[dim] // 2)
        arguments[name] = torch.cat((value, value), dim) if d.flag() else half
    elif fault == "none":
        arguments[name] = None
        layouts.pop(name)
    elif fault == "meta" and name != next(iter(layouts)):
        layouts[name] = "meta"
    elif fault == "expanded" and sizes and value.dtype != torch.uint32 and name != "pair_order":
        # A list of pairs names none twice: threads would write the same place.
        dim = d.one(*sizes)
        arguments[name] = value.select(dim, 0).unsqueeze(dim).expand(value.shape).contiguous()
        layouts[name] = Expanded(dim)
    elif fault == "alias" and same:
        other = d.one(*same)
        arguments[name], layouts[name] = arguments[other], Alias(other)


# The outcome of a call


class Outcome(NamedTuple):
    """The error, or the results and the arguments that were given."""

    error: str | None
    results: tuple[Tensor, ...] = ()
    given: dict[str, Any] | None = None

    @property
    def form(self) -> Any:
        return self.error or [(tuple(r.shape), r.dtype, r.is_contiguous()) for r in self.results]


def outcome(call: Call, device: str) -> Outcome:
    return performed(call.name, call.on(device), device)


def performed(name: str, arguments: dict[str, Any], device: str) -> Outcome:
    try:
        results = packet(name)(**arguments)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Outcome(re.sub(rf"(?<=, |t ){device}(:0)?(?=,|$)", "DEVICE", text))
    results = () if results is None else results if isinstance(results, tuple) else (results,)
    if device == "mps":
        torch.mps.synchronize()
    return Outcome(None, results, arguments)


def fake_outcome(call: Call) -> Outcome:
    given, mode = call.on("cpu"), FakeTensorMode()
    with mode:
        arguments = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in given.items()}
        return performed(call.name, arguments, "cpu")


def check_values(call: Call, outcome: Outcome) -> None:
    """The results, what is written in place, and that nothing else changes."""
    in_place = written(call.name)
    actual = [
        *outcome.results,
        *(outcome.given[name] for name in in_place if outcome.given.get(name) is not None),
    ]
    rights = expected(call.name, call.arguments, outcome.results)
    for number, (result, right) in enumerate(zip(actual, rights, strict=True)):
        check_tensor(result, right, f"{call.name}: result {number}")
    for name, value in call.arguments.items():
        if isinstance(value, Tensor) and name not in in_place:
            assert same_bits(outcome.given[name].cpu(), value), f"{call.name}: {name} changed"
        elif isinstance(value, Tensor) and call.layouts[name] in LAYOUTS:
            around = surroundings(outcome.given[name])
            whole = around.isnan() if around.is_floating_point() else around == -7
            assert whole.all(), f"{call.name}: what lies around {name} changed"


def same_bits(a: Tensor, b: Tensor) -> bool:
    octets = (t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(*octets)
