"""Mixture-of-Experts operators for PyTorch on Apple GPUs: `torch.ops.moe_mps.*`."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "Importance",
    "QuantizationConfig",
    "accelerate",
    "collect_importance",
    "from_pretrained",
    "generate_batch",
    "ops",
    "read_importance",
    "restore",
    "synchronize",
]

# Imported when first used: most of it needs transformers, and all of it torch.
_LAZY = {
    "Importance": ".checkpoints.quantize.importance",
    "QuantizationConfig": ".checkpoints.own.config",
    "accelerate": ".transformers",
    "collect_importance": ".checkpoints.quantize.importance",
    "read_importance": ".checkpoints.quantize.importance",
    "restore": ".transformers",
    "from_pretrained": ".transformers.loading",
    "generate_batch": ".serving.generate_batch",
    "synchronize": "._faults",
}

if TYPE_CHECKING:
    from . import ops
    from ._faults import synchronize
    from .checkpoints.own.config import QuantizationConfig
    from .checkpoints.quantize.importance import Importance, collect_importance, read_importance
    from .serving.generate_batch import generate_batch
    from .transformers.accelerate import accelerate, restore
    from .transformers.loading import from_pretrained


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module(".ops", __name__)
    if name in _LAZY:
        if name != "synchronize":
            importlib.import_module(".transformers", __name__)  # its error says what to install
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def register_operators() -> None:
    """Defines `torch.ops.moe_mps.*`, with the Metal kernels if the extension was built for this torch."""
    from . import ops  # noqa: F401
    from ._extension import load_extension

    load_extension()


# The script `torch-moe-mps` checks its options before torch is imported, and registers operators afterwards.
if "torch_moe_mps_command" not in sys.modules:
    register_operators()
