"""The cache of MiniMax-01's own code, in whose module its models are."""

from transformers.models.minimax.modeling_minimax import MiniMaxCache

__all__ = ["MiniMaxCache"]
