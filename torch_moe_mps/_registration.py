"""Registrations of this package with torch and transformers; torch_moe_mps_autoload says when.

Nothing here is called while a module of this package is half imported (the rule is torch_moe_mps_autoload's),
so each function may import any other.

Torch gets the operators; waiting for its import keeps `torch-moe-mps --help` fast. In transformers, the
implementation "moe_mps" goes with the experts interface, and with the attention interface for layers with
sinks or soft caps, quantised checkpoints with the quantizers, `save_pretrained` and `num_parameters`. PEFT
gets LoRA layers for quantised weights, and counts these, TRL the rows of quantised heads.
"""

import importlib
import os
import sys
from typing import Any


def register_operators(module: object) -> None:
    from . import ops  # noqa: F401
    from ._extension import load_extension

    load_extension()


def register_experts(module: Any) -> None:
    from .transformers.modules.experts import NAME, experts_forward

    module.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def register_gguf(module: Any) -> None:
    """Configs and tokenizers are read without the quantizers, which read weights."""
    from .transformers.families import GGUF

    for architecture, reader in GGUF.items():
        module.GGUF_CONFIG_ARCHS[architecture] = importlib.import_module(reader).config


def register_quantizer(module: object) -> None:
    from .transformers.checkpoints import quantizer
    from .transformers.checkpoints.gguf.quantizer import register_readers

    quantizer.register()
    register_readers()


def register_models(module: Any) -> None:
    from .transformers.attention.attention import NAME, attention
    from .transformers.attention.implementations import batch_eagerly, give_weights_eagerly
    from .transformers.checkpoints.quantize.counting import count_packed
    from .transformers.checkpoints.write.saving import describe_when_saving
    from .transformers.upstream import ContinuousBatchingManager

    module.AttentionInterface.register(NAME, attention)
    batch_eagerly(ContinuousBatchingManager)
    give_weights_eagerly(module.PreTrainedConfig)
    describe_when_saving(module.PreTrainedModel)
    count_packed(module.PreTrainedModel)


def register_mask(module: Any) -> None:
    from .transformers.attention.attention import NAME, attention_mask

    module.AttentionMaskInterface.register(NAME, attention_mask)


def load_in_one_thread(module: object) -> None:
    """Until torch 2.15, threads that convert dtypes on MPS side by side crash (pytorch#167541, #197836)."""
    from ._extension import ONE_THREAD, torch_version

    if sys.platform == "darwin" and torch_version() < (2, 15):
        os.environ.setdefault(ONE_THREAD, "1")


def register_adapters(module: object) -> None:
    from .transformers.adapters.peft import register

    register()


def register_trl(module: object) -> None:
    from .transformers.adapters.trl import register

    register()
