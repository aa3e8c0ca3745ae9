"""Modules that run the model's own code on a CPU, where it is faster than the operators' references."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..._environment import CPU_OPERATORS, is_asked
from .interface import weights_in
from .report import Done

# Operators that took longer than the model's own code in each case of `scripts/bench/bench_cpu.py --modules`:
# 1.1 to 8 times as long, for a token and for a prompt of 64. Experts, attention, hyper-connections and linear
# attention did not.
SLOWER = {
    *("layer_norm", "rms_norm", "rms_norm_gated"),
    *("moe_hash_router", "moe_router", "router_logits"),
    *("_pointwise", "rope"),
}
_all_run = is_asked(CPU_OPERATORS)


def are_slower(done: Iterable[Done]) -> bool:
    """Whether the model's own code is faster on a CPU than all of these."""
    return SLOWER.issuperset(one.operator for one in done)


def own_is_faster(values: Iterable[Any]) -> bool:
    """Whether a call with these arguments is on a CPU: the first tensor decides."""
    for value in values:
        if isinstance(value, Tensor):
            return value.is_cpu and not _all_run
    return False


@contextlib.contextmanager
def all_operators() -> Iterator[None]:
    """Inside the block operators run on a CPU, too, as they do on mps: for comparisons."""
    global _all_run
    before, _all_run = _all_run, True
    try:
        yield
    finally:
        _all_run = before


def said_of(model: nn.Module, done: Iterable[Done]) -> str | None:
    """Line of the report about a model on a CPU that keeps its own code for some of this; else None."""
    found = dict.fromkeys(str(one) for one in done if one.operator in SLOWER)
    if _all_run or not found or not any(weight.is_cpu for weight in weights_in(model)):
        return None
    return f"on the CPU the model's own code is faster, and runs, in place of {', '.join(found)}"
