"""Linear attention with the gated delta rule (Qwen3-Next), prompts and decode steps.

Its functions are recognised by running them on random numbers. A prompt runs the recurrence as well: for
chunks, torch's MPS backend encodes one triangular solve for each head and chunk.
"""

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....ops._checks import ACTIVATION_DTYPES
from ....ops.linear_attention import MAX_KEY_WIDTH
from ...report import NOTHING_NEW, Done
from ..program.building import RESHAPING, code, every_call
from ..program.formulas import Node, Reader
from ..program.patterns import match as matched
from ..program.programs import If, Program, copied, name_of, names_in
from ..program.rewrites import Match, Rewrite
from ..runtime import called
from .gated_norm import is_gated_norm, norm_of_heads
from .trial import agrees, tried

ops = torch.ops.moe_mps

_L2NORM_EPS = 1e-6
_RULE = Done("linear_attention_")
_LOGITS = {"decay": "softplus", "beta_activation": "sigmoid"}
_FLAG = (bool, type(None))
# The gates as models compute them.
_G, _BETA = "neg(exp(A_LOG)) * softplus(A + DT_BIAS)", "sigmoid(B)"
ACTIVATIONS = {"silu": "silu", "swish": "silu", None: "none"}


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
    name = ACTIVATIONS.get(activation)
    present = [tensor for tensor in (x, conv_state, weight, bias) if tensor is not None]
    known = all(tensor.dtype in ACTIVATION_DTYPES and tensor.device == x.device for tensor in present)
    fits = known and conv_state.shape[-1] >= weight.shape[-1] - 1
    if name is None or not fits:
        return function(x, conv_state, weight, bias, activation)
    return ops.causal_conv1d_update_(x.mT, conv_state, weight, bias, name).mT


@called
def causal_conv_of_prompt(
    function: Callable,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """function(x, weight, bias, activation, **options), which sees nothing in front of x."""
    plain = all(isinstance(value, _FLAG) for value in options.values())
    if not plain or ACTIVATIONS.get(activation) is None:
        own: Tensor = function(x, weight, bias, activation, **options)
        return own
    state = x.new_zeros(x.shape[0], *weight.shape)
    return causal_conv(lambda x, _, *rest: function(x, *rest), x, state, weight, bias, activation)


@called
def delta_rule(
    function: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Callable,
    raw: tuple | None,
    norm: tuple[nn.Module, Tensor] | None = None,
    **options: Any,
) -> tuple:
    """function(q, k, v, g=, beta=, **options), and the state, which is updated in place where there is one.

    `gates` computes g and beta; `raw` is what the operator takes in their place: g, beta, A_log, dt_bias.
    `norm` is a norm of the result and its gate; whether the result is normed is the third one then.
    """
    state = options.get("initial_state")
    heads: dict[str, Any] = {}
    if not _known(options) or not _fits(q, k, v, state):
        g, beta = gates()
        results = function(q, k, v, g=g, beta=beta, **options)
    else:
        heads = {} if norm is None else norm_of_heads(norm[0], v, norm[1])
        logits = {} if raw is None else {"A_log": raw[2], "dt_bias": raw[3], **_LOGITS}
        g, beta = gates() if raw is None else raw[:2]
        eps = _L2NORM_EPS if options.get("use_qk_l2norm_in_kernel") else None
        if state is None:
            shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
            state = torch.zeros(shape, dtype=torch.float32, device=q.device)
        scale = q.shape[-1] ** -0.5
        out = ops.linear_attention_(q, k, v, g, state, scale, beta=beta, l2norm_eps=eps, **logits, **heads)
        results = out, state if options.get("output_final_state") else None
    return results if norm is None else (*results, len(heads) > 0)


@called
def norm_heads(norm: nn.Module, x: Tensor, gate: Tensor, is_normed: bool) -> Tensor:
    """norm(x, gate), unless delta_rule has done it."""
    return x if is_normed else norm(x, gate)


def _known(options: dict) -> bool:
    """Whether no option is used that the operator does not know.

    Flags of the model, such as use_cache, are no options: forwards pass them on to every function.
    """
    others = (value for name, value in options.items() if name != "initial_state")
    return all(isinstance(value, _FLAG) for value in others)


def _fits(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> bool:
    if state is not None and (state.dtype != torch.float32 or state.device != q.device):
        return False
    dtypes = q.dtype in ACTIVATION_DTYPES and q.dtype == k.dtype == v.dtype
    narrow = q.dim() == 4 and q.shape[-1] <= MAX_KEY_WIDTH
    return dtypes and narrow and q.shape == k.shape and v.shape[2] % q.shape[2] == 0


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
        expected = ops.causal_conv1d_update_(x.mT, ours, weight, given, ACTIVATIONS[activation]).mT
        if not _agree(result, expected) or not torch.equal(theirs, ours):
            return False
    return True


@functools.cache
def is_conv_of_prompt(function: Callable) -> bool:
    """Whether a function of (x, weight, bias, activation) is that with nothing in front of x."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 3, 6), (3, 4), (3,)))
    for given, activation in ((None, "silu"), (bias, None)):
        result, state = tried(function, x, weight, given, activation=activation), torch.zeros(2, 3, 4)
        expected = ops.causal_conv1d_update_(x.mT, state, weight, given, ACTIVATIONS[activation]).mT
        if not _agree(result, expected):
            return False
    return True


@functools.cache
def is_delta_rule(function: Callable) -> bool:
    """Whether a function of (q, k, v, g, beta, ...) is linear_attention_: one of steps or one of chunks."""
    generator = torch.Generator().manual_seed(0)
    tokens = 66  # more than a chunk
    shapes = (*((2, tokens, *rest) for rest in ((2, 8), (2, 8), (4, 3), (4,), (4,))), (2, 4, 8, 3))
    q, k, v, g, beta, state = (torch.randn(shape, generator=generator) for shape in shapes)
    k, g, beta = F.normalize(k, dim=-1), -g.abs(), beta.sigmoid()
    for normed, initial in ((True, state), (False, state), (True, None)):
        ours = torch.zeros_like(state) if initial is None else state.clone()
        options = {"initial_state": None if initial is None else state.clone(), "output_final_state": True}
        result = tried(function, q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normed, **options)
        eps = _L2NORM_EPS if normed else None
        expected = ops.linear_attention_(q, k, v, g, ours, 8**-0.5, beta=beta, l2norm_eps=eps)
        if not isinstance(result, tuple) or not all(map(_agree, result, (expected, ours))):
            return False
    return True


_agree = functools.partial(agrees, rtol=1e-4)


# Rewriting of a program


def _is_conv(match: Match) -> Done | None:
    given = {keyword.arg for keyword in match.values["OPTIONS"]}
    is_candidate = "conv" in ast.unparse(match.values["_CONV"]) and given <= {"weight", "bias", "activation"}
    found = is_candidate and is_causal_conv(match.function("_CONV"))
    return Done("causal_conv1d_update_") if found else None


CAUSAL_CONV = Rewrite(
    "_CONV(X, STATE, *REST, **OPTIONS)", "causal_conv(_CONV, X, STATE, *REST, **OPTIONS)", where=_is_conv
)


def _is_conv_of_prompt(match: Match) -> Done | None:
    is_candidate = "conv" in ast.unparse(match.values["_CONV"])
    return NOTHING_NEW if is_candidate and is_conv_of_prompt(match.function("_CONV")) else None


CONV_OF_PROMPT = Rewrite(
    "_CONV(X, WEIGHT, *REST, **OPTIONS)",
    "causal_conv_of_prompt(_CONV, X, WEIGHT, *REST, **OPTIONS)",
    where=_is_conv_of_prompt,
)


def _is_rule(match: Match) -> Done | None:
    """Whether a call is the recurrence; GATES and RAW are its gates, see `delta_rule`.

    The cache takes the state back: to update it in place is the same.
    """
    program, statement = match.program, match.statements["ITEMS"]
    options = [keyword.arg for keyword in match.values["OPTIONS"]]
    if "initial_state" not in options:
        return None
    if not _state_goes_to_cache(program, statement) or not is_delta_rule(match.function("_RULE")):
        return None
    gates = match.values["G"], match.values["BETA"]
    raw = _raw_gates(program, *gates, statement)
    if raw is not None:  # the statements of the gates are dropped where nothing else reads them
        gates = tuple(copied(program.follow(gate)) for gate in gates)
    match.values["GATES"] = code("lambda: (G, BETA)", G=gates[0], BETA=gates[1])
    match.values["RAW"] = raw or ast.Constant(None)
    return NOTHING_NEW if _RULE in program.rewrites else _RULE  # prompts and steps have a call each


def _state_goes_to_cache(program: Program, rule: ast.Assign) -> bool:
    names = set().union(*map(program.names_of, _holders(program, rule, 1)))
    updates = (c for c in every_call(program) if ast.unparse(c.func).endswith(".update_recurrent_state"))
    return any(call.args and ast.unparse(call.args[0]) in names for call in updates)


def _holders(program: Program, rule: ast.Assign, index: int) -> list[str]:
    """The names of one of the results of a rule."""
    result = f"{name_of(rule)}[{index}]"
    return [name for name, value in program.definitions.items() if ast.unparse(value) == result]


def _raw_gates(program: Program, g: ast.expr, beta: ast.expr, until: ast.stmt) -> Any:
    """(g, beta, A_log, dt_bias) as the operator takes them, None where the gates have other formulas.

    None, too, where what they read may have changed when the statement `until` runs.
    """
    statements = [program.defined_by(gate.id) for gate in (g, beta) if isinstance(gate, ast.Name)]
    if any(each is None or program.mutates_between(each, until) for each in statements):
        return None
    decay, strength = (matched(form, Reader(program).read(gate)) for form, gate in ((_G, g), (_BETA, beta)))
    if decay is None or strength is None:
        return None
    sources = {name: _before_casts(node) for name, node in (decay | strength).items()}
    if isinstance(sources["A"], ast.Attribute):
        sources["A"], sources["DT_BIAS"] = sources["DT_BIAS"], sources["A"]
    are_given = all(isinstance(sources[name], ast.Name) for name in ("A", "B"))
    are_own = all(isinstance(sources[name], ast.Attribute) for name in ("A_LOG", "DT_BIAS"))
    return code("(A, B, A_LOG, DT_BIAS)", **sources) if are_given and are_own else None


def _before_casts(node: Node) -> ast.expr | None:
    """A value in front of the casts that have no name in the program."""
    while node.op == "cast" and not isinstance(node.source, ast.Name):
        node = node.args[0]
    return node.source


GATED_DELTA = Rewrite(
    "ITEMS = _RULE(Q, K, V, g=G, beta=BETA, **OPTIONS)",
    "ITEMS = delta_rule(_RULE, Q, K, V, gates=GATES, raw=RAW, **OPTIONS)",
    where=_is_rule,
)


def _is_norm_of_rule(match: Match) -> Done | None:
    """Whether a gated norm alone reads the rules' results; they norm them then, as FLAG says."""
    program = match.program
    rules = [each for each in program.assignments() if _calls_rule(each.value)]
    if not rules or not is_gated_norm(match.module("NORM")):
        return None
    holders = {name_of(rule): [_holders(program, rule, index) for index in range(2)] for rule in rules}
    own = set().union(*(program.names_of(name) for results, _ in holders.values() for name in results))
    own |= {name for name in program.definitions if _unshaped(program, ast.Name(name)) in own}
    every = [*program.every(), program.result]
    readers = [each for each in every if _reads(each, own) and not _assigns(each, own)]
    later = [name for each in every[every.index(rules[0]) :] for name in names_in(each, ast.Store)]
    x, gate = (_unshaped(program, match.values[name]) for name in ("X", "GATE"))
    if x not in own or readers != [match.place] or _reads(readers[0], own) != 1 or gate in ["", *later]:
        return None
    if any(program.uses(name) != sum(map(len, held)) for name, held in holders.items()):
        return None
    flag = program.assign("is_normed", ast.Constant(False))
    match.values["FLAG"] = ast.Name(name_of(flag), ast.Load())
    del program.definitions[name_of(flag)]  # it has several values, as names behind an `if` have
    program.statements.insert(0, flag)
    for rule in rules:
        assert isinstance(rule.value, ast.Call)
        rule.value.keywords.append(ast.keyword("norm", match.fill(f"(NORM, {gate})")))
        block = program.block_of(rule)
        block.insert(block.index(rule) + 1, ast.Assign(flag.targets, code(f"{name_of(rule)}[2]")))
    return Done("linear_attention_", f"{match.child('NORM')} in linear_attention_")


NORM_RESULTS = Rewrite("NORM(X, GATE)", "norm_heads(NORM, X, GATE, FLAG)", where=_is_norm_of_rule)


def _calls_rule(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "_moe_mps.delta_rule"


def _unshaped(program: Program, value: ast.expr) -> str:
    """The name of a value before any number of view and reshape; empty if it has none."""
    while isinstance(call := program.follow(value), ast.Call) and isinstance(call.func, ast.Attribute):
        if call.func.attr not in RESHAPING:
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


def _is_updated(match: Match) -> Done | None:
    is_argument = match.child("CACHE") in match.program.arguments_names()
    return NOTHING_NEW if is_argument and _RULE in match.program.rewrites else None


KEEP_STATE = Rewrite(
    "CACHE.update_recurrent_state(STATE, LAYER, *REST, **OPTIONS)",
    "update_state(CACHE, STATE, LAYER, *REST, **OPTIONS)",
    where=_is_updated,
)
