"""MiniMax-01: layers of lightning attention."""

from ...modules.rules.recurrent_layers import SCAN, recurrent_layer
from .. import Family
from .layers import lightning_layer

_CHILDREN = "qkv_proj", "output_gate", "norm", "out_proj"
_OPERATORS = SCAN, "rms_norm_gated"
FAMILY = Family(rules=(recurrent_layer(_CHILDREN, lightning_layer, *_OPERATORS),))
