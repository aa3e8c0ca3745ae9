"""Trial of an indexer on few random numbers: the form in which it chooses as the model's own code does."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..modules.rules.trial import Forms, HeldKeys, agrees, first_form, tried
from .chosen_keys import Choice


class IndexerTrial(NamedTuple):
    """Two forwards of an indexer.

    Attributes:
        held: makes a cache, with the keys before.
        own: cache -> the result of the model's own forward.
        ours: (form, cache) -> Choice.
        is_same: (own result, Choice) -> whether both choose the same keys.
        forms: those that are tried, in this order.
    """

    held: Callable[[], HeldKeys]
    own: Callable[[HeldKeys], Any]
    ours: Callable[[Any, HeldKeys], Any]
    is_same: Callable[[Tensor, Choice], bool]
    forms: Sequence[Any]


def form_by_trial(module: nn.Module, make: Callable[..., IndexerTrial], *arguments: Any) -> Any:
    """The first form of the trial make(module, *arguments) with the same choice and the same keys, or None.

    It is tried once for all modules that are alike.
    """
    return first_form(module, _forms, make, *arguments)


def _forms(module: nn.Module, make: Callable[..., IndexerTrial], *arguments: Any) -> Forms:
    trial = make(module, *arguments)
    cache = trial.held()
    own = tried(trial.own, cache)

    def holds(form: Any) -> bool:
        other = trial.held()
        choice = trial.ours(form, other)
        return isinstance(choice, Choice) and trial.is_same(own, choice) and agrees(cache.keys, other.keys)

    return Forms(trial.forms if isinstance(own, Tensor) else (), holds)
