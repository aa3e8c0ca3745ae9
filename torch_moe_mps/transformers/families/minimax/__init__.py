"""MiniMax-01: layers of lightning attention."""

from typing import Any

from ...modules.rules.recurrent_layers import SCAN, recurrent_layer
from .. import Family
from .layers import has_usual_decays, lightning_layer, lightning_replica

_CHILDREN = "qkv_proj", "output_gate", "norm", "out_proj"
_OPERATORS = SCAN, "rms_norm_gated"


def _own_cache(config: Any) -> Any:
    if config.model_type != "minimax":
        return None
    from .cache import MiniMaxLayers  # its base is in the code of the model

    return MiniMaxLayers


_RULE = recurrent_layer(
    _CHILDREN, lightning_layer, *_OPERATORS, fits=has_usual_decays, make_replica=lightning_replica
)
FAMILY = Family(rules=(_RULE,), own_cache=_own_cache)
