"""Recorded graphs of operators: how they are made, read and changed."""
