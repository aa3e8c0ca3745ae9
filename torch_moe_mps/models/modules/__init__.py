"""Modules and functions of models that run on operators, and the rules that recognise them."""
