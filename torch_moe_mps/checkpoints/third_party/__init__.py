"""Reads checkpoints that other libraries quantised: compressed-tensors, AutoAWQ, GPTQModel, AutoRound,
ModelOpt and FP8.
"""
