"""Calls of models on the meta device, where tensors have shapes and no values."""

from typing import Any

import torch
from torch.fx.experimental import _config

from ..upstream.models import logging


@torch.no_grad()
def call_on_shapes(model: Any, **inputs: Any) -> Any:
    """Call a model of transformers on the meta device; its code's errors are raised.

    Which experts or tokens are chosen changes no shape. The advice to install kernels for other machines,
    which transformers gives for hybrids, is not shown.
    """
    model.set_experts_implementation("batched_mm")  # transformers' own, which knows shapes without values
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with _config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]  # made at run time
            return model(use_cache=True, **inputs)
    finally:
        logging.set_verbosity(verbosity)
