"""Common knowledge of models: their interfaces, the state that this package keeps in modules, the report."""
