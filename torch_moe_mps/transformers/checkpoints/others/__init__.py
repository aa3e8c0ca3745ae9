"""Reads checkpoints that other libraries quantised: compressed-tensors, AutoAWQ, GPTQModel, AutoRound,
ModelOpt, transformers' MetalConfig and FP8.
"""
