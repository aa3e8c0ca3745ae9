"""Shared experts: their output joins the sum over the routed experts instead of being added after it."""

import ast

from torch import Tensor, nn

from ...experts import add_terms, experts_forward, may_be_fused
from ...interface import Experts
from ..experts_calls import is_experts_call
from ..program.building import helper, sums
from ..program.formulas import Reader
from ..program.patterns import match
from ..program.programs import Program, name_of
from ..runtime import called

_VIEWS = {"view", "reshape"}


@called
def experts_with_shared(
    experts: Experts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    shared_out: Tensor | None = None,
    shared_gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """experts(...) + shared_out, times sigmoid(shared_gate) where there is one, + residual.

    What the operators add is rounded once.
    """
    added: dict[str, Tensor] = {}
    is_same = True
    for name, term in (("shared_out", shared_out), ("residual", residual)):
        if term is not None:
            added[name] = term.reshape(hidden_states.shape)
            is_same = is_same and term.dtype is hidden_states.dtype
    if is_same and may_be_fused(experts):
        gate = None if shared_gate is None else shared_gate.reshape(-1)
        # What transformers' dispatch to implementations would call, without it.
        return experts_forward(experts, hidden_states, top_k_index, top_k_weights, shared_gate=gate, **added)
    return add_terms(experts(hidden_states, top_k_index, top_k_weights), shared_gate, **added)


def fold_shared_experts(program: Program) -> None:
    """Rewrites `experts(...) + shared` in a block's program."""
    for statement, total in sums(program):
        _fold(program, statement, total)


def is_with_shared(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "_moe_mps.experts_with_shared"


def experts_call(program: Program, value: ast.expr, or_with_shared: bool = False) -> ast.Call | None:
    """The call of the experts behind a value and changes of its shape, if nothing else reads it.

    `or_with_shared`: also one that `fold_shared_experts` has rewritten.
    """
    while True:
        name = program.last_name(value)
        if name is not None and program.uses(name) != 1:
            return None
        value = program.follow(value)
        if not isinstance(value, ast.Call):
            return None
        if is_experts_call(program, value) or (or_with_shared and is_with_shared(value)):
            return value
        if not isinstance(value.func, ast.Attribute) or value.func.attr not in _VIEWS:
            return None
        value = value.func.value


def _fold(program: Program, statement: ast.Assign, total: ast.BinOp) -> None:
    terms = (total.left, total.right)
    for routed, shared in (terms, terms[::-1]):
        call = experts_call(program, routed)
        found = program.definition(program.last_name(routed))
        moves = found is not None and program.mutates_between(found[0], statement)
        if call is None or moves or _reads(program, shared, call):
            continue
        gate, output = _gated(program, shared)
        new = helper("experts_with_shared", call.func, *call.args, output, *([gate] if gate else []))
        # The sum takes the place of the routed output, in the shape in which it was added.
        statement.value = _in_place_of(program, routed, call, new)
        program.definitions[name_of(statement)] = statement.value
        program.rewrites.append("shared expert" + (" and its gate" if gate else "") + " in moe_experts")
        return


def _reads(program: Program, shared: ast.expr, call: ast.Call) -> bool:
    """Whether the shared expert's output depends on the routed one."""
    pending, seen = [shared], set()
    while pending:
        value = pending.pop()
        if value is call:
            return True
        for node in ast.walk(value):
            if isinstance(node, ast.Name) and node.id not in seen and node.id in program.definitions:
                seen.add(node.id)
                pending.append(program.definitions[node.id])
    return False


def _gated(program: Program, shared: ast.expr) -> tuple[ast.expr | None, ast.expr]:
    """(gate logit, output) of sigmoid(self.gate(x)) * output where the gate has one value a token."""
    bound = match("sigmoid(GATE) * OUT", Reader(program).read(shared))
    if bound is not None and bound["GATE"].op == "module" and bound["OUT"].source is not None:
        gate = program.module.get_submodule(bound["GATE"].args[0].removeprefix("self."))
        if isinstance(gate, nn.Linear) and gate.out_features == 1:
            return bound["GATE"].source, bound["OUT"].source
    return None, shared


def _in_place_of(program: Program, routed: ast.expr, call: ast.Call, new: ast.Call) -> ast.expr:
    """The expression for `routed` with the call of the experts replaced; its statements are dropped."""
    found = program.definition(program.last_name(routed))
    if found is not None:
        program.statements.remove(found[0])
    value = program.follow(routed)
    if value is call:
        return new
    assert isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)  # a view: experts_call
    inner = _in_place_of(program, value.func.value, call, new)
    return ast.Call(ast.Attribute(inner, value.func.attr, ast.Load()), value.args, value.keywords)
