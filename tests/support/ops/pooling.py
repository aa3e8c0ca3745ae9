"""Operators of the family pooling: valid arguments, results in float64, and invalid arguments."""

import numpy as np
import torch

from support.ops import wrong
from support.oracles import FLOAT32_EPS, exact
from support.oracles_operators import Expected


def draw__pool_window_(d):
    batch, tokens, rate, overlap = d.one(1, 2, 0), d.one(1, 2, 9, 40, 0), d.one(4, 1, 3, 16), d.one(2, 1)
    width, position, dtype = d.one(8, 2, 70, 256), d.one(3, 0, 17, 1000), d.dtype()
    columns = width * overlap
    return {
        "kv": d.values(batch, tokens, columns, dtype=dtype),
        "position_bias": d.values(rate, columns, dtype=d.dtype()),
        "state_": d.values(batch, rate * overlap, 2, columns, dtype=dtype),
        "entries_": d.values(batch, (position + tokens) // rate + d.one(0, 3), width, dtype=dtype),
        "position": position,
        "inv_freq": d.values(d.one(1, 0, width // 2), dtype=d.dtype()).abs(),
        "rotary_scale": d.one(1.0, 0.5),
    }


def expected__pool_window_(a):
    """One window after the other, one token after the other."""
    state, entries = exact(a.state_), exact(a.entries_)
    errors = np.zeros_like(entries)
    new = np.stack((exact(a.kv), exact(a.gate)), 2)
    (_, tokens, width), rate, rows, of_entry = (
        a.kv.shape,
        len(a.position_bias),
        state.shape[1],
        entries.shape[2],
    )
    end = a.position + tokens

    def held(token):  # [B, 2, W]
        return state[:, token % rows] if token < a.position else new[:, token - a.position]

    for window in range(a.position // rate, end // rate):
        parts = [(window * rate + j, j, slice(width - of_entry, width)) for j in range(rate)]
        if width > of_entry and window > 0:
            parts += [((window - 1) * rate + j, j, slice(0, of_entry)) for j in range(rate)]
        values = np.stack([held(token)[:, 0, columns] for token, _, columns in parts])
        bias = exact(a.position_bias)
        logits = np.stack([held(token)[:, 1, columns] + bias[j, columns] for token, j, columns in parts])
        weights = np.exp(logits - logits.max(0))
        weights = weights / weights.sum(0)
        pooled = (weights * values).sum(0)
        error = (len(parts) + 8 + 4 * abs(logits).max(0)) * FLOAT32_EPS * (weights * abs(values)).sum(0)
        inverse = 1 / np.sqrt(np.mean(pooled**2, -1, keepdims=True) + a.norm_eps)
        weight = exact(a.norm_weight)
        error += abs(pooled) * (8 * FLOAT32_EPS + inverse * np.sqrt(np.mean(error**2, -1, keepdims=True)))
        x, error = pooled * inverse * weight, error * inverse * abs(weight)
        frequencies = a.inv_freq if a.inv_freq.dtype == torch.float64 else a.inv_freq.float()
        angles = exact(window * rate * frequencies)
        cos, sin = np.cos(angles) * a.rotary_scale, np.sin(angles) * a.rotary_scale
        first, second = (slice(of_entry - 2 * len(angles) + i, None, 2) for i in range(2))
        sizes = abs(x[:, first]) + abs(x[:, second])
        slack = (error[:, first] + error[:, second] + 8 * FLOAT32_EPS * sizes) * max(
            abs(a.rotary_scale), 1e-30
        )
        turned = x[:, first] * cos - x[:, second] * sin, x[:, second] * cos + x[:, first] * sin
        if len(angles):
            x[:, first], x[:, second] = turned
            error[:, first] = error[:, second] = slack
        entries[:, window], errors[:, window] = x, error
    for token in range(max(a.position, end - rows), end):
        state[:, token % rows] = new[:, token - a.position]
    return [Expected(state), Expected(entries, errors)]


def invalid__pool_window_(zeros):
    return [
        wrong(
            "of an even last dimension D, with W = D or 2 D, here 16",
            entries_=zeros(2, 5, 4),
            norm_weight=zeros(4),
        ),
        wrong("position must be between 0 and 2147483644, got -1", position=-1),
        wrong("entries_ must be of shape [B, N, D], with B = 2 and N at least 6, got (2, 5, 8)", position=9),
        wrong("inv_freq's length must be between 0 and 4, got 5", inv_freq=zeros(5)),
    ]
