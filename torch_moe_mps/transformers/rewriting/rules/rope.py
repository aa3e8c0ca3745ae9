"""Rotary position embeddings, and the norms of q and k in front of them.

Models write the same few formulas in many ways, so a function is recognised by running it: on random numbers
only one of the operator's forms can agree with it.
"""

import ast
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ...experts import is_observed
from ...report import NOTHING_NEW, Done
from ..functions import InPlace
from ..program.building import code
from ..program.rewrites import Match, Rewrite
from ..runtime import called
from .norms import norm_arguments, norm_in
from .trial import agrees, tried

ops = torch.ops.moe_mps

_PAIRS = ("half", "interleaved", "interleaved_to_half")
_HEADS, _TOKENS, _WIDTH = 3, 5, 16
# The attribute of a complex table that holds its cosines and sines.
_REAL = "_moe_mps_real"
# A norm goes over the last dimension, so it may come after a transposition that follows it.
_NORMED = {"NORM(X)": "X", "NORM(X).transpose(1, 2)": "X.transpose(1, 2)"}


class RopeForm(NamedTuple):
    """How a function rotates, for tables cos and sin as wide as a head and half as wide (None: it cannot).

    `heads_dim`: where q and k have their heads, 1 or 2. `identity`: of the function, which may be another one
    later. `options`: what the function gets by name.
    """

    heads_dim: int
    wide: tuple | None
    narrow: tuple | None
    identity: int
    options: tuple[tuple[str, Any], ...]


class Turn(NamedTuple):
    """One of the operator's forms: which elements are a pair, how many columns of the tables count, and
    whether the elements that turn are as many as these columns or twice as many."""

    pairs: str
    half_of_table: bool
    doubled: bool
    rotary_last: bool


TURNS = [Turn(*fields) for fields in itertools.product(_PAIRS, (False, True), (False, True), (False, True))]


def tables_and_options(turn: tuple, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The operator's tables, and its options without defaults: the dispatcher takes time for each."""
    pairs, half_of_table, doubled, rotary_last = turn
    if half_of_table:
        cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
    options: dict[str, Any] = {}
    if pairs != "half":
        options["pairs"] = pairs
    if doubled:
        options["rotary_dim"] = 2 * cos.shape[-1]
    if rotary_last:
        options["rotary_last"] = True
    return cos, sin, options


@functools.lru_cache(maxsize=1024)
def rope_form(
    function: types.FunctionType, tensors: int, options: tuple, is_complex: bool = False, dims: int = 4
) -> RopeForm | None:
    """What a function of (q, k, cos, sin) or (x, cos, sin) does; None if the operator cannot do it.

    `is_complex`: it takes one table, cos + i sin. `dims`: of q and k, 4, or 3 without a batch.
    """
    widths = (_WIDTH, _WIDTH // 2)
    for heads_dim in (1, 2):
        wide, narrow = (
            _turn_of(function, tensors, dict(options), heads_dim, width, is_complex, dims) for width in widths
        )
        if wide or narrow:
            return RopeForm(heads_dim, wide, narrow, id(function), options)
    return None


def _turn_of(
    function: Callable,
    tensors: int,
    options: dict,
    heads_dim: int,
    table_width: int,
    is_complex: bool,
    dims: int,
) -> tuple | None:
    generator, batch = torch.Generator().manual_seed(heads_dim), 2 if dims == 4 else 1
    shapes = [(batch, _TOKENS, _HEADS + i, _WIDTH) for i in range(tensors)]
    inputs = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]
    cos, sin = (torch.rand(batch, _TOKENS, table_width, generator=generator) + 0.5 for _ in range(2))
    given = [x.transpose(1, 2) if heads_dim == 1 else x for x in inputs]
    given += [torch.complex(cos, sin)] if is_complex else [cos, sin]
    results = tried(function, *(given if dims == 4 else [x[0] for x in given]), **options)
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != tensors or not all(isinstance(result, Tensor) for result in results):
        return None
    results = results if dims == 4 else [result[None] for result in results]
    expected = [result if heads_dim == 1 else result.transpose(1, 2) for result in results]
    for turn in TURNS:
        columns = table_width // 2 if turn.half_of_table else table_width
        if columns * (2 if turn.doubled else 1) > _WIDTH:
            continue
        *tables_of_turn, settings = tables_and_options(turn, cos, sin)
        turned = ops.rope(inputs[0], inputs[1] if tensors == 2 else None, *tables_of_turn, **settings)
        if all(map(agrees, turned, expected)):
            return tuple(turn)
    return None


def _turn(form: tuple, dimensions: int, width: int, cos: Tensor) -> tuple | None:
    """How a form rotates for these tables and heads: a partial rotation is one for narrow tables."""
    _, wide, narrow, *_ = form
    if cos.dim() != 3 or dimensions != 4:
        return None
    if cos.shape[-1] == width:
        return wide
    if narrow and Turn(*narrow).doubled and cos.shape[-1] * 2 != width:
        return None
    return narrow


def _real(table: Tensor) -> Sequence[Tensor]:
    """The cosines and sines of a complex table, which all layers get."""
    found: Sequence[Tensor] | None = getattr(table, _REAL, None)
    if found is None:
        found = torch.view_as_real(table).movedim(-1, 0).contiguous().unbind()
        if not torch.compiler.is_compiling():
            setattr(table, _REAL, found)
    return found


class Rotation(NamedTuple):
    """function(q_norm(q), k_norm(k), cos, sin), or function(q_norm(q), cos, sin) without k.

    Attributes:
        form: the function's `RopeForm`, as a tuple.
        sin: None where the function takes one table, which is complex.
        rows: q and k are [B, T, heads, D] although the function has heads first.
        one_by_one: the function takes q and k in a call each.
        last: it takes so many elements at the end of the heads of q, the others stay as they are.
        heads_first: so are the results, whatever the function gives.
    """

    function: Callable
    form: tuple
    q: Tensor
    k: Tensor | None
    cos: Tensor
    sin: Tensor | None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    rows: bool = False
    one_by_one: bool = False
    last: int | None = None
    heads_first: bool = False

    def inputs(self, heads_dim: int) -> tuple[Tensor, Tensor | None]:
        """q and k with their heads in this dimension."""
        if heads_dim == (2 if self.rows else self.form[0]):
            return self.q, self.k
        return self.q.transpose(1, 2), None if self.k is None else self.k.transpose(1, 2)

    def results(self) -> Sequence[Tensor]:
        """What becomes of q and k, with heads first."""
        if (arguments := self.arguments()) is None:
            own = self.own()
            return own if self.form[0] == 1 else [x.transpose(1, 2) for x in own]
        given, settings = arguments
        q, k = ops.rope(*self.inputs(2), *given, **settings)
        return (q,) if self.k is None else (q, k)

    def arguments(self) -> tuple[list[Any], dict[str, Any]] | None:
        """What the operator takes behind q, k and the cache, the second by name.

        None where the model's own function has to run.
        """
        q, k, last = self.q, self.k, self.last
        if self.form[3] != id(self.function):
            return None
        if q.dtype is torch.float64 or (k is not None and k.dtype is not q.dtype):
            return None
        cos, sin = _real(self.cos) if self.sin is None else (self.cos, self.sin)
        turn = _turn(self.form, q.dim(), q.shape[-1] if last is None else last, cos)
        norms = _head_norms(self.q_norm, self.k_norm, q, k)
        if turn is None or norms is None:
            return None
        cos, sin, options = tables_and_options(turn, cos, sin)
        if last is not None:
            options["rotary_last"] = True
            rotary = options.get("rotary_dim", cos.shape[-1])
            if rotary != last or (k is not None and k.shape[-1] != last):
                return None
        return [cos, sin, *norms], options

    def own(self) -> Sequence[Tensor]:
        """What the model's own function makes of q and k."""
        q, k = self.inputs(self.form[0])
        kept: Sequence[Tensor] = ()
        if self.last is not None:
            *kept, q = q.tensor_split((q.shape[-1] - self.last,), -1)
        given = ((q, self.q_norm), (k, self.k_norm))
        normed = [x if norm is None else norm(x) for x, norm in given if x is not None]
        tables = [self.cos] if self.sin is None else [self.cos, self.sin]
        options = dict(self.form[-1])
        if k is None or self.one_by_one:
            turned = [self.function(x, *tables, **options) for x in normed]
        else:
            turned = self.function(*normed, *tables, **options)
        return [torch.cat((*kept, turned[0]), -1), *turned[1:]] if kept else turned


@called
def rope(*rotation: Any, **options: Any) -> Tensor | tuple[Tensor, ...]:
    """What the function of a `Rotation` gives: heads are where it has them."""
    call = Rotation(*rotation, **options)
    results = call.results()
    if call.form[0] == 2 and not call.heads_first:
        results = [x.transpose(1, 2) for x in results]
    return results[0] if call.k is None else tuple(results)


def _head_norms(
    q_norm: nn.Module | None, k_norm: nn.Module | None, q: Tensor, k: Tensor | None
) -> tuple | None:
    """The weights of q and k, eps and weight_offset, nothing without norms; None where these have to run."""
    weights: list[Tensor | None] = []
    of_all: list[float] = []
    for norm, x in ((q_norm, q), (k_norm, k)):
        if norm is None or x is None:
            weights.append(None)
            continue
        found = None if is_observed(norm) else norm_arguments(norm, x)
        if found is None or (of_all and of_all != [*found[1:]]):
            return None
        weight, *of_all = found
        weights.append(weight)
    return (*weights, *of_all) if of_all else ()


# Functions that forwards call

# {(how many tensors turn, whether there is one complex table, dimensions of q, *options by name): the form}
Forms: TypeAlias = dict[tuple, RopeForm]


@functools.cache
def rotation_in_place(function: types.FunctionType) -> InPlace | None:
    """What runs in the place of a function of (q, k, cos, sin), (x, cos, sin) or (q, k, cos + i sin)."""
    if "rotary" not in function.__name__:
        return None
    forms: Forms = {}
    for kind in itertools.product(((2, False), (1, False), (2, True)), (4, 3), _options_of(function)):
        (tensors, is_complex), dims, options = kind
        form = rope_form(function, tensors, options, is_complex, dims)
        if form is not None:
            forms[tensors, is_complex, dims, *options] = form
    return InPlace(functools.partial(rotated, function, forms), Done("rope")) if forms else None


def _options_of(function: types.FunctionType) -> Iterator[tuple[tuple[str, Any], ...]]:
    """None, and each that a function has, such as the dimension of the heads."""
    yield ()
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, int):
            yield from (((name, value),) for value in (1, 2))  # True is 1


def rotated(function: Callable, forms: Forms, *args: Any, **options: Any) -> Any:
    """function(*args, **options), by the operator where tensors are given by position."""
    out, tensors = None, 0
    if len(args) > 2 and all(isinstance(x, Tensor) for x in args):
        is_complex = args[-1].is_complex()
        tensors = len(args) - (1 if is_complex else 2)
        known = all(isinstance(value, int) for value in options.values())
        form = forms.get((tensors, is_complex, args[0].dim(), *options.items())) if known else None
        out = None if form is None else _rotated(form, args[:tensors], args[tensors:])
    if out is None:
        return function(*args, **options)
    return tuple(out) if tensors == 2 else out[0]


def _rotated(form: RopeForm, inputs: Sequence[Tensor], tables: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The inputs turned, with heads where the form has them; None where the operator does not apply."""
    q = inputs[0]
    if q.dtype is torch.float64 or any(x.dtype is not q.dtype for x in inputs):
        return None
    if q.dim() == 3:
        out = _rotated(form, [x[None] for x in inputs], [table[None] for table in tables])
        return None if out is None else [x[0] for x in out]
    cos, sin = tables if len(tables) == 2 else _real(*tables)
    turn = _turn(form, q.dim(), q.shape[-1], cos)
    if turn is None:
        return None
    cos, sin, options = tables_and_options(turn, cos, sin)
    rows = [x.transpose(1, 2) if form.heads_dim == 1 else x for x in inputs]
    turned = ops.rope(rows[0], rows[1] if len(rows) == 2 else None, cos, sin, **options)[: len(rows)]
    return turned if form.heads_dim == 1 else [x.transpose(1, 2) for x in turned]


# Rewriting of an attention's program


def _is_rotation(match: Match) -> Done | None:
    """Whether a function applies rotary embeddings; norms of heads in front of it become its arguments."""
    options = {each.arg: each.value for each in match.values["OPTIONS"]}
    if None in options or not all(isinstance(value, ast.Constant) for value in options.values()):
        return None
    function = match.function("_ROTARY")
    if "rotary" not in match.child("_ROTARY") or not isinstance(function, types.FunctionType):
        return None
    tensors = 2 if "K" in match.values else 1
    constants = tuple(sorted((name, value.value) for name, value in options.items()))
    form = rope_form(function, tensors, constants, "TABLE" in match.values)
    if form is None:
        return None
    match.values["FORM"] = code(repr(tuple(form)))
    names, match.values["NORMS"] = [], []
    for tensor in ("Q", "K")[:tensors]:
        norm = norm_in(match.program, match.values[tensor], match.place, _NORMED, weighted=True)
        if norm is not None:
            names.append(norm.child("NORM"))
            match.values["NORMS"].append(ast.keyword(f"{tensor.lower()}_norm", norm.values["NORM"]))
            match.values[tensor] = norm.values["NORMED"]
            norm.drop()
    return Done("rope", f"rope with {', '.join(names)}" if names else "")


REPLACE_ROPE = (
    Rewrite(
        "_ROTARY(Q, K, COS, SIN, **OPTIONS)",
        "rope(_ROTARY, FORM, Q, K, COS, SIN, **NORMS)",
        where=_is_rotation,
    ),
    Rewrite(
        "_ROTARY(Q, COS, SIN, **OPTIONS)",
        "rope(_ROTARY, FORM, Q, None, COS, SIN, **NORMS)",
        where=_is_rotation,
    ),
    Rewrite(
        "_ROTARY(Q, K, TABLE, **OPTIONS)",
        "rope(_ROTARY, FORM, Q, K, TABLE, None, **NORMS)",
        where=_is_rotation,
    ),
)


def has_heads_first(match: Match) -> bool:
    """Whether the function of a call of `rope` has heads first."""
    return RopeForm(*ast.literal_eval(match.values["FORM"])).heads_dim == 1


def _may_have_rows(match: Match) -> Done | None:
    is_one = ast.unparse(match.values["K"]) == "None"
    is_done = any(option.arg == "rows" for option in match.values["OPTIONS"])
    return None if is_one or is_done or not has_heads_first(match) else NOTHING_NEW


# The operator would transpose back.
KEEP_ROWS = (
    Rewrite(
        "rope(F, FORM, Q.transpose(1, 2), K.transpose(1, 2), COS, SIN, **OPTIONS)",
        "rope(F, FORM, Q, K, COS, SIN, rows=True, **OPTIONS)",
        where=_may_have_rows,
    ),
    Rewrite(
        "rope(F, FORM, Q.transpose(1, 2), K, COS, SIN, **OPTIONS)",
        "rope(F, FORM, Q, K.transpose(1, 2), COS, SIN, rows=True, **OPTIONS)",
        where=_may_have_rows,
    ),
)
