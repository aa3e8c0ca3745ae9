"""Outcomes of the comparisons, clamps and other branches of values in eager code that ran.

A trial shows nothing about a bound that its numbers never reach. So eager code of a trial runs under
`Branches`, and a trial counts only if each branch had all of its outcomes.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# A place in eager code: the calls that lead there, as (file, line, instruction), and the operator.
Place = tuple[tuple[tuple[str, int, int], ...], str]
Outcomes = dict[str, bool]  # {outcome, in words: whether it happened}

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_COMPARE = {"lt", "le", "gt", "ge", "eq", "ne", "isnan", "isinf", "logical_not"}
_SIGN = {
    "abs",
    "relu",
    "leaky_relu",
    "sign",
    "sgn",
    "elu",
    "prelu",
    "_prelu_kernel",
    "heaviside",
    "threshold",
}
_PAIRS = {"maximum", "minimum", "fmax", "fmin"}
_CHOOSE = {"where": 0, "masked_fill": 1}  # the place of the condition among the arguments
_FIXED_BOUNDS = {"hardsigmoid": (-3.0, 3.0), "hardswish": (-3.0, 3.0)}
_CLAMP = {
    "clamp": (None, None),
    "hardtanh": (-1.0, 1.0),
    "clamp_min": (None, None),
    "clamp_max": (None, None),
}


class Branches(TorchDispatchMode):
    """Records the outcomes of branches, place by place.

    Attributes:
        seen: {place: {outcome: whether it happened}}.
        bounds: the numbers that values were compared with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Place, Outcomes] = {}
        self.bounds: dict[float, None] = {}

    def run(self, function: Callable, *args: Any, **options: Any) -> Any:
        """The result of eager code, whose branches are recorded."""
        with self:
            return function(*args, **options)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (profile := sys.getprofile()) is None:
            return self._noted(function, args, kwargs)
        sys.setprofile(None)  # operators run torch's code
        try:
            return self._noted(function, args, kwargs)
        finally:
            sys.setprofile(profile)

    def _noted(self, function: Any, args: Any, kwargs: Any) -> Any:
        name = function.overloadpacket.__name__.rstrip("_")
        kwargs = kwargs or {}
        outcomes = self._before(name, args, kwargs)
        result = function(*args, **kwargs)
        if outcomes is None and name in _COMPARE | {"_local_scalar_dense"}:
            outcomes = self._behind(name, args, result)
        if outcomes:
            seen = self.seen.setdefault(_place(name), {})
            for outcome, happened in outcomes.items():
                seen[outcome] = seen.get(outcome, False) or happened
        return result

    def unreached(self) -> Iterator[tuple[Place, str]]:
        """Places, and an outcome that each of them never had."""
        for place, outcomes in self.seen.items():
            yield from ((place, outcome) for outcome, happened in outcomes.items() if not happened)

    def add(self, other: "Branches") -> None:
        """Adds the outcomes of another record."""
        for place, outcomes in other.seen.items():
            seen = self.seen.setdefault(place, {})
            for outcome, happened in outcomes.items():
                seen[outcome] = seen.get(outcome, False) or happened
        self.bounds |= other.bounds

    def _before(self, name: str, args: Any, kwargs: Any) -> Outcomes | None:
        """Outcomes that the arguments tell: an operator may overwrite them."""
        x: Any = args[0] if args else None
        if name in _CLAMP:
            return self._clamped(name, args, kwargs)
        if name in _FIXED_BOUNDS:
            return self._bounded(x, *_FIXED_BOUNDS[name])
        if name in _SIGN:
            return {"below 0": _any(x <= 0), "above 0": _any(x >= 0)}
        if name in _PAIRS or (name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor)):
            return {"the first": _any(x > args[1]), "the second": _any(x < args[1])}
        if name in _CHOOSE:
            chosen = args[_CHOOSE[name]]
            return {"true": _any(chosen), "false": _any(~chosen.bool())}
        return None

    def _behind(self, name: str, args: Any, result: Any) -> Outcomes | None:
        if name == "_local_scalar_dense":  # Python code may branch on it
            return {"true": result, "false": not result} if isinstance(result, bool) else None
        if len(args) > 1 and isinstance(args[1], (int, float)):
            self._note(args[1])
        return {"true": _any(result), "false": _any(~result)}

    def _clamped(self, name: str, args: Any, kwargs: Any) -> Outcomes:
        low, high = _CLAMP[name]
        if name == "clamp_max":
            high = kwargs.get("max", args[1] if len(args) > 1 else high)
        else:
            low = kwargs.get("min", kwargs.get("min_val", args[1] if len(args) > 1 else low))
            high = kwargs.get("max", kwargs.get("max_val", args[2] if len(args) > 2 else high))
        return self._bounded(args[0], low, high)

    def _bounded(self, x: Tensor, low: Any, high: Any) -> Outcomes:
        """Outcomes of a clamp: which values are below, above or between its bounds.

        Values at a bound count as beyond it: a softplus is never below 0, but gets there.
        """
        found, inside = {}, torch.ones_like(x, dtype=torch.bool)
        for bound, word, outside in ((low, "below", torch.le), (high, "above", torch.ge)):
            if bound is not None and not _is_infinite(bound):
                self._note(bound)
                beyond = outside(x, bound)
                found[f"{word} {_in_words(bound)}"] = _any(beyond)
                inside = inside & ~beyond
        return found | {"within its bounds": _any(inside)} if found else {}

    def _note(self, bound: Any) -> None:
        if isinstance(bound, Tensor):
            bound = bound.item() if bound.numel() == 1 else 0
        if len(self.bounds) < 64 and bound == bound and abs(bound) not in (0, float("inf")):
            self.bounds[float(bound)] = None


def in_words(place: Place, outcome: str) -> str:
    """A branch and the outcome that it never had, for a report."""
    calls, name = place
    file, line, _ = next((call for call in reversed(calls) if not _is_of_torch(call[0])), calls[-1])
    return f"{name} in {Path(file).name}:{line} was never {outcome}"


def _place(name: str) -> Place:
    """The stack of eager code at an operator's call, from the frame that `Branches.run` calls."""
    calls, frame = [], sys._getframe(3)
    while frame is not None and frame.f_code.co_filename != __file__:
        calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(calls)), name


def _is_of_torch(file: str) -> bool:
    return file.startswith(_TORCH)


def _is_infinite(bound: Any) -> bool:
    return isinstance(bound, float) and abs(bound) == float("inf")


def _in_words(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, (int, float)) else "its bound"


def _any(values: Tensor) -> bool:
    return bool(values.any())
