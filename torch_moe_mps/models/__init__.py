"""What replaces the modules, functions and caches of transformers models."""
