"""Outputs and blocks of models, files of the hub, tables of functions, and the log."""

from transformers.dynamic_module_utils import HF_MODULES_CACHE
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput, cached_file, logging
from transformers.utils.generic import GeneralInterface

__all__ = [
    "GENERATION_CONFIG_NAME",
    "HF_MODULES_CACHE",
    "GeneralInterface",
    "GradientCheckpointingLayer",
    "ModelOutput",
    "cached_file",
    "logging",
]
