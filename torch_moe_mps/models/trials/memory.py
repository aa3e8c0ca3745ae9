"""Results of trials, remembered in this process.

A result holds for the code that ran: classes and functions, and the globals that these read. What the caller
is in the middle of, as autocast, is no part of it: the code runs apart from that.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..._faults import is_out_of_memory
from ..basics.code import code_of
from ..basics.guards import collection, is_observed
from ..basics.record import Record, recording_code
from ..basics.scoped import Bounded
from ..basics.state import Unsupported, class_before

if TYPE_CHECKING:  # it takes transformers' quantizers, which ours must come before
    from transformers import PreTrainedModel

_known = Bounded(512)  # {key: result}
_MOST_ALIKE = 16  # results for one key
_errors = [0]  # count of out-of-memory errors of eager code


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Tensors made without a device are on the CPU, where the generators of random ones are."""
    is_default = torch.get_default_device().type == "cpu"  # else a mode is asked in each call of torch
    with contextlib.nullcontext() if is_default else torch.device("cpu"):
        yield


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Runs the block without gradients, modes and warnings, in float32 on the CPU, whatever the caller has.

    The random numbers and defaults of the process are restored.
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for context in (
            *(warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _disable_current_modes()),
            *(torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast(), on_the_cpu()),
        ):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def recall(key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """find(), run once per key, but for results that `_may_be_remembered` leaves out.

    Args:
        key: the trial and its inputs: classes, functions, shapes, plain values.
    """
    if key in _known:
        return _known[key]
    before = memory_errors()
    with apart():
        result = find()
    if _may_be_remembered(before):
        _known[key] = result
    return result


def recall_alike(
    key: Hashable, module: nn.Module, find: Callable[[], Any], known: dict[Any, Any] | None = None
) -> Any:
    """find(), run once for modules that are alike: of one key, and in all that their code reads.

    What is recognised rests on that from then on. `_may_be_remembered` says which results are left out.

    Args:
        known: remembers the results; without it they are remembered with those of all trials.

    Raises: Unsupported if there is a result, and its code does what no record holds.
    """
    known = _known if known is None else known
    entries: list[tuple[Record, tuple, Any]] = known.get(key, [])
    fits = (each for each in entries if each[0].described(module) == each[1] and each[0].is_current())
    record, _, result = next(fits, (None, (), None))
    if record is None:
        before = memory_errors()
        with apart(), recording_code() as record:
            result = find()
        if _may_be_remembered(before):
            known[key] = [*entries[1 - _MOST_ALIKE :], (record, record.described(module), result)]
    guards = collection()
    if result or (guards is not None and guards.of_misses):
        try:
            found = record.guards_of(module)
        except Unsupported:
            if result:
                raise
        else:
            if guards is not None:
                guards.merge(found)
    return result


def note_error(error: Exception) -> None:
    """Counts errors of eager code that mean that memory ran out."""
    _errors[0] += is_out_of_memory(error)


def memory_errors() -> int:
    """Number of times that eager code ran out of memory in this process."""
    return _errors[0]


def _may_be_remembered(errors: int) -> bool:
    """False if memory ran out in a trial, or if hooks of all modules have seen it: the next one may differ.

    Args:
        errors: of memory before the trial.
    """
    return memory_errors() == errors and not is_observed()


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
