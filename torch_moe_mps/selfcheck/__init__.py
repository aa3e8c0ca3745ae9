"""Compares the operators on this machine's GPU with their references on the CPU.

`torch-moe-mps check` makes all calls of calls.py, and prints and writes the results. accelerate() makes the
calls of the operators, dtypes, formats and heads that a model uses, once per package, torch,
macOS and GPU; an operator that fails is not used. What a model calls beyond that is compared before its first
call (once.py).
"""
