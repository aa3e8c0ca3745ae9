"""Keys and values that the rotary embedding writes where a growing cache keeps them.

A forward rotates the keys and hands them to the cache beside the values: `CACHE.update(K, V, LAYER)`. The
rotation gets the cache and the values, too, and the update what it has written. Latent attention keeps normed
latents as keys, and what turns as values.
"""

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..program.building import calls, helper
from ..program.programs import If, Program, calls_in, name_of, names_in
from ..program.rewrites import Form, Match
from ..runtime import called
from .norms import is_norm
from .rope_calls import SWAP, rope_of

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


def write_into_cache(program: Program) -> None:
    """Rewrites the calls of `rope` whose keys go to a cache, and the call that hands them to it."""
    updates = {f"{name}.update" for name in program.arguments_names()}
    for _, call in list(calls(program)):
        if ast.unparse(call.func) in updates and len(call.args) >= 3:
            keys, values = call.args[:2]
            if _write(program, call, keys, values, False) or _write(program, call, values, keys, True):
                program.rewrites.append("rope_cache_")


def _write(
    program: Program, update: ast.Call, turned: ast.expr, other: ast.expr, is_swapped: bool
) -> bool:  # fmt: skip
    """Rewrites an update if one of its tensors, `turned`, comes from `rope`."""
    k, v = (_statement_of(program, value, update) for value in (turned, other))
    if k is None or v is None or (found := _rotation_of(program, k)) is None:
        return False
    rotation, q, unused = found
    rope, block = rotation.value, program.block_of(rotation)
    assert isinstance(rope, ast.Call) and isinstance(update.func, ast.Attribute)
    if v not in block or program.mutates_between(*sorted((v, rotation), key=block.index)):
        return False
    normed, norm, x = _norm_and_rows(program, v)
    cache, layer = update.func.value, update.args[2]
    names = {name for value in (cache, layer, x) for name in names_in(value)} - program.arguments_names()
    if not all(_is_before(program, name, rotation) for name in names):
        return False
    if normed is not None:
        normed.drop()
    rope.func = helper("rope_into_cache").func
    rope.args[:0] = [cache, layer, x, norm]
    rope.keywords += [ast.keyword("swapped", ast.Constant(True))] if is_swapped else []
    slots = program.assign("slots", ast.Constant(None))
    results = program.unpack(rope, [q, k, v, slots])
    block.remove(v)
    block[block.index(rotation) : block.index(rotation)] = [results, v, slots]
    for statement in (rotation, *unused):
        program.remove(statement)
    update.func = helper("take_slots").func
    update.args[:0] = [ast.Name(name_of(slots), ast.Load()), cache]
    return True


def _statement_of(program: Program, value: ast.expr, update: ast.Call) -> ast.Assign | None:
    """The statement that names a value, if only an update reads it, and what runs instead of the update."""
    name = program.last_name(value)
    if name is None or name in names_in(program.result):
        return None
    for statement in program.every():
        read = statement.test if isinstance(statement, If) else statement
        is_other = name in names_in(read) and update not in calls_in(read)
        if is_other and not _is_without_cache(program, statement, update):
            return None
    return program.defined_by(name)


def _is_without_cache(program: Program, statement: ast.stmt, update: ast.Call) -> bool:
    """Whether a statement only runs where there is no cache to update."""
    cache = ast.unparse(update.func).removesuffix(".update")
    tests = [each.test for each in program.every() if isinstance(each, If) and statement in each.orelse]
    return any(ast.unparse(test) == f"{cache} is not None" for test in tests)


def _rotation_of(
    program: Program, k: ast.Assign
) -> tuple[ast.Assign, ast.Assign, list[ast.Assign]] | None:  # fmt: skip
    """The call of `rope` whose second result is k; the statement of its first one, both with heads first.

    Third are statements that name them as they are before their dimensions are swapped.
    """
    before = _unswapped(program, k)
    second = k if before is None else before
    if not isinstance(second.value, ast.Subscript) or not isinstance(second.value.value, ast.Name):
        return None
    results = second.value.value.id
    rotation = program.defined_by(results)
    q = _named(program, f"{results}[0]")
    if rotation is None or q is None or ast.unparse(second.value) != f"{results}[1]":
        return None
    rope = rope_of(rotation.value)
    if rope is None or ast.literal_eval(rope.args[1])[0] == (2 if before is None else 1):
        return None
    if before is None:
        return rotation, q, []
    swapped = _named(program, f"{name_of(q)}.{SWAP}")
    if swapped is None or program.uses(name_of(q)) != 1 or program.uses(name_of(before)) != 1:
        return None
    return rotation, swapped, [q, before]


def _named(program: Program, text: str) -> ast.Assign | None:
    """The statement that names a value with this text."""
    return next((each for each in program.assignments() if ast.unparse(each.value) == text), None)


def _unswapped(program: Program, statement: ast.Assign) -> ast.Assign | None:
    """The statement that names x, of one that names x.transpose(1, 2)."""
    value = statement.value
    if not ast.unparse(value).endswith(f".{SWAP}"):
        return None
    assert isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    name = program.last_name(value.func.value)
    return None if name is None else program.defined_by(name)


def _norm_and_rows(program: Program, v: ast.Assign) -> tuple[Match | None, ast.expr, ast.expr]:
    """Where the norm of values was found; the norm, or None; and what it norms, as [B, T, H, D]."""
    for text, rows in _NORMED.items():
        for match in Form(text).find(program, v.value, v):
            if is_norm(match.module("NORM")):
                return match, match.values["NORM"], match.fill(rows)
    if ast.unparse(v.value).endswith(f".{SWAP}"):
        assert isinstance(v.value, ast.Call) and isinstance(v.value.func, ast.Attribute)
        return None, ast.Constant(None), v.value.func.value
    swap = ast.Attribute(v.value, "transpose", ast.Load())
    return None, ast.Constant(None), ast.Call(swap, [ast.Constant(1), ast.Constant(2)], [])


def _is_before(program: Program, name: str, statement: ast.Assign) -> bool:
    """Whether a name has its value before a statement runs, in the same block."""
    defined, block = program.defined_by(name), program.block_of(statement)
    if name == "self":
        return True
    return defined is not None and defined in block and block.index(defined) < block.index(statement)
