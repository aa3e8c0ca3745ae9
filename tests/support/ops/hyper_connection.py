"""Operators of the family hyper_connection: valid arguments, results in float64, and invalid arguments."""

import numpy as np
import torch
from torch import Tensor

from support import oracles
from support.ops import wrong
from support.oracles import FLOAT32_EPS, exact
from support.oracles_operators import EMPTY, Expected
from torch_moe_mps.ops._sample import H, T


def of_streams(d) -> Tensor:
    """The streams of a hyper-connection."""
    return d.values(*d.leading(), d.one(4, 1, 2, 3), d.one(64, 4, 132, 1028))


def draw__hyper_update(d):
    return {"streams": of_streams(d)}


def draw__hyper_connection(d):
    streams, parts, f32 = of_streams(d), d.one(3, 1, 2), torch.float32
    *leading, count, width = streams.shape
    rows = (count, 2 * count, 2 * count + count * count)[parts - 1]
    update = {
        "block_out": d.values(*leading, width, dtype=streams.dtype),
        "post": d.values(*leading, count, dtype=f32).abs(),
        "comb": d.maybe(lambda: d.values(*leading, count, count, dtype=f32).softmax(-1)),
    }
    return {
        "streams": streams,
        "fn": d.values(rows, count * width, scale=(count * width) ** -0.5),
        "fn_scale": d.values(parts),
        **(update if d.flag() else dict.fromkeys(update)),
        "iterations": d.one(20, 1, 2),
        "post_factor": d.one(2.0, 1.0),
        "post_eps": d.one(0.0, 0.25),
    }


def expected__hyper_update(a):
    out, post, streams = (exact(t) for t in (a.block_out, a.post, a.streams))
    mixed, size = streams, abs(streams)
    if a.comb is not None:
        comb = np.swapaxes(exact(a.comb), -1, -2)
        mixed, size = comb @ streams, abs(comb) @ size
    added = post[..., None] * out[..., None, :]
    return [Expected(added + mixed, 4 * FLOAT32_EPS * (abs(added) + size))]


def expected__hyper_connection(a):
    streams, updated, shift = exact(a.streams), EMPTY, 0.0
    if a.block_out is not None:
        (updated,) = expected__hyper_update(a)
        streams = oracles.round_to(updated.value, a.streams.dtype)
        shift = updated.error + oracles.spacing(streams, a.streams.dtype)  # it may be rounded the other way
    *leading, count, width = streams.shape
    flat, shifts = (
        np.broadcast_to(x, streams.shape).reshape(*leading, count * width) for x in (streams, shift)
    )
    scale = np.repeat(exact(a.fn_scale), [count, count, count * count][: a.fn_scale.numel()])
    inverse = 1 / np.sqrt(np.mean(flat * flat, -1, keepdims=True) + a.norm_eps)
    fn, sizes = exact(a.fn).T, abs(exact(a.fn)).T
    logits = flat @ fn * inverse * scale + exact(a.base)
    error = (8 * FLOAT32_EPS * (abs(flat) @ sizes) + 2 * shifts @ sizes) * inverse * abs(scale)
    error = error + 8 * FLOAT32_EPS * (1 + abs(logits))
    pre = oracles.sigmoid(logits[..., :count]) + a.mix_eps
    x = np.einsum("...n,...nh->...h", pre, streams)
    slack = (error[..., :count, None] + 8 * FLOAT32_EPS) * abs(streams) + pre[..., None] * shift
    post, comb = EMPTY, EMPTY
    if scale.size > count:
        post = a.post_factor * oracles.sigmoid(logits[..., count : 2 * count]) + a.post_eps
        post = Expected(post, abs(a.post_factor) * (error[..., count : 2 * count] + 8 * FLOAT32_EPS))
    if scale.size > 2 * count:
        c = oracles.softmax(logits[..., 2 * count :].reshape(*leading, count, count)) + a.mix_eps
        for axis in (-2, *(-1, -2) * (a.iterations - 1)):
            c = c / (c.sum(axis, keepdims=True) + a.mix_eps)
        highest = error[..., 2 * count :].max(-1, initial=0.0)[..., None, None]
        comb = Expected(c, 4 * highest + 4 * a.iterations * FLOAT32_EPS)
    return [Expected(x, slack.sum(-2)), post, comb, updated]


def invalid__hyper_update(zeros):
    return [
        wrong(
            "of rows of a multiple of 4 elements, got 62",
            streams=zeros(T, 2, H - 2),
            block_out=zeros(T, H - 2),
        )
    ]


def invalid__hyper_connection(zeros):
    return [
        wrong(
            "fn must be of N, 2 N or (2 + N) N = 4, 8 or 24 rows, got 5",
            fn=zeros(5, 4 * H),
            base=zeros(5),
        ),
    ]
