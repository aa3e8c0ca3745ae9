"""What operators encode: of the calls of the self-check the first with each list of kernels and buffers."""

import contextlib
import re
import textwrap
from collections.abc import Iterator

import pytest
import torch
from support.on_mps import INT4, matrix, tensor
from support.operators import plans_for
from support.pinned import assert_pinned, pinned
from torch import Tensor

from torch_moe_mps.ops._formats import FORMATS
from torch_moe_mps.ops._samples import FAMILY_OF, OF_HEADS, packet
from torch_moe_mps.selfcheck import calls, once

ops = torch.ops.moe_mps
HEADS = {name: [(128, 128)] for name in OF_HEADS}


def described(call: calls.Call) -> str:
    """A call with the shapes of its tensors."""
    shown = (f"{n} {[*v.shape]}" for n, v in call.arguments.items() if isinstance(v, Tensor))
    return f"{call.operator}: {', '.join(shown)}"


def encoded(simulated, family: str) -> Iterator[tuple[str, str]]:
    """The calls of a family of operators, and what they encode; nothing is run."""
    names, formats = [name for name in FAMILY_OF if FAMILY_OF[name] == family], [FORMATS["affine4_32"]]
    for check in once.checks_of(calls.subjects(names, [torch.float16], formats, HEADS)):
        seen = set()
        with once._unwatched(), contextlib.closing(check.calls()) as made:
            for call in made:
                arguments = call.arguments.items()
                placed = {n: v.to("mps", copy=True) if isinstance(v, Tensor) else v for n, v in arguments}
                with simulated.dropped(), simulated.trace() as commands:
                    packet(call.operator)(**placed)
                bound = re.sub(r"\[.*?\]|\d+x\S+|\d+ bytes", "", str(commands))
                if bound not in seen:
                    seen.add(bound)
                    yield described(call), str(commands)


FAMILIES = [*dict.fromkeys(FAMILY_OF.values())]


@pytest.mark.pinned
@pytest.mark.parametrize("family", FAMILIES)
def test_encoded(simulated, family):
    """Kernel and grid; then for each index the buffer and the bytes bound there; then threadgroup memory."""
    lines = []
    for call, commands in encoded(simulated, family):
        lines.append(textwrap.fill(call, 108, subsequent_indent="  "))
        for part in re.split(r": |\n|(?= threadgroup)", commands):
            lines.append(textwrap.fill(part.strip(), 108, initial_indent="  ", subsequent_indent="    "))
    assert_pinned("traces", family, "\n".join(lines) + "\n")


def test_every_family_is_pinned():
    assert pinned("traces").keys() == {*FAMILIES}


@pytest.mark.parametrize(
    "gpu, launch",
    [("M1", "gemm32_affine4_64_f16 grid 16x2x1"), ("M4 Max", "gemm16_split_affine4_64_f16 grid 64x3x1")],
)
def test_grid_follows_the_cores(simulated, gpu, launch):
    x, weight = tensor(40, 64), matrix(2048, 64)
    with plans_for(gpu), simulated.trace() as commands:
        ops.linear_quantized(x, *weight, format=INT4)
    assert [command.startswith(launch) for command in commands] == [True]


@pytest.mark.parametrize(("counted", "cores"), [("8", 8), ("0", 16)])
def test_cores_are_those_that_the_system_counts(simulated, monkeypatch, counted, cores):
    monkeypatch.setenv("SIMULATED_CORES", counted)
    ops._plan_for(0)
    try:
        assert ops._gpu_cores() == cores
    finally:
        monkeypatch.undo()
        ops._plan_for(0)


def test_a_sum_in_place_has_its_residual_once(simulated):
    residual, slots, weights = tensor(3, 64), tensor(3, 2, 64), tensor(3, 2)
    with simulated.trace() as commands:
        ops.weighted_sum_residual_stacked_(residual, slots, weights)
    (command,) = commands
    bound = [binding.partition("=")[2].partition("[")[0] for binding in re.findall(r"\d+=\w+\[", command)]
    assert bound.count(bound[-1]) == 1, command
