"""Experts of models larger than memory: a file of them, and pools of slots that they are read into."""
