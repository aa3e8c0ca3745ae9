"""Zamba: Mamba-1 in heads."""

from ...modules.rules.recurrent_layers import CONVOLUTION, recurrent_layer
from .. import Family
from .layers import heads_layer

_CHILDREN = "in_proj", "conv1d", "out_proj"
FAMILY = Family(rules=(recurrent_layer(_CHILDREN, heads_layer, CONVOLUTION, "selective_scan_"),))
