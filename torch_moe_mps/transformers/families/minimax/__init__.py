"""MiniMax-01: layers of lightning attention."""

from ...modules.rules.recurrent_layers import FORMS, SCAN, Form
from .layers import lightning_layer

_CHILDREN = "qkv_proj", "output_gate", "norm", "out_proj"
_ARGUMENTS = "past_key_values", ("position_embeddings",)
FORMS.append(Form(_CHILDREN, lightning_layer, (SCAN, "rms_norm_gated"), *_ARGUMENTS))
