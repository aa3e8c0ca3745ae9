"""Hyper-connections: a residual of several streams, mixed by weights that depend on the streams."""

import torch
from torch import Tensor

from .._checks import wide, wide_dtype, widened
from .._registry import operator
from .._sample import Calls, Changes

MAX_STREAMS = 4
MAX_ITERATIONS = 1024


UPDATE = (
    f"streams[..., N<={MAX_STREAMS}, H] block_out[..., H]:streams post[..., N]:float32 "
    "comb[..., N, N]:float32"
)


def _check_update(check, streams, **_):
    width = streams.shape[-1]
    if width % 4 != 0 or width == 0:
        check.fail("streams", "of rows of a multiple of 4 elements", width)


@operator(f"{UPDATE} -> streams", _check_update)
def _hyper_update(streams: Tensor, block_out: Tensor, post: Tensor, comb: Tensor | None = None) -> Tensor:
    """Streams of a hyper-connection after a block: its output plus a mixture of the streams.

        result[n] = post[n] * block_out + sum_m comb[m, n] * streams[m]

    Arithmetic is in float32 and rounds once.

    Args:
        streams: [..., N, H], float32, float16 or bfloat16, N up to 4, H a multiple of 4.
        block_out: [..., H] in the dtype of `streams`: what the block gives.
        post: [..., N], float32.
        comb: [..., N, N], float32, or None: the identity.

    Returns: [..., N, H] in the dtype of `streams`.

    Raises: ValueError for a dtype, shape or device that does not fit.
    """
    rows = wide(streams)
    if comb is not None:
        rows, comb = widened(rows, comb)
        rows = comb.mT @ rows
    return (post.unsqueeze(-1) * wide(block_out).unsqueeze(-2) + rows).to(streams.dtype)


def _meta_hyper_connection(check, streams, fn, fn_scale, block_out, **_):
    """Empty outputs: the mixed stream, weights of the update, mixing weights, updated streams."""
    _check_update(check, streams)
    *leading, count, width = streams.shape
    rows = (count, 2 * count, 2 * count + count * count)
    if fn.shape[0] not in rows:
        check.fail("fn", "of N, 2 N or (2 + N) N = {}, {} or {} rows".format(*rows), fn.shape[0])
    parts = rows.index(fn.shape[0]) + 1
    check.shape("fn_scale", fn_scale, (parts,), "[1 to 3, as many as parts of fn]")
    return (
        streams.new_empty((*leading, width)),
        streams.new_empty((*leading, count) if parts > 1 else (0,), dtype=wide_dtype(streams)),
        streams.new_empty((*leading, count, count) if parts > 2 else (0,), dtype=wide_dtype(streams)),
        streams.new_empty((0,) if block_out is None else streams.shape),
    )


@operator(
    f"{UPDATE} fn[R, N*H] base[R] fn_scale[_]",
    _meta_hyper_connection,
    allowed={"iterations": range(1, MAX_ITERATIONS + 1)},
    dependences=("post only with block_out", "comb not without block_out"),
)
def _hyper_connection(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    fn_scale: Tensor,
    *,
    block_out: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    norm_eps: float = 1e-6,
    mix_eps: float = 1e-6,
    iterations: int = 20,
    post_factor: float = 2.0,
    post_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A block's input, mixed from the streams of a hyper-connection, and their update (mHC of DeepSeek-V4).

        streams = _hyper_update(streams, block_out, post, comb)          where `block_out` is given
        m = fn flat(streams) * rsqrt(mean(flat(streams)^2) + norm_eps)  in parts of N, N and N * N rows
        pre = sigmoid(m_0 * fn_scale_0 + base_0) + mix_eps
        post' = post_factor * sigmoid(m_1 * fn_scale_1 + base_1) + post_eps
        C = softmax of rows(m_2 * fn_scale_2 + base_2) + mix_eps, then C = C / (sums of columns + mix_eps)
        comb' = C after (iterations - 1) times:
            C = C / (sums of rows + mix_eps); C = C / (sums of columns + mix_eps)
        x = sum_n pre[n] * streams[n]

    Arithmetic is in float32. `fn` decides how many parts there are: one for the head behind the last layer,
    two where streams do not mix.

    Args:
        streams: [..., N, H], float32, float16 or bfloat16, N up to 4, H a multiple of 4.
        fn: [R, N * H] with R of N, 2 * N or (2 + N) * N, any of the three dtypes.
        base: [R], any of the three dtypes.
        fn_scale: [1], [2] or [3], any of the three dtypes.
        block_out: [..., H] in the dtype of `streams`: what the block before this one gives, or None.
        post, comb: as _hyper_update takes them; `post` is given with `block_out`, and only then.
        norm_eps: of the mean of squares.
        mix_eps: added to the weights and to the sums that divide them, see above.
        iterations: how often columns are normed, 1 to 1024.
        post_factor, post_eps: of post'.

    Returns:
        x: [..., H] in the dtype of `streams`.
        post': [..., N], float32, empty where `fn` has no such part.
        comb': [..., N, N], float32, empty where `fn` has no such part.
        streams: [..., N, H] in the dtype of `streams`, empty without `block_out`.

    Raises: ValueError for a dtype, shape, number or device that does not fit.
    """
    updated = streams.new_empty(0)
    if block_out is not None and post is not None:
        streams = updated = _hyper_update(streams, block_out, post, comb)
    *leading, count, _ = streams.shape
    flat, fn = widened(streams.flatten(-2), fn)
    mixed = flat @ fn.mT * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    parts = [count, count, count * count][: fn_scale.numel()]
    of_parts = zip(mixed.split(parts, -1), wide(fn_scale).unbind(), wide(base).split(parts), strict=True)
    logits = [part * factor + shift for part, factor, shift in of_parts]
    pre = torch.sigmoid(logits[0]) + mix_eps
    x = (pre.unsqueeze(-1) * wide(streams)).sum(-2).to(streams.dtype)
    ahead, mixture = flat.new_empty(0), flat.new_empty(0)
    if len(parts) > 1:
        ahead = post_factor * torch.sigmoid(logits[1]) + post_eps
    if len(parts) > 2:
        mixture = logits[2].view(*leading, count, count).softmax(-1) + mix_eps
        mixture = mixture / (mixture.sum(-2, keepdim=True) + mix_eps)
        for _ in range(iterations - 1):
            mixture = mixture / (mixture.sum(-1, keepdim=True) + mix_eps)
            mixture = mixture / (mixture.sum(-2, keepdim=True) + mix_eps)
    return x, ahead, mixture, updated


CALLS: Calls = {
    "_hyper_update": lambda s: {"streams": s.values(s.T, 2, s.H)},
    "_hyper_connection": lambda s: {
        **s.of("streams[T, 4, H] base[24]:float32 fn_scale[3]:float32 block_out[T, H] post[T, 4]:float32"),
        "fn": s.values(24, 4 * s.H, dtype=torch.float32) / 16,
        "comb": s.values(s.T, 4, 4, dtype=torch.float32).softmax(-1),
    },
}
CHANGES: Changes = {
    "_hyper_update": lambda s: [{"comb": None, "block_out": s.strided}],
    "_hyper_connection": lambda s: [
        {"block_out": None, "post": None, "comb": None, "iterations": 3},
        {"fn": s.values(8, 4 * s.H) / 16, "fn_scale": s.values(2), "comb": None}
        | {"post_eps": 1e-3, "post_factor": 0.5},
        {"fn": s.values(4, 4 * s.H) / 16, "fn_scale": s.values(1)},
    ],
}
