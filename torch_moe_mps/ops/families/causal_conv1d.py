"""Causal depthwise convolution with a state, for prompts and for single tokens."""

import torch
from torch import Tensor

from .._checks import wide
from .._pending import MAX_PENDING, PENDING, check_keep, counts
from .._registry import operator
from .._sample import Calls, Changes

ACTIVATIONS = ("none", "silu")


def _check_conv(check, conv_state_, weight, pending_, keep, **_):
    least, length = weight.shape[1] - 1, conv_state_.shape[2]
    if length < least:
        check.fail("conv_state_", f"of W - 1 = {least} positions or more", length)
    check_keep(check, pending_, keep)


def _behind_pending(conv_state: Tensor, pending: Tensor, counts: Tensor) -> Tensor:
    """The state, in float32 or float64, with the first `counts` tokens of each row taken in."""
    whole, length = torch.cat((wide(conv_state), wide(pending)), -1), conv_state.shape[2]
    places = counts.clamp(0, pending.shape[2]).long().view(-1, 1, 1) + torch.arange(
        length, device=whole.device
    )
    return whole.gather(-1, places.expand(*conv_state.shape))


@operator(
    f"x[B, T, C] weight[C, W] conv_state_[B, C, S] bias[C] pending_[B, C, N<={MAX_PENDING}]:x "
    "counts[B, 1]:int32 -> x",
    _check_conv,
    allowed={"activation": ACTIVATIONS},
    dependences=(PENDING,),
    public="the convolution in front of linear attention and Mamba",
)
def causal_conv1d_update_(
    x: Tensor,
    conv_state_: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
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
    held = wide(conv_state_)
    if pending_ is not None and counts is not None:
        held = _behind_pending(conv_state_, pending_, counts)
    every = torch.cat((held, wide(x).mT), -1)
    conv_state_.copy_(held if keep else every[..., every.shape[-1] - length :])
    if pending_ is not None and keep:
        pending_[..., :tokens] = x.mT
    windows = every[..., length - width + 1 :].unfold(-1, width, 1) if width and tokens else None
    out = x.new_zeros((x.shape[0], x.shape[2], tokens), dtype=every.dtype)
    if windows is not None:
        out = (windows * wide(weight).unsqueeze(1)).sum(-1)
    if bias is not None:
        out = out + wide(bias).unsqueeze(-1)
    out = (torch.nn.functional.silu(out) if activation == "silu" else out).mT
    return (out + wide(x) if add_input else out).to(x.dtype)


CALLS: Calls = {
    "causal_conv1d_update_": lambda s: s.of("x[2, T, 6] conv_state_[2, 6, 5] weight[6, 4] bias[6]"),
}
CHANGES: Changes = {
    "causal_conv1d_update_": lambda s: [
        {"x": s.values(2, 6, s.T).transpose(1, 2), "bias": None, "activation": "none"},
        {"conv_state_": s.values(2, 5, 6).transpose(1, 2), "add_input": True},
        *({"pending_": s.values(2, 6, MAX_PENDING), "keep": keep} | counts(s) for keep in (False, True)),
        {"pending_": s.values(2, 6, MAX_PENDING)} | s.of("x[2, 0, 6]") | counts(s),
    ],
}
