"""The modules that compute the tables of rotary position embeddings.

They are recognised by running them on random positions. Embeddings whose frequencies change with the length
of the sequence are left alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES, ID_DTYPES, dtype_name
from ....ops.pointwise import INPUTS
from ...basics.report import Done
from ...basics.state import NOTHING, STATE, depends_on, original_class, state_of
from ...basics.tensors import constant
from ...trials.comparing import agrees, tried

ops = torch.ops.moe_mps

# An angle is position x frequency, a x b. In M-RoPE the position is one of time (a), height (c), width (e):
# d and f are masks of 0 and 1 that pick height and width, (a + d (c - a) + f (e - a)) x b.
_ANGLE: tuple[str, ...] = ("mul a b f32",)
_ANGLE_OF_AXES: tuple[str, ...] = (
    *("sub c a f32", "mul %0 d f32", "sub e a f32", "mul %2 f f32"),
    *("add a %1 f32", "add %4 %3 f32", "mul %5 b f32"),
)
_LAYOUTS = ("halves", "pairs", "interleaved")
_LARGEST_POSITION = 4096
_AXES = 3  # positions of a token in time, height and width


class Tables(NamedTuple):
    """Layout of a module's tables; `axes`: the index of the position that turns each pair."""

    layout: str
    axes: tuple[int, ...] | None


def rotary_forward(
    rotary: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, ...]:
    """The forward of a rewritten module: cos and sin for each position."""
    form: Tables | None = (rotary.__dict__.get(STATE, NOTHING).formula or {}).get(layer_type)
    frequencies, scaling = _parameters(rotary, layer_type)
    axes = None if form is None else form.axes
    if form is None or not _fits(x, position_ids, frequencies, axes):
        return NotImplemented
    chosen = None if axes is None or position_ids.dim() == 2 else _on(frequencies.device, axes)
    return rotary_tables(position_ids, frequencies, scaling, x.dtype, form.layout, chosen)


def rotary_tables(
    position_ids: Tensor,
    frequencies: Tensor,
    scaling: float,
    dtype: torch.dtype,
    layout: str,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, times `scaling`.

    Args:
        layout: "pairs": a column for each pair; "halves": all pairs' columns, twice, one after the other;
            "interleaved": the column of each pair twice in a row.
        axes: [2, R / 2]: 1 where a pair turns by positions in height, and in width, else 0.
    """
    if axes is None:
        angle, of_axes = _ANGLE, [(position_ids, frequencies)]
    else:
        angle, of_axes = _ANGLE_OF_AXES, [*zip(position_ids, (frequencies, *axes), strict=True)]
    inputs = [item for positions, rates in of_axes for item in _laid_out(positions, rates, layout)]
    arguments = dict(zip(INPUTS[1:], inputs[1:], strict=False))

    def table(function: str) -> Tensor:
        last = len(angle) - 1
        steps = (*angle, f"{function} %{last} f32", f"mul %{last + 1} {float(scaling)} f32")
        return ops._pointwise(inputs[0], "; ".join(steps), dtype_name(dtype), **arguments).flatten(2)

    return table("cos"), table("sin")


def _laid_out(positions: Tensor, of_pairs: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Positions and frequencies whose product has the columns of the tables in its last dimensions."""
    if layout == "pairs":
        return positions[..., None], of_pairs
    twice = of_pairs.expand(2, -1) if layout == "halves" else of_pairs.unsqueeze(1).expand(-1, 2)
    return positions[..., None, None], twice


def _on(device: torch.device, axes: tuple[int, ...]) -> Tensor:
    chosen = [[float(own == axis) for own in axes] for axis in range(1, _AXES)]
    return constant(("axes", device, axes), lambda: torch.tensor(chosen, device=device))


def _parameters(rotary: nn.Module, layer_type: str | None) -> tuple[Any, Any]:
    prefix = "" if layer_type is None else f"{layer_type}_"
    return getattr(rotary, f"{prefix}inv_freq", None), getattr(rotary, f"{prefix}attention_scaling", None)


def _fits(x: Tensor, position_ids: Tensor, frequencies: Tensor, axes: tuple[int, ...] | None = None) -> bool:
    dtypes = x.dtype in ACTIVATION_DTYPES and position_ids.dtype in ID_DTYPES
    devices = x.device == position_ids.device == frequencies.device
    shapes = position_ids.dim() == 2 or (
        axes is not None and position_ids.dim() == 3 and position_ids.shape[0] == _AXES
    )
    return dtypes and devices and shapes and frequencies.dtype in ACTIVATION_DTYPES


def rewrite_rotary(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for a module that computes these tables, else None."""
    types = getattr(module, "rope_type", None)
    depends_on(module, "rope_type")
    names = {None: types} if isinstance(types, str) else types
    if not isinstance(names, dict) or not names or not all(isinstance(t, str) for t in names.values()):
        return None
    forms = {name: _tables(module, name) for name, kind in names.items() if is_fixed(kind)}
    result = {name: form for name, form in forms.items() if form is not None}
    if not result:
        return None
    state_of(module).formula = result
    return rotary_forward, [Done("_pointwise", "rotary tables")]


def is_fixed(rope_type: str) -> bool:
    """True if frequencies do not change with the length of the sequence."""
    return "dynamic" not in rope_type and rope_type != "longrope"


def _tables(module: nn.Module, layer_type: str | None) -> Tables | None:
    """Layout of the tables that the module computes; None if the operator cannot compute them."""
    frequencies, scaling = _parameters(module, layer_type)
    if not isinstance(frequencies, Tensor) or not isinstance(scaling, (int, float)) or frequencies.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_LARGEST_POSITION, (_AXES, 2, 5), generator=generator).to(frequencies.device)
    x = torch.zeros(1, dtype=torch.float32, device=frequencies.device)
    if frequencies.dim() != 1 or not _fits(x, ids[0], frequencies):
        return None

    def ours(ids: Tensor, layout: str, axes: Tensor | None = None) -> list[Tensor]:
        return [*rotary_tables(ids, frequencies, scaling, torch.float32, layout, axes)]

    plain, spatial = (_own_tables(module, x, item, layer_type) for item in (ids[0], ids))
    for layout in _LAYOUTS:
        if plain is None or not all(map(agrees, ours(ids[0], layout), plain)):
            continue
        axes = None if spatial is None else _axes([ours(item, layout) for item in ids], spatial, layout)
        if spatial is None or axes is None:
            return Tables(layout, None)
        is_right = all(map(agrees, ours(ids, layout, _on(x.device, axes)), spatial))
        return Tables(layout, axes if is_right else None)
    return None


def _own_tables(module: nn.Module, x: Tensor, ids: Tensor, layer_type: str | None) -> list[Tensor] | None:
    """Tables of the module's eager forward for these positions; None if it returns no pair of tensors."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    tables = tried(original_class(module).forward, module, x, ids, **options)
    is_pair = isinstance(tables, tuple) and len(tables) == 2 and all(isinstance(t, Tensor) for t in tables)
    return [table.float() for table in tables] if is_pair else None


def _axes(found: list[list[Tensor]], tables: list[Tensor], layout: str) -> tuple[int, ...] | None:
    """Index of the single-axis table closest to each pair's columns; None for other shapes."""
    if any(table.shape != found[0][0].shape for table in tables):
        return None
    wrong = torch.stack([(torch.cat(of_axis) - torch.cat(tables)).abs().amax((0, 1)) for of_axis in found])
    pairs = {"pairs": wrong, "halves": wrong.chunk(2, 1)[0], "interleaved": wrong[:, ::2]}[layout]
    return tuple(pairs.argmin(0).tolist())
