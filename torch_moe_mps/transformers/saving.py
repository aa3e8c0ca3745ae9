"""Quantised experts in checkpoints: quant_method "moe_mps", and MXFP4 blocks as gpt-oss stores them.

Imported when transformers' quantizers are, through the package's import hook.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..quantization import QuantizationFormat, empty_quantized_module, quantize_experts, repack_mxfp4_blocks
from .experts import NAME, is_experts

MXFP4 = {"bits": 4, "group_size": 32, "mode": "mxfp4"}


@register_quantization_config(NAME)
class ExpertsQuantizationConfig(QuantizationConfigMixin):
    """How the experts of a checkpoint are quantised, or shall be when they are loaded.

    `modules` names the quantised experts modules; None means all of them.
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int = 64,
        mode: str = "affine",
        modules: list[str] | None = None,
        **unused: Any,
    ):
        QuantizationFormat(bits, group_size, mode)
        self.quant_method = NAME
        self.bits, self.group_size, self.mode = bits, group_size, mode
        self.modules = modules

    @property
    def format(self) -> QuantizationFormat:
        return QuantizationFormat(self.bits, self.group_size, self.mode)


@register_quantizer(NAME)
class ExpertsQuantizer(HfQuantizer):
    """Loads quantised experts as they are; quantises the dense experts of other checkpoints after loading."""

    requires_calibration = False
    quantization_config: ExpertsQuantizationConfig

    def _quantized(self, model: nn.Module) -> dict[str, nn.Module]:
        chosen = self.quantization_config.modules
        found = {name: module for name, module in model.named_modules() if is_experts(module)}
        return found if chosen is None else {name: found[name] for name in chosen}

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        if self.pre_quantized:
            for module in self._quantized(model).values():
                empty_quantized_module(module, self.quantization_config.format)
                module._is_hf_initialized = True  # the model would initialise dense weights

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        modules = self._quantized(model)
        if not self.pre_quantized:
            report = quantize_experts(model, **self.quantization_config.format.to_dict(), modules=modules)
            self.quantization_config.modules = list(report.modules)
        for module in modules.values():
            module.config._experts_implementation = NAME

    def get_weight_conversions(self) -> list:
        """MXFP4 blocks are read as packed weights; a checkpoint of this package has no blocks."""
        if not self.pre_quantized or self.quantization_config.mode != "mxfp4":
            return []
        return [
            WeightConverter(f"{name}_blocks", f"{name}_packed", [RepackBlocks()])
            for name in ("gate_up_proj", "down_proj")
        ]

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _only(tensors: dict[str, Tensor | list[Tensor]]) -> Tensor:
    (value,) = tensors.values()
    return value[0] if isinstance(value, list) else value


class RepackBlocks(ConversionOps):
    """Bytes [E, R, C / 32, 16] -> words [E, R, C / 8]: the same bits."""

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        blocks = _only(input_dict)
        # The scales are a parameter of their own; here they only say which shape the blocks must have.
        packed = repack_mxfp4_blocks(blocks, scales=blocks[..., 0]).packed
        return {target_patterns[0]: packed.view(torch.int32)}

    @property
    def reverse_op(self) -> ConversionOps:
        return WriteBlocks()


class WriteBlocks(ConversionOps):
    """Words back to bytes, for saving what was loaded from blocks."""

    def convert(
        self, input_dict: dict, source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict:
        packed = _only(input_dict)
        return {target_patterns[0]: packed.view(torch.uint8).unflatten(-1, (-1, 16))}

    @property
    def reverse_op(self) -> ConversionOps:
        return RepackBlocks()


def mark_quantized(model: nn.Module, format: QuantizationFormat) -> None:
    """Makes save_pretrained write a checkpoint that from_pretrained reads as quantised."""
    modules = [
        name for name, module in model.named_modules() if getattr(module, "quantization", None) == format
    ]
    config = ExpertsQuantizationConfig(**format.to_dict(), modules=modules)
    model.config.quantization_config = config
    model.hf_quantizer = ExpertsQuantizer(config, pre_quantized=True)


def from_pretrained(name: str, model_class: type | None = None, **kwargs: Any) -> nn.Module:
    """Load a model and accelerate it; MXFP4 experts (gpt-oss) stay in MXFP4 and are never dequantised.

    Args:
        name: folder or name on the Hub.
        model_class: of transformers; AutoModelForCausalLM unless given.
        kwargs: for its from_pretrained.

    Returns: the model in evaluation mode, accelerated.
    """
    import transformers

    from . import accelerate

    config = kwargs.pop("config", None) or transformers.AutoConfig.from_pretrained(name)
    stored = getattr(config, "quantization_config", None) or {}
    if stored.get("quant_method") == "mxfp4":
        config.quantization_config = {"quant_method": NAME, **MXFP4}
    cls = model_class or transformers.AutoModelForCausalLM
    model = cls.from_pretrained(name, config=config, **kwargs).eval()
    accelerate(model)
    return model
