"""Checkpoint layouts: our own, MLX's, GGUF, and other libraries'."""
