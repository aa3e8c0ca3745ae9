"""Trials: modules and small models run on random numbers, ours compared with their eager code."""
