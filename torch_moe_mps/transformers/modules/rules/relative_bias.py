"""Modules that make the bias of relative positions of attention: they give a RelativeBias."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES
from ...attention.relative_bias import RelativeBias
from ...basics.reads import depends_on
from ...basics.report import Done
from ...basics.state import original_class
from .trial import agrees, bare_twin, on_the_cpu, tried


def relative_forward(
    module: nn.Module, states: Tensor, query_positions: Tensor, key_positions: Tensor
) -> Tensor:
    """The forward of a rewritten module. States are [B, T, Hq, R], positions [T] and [S]."""
    own, bank = original_class(module).forward, module.get_parameter("proj")
    fits = states.dim() == 4 and states.dtype == bank.dtype in ACTIVATION_DTYPES
    if not fits or states.shape[1:2] != query_positions.shape:
        made: Tensor = own(module, states, query_positions, key_positions)
        return made
    return RelativeBias(
        states,
        bank,
        key_positions.shape[0],
        states.dtype,
        lambda: own(module, states, query_positions, key_positions),
    )


def rewrite_relative_bias(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a module that makes such a bias, else None."""
    return (
        (relative_forward, [Done("attention", "relative positions")]) if makes_relative_bias(module) else None
    )


@on_the_cpu()
def makes_relative_bias(module: nn.Module) -> bool:
    """Whether its forward gives (states @ proj)[t, h, distance], 0 from `rel_extent` on and below 0."""
    bank, extent = module._parameters.get("proj"), getattr(module, "rel_extent", None)
    if len(module._parameters) != 1 or module._modules or bank is None or bank.dim() != 2:
        return False
    if bank.shape[1] != extent:
        return False
    depends_on(module, "rel_extent")
    generator = torch.Generator().manual_seed(0)
    twin, extent = bare_twin(module), 4
    proj, states = torch.randn(3, extent, generator=generator), torch.randn(2, 5, 2, 3, generator=generator)
    twin.register_parameter("proj", nn.Parameter(proj, requires_grad=False))
    twin.rel_extent = extent
    queries, keys = torch.arange(6, 11), torch.arange(2, 13)
    distance = queries[:, None] - keys
    place = torch.where((distance >= 0) & (distance < extent), distance, extent)
    padded = nn.functional.pad(states @ proj, (0, 1)).transpose(1, 2)
    expected = padded.gather(3, place.expand(2, 2, -1, -1))
    return agrees(expected, tried(original_class(module).forward, twin, states, queries, keys))
