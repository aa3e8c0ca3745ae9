"""Replaces formulas in the forwards of a model by operators, and puts the model's own code back."""
