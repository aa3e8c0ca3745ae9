"""Jamba: layers of Mamba-1 with norms within."""

from ...modules.rules.recurrent_layers import CONVOLUTION, recurrent_layer
from .. import Family
from .layers import selective_layer

_CHILDREN = "in_proj", "conv1d", "x_proj", "dt_proj", "dt_layernorm", "b_layernorm", "c_layernorm", "out_proj"
_OPERATORS = CONVOLUTION, "rms_norm", "selective_scan_"
FAMILY = Family(rules=(recurrent_layer(_CHILDREN, selective_layer, *_OPERATORS),))
