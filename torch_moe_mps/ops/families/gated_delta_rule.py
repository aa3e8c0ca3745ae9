"""Linear attention by the gated delta rule, for prompts and for single tokens.

Kimi Delta Attention is its form with a decay for each channel; Mamba-2 is its form without the delta.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._activations import sigmoid_anywhere, softplus_anywhere
from .._checks import wide
from .._pending import MAX_PENDING, PENDING, check_keep, counts
from .._registry import door, operator
from .._sample import Calls, Changes, Sample
from .norms import GATE_ACTIVATIONS, rms_norm_gated

DECAYS = ("log", "softplus", "sigmoid", "times_beta")
BETA_ACTIVATIONS = ("none", "sigmoid", "softplus")
MAX_KEY_WIDTH = 256


def _log_decay(
    g: Tensor | None, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """Logarithm of the state's factor, [B, T, Hv, Dk or 1], or what broadcasts to it."""
    rate = None if A_log is None else wide(A_log).exp()
    if g is None:
        assert rate is not None
        return (-rate * beta).unsqueeze(-1)
    is_wide = g.dim() == 4
    g = wide(g) if dt_bias is None else wide(g) + wide(dt_bias)
    if rate is not None:
        rate = rate.unsqueeze(-1) if is_wide else rate
        g = -rate * softplus_anywhere(g) if lower_bound is None else lower_bound * sigmoid_anywhere(rate * g)
    return g if is_wide else g.unsqueeze(-1)


def _check_gated_delta_rule(check, g, dt_bias, beta_activation, pending_=None, keep=False, **_):
    """Checks what no declaration says: numbers of heads, shapes of decays and of uncommitted tokens."""
    key_heads, heads = check.dims("Hk Hv")
    if heads % key_heads:
        check.fail("v", f"of a multiple of q's {key_heads} heads", f"{heads} heads")
    is_wide = g is not None and g.dim() == 4
    if is_wide and beta_activation == "softplus":
        check.fail("beta_activation", "none or sigmoid where g has a value for each channel", beta_activation)
    if dt_bias is not None:
        check.rank("dt_bias", dt_bias, (2 if is_wide else 1,))
    if pending_ is not None:
        key_width, value_width = check.dims("Dk Dv")
        width = pending_width(key_width, value_width, is_wide)
        if pending_.shape[3] != width:
            check.fail("pending_", f"of {width} elements for a token", pending_.shape[3])
    check_keep(check, pending_, keep)


def pending_width(key_width: int, value_width: int, is_wide: bool = False) -> int:
    """Elements of a token's inputs for a head: its key, its value, the key's factor, beta and decays."""
    return key_width + value_width + 2 + (key_width if is_wide else 1)


def _key_rows(x: Tensor, heads: int, l2norm_eps: float | None) -> tuple[Tensor, Tensor]:
    """q or k for each head of v, in float32 or float64, and the factor [B, T, Hv, 1] of its norm."""
    x = wide(x).repeat_interleave(heads // x.shape[2], 2)
    if l2norm_eps is None:
        return x, x.new_ones((*x.shape[:3], 1))
    return x, torch.rsqrt(x.square().sum(-1, keepdim=True) + l2norm_eps)


class _Token(NamedTuple):
    """Inputs of a token: key [B, Hv, Dk], value [B, Hv, Dv], beta [B, Hv, 1] and decays [B, Hv, 1 or Dk]."""

    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor

    def taken_in(self, state: Tensor, delta: bool) -> Tensor:
        state = state * self.decay.unsqueeze(-1)
        key = self.key.unsqueeze(-1)
        written = self.value - (state * key).sum(-2) if delta else self.value
        return state + key * (written * self.beta).unsqueeze(-2)


def _advanced(state: Tensor, pending: Tensor, counts: Tensor, delta: bool) -> Tensor:
    """A state with the first `counts` tokens of each row taken in."""
    widths = [*state.shape[2:], 1, 1]
    for number, token in enumerate(pending.unbind(2)):
        key, value, scale, beta, decay = token.split([*widths, token.shape[-1] - sum(widths)], -1)
        later = _Token(key * scale, value, beta, decay).taken_in(state, delta)
        state = torch.where((counts > number).view(-1, 1, 1, 1), later, state)
    return state


_TOKENS = (
    f"q[B, T, Hk>=1, Dk<={MAX_KEY_WIDTH}] k[B, T, Hk, Dk]:q v[B, T, Hv, Dv]:q state_[B, Hv, Dk, Dv]:float32 "
    "g[B, T, Hv]|[B, T, Hv, Dk] beta[B, T, Hv] A_log[Hv] dt_bias[Hv]|[Hv, Dk] skip[Hv]"
)
_CHOICES: dict[str, Any] = {"decay_form": DECAYS, "beta_activation": BETA_ACTIVATIONS}
_DECAY = (
    'g only unless decay_form="times_beta"',
    'A_log only unless decay_form="log"',
    'lower_bound only with decay_form="sigmoid"',
    "dt_bias not without A_log",
)


@operator(
    f"{_TOKENS} gate[B, T, Hv, Dv]:v norm_weight[Dv] pending_[B, Hv, N<={MAX_PENDING}, _]:float32 "
    "counts[B, 1]:int32 -> v",
    _check_gated_delta_rule,
    allowed=_CHOICES | {"gate_activation": GATE_ACTIVATIONS},
    dependences=(*_DECAY, "gate only with norm_weight", PENDING),
)
def _gated_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state_: Tensor,
    *,
    scale: float,
    beta: Tensor,
    l2norm_eps: float | None = None,
    decay_form: str = "log",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_activation: str = "none",
    beta_min: float | None = None,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-06,
    norm_weight_offset: float = 0.0,
    pending_: Tensor | None = None,
    counts: Tensor | None = None,
    keep: bool = False,
) -> Tensor:
    """`gated_delta_rule_` with what models join to it in one dispatch. Private: it may change in any release.

    With `gate`, for each head: rms(result) * (norm_weight + norm_weight_offset) * gate_activation(gate). The
    norm sees the result rounded to the dtype of `v`.

    With `pending_`, state_ first takes in the first `counts` tokens whose inputs are kept there. With `keep`,
    the inputs of this call's tokens replace them and their update is deferred: the next call passes how many
    of them were accepted. A call without tokens applies the deferred updates.

    Args:
        q, k, v, g, state_, scale, beta, l2norm_eps, decay_form, A_log, dt_bias, lower_bound, beta_activation,
            beta_min, skip: as for `gated_delta_rule_`.
        gate: [B, T, Hv, Dv] in the dtype of `v`, or None; given with `norm_weight`, and only then.
        gate_activation: "silu" or "sigmoid".
        norm_weight: [Dv], any of the three dtypes, or None.
        norm_eps, norm_weight_offset: of the norm, as of rms_norm_gated.
        pending_: [B, Hv, N, Dk + Dv + 3], with a decay for each row [B, Hv, N, 2 Dk + Dv + 2], float32, N at
            most 8, or None; written in place as the state is.
        counts: [B, 1], int32: how many tokens of each row in `pending_` are right; given with it.
        keep: the call's tokens, at most N, are pending.

    Returns: [B, T, Hv, Dv] in the dtype of `v`.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.
    """
    heads = v.shape[2]
    (q, q_scale), (k, k_scale) = (_key_rows(x, heads, l2norm_eps) for x in (q, k))
    strength = wide(beta)
    if beta_activation == "softplus":
        shifted = strength if dt_bias is None else strength + wide(dt_bias)
        strength = softplus_anywhere(shifted)
    elif beta_activation == "sigmoid":
        strength = sigmoid_anywhere(strength)
    if beta_min is not None:
        strength = strength.clamp(min=beta_min)
    factor = _log_decay(g, strength, A_log, dt_bias, lower_bound).exp()
    factor, strength = factor.expand(*v.shape[:3], factor.shape[-1]), strength.unsqueeze(-1)
    state, delta = state_.clone(), decay_form != "times_beta"
    if pending_ is not None and counts is not None:
        state = _advanced(state, pending_, counts, delta)
        if keep:
            state_.copy_(state)
            every = torch.cat((k, wide(v), k_scale, strength, factor), -1)
            pending_[:, :, : v.shape[1]] = every.transpose(1, 2)
    q, k = q * q_scale, k * k_scale
    out = v.new_empty(v.shape)
    for t in range(v.shape[1]):  # each needs the state that the one before leaves
        token = _Token(k[:, t], wide(v[:, t]), strength[:, t], factor[:, t])
        state = token.taken_in(state, delta)
        result = (state * q[:, t].unsqueeze(-1)).sum(-2) * scale
        out[:, t] = result if skip is None else result + wide(skip).unsqueeze(-1) * token.value
    if not keep:
        state_.copy_(state)
    if gate is None or norm_weight is None:
        return out
    return rms_norm_gated(
        out,
        gate,
        norm_weight,
        norm_eps=norm_eps,
        norm_weight_offset=norm_weight_offset,
        activation=gate_activation,
    )


@door(_gated_delta_rule_, public="linear attention: gated delta rule, Kimi Delta Attention, Mamba-2")
def gated_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state_: Tensor,
    *,
    scale: float,
    beta: Tensor,
    l2norm_eps: float | None = None,
    decay_form: str = "log",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_activation: str = "none",
    beta_min: float | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """Linear attention by recurrence: gated delta rule, Kimi Delta Attention, Mamba-2.

    For each head of v, with the head of q and k that it shares with its neighbours:

        state_ = exp(log decay) * state_           a factor for each row, or one for all
        u = (v - k state_) * beta                  v * beta for "times_beta"
        state_ = state_ + k^T u
        result = q state_ * scale + skip * v

    `decay_form` is what the log decay is:

        "log"          g
        "softplus"     -exp(A_log) * softplus(g + dt_bias)                  Qwen3-Next, Kimi Linear
        "sigmoid"      lower_bound * sigmoid(exp(A_log) * (g + dt_bias))    GLM-5.3, Ring
        "times_beta"   -exp(A_log) * beta                                   Mamba-2's time step

    Everything is computed in float32. The state has the same bits wherever a prompt is cut into calls.

    Args:
        q, k: [B, T, Hk, Dk], float32, float16 or bfloat16; Dk is at most 256. Mamba's C and B.
        v: [B, T, Hv, Dv] in the dtype of `q`, Hv a multiple of Hk: value head h reads key head h * Hk / Hv.
        g: [B, T, Hv] or [B, T, Hv, Dk], any of the three dtypes; None for "times_beta".
        state_: [B, Hv, Dk, Dv], float32; updated in place, whatever its strides. It must not overlap itself
            (as an expanded tensor does) nor the other arguments.
        scale: factor of the result, 1 / sqrt(Dk) in most models.
        beta: [B, T, Hv], any of the three dtypes.
        l2norm_eps: each head x of q and k becomes x * rsqrt(sum(x^2) + l2norm_eps); None does not normalise.
        decay_form: see above.
        A_log: [Hv], any of the three dtypes; None for "log".
        dt_bias: [Hv], [Hv, Dk] with such a g, any of the three dtypes, or None.
        lower_bound: of the log decay, given for "sigmoid".
        beta_activation: "none", "sigmoid" or "softplus", of beta + dt_bias; it never sees more than float32.
        beta_min: beta is at least this; None: no bound.
        skip: [Hv], any of the three dtypes, or None.

    Returns: [B, T, Hv, Dv] in the dtype of `v`.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.

    In models, `_gated_delta_rule_` replaces it.

    Example:
        >>> q = k = torch.ones(1, 3, 1, 1)  # the delta rule without decay: the last value replaces the others
        >>> v, g = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1), torch.zeros(1, 3, 1)
        >>> state = torch.zeros(1, 1, 1, 1)
        >>> ops.gated_delta_rule_(q, k, v, g, state, scale=1.0, beta=torch.ones(1, 3, 1)).flatten().tolist()
        [1.0, 2.0, 3.0]
        >>> state.item()
        3.0
    """
    return inspect.unwrap(_gated_delta_rule_)(**locals())


def _pending(s: Sample, is_wide: bool = False) -> dict[str, Any]:
    width = pending_width(s.D, s.V, is_wide)
    return {"pending_": 0.25 * s.values(2, 4, MAX_PENDING, width, dtype=torch.float32)} | counts(s)


def _called(s: Sample) -> dict[str, Any]:
    tensors = "q[2, T, 2, D] v[2, T, 4, V] g[2, T, 4] beta[2, T, 4] A_log[4] dt_bias[4]"
    return s.of(tensors, scale=0.25, l2norm_eps=1e-6, decay_form="softplus", beta_activation="sigmoid")


def _log_decays(s: Sample) -> dict[str, Any]:
    return {
        **{"A_log": None, "dt_bias": None, "g": -s.values(2, s.T, 4).abs(), "beta_activation": "none"},
        **{"decay_form": "log", "state_": s.values(4, 2, s.D, s.V, dtype=torch.float32).transpose(0, 1)},
    }


def _times_beta(s: Sample) -> dict[str, Any]:
    steps = s.of("skip[4]", g=None, decay_form="times_beta", beta_activation="softplus")
    return steps | {"l2norm_eps": None, "scale": 1.0}


CALLS: Calls = dict.fromkeys(("_gated_delta_rule_", "gated_delta_rule_"), _called)
CHANGES: Changes = {
    "gated_delta_rule_": lambda s: [
        _log_decays(s),
        s.of("g[2, T, 4, D] dt_bias[4, D]", decay_form="sigmoid", lower_bound=-5.0),
        _times_beta(s) | {"beta_min": 0.1},
    ],
    "_gated_delta_rule_": lambda s: [
        _log_decays(s),
        s.of("gate[2, T, 4, V] norm_weight[V]", norm_weight_offset=1.0),
        s.of("g[2, T, 4, D] dt_bias[4, D] gate[2, T, 4, V] norm_weight[V]", decay_form="sigmoid")
        | {"lower_bound": -5.0, "gate_activation": "sigmoid"},
        _times_beta(s) | {"beta_min": 0.1},
        # With those that are pending, more tokens than a threadgroup stages of heads over 128.
        _pending(s) | s.of("q[2, 6, 2, D] v[2, 6, 4, V]", keep=True),
        _pending(s) | s.of("gate[2, T, 4, V] norm_weight[V]"),
        _pending(s, is_wide=True) | s.of("g[2, T, 4, D] dt_bias[4, D]", keep=True),
        _pending(s) | _times_beta(s) | {"keep": True},
        _pending(s) | s.of("q[2, 0, 2, D]"),
    ],
}
