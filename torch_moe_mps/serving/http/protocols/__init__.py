"""One module a protocol: its request fields, its answers and its events."""
