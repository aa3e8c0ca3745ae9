"""Mixture-of-Experts operators for PyTorch on Apple GPUs: `torch.ops.moe_mps.*`."""

from . import ops
from ._extension import load_extension
from ._import_hook import register_when_imported

__version__ = "0.1.0"
__all__ = ["accelerate", "from_pretrained", "ops", "restore"]

load_extension()
register_when_imported()


def __getattr__(name: str):
    """What needs transformers is imported when it is first used."""
    if name in ("accelerate", "restore"):
        from . import transformers

        return getattr(transformers, name)
    if name == "from_pretrained":
        from .transformers.saving import from_pretrained

        return from_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
