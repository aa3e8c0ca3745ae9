"""Inkling 2: attention with a bias of relative positions."""

from .. import Family
from .relative_bias import needs_ours, rewrite_relative_bias, take_biases

FAMILY = Family(rules=(rewrite_relative_bias,), layer_hook=take_biases, needs_our_kernel=needs_ours)
