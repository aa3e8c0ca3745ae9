"""Operators of the family gated_delta_rule: valid arguments, results in float64, and invalid arguments."""

from types import SimpleNamespace

import torch

from support import oracles, oracles_sequence
from support.ops import wrong
from support.ops.norms import normed_and_gated
from support.ops.pending import pending
from support.oracles import FLOAT32_EPS, exact
from support.oracles_operators import Expected
from torch_moe_mps.ops._sample import T

# Options that depend on each other: draw_* gives all that is no required tensor.
WHOLE = ("gated_delta_rule_", "_gated_delta_rule_")
# Arguments of the latter alone.
NORM = ("gate", "gate_activation", "norm_weight", "norm_eps", "norm_weight_offset")
PENDING = ("pending_", "counts", "keep")


def draw_gated_delta_rule_(d):
    drawn = draw__gated_delta_rule_(d)
    return {name: value for name, value in drawn.items() if name not in NORM + PENDING}


def draw__gated_delta_rule_(d):
    batch, tokens, key_heads, group = d.one(1, 2, 0), d.one(1, 2, 5, 0, 17), d.one(1, 2), d.one(1, 2, 3)
    key_width, value_width, dtype = d.one(16, 7, 64, 100), d.one(8, 1, 33), d.dtype()
    heads, scale = key_heads * group, key_width**-0.5
    decay = d.one("log", "softplus", "sigmoid", "times_beta")
    is_wide = decay != "times_beta" and d.flag()
    g = d.values(batch, tokens, heads, *[key_width] * is_wide)
    biases = (heads, key_width) if is_wide else (heads,)
    beta = d.values(batch, tokens, heads, scale=0.5)
    beta = beta.abs() if decay == "times_beta" else beta
    activations = ("none", "sigmoid") if is_wide else ("none", "sigmoid", "softplus")
    is_gated, width = d.flag(), key_width + value_width + 2 + (key_width if is_wide else 1)
    return {
        "q": d.values(batch, tokens, key_heads, key_width, dtype=dtype, scale=scale),
        "k": d.values(batch, tokens, key_heads, key_width, dtype=dtype, scale=scale),
        "v": d.values(batch, tokens, heads, value_width, dtype=dtype),
        "g": None if decay == "times_beta" else -g.abs() if decay == "log" else g,
        "scale": d.one(scale, 1.0),
        "beta": beta,
        "l2norm_eps": d.one(None, 1e-6),
        "decay_form": decay,
        "A_log": None if decay == "log" else d.values(heads),
        "dt_bias": None if decay == "log" else d.maybe(lambda: d.values(*biases)),
        "lower_bound": -5.0 if decay == "sigmoid" else None,
        "beta_activation": d.one(*activations),
        "beta_min": d.one(None, 0.25),
        "skip": d.maybe(lambda: d.values(heads)),
        "gate": d.values(batch, tokens, heads, value_width, dtype=dtype) if is_gated else None,
        "gate_activation": d.one("silu", "sigmoid"),
        "norm_weight": d.values(value_width) if is_gated else None,
        **{name: d.number(name) for name in ("norm_eps", "norm_weight_offset")},
        **pending(d, tokens, (batch, heads), (width,), torch.float32),
    }


def expected_gated_delta_rule_(a):
    return expected__gated_delta_rule_(SimpleNamespace(**vars(a), **dict.fromkeys(NORM + PENDING)))


def expected__gated_delta_rule_(a):
    value, state, pending = oracles_sequence.recurrence(a)
    largest = max(abs(x).max(initial=1.0) for x in (state, exact(a.state_), exact(a.v)))
    error = 200 * FLOAT32_EPS * largest
    result = Expected(value, error * max(1.0, abs(a.scale)))
    if a.gate is not None:
        rounded = oracles.round_to(value, a.v.dtype)
        x_error = result.error + (a.v.dtype != torch.float32) * oracles.spacing(rounded, a.v.dtype)
        norm = exact(a.gate), exact(a.norm_weight), a.norm_eps, a.norm_weight_offset
        result = normed_and_gated(rounded, *norm, a.gate_activation, x_error=x_error)
    rows = [] if pending is None else [Expected(pending, 64 * FLOAT32_EPS * (1.0 + abs(pending)))]
    return [result, Expected(state, error), *rows]


def invalid_gated_delta_rule_(zeros):
    of_five = {
        "A_log": None,
        "dt_bias": None,
        "g": zeros(2, T, 5),
        "beta": zeros(2, T, 5),
        "decay_form": "log",
    }
    return [
        wrong(
            "of a multiple of q's 2 heads, got 5 heads",
            v=zeros(2, T, 5, 8),
            state_=zeros(2, 5, 16, 8),
            **of_five,
        ),
        wrong(
            "beta_activation must be none or sigmoid where g has a value for each channel, got softplus",
            g=zeros(2, T, 4, 16),
            dt_bias=None,
            beta_activation="softplus",
        ),
    ]


def invalid__gated_delta_rule_(zeros):
    kept = {"counts": zeros(2, 1, dtype=torch.int32), "keep": True}
    return [
        *invalid_gated_delta_rule_(zeros),
        wrong("keep must be False without pending_, got True", keep=True),
        wrong("pending_ must be of 27 elements for a token, got 26", pending_=zeros(2, 4, 4, 26), **kept),
        wrong("pending_ must be of T = 3 tokens or more, got 2", pending_=zeros(2, 4, 2, 27), **kept),
    ]
