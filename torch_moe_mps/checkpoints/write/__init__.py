"""Saves quantised models, and converts checkpoints one part at a time."""
