"""What attention asks of a bias of relative positions, instead of an element for each token and key."""

from collections.abc import Callable

from torch import Tensor, nn

from ..basics.deferred import Deferred

MAKERS: list[Callable[[nn.Module], bool]] = []  # of families: whether a module makes such a bias


class RelativeBias(Deferred):
    """[B, Hq, T, S]: what is added to scores."""

    def by_distance(self, start: int, stop: int) -> Tensor:
        """[B, T', Hq, E] of the tokens from `start` to `stop`, as the operator `attention` takes it."""
        raise NotImplementedError

    def tokens_at_once(self) -> int:
        """How many tokens have such biases at a time."""
        raise NotImplementedError
