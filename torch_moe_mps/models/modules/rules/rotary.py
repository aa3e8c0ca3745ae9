"""The modules that compute the tables of rotary position embeddings.

A trace shows that a module's code decides by no size and no value, and reads no tensor but its frequencies:
embeddings whose frequencies change with the length of the sequence are left alone. The layout of the tables
is found by running the module on random positions.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES, ID_DTYPES, dtype_name
from ....ops.families.pointwise import INPUTS
from ...basics.report import Done
from ...basics.state import EMPTY_STATE, STATE, Unsupported, original_class, state_of
from ...basics.tensors import constant
from ...trials.branches import Branches, in_words
from ...trials.comparing import agrees, tried
from ...trials.replicas import bare_replica
from ..traced import PATH, SIZES, Input, Sizes, attribute_of, remembered, trace

ops = torch.ops.moe_mps

# An angle is position x frequency, a x b. In M-RoPE the position is one of time (a), height (c), width (e):
# d and f are masks of 0 and 1 that pick height and width, (a + d (c - a) + f (e - a)) x b.
_ANGLE: tuple[str, ...] = ("mul a b f32",)
_ANGLE_OF_AXES: tuple[str, ...] = (
    *("sub c a f32", "mul %0 d f32", "sub e a f32", "mul %2 f f32"),
    *("add a %1 f32", "add %4 %3 f32", "mul %5 b f32"),
)
_LAYOUTS = ("halves", "pairs", "interleaved")
_AXES = 3  # positions of a token in time, height and width
_POSITIONS: dict[int, Sizes] = {2: (), 3: (_AXES,)}  # {dimensions of positions: sizes in front of [B, T]}
# Calls of a trial: the shape of hidden states, B and T. Hidden states of other ranks run the eager code.
_WIDTH = 8
_CALLS = (((2, 5, _WIDTH), 2, 5), ((1, 1, _WIDTH), 1, 1), ((1, 2, 70, _WIDTH), 1, 70), ((1,), 2, 1))
_RANKS = {len(shape) for shape, *_ in _CALLS}
_LARGEST_POSITION = 2**20


class Tables(NamedTuple):
    """A module's tables.

    Attributes:
        scaling: multiplies them.
        axes: the index of the position that turns each pair.
        frequencies: of a module that computes them in each call; None if it reads its buffer.
    """

    layout: str
    scaling: float
    axes: tuple[int, ...] | None
    frequencies: tuple[float, ...] | None


def rotary_forward(
    rotary: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, ...]:
    """The forward of a rewritten module: cos and sin for each position."""
    form: Tables | None = (rotary.__dict__.get(STATE, EMPTY_STATE).formula or {}).get(layer_type)
    if form is None:
        return NotImplemented
    layout, scaling, axes, fixed = form
    frequencies = getattr(rotary, _frequencies(layer_type)) if fixed is None else _fixed(x.device, fixed)
    if not _fits(x, position_ids, frequencies, axes):
        return NotImplemented
    chosen = None if axes is None or position_ids.dim() == 2 else _on(frequencies.device, axes)
    return rotary_tables(position_ids, frequencies, scaling, x.dtype, layout, chosen)


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
    chosen = [[float(pair_axis == axis) for pair_axis in axes] for axis in range(1, _AXES)]
    return constant(("axes", device, axes), lambda: torch.tensor(chosen, device=device))


def _fixed(device: torch.device, frequencies: tuple[float, ...]) -> Tensor:
    return constant(("frequencies", device, frequencies), lambda: torch.tensor(frequencies, device=device))


def _frequencies(layer_type: str | None) -> str:
    return f"{_prefix(layer_type)}inv_freq"


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


def _fits(x: Tensor, position_ids: Tensor, frequencies: Tensor, axes: tuple[int, ...] | None = None) -> bool:
    dtypes = x.dtype in ACTIVATION_DTYPES and position_ids.dtype in ID_DTYPES.values()
    ranks = x.dim() in _RANKS
    devices = x.device == position_ids.device == frequencies.device
    shapes = position_ids.dim() == 2 or (
        axes is not None and position_ids.dim() == 3 and position_ids.shape[0] == _AXES
    )
    return ranks and dtypes and devices and shapes and frequencies.dtype in ACTIVATION_DTYPES


def rewrite_rotary(module: nn.Module) -> tuple[Callable, list[Done]] | None:
    """(forward, what runs) for a module that computes these tables, else None.

    Raises Unsupported if no position of the trial reached a branch of the module's code.
    """
    forms = {name: _tables(module, name, read) for name, read in tensors_read(module).items()}
    result = {name: form for name, form in forms.items() if form is not None}
    if not result:
        return None
    state_of(module).formula = result
    return rotary_forward, [Done("_pointwise", "rotary tables")]


def is_fixed(rope_type: str) -> bool:
    """True if frequencies do not change with the length of the sequence."""
    return "dynamic" not in rope_type and rope_type != "longrope"


@remembered
def tensors_read(module: nn.Module) -> dict[str | None, dict[int, set[str | None]]]:
    """{type of layers: {dimensions of positions: the tensors that the module's code reads beside them}}.

    Dimensions are left out for which the code decides by a size or by a value.
    """
    kinds = attribute_of(module, "rope_type")
    names = {None: kinds} if isinstance(kinds, str) else kinds
    if not isinstance(names, dict) or not all(isinstance(kind, str) for kind in names.values()):
        return {}
    read = {name: {rank: _tensors_read(module, name, rank) for rank in _POSITIONS} for name in names}
    return {
        name: {rank: tensors for rank, tensors in of_ranks.items() if tensors is not None}
        for name, of_ranks in read.items()
    }


def _tensors_read(module: nn.Module, layer_type: str | None, rank: int) -> set[str | None] | None:
    eager_forward, options = original_class(module).forward, _options(layer_type)
    x = Input(SIZES[-1], is_wide=False)
    positions = Input((*_POSITIONS[rank], *SIZES[2]), torch.int64, is_wide=False)
    traced = trace(
        module, x, positions, function=lambda *inputs: eager_forward(*inputs, **options), writes=True
    )
    if traced is None:
        return None
    nodes = [node for node in traced.graph.nodes if node.op in ("placeholder", "get_attr") and node.users]
    return {node.meta.get(PATH) for node in nodes if node is not traced.inputs[1]}


def _tables(module: nn.Module, layer_type: str | None, read: dict[int, set[str | None]]) -> Tables | None:
    """The tables that the module computes; None if the operator cannot compute them."""
    name, tensors = _frequencies(layer_type), read.get(2)
    frequencies = getattr(module, name, None)
    scaling = getattr(module, f"{_prefix(layer_type)}attention_scaling", None)
    if not isinstance(frequencies, Tensor) or not isinstance(scaling, (int, float)):
        return None
    if tensors is None or not tensors <= {name} or frequencies.is_meta or frequencies.dim() != 1:
        return None
    if frequencies.dtype not in ACTIVATION_DTYPES:
        return None
    trial = _TablesTrial(module, layer_type, scaling)
    calls, unreached = trial.calls(2)
    layout = next((layout for layout in _LAYOUTS if trial.agrees(calls, layout)), None)
    if layout is None:
        return None
    if unreached is not None:
        raise Unsupported(unreached)
    axes = trial.axes(layout) if read.get(3) == tensors else None
    return Tables(layout, scaling, axes, None if tensors else tuple(trial.frequencies.tolist()))


class _TrialCall(NamedTuple):
    """Positions of a trial, and the module's own tables for them; None if it computes none."""

    positions: Tensor
    tables: list[Tensor] | None


class _TablesTrial:
    """Comparison of a module's tables with the operator's, by a copy on the CPU."""

    def __init__(self, module: nn.Module, layer_type: str | None, scaling: float):
        self._forward, self._options = original_class(module).forward, _options(layer_type)
        self._replica, self._scaling = bare_replica(module), scaling
        for name, buffer in module._buffers.items():
            self._replica.register_buffer(name, None if buffer is None else buffer.detach().cpu().clone())
        self.frequencies: Tensor = getattr(self._replica, _frequencies(layer_type))
        self._generator = torch.Generator().manual_seed(0)

    def calls(self, rank: int) -> tuple[list[_TrialCall], str | None]:
        """Calls with positions of so many dimensions, and a branch of the module's code that none reached."""
        calls, branches = list[_TrialCall](), Branches()
        for shape, *rows in _CALLS:
            draws = torch.rand(*_POSITIONS[rank], *rows, generator=self._generator)
            ids = (draws * math.log2(_LARGEST_POSITION)).exp2().long()
            ids[..., 0], ids[..., -1] = 0, _LARGEST_POSITION - 1
            x = torch.randn(shape, generator=self._generator)
            calls.append(_TrialCall(ids, self._module_tables(branches, x, ids)))
        return calls, next((in_words(*branch) for branch in branches.unreached()), None)

    def agrees(self, calls: list[_TrialCall], layout: str, axes: Tensor | None = None) -> bool:
        """True if the operator computes the tables of all calls."""
        return all(
            call.tables is not None
            and all(map(agrees, self._operator_tables(call.positions, layout, axes), call.tables))
            for call in calls
        )

    def axes(self, layout: str) -> tuple[int, ...] | None:
        """The index of the position that turns each pair, if positions have several axes; else None."""
        calls, unreached = self.calls(3)
        first = calls[0]
        if unreached is not None or first.tables is None:
            return None
        of_axes = [self._operator_tables(positions, layout) for positions in first.positions]
        axes = _axes(of_axes, first.tables, layout)
        is_right = axes is not None and self.agrees(calls, layout, _on(self.frequencies.device, axes))
        return axes if is_right else None

    def _operator_tables(self, ids: Tensor, layout: str, axes: Tensor | None = None) -> list[Tensor]:
        return [*rotary_tables(ids, self.frequencies, self._scaling, torch.float32, layout, axes)]

    def _module_tables(self, branches: Branches, x: Tensor, ids: Tensor) -> list[Tensor] | None:
        forward = functools.partial(branches.run, self._forward, self._replica)
        tables = tried(forward, x, ids, **self._options)
        if not isinstance(tables, tuple) or len(tables) != 2:
            return None
        return [table.float() for table in tables] if all(isinstance(t, Tensor) for t in tables) else None


def _options(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}


def _axes(found: list[list[Tensor]], tables: list[Tensor], layout: str) -> tuple[int, ...] | None:
    """Index of the single-axis table closest to each pair's columns; None for other shapes."""
    if any(table.shape != found[0][0].shape for table in tables):
        return None
    wrong = torch.stack([(torch.cat(of_axis) - torch.cat(tables)).abs().amax((0, 1)) for of_axis in found])
    pairs = {"pairs": wrong, "halves": wrong.chunk(2, 1)[0], "interleaved": wrong[:, ::2]}[layout]
    return tuple(pairs.argmin(0).tolist())
