"""Passes over a recorded graph before it becomes a program: they join patterns of operators into one.

A pass is a function of the graph that finds a pattern and puts calls in its place. Replaced calls have
no readers left, and are dropped. A pass may not change the order of reads and writes: it
inserts at the pattern's last call, and inputs must be unchanged until there (`is_unchanged`).
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import fx

from ..fusion import Fusion
from .attention import turn_in_attention
from .fused import (
    add_in_operators,
    add_norms,
    factor_in_norm,
    gate_in_attention,
    gates_in_gated_delta_rule,
    input_in_convolution,
    norm_in_gated_delta_rule,
    norm_sums,
    streams_in_update,
)
from .gated_delta_rule import keep_state
from .linears import activate_in_linears, factor_in_linears, join_linears, order_outputs
from .norms import norm_in_operators
from .pointwise import join_elements, split_dimensions
from .rotation import (
    heads_that_do_not_turn,
    join_rotations,
    norms_in_rotation,
    turn_parts,
    write_into_cache,
)
from .routing import choose_in_experts, hand_routing_over, scale_in_router, shared_expert_in_experts
from .simplify import (
    drop_neutral,
    drop_unused,
    make_new_tensors,
    positions_in_one,
    share_equal,
    share_views,
)
from .streams import update_in_connections


class Place(NamedTuple):
    """The place of a pass: directly before or after another one, which the room's own list has."""

    run: Callable[[fx.Graph], None]
    before: Callable[[fx.Graph], None] | None = None
    after: Callable[[fx.Graph], None] | None = None

    def put_into(self, passes: list[Callable[[fx.Graph], None]]) -> None:
        if self.before is not None:
            passes.insert(passes.index(self.before), self.run)
        if self.after is not None:
            passes.insert(passes.index(self.after) + 1, self.run)


# Passes in the order in which they run.
PASSES: list[Callable[[fx.Graph], None]] = [
    make_new_tensors,
    drop_neutral,
    share_views,  # readers of one value in one shape read one node
    positions_in_one,
    join_linears,  # before any of them has a norm or a residual of its own
    factor_in_linears,  # before the parts of a head are looked for
    turn_parts,  # heads as they lie in an output
    order_outputs,  # also outputs that the pass before has joined
    keep_state,
    gates_in_gated_delta_rule,
    norm_in_gated_delta_rule,  # once no copy of its state stands between
    input_in_convolution,
    order_outputs,  # several rows, whose heads no norm folds into them any more
    factor_in_norm,
    heads_that_do_not_turn,
    norms_in_rotation,  # norms of the whole heads
    join_rotations,
    write_into_cache,
    gate_in_attention,
    turn_in_attention,
    hand_routing_over,  # also gates that the pass before has made
    scale_in_router,  # before sums, which experts then take
    activate_in_linears,  # before sums: what an operator adds comes behind its activation
    add_in_operators,  # before norms: a sum in an operator leaves a norm that may join what follows
    add_norms,
    streams_in_update,
    update_in_connections,
    norm_in_operators,
    norm_sums,  # norms that no operator behind them has taken
    choose_in_experts,  # from logits that have their norm
    shared_expert_in_experts,
    split_dimensions,
    join_elements,  # operations that no operator has taken
    share_views,  # views that the passes have made
    share_equal,  # last: what a pattern reads once, a call of another layer may read too
]

FUSION = "fusion"  # stands for all passes where one is named

# The passes that put in operators which modules do not call.
INTRODUCED: dict[Callable[[fx.Graph], None], str] = {
    norm_in_operators: "router_logits",
    choose_in_experts: "router_logits",
    heads_that_do_not_turn: "rope",
    join_rotations: "rope",
    write_into_cache: "_rope_cache_",
    join_elements: "_pointwise",
    **{passed: passed.introduced for passed in PASSES if isinstance(passed, Fusion) and passed.introduced},
}


def simplify(graph: fx.Graph, refused: frozenset[str] = frozenset(), alone: bool = True) -> None:
    """Runs the passes.

    Args:
        refused: operators that none may put in, and passes that may not run; FUSION stands for all.
        alone: no other thread may be reading the model's weights, which `join_linears` moves.
    """
    drop_unused(graph)
    for passed in PASSES if FUSION not in refused else ():
        may_run = refused.isdisjoint((passed.__name__, INTRODUCED.get(passed)))
        if may_run and (alone or passed is not join_linears):
            passed(graph)
            drop_unused(graph)
