"""Arguments of moe_gate and of the sorting of pairs."""

import torch

from support.values import random


def gate_arguments(tokens, width, num_experts, hidden_dtype, weight_dtype, seed):
    return (
        random((tokens, width), hidden_dtype, seed, 2.0),
        random((num_experts, width), weight_dtype, seed + 1, width**-0.5),
        random((width,), weight_dtype, seed + 2) + 1.0,
        torch.rand(num_experts, generator=torch.Generator().manual_seed(seed)).to(weight_dtype) + 0.5,
    )


def random_ids(shape, low, high, seed, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
