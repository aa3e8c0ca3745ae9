"""Quantised checkpoints: which weights, how they are read, quantised, saved and loaded."""
