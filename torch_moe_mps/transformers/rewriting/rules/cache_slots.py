"""Lets the rotary embedding write keys and values where a growing cache keeps them.

A forward rotates the keys and hands them to the cache beside the values: `CACHE.update(K, V, LAYER)`. The
rotation gets the cache and the values, too, and the update what it has written. Latent attention keeps normed
latents as keys, and what turns as values.
"""

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from ...experts import is_observed
from ...report import Done
from ..program.building import code
from ..program.programs import If, Program, name_of, names_in
from ..program.rewrites import Form, Match, Rewrite
from ..runtime import called
from .norms import norm_arguments, norm_in
from .rms_norm import rms_norm
from .rope import Rotation, has_heads_first

ops = torch.ops.moe_mps

_ROTATION = Form("ITEMS = rope(FUNCTION, FORM, *ARGS, **OPTIONS); K = ITEMS[1]", kept=("ITEMS",))
# A norm of rows in front of a change of shape; then its input as [B, T, H, D].
_NORMED = {"NORM(X).transpose(1, 2)": "X", "shaped(NORM(X))": "shaped(X).transpose(1, 2)"}


class Slots(NamedTuple):
    """All keys and values of a layer once it has new ones, which take the last `tokens` places."""

    keys: Tensor
    values: Tensor
    tokens: int


def _slots_of(cache: Any, layer: int, keys: Tensor, values: Tensor) -> Slots | None:
    """The slots for new keys and values [B, T, H, D], which `take_slots` adds once they are written.

    None where there is no room for them, and where the cache needs more than a copy of them.
    """
    layers = getattr(cache, "layers", None)
    if not layers or not 0 <= layer < len(layers) or type(cache).update is not Cache.update:
        return None
    find: Callable[[Tensor, Tensor], Slots | None] | None = getattr(layers[layer], "slots", None)
    return None if find is None else find(keys, values)


@called
def take_slots(
    slots: Slots | None, cache: Any, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """cache.update(keys, values, layer, ...), of which slots that are written need no copy."""
    if slots is None:
        updated: tuple[Tensor, Tensor] = cache.update(keys, values, layer, *args, **kwargs)
    else:
        updated = cache.layers[layer].take(*slots)
    return updated


@called
def rope_into_cache(
    cache: Any,
    layer: int,
    v: Tensor,
    v_norm: nn.Module | None,
    *rotation: Any,
    swapped: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None, Slots | None]:
    """The results of a `Rotation`, and v_norm(v) of v [B, T, H, D], all three with heads first.

    If a cache that grows in place has room, the last result are its slots, which have k and v. `swapped`: it
    keeps v as keys and k as values.
    """
    call = Rotation(*rotation, **options)
    arguments = call.arguments()
    fits = arguments is not None and v.dtype is call.q.dtype and v.shape[-1] % 2 == 0
    if arguments is not None and fits and (v_norm is None or _add_norm(*arguments, v_norm, v)):
        q, k = call.inputs(2)
        held: tuple[Any, Any] = (v, k) if swapped else (k, v)
        slots = _slots_of(cache, layer, *held)
        if slots is not None:
            keys, values = (slots.values, slots.keys) if swapped else (slots.keys, slots.values)
            given, settings = arguments
            return ops.rope_cache_(q, k, v, keys, values, *given, **settings), None, None, slots
    q, k = call.results()
    v = v if v_norm is None else rms_norm(v_norm, v)
    return q, k, v.transpose(1, 2), None


def _add_norm(given: list[Any], options: dict[str, Any], v_norm: nn.Module, v: Tensor) -> bool:
    """Adds the norm of the values to the arguments; False where the operator cannot apply it."""
    found = None if is_observed(v_norm) else norm_arguments(v_norm, v)
    if found is None:
        return False
    weight, eps, offset = found
    if len(given) == 2:  # neither q nor k has a norm
        given += None, None, eps, offset
    *_, eps_of_all, offset_of_all = given
    options["norm_v"] = True
    if weight is not None:
        options["v_weight"] = weight
    return bool(eps == eps_of_all and (weight is None or offset == offset_of_all))


# Rewriting of an attention's program


def _is_written(match: Match) -> Done | None:
    """Whether one of the two comes from `rope`, which can write both: SLOTS is where it has written them."""
    if match.child("CACHE") not in match.program.arguments_names():
        return None
    return Done("rope_cache_") if _write(match, "K", "V") or _write(match, "V", "K") else None


WRITE_INTO_CACHE = Rewrite(
    "CACHE.update(K, V, LAYER, *REST, **OTHERS)",
    "take_slots(SLOTS, CACHE, K, V, LAYER, *REST, **OTHERS)",
    where=_is_written,
)


def _write(match: Match, turned: str, other: str) -> bool:
    """Lets the rotation of the first of the two names write both; False if it cannot."""
    program = match.program
    k, v = _only_for(match, turned), _only_for(match, other)
    found = None if k is None or v is None else next(_ROTATION.find(program, k.value, k), None)
    if found is None or v is None:
        return False
    is_given = any(option.arg == "heads_first" for option in found.values["OPTIONS"])
    if not is_given and not has_heads_first(found):
        return False
    rotation = found.statements["ITEMS"]
    block = program.block_of(rotation)
    if program.uses(name_of(rotation)) != 2:  # for q and for k
        return False
    if v not in block or program.mutates_between(*sorted((v, rotation), key=block.index)):
        return False
    values = match.values | found.values
    values |= {"SWAPPED": [ast.keyword("swapped", ast.Constant(True))] if turned == "V" else []}
    normed, values["NORM"], values["ROWS"] = _norm_and_rows(program, v)
    names = {name for each in ("CACHE", "LAYER", "ROWS") for name in names_in(values[each])}
    if not all(_is_before(program, name, rotation) for name in names - program.arguments_names()):
        return False
    call = "rope_into_cache(CACHE, LAYER, ROWS, NORM, FUNCTION, FORM, *ARGS, **OPTIONS, **SWAPPED)"
    program.replace(rotation, code(call, **values))
    program.replace(v, found.fill("ITEMS[2]"))
    block.remove(v)
    block.insert(block.index(rotation) + 1, v)
    match.values["SLOTS"] = found.fill("ITEMS[3]")
    for statement in normed:
        program.remove(statement)
    return True


def _only_for(match: Match, name: str) -> ast.Assign | None:
    """The statement that names a value, if only the update reads it, and what runs instead of the update."""
    program = match.program
    held = program.last_name(match.values[name])
    if held is None or held in names_in(program.result):
        return None
    for statement in program.every():
        read = names_in(statement.test if isinstance(statement, If) else statement)
        is_update = statement is match.place and read.count(held) == 1
        if held in read and not is_update and not _is_without_cache(match, statement):
            return None
    return program.defined_by(held)


def _is_without_cache(match: Match, statement: ast.stmt) -> bool:
    """Whether a statement only runs where there is no cache to update."""
    ifs = [each for each in match.program.every() if isinstance(each, If) and statement in each.orelse]
    return any(ast.unparse(each.test) == f"{match.child('CACHE')} is not None" for each in ifs)


def _norm_and_rows(program: Program, v: ast.Assign) -> tuple[tuple[ast.Assign, ...], ast.expr, ast.expr]:
    """(statements to drop, the norm or None, the values before it [B, T, H, D])."""
    normed = norm_in(program, v.value, v, _NORMED)
    if normed is not None:
        return normed.gone, normed.values["NORM"], normed.values["NORMED"]
    swapped = next(Form("X.transpose(1, 2)").find(program, v.value, v), None)
    rows = code("V.transpose(1, 2)", V=v.value) if swapped is None else swapped.values["X"]
    return () if swapped is None else swapped.gone, ast.Constant(None), rows


def _is_before(program: Program, name: str, statement: ast.Assign) -> bool:
    """Whether a name has its value before a statement runs, in the same block."""
    defined, block = program.defined_by(name), program.block_of(statement)
    if name == "self":
        return True
    return defined is not None and defined in block and block.index(defined) < block.index(statement)
