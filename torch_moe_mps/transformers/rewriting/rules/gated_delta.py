"""The decode step of linear attention with the gated delta rule (Qwen3-Next).

Its two functions, and the gates before them, are recognised by running them on random numbers.
"""

import ast
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES
from ....ops.gated_delta import MAX_KEY_WIDTH
from ..program.building import code, every_call
from ..program.programs import If, Program, copied, name_of, names_in
from ..program.rewrites import Match, Rewrite
from ..runtime import called
from .gated_norm import is_gated_norm, norm_of_heads
from .trial import agrees, tried

ops = torch.ops.moe_mps

MOST_TOKENS = 8
_L2NORM_EPS = 1e-6
_FLAG = (bool, type(None))
_ACTIVATIONS = {"silu": "silu", "swish": "silu", None: "none"}


# What the rewritten forwards call


@called
def causal_conv(
    function: Callable,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """function(x, conv_state, weight, bias, activation), which updates conv_state in place."""
    name = _ACTIVATIONS.get(activation)
    present = [tensor for tensor in (x, conv_state, weight, bias) if tensor is not None]
    known = all(tensor.dtype in ACTIVATION_DTYPES and tensor.device == x.device for tensor in present)
    fits = known and x.shape[-1] <= MOST_TOKENS and conv_state.shape[-1] >= weight.shape[-1] - 1
    if name is None or not fits:
        return function(x, conv_state, weight, bias, activation)
    return ops.causal_conv1d_update_(x, conv_state, weight, bias, name)


@called
def delta_rule(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """function(q, k, v, g=, beta=, **options), and the state, which is updated in place."""
    out, state, _ = delta_rule_and_norm(*args, **options)
    return out, state


@called
def delta_rule_and_norm(
    function: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Callable,
    raw: tuple | None,
    norm: tuple[nn.Module, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, bool]:
    """What delta_rule gives, and whether its result is normed.

    `gates` computes g and beta; `raw` is what the operator takes in their place: g, beta, A_log, dt_bias.
    `norm` is a norm of the result and its gate.
    """
    state = options.get("initial_state")
    if not _known(options) or not _fits(q, k, v, state):
        g, beta = gates()
        return *function(q, k, v, g=g, beta=beta, **options), False
    heads = {} if norm is None else norm_of_heads(norm[0], v, norm[1])
    is_normed = len(heads) > 0
    if raw is None:
        g, beta = gates()
    else:
        g, beta, A_log, dt_bias = raw
        heads |= {"A_log": A_log, "dt_bias": dt_bias, "beta_is_logit": True}
    eps = _L2NORM_EPS if options.get("use_qk_l2norm_in_kernel") else None
    out = ops.gated_delta_rule_(q, k, v, g, beta, state, q.shape[-1] ** -0.5, l2norm_eps=eps, **heads)
    return out, state, is_normed


@called
def norm_heads(norm: nn.Module, x: Tensor, gate: Tensor, is_normed: bool) -> Tensor:
    """norm(x, gate), unless delta_rule has done it."""
    return x if is_normed else norm(x, gate)


def _known(options: dict) -> bool:
    """Whether the state is wanted, and no option is used that the operator does not know.

    Flags of the model, such as use_cache, are no options: forwards pass them on to every function.
    """
    others = (value for name, value in options.items() if name != "initial_state")
    return bool(options.get("output_final_state")) and all(isinstance(value, _FLAG) for value in others)


def _fits(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> bool:
    if state is None or state.dtype != torch.float32 or state.device != q.device:
        return False
    dtypes = q.dtype in ACTIVATION_DTYPES and q.dtype == k.dtype == v.dtype
    few = q.dim() == 4 and q.shape[1] <= MOST_TOKENS and q.shape[-1] <= MAX_KEY_WIDTH
    return dtypes and few and q.shape == k.shape and v.shape[2] % q.shape[2] == 0


# Recognising functions by running them


@functools.cache
def is_causal_conv(function: Callable) -> bool:
    """Whether a function of (x, conv_state, weight, bias, activation) is causal_conv1d_update_."""
    generator = torch.Generator().manual_seed(0)
    x, state, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((2, 3, 1), (2, 3, 4), (3, 4), (3,))
    )
    for given, activation in ((None, "silu"), (bias, None)):
        theirs, ours = state.clone(), state.clone()
        result = tried(function, x, theirs, weight, given, activation)
        expected = ops.causal_conv1d_update_(x, ours, weight, given, _ACTIVATIONS[activation])
        if not _agree(result, expected) or not torch.equal(theirs, ours):
            return False
    return True


@functools.cache
def is_delta_rule(function: Callable) -> bool:
    """Whether a function of (q, k, v, g, beta, ...) is gated_delta_rule_."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 2, 8), (2, 2, 2, 8), (2, 2, 4, 3), (2, 2, 4), (2, 2, 4), (2, 4, 8, 3))
    q, k, v, g, beta, state = (torch.randn(shape, generator=generator) for shape in shapes)
    k, g, beta = F.normalize(k, dim=-1), -g.abs(), beta.sigmoid()
    for normed in (True, False):
        ours = state.clone()
        options = {"initial_state": state.clone(), "output_final_state": True}
        result = tried(function, q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normed, **options)
        eps = _L2NORM_EPS if normed else None
        expected = ops.gated_delta_rule_(q, k, v, g, beta, ours, 8**-0.5, l2norm_eps=eps)
        if not isinstance(result, tuple) or not all(map(_agree, result, (expected, ours))):
            return False
    return True


_agree = functools.partial(agrees, rtol=1e-4)


class _Gate:
    """A statement `name = expression` of one local value and attributes of the module."""

    def __init__(self, statement: ast.Assign, scope: dict):
        self.statement = statement
        self.scope = scope
        nodes = list(ast.walk(statement.value))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self.locals = sorted(names - {"self"} - scope.keys())
        self.attributes = sorted(
            {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"}
        )

    def tried(self, value: Tensor, attributes: dict[str, Tensor]) -> object:
        """What the expression gives for these values."""
        code = compile(ast.unparse(self.statement.value), "<gate>", "eval")
        values = {"self": types.SimpleNamespace(**attributes), self.locals[0]: value}
        return tried(eval, code, self.scope, values)


def _is_sigmoid(gate: _Gate) -> bool:
    if len(gate.locals) != 1 or gate.attributes:
        return False
    b = torch.linspace(-4.0, 4.0, 7)
    return _agree(gate.tried(b, {}), b.sigmoid())


def _decay_attributes(gate: _Gate) -> tuple[str, str] | None:
    """The names of A_log and dt_bias in -exp(A_log) * softplus(a + dt_bias)."""
    if len(gate.locals) != 1 or len(gate.attributes) != 2:
        return None
    a, A_log, dt_bias = (
        torch.linspace(-4.0, 4.0, 7),
        torch.linspace(-1.0, 1.0, 7),
        torch.linspace(0.0, 3.0, 7),
    )
    expected = -A_log.exp() * F.softplus(a + dt_bias)
    first, second = gate.attributes
    for names in ((first, second), (second, first)):
        if _agree(gate.tried(a, dict(zip(names, (A_log, dt_bias), strict=True))), expected):
            return names
    return None


# Rewriting of a program


def _is_conv(match: Match) -> str | None:
    name = ast.unparse(match.values["_CONV"])
    is_candidate = "conv" in name and len(match.values["REST"]) <= 2
    found = is_candidate and is_causal_conv(match.function("_CONV"))
    return "causal_conv1d_update_" if found else None


CAUSAL_CONV = Rewrite(
    "_CONV(X, STATE, WEIGHT, *REST)", "causal_conv(_CONV, X, STATE, WEIGHT, *REST)", where=_is_conv
)


def _is_step(match: Match) -> str | None:
    """Whether a call is the recurrence of one token; GATES and RAW are its gates, see `delta_rule`.

    It stands in the first branch of an `if` then, and the cache takes the state back: in place is the same.
    """
    program, statement = match.program, match.statements["ITEMS"]
    options = [keyword.arg for keyword in match.values["OPTIONS"]]
    ifs = [each for each in program.every() if isinstance(each, ast.If)]
    if "initial_state" not in options or not any(statement in each.body for each in ifs):
        return None
    if not _state_goes_to_cache(program, statement) or not is_delta_rule(match.function("_RULE")):
        return None
    values = [match.values["G"], match.values["BETA"]]
    gates = [_gate(program, value, statement) for value in values]
    raw = _raw(*gates)
    if raw is not None:  # the statements of the gates stay where they are for the other branch
        values = [copied(gate.statement.value) for gate in gates if gate is not None]
    match.values["GATES"] = code("lambda: (G, BETA)", G=values[0], BETA=values[1])
    match.values["RAW"] = raw or ast.Constant(None)
    return "gated_delta_rule_"


def _state_goes_to_cache(program: Program, rule: ast.Assign) -> bool:
    names = set().union(*map(program.names_of, _holders(program, rule, 1)))
    updates = (c for c in every_call(program) if ast.unparse(c.func).endswith(".update_recurrent_state"))
    return any(call.args and ast.unparse(call.args[0]) in names for call in updates)


def _holders(program: Program, rule: ast.Assign, index: int) -> list[str]:
    """The names of one of the results of a rule."""
    result = f"{name_of(rule)}[{index}]"
    return [name for name, value in program.definitions.items() if ast.unparse(value) == result]


def _gate(program: Program, value: ast.expr, until: ast.stmt) -> _Gate | None:
    """The statement that computes a gate, if what it reads is still the same at a later statement."""
    statement = program.defined_by(value.id) if isinstance(value, ast.Name) else None
    if statement is None or program.mutates_between(statement, until):
        return None
    return _Gate(statement, program.function.__globals__)


def _raw(g: _Gate | None, beta: _Gate | None) -> ast.expr | None:
    """(g, beta, A_log, dt_bias) as the operator takes them."""
    names = None if g is None else _decay_attributes(g)
    if g is None or beta is None or names is None or not _is_sigmoid(beta):
        return None
    raw: ast.expr = code(f"({g.locals[0]}, {beta.locals[0]}, self.{names[0]}, self.{names[1]})")
    return raw


GATED_DELTA = Rewrite(
    "ITEMS = _RULE(Q, K, V, g=G, beta=BETA, **OPTIONS)",
    "ITEMS = delta_rule(_RULE, Q, K, V, gates=GATES, raw=RAW, **OPTIONS)",
    where=_is_step,
)


def _is_norm_of_rule(match: Match) -> str | None:
    """Whether a gated norm alone reads a rule's result, which then norms it; FLAG says whether it has."""
    program = match.program
    rule = next((each for each in program.assignments() if _calls_rule(each.value)), None)
    if rule is None or not is_gated_norm(match.module("NORM")):
        return None
    results, state = (_holders(program, rule, index) for index in range(2))
    own = set().union(*map(program.names_of, results))
    own |= {name for name in program.definitions if _unshaped(program, ast.Name(name)) in own}
    every = [*program.every(), program.result]
    readers = [each for each in every if _reads(each, own) and not _assigns(each, own)]
    later = [name for each in every[every.index(rule) :] for name in names_in(each, ast.Store)]
    x, gate = (_unshaped(program, match.values[name]) for name in ("X", "GATE"))
    if x not in own or readers != [match.place] or _reads(readers[0], own) != 1 or gate in ["", *later]:
        return None
    flag = program.assign("is_normed", ast.Constant(False))
    match.values["FLAG"] = ast.Name(name_of(flag), ast.Load())
    _let_norm(program, rule, [*results, *state], flag, match.fill(f"(NORM, {gate})"))
    return f"{match.child('NORM')} in gated_delta_rule_"


def _let_norm(
    program: Program, rule: ast.Assign, results: list[str], flag: ast.Assign, norm: ast.expr
) -> None:
    """Hands a rule a norm of its result; `flag`, which is False before the rule, is its last result."""
    assert isinstance(rule.value, ast.Call)
    values = {"ARGS": rule.value.args, "OPTIONS": rule.value.keywords, "NORM": norm}
    is_normed = ast.Assign(flag.targets, ast.Constant(None))
    parts = [*filter(None, map(program.defined_by, results)), is_normed]
    every = program.unpack(code("delta_rule_and_norm(*ARGS, **OPTIONS, norm=NORM)", **values), parts)
    block = program.block_of(rule)
    place = block.index(rule)
    block[place : place + 1] = [every, is_normed]
    program.statements.insert(0, flag)
    for name in (name_of(rule), name_of(flag)):  # the flag has two values, as names behind an `if` have
        del program.definitions[name]


NORM_RESULTS = Rewrite("NORM(X, GATE)", "norm_heads(NORM, X, GATE, FLAG)", where=_is_norm_of_rule)


def _calls_rule(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "_moe_mps.delta_rule"


def _unshaped(program: Program, value: ast.expr) -> str:
    """The name of a value before any number of view and reshape; empty if it has none."""
    while isinstance(call := program.follow(value), ast.Call) and isinstance(call.func, ast.Attribute):
        if call.func.attr not in ("view", "reshape"):
            break
        value = call.func.value
    return value.id if isinstance(value, ast.Name) else ""


def _assigns(tree: ast.AST, names: set[str]) -> bool:
    return isinstance(tree, ast.Assign) and ast.unparse(tree.targets[0]) in names


def _reads(statement: ast.AST, names: set[str]) -> int:
    """How often a statement reads values of these names, not only their shape."""
    tree = statement.test if isinstance(statement, If) else statement
    shapes = [n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "shape"]
    read = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return sum(name.id in names and name not in shapes for name in read)


@called
def update_state(cache: Any, state: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
    """cache.update_recurrent_state(...), which would copy a state that the operator updated onto itself."""
    held = getattr(cache.layers[layer], "recurrent_states", None)
    if not args and not kwargs and held and held[0] is state:
        return state
    return cache.update_recurrent_state(state, layer, *args, **kwargs)


def _is_updated(match: Match) -> str | None:
    is_argument = match.child("CACHE") in match.program.arguments_names()
    has_rule = any(note.startswith("gated_delta_rule_") for note in match.program.rewrites)
    return "" if is_argument and has_rule else None


KEEP_STATE = Rewrite(
    "CACHE.update_recurrent_state(STATE, LAYER, *REST, **OPTIONS)",
    "update_state(CACHE, STATE, LAYER, *REST, **OPTIONS)",
    where=_is_updated,
)
