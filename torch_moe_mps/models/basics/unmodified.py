"""Modules that run unmodified: their operators fail the self-check on this machine, or MOE_MPS_REFUSE names
them; their class differs from its eager code in a trial; or eager code is faster on a CPU.
"""

import contextlib
import itertools
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..._environment import REFUSE
from ...selfcheck.compare import Finding
from .interface import weights_in
from .report import Done, Row
from .state import class_before

# Operators that took longer than eager code in each case of `scripts/bench/bench_cpu.py --modules`:
# 1.1 to 8 times as long, for a token and for a prompt of 64. Experts, attention, hyper-connections and linear
# attention did not.
SLOWER = {
    *("layer_norm", "rms_norm", "rms_norm_gated"),
    *("moe_router", "router_logits"),
    *("_pointwise", "rope", "rope_heads"),
}
_all_run = False


def are_slower(done: Iterable[Done]) -> bool:
    """True if eager code is faster on a CPU than all of these."""
    return SLOWER.issuperset(one.operator for one in done)


def eager_is_faster(values: Iterable[Any]) -> bool:
    """True if a call with these arguments is on a CPU: the first tensor decides."""
    for value in values:
        if isinstance(value, Tensor):
            return value.is_cpu and not _all_run
    return False


@contextlib.contextmanager
def all_operators() -> Iterator[None]:
    """Inside the block operators run on a CPU, too, as they do on mps: for comparisons and tests."""
    global _all_run
    before, _all_run = _all_run, True
    try:
        yield
    finally:
        _all_run = before


def eager_on_cpu(model: nn.Module, rows: Iterable[Row]) -> dict[str, tuple[Done, ...]]:
    """{name of a module on a CPU: its operators for which eager code runs there}, without empty ones."""
    if _all_run:
        return {}
    found = {}
    for row in rows:
        module = model.get_submodule(row.name)
        tensor = next(itertools.chain(module.parameters(), module.buffers(), weights_in(model)), None)
        eager = tuple(done for done in row.done if done.only_on_mps or done.operator in SLOWER)
        if eager and tensor is not None and tensor.is_cpu:
            found[row.name] = eager
    return found


# {operator: what is wrong with it on this machine's GPU}, as the last check of this process found
FAILED: dict[str, Finding] = {}
# {operator or pass that MOE_MPS_REFUSE named at the last `accelerate` of this process: the name there}
REQUESTED: dict[str, str] = {}
# Operators and passes that no module and no captured step may run.
REFUSED: Mapping[str, Finding | str] = ChainMap[str, Any](FAILED, REQUESTED)
# {class: why its modules run unmodified}, as `trials.untested` found behind a transformers that is not known
UNMODIFIED: dict[type, str] = {}


def refusal(module: nn.Module, done: Iterable[Done]) -> str | None:
    """Why a module runs unmodified: an operator that would run in its place has failed, or is not wanted."""
    operators = [item.operator for item in done]
    for operator in operators:
        if operator in REQUESTED:
            return f"{REFUSE} names {REQUESTED[operator]}"
    failed = [operator for operator in operators if operator in FAILED]
    return f"{failed[0]} fails the self-check on this GPU" if failed and is_on_mps(module) else None


def why_unmodified(module: nn.Module) -> str | None:
    """Why a module runs unmodified, whatever would run in its place."""
    return UNMODIFIED.get(class_before(module))


def is_on_mps(module: nn.Module) -> bool:
    return any(weight.device.type == "mps" for weight in weights_in(module))
