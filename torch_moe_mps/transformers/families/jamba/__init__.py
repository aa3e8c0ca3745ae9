"""Jamba: layers of Mamba-1 with norms within."""

from ...modules.rules.recurrent_layers import CONVOLUTION, FORMS, Form
from .layers import selective_layer

_CHILDREN = "in_proj", "conv1d", "x_proj", "dt_proj", "dt_layernorm", "b_layernorm", "c_layernorm", "out_proj"
FORMS.append(Form(_CHILDREN, selective_layer, (CONVOLUTION, "rms_norm", "selective_scan_")))
