"""The modules that compute the tables of rotary position embeddings.

They are recognised by running them on random positions. Embeddings whose frequencies change with the length
of the sequence are left alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES, ID_DTYPES
from ...basics.reads import depends_on
from ...basics.report import Done
from ...basics.state import NOTHING, STATE, original_class, state_of
from .trial import agrees, tried

ops = torch.ops.moe_mps

_LAYOUTS = ("halves", "pairs", "interleaved")
_LARGEST_POSITION = 4096


def rotary_forward(
    rotary: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, ...]:
    """The forward of a rewritten module: cos and sin for each position."""
    layout = (rotary.__dict__.get(STATE, NOTHING).formula or {}).get(layer_type)
    frequencies, scaling = _parameters(rotary, layer_type)
    if layout is None or not _fits(x, position_ids, frequencies):
        options = {} if layer_type is None else {"layer_type": layer_type}
        return original_class(rotary).forward(rotary, x, position_ids, **options)
    return ops.rope_tables(position_ids, frequencies.float(), scaling, x.dtype, layout)


def _parameters(rotary: nn.Module, layer_type: str | None) -> tuple[Any, Any]:
    prefix = "" if layer_type is None else f"{layer_type}_"
    return getattr(rotary, f"{prefix}inv_freq", None), getattr(rotary, f"{prefix}attention_scaling", None)


def _fits(x: Tensor, position_ids: Tensor, frequencies: Tensor) -> bool:
    dtypes = x.dtype in ACTIVATION_DTYPES and position_ids.dtype in ID_DTYPES
    devices = x.device == position_ids.device == frequencies.device
    return dtypes and devices and frequencies.dtype in ACTIVATION_DTYPES and position_ids.dim() == 2


def rewrite_rotary(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what it runs) for a module that computes these tables, else None."""
    types = getattr(module, "rope_type", None)
    depends_on(module, "rope_type")
    names = {None: types} if isinstance(types, str) else types
    if not isinstance(names, dict) or not names or not all(isinstance(t, str) for t in names.values()):
        return None
    layouts = {name: _layout(module, name) for name, kind in names.items() if is_fixed(kind)}
    found = {name: layout for name, layout in layouts.items() if layout is not None}
    if not found:
        return None
    state_of(module).formula = found
    return rotary_forward, [Done("rope_tables")]


def is_fixed(rope_type: str) -> bool:
    """Whether frequencies do not change with the length of the sequence."""
    return "dynamic" not in rope_type and rope_type != "longrope"


def _layout(module: nn.Module, layer_type: str | None) -> str | None:
    """The layout with which the operator computes what the module computes."""
    frequencies, scaling = _parameters(module, layer_type)
    if not isinstance(frequencies, Tensor) or not isinstance(scaling, (int, float)) or frequencies.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_LARGEST_POSITION, (2, 5), generator=generator).to(frequencies.device)
    x = torch.zeros(1, dtype=torch.float32, device=frequencies.device)
    if frequencies.dim() != 1 or not _fits(x, ids, frequencies):
        return None
    options = {} if layer_type is None else {"layer_type": layer_type}
    tables = tried(original_class(module).forward, module, x, ids, **options)
    if not isinstance(tables, tuple) or len(tables) != 2 or not all(isinstance(t, Tensor) for t in tables):
        return None
    tables = [table.float() for table in tables]
    for layout in _LAYOUTS:
        ours = ops.rope_tables(ids, frequencies.float(), scaling, torch.float32, layout)
        if all(map(agrees, ours, tables)):
            return layout
    return None
