"""Where and how a result is wrong: what a developer without the machine needs to name the fault."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

FIRST = 8  # wrong elements that are listed


def errors(actual: Tensor, expected: Tensor) -> Tensor:
    """The difference of each element, relative to the largest value; of integers 0 or infinite.

    Infinities count as the largest number of the dtype, beside which a rounding may go either way.
    """
    if not actual.dtype.is_floating_point:
        return torch.where(actual == expected, 0.0, math.inf)
    largest = expected.double()[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    limit = torch.finfo(actual.dtype).max
    a, e = (tensor.double().clamp(-limit, limit) for tensor in (actual, expected))
    apart = (a - e).abs() / max(largest, 1e-30)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(same, 0.0, apart.nan_to_num(math.inf, math.inf))


def described(actual: Tensor, expected: Tensor, tolerance: float, untouched: Tensor | None) -> dict[str, Any]:
    """Describe how a result is wrong; an element is wrong if its error is over `tolerance`.

    `untouched` are the elements that no kernel wrote, if that is known. Returns:
        wrong, of: counts of elements.
        along: of each dimension the first and last index with wrong elements, how many such indices there
            are of how many, and the step that all of them keep: 8 for every 8th row.
        shares: of the wrong elements, those that are NaN, infinite, zero, untouched, and the negated value.
        ratio: got / expected of the wrong elements, at the quantiles 0.1, 0.5 and 0.9.
        error: of all elements that are numbers, relative to the largest, at 0.5, 0.9 and 1.
        first: [index, got, expected] of the first wrong elements.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return {
            "is": f"{actual.dtype} {list(actual.shape)}",
            "not": f"{expected.dtype} {list(expected.shape)}",
        }
    apart = errors(actual, expected)
    wrong = apart > tolerance
    places = wrong.nonzero()
    got, right = actual[wrong].double(), expected[wrong].double()
    shares = {
        "nan": got.isnan(),
        "infinite": got.isinf(),
        "zero": got == 0,
        "negated": (got + right).abs() <= 1e-2 * right.abs(),
    }
    if untouched is not None:
        shares["untouched"] = untouched[wrong]
    return {
        "dtype": str(actual.dtype).removeprefix("torch."),
        "shape": [*actual.shape],
        "wrong": len(places),
        "of": actual.numel(),
        "along": [_along(places[:, dim], size) for dim, size in enumerate(actual.shape)],
        "shares": {name: _share(of) for name, of in shares.items()},
        "ratio": _quantiles((got / right)[right != 0], (0.1, 0.5, 0.9)),
        "error": _quantiles(apart.flatten().double(), (0.5, 0.9, 1.0)),
        "first": [
            [place.tolist(), _number(actual[tuple(place)]), _number(expected[tuple(place)])]
            for place in places[:FIRST]
        ],
    }


def _along(indices: Tensor, size: int) -> dict[str, int]:
    """Places of wrong elements along one dimension."""
    distinct = indices.unique()
    if not len(distinct):
        return {}
    first, last = int(distinct[0]), int(distinct[-1])
    step = math.gcd(*(int(i) - first for i in distinct[1:])) if len(distinct) > 1 else 1
    return {"first": first, "last": last, "count": len(distinct), "of": size, "every": step}


def _share(of: Tensor) -> float:
    return round(of.double().mean().item(), 4) if of.numel() else 0.0


def _quantiles(values: Tensor, at: tuple[float, ...]) -> list[float]:
    """Sorted, because torch.quantile takes no more than 16 million."""
    finite = values[values.isfinite()].sort().values
    return [float(f"{finite[round((len(finite) - 1) * q)].item():.3g}") for q in at] if len(finite) else []


def _number(value: Tensor) -> float | int | str:
    """JSON has no NaN."""
    number = value.item()
    return number if isinstance(number, int) or math.isfinite(number) else str(number)


def in_words(name: str, found: dict[str, Any]) -> str:
    """A result's line for people."""
    if "wrong" not in found:
        return f"{name} is {found['is']}, not {found['not']}"
    where = ", ".join(map(_words_along, found["along"]))
    shares = [f"{share:.0%} {what}" for what, share in found["shares"].items() if share]
    ratio = found["ratio"]
    shares += [f"got / expected {ratio[0]:g} to {ratio[2]:g}"] if ratio else []
    what = f"; {', '.join(shares)}" if shares else ""
    return f"{name}: {found['wrong']:,} of {found['of']:,} are wrong, in [{where}]{what}"


def _words_along(found: dict[str, int]) -> str:
    if not found:
        return "-"
    if found["count"] == 1:
        return f"{found['first']} (of {found['of']})"
    every = f" every {found['every']}" if found["every"] > 1 else ""
    few = (
        f", {found['count']} of them"
        if found["count"] * found["every"] < found["last"] - found["first"]
        else ""
    )
    return f"{found['first']}..{found['last']}{every} (of {found['of']}{few})"


def untouched(
    make: Callable[[], list[Tensor]], before: list[Tensor | None], actual: list[Tensor]
) -> list[Tensor | None]:
    """Masks of the elements of results that nobody wrote; None where this torch does not show it.

    `make` makes the call again, now into memory that torch fills before; `before` is what arguments were
    that are written in place, None for memory of the call's own.
    """
    found: list[Tensor | None] = []
    with _filled():
        results = make()
        new = torch.empty(1, device="mps").cpu()
    fills = torch.equal(_bits(new), _bits(_fill(new.dtype).expand(1)))
    for result, old, first in zip(results, before, actual, strict=True):
        if old is not None:
            found.append(_bits(result) == _bits(old))
        elif fills:  # elements that are the same without the fill were computed
            filled = _bits(result) == _bits(_fill(result.dtype))
            found.append(filled & (_bits(first) != _bits(result)))
        else:
            found.append(None)
    return found


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    """Inside, torch fills new memory with NaN, or the largest integer."""
    setting: Any = torch.utils.deterministic  # a module with a property
    enabled = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = setting.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    setting.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns_only)
        setting.fill_uninitialized_memory = filled


def _fill(dtype: torch.dtype) -> Tensor:
    """The value with which torch's fill_empty_deterministic_ fills memory."""
    value = math.nan if dtype.is_floating_point else dtype == torch.bool or torch.iinfo(dtype).max
    return torch.tensor(value, dtype=dtype)


def _bits(tensor: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])
