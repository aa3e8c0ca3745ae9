"""Quantises weights: the recipe that names them, their formats, their importance, and their sizes."""
