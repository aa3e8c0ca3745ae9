"""What all parts know of a model: its interfaces, what this package keeps in its modules, and the report."""
