"""Rotary position embeddings, and the norms of q and k in front of them.

Models write the same few formulas in many ways, so a function is recognised by running it: on random numbers
only one of the operator's forms can agree with it.
"""

import ast
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...experts import is_observed
from ..program.rewrites import Form, Match, Rewrite
from ..record import NOTHING, RECORD
from ..runtime import called
from .cache_slots import Slots, slots_of
from .norms import is_norm, weight_of
from .rms_norm import rms_norm
from .trial import agrees, tried

ops = torch.ops.moe_mps

_PAIRS = ("half", "interleaved", "interleaved_to_half")
_HEADS, _TOKENS, _WIDTH = 3, 5, 16
_NORM, _NORM_TRANSPOSED = Form("NORM(X)"), Form("NORM(X).transpose(1, 2)")


class RopeForm(NamedTuple):
    """How a function rotates, for tables cos and sin as wide as a head and half as wide (None: it cannot).

    `heads_dim`: where q and k have their heads, 1 or 2.
    """

    heads_dim: int
    wide: tuple | None
    narrow: tuple | None


class _Turn(NamedTuple):
    """One of the operator's forms: which elements are a pair, how many columns of the tables count, and
    whether the elements that turn are as many as these columns or twice as many."""

    pairs: str
    half_of_table: bool
    doubled: bool
    rotary_last: bool


_TURNS = [_Turn(*fields) for fields in itertools.product(_PAIRS, (False, True), (False, True), (False, True))]


def _rotation(turn: tuple, cos: Tensor, sin: Tensor) -> dict[str, Any]:
    """Arguments of the operator."""
    pairs, half_of_table, doubled, rotary_last = turn
    if half_of_table:
        cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
    rotary = cos.shape[-1] * (2 if doubled else 1)
    return {"cos": cos, "sin": sin, "pairs": pairs, "rotary_dim": rotary, "rotary_last": rotary_last}


@functools.lru_cache(maxsize=1024)
def rope_form(function: types.FunctionType, tensors: int, options: tuple) -> RopeForm | None:
    """What a function of (q, k, cos, sin) or (x, cos, sin) does; None if the operator cannot do it."""
    widths = (_WIDTH, _WIDTH // 2)
    for heads_dim in (1, 2):
        turns = [_turn_of(function, tensors, dict(options), heads_dim, width) for width in widths]
        if any(turns):
            return RopeForm(heads_dim, *turns)
    return None


def _turn_of(
    function: Callable, tensors: int, options: dict, heads_dim: int, table_width: int
) -> tuple | None:
    generator = torch.Generator().manual_seed(heads_dim)
    shapes = [(2, _TOKENS, _HEADS + i, _WIDTH) for i in range(tensors)]
    inputs = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]
    cos, sin = (torch.rand(2, _TOKENS, table_width, generator=generator) + 0.5 for _ in range(2))
    given = [x.transpose(1, 2) if heads_dim == 1 else x for x in inputs]
    results = tried(function, *given, cos, sin, **options)
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != tensors or not all(isinstance(result, Tensor) for result in results):
        return None
    expected = [result if heads_dim == 1 else result.transpose(1, 2) for result in results]
    for turn in _TURNS:
        columns = table_width // 2 if turn.half_of_table else table_width
        if columns * (2 if turn.doubled else 1) > _WIDTH:
            continue
        turned = ops.rope(inputs[0], inputs[1] if tensors == 2 else None, **_rotation(turn, cos, sin))
        if all(map(agrees, turned, expected)):
            return tuple(turn)
    return None


def _turn(wide: tuple | None, narrow: tuple | None, q: Tensor, cos: Tensor) -> tuple | None:
    """The form for these tables: a partial rotation is one for narrow tables."""
    if cos.dim() != 3 or q.dim() != 4:
        return None
    if cos.shape[-1] == q.shape[-1]:
        return wide
    if narrow and _Turn(*narrow).doubled and cos.shape[-1] * 2 != q.shape[-1]:
        return None
    return narrow


@called
def rope(
    function: Callable,
    form: tuple,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_norm: nn.Module | None = None,
    k_norm: nn.Module | None = None,
    rows: bool = False,
    one_by_one: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """function(q_norm(q), k_norm(k), cos, sin), or function(q_norm(q), cos, sin).

    `rows`: q and k are [B, T, heads, D] and transposed for the function. `one_by_one`: it takes q and k in a
    call each.
    """
    heads_first = form[0] == 1
    arguments = _arguments(form, q, k, cos, sin, q_norm, k_norm)
    if heads_first and rows != (arguments is not None):  # the function has heads first, the operator tokens
        q, k = q.transpose(1, 2), None if k is None else k.transpose(1, 2)
    if arguments is None:
        normed = [x if norm is None else norm(x) for x, norm in ((q, q_norm), (k, k_norm)) if x is not None]
        if one_by_one:
            return tuple(function(x, cos, sin, **options) for x in normed)
        return function(*normed, cos, sin, **options)
    q, k_turned = ops.rope(q, k, **arguments)
    if heads_first:
        return q if k is None else (q, k_turned)
    q = q.transpose(1, 2)
    return q if k is None else (q, k_turned.transpose(1, 2))


@called
def rope_into_cache(
    cache: Any,
    layer: int,
    v: Tensor,
    v_norm: nn.Module | None,
    function: Callable,
    form: tuple,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: nn.Module | None = None,
    k_norm: nn.Module | None = None,
    rows: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Slots | None]:
    """The results of `rope`, v_norm(v), and the slots of a cache that grows in place if they have k and v."""
    heads_first = form[0] == 1
    arguments = _arguments(form, q, k, cos, sin, q_norm, k_norm)
    fits = arguments is not None and v.dtype is k.dtype and v.shape[-1] % 2 == 0
    if arguments is not None and fits and (v_norm is None or _norms_alike(v_norm, arguments)):
        in_rows = [q, k, v]
        if heads_first:
            in_rows = [*((q, k) if rows else (q.transpose(1, 2), k.transpose(1, 2))), v.transpose(1, 2)]
        slots = slots_of(cache, layer, in_rows[1], in_rows[2])
        if slots is not None:
            turned = ops.rope_cache_(
                *in_rows, slots.keys, slots.values, norm_v=v_norm is not None, **arguments
            )
            if heads_first:
                return turned, slots.keys, slots.values, slots
            turned, keys, values = (x.transpose(1, 2) for x in (turned, slots.keys, slots.values))
            return turned, keys, values, slots
    q, k = rope(function, form, q, k, cos, sin, q_norm, k_norm, rows, **options)
    return q, k, v if v_norm is None else rms_norm(v_norm, v), None


def _arguments(
    form: tuple, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_norm: nn.Module | None, k_norm: nn.Module | None,
) -> dict[str, Any] | None:  # fmt: skip
    """What the operator takes besides q and k; None where the model's own function has to run."""
    dtype = q.dtype
    if dtype is torch.float64 or (k is not None and k.dtype is not dtype):
        return None
    _, wide, narrow = form
    turn = _turn(wide, narrow, q, cos)
    norms = _norm_arguments(q_norm, k_norm, q, k)
    return None if turn is None or norms is None else _rotation(turn, cos, sin) | norms


def _norms_alike(v_norm: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether the operator can norm values together with q and k: without a weight, with the same eps."""
    formula = v_norm.__dict__.get(RECORD, NOTHING).formula
    if formula is None or formula.weight or is_observed(v_norm):
        return False
    eps = getattr(v_norm, formula.eps)
    return bool(arguments.setdefault("eps", eps) == eps)


def _norm_arguments(
    q_norm: nn.Module | None, k_norm: nn.Module | None, q: Tensor, k: Tensor | None
) -> dict | None:
    """The norms as arguments of the operator; None where their modules have to run."""
    if q_norm is None and k_norm is None:
        return {}
    arguments: dict = {}
    eps = offset = None
    for name, norm, x in (("q_weight", q_norm, q), ("k_weight", k_norm, k)):
        if norm is None or x is None:
            continue
        formula = norm.__dict__.get(RECORD, NOTHING).formula
        if formula is None or is_observed(norm):
            return None
        weight, own_eps = weight_of(norm), getattr(norm, formula.eps)
        if weight.size(0) != x.size(-1) or not (formula.keeps_dtype or weight.dtype is x.dtype):
            return None
        if eps is not None and (eps, offset) != (own_eps, formula.offset):
            return None
        arguments[name], eps, offset = weight, own_eps, formula.offset
    arguments["eps"], arguments["weight_offset"] = eps, offset
    return arguments


# Rewriting of an attention's program


def _is_rotation(match: Match) -> str | None:
    """Whether a function applies rotary embeddings; norms of heads in front of it become its arguments."""
    options = {each.arg: each.value for each in match.values["OPTIONS"]}
    if None in options or not all(isinstance(value, ast.Constant) for value in options.values()):
        return None
    function = match.function("_ROTARY")
    if "rotary" not in match.child("_ROTARY") or not isinstance(function, types.FunctionType):
        return None
    tensors = 2 if "K" in match.values else 1
    form = rope_form(function, tensors, tuple(sorted((name, value.value) for name, value in options.items())))
    if form is None:
        return None
    match.values["FORM"] = ast.parse(repr(tuple(form)), mode="eval").body
    norms = {tensor: norm for tensor in ("Q", "K")[:tensors] if (norm := _norm_of(match, tensor))}
    match.values["NORMS"] = [ast.keyword(f"{t.lower()}_norm", m.values["NORM"]) for t, m in norms.items()]
    for tensor, norm in norms.items():
        match.values[tensor] = norm.values["X"]
        norm.drop()
    names = ", ".join(norm.child("NORM") for norm in norms.values())
    return f"rope with {names}" if names else "rope"


def _norm_of(match: Match, tensor: str) -> Match | None:
    """A norm of heads in front of the rotation; X is its input, in the order that the rotation expects.

    A norm goes over the last dimension, so it may come after a transposition that follows it.
    """
    for form in (_NORM, _NORM_TRANSPOSED):
        for found in form.find(match.program, match.values[tensor], match.place):
            if not is_norm(found.module("NORM"), weighted=True):
                continue
            if form is _NORM_TRANSPOSED:
                swap = ast.Attribute(found.values["X"], "transpose", ast.Load())
                found.values["X"] = ast.Call(swap, [ast.Constant(1), ast.Constant(2)], [])
            return found
    return None


REPLACE_ROPE = (
    Rewrite(
        "_ROTARY(Q, K, COS, SIN, **OPTIONS)",
        "rope(_ROTARY, FORM, Q, K, COS, SIN, **NORMS, **OPTIONS)",
        where=_is_rotation,
    ),
    Rewrite(
        "_ROTARY(Q, COS, SIN, **OPTIONS)",
        "rope(_ROTARY, FORM, Q, None, COS, SIN, **NORMS, **OPTIONS)",
        where=_is_rotation,
    ),
)


def _has_heads_first(match: Match) -> str | None:
    form = ast.literal_eval(match.values["FORM"])
    return "" if RopeForm(*form).heads_dim == 1 else None


# The operator would transpose back.
KEEP_ROWS = Rewrite(
    "rope(F, FORM, Q.transpose(1, 2), K.transpose(1, 2), COS, SIN, **OPTIONS)",
    "rope(F, FORM, Q, K, COS, SIN, rows=True, **OPTIONS)",
    where=_has_heads_first,
)
