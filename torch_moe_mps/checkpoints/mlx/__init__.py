"""Checkpoints in MLX's layout, read and written."""
