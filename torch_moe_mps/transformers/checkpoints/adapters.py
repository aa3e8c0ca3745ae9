"""PEFT on quantised models raises a one-line error that says what to do instead."""

import functools
from typing import Any

from ..modules.linears import QuantizedLayer


def refuse_quantized(peft_model: Any) -> None:
    """Patches what PEFT does not refuse itself: "all-linear", which would leave out the quantised layers,
    and prompt tuning, which needs a dense embedding.
    """
    from peft.tuners.tuners_utils import BaseTuner

    tuner: Any = BaseTuner
    inject, prompts = tuner.inject_adapter, peft_model.PeftModel._setup_prompt_encoder

    @functools.wraps(inject)
    def inject_adapter(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        targets = getattr(self.peft_config[adapter_name], "target_modules", None)
        is_all = isinstance(targets, str) and targets.lower() == "all-linear"
        if is_all and any(isinstance(module, QuantizedLayer) for module in model.modules()):
            _fail("an adapter of all-linear", "merge_and_unload() it into the dense model")
        return inject(self, model, adapter_name, *args, **kwargs)

    @functools.wraps(prompts)
    def _setup_prompt_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        get = getattr(self.base_model, "get_input_embeddings", lambda: None)
        if isinstance(get(), QuantizedLayer):
            _fail("prompt tuning", "tune the dense model, or quantise with embedding_bits=None")
        return prompts(self, *args, **kwargs)

    tuner.inject_adapter = inject_adapter
    peft_model.PeftModel._setup_prompt_encoder = _setup_prompt_encoder


def _fail(what: str, instead: str) -> None:
    raise ValueError(
        f"moe_mps: {what} must be on dense weights, got quantised ones; {instead}, then quantise"
    )
