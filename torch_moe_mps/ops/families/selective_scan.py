"""Mamba-1's selective scan, for prompts and for single tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from .._activations import softplus_anywhere
from .._checks import wide, wide_dtype
from .._pending import MAX_PENDING, PENDING, check_keep, counts
from .._registry import operator
from .._sample import Calls, Changes, Sample

MAX_STATES = 16  # for each channel
SCANNED_CHANNELS = 128  # in a group, whose uncommitted tokens lie together


def selective_pending_shape(channels: int, states: int) -> tuple[int, int]:
    """Groups of channels, and elements of a token for each: x and steps of its channels, and B."""
    return -(-channels // SCANNED_CHANNELS), 2 * SCANNED_CHANNELS + states


def _check_selective_scan(check, pending_, keep, **_):
    if pending_ is not None:
        groups, width = selective_pending_shape(*check.dims("I N"))
        if (pending_.shape[1], pending_.shape[3]) != (groups, width):
            expected = f"of {groups} groups of channels with {width} elements for a token"
            check.fail("pending_", expected, f"{pending_.shape[1]} with {pending_.shape[3]}")
    check_keep(check, pending_, keep)


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
    dependences=(PENDING,),
    public="Mamba-1's selective scan",
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
    rate = -wide(A_log).exp()

    def taken_in(state: Tensor, x: Tensor, octaves: Tensor, b: Tensor) -> Tensor:
        strength = octaves * math.log(2.0)
        written = (strength * x).unsqueeze(-1) * b
        return state * (rate * strength.unsqueeze(-1)).exp() + written

    shifted = wide(step) if dt_bias is None else wide(step) + wide(dt_bias)
    octaves = softplus_anywhere(shifted) / math.log(2.0)
    results = x.new_empty(x.shape, dtype=wide_dtype(x))
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
        state = taken_in(state, wide(x[:, token]), octaves[:, token], wide(B[:, token, None]))
        results[:, token] = (state * wide(C[:, token]).unsqueeze(1)).sum(-1)
    if not keep:
        state_.copy_(state)
    if skip is not None:
        results += wide(skip) * wide(x)
    if gate is not None:
        results *= torch.nn.functional.silu(wide(gate))
    return results.to(x.dtype)


def _scanned(s: Sample) -> dict[str, Any]:
    groups, width = selective_pending_shape(6, 5)
    return {"pending_": 0.25 * s.values(2, groups, MAX_PENDING, width, dtype=torch.float32)} | counts(s)


CALLS: Calls = {
    "selective_scan_": lambda s: s.of("x[2, T, 6] B[2, T, 5] dt_bias[6]"),
}
CHANGES: Changes = {
    "selective_scan_": lambda s: [
        s.of("gate[2, T, 6] skip[6]", dt_bias=None),
        s.of("x[2, T, 70] B[2, T, 16]", step=s.values(2, 70, s.T).mT, dt_bias=None)
        | {"state_": s.values(2, 16, 70, dtype=torch.float32).mT},
        *(_scanned(s) | {"keep": keep} for keep in (False, True)),
        _scanned(s) | s.of("x[2, 0, 6]"),
    ],
}
