"""What must hold of a model that FSDP2 (`fully_shard`) shards before and after it is accelerated.

Run in every process of a group; as a script it takes architectures.
"""

import copy
import itertools
import sys

import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_moe_mps
from support.models import assert_close, operators_of, output, prompt, tiny

GRANULARITIES = ("layers", "modules")


def sharded(model: nn.Module, granularity: str) -> nn.Module:
    """`modules`: each is gathered on its own, so that a rewritten layer may not reach into another."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        if granularity == "modules":
            for module in reversed(list(layer.modules())[1:]):
                if any(p.numel() > 1 for p in module.parameters(recurse=False)):
                    fully_shard(module, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def check(model: nn.Module, expected: Tensor, accelerated: bool) -> None:
    operators = operators_of(lambda: assert_close(output(model, prompt()), expected, 1e-5))
    assert bool({"moe_experts", "moe_experts_quantized"} & operators.keys()) == accelerated, operators


def accelerate_and_back(model: nn.Module, expected: Tensor) -> None:
    names = set(model.state_dict())
    for _ in range(2):
        for _ in range(2):
            torch_moe_mps.accelerate(model)
            check(model, expected, True)
        torch_moe_mps.restore(model)
        check(model, expected, False)
    assert set(model.state_dict()) == names


def check_quantising_is_refused(model: nn.Module, expected: Tensor) -> None:
    before = classes(model)
    try:
        torch_moe_mps.accelerate(model, 8, 32)
    except ValueError as error:
        assert "must be a plain tensor" in str(error) and "got DTensor" in str(error), error
    else:
        raise AssertionError("sharded experts were quantised")
    assert classes(model) == before
    check(model, expected, False)


def check_fully_shard(architecture: str, granularity: str) -> None:
    own = tiny(architecture)
    expected = output(own, prompt())

    model = sharded(copy.deepcopy(own), granularity)
    before = classes(model)
    check_quantising_is_refused(model, expected)
    accelerate_and_back(model, expected)
    assert classes(model) == before

    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model)
    sharded(model, granularity)
    check(model, expected, True)
    accelerate_and_back(model, expected)

    model = copy.deepcopy(own)
    torch_moe_mps.accelerate(model, 8, 32)
    expected = output(model, prompt())
    check(sharded(model, granularity), expected, True)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    for architecture, granularity in itertools.product(sys.argv[1:], GRANULARITIES):
        check_fully_shard(architecture, granularity)
    dist.barrier()
    dist.destroy_process_group()
