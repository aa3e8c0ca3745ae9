"""Arguments of routers and of the sorting of pairs."""

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


# One router of each kind in transformers, by a family that has it.
NORMED, AS_THEY_ARE = {"norm_topk_prob": True}, {"norm_topk_prob": False}
ROUTERS = {
    "mixtral": {"scoring": "softmax", **NORMED},
    "jamba": {"scoring": "softmax", **AS_THEY_ARE},
    "gpt_oss": {"scoring": "softmax_after_topk", **AS_THEY_ARE},
    "privacy_filter": {"scoring": "softmax_after_topk", **AS_THEY_ARE, "scaling_factor": 0.25},
    "gemma4": {"scoring": "softmax_after_topk", **AS_THEY_ARE, "scale": True},
    "ernie4_5": {"scoring": "softmax", **NORMED, "sum_eps": 0.0, "sum_min": 0.02, "bias": True},
    "longcat": {"scoring": "softmax", **AS_THEY_ARE, "scaling_factor": 6.0, "bias": True},
    "deepseek_v2": {"scoring": "softmax", **AS_THEY_ARE, "groups": True, "group_score": "max"},
    "mistral4": {"scoring": "softmax", **NORMED, "groups": True},
    "cohere2": {"scoring": "sigmoid", **NORMED},
    "lfm2": {"scoring": "sigmoid", **NORMED, "sum_eps": 1e-6, "bias": True},
    "kolibri1": {"scoring": "sigmoid", **NORMED, "bias": True, "bias_on_logits": True},
    "deepseek_v3": {"scoring": "sigmoid", **NORMED, "scaling_factor": 2.5, "bias": True, "groups": True},
    "axk2": {"scoring": "sigmoid", **NORMED, "bias": True, "groups": True, "masked_score": 0.0},
    "deepseek_v4": {"scoring": "sqrtsoftplus", **NORMED, "scaling_factor": 1.5, "bias": True},
    "every option": {
        "scoring": "sqrtsoftplus",
        **NORMED,
        "sum_eps": 0.5,
        "sum_min": 2.0,
        "bias": True,
        "bias_on_logits": True,
        "groups": True,
        "group_score": "max",
        "masked_score": -1.0,
        "scale": True,
    },
}


def router_options(name, num_experts, top_k, seed, dtype=torch.float32):
    """The keyword arguments of moe_router for one of ROUTERS, with tensors on the CPU."""
    options = dict(ROUTERS[name])
    if options.pop("bias", False):
        options["correction_bias"] = random((num_experts,), dtype, seed, 0.5)
    if options.pop("scale", False):
        options["per_expert_scale"] = random((num_experts,), dtype, seed + 1)
    if options.pop("groups", False):
        options["num_groups"] = 4
        options["top_groups"] = max(2, -(-4 * top_k // num_experts))
    return options
