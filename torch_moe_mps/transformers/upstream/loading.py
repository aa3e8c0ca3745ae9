"""Names and conversions of weights, as loading and saving use them."""

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
from transformers.modeling_utils import LoadStateDictConfig, _get_resolved_checkpoint_files

__all__ = [
    "Concatenate",
    "ConversionOps",
    "Interleave",
    "LoadStateDictConfig",
    "MergeModulelist",
    "PrefixChange",
    "Transpose",
    "WeightConverter",
    "WeightRenaming",
    "WeightTransform",
    "_get_resolved_checkpoint_files",
    "apply_renamings",
    "build_glob_alternation",
    "convert_and_load_state_dict_in_model",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "rename_source_key",
    "revert_weight_conversion",
    "seen_with",
]


def seen_with(model: Any, **attributes: Any) -> Any:
    """The model for a call of transformers, with other attributes: an object with the same modules."""
    seen = object.__new__(type(model))
    vars(seen).update(vars(model) | attributes)
    return seen
