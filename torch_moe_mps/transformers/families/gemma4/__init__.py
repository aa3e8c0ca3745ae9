"""Gemma 4: a router that norms, multiplies, selects and scales."""

from ...graphs.passes import INTRODUCED, PASSES
from ...graphs.passes.routing import logits_in_float32
from .passes import gate_in_one

PASSES.insert(PASSES.index(logits_in_float32), gate_in_one)
INTRODUCED[gate_in_one] = "moe_gate"
