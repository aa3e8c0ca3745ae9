"""Layers that guess further tokens."""

from transformers.modeling_layers import MtpModel

__all__ = ["MtpModel"]
