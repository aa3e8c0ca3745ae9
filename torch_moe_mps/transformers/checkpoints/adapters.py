"""PEFT on quantised models raises a one-line error that says what to do instead."""

import functools
from typing import Any

from ..linears import QuantizedLayer


def refuse_quantized(peft_model: Any) -> None:
    """Patches the module `peft.peft_model`: LoRA needs dense layers, prompt tuning a dense embedding."""
    from peft.tuners.lora import LoraModel

    lora: Any = LoraModel
    create, prompts = lora._create_new_module, peft_model.PeftModel._setup_prompt_encoder

    @functools.wraps(create)
    def _create_new_module(config: Any, adapter: str, target: Any, **kwargs: Any) -> Any:
        if isinstance(target, QuantizedLayer):
            _fail("a LoRA adapter", "merge_and_unload() it into the dense model")
        return create(config, adapter, target, **kwargs)

    @functools.wraps(prompts)
    def _setup_prompt_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        get = getattr(self.base_model, "get_input_embeddings", lambda: None)
        if isinstance(get(), QuantizedLayer):
            _fail("prompt tuning", "tune the dense model, or quantise with embedding_bits=None")
        return prompts(self, *args, **kwargs)

    lora._create_new_module = staticmethod(_create_new_module)
    peft_model.PeftModel._setup_prompt_encoder = _setup_prompt_encoder


def _fail(what: str, instead: str) -> None:
    raise ValueError(
        f"moe_mps: {what} must be on dense weights, got quantised ones; {instead}, then quantise"
    )
