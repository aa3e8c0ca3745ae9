"""Functions that apply rotary position embeddings.

Models write the same few formulas in many ways, so a function is recognised by running it: on random numbers
only one of the operator's forms can agree with it.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....ops.families.rope import rope, rope_heads
from ...basics.report import Done
from ...basics.sizes import Decisions
from ...basics.state import Unsupported
from ...basics.tensors import derived
from ...basics.unmodified import eager_is_faster
from ...trials.comparing import agrees, tried
from ...trials.draws import current, eager, normal
from ...trials.forms import found_form
from ..functions import InPlace

_PAIRS = ("half", "interleaved", "interleaved_to_half")
# Batch, tokens, heads and width of the draws of a trial, which take turns. No function decides by one of them
# (`Decisions`), and no slice of a fixed length is longer than all.
_CALLS = ((2, 5, 3, 16), (1, 1, 1, 512), (1, 70, 2, 16), (2, 1, 70, 16))
_WIDTH = _CALLS[0][-1]
_TABLES = frozenset(("cos", "freqs_cis", "freqs_ci"))  # parameters that take tables of angles
_TURNS: dict[int, Callable] = {1: rope_heads, 2: rope}  # operators by the number of tensors


class Turn(NamedTuple):
    """One of the operator's forms: which elements are a pair, how many columns of the tables count, and
    whether the elements that turn are as many as these columns or twice as many."""

    pairs: str
    half_of_table: bool
    doubled: bool
    rotary_last: bool


class RopeForm(NamedTuple):
    """Rotations of a function with tables of a head's width and of half of it; None if it cannot run.

    `heads_dim`: where q and k have their heads, 1 or 2.
    """

    heads_dim: int
    wide: Turn | None
    narrow: Turn | None


TURNS = [Turn(*fields) for fields in itertools.product(_PAIRS, (False, True), (False, True), (False, True))]
WHOLE_TURNS = [turn for turn in TURNS if not (turn.half_of_table or turn.doubled)]


def tables_and_options(turn: Turn, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The operator's tables, and its options without defaults: the dispatcher takes time for each."""
    if turn.half_of_table:
        cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
    options: dict[str, Any] = {}
    if turn.pairs != "half":
        options["pairs"] = turn.pairs
    if turn.doubled:
        options["rotary_dim"] = 2 * cos.shape[-1]
    if turn.rotary_last:
        options["rotary_last"] = True
    return cos, sin, options


class RopeCall(NamedTuple):
    """Arguments that a function is called with.

    Attributes:
        tensors: that turn, 2 for q and k.
        is_complex: it takes one table, cos + i sin.
        dims: of what turns, 4, or 3 without a batch.
        options: passed by name.
    """

    tensors: int
    is_complex: bool
    dims: int
    options: tuple[tuple[str, Any], ...] = ()


def rope_form(function: Callable, call: RopeCall) -> RopeForm | None:
    """Form of the rotation of a function with these arguments; None if the operator cannot compute it."""
    for heads_dim in (1, 2):
        wide, narrow = (_turn_of(function, call, heads_dim, width) for width in (_WIDTH, _WIDTH // 2))
        if wide or narrow:
            return RopeForm(heads_dim, wide, narrow)
    return None


def _turn_of(function: Callable, call: RopeCall, heads_dim: int, table_width: int) -> Turn | None:
    """The turn that agrees with a function on random numbers."""
    turns = [turn for turn in TURNS if _columns(turn, table_width) <= _WIDTH]
    found, missing = found_form(turns, lambda: _trial(function, call, heads_dim, table_width))
    if missing is not None:
        raise Unsupported(missing)
    return None if found is None else turns[found]


def _columns(turn: Turn, table_width: int) -> int:
    """The elements of a head that turn by tables of this width."""
    return (table_width // 2 if turn.half_of_table else table_width) * (2 if turn.doubled else 1)


def _trial(
    function: Callable, call: RopeCall, heads_dim: int, table_width: int
) -> Callable[[Turn], bool] | None:
    """Predicate: True if a turn agrees with a function on a draw. None if it cannot be called so."""
    draw = current()
    batch, tokens, heads, width = _CALLS[0 if draw is None else draw.number % len(_CALLS)]
    batch = batch if call.dims == 4 else 1
    inputs = [normal(batch, tokens, heads + i, width) for i in range(call.tensors)]
    cos, sin = (normal(batch, tokens, table_width * width // _WIDTH) for _ in range(2))
    expected = _turned_by(function, call, heads_dim, inputs, [cos, sin])
    if expected is None:
        return None

    def agrees_with(turn: Turn) -> bool:
        *tables_of_turn, settings = tables_and_options(turn, cos, sin)
        rotated = _TURNS[call.tensors](*inputs, *tables_of_turn, **settings)
        return all(map(agrees, rotated if call.tensors == 2 else [rotated], expected))

    return agrees_with


def _turned_by(
    function: Callable, call: RopeCall, heads_dim: int, inputs: list[Tensor], tables: list[Tensor]
) -> list[Tensor] | None:
    """Results [B, H, T, D] of a function for inputs [B, T, H, D]; None if it cannot be called so."""
    arguments = [x.transpose(1, 2) if heads_dim == 1 else x for x in inputs]
    arguments += [torch.complex(*tables)] if call.is_complex else tables
    arguments = arguments if call.dims == 4 else [x[0] for x in arguments]
    results = tried(Decisions().run, eager(function), *arguments, **dict(call.options))
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != call.tensors or not all(isinstance(result, Tensor) for result in results):
        return None
    results = results if call.dims == 4 else [result[None] for result in results]
    return [result if heads_dim == 1 else result.transpose(1, 2) for result in results]


def _turn(form: RopeForm, width: int, cos: Tensor) -> Turn | None:
    """Rotation of heads of a width by these tables; a partial rotation is one with narrow tables."""
    if cos.shape[-1] == width:
        return form.wide
    narrow = form.narrow
    return None if narrow and narrow.doubled and cos.shape[-1] * 2 != width else narrow


# Functions that forwards call


def rotation_in_place(function: types.FunctionType) -> InPlace | None:
    """Replacement of a function of (q, k, cos, sin), (x, cos, sin) or (q, k, cos + i sin)."""
    if _TABLES.isdisjoint(inspect.signature(function).parameters):
        return None
    kinds = itertools.product(((2, False), (1, False), (2, True)), (4, 3), _options_of(function))
    calls = [RopeCall(tensors, is_complex, dims, options) for (tensors, is_complex), dims, options in kinds]
    forms = {call: form for call in calls if (form := rope_form(function, call)) is not None}
    operator = "rope" if any(call.tensors == 2 for call in forms) else "rope_heads"
    return InPlace(functools.partial(rotated, function, forms), Done(operator)) if forms else None


def _options_of(function: types.FunctionType) -> Iterator[tuple[tuple[str, Any], ...]]:
    """None, and each that a function has, such as the dimension of the heads."""
    yield ()
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, int):
            yield from (((name, value),) for value in (1, 2))  # True is 1


def rotated(function: Callable, forms: dict[RopeCall, RopeForm], *args: Any, **options: Any) -> Any:
    """function(*args, **options), by the operator where tensors are given by position."""
    if eager_is_faster(args):
        return function(*args, **options)
    out, tensors = None, 0
    if len(args) > 2 and all(isinstance(x, Tensor) for x in args):
        is_complex = args[-1].is_complex()
        tensors = len(args) - (1 if is_complex else 2)
        known = all(isinstance(value, int) for value in options.values())
        call = RopeCall(tensors, is_complex, args[0].dim(), (*options.items(),))
        form = forms.get(call) if known else None
        run = _rotated if call.dims == 4 else _rotated_without_batch
        out = None if form is None else run(form, args[:tensors], args[tensors:])
    if out is None:
        return function(*args, **options)
    return tuple(out) if tensors == 2 else out[0]


def _real_tables(table: Tensor) -> tuple[Tensor, ...]:
    """Cosines and sines of a complex table."""
    return torch.view_as_real(table).movedim(-1, 0).contiguous().unbind()


def _rotated_without_batch(
    form: RopeForm, inputs: Sequence[Tensor], tables: Sequence[Tensor]
) -> Sequence[Tensor] | None:
    out = _rotated(form, [x[None] for x in inputs], [table[None] for table in tables])
    return None if out is None else [x[0] for x in out]


def _rotated(form: RopeForm, inputs: Sequence[Tensor], tables: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The inputs rotated, with heads where the form has them; None where the operator does not apply."""
    q = inputs[0]
    if q.dtype is torch.float64 or any(x.dtype is not q.dtype for x in inputs):
        return None
    cos, sin = tables if len(tables) == 2 else derived(tables[0], _real_tables)
    turn = _turn(form, q.shape[-1], cos) if cos.dim() == 3 else None
    if turn is None:
        return None
    cos, sin, options = tables_and_options(turn, cos, sin)
    rows = [x.transpose(1, 2) if form.heads_dim == 1 else x for x in inputs]
    if rows[-1].shape[1] != rows[0].shape[1]:  # an assistant's keys are of more tokens
        return None
    rotated = _TURNS[len(rows)](*rows, cos, sin, **options)
    rotated = rotated if len(rows) == 2 else [rotated]
    return rotated if form.heads_dim == 1 else [x.transpose(1, 2) for x in rotated]
