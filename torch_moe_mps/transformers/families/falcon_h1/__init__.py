"""Falcon-H1: layers of Mamba-2 beside attention, whose projections have factors."""

from ...modules.rules.recurrent_layers import CONVOLUTION, SCAN, recurrent_layer
from .. import Family
from .layers import scaled_mamba

_CHILDREN = "in_proj", "conv1d", "norm", "out_proj"
FAMILY = Family(rules=(recurrent_layer(_CHILDREN, scaled_mamba, CONVOLUTION, SCAN),))
