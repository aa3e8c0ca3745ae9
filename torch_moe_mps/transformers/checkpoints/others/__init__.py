"""Reads checkpoints that other libraries quantised: compressed-tensors, AutoAWQ, GPTQModel, ModelOpt, FP8."""
