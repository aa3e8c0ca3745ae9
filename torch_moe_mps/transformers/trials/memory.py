"""Results of trials, remembered in this process.

A result holds for the code that ran: classes and functions, and the globals that these read.
"""

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._faults import is_out_of_memory, raise_fault
from ..basics.code import code_of
from ..basics.scoped import Bounded
from ..basics.state import class_before

if TYPE_CHECKING:  # it takes transformers' quantizers, which ours must come before
    from transformers import PreTrainedModel

_known = Bounded(512)  # {key: (result,)}
_counts = {"run": 0, "out of memory": 0}
_seconds = [0.0]


def recall(key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """find(), run once per key. A result is not remembered if the trial ran out of memory.

    Args:
        key: the trial and its inputs: classes, functions, shapes, plain values.
    """
    found = _known.get(key)
    if found is None:
        begun, before = time.perf_counter(), _counts["out of memory"]
        found = (find(),)
        raise_fault()
        _seconds[0] += time.perf_counter() - begun
        _counts["run"] += 1
        if _counts["out of memory"] == before:
            _known[key] = found
    return found[0]


def recall_of_model(model: "PreTrainedModel", find: Callable[[], Any], trial: Callable) -> Any:
    """find(), run once for models of these classes and this config, whatever their weights.

    Args:
        trial: the function whose result it is.
    """
    values = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "dtype")}
    classes = tuple(map(code_of, dict.fromkeys(class_before(module) for module in model.modules())))
    config = json.dumps(values, sort_keys=True, default=str)
    return recall((trial, class_before(model), config, classes), find)


def note_error(error: Exception) -> None:
    """Counts errors of eager code that mean memory ran out: the trial's result is not remembered."""
    _counts["out of memory"] += is_out_of_memory(error)


def forget() -> None:
    """Clears the remembered results."""
    _known.clear()


def trials_run() -> tuple[int, float]:
    """Number of trials that this process ran, and their seconds."""
    return _counts["run"], _seconds[0]


def summary_since(before: tuple[int, float]) -> str | None:
    """The report's line on the trials since `trials_run` returned `before`; None without any."""
    run, seconds = (now - then for now, then in zip(trials_run(), before, strict=True))
    return f"comparisons with eager code: {run} run ({seconds:.1f} s)" if run else None
