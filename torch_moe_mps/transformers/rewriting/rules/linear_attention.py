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
from torch import Tensor

from ....ops._checks import ACTIVATION_DTYPES
from ....ops.linear_attention import MAX_KEY_WIDTH
from ...report import NOTHING_NEW, Done
from ..program.building import every_call
from ..program.programs import Program, name_of
from ..program.rewrites import Match, Rewrite
from ..runtime import called
from .trial import agrees, tried

ops = torch.ops.moe_mps

_L2NORM_EPS = 1e-6
_RULE = Done("linear_attention_")
_FLAG = (bool, type(None))
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
    function: Callable, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **options: Any
) -> tuple:
    """function(q, k, v, g=, beta=, **options), and the state, updated in place where there is one."""
    state = options.get("initial_state")
    if not _known(options) or not _fits(q, k, v, state):
        result: tuple = function(q, k, v, g=g, beta=beta, **options)
        return result
    eps = _L2NORM_EPS if options.get("use_qk_l2norm_in_kernel") else None
    if state is None:
        shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
        state = torch.zeros(shape, dtype=torch.float32, device=q.device)
    out = ops.linear_attention_(q, k, v, g, state, q.shape[-1] ** -0.5, beta=beta, l2norm_eps=eps)
    return out, state if options.get("output_final_state") else None


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
    """Whether a call is the recurrence. The cache takes the state back: to update it in place is the same."""
    options = [keyword.arg for keyword in match.values["OPTIONS"]]
    statement = match.statements["ITEMS"]
    if "initial_state" not in options or not _state_goes_to_cache(match.program, statement):
        return None
    if not is_delta_rule(match.function("_RULE")):
        return None
    return NOTHING_NEW if _RULE in match.program.rewrites else _RULE  # prompts and steps have a call each


def _state_goes_to_cache(program: Program, rule: ast.Assign) -> bool:
    names = set().union(*map(program.names_of, _holders(program, rule, 1)))
    updates = (c for c in every_call(program) if ast.unparse(c.func).endswith(".update_recurrent_state"))
    return any(call.args and ast.unparse(call.args[0]) in names for call in updates)


def _holders(program: Program, rule: ast.Assign, index: int) -> list[str]:
    """The names of one of the results of a rule."""
    result = f"{name_of(rule)}[{index}]"
    return [name for name, value in program.definitions.items() if ast.unparse(value) == result]


GATED_DELTA = Rewrite(
    "ITEMS = _RULE(Q, K, V, g=G, beta=BETA, **OPTIONS)",
    "ITEMS = delta_rule(_RULE, Q, K, V, g=G, beta=BETA, **OPTIONS)",
    where=_is_rule,
)
