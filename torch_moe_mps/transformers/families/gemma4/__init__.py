"""Gemma 4: a router that norms, multiplies, selects and scales, and keys for MLX."""

from ...graphs.passes import INTRODUCED, PASSES
from ...graphs.passes.routing import OPTIONS_OF, logits_in_float32
from .. import MLX_KEYS, MLX_NAMES
from .keys import NEEDED, older_keys
from .passes import gate_in_one, options_of_gate

PASSES.insert(PASSES.index(logits_in_float32), gate_in_one)
INTRODUCED[gate_in_one] = "moe_gate"
OPTIONS_OF.append(options_of_gate)
MLX_KEYS["gemma4_text"] = (NEEDED, older_keys)
MLX_NAMES["gemma4_text"] = {"experts": "experts.switch_glu"}
