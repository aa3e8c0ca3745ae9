"""Adapters of PEFT on quantised layers and experts."""
