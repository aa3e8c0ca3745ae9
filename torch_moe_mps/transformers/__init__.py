"""Mixture-of-Experts models of Hugging Face transformers on the operators of this package.

    torch_moe_mps.accelerate(model)             experts, routers, shared experts and norms, in place
    torch_moe_mps.accelerate(model, bits=4)     the same with quantised experts
    torch_moe_mps.restore(model)                the model as it was

What is replaced is found by the modules' own attributes and formulas, never by the name of a model, and what
is not recognised stays as it is. Training, gradients that are needed and autocast run the model's own code.
"""

from .accelerate import accelerate, restore
from .checkpoints.quantize import quantize_experts
from .experts import unsupported
from .interface import experts_of, is_experts, is_quantized
from .report import QuantizationReport, Report, Row

__all__ = [
    "QuantizationReport",
    "Report",
    "Row",
    "accelerate",
    "experts_of",
    "is_experts",
    "is_quantized",
    "quantize_experts",
    "restore",
    "unsupported",
]
