"""What attention asks of a bias of relative positions, instead of an element for each token and key."""

from collections.abc import Callable

from torch import Tensor, nn

from ..basics.deferred import Deferred

MAKERS: list[Callable[[nn.Module], bool]] = []  # of families: whether a module makes such a bias


class RelativeBias(Deferred):
    """[B, Hq, T, S]: what is added to scores."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor | None:
        """The operator's attention with this bias; None where it needs its elements.

        `sinks`: [B, Hq, T, 1] or None; the others are as `attention` gets them.
        """
        raise NotImplementedError
