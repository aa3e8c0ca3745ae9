"""Mixture-of-Experts models of Hugging Face transformers on the operators of this package.

    torch_moe_mps.accelerate(model)             experts, routers, shared experts and norms, in place
    torch_moe_mps.accelerate(model, bits=4)     the same with quantised experts
    torch_moe_mps.restore(model)                the model as it was

Modules are recognised by their attributes and formulas, never by the name of a model; other modules run
unmodified. In training, under autocast, and when gradients are needed, the whole model does.
"""

from .. import ops as _operators  # noqa: F401  # registers them: patterns name operators while they are imported
from . import supported as _supported  # refuses a transformers that is too old

try:
    from ..models.basics.interface import experts_of, is_experts, is_quantized
    from ..models.basics.report import QuantizationReport, Report, Row
    from ..models.modules.experts import unsupported
    from . import wiring  # noqa: F401  # fills the tables
    from .accelerate import accelerate, restore
except ImportError as error:
    raise _supported.lacking(error) from error

__all__ = [
    "QuantizationReport",
    "Report",
    "Row",
    "accelerate",
    "experts_of",
    "is_experts",
    "is_quantized",
    "restore",
    "unsupported",
]
