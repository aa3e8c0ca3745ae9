"""Replacements for the modules, functions and caches of transformers models; importing this loads none."""
