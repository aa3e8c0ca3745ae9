"""Linear attention: the convolution in front of it and the recurrence, for prompts and for single tokens."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._registry import operator
from .._sample import Calls, Changes, Sample
from .norms import GATE_ACTIVATIONS, rms_norm_gated

ACTIVATIONS = ("none", "silu")
DECAYS = ("log", "softplus", "sigmoid", "times_beta")
BETA_ACTIVATIONS = ("none", "sigmoid", "softplus")
MAX_KEY_WIDTH = 256
MAX_STATES = 16  # for each channel of selective_scan_
MAX_PENDING = 8  # tokens that a state is behind
SCANNED_CHANNELS = 128  # in a group of selective_scan_, whose uncommitted tokens lie together
_PENDING = "counts only with pending_"


def _check_keep(check, pending_, keep):
    if keep and pending_ is None:
        check.fail("keep", "False without pending_", keep)
    if keep:
        (tokens,), room = check.dims("T"), pending_.shape[2]
        if room < tokens:
            check.fail("pending_", f"of T = {tokens} tokens or more", room)


# The convolution


def _check_conv(check, conv_state_, weight, pending_, keep, **_):
    least, length = weight.shape[1] - 1, conv_state_.shape[2]
    if length < least:
        check.fail("conv_state_", f"of W - 1 = {least} positions or more", length)
    _check_keep(check, pending_, keep)


def _behind_pending(conv_state: Tensor, pending: Tensor, counts: Tensor) -> Tensor:
    """The state, in float32, with the first `counts` tokens of each row taken in."""
    whole, length = torch.cat((conv_state.float(), pending.float()), -1), conv_state.shape[2]
    places = counts.clamp(0, pending.shape[2]).long().view(-1, 1, 1) + torch.arange(
        length, device=whole.device
    )
    return whole.gather(-1, places.expand(*conv_state.shape))


@operator(
    f"x[B, T, C] weight[C, W] conv_state_[B, C, S] bias[C] pending_[B, C, N<={MAX_PENDING}]:x "
    "counts[B, 1]:int32 -> x",
    _check_conv,
    allowed={"activation": ACTIVATIONS},
    dependences=(_PENDING,),
)
def causal_conv1d_update_(
    x: Tensor,
    conv_state_: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    add_input: bool = False,
    pending_: Tensor | None = None,
    counts: Tensor | None = None,
    keep: bool = False,
) -> Tensor:
    """Causal depthwise convolution over new positions, with a state of the previous ones.

        all = conv_state_ followed by the new positions
        result[t] = activation(sum_w weight[w] * all[S + t - W + 1 + w] + bias) + (x[t] with add_input)
        conv_state_ = the last S positions of all

    With `pending_`, the first `counts` positions that are kept there lie between the state and the new ones.
    With `keep`, conv_state_ ends with these, and the new positions are kept in their place: how many of them
    are right is known to the next call.

    Args:
        x: [B, T, C], float32, float16 or bfloat16; any strides.
        conv_state_: [B, C, S], any of the three dtypes, S at least W - 1; updated in place, whatever
            its strides. It must not overlap itself (as an expanded tensor does) nor the other arguments.
        weight: [C, W], any of the three dtypes: of the oldest position first.
        bias: [C], any of the three dtypes, or None.
        activation: "silu" or "none".
        add_input: the new positions are added to the result, in float32.
        pending_: [B, C, N] in the dtype of `x`, N at most 8, or None; written in place as the state is.
        counts: [B, 1], int32: how many positions of each row in `pending_` are right; given with it.
        keep: the new positions, at most N, are pending.

    Returns: [B, T, C] in the dtype of `x`.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.

    Example:
        >>> x, state = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1), torch.zeros(1, 1, 2)
        >>> ops.causal_conv1d_update_(x, state, torch.ones(1, 3), activation="none").flatten().tolist()
        [1.0, 3.0, 6.0]
        >>> state.tolist()
        [[[2.0, 3.0]]]
    """
    length, width, tokens = conv_state_.shape[2], weight.shape[1], x.shape[1]
    held = conv_state_.float()
    if pending_ is not None and counts is not None:
        held = _behind_pending(conv_state_, pending_, counts)
    every = torch.cat((held, x.mT.float()), -1)
    conv_state_.copy_(held if keep else every[..., every.shape[-1] - length :])
    if pending_ is not None and keep:
        pending_[..., :tokens] = x.mT
    windows = every[..., length - width + 1 :].unfold(-1, width, 1) if width and tokens else None
    out = x.new_zeros((x.shape[0], x.shape[2], tokens), dtype=torch.float32)
    if windows is not None:
        out = (windows * weight.float().unsqueeze(1)).sum(-1)
    if bias is not None:
        out = out + bias.float().unsqueeze(-1)
    out = (torch.nn.functional.silu(out) if activation == "silu" else out).mT
    return (out + x.float() if add_input else out).to(x.dtype)


# The recurrence


def _log_decay(
    g: Tensor | None, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """Logarithm of the state's factor, [B, T, Hv, Dk or 1], or what broadcasts to it."""
    rate = None if A_log is None else A_log.float().exp()
    if g is None:
        assert rate is not None
        return (-rate * beta).unsqueeze(-1)
    is_wide = g.dim() == 4
    g = g.float() if dt_bias is None else g.float() + dt_bias.float()
    if rate is not None:
        rate = rate.unsqueeze(-1) if is_wide else rate
        softplus = torch.nn.functional.softplus
        g = -rate * softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
    return g if is_wide else g.unsqueeze(-1)


def _check_linear_attention(check, g, dt_bias, beta_activation, pending_, keep, **_):
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
    _check_keep(check, pending_, keep)


def pending_width(key_width: int, value_width: int, is_wide: bool = False) -> int:
    """Elements of a token's inputs for a head: its key, its value, the key's factor, beta and decays."""
    return key_width + value_width + 2 + (key_width if is_wide else 1)


def _key_rows(x: Tensor, heads: int, l2norm_eps: float | None) -> tuple[Tensor, Tensor]:
    """q or k for each head of v, in float32, and the factor [B, T, Hv, 1] of its norm."""
    x = x.float().repeat_interleave(heads // x.shape[2], 2)
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


@operator(
    f"q[B, T, Hk>=1, Dk<={MAX_KEY_WIDTH}] k[B, T, Hk, Dk]:q v[B, T, Hv, Dv]:q state_[B, Hv, Dk, Dv]:float32 "
    "g[B, T, Hv]|[B, T, Hv, Dk] beta[B, T, Hv] A_log[Hv] dt_bias[Hv]|[Hv, Dk] skip[Hv] "
    f"gate[B, T, Hv, Dv]:v norm_weight[Dv] pending_[B, Hv, N<={MAX_PENDING}, _]:float32 "
    "counts[B, 1]:int32 -> v",
    _check_linear_attention,
    allowed={"decay_form": DECAYS, "beta_activation": BETA_ACTIVATIONS, "gate_activation": GATE_ACTIVATIONS},
    dependences=(
        'g only unless decay_form="times_beta"',
        'A_log only unless decay_form="log"',
        'lower_bound only with decay_form="sigmoid"',
        "dt_bias not without A_log",
        "gate only with norm_weight",
        _PENDING,
    ),
)
def linear_attention_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state_: Tensor,
    scale: float,
    *,
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
    """Linear attention by recurrence: gated delta rule, Kimi Delta Attention, Mamba-2.

    For each head of v, with the head of q and k that it shares with its neighbours:

        state_ = exp(log decay) * state_           a factor for each row, or one for all
        u = (v - k state_) * beta                  v * beta for "times_beta"
        state_ = state_ + k^T u
        result = q state_ * scale + skip * v

    and with `gate`, for each head: rms(result) * (norm_weight + norm_weight_offset) * gate_activation(gate).

    `decay_form` is what the log decay is:

        "log"          g
        "softplus"     -exp(A_log) * softplus(g + dt_bias)                  Qwen3-Next, Kimi Linear
        "sigmoid"      lower_bound * sigmoid(exp(A_log) * (g + dt_bias))    GLM-5.3, Ring
        "times_beta"   -exp(A_log) * beta                                   Mamba-2's time step

    Everything is computed in float32; the norm sees the result rounded to the dtype of `v`. The state has the
    same bits wherever a prompt is cut into calls.

    With `pending_`, state_ first takes in the first `counts` tokens whose inputs are kept there. With `keep`,
    the inputs of this call's tokens replace them and their update is deferred: the next call passes how many
    of them were accepted. A call without tokens applies the deferred updates.

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
        gate: [B, T, Hv, Dv] in the dtype of `v`, or None; given with `norm_weight`, and only then.
        gate_activation: "silu" or "sigmoid".
        norm_weight: [Dv], any of the three dtypes, or None.
        norm_eps, norm_weight_offset: of the norm, `eps` and `weight_offset` of rms_norm_gated.
        pending_: [B, Hv, N, Dk + Dv + 3], with a decay for each row [B, Hv, N, 2 Dk + Dv + 2], float32, N at
            most 8, or None; written in place as the state is.
        counts: [B, 1], int32: how many tokens of each row in `pending_` are right; given with it.
        keep: the call's tokens, at most N, are pending.

    Returns: [B, T, Hv, Dv] in the dtype of `v`.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.

    Example:
        >>> q = k = torch.ones(1, 3, 1, 1)  # the delta rule without decay: the last value replaces the others
        >>> v, g = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1), torch.zeros(1, 3, 1)
        >>> state = torch.zeros(1, 1, 1, 1)
        >>> ops.linear_attention_(q, k, v, g, state, scale=1.0, beta=torch.ones(1, 3, 1)).flatten().tolist()
        [1.0, 2.0, 3.0]
        >>> state.item()
        3.0
    """
    heads = v.shape[2]
    (q, q_scale), (k, k_scale) = (_key_rows(x, heads, l2norm_eps) for x in (q, k))
    strength = beta.float()
    if beta_activation == "softplus":
        shifted = strength if dt_bias is None else strength + dt_bias.float()
        strength = torch.nn.functional.softplus(shifted)
    elif beta_activation == "sigmoid":
        strength = torch.sigmoid(strength)
    if beta_min is not None:
        strength = strength.clamp(min=beta_min)
    factor = _log_decay(g, strength, A_log, dt_bias, lower_bound).exp()
    factor, strength = factor.expand(*v.shape[:3], factor.shape[-1]), strength.unsqueeze(-1)
    state, delta = state_.clone(), decay_form != "times_beta"
    if pending_ is not None and counts is not None:
        state = _advanced(state, pending_, counts, delta)
        if keep:
            state_.copy_(state)
            every = torch.cat((k, v.float(), k_scale, strength, factor), -1)
            pending_[:, :, : v.shape[1]] = every.transpose(1, 2)
    q, k = q * q_scale, k * k_scale
    out = v.new_empty(v.shape)
    for t in range(v.shape[1]):  # each needs the state that the one before leaves
        token = _Token(k[:, t], v[:, t].float(), strength[:, t], factor[:, t])
        state = token.taken_in(state, delta)
        result = (state * q[:, t].unsqueeze(-1)).sum(-2) * scale
        out[:, t] = result if skip is None else result + skip.float().unsqueeze(-1) * token.value
    if not keep:
        state_.copy_(state)
    if gate is None or norm_weight is None:
        return out
    return rms_norm_gated(out, gate, norm_weight, norm_eps, norm_weight_offset, gate_activation)


# Mamba-1


def selective_pending_shape(channels: int, states: int) -> tuple[int, int]:
    """Groups of channels, and elements of a token for each: x and steps of its channels, and B."""
    return -(-channels // SCANNED_CHANNELS), 2 * SCANNED_CHANNELS + states


def _check_selective_scan(check, pending_, keep, **_):
    if pending_ is not None:
        groups, width = selective_pending_shape(*check.dims("I N"))
        if (pending_.shape[1], pending_.shape[3]) != (groups, width):
            expected = f"of {groups} groups of channels with {width} elements for a token"
            check.fail("pending_", expected, f"{pending_.shape[1]} with {pending_.shape[3]}")
    _check_keep(check, pending_, keep)


def _of_channels(pending: Tensor, first: int, channels: int) -> Tensor:
    """[B, P, I]: elements of each token, one a channel, from this one of its group on."""
    part = pending[..., first : first + SCANNED_CHANNELS]
    return part.transpose(1, 2).flatten(2)[..., :channels]


def _keep_scanned(pending_: Tensor, x: Tensor, octaves: Tensor, b: Tensor) -> None:
    kept = pending_[:, :, : x.shape[1]]
    for first, values in ((0, x), (SCANNED_CHANNELS, octaves)):
        for group in range(kept.shape[1]):
            part = values[..., group * SCANNED_CHANNELS :][..., :SCANNED_CHANNELS]
            kept[:, group, :, first : first + part.shape[-1]] = part
    kept[..., 2 * SCANNED_CHANNELS :] = b.unsqueeze(1)


@operator(
    f"x[B, T, I] step[B, T, I]:x B[B, T, N<={MAX_STATES}]:x C[B, T, N]:x state_[B, I, N]:float32 A_log[I, N] "
    f"dt_bias[I] skip[I] gate[B, T, I]:x pending_[B, _, P<={MAX_PENDING}, _]:float32 counts[B, 1]:int32 -> x",
    _check_selective_scan,
    dependences=(_PENDING,),
)
def selective_scan_(
    x: Tensor,
    step: Tensor,
    B: Tensor,
    C: Tensor,
    state_: Tensor,
    A_log: Tensor,
    *,
    dt_bias: Tensor | None = None,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    pending_: Tensor | None = None,
    counts: Tensor | None = None,
    keep: bool = False,
) -> Tensor:
    """Mamba-1's selective scan, token by token. For each channel, with its N states:

        s = softplus(step + dt_bias)
        state_ = exp(-exp(A_log) * s) * state_ + s * x * B
        result = (C . state_ + skip * x) * silu(gate)

    Everything is computed in float32 and rounded once. The state has the same bits wherever a prompt is cut
    into calls. Source: Mamba, arXiv 2312.00752, algorithm 2.

    With `pending_`, state_ first takes in the first `counts` tokens whose inputs are kept there. With `keep`,
    the inputs of this call's tokens replace them and their update is deferred: the next call passes how many
    of them were accepted. A call without tokens applies the deferred updates.

    Args:
        x: [B, T, I], float32, float16 or bfloat16; strides are free here and below.
        step: [B, T, I] in the dtype of `x`: the time step before its activation.
        B, C: [B, T, N] in the dtype of `x`, shared by all channels; N is at most 16.
        state_: [B, I, N], float32; updated in place, whatever its strides. It must not overlap itself (as an
            expanded tensor does) nor the other arguments.
        A_log: [I, N], any of the three dtypes.
        dt_bias, skip: [I], any of the three dtypes, or None.
        gate: [B, T, I] in the dtype of `x`, or None.
        pending_: [B, G, P, 256 + N], float32, P at most 8, or None; written in place as the state is. Each of
            the G groups of 128 channels has of a token their x, their s / ln(2), and B.
        counts: [B, 1], int32: how many tokens of each row in `pending_` are right; given with it.
        keep: the call's tokens, at most P, are pending.

    Returns: [B, T, I] in the dtype of `x`.

    Raises: ValueError for a dtype, shape or device that does not fit.

    Example:
        >>> x, ones = torch.tensor([1.0, 2.0]).view(1, 2, 1), torch.ones(1, 2, 1)
        >>> step, A_log, state = 32 * ones, torch.full((1, 1), -100.0), torch.zeros(1, 1, 1)  # no decay
        >>> ops.selective_scan_(x, step, ones, ones, state, A_log).flatten().tolist()
        [32.0, 96.0]
        >>> state.item()
        96.0
    """
    rate = -A_log.float().exp()

    def taken_in(state: Tensor, x: Tensor, octaves: Tensor, b: Tensor) -> Tensor:
        strength = octaves * math.log(2.0)
        written = (strength * x).unsqueeze(-1) * b
        return state * (rate * strength.unsqueeze(-1)).exp() + written

    results, octaves = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    for token in range(x.shape[1]):  # each alone, so that its bits are the same in calls of any length
        shifted = step[:, token].float() if dt_bias is None else step[:, token].float() + dt_bias.float()
        octaves[:, token] = torch.nn.functional.softplus(shifted) / math.log(2.0)
    state = state_.clone()
    if pending_ is not None and counts is not None:
        held = (_of_channels(pending_, first, x.shape[2]) for first in (0, SCANNED_CHANNELS))
        b = pending_[..., 2 * SCANNED_CHANNELS :].repeat_interleave(SCANNED_CHANNELS, 1)
        every = (*held, b[:, : x.shape[2]].transpose(1, 2))
        for number, inputs in enumerate(zip(*(part.unbind(1) for part in every), strict=True)):
            state = torch.where((counts > number).unsqueeze(-1), taken_in(state, *inputs), state)
        if keep:
            state_.copy_(state)
            _keep_scanned(pending_, x, octaves, B)
    for token in range(x.shape[1]):  # each needs the state that the one before leaves
        state = taken_in(state, x[:, token].float(), octaves[:, token], B[:, token, None].float())
        results[:, token] = (state * C[:, token].float().unsqueeze(1)).sum(-1)
    if not keep:
        state_.copy_(state)
    if skip is not None:
        results += skip.float() * x.float()
    if gate is not None:
        results *= torch.nn.functional.silu(gate.float())
    return results.to(x.dtype)


def _counts(s: Sample) -> dict[str, Any]:
    return {"counts": torch.tensor([[3], [0]], dtype=torch.int32, device=s.device)}


def _pending(s: Sample, is_wide: bool = False) -> dict[str, Any]:
    width = pending_width(s.D, s.V, is_wide)
    return {"pending_": 0.25 * s.values(2, 4, MAX_PENDING, width, dtype=torch.float32)} | _counts(s)


def _scanned(s: Sample) -> dict[str, Any]:
    groups, width = selective_pending_shape(6, 5)
    return {"pending_": 0.25 * s.values(2, groups, MAX_PENDING, width, dtype=torch.float32)} | _counts(s)


CALLS: Calls = {
    "causal_conv1d_update_": lambda s: s.of("x[2, T, 6] conv_state_[2, 6, 5] weight[6, 4] bias[6]"),
    "linear_attention_": lambda s: s.of(
        "q[2, T, 2, D] v[2, T, 4, V] g[2, T, 4] beta[2, T, 4] A_log[4] dt_bias[4]",
        **{"scale": 0.25, "l2norm_eps": 1e-6, "decay_form": "softplus", "beta_activation": "sigmoid"},
    ),
    "selective_scan_": lambda s: s.of("x[2, T, 6] B[2, T, 5] dt_bias[6]"),
}
CHANGES: Changes = {
    "causal_conv1d_update_": lambda s: [
        {"x": s.values(2, 6, s.T).transpose(1, 2), "bias": None, "activation": "none"},
        {"conv_state_": s.values(2, 5, 6).transpose(1, 2), "add_input": True},
        *({"pending_": s.values(2, 6, MAX_PENDING), "keep": keep} | _counts(s) for keep in (False, True)),
        {"pending_": s.values(2, 6, MAX_PENDING)} | s.of("x[2, 0, 6]") | _counts(s),
    ],
    "selective_scan_": lambda s: [
        s.of("gate[2, T, 6] skip[6]", dt_bias=None),
        s.of("x[2, T, 70] B[2, T, 16]", step=s.values(2, 70, s.T).mT, dt_bias=None)
        | {"state_": s.values(2, 16, 70, dtype=torch.float32).mT},
        *(_scanned(s) | {"keep": keep} for keep in (False, True)),
        _scanned(s) | s.of("x[2, 0, 6]"),
    ],
    "linear_attention_": lambda s: [
        {"A_log": None, "dt_bias": None, "g": -s.values(2, s.T, 4).abs(), "beta_activation": "none"}
        | {"decay_form": "log", "state_": s.values(4, 2, s.D, s.V, dtype=torch.float32).transpose(0, 1)},
        s.of("gate[2, T, 4, V] norm_weight[V]", norm_weight_offset=1.0),
        s.of("g[2, T, 4, D] dt_bias[4, D] gate[2, T, 4, V] norm_weight[V]", decay_form="sigmoid")
        | {"lower_bound": -5.0, "gate_activation": "sigmoid"},
        s.of("skip[4]", g=None, decay_form="times_beta", beta_activation="softplus")
        | {"l2norm_eps": None, "scale": 1.0, "beta_min": 0.1},
        _pending(s) | {"keep": True},
        _pending(s) | s.of("gate[2, T, 4, V] norm_weight[V]"),
        _pending(s, is_wide=True) | s.of("g[2, T, 4, D] dt_bias[4, D]", keep=True),
        _pending(s)
        | s.of("skip[4]", g=None, decay_form="times_beta", beta_activation="softplus")
        | {"l2norm_eps": None, "keep": True},
        _pending(s) | s.of("q[2, 0, 2, D]"),
    ],
}
