"""What attention asks of a bias of relative positions, instead of an element for each token and key."""

from collections.abc import Callable

from torch import Tensor, nn

from ..basics.deferred import Deferred

MAKERS: list[Callable[[nn.Module], bool]] = []  # of families: whether a module makes such a bias


class RelativeBias(Deferred):
    """[B, Hq, T, S]: what is added to scores.

    Attributes:
        attend: (query, key, value, mask, scaling, window=None, sinks=None, softcap=None) -> the operator's
            attention with this bias; None where it needs its elements. `sinks`: [B, Hq, T, 1] or None; the
            others are as `attention` gets them.
    """

    attend: Callable[..., Tensor | None]
