"""Continuous batching: jobs become sequences that one thread generates together."""
