"""The result of each operator for its arguments in float64, and how far float32 arithmetic may be off.

The function expected_<operator> of its family in support/ops/ gives its results, then what it leaves in
arguments that it writes.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from support import oracles
from support.ops import family
from support.oracles import exact
from support.oracles_experts import DEVIATIONS, Estimate
from torch_moe_mps.ops._samples import packet


class Expected(NamedTuple):
    """`error` comes on top of one unit of the last place of the result; None: the value itself, rounded.

    Where `known` is False float32 cannot tell the right result.
    """

    value: np.ndarray
    error: np.ndarray | float | None = None
    known: np.ndarray | bool = True


def given(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else exact(tensor)


def estimated(estimate: Estimate) -> Expected:
    return Expected(estimate.value, DEVIATIONS * estimate.deviation)


EMPTY = Expected(np.zeros(0))


def expected(name: str, arguments: dict[str, Any], results: Sequence[Tensor] = ()) -> list[Expected]:
    """What the operator must give for these arguments; tensors may be on any device. Where several results
    are right, the oracle judges those that it gave."""
    defaults = {a.name: a.default_value for a in packet(name).default._schema.arguments}
    on_cpu = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in arguments.items()}
    defaults["results"] = [result.cpu() for result in results]
    with np.errstate(all="ignore"):
        return getattr(family(name), f"expected_{name}")(SimpleNamespace(**defaults | on_cpu))


def written(name: str) -> list[str]:
    """The arguments that it writes in place."""
    arguments = packet(name).default._schema.arguments
    return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def checked(name: str, *args: Any, **kwargs: Any) -> Any:
    """What the operator returns, after it and all tensors written in place were compared with the oracle."""
    names = [a.name for a in packet(name).default._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    before = {n: v.clone() if n in written(name) and v is not None else v for n, v in arguments.items()}
    result = packet(name)(**arguments)
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    right = expected(name, before, results)
    assert all(tensor.is_contiguous() for tensor in results), name
    actual = [*results, *(arguments[n] for n in written(name) if arguments.get(n) is not None)]
    for number, (tensor, tensor_right) in enumerate(zip(actual, right, strict=True)):
        check_tensor(tensor, tensor_right, f"{name}: result {number}")
    return result


def check_tensor(result: Tensor, right: Expected, what: str) -> None:
    assert tuple(result.shape) == right.value.shape, what
    if not result.dtype.is_floating_point:
        wrong = (result.cpu().numpy() != right.value) & right.known
        assert not wrong.any(), f"{what}: {wrong.sum()} wrong"
        return
    got = exact(result)
    with np.errstate(all="ignore"):
        correct = oracles.round_to(right.value, result.dtype)
        if right.error is None:
            wrong = got != correct
        else:
            wrong = ~(abs(got - correct) <= oracles.spacing(correct, result.dtype) + right.error)
        # A result beyond the dtype is infinite, or the largest number if rounded the other way.
        largest = 0.99 * oracles.FORMATS[result.dtype][2]
        wrong &= ~((abs(correct) >= largest) & (abs(got) >= largest) & (np.sign(got) == np.sign(correct)))
    wrong &= np.isfinite(right.value) & right.known
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} wrong"
