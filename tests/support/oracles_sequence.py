"""Attention, linear attention and rotary embedding in numpy and float64, written from their definitions."""

import numpy as np

from support.oracles import FLOAT32_EPS, exact, rms, sigmoid

# Attention


def causal(tokens: int, keys: int, window: int | None = None, key_range=None, lookahead=0) -> np.ndarray:
    """Which keys the last `tokens` of `keys` positions see, [1, T, S]; of a batch's ranges, [B, T, S]."""
    distance = np.arange(keys - tokens, keys)[:, None] - np.arange(keys)
    seen = ((distance >= -lookahead) & (distance < (keys + tokens if window is None else window)))[None]
    if key_range is None:
        return seen
    rows = [[first <= key < end for key in range(keys)] for first, end in key_range.tolist()]
    return seen & np.array(rows, bool).reshape(len(rows), 1, keys)


def attention(
    q, k, v, sinks, scale, seen, added=0.0, softcap=None, sizes=None
) -> tuple[np.ndarray, np.ndarray]:
    """The result and the error of float32 arithmetic. `seen` and `added`: [B or 1, T, S].

    `seen` may say how often a token sees a key, and be for each key head, [B or 1, Hk or 1, T, S]; `added`
    may be for each head, [B or 1, Hq, T, S]. `sinks` are [Hq] or [B, T, Hq].

    One row after the other; terms that are not seen take no part. `k` and `v` are tensors or float64;
    `sizes` are the magnitudes of what they were computed from.
    """
    q, k, v = (t if isinstance(t, np.ndarray) else exact(t) for t in (q, k, v))
    k_size, v_size = sizes or (abs(k), abs(v))
    batch, heads, tokens, _ = q.shape
    shape = batch, k.shape[1], tokens, k.shape[2]
    seen, added = (x[:, None] if np.ndim(x) == 3 else x for x in (seen, added))
    if np.ndim(added) and added.shape[1] != heads:
        added = np.repeat(added, heads // added.shape[1], 1)
    seen, added = np.broadcast_to(seen, shape), np.broadcast_to(added, (batch, heads, *shape[2:]))
    sinks = np.broadcast_to(-np.inf if sinks is None else exact(sinks), (batch, tokens, heads))
    value = np.zeros((batch, tokens, heads, v.shape[3]))
    error = np.zeros_like(value)
    for b, t, h in np.ndindex(batch, tokens, heads):
        head = h // (heads // k.shape[1])
        keys = np.nonzero(seen[b, head, t])[0]
        k_seen, v_seen = k[b, head, keys], v[b, head, keys]
        products = k_seen @ q[b, h, t] * scale
        scores = products if softcap is None else softcap * np.tanh(products / softcap)
        scores = scores + added[b, h, t, keys]
        if not np.isfinite(products + scores).all():  # the order of the factors decides what it becomes
            value[b, t, h] = np.nan
            continue
        size = k_size[b, head, keys] @ abs(q[b, h, t]) * abs(scale) + abs(added[b, h, t, keys])
        sink = float(sinks[b, t, h])
        highest = max(scores.max(initial=-np.inf), sink)
        terms = np.exp(scores - highest) * seen[b, head, t, keys] if keys.size else scores
        total = terms.sum() + np.exp(sink - highest) if highest > -np.inf else 1.0
        value[b, t, h] = terms @ v_seen / total
        # A score's error is one of its exponential.
        factor = (24 + (4 if softcap is None else 12) * size.max(initial=0.0)) * FLOAT32_EPS
        error[b, t, h] = factor * (terms @ v_size[b, head, keys] / total)
    return value, error


# Linear attention


def positions_taken_in(a) -> np.ndarray:
    """The state of a convolution behind the pending positions that are right."""
    state = exact(a.conv_state_).copy()
    for row, count in enumerate([] if a.pending_ is None else a.counts[:, 0].tolist()):
        every = np.concatenate((state[row], exact(a.pending_)[row, :, :count]), -1)
        state[row] = every[:, every.shape[1] - state.shape[2] :]
    return state


def convolution(x, state: np.ndarray, weight, bias, activation) -> tuple[np.ndarray, ...]:
    """Result, its magnitude and the state that is left: position by position."""
    every = np.concatenate((state, exact(x)), -1)
    weight = exact(weight)
    length, width = state.shape[-1], weight.shape[-1]
    value, magnitude = (np.zeros(x.shape) for _ in range(2))
    shift = np.zeros(x.shape[1]) if bias is None else exact(bias)
    for t in range(x.shape[-1]):
        window = every[..., length + t + 1 - width : length + t + 1]
        value[..., t] = (window * weight).sum(-1) + shift
        magnitude[..., t] = (abs(window) * abs(weight)).sum(-1) + abs(shift)
    if activation == "silu":
        value = value * sigmoid(value)
    return value, magnitude, every[..., every.shape[-1] - state.shape[-1] :]


def selective_scan(a) -> tuple[np.ndarray, ...]:
    """What selective_scan_ computes of its arguments: result, state, the sums of the absolute terms, and the
    pending tokens.
    """
    x, step, b, c, state = map(exact, (a.x, a.step, a.B, a.C, a.state_))
    strength = np.logaddexp(0.0, step if a.dt_bias is None else step + exact(a.dt_bias))
    rate, magnitude = -np.exp(exact(a.A_log)), abs(state)
    skip = 0.0 if a.skip is None else exact(a.skip)
    result, result_magnitude = np.empty_like(x), np.empty_like(x)
    pending = None if a.pending_ is None else exact(a.pending_).copy()
    for row, count in enumerate([] if pending is None else a.counts[:, 0].tolist()):
        for channel in range(x.shape[2]):
            group, place = divmod(channel, 128)
            for token in pending[row, group, :count]:
                own = token[128 + place] * np.log(2.0)
                new = own * token[place] * token[256:]
                decay = np.exp(rate[channel] * own)
                state[row, channel] = decay * state[row, channel] + new
                magnitude[row, channel] = decay * magnitude[row, channel] + abs(new)
    lasting, lasting_magnitude = state.copy(), magnitude.copy()
    for row, t, channel in np.ndindex(x.shape) if a.keep else ():
        group, place = divmod(channel, 128)
        own = pending[row, group, t]
        own[place], own[128 + place] = x[row, t, channel], strength[row, t, channel] / np.log(2.0)
        own[256:] = b[row, t]
    for t in range(x.shape[1]):
        decay = np.exp(rate * strength[:, t, :, None])
        new = (strength[:, t] * x[:, t])[..., None] * b[:, t, None]
        state, magnitude = decay * state + new, decay * magnitude + abs(new)
        result[:, t] = (state * c[:, t, None]).sum(-1) + skip * x[:, t]
        result_magnitude[:, t] = (magnitude * abs(c[:, t, None])).sum(-1) + abs(skip * x[:, t])
    if a.gate is not None:
        factor = exact(a.gate) * sigmoid(exact(a.gate))
        result, result_magnitude = result * factor, result_magnitude * abs(factor)
    if a.keep:
        state, magnitude = lasting, lasting_magnitude
    return result, state, result_magnitude, magnitude, pending


def recurrence(a) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """What gated_delta_rule_ computes of its arguments, head by head: result, state, pending tokens."""
    q, k, v, state = map(exact, (a.q, a.k, a.v, a.state_))
    keys, factors = k, np.ones(k.shape[:3])
    if a.l2norm_eps is not None:
        factors = 1.0 / np.sqrt((k * k).sum(-1) + a.l2norm_eps)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + a.l2norm_eps) for x in (q, k))
    bias = 0.0 if a.dt_bias is None else exact(a.dt_bias)
    beta = exact(a.beta)
    if a.beta_activation != "none":
        beta = sigmoid(beta) if a.beta_activation == "sigmoid" else np.logaddexp(0.0, beta + bias)
    beta = beta if a.beta_min is None else np.maximum(beta, a.beta_min)
    rate = 1.0 if a.A_log is None else np.exp(exact(a.A_log))
    if a.decay_form == "times_beta":
        g = -rate * beta
    else:
        g = exact(a.g)
        rate = np.asarray(rate)[..., None] if g.ndim == 4 and a.A_log is not None else rate
        if a.decay_form == "softplus":
            g = -rate * np.logaddexp(0.0, g + bias)
        elif a.decay_form == "sigmoid":
            g = a.lower_bound * sigmoid(rate * (g + bias))
    is_wide = g.ndim == 4
    g = np.broadcast_to(g if is_wide else g[..., None], (*v.shape[:3], q.shape[3]))
    heads, shared = v.shape[2], v.shape[2] // q.shape[2]
    out, state = np.zeros(v.shape), state.copy()

    def taken_in(s, key, value, strength, decays):
        s = s * decays[:, None]
        return s + np.outer(key, (value - (0.0 if a.decay_form == "times_beta" else key @ s)) * strength)

    pending = None if a.pending_ is None else exact(a.pending_).copy()
    ends = np.cumsum([q.shape[3], v.shape[3], 1, 1])
    for b, count in enumerate([] if pending is None else a.counts[:, 0].tolist()):
        for h, n in np.ndindex(heads, count):
            key, value, factor, strength, decays = np.split(pending[b, h, n], ends)
            state[b, h] = taken_in(state[b, h], key * factor, value, strength, decays)
    lasting = state.copy()
    for b, t, h in np.ndindex(v.shape[0], v.shape[1], heads):
        key, query = k[b, t, h // shared], q[b, t, h // shared]
        s = taken_in(state[b, h], key, v[b, t, h], beta[b, t, h], np.exp(g[b, t, h]))
        skipped = 0.0 if a.skip is None else exact(a.skip)[h] * v[b, t, h]
        state[b, h], out[b, t, h] = s, query @ s * a.scale + skipped
        if a.keep:
            factor, decays = factors[b, t, h // shared], np.exp(g[b, t, h])[: None if is_wide else 1]
            row = keys[b, t, h // shared], v[b, t, h], [factor, beta[b, t, h]], decays
            pending[b, h, t] = np.concatenate(row)
    return out, lasting if a.keep else state, pending


# Rotary embedding


def partners(pairs: str, rotary: int):
    """For each element that is stored: where it is read, where its partner is, and the sine's sign."""
    for i in range(rotary):
        half = rotary // 2
        if pairs == "half":
            yield i, i, (i + half) % rotary, -1.0 if i < half else 1.0
        elif pairs == "interleaved":
            yield i, i, i ^ 1, 1.0 if i % 2 else -1.0
        else:
            source = 2 * (i % half) + i // half
            yield i, source, source ^ 1, 1.0 if source % 2 else -1.0


def rotated(x, cos, sin, weight, pairs, rotary, last, eps, offset) -> tuple[np.ndarray, np.ndarray]:
    """The result and its magnitude, [B, H, T, D]: element by element."""
    y = exact(x).transpose(0, 2, 1, 3)
    if weight is not None:
        y = rms(y, eps) * (exact(weight) + offset)
    if cos is None:
        return y, abs(y)
    cos, sin = (exact(t)[:, None] for t in (cos, sin))
    start = y.shape[-1] - rotary if last else 0
    out, magnitude = y.copy(), abs(y)
    for stored, own, other, sign in partners(pairs, rotary):
        pair = own % (rotary // 2) if pairs == "half" else own // 2
        column = own if cos.shape[-1] == rotary else pair
        a, b = y[..., start + own], y[..., start + other]
        out[..., start + stored] = a * cos[..., column] + sign * b * sin[..., column]
        magnitude[..., start + stored] = abs(a * cos[..., column]) + abs(b * sin[..., column])
    return out, magnitude
