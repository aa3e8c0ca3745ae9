"""What the tests of all operators share, beside the samples of the package."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from simulator.apple import GPUS

from torch_moe_mps.ops import FAMILIES
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


MODULES = tuple(FAMILIES.values())
