"""Jamba: layers of Mamba-1 with norms within, and the names of its experts in MLX."""

from ...modules.rules.recurrent_layers import CONVOLUTION, FORMS, Form
from .. import MLX_NAMES
from .layers import selective_layer

_CHILDREN = "in_proj", "conv1d", "x_proj", "dt_proj", "dt_layernorm", "b_layernorm", "c_layernorm", "out_proj"
FORMS.append(Form(_CHILDREN, selective_layer, (CONVOLUTION, "rms_norm", "selective_scan_")))
MLX_NAMES["jamba"] = {"experts": "feed_forward.switch_mlp"}
