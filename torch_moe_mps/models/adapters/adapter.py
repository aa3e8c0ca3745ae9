"""A stored LoRA adapter, for programs. PEFT is imported where an adapter is read: it may not be installed."""

from collections.abc import Iterable
from typing import Any

import torch


class Adapter:
    """An adapter of PEFT.

    Args:
        folder: that it is stored in.
    """

    def __init__(self, folder: str):
        self.folder = folder

    def _config(self) -> Any:
        from peft import LoraConfig

        return LoraConfig.from_pretrained(self.folder)

    def check(self, dense: Any) -> None:
        """Checks that the adapter fits a dense model on the meta device, which gets its layers.

        Raises: ValueError that names a tensor.
        """
        from peft import get_peft_model

        from .lora import check_stored, quiet

        config = self._config()
        config.init_lora_weights = False  # some ways to initialise read the weights
        with quiet(), torch.device("meta"):
            adapted = get_peft_model(dense, config)
        check_stored(self.folder, adapted)

    def added_to(self, model: Any) -> Any:
        """The model with the adapter's layers in it."""
        from peft import PeftModel

        from .lora import quiet

        with quiet():
            adapted = PeftModel.from_pretrained(model, self.folder)
        return adapted.eval().get_base_model()

    def adapted_experts(self, model: Any, names: Iterable[str]) -> str | None:
        """The first of some experts modules that the adapter has layers for; None if it has for none."""
        from .peft import adapts_experts

        config = self._config()
        return next((name for name in names if adapts_experts(config, name, model.get_submodule(name))), None)
