"""Layers behind a model that draft further tokens (multi-token prediction): read, quantised and run."""
