"""Llama 4: norms after the rotation, and experts whose weights multiply their inputs."""

from ...graphs.passes import Place
from ...graphs.passes.rotation import heads_that_do_not_turn
from ...graphs.passes.routing import hand_routing_over
from .. import Family
from .passes import norms_behind_rotation, weights_on_inputs

FAMILY = Family(
    passes=(
        Place(norms_behind_rotation, before=heads_that_do_not_turn),  # they are of heads that turn
        Place(weights_on_inputs, before=hand_routing_over),
    )
)
