"""Lets the rotary embedding write keys and values where a growing cache keeps them.

A forward rotates the keys and hands them to the cache beside the values: `CACHE.update(K, V, LAYER)`. The
rotation gets the cache and the values, too, and the update what it has written. Latent attention keeps normed
latents as keys, and what turns as values.
"""

import ast
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ..program.building import code
from ..program.programs import If, Program, name_of, names_in
from ..program.rewrites import Form, Match, Rewrite
from ..runtime import called
from .norms import norm_in

# Results of `rope` with heads first, by the dimension in which it has them.
_RESULTS = {1: "ITEMS[{}]", 2: "ITEMS[{}].transpose(1, 2)"}
# A norm of rows in front of a change of shape; then its input as [B, T, H, D].
_NORMED = {"NORM(X).transpose(1, 2)": "X", "shaped(NORM(X))": "shaped(X).transpose(1, 2)"}


class Slots(NamedTuple):
    """All keys and values of a layer once it has new ones, which take the last `tokens` places."""

    keys: Tensor
    values: Tensor
    tokens: int


def slots_of(cache: Any, layer: int, keys: Tensor, values: Tensor) -> Slots | None:
    """The slots for new keys and values [B, T, H, D], which `take_slots` adds once they are written.

    None where there is no room for them, and where the cache needs more than a copy of them.
    """
    layers = getattr(cache, "layers", None)
    if not layers or not 0 <= layer < len(layers):
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


# Rewriting of an attention's program


def _is_written(match: Match) -> str | None:
    """Whether one of the two comes from `rope`, which can write both: SLOTS is where it has written them."""
    if match.child("CACHE") not in match.program.arguments_names():
        return None
    return "rope_cache_" if _write(match, "K", "V") or _write(match, "V", "K") else None


WRITE_INTO_CACHE = Rewrite(
    "CACHE.update(K, V, LAYER, *REST, **OTHERS)",
    "take_slots(SLOTS, CACHE, K, V, LAYER, *REST, **OTHERS)",
    where=_is_written,
)


def _write(match: Match, turned: str, other: str) -> bool:
    """Lets the rotation of the first of the two names write both; False if it cannot."""
    program = match.program
    k, v = _only_for(match, turned), _only_for(match, other)
    if k is None or v is None or (found := _rotation_of(program, k)) is None:
        return False
    rope, rotation, q, unused = found
    block = program.block_of(rotation)
    if v not in block or program.mutates_between(*sorted((v, rotation), key=block.index)):
        return False
    values = match.values | {"ARGS": rope.args, "OPTIONS": rope.keywords}
    values |= {"SWAPPED": [ast.keyword("swapped", ast.Constant(True))] if turned == "V" else []}
    normed, values["NORM"], values["ROWS"] = _norm_and_rows(program, v)
    names = {name for each in ("CACHE", "LAYER", "ROWS") for name in names_in(values[each])}
    if not all(_is_before(program, name, rotation) for name in names - program.arguments_names()):
        return False
    call = code("rope_into_cache(CACHE, LAYER, ROWS, NORM, *ARGS, **OPTIONS, **SWAPPED)", **values)
    slots = program.assign("slots", ast.Constant(None))
    match.values["SLOTS"] = ast.Name(name_of(slots), ast.Load())
    results = program.unpack(call, [q, k, v, slots])
    block.remove(v)
    block[block.index(rotation) : block.index(rotation)] = [results, v, slots]
    for statement in (rotation, *unused, *normed):
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


def _rotation_of(
    program: Program, k: ast.Assign
) -> tuple[ast.Call, ast.Assign, ast.Assign, tuple[ast.Assign, ...]] | None:
    """The call of `rope` whose second result is k, with its statement; the statement of its first result.

    Both have heads first. Last are statements that name them as they are before their dimensions are swapped.
    """
    for heads_dim, result in _RESULTS.items():
        for second in Form(result.format(1)).find(program, k.value, k):
            items = ast.unparse(second.values["ITEMS"])
            rotation = program.defined_by(items)
            first = next(_reading(program, Form(result.format(0)), items), None)
            if rotation is None or first is None or not isinstance(rope := rotation.value, ast.Call):
                continue
            is_rope = ast.unparse(rope.func) == "_moe_mps.rope"
            if is_rope and ast.literal_eval(rope.args[1])[0] == heads_dim:
                q, unused = first
                return rope, rotation, q, (*unused, *second.gone)
    return None


def _reading(program: Program, form: Form, items: str) -> Iterator[tuple[ast.Assign, tuple[ast.Assign, ...]]]:
    """The statements that have a form of these ITEMS, and what only they read."""
    for statement in program.assignments():
        for match in form.find(program, statement.value, statement):
            if ast.unparse(match.values["ITEMS"]) == items:
                yield statement, match.gone


def _norm_and_rows(program: Program, v: ast.Assign) -> tuple[tuple[ast.Assign, ...], ast.expr, ast.expr]:
    """Statements that norm values; the norm, or None; and what it norms, as [B, T, H, D]."""
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
