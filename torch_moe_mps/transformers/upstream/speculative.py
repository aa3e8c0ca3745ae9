"""MTP layers further tokens."""

from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

__all__ = ["MTPCandidateGenerator", "MtpCache", "MtpModel"]
