"""Protocols, one per module: request fields, answers and events."""
