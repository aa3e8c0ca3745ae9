"""Calls of `rope` that do the work of more statements: of q and of k, and of heads of which a part turns."""

import ast

import torch

from ..program.formulas import Reader, is_pure
from ..program.programs import Program, name_of, names_in

SWAP = "transpose(1, 2)"


def rope_of(value: ast.expr | None) -> ast.Call | None:
    """A value as a call of `rope`, if it is one."""
    is_rope = isinstance(value, ast.Call) and ast.unparse(value.func) == "_moe_mps.rope"
    return value if is_rope and isinstance(value, ast.Call) else None


def turn_last(program: Program) -> None:
    """Rewrites cat((X[0], T[0])) of T = rope(X[1], ...), where X are the two parts of q's heads.

    The operator passes on what does not turn.
    """
    for statement in program.assignments():
        kept, turned = _joined(program, statement.value)
        parts, rotation = _result(program, kept, 0), _result(program, turned, 0)
        rope = rope_of(None if rotation is None else rotation.value)
        if parts is None or rope is None or _result(program, rope.args[2], 1) is not parts:
            continue
        width = _width_of_second(program, parts.value)
        read_once = program.uses(program.last_name(turned) or "") == 1
        if width is None or not read_once or program.mutates_between(parts, statement):
            continue
        if any(keyword.arg == "q_norm" for keyword in rope.keywords):
            continue
        assert isinstance(parts.value, ast.Call)
        rope.args[2] = parts.value.args[0]
        rope.keywords.append(ast.keyword("last", width))
        program.replace(statement, turned)
        program.drop_unused(is_pure)  # the split, which reads q, too


def _joined(program: Program, value: ast.expr) -> list[ast.expr]:
    """a and b of torch.cat((a, b), dim=-1); else two values that are nothing."""
    is_cat = isinstance(value, ast.Call) and Reader(program).resolve(value.func) is torch.cat
    if is_cat and isinstance(value, ast.Call) and len(value.args) == 1:
        parts = value.args[0]
        if isinstance(parts, (ast.Tuple, ast.List)) and len(parts.elts) == 2 and _is_of_rows(value):
            return parts.elts
    return [ast.Constant(None)] * 2


def _is_of_rows(call: ast.Call) -> bool:
    return [ast.unparse(keyword) for keyword in call.keywords] == ["dim=-1"]


def _result(program: Program, value: ast.expr, index: int) -> ast.Assign | None:
    """The statement of several results, of which a value is the one with this index."""
    value = program.follow(value)
    if not isinstance(value, ast.Subscript) or not isinstance(value.value, ast.Name):
        return None
    return program.defined_by(value.value.id) if ast.unparse(value.slice) == str(index) else None


def _width_of_second(program: Program, value: ast.expr) -> ast.expr | None:
    """b of torch.split(x, [a, b], dim=-1)."""
    is_split = isinstance(value, ast.Call) and Reader(program).resolve(value.func) is torch.split
    if is_split and isinstance(value, ast.Call) and len(value.args) == 2 and _is_of_rows(value):
        sizes = value.args[1]
        if isinstance(sizes, ast.List) and len(sizes.elts) == 2:
            return sizes.elts[1]
    return None


def join_rotations(program: Program) -> None:
    """Rewrites two calls of `rope`, of q and of k, as one."""
    for block in list(program.blocks()):
        assigned = [statement for statement in block if isinstance(statement, ast.Assign)]
        found = [s for s in assigned if (call := rope_of(s.value)) and ast.unparse(call.args[3]) == "None"]
        for first, second in zip(found[::2], found[1::2], strict=False):
            moved = _moved(program, block, first, second)
            if moved is not None and _same_rotation(first.value, second.value):
                _join(program, block, moved, second)


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
            if not isinstance(statement, ast.Assign) or not ast.unparse(statement.value).endswith(SWAP):
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
