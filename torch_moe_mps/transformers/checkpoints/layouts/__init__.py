"""Layouts that checkpoints have: our own, MLX's, GGUF files, and those of other libraries."""
