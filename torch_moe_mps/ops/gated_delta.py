"""Linear attention by the gated delta rule: the convolution and the recurrence."""

import torch
from torch import Tensor

from ._checks import ACTIVATION_DTYPES, Check
from ._registry import operator
from .norms import rms_norm_gated

ACTIVATIONS = ("none", "silu")
MAX_KEY_WIDTH = 256


# The convolution


def _meta_conv(check, x, conv_state_, weight, bias, activation):
    check.choice("activation", activation, ACTIVATIONS)
    check.dtype("x", x, ACTIVATION_DTYPES)
    check.rank("x", x, (3,))
    batch, channels, _ = x.shape
    check.dtype("weight", weight, ACTIVATION_DTYPES)
    check.rank("weight", weight, (2,))
    check.shape("weight", weight, (channels, weight.shape[1]), "[C, W]")
    check.dtype("conv_state_", conv_state_, ACTIVATION_DTYPES)
    check.rank("conv_state_", conv_state_, (3,))
    length = conv_state_.shape[2]
    check.shape("conv_state_", conv_state_, (batch, channels, length), "[B, C, S]")
    if length < weight.shape[1] - 1:
        check.fail("conv_state_", f"of W - 1 = {weight.shape[1] - 1} positions or more", length)
    check.tensor("bias", bias, (channels,), "[C]")
    return x.new_empty(x.shape)


@operator(meta=_meta_conv)
def causal_conv1d_update_(
    x: Tensor, conv_state_: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """A causal convolution of each channel over new positions and those before them.

        all = conv_state_ followed by x
        result[t] = activation(sum_w weight[w] * all[S + t - W + 1 + w] + bias)
        conv_state_ = the last S positions of all

    Args:
        x: [B, C, T], float32, float16 or bfloat16; any strides, such as those of a transposed [B, T, C].
        conv_state_: [B, C, S], any of the three dtypes, S at least W - 1; updated in place, whatever its
            strides. It must not overlap itself (as an expanded tensor does) nor the other arguments.
        weight: [C, W], any of the three dtypes: of the oldest position first.
        bias: [C], any of the three dtypes, or None.
        activation: "silu" or "none".

    Returns: [B, C, T] in the dtype of `x`.

    Raises: ValueError for a dtype, shape, choice or device that does not fit.
    """
    every = torch.cat((conv_state_.float(), x.float()), -1)
    length, width, tokens = conv_state_.shape[2], weight.shape[1], x.shape[2]
    conv_state_.copy_(every[..., every.shape[-1] - length :])
    windows = every[..., length - width + 1 :].unfold(-1, width, 1) if width and tokens else None
    out = x.new_zeros(x.shape, dtype=torch.float32)
    if windows is not None:
        out = (windows * weight.float().unsqueeze(1)).sum(-1)
    if bias is not None:
        out = out + bias.float().unsqueeze(-1)
    return (torch.nn.functional.silu(out) if activation == "silu" else out).to(x.dtype)


# The recurrence


def _check_heads(check: Check, argument: str, x: Tensor, q: Tensor, shape: tuple, meaning: str) -> None:
    check.dtype(argument, x, (q.dtype,))
    check.rank(argument, x, (len(shape),))
    check.shape(argument, x, shape, meaning)


def _meta_delta(check, q, k, v, g, beta, state_, A_log, dt_bias, gate, norm_weight, **_):
    check.dtype("q", q, ACTIVATION_DTYPES)
    check.rank("q", q, (4,))
    batch, tokens, key_heads, key_width = q.shape
    _check_heads(check, "k", k, q, q.shape, "[B, T, Hk, Dk] of q")
    check.rank("v", v, (4,))
    heads, value_width = v.shape[2:]
    _check_heads(check, "v", v, q, (batch, tokens, heads, value_width), "[B, T, Hv, Dv]")
    if key_heads < 1 or heads % key_heads:
        check.fail("v", f"of a multiple of q's {key_heads} heads", f"{heads} heads")
    check.between("q", key_width, 1, MAX_KEY_WIDTH, " elements a head")
    for argument, tensor in (("g", g), ("beta", beta)):
        check.tensor(argument, tensor, (batch, tokens, heads), "[B, T, Hv]")
    check.tensor(
        "state_", state_, (batch, heads, key_width, value_width), "[B, Hv, Dk, Dv]", (torch.float32,)
    )
    if dt_bias is not None and A_log is None:
        check.fail("dt_bias", "None without A_log", f"shape {tuple(dt_bias.shape)}")
    for argument, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        check.tensor(argument, tensor, (heads,), "[Hv]")
    if (gate is None) != (norm_weight is None):
        check.fail("gate", "given with norm_weight, and only then", "one of the two")
    check.tensor("gate", gate, v.shape, "[B, T, Hv, Dv] of v", (v.dtype,))
    check.tensor("norm_weight", norm_weight, (value_width,), "[Dv]")
    return v.new_empty(v.shape)


def _decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    g = g.float()
    if A_log is not None:
        shifted = g if dt_bias is None else g + dt_bias.float()
        g = -A_log.float().exp() * torch.nn.functional.softplus(shifted)
    return g.exp()


def _key_rows(x: Tensor, heads: int, l2norm_eps: float | None) -> Tensor:
    """q or k for each head of v, normed, in float32."""
    x = x.float()
    if l2norm_eps is not None:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + l2norm_eps)
    return x.repeat_interleave(heads // x.shape[2], 2)


@operator(meta=_meta_delta)
def gated_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_: Tensor,
    scale: float,
    *,
    l2norm_eps: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_is_logit: bool = False,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> Tensor:
    """Linear attention by the gated delta rule (Qwen3-Next), token after token.

    For each head of v, with the head of q and k that it shares with its neighbours:

        state_ = state_ * exp(g)
        state_ = state_ + k^T ((v - k state_) * beta)
        result = q state_ * scale

    and with `gate`, for each head: rms(result) * (norm_weight + norm_offset) * silu(gate).

    Everything is computed in float32; the norm sees the result rounded to the dtype of `v`.

    Args:
        q, k: [B, T, Hk, Dk], float32, float16 or bfloat16; Dk is at most 256.
        v: [B, T, Hv, Dv] in the dtype of `q`, Hv a multiple of Hk: value head h reads key head h * Hk / Hv.
        g: [B, T, Hv], any of the three dtypes: the logarithm of the decay. With `A_log` it is
            -exp(A_log) * softplus(g + dt_bias).
        beta: [B, T, Hv], any of the three dtypes: how much of the value is written.
        state_: [B, Hv, Dk, Dv], float32; updated in place, whatever its strides. It must not overlap itself
            (as an expanded tensor does) nor the other arguments.
        scale: factor of the result, 1 / sqrt(Dk) in the known models.
        l2norm_eps: each head x of q and k becomes x * rsqrt(sum(x^2) + l2norm_eps); None leaves it as it is.
        A_log, dt_bias: [Hv], any of the three dtypes, or None.
        beta_is_logit: use sigmoid(beta) instead of beta.
        gate: [B, T, Hv, Dv] in the dtype of `v`, or None; given with `norm_weight`, and only then.
        norm_weight: [Dv], any of the three dtypes, or None.
        norm_eps, norm_offset: of the norm, `eps` and `weight_offset` of rms_norm_gated.

    Returns: [B, T, Hv, Dv] in the dtype of `v`.

    Raises: ValueError for a dtype, shape or device that does not fit.
    """
    heads = v.shape[2]
    q, k = (_key_rows(x, heads, l2norm_eps) for x in (q, k))
    decay = _decay(g, A_log, dt_bias)
    beta = torch.sigmoid(beta.float()) if beta_is_logit else beta.float()
    state = state_.clone()
    out = v.new_empty(v.shape)
    for token in range(v.shape[1]):  # each needs the state that the one before leaves
        state = state * decay[:, token, :, None, None]
        key = k[:, token].unsqueeze(-1)
        delta = (v[:, token].float() - (state * key).sum(-2)) * beta[:, token].unsqueeze(-1)
        state = state + key * delta.unsqueeze(-2)
        out[:, token] = (state * q[:, token].unsqueeze(-1)).sum(-2) * scale
    state_.copy_(state)
    if gate is None or norm_weight is None:
        return out
    return rms_norm_gated(out, gate, norm_weight, norm_eps, norm_offset)
