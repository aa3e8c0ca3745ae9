"""Keys and values that the rotary embedding writes where a growing cache keeps them.

A forward rotates the keys and hands them to the cache beside the values: `CACHE.update(K, V, LAYER)`. The
rotation gets the cache and the values, too, and the update what it has written.
"""

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..program.building import calls, child_of_call, helper, item
from ..program.programs import Program, name_of, names_in
from ..runtime import called
from .norms import is_norm

_SWAP = "transpose(1, 2)"


class Slots(NamedTuple):
    """Where a layer keeps new keys and values, views [B, H, T, D] of its memory, and all that it has then."""

    keys: Tensor
    values: Tensor
    all_keys: Tensor
    all_values: Tensor


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
        updated = cache.layers[layer].take(slots.all_keys, slots.all_values, slots.keys.shape[2])
    return updated


# Rewriting of an attention's program


def join_rotations(program: Program) -> None:
    """Rewrites two calls of `rope`, of q and of k, as one."""
    for block in list(program.blocks()):
        assigned = [statement for statement in block if isinstance(statement, ast.Assign)]
        found = [s for s in assigned if (call := _rope(s.value)) and ast.unparse(call.args[3]) == "None"]
        for first, second in zip(found[::2], found[1::2], strict=False):
            moved = _moved(program, block, first, second)
            if moved is not None and _same_rotation(first.value, second.value):
                _join(program, block, moved, second)


def _rope(value: ast.expr) -> ast.Call | None:
    """A value as a call of `rope`, if it is one."""
    is_rope = isinstance(value, ast.Call) and ast.unparse(value.func) == "_moe_mps.rope"
    return value if is_rope and isinstance(value, ast.Call) else None


def _same_rotation(a: ast.expr, b: ast.expr) -> bool:
    assert isinstance(a, ast.Call) and isinstance(b, ast.Call)
    arguments = [[ast.dump(call.args[place]) for place in (0, 1, 4, 5)] for call in (a, b)]
    options = [{k.arg: ast.dump(k.value) for k in call.keywords if k.arg != "q_norm"} for call in (a, b)]
    return arguments[0] == arguments[1] and options[0] == options[1]


def _moved(
    program: Program, block: list[ast.stmt], first: ast.Assign, second: ast.Assign
) -> list[ast.Assign] | None:
    """The first statement and those that only swap dimensions of its result, in front of the second."""
    between = block[block.index(first) + 1 : block.index(second)]
    moved, names = [first], {name_of(first)}
    for statement in between:
        if statement in program.inplace:
            return None
        if names & set(names_in(statement)):
            if not isinstance(statement, ast.Assign) or not ast.unparse(statement.value).endswith(_SWAP):
                return None
            moved.append(statement)
            names.add(name_of(statement))
    return None if names & set(names_in(second)) else moved


def _join(program: Program, block: list[ast.stmt], moved: list[ast.Assign], second: ast.Assign) -> None:
    first = moved[0]
    call, other = first.value, second.value
    assert isinstance(call, ast.Call) and isinstance(other, ast.Call)
    call.args[3] = other.args[2]
    call.keywords += [ast.keyword("k_norm", k.value) for k in other.keywords if k.arg == "q_norm"]
    call.keywords.append(ast.keyword("one_by_one", ast.Constant(True)))
    both = program.unpack(call, [first, second])
    for statement in moved:
        block.remove(statement)
    place = block.index(second)
    block[place:place] = [both, *moved]
    program.rewrites.append("rope of q and k")


def write_into_cache(program: Program) -> None:
    """Rewrites the calls of `rope` whose keys go to a cache, and the call that hands them to it."""
    for update in _updates(program):
        keys, values, layer = update.args[:3]
        rotation = _rotation_of(program, keys)
        if rotation is None or not isinstance(values, ast.Name) or not isinstance(update.func, ast.Attribute):
            continue
        statement, rope = rotation
        norm = _normed(program, values) if _heads_dim(rope) == 2 else None
        if norm is None and _heads_dim(rope) == 2:
            continue
        cache, v = update.func.value, values if norm is None else norm.x
        names = {name for value in (cache, layer, v) for name in names_in(value)} - program.arguments_names()
        if not all(_is_before(program, name, statement) for name in names):
            continue
        rope.func = helper("rope_into_cache").func
        rope.args[:0] = [cache, layer, v, ast.Constant(None) if norm is None else norm.module]
        results = name_of(statement)
        if norm is not None:
            program.replace(norm.statement, item(results, 2))
        update.func = helper("take_slots").func
        update.args[:0] = [item(results, 3), cache]
        program.rewrites.append("rope_cache_")


def _heads_dim(rope: ast.Call) -> int:
    heads_dim: int = ast.literal_eval(rope.args[1])[0]
    return heads_dim


class _Norm(NamedTuple):
    """A statement that norms values: the norm and its input, as expressions."""

    statement: ast.Assign
    module: ast.expr
    x: ast.expr


def _normed(program: Program, values: ast.Name) -> _Norm | None:
    """The norm without a weight behind values whose dimensions are swapped."""
    value = program.follow(values)
    if not ast.unparse(value).endswith(f".{_SWAP}"):
        return None
    assert isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    name = program.last_name(value.func.value)
    statement = None if name is None or program.uses(name) != 1 else program.defined_by(name)
    call = None if statement is None else statement.value
    if statement is None or not isinstance(call, ast.Call) or len(call.args) != 1:
        return None
    found = child_of_call(program, call)
    if found is None or not is_norm(found[1], weighted=False):
        return None
    return _Norm(statement, call.func, call.args[0])


def _updates(program: Program) -> list[ast.Call]:
    """Calls of an argument's `update`."""
    updates = {f"{name}.update" for name in program.arguments_names()}
    return [call for _, call in calls(program) if ast.unparse(call.func) in updates and len(call.args) >= 3]


def _rotation_of(program: Program, keys: ast.expr) -> tuple[ast.Assign, ast.Call] | None:
    """The call of `rope` that gives the keys as its second result."""
    value, is_swapped = program.follow(keys), False
    if ast.unparse(value).endswith(f".{_SWAP}"):
        assert isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
        value, is_swapped = program.follow(value.func.value), True
    if not isinstance(value, ast.Subscript) or not isinstance(value.value, ast.Name):
        return None
    if ast.unparse(value.slice) != "1" or (statement := program.defined_by(value.value.id)) is None:
        return None
    call = _rope(statement.value)
    if call is None:
        return None
    return (statement, call) if _heads_dim(call) == (2 if is_swapped else 1) else None


def _is_before(program: Program, name: str, statement: ast.Assign) -> bool:
    """Whether a name has its value before a statement runs, in the same block."""
    defined, block = program.defined_by(name), program.block_of(statement)
    if name == "self":
        return True
    return defined is not None and defined in block and block.index(defined) < block.index(statement)
