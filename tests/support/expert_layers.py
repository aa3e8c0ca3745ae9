"""Random layers of experts, and a check of one against the float64 oracle."""

import torch

from support.oracles_operators import checked
from support.values import DTYPES, random

IDS = (torch.int32, torch.int64)


def random_ids(tokens, slots, experts, seed, dtype):
    """Distinct ids in a row where there are enough experts."""
    generator = torch.Generator().manual_seed(seed)
    if slots > experts:
        return torch.randint(experts, (tokens, slots), generator=generator).to(dtype)
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :slots].to(dtype)


def ids_of_counts(counts, slots, seed):
    """[T, slots]: expert e occurs counts[e] times, sentinels fill up."""
    flat = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).int()
    flat = torch.cat([flat, torch.full((-len(flat) % slots,), -1, dtype=torch.int32)])
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))
    return flat[order].reshape(-1, slots)


def layer(tokens, slots, experts, hidden, intermediate, dtype, seed=0, *, gated=True, ids_dtype=torch.int32):
    """x, weights, ids, gate_up, down of one layer, on the CPU."""
    rows = 2 * intermediate if gated else intermediate
    return (
        random((tokens, hidden), dtype, seed),
        random((tokens, slots), torch.float32, seed + 4).softmax(-1),
        random_ids(tokens, slots, experts, seed + 3, ids_dtype),
        random((experts, rows, hidden), dtype, seed + 1, hidden**-0.5),
        random((experts, hidden, intermediate), dtype, seed + 2, intermediate**-0.5),
    )


def to_device(options, device):
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


def check_experts(device, arguments, **options):
    x, weights, ids, gate_up, down = arguments
    if options.get("transposed"):
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    tensors = [tensor.to(device) for tensor in (x, weights, ids, gate_up, down)]
    checked("_moe_experts", *tensors, **to_device(options, device))


ACTIVATIONS = (
    {"activation": "silu"},
    {"activation": "gelu"},
    {"activation": "gelu_tanh"},
    {"activation": "relu"},
    {"activation": "relu2"},
    {"activation": "swiglu_oai"},
    {"activation": "swiglu_oai", "alpha": 1.5, "limit": 0.75},
    {"activation": "silu_clamped", "limit": 0.5},
    {"activation": "silu_capped", "limit": 0.5},
)


def random_options(choose, shape, dtype, seed):
    """Any keywords of _moe_experts but `transposed` that go together."""
    tokens, _, experts, hidden, intermediate = shape
    options = dict(choose.choice(ACTIVATIONS))
    options["gated"] = "limit" in options or options["activation"] == "swiglu_oai" or choose.random() < 0.8
    options["interleaved"] = options["gated"] and choose.random() < 0.5
    rows = 2 * intermediate if options["gated"] else intermediate
    tensors = {
        "gate_up_bias": (experts, rows),
        "down_bias": (experts, hidden),
        "residual": (tokens, hidden),
        "shared_out": (tokens, hidden),
    }
    for i, (name, size) in enumerate(tensors.items()):
        if choose.random() < 0.5:
            options[name] = random(size, dtype, seed + i)
    if "shared_out" in options and choose.random() < 0.7:
        options["shared_gate"] = random((tokens, 1)[: choose.randint(1, 2)], choose.choice(DTYPES), seed + 9)
        options["gate_is_logit"] = choose.random() < 0.5
    return options
