"""Results of trials, remembered in this process.

A result holds for the code that ran: classes and functions, and the globals that these read.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..._faults import is_out_of_memory
from ..basics.code import code_of
from ..basics.scoped import Bounded
from ..basics.state import class_before

if TYPE_CHECKING:  # it takes transformers' quantizers, which ours must come before
    from transformers import PreTrainedModel

_known = Bounded(512)  # {key: result}
_errors = [0]  # count of out-of-memory errors of eager code


def recall(key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """find(), run once per key. A result is not remembered if eager code ran out of memory.

    Args:
        key: the trial and its inputs: classes, functions, shapes, plain values.
    """
    if key in _known:
        return _known[key]
    before, result = memory_errors(), find()
    if memory_errors() == before:
        _known[key] = result
    return result


def note_error(error: Exception) -> None:
    """Counts errors of eager code that mean that memory ran out."""
    _errors[0] += is_out_of_memory(error)


def memory_errors() -> int:
    """How often eager code ran out of memory in this process."""
    return _errors[0]


def recall_of_model(model: "PreTrainedModel", find: Callable[[], Any], trial: Callable) -> Any:
    """find(), run once for models of these classes and this config, whatever their weights.

    Args:
        trial: the function whose result it is.
    """
    values = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "dtype")}
    classes = tuple(map(code_of, dict.fromkeys(class_before(module) for module in model.modules())))
    config = json.dumps(values, sort_keys=True, default=str)
    return recall((trial, class_before(model), config, classes), find)


def forget() -> None:
    """Clears the remembered results."""
    _known.clear()
