"""Models over several processes."""

from transformers.distributed import DistributedConfig

__all__ = ["DistributedConfig"]
