"""What the tests of all operators share, beside the samples of the package."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from simulator.apple import GPUS

import torch_moe_mps
from torch_moe_mps.ops._samples import packet


def positional(name: str, arguments: dict) -> tuple[list, dict]:
    """The arguments as a caller without keywords passes them; defaults in between are filled in."""
    args, kwargs = [], {}
    for argument in packet(name).default._schema.arguments:
        value = arguments.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


@contextmanager
def plans_for(gpu: str) -> Iterator[None]:
    """Inside the block, kernels are planned for the cores of this GPU of the cost model."""
    torch.ops.moe_mps._plan_for(GPUS[gpu].cores)
    try:
        yield
    finally:
        torch.ops.moe_mps._plan_for(0)


MODULES = (
    torch_moe_mps.ops.norms,
    torch_moe_mps.ops.rope,
    torch_moe_mps.ops.attention,
    torch_moe_mps.ops.linear_attention,
    torch_moe_mps.ops.heads,
    torch_moe_mps.ops.hyper_connection,
    torch_moe_mps.ops.index,
    torch_moe_mps.ops.pointwise,
    torch_moe_mps.ops.pooling,
    torch_moe_mps.ops.routing,
    torch_moe_mps.ops.sampling,
    torch_moe_mps.ops.combine,
    torch_moe_mps.ops.experts,
    torch_moe_mps.ops.quantized,
    torch_moe_mps.ops.linear,
    torch_moe_mps.ops.lora,
    torch_moe_mps.ops.quantize,
)
