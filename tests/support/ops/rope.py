"""Operators of the family rope: valid arguments, results in float64, and invalid arguments."""

import numpy as np
import torch

from support import oracles_sequence
from support.ops import wrong
from support.ops.norms import normed
from support.oracles import FLOAT32_EPS, exact
from support.oracles_operators import EMPTY, Expected
from torch_moe_mps.ops._sample import T


def draw_rope(d):
    batch, tokens, dtype, number = d.one(1, 2, 0), d.one(1, 3, 9, 0), d.dtype(), d.dtype()
    rotary = d.one(16, 2, 6, 64)
    widths = [rotary + d.one(0, 0, 2, 16) for _ in range(2)]
    halved = d.flag()
    table = (d.one(1, batch), tokens, rotary // 2 if halved else rotary)
    return {
        "q": d.values(batch, tokens, d.one(1, 4), widths[0], dtype=dtype),
        "k": d.values(batch, tokens, d.one(1, 2), widths[1], dtype=dtype),
        **{name: d.values(*table, dtype=number) for name in ("cos", "sin")},
        "rotary_dim": rotary if halved else d.one(None, rotary),
    }


def draw_rope_heads(d):
    call = draw_rope(d)
    return {"x": call["q"], **{name: call[name] for name in ("cos", "sin", "rotary_dim")}}


def draw__rope_cache_(d):
    arguments = draw_rope(d)
    q, k = arguments["q"], arguments["k"]
    v = d.values(*q.shape[:2], d.one(1, 2), d.one(16, 2, 6, 64), dtype=q.dtype)
    before, norm = d.one(0, 1, 5), d.flag()
    held = {
        name: d.values(x.shape[0], x.shape[2], before + x.shape[1], x.shape[3], dtype=q.dtype)
        for name, x in (("keys_", k), ("values_", v))
    }
    arguments |= {"v": v, **held, "norm_v": norm, "k_bias": None}
    arguments["v_norm_weight"] = d.maybe(lambda: d.values(v.shape[3])) if norm else None
    arguments["v_norm_factor"] = d.one(1.0, -1.5) if norm else 1.0
    arguments |= {} if d.flag() else {"cos": None, "sin": None}
    if d.flag():
        arguments |= {"v": None, "values_": None, "norm_v": False, "v_norm_weight": None}
        arguments["v_norm_factor"] = 1.0
        if d.flag():
            arguments |= {"q": None, "q_norm_weight": None}
        if d.flag():
            number = d.dtype()
            norms = {name: d.values(k.shape[3], dtype=number) for name in ("k_norm_weight", "k_bias")}
            arguments |= {"q_norm_weight": None, **norms, "norm_weight_offset": 0.0}
    return arguments


def turned(a, *heads) -> list[Expected]:
    """Each tensor with its norm's weight, or None, turned."""
    rotary = a.cos.shape[-1] if a.rotary_dim is None and a.cos is not None else a.rotary_dim
    rest = (a.pairs, rotary, a.rotary_last, a.norm_eps, a.norm_weight_offset)
    results = []
    for x, weight in heads:
        if x is None:
            results.append(EMPTY)
            continue
        value, magnitude = oracles_sequence.rotated(x, a.cos, a.sin, weight, *rest)
        results.append(Expected(value, 16 * FLOAT32_EPS * magnitude))
    return results


def expected_rope(a):
    return turned(a, (a.q, a.q_norm_weight), (a.k, a.k_norm_weight))


def expected_rope_heads(a):
    return turned(a, (a.x, a.norm_weight))


def expected__rope_cache_(a):
    q, k = expected_rope(a)
    if a.k_bias is not None:
        k = _with_layer_norm(a)
    keys = _behind(exact(a.keys_), k)
    if a.v is None:
        return [q, keys]
    v = exact(a.v).transpose(0, 2, 1, 3)
    weight = None if a.v_norm_weight is None else exact(a.v_norm_weight)
    norm = (
        normed(v, weight, a.norm_eps, 0.0 if weight is None else a.norm_weight_offset)
        if a.norm_v
        else Expected(v, 0.0)
    )
    norm = Expected(a.v_norm_factor * norm.value, abs(a.v_norm_factor) * norm.error)
    return [q, keys, _behind(exact(a.values_), norm)]


def _with_layer_norm(a):
    """The keys that `_rope_cache_` writes, [B, Hk, T, Dk]."""
    x, weight, bias = exact(a.k), exact(a.k_norm_weight), exact(a.k_bias)
    centred = x - x.mean(-1, keepdims=True)
    inverse = (np.square(centred).mean(-1, keepdims=True) + a.norm_eps) ** -0.5
    new = centred * inverse * weight + bias
    size = abs(x).max(-1, keepdims=True, initial=0.0) * inverse * abs(weight) + abs(bias)
    # The mean's error is one of all elements, which a small variance makes large.
    size = size * (1.0 + abs(x).max(-1, keepdims=True, initial=0.0) * inverse)
    if a.cos is None:
        new, size = new.transpose(0, 2, 1, 3), size.transpose(0, 2, 1, 3)
    else:
        rotary = a.cos.shape[-1] if a.rotary_dim is None else a.rotary_dim
        rest = (a.pairs, rotary, a.rotary_last, a.norm_eps, a.norm_weight_offset)
        new, _ = oracles_sequence.rotated(torch.from_numpy(new), a.cos, a.sin, None, *rest)
        tables = [torch.from_numpy(abs(exact(table))) for table in (a.cos, a.sin)]
        _, size = oracles_sequence.rotated(torch.from_numpy(size), *tables, None, *rest)
    return Expected(new, 32 * FLOAT32_EPS * size)


def _behind(held: np.ndarray, new: Expected) -> Expected:
    """What is held, its last tokens replaced by new ones."""
    before = held[:, :, : held.shape[2] - new.value.shape[2]]
    error = np.concatenate((np.zeros(before.shape), np.broadcast_to(new.error, new.value.shape)), 2)
    return Expected(np.concatenate((before, new.value), 2), error)


def invalid_rope(zeros):
    return [
        wrong("of heads of an even number of elements, 16 or more", q=zeros(2, T, 4, 14), q_norm_weight=None),
        wrong("an even number of at least 2", rotary_dim=7),
        wrong(
            "of heads of an even number of elements, 2 or more",
            q=zeros(2, T, 4, 15),
            q_norm_weight=None,
            cos=None,
            sin=None,
        ),
    ]


def invalid_rope_heads(zeros):
    return [
        wrong("of heads of an even number of elements, 16 or more", x=zeros(2, T, 4, 14), norm_weight=None)
    ]


def invalid__rope_cache_(zeros):
    alone = {"v": None, "values_": None}
    return [
        wrong("norm_v must be False without v, got True", v=None, values_=None, norm_v=True),
        wrong("v_norm_factor must be 1.0 without norm_v, got 2.0", v_norm_factor=2.0),
        wrong("of 3 tokens or more, as many as k has", keys_=zeros(2, 2, T - 1, 16)),
        wrong("of 3 tokens or more, as many as v has", values_=zeros(2, 2, T - 1, 8)),
        wrong(
            "None without k_norm_weight, or with a norm_weight_offset",
            **{
                "k_bias": zeros(16),
                "q_norm_weight": None,
                "k_norm_weight": zeros(16),
                "norm_weight_offset": 1.0,
            },
            **alone,
        ),
    ]
