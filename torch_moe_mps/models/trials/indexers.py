"""Trials of indexers: the first form that chooses the same keys as eager code, on few random numbers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from .comparing import agrees, tried
from .forms import first_form
from .replicas import HeldKeys


class IndexerTrial(NamedTuple):
    """Two forwards of an indexer.

    Attributes:
        held: makes a cache, with the keys before.
        own: cache -> the result of the model's own forward.
        ours: (form, cache) -> our choice, a tuple.
        is_same: (own result, our choice) -> whether both choose the same keys.
    """

    held: Callable[[], HeldKeys]
    own: Callable[[HeldKeys], Any]
    ours: Callable[[Any, HeldKeys], Any]
    is_same: Callable[[Tensor, Any], bool]


def form_by_trial(
    module: nn.Module, forms: Sequence[Any], make: Callable[..., IndexerTrial], *arguments: Any
) -> Any:
    """The first form whose choice and keys equal those of eager code, or None. `make` gives the trial."""
    return first_form(module, forms, _begin, make, *arguments)


def _begin(module: nn.Module, make: Callable[..., IndexerTrial], *arguments: Any) -> Callable[[Any], bool]:
    trial = make(module, *arguments)
    cache = trial.held()
    expected = tried(trial.own, cache)

    def holds(form: Any) -> bool:
        other = trial.held()
        choice = trial.ours(form, other)
        is_choice = isinstance(expected, Tensor) and isinstance(choice, tuple)
        return is_choice and trial.is_same(expected, choice) and agrees(cache.keys, other.keys)

    return holds
