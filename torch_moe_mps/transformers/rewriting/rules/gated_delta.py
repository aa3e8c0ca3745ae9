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
from torch import Tensor

from ....ops._checks import ACTIVATION_DTYPES
from ....ops.gated_delta import MAX_KEY_WIDTH
from ..program.building import every_call, helper, own_module
from ..program.programs import Program, copied, name_of
from ..program.rewrites import Match, Rewrite
from ..runtime import called
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
def delta_rule(
    function: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Callable,
    raw: tuple | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """function(q, k, v, g=, beta=, **options), and the state, which is updated in place.

    `gates` computes g and beta; `raw` is what the operator takes in their place: g, beta, A_log, dt_bias.
    """
    state, normed, final, others = _split(options)
    if not final or others or not _fits(q, k, v, state):
        g, beta = gates()
        return function(q, k, v, g=g, beta=beta, **options)
    eps = _L2NORM_EPS if normed else None
    scale = q.shape[-1] ** -0.5
    if raw is None:
        g, beta = gates()
        out = ops.gated_delta_rule_(q, k, v, g, beta, state, scale, l2norm_eps=eps)
    else:
        g, beta, A_log, dt_bias = raw
        heads = {"A_log": A_log, "dt_bias": dt_bias, "beta_is_logit": True}
        out = ops.gated_delta_rule_(q, k, v, g, beta, state, scale, l2norm_eps=eps, **heads)
    return out, state


def _split(options: dict) -> tuple:
    """initial_state, use_qk_l2norm_in_kernel, output_final_state, and the names of other options in use.

    Flags of the model, such as use_cache, are no options: forwards pass them on to every function.
    """
    names = ("initial_state", "use_qk_l2norm_in_kernel", "output_final_state")
    others = [name for name, value in options.items() if not (name in names or isinstance(value, _FLAG))]
    return *(options.get(name) for name in names), others


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
    few = len(match.values["REST"]) <= 2
    return (
        "causal_conv1d_update_"
        if few and "conv" in name and is_causal_conv(match.function("_CONV"))
        else None
    )


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
    if not _goes_to_cache(program, f"{name_of(statement)}[1]") or not is_delta_rule(match.function("_RULE")):
        return None
    values = [match.values["G"], match.values["BETA"]]
    gates = [_gate(program, value, statement) for value in values]
    raw = _raw(*gates)
    if raw is not None:  # the statements of the gates stay where they are for the other branch
        values = [copied(gate.statement.value) for gate in gates if gate is not None]
    empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    match.values["GATES"] = ast.Lambda(empty, ast.Tuple(values, ast.Load()))
    match.values["RAW"] = ast.Constant(None) if raw is None else ast.Tuple(raw, ast.Load())
    return "gated_delta_rule_"


def _goes_to_cache(program: Program, state: str) -> bool:
    """Whether the cache is given a value, which is one of several results."""
    holders = [name for name, value in program.definitions.items() if ast.unparse(value) == state]
    names = set().union(*map(program.names_of, holders))
    calls = every_call(program)
    updates = [call for call in calls if ast.unparse(call.func).endswith(".update_recurrent_state")]
    return any(call.args and ast.unparse(call.args[0]) in names for call in updates)


def _gate(program: Program, value: ast.expr, until: ast.stmt) -> _Gate | None:
    """The statement that computes a gate, if what it reads is still the same at a later statement."""
    statement = program.defined_by(value.id) if isinstance(value, ast.Name) else None
    if statement is None or program.mutates_between(statement, until):
        return None
    return _Gate(statement, program.function.__globals__)


def _raw(g: _Gate | None, beta: _Gate | None) -> list[ast.expr] | None:
    """g, beta, A_log and dt_bias as the operator takes them."""
    names = None if g is None else _decay_attributes(g)
    if g is None or beta is None or names is None or not _is_sigmoid(beta):
        return None
    return [*(ast.Name(gate.locals[0], ast.Load()) for gate in (g, beta)), *map(own_module, names)]


GATED_DELTA = Rewrite(
    "ITEMS = _RULE(Q, K, V, g=G, beta=BETA, **OPTIONS)",
    "ITEMS = delta_rule(_RULE, Q, K, V, gates=GATES, raw=RAW, **OPTIONS)",
    where=_is_step,
)


@called
def update_state(cache: Any, state: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
    """cache.update_recurrent_state(...), which would copy a state that the operator updated onto itself."""
    held = getattr(cache.layers[layer], "recurrent_states", None)
    if not args and not kwargs and held and held[0] is state:
        return state
    return cache.update_recurrent_state(state, layer, *args, **kwargs)


def keep_state(program: Program) -> None:
    """Rewrites the calls that hand an updated state to an argument, where GATED_DELTA has found one."""
    if not any(note.startswith("gated_delta_rule_") for note in program.rewrites):
        return
    for statement in program.every():
        call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        owner = call.func.value
        is_argument = isinstance(owner, ast.Name) and owner.id in program.arguments_names()
        if is_argument and call.func.attr == "update_recurrent_state" and len(call.args) >= 2:
            call.args.insert(0, owner)
            call.func = helper("update_state").func
