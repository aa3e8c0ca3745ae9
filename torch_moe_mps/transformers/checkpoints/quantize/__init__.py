"""Which weights are quantised, in which formats, and how."""
