"""Keys that stand for windows of tokens: sums of what these have, weighted by gates."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import wide, wide_dtype
from .._registry import operator
from .._sample import Calls, Changes
from .attention import MAX_POSITION
from .norms import normed

MAX_POOLED_WIDTH = 512  # elements of an entry


def _check_pool_window(check, entries_, state_, position, inv_freq, **_):
    batch, tokens, width, rate, of_entry = check.dims("B T W R D")
    if of_entry % 2 or width not in (of_entry, 2 * of_entry):
        expected = f"of an even last dimension D, with W = D or 2 D, here {width}"
        check.fail("entries_", expected, tuple(entries_.shape))
    rows = rate * width // of_entry
    check.shape("state_", state_, (batch, rows, 2, width), "[B, R W / D, 2, W]")
    check.between("position", position, 0, MAX_POSITION - tokens)
    closed = (position + tokens) // rate
    if entries_.shape[1] < closed:
        expected = f"of shape [B, N, D], with B = {batch} and N at least {closed}"
        check.fail("entries_", expected, tuple(entries_.shape))
    check.between("inv_freq's length", inv_freq.shape[0], 0, of_entry // 2)


@operator(
    f"kv[B, T, W] gate[B, T, W]:kv position_bias[R>=1, W] state_[B, _, 2, W]:kv "
    f"entries_[B, N, D<={MAX_POOLED_WIDTH}]:kv norm_weight[D] inv_freq[_]",
    _check_pool_window,
)
def _pool_window_(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    state_: Tensor,
    entries_: Tensor,
    position: int,
    norm_weight: Tensor,
    inv_freq: Tensor,
    rotary_scale: float = 1.0,
    norm_eps: float = 1e-6,
) -> None:
    """An entry for each window of tokens that new tokens complete, into a cache of entries (DeepSeek-V4).

    Window w has the tokens w * rate to (w + 1) * rate - 1, and for each channel c of an entry

    weight[j, c] = softmax_j(gate[j, c] + position_bias[j, c]), over the tokens j of the window
    entry[w, c] = sum_j weight[j, c] * kv[j, c], then rms(entry) * norm_weight
    (a, b) -> (a * cos - b * sin, b * cos + a * sin), for each neighbouring pair of the last channels, with
    cos, sin = rotary_scale * cos and sin of w * rate * inv_freq

    With W = 2 D windows overlap: the sum goes over the tokens of window w - 1, if there is one, with the
    first D columns of `kv`, `gate` and `position_bias`, and over window w's tokens with the last D.
    Arithmetic is in float32, rounded once. However tokens are split into calls, entries have the same bits.

    Args:
        kv, gate: [B, T, W], float32, float16 or bfloat16: of the new tokens; any strides.
        position_bias: [rate, W], any of the three dtypes.
        state_: [B, rate * W / D, 2, W] in the dtype of `kv`: kv and gate of token p at p % (rate * W / D);
            the values needed later are updated in place. Before the first token it may hold anything.
        entries_: [B, N, D] in the dtype of `kv`, D even and up to 512: entry w at w. The new ones are
            written in place, whatever the strides.
        position: the number of tokens before the new ones.
        norm_weight: [D], any of the three dtypes.
        inv_freq: [R / 2], any of the three dtypes: radians a token of the pairs that turn.
        rotary_scale: factor of cos and sin.
        norm_eps: added to the mean of squares.

    Raises: ValueError for a dtype, shape, number or device that does not fit.
    """
    tokens, width = kv.shape[1:]
    rate, of_entry, rows = position_bias.shape[0], entries_.shape[2], state_.shape[1]
    first, closed = position // rate, (position + tokens) // rate
    new = torch.stack((kv, gate), 2)
    if closed > first:
        begin = max(first - (width > of_entry), 0) * rate
        every = torch.cat((state_[:, torch.arange(begin, position) % rows], new), 1)
        windows = every[:, : closed * rate - begin].unflatten(1, (-1, rate))
        values, logits = wide(windows[..., 0, :]), wide(windows[..., 1, :]) + wide(position_bias)
        if width > of_entry:
            values, logits = (
                _overlapped(F.pad(x, (0, 0, 0, 0, 1, 0), value=nothing) if first == 0 else x)
                for x, nothing in ((values, 0.0), (logits, -torch.inf))
            )
        entries = normed((values * logits.softmax(2)).sum(2), norm_weight, norm_eps, 0.0)
        entries_[:, first:closed] = _rotated(entries, first, rate, inv_freq, rotary_scale).to(entries_.dtype)
    kept = min(tokens, rows)
    places = torch.arange(position + tokens - kept, position + tokens) % rows
    state_[:, places] = new[:, tokens - kept :]


def _overlapped(x: Tensor) -> Tensor:
    """[B, n, 2 rate, D] of n + 1 windows: the first columns of one and the last of the next."""
    before, own = x.chunk(2, -1)
    return torch.cat((before[:, :-1], own[:, 1:]), 2)


def _rotated(entries: Tensor, first: int, rate: int, inv_freq: Tensor, rotary_scale: float) -> Tensor:
    """The entries from number `first` on, with their last columns rotated."""
    numbers = torch.arange(first, first + entries.shape[1], device=entries.device)
    angles = (numbers * rate)[:, None].to(wide_dtype(inv_freq)) * wide(inv_freq)
    cos, sin = angles.cos() * rotary_scale, angles.sin() * rotary_scale
    still, turning = entries.split([entries.shape[2] - 2 * len(inv_freq), 2 * len(inv_freq)], -1)
    a, b = turning[..., 0::2], turning[..., 1::2]
    return torch.cat((still, torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)), -1)


CALLS: Calls = {
    "_pool_window_": lambda s: s.of(
        f"kv[2, T, 16] position_bias[2, 16] state_[2, 4, 2, 16] entries_[2, {s.T // 2 + 4}, 8] "
        "inv_freq[2]:float32",
        position=3,
    ),
}
CHANGES: Changes = {}
