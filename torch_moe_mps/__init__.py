"""Mixture-of-Experts operators for PyTorch on Apple GPUs: `torch.ops.moe_mps.*`."""

from . import ops
from ._extension import load_extension

__version__ = "0.1.0"
__all__ = ["ops"]

load_extension()
