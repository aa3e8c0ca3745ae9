"""Quantised experts in checkpoints: quant_method "moe_mps", and MXFP4 blocks as gpt-oss stores them.

Imported when transformers' quantizers are, through the package's import hook.
"""

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..quantization import Format, repack_mxfp4_blocks
from .checking import check_loaded
from .experts import NAME
from .interface import experts_of, is_quantized, projections
from .packing import empty_quantized_module, quantize_modules


@register_quantization_config(NAME)
class ExpertsQuantizationConfig(QuantizationConfigMixin):
    """How the experts of a checkpoint are quantised, or shall be when they are loaded.

    Args:
        bits, group_size, mode: as in `torch_moe_mps.quantization.quantize`, for all experts.
        modules: {name: {bits, group_size, mode}} of the quantised experts modules, where they are not all of
            the model's or not in one format. Names of a larger or a smaller model are understood.

    Raises: ValueError for a format that does not exist.
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int | None = None,
        mode: str = "affine",
        modules: Mapping[str, Mapping[str, Any]] | None = None,
        **unused: Any,
    ):
        self.quant_method = NAME
        self.bits, self.group_size, self.mode = Format(bits, group_size, mode).to_dict().values()
        if modules is not None and not isinstance(modules, Mapping):
            raise ValueError(
                f"moe_mps: modules must be {{name: {{bits, group_size, mode}}}}, got {modules!r}"
            )
        for name, format in (modules or {}).items():
            if not isinstance(format, Mapping) or not set(format) <= {"bits", "group_size", "mode"}:
                raise ValueError(
                    f"moe_mps: modules[{name!r}] must be {{bits, group_size, mode}}, got {format!r}"
                )
        self.modules = modules and {name: Format(**format).to_dict() for name, format in modules.items()}

    def get(self, key: str, default: Any = None) -> Any:
        """As from the dict in config.json, for which transformers takes the config of a loaded model."""
        return getattr(self, key, default)

    def formats(self, names: Collection[str]) -> dict[str, Format]:
        """{name: format} of those of a model's experts modules that are quantised."""
        if self.modules is None:
            return dict.fromkeys(names, Format(self.bits, self.group_size, self.mode))
        return {_same_module(stored, names): Format(**format) for stored, format in self.modules.items()}


def _same_module(stored: str, names: Collection[str]) -> str:
    """The name in this model of what may have been saved from a larger or a smaller one."""
    same = [name for name in names if f".{name}".endswith(f".{stored}") or f".{stored}".endswith(f".{name}")]
    if stored in names:
        return stored
    if len(same) != 1:
        has = ", ".join(names) or "none"
        raise ValueError(f"moe_mps: the checkpoint has quantised experts {stored}, but the model has {has}")
    return same[0]


@register_quantizer(NAME)
class ExpertsQuantizer(HfQuantizer):
    """Loads quantised experts as they are; quantises the dense experts of other checkpoints after loading."""

    requires_calibration = False
    quantization_config: ExpertsQuantizationConfig

    def _formats(self, model: nn.Module) -> dict[nn.Module, Format]:
        experts = experts_of(model)
        formats = self.quantization_config.formats(experts)
        return {experts[name]: format for name, format in formats.items()}

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """No cast of numbers to codes: `check_loaded` names a parameter in a wrong dtype."""
        if dtype is not None and not dtype.is_floating_point:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        if self.pre_quantized:
            for module, format in self._formats(model).items():
                dense = {
                    name: torch.empty_like(getattr(module, name), device="meta")
                    for name in projections(module)
                }
                empty_quantized_module(module, format)
                # The model initialises what it takes for missing, from the experts or from their block.
                for name, weight in dense.items():
                    weight._is_hf_initialized = True
                    module.__dict__[name] = weight

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        formats = self._formats(model)
        if self.pre_quantized:
            for module in formats:
                for name in projections(module):
                    del module.__dict__[name]
            check_loaded(model)
            return
        for format in set(formats.values()):
            names = {name: module for name, module in model.named_modules() if formats.get(module) == format}
            quantize_modules(model, names, format)
        mark_quantized(model)

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


def mark_quantized(model: nn.Module) -> None:
    """Makes save_pretrained write checkpoints that from_pretrained reads as quantised.

    Every model of transformers in `model` with quantised experts is marked: whichever is saved, whatever is
    wrapped around it. The outermost comes last, since models share their config with the base model.
    """
    from transformers import PreTrainedModel  # still incomplete when this module is imported

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    marked = {part: config for part in parts if (config := _config_of(part)) is not None}
    if any(not isinstance(getattr(part, "hf_quantizer", None), ExpertsQuantizer) for part in marked):
        _own_configs(model)
    for part, config in reversed(marked.items()):
        part.config.quantization_config = config
        part.hf_quantizer = ExpertsQuantizer(config, pre_quantized=True)


def _own_configs(model: nn.Module) -> None:
    """Copies the configs in a model: another model with the same config object is not quantised."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)


def _config_of(model: nn.Module) -> ExpertsQuantizationConfig | None:
    experts = experts_of(model)
    quantized = {name: module.quantization for name, module in experts.items() if is_quantized(module)}
    if not quantized:
        return None
    usual = Counter(quantized.values()).most_common(1)[0][0]
    different = len(quantized) < len(experts) or len(set(quantized.values())) > 1
    modules = {name: format.to_dict() for name, format in quantized.items()} if different else None
    return ExpertsQuantizationConfig(**usual.to_dict(), modules=modules)
