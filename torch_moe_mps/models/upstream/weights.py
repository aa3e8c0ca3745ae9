"""Names and conversions of weights, quantizers of the loader, and readers of GGUF files."""

from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_renamings,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations import gguf
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported
from transformers.integrations.gguf import gguf_tokenizer_mapping as tokenizer_mapping
from transformers.modeling_utils import LoadStateDictConfig, _get_resolved_checkpoint_files
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import GgufConfig, QuantizationConfigMixin


def seen_with(model: Any, **attributes: Any) -> Any:
    """The model for a call of transformers, with other attributes: an object with the same modules."""
    seen = object.__new__(type(model))
    vars(seen).update(vars(model) | attributes)
    return seen
