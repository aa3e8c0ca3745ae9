"""Linear attention: the convolution and the recurrence, for prompts and single tokens."""

import numpy as np
import pytest
import torch
from support.oracles import FLOAT32_EPS, exact, spacing
from support.oracles_operators import checked
from support.values import EACH_DTYPE, far_apart, numbers

from torch_moe_mps.ops.families.linear_attention import (
    causal_conv1d_update_,
    linear_attention_,
    selective_scan_,
)

# The convolution


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_convolution_of_qwen3_next(device, dtype):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update as model

    x, state = numbers(2, 48, 1, dtype=dtype), numbers(2, 48, 4, dtype=dtype)
    weight = numbers(48, 4, dtype=dtype)
    ours = state.clone().to(device)
    expected = model(x, state, weight, None, "silu")
    result = causal_conv1d_update_(x.mT.to(device), ours, weight.to(device)).mT
    allowed = 2 * spacing(exact(expected), dtype) + 16 * FLOAT32_EPS + (dtype != torch.float32) * 0.02
    assert (abs(exact(result) - exact(expected)) <= allowed).all()
    assert torch.equal(ours.cpu(), state)


# The recurrence


def inputs(batch, tokens, key_heads, heads, key_width, value_width, dtype, seed=0, wide=False):
    """q, k, v, g, state; beta."""
    q, k = (numbers(batch, tokens, key_heads, key_width, dtype=dtype, seed=seed + i) for i in range(2))
    v = numbers(batch, tokens, heads, value_width, dtype=dtype, seed=seed)
    g = numbers(batch, tokens, heads, *[key_width] * wide, dtype=dtype, seed=seed)
    beta = numbers(batch, tokens, heads, dtype=dtype, seed=seed + 1)
    return [q, k, v, g, numbers(batch, heads, key_width, value_width, seed=seed)], beta


RULE = {"l2norm_eps": 1e-6, "decay_form": "softplus", "beta_activation": "sigmoid"}


def check(arguments, device, **options):
    arguments = [None if tensor is None else tensor.clone().to(device) for tensor in arguments]
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    result = checked("linear_attention_", *arguments, arguments[0].shape[-1] ** -0.5, **options)
    assert result.dtype == arguments[2].dtype


def test_values_of_tokens_far_apart(device):
    (q, k, v, g, state), beta = inputs(1, 2, 1, 2, 16, 8, torch.float16)
    q, k, v, g, state, beta = (tensor.to(device) for tensor in (q, k, v, g, state, beta))
    options = {"beta": beta, "A_log": numbers(2).to(device), **RULE}
    checked("linear_attention_", q, k, far_apart(v, 1), g, state, 0.25, **options)


def test_a_norm_of_more_tokens_than_a_block(device):
    """It runs behind the recurrence, or in it where there are as many heads as cores."""
    arguments, beta = inputs(1, 20, 1, 2, 16, 24, torch.float16)
    v = arguments[2]
    norm = {"gate": numbers(*v.shape, dtype=torch.float16, seed=3), "norm_weight": numbers(24)}
    check(arguments, device, **RULE, beta=beta, A_log=numbers(2), **norm)
    many, beta = inputs(1, 18, 1, 64, 4, 4, torch.float16)
    norm = {"gate": numbers(*many[2].shape, dtype=torch.float16, seed=3), "norm_weight": numbers(4)}
    check(many, device, **RULE, beta=beta, A_log=numbers(64), **norm)


def test_decay_of_large_gates(device):
    """softplus where exp overflows, and a state that is forgotten at once."""
    arguments, beta = inputs(1, 2, 1, 2, 16, 32, torch.float32)
    arguments[3] = torch.tensor([[[100.0, -100.0], [19.9, 20.1]]])
    check(arguments, device, **RULE, beta=beta, A_log=torch.tensor([-4.0, 0.5]))


@pytest.mark.parametrize("wide", [False, True])
def test_extreme_decays_and_strengths(device, wide):
    """exp(g) = 0 in float32, no decay, beta 0 and 1."""
    arguments, _ = inputs(1, 6, 1, 2, 16, 8, torch.float32, wide=wide)
    arguments[3] = torch.zeros_like(arguments[3])
    arguments[3][:, 1] = -200.0
    arguments[3][:, 4] = -5.0
    beta = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0]).view(1, 6, 1).expand(1, 6, 2)
    check(arguments, device, l2norm_eps=1e-6, beta=beta)


def test_nan_stays_in_its_head(device):
    (q, k, v, g, state), beta = inputs(1, 3, 1, 2, 16, 8, torch.float32)
    v[0, 1, 0, 2] = float("nan")
    state[0, 1, 3, 5] = float("inf")
    on_device = [tensor.to(device) for tensor in (q, k, v, -g.abs(), state)]
    result = linear_attention_(*on_device, 0.25, beta=beta.abs().to(device), l2norm_eps=1e-6)
    finite = result.isfinite().cpu()
    assert finite[0, :, 0, [0, 1, 3, 4, 5, 6, 7]].all() and finite[0, :, 1, [0, 1, 2, 3, 4, 6, 7]].all()
    assert finite[0, 0, 0].all() and not finite[0, 1:, 0, 2].any() and not finite[0, :, 1, 5].any()


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_recurrence_of_qwen3_next(device, dtype):
    """The model's own function, with the gates that its layer computes."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    (q, k, v, a, state), b = inputs(2, 3, 2, 4, 32, 16, dtype)
    A_log, dt_bias = numbers(4), numbers(4, seed=3)
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    beta = b.float().sigmoid()
    model, model_state = torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    ours = [tensor.to(device) for tensor in (q, k, v, a, state)]
    options = {"beta": b.to(device), "A_log": A_log.to(device), "dt_bias": dt_bias.to(device)}
    result = linear_attention_(*ours, 32**-0.5, **RULE, **options)
    for actual, expected in ((result, exact(model)), (ours[4], exact(model_state))):
        allowed = spacing(expected, actual.dtype) + 192 * FLOAT32_EPS
        assert (abs(exact(actual) - expected) <= allowed).all()


# The kernels, by their options and whether each channel has a decay.
PLAIN = {"decay_form": "times_beta", "A_log": torch.tensor([0.5, -1.0])}
KERNELS = [(PLAIN, False), ({}, False), ({}, True)]


@pytest.mark.parametrize(("options", "wide"), KERNELS)
def test_a_prompt_in_pieces(device, options, wide):
    """Wherever it is cut, results and state have the same bits."""
    (q, k, v, g, state), beta = inputs(1, 37, 1, 2, 20, 16, torch.float32, wide=wide)
    q, k, v, g, state, beta = (tensor.to(device) for tensor in (q, k, v, -g.abs(), state, beta.abs()))
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    expected = None
    for sizes in ([37], [1, 36], [16, 16, 5], [15, 17, 5], [7, 1, 1, 28]):
        own, results = state.clone(), []
        for part in zip(*(x.split(sizes, 1) for x in (q, k, v, g, beta)), strict=True):
            *heads, decay, strength = part
            more = {"beta": strength, "l2norm_eps": 1e-6, **options}
            results.append(linear_attention_(*heads, None if options else decay, own, 0.2, **more))
        found = torch.cat(results, 1).cpu(), own.cpu()
        expected = expected or found
        assert all(map(torch.equal, found, expected))


class Steps:
    """Some steps of 4 tokens each, of which some hold in each of two rows: what the operators give for them,
    and what they give where all tokens that hold come one by one."""

    counts = ((4, 0), (2, 4), (1, 3))

    def __init__(self, device):
        self.device = device
        self.counted = [
            torch.tensor(counts, dtype=torch.int32, device=device)[:, None] for counts in self.counts
        ]

    def run(self, states, pending, call):
        """call(states, step, row, tokens, **pending) -> results of the tokens."""
        none = torch.zeros(2, 1, dtype=torch.int32, device=self.device)
        found, before = [], none
        for step, counts in enumerate(self.counted):
            found.append(call(states, step, slice(None), 4, pending_=pending, counts=before, keep=True))
            before = counts
        last = call(states, len(self.counts), slice(None), 1, pending_=pending, counts=before)
        return [*found, last]

    def check(self, states, pending, call, tolerance=0.0):
        alone = [state.clone() for state in states]
        found = self.run(states, pending, call)
        for row in range(2):
            own = [state[row : row + 1] for state in alone]
            for step, counts in enumerate((*self.counts, (1, 1))):
                for token in range(counts[row]):
                    right = call(own, step, slice(row, row + 1), slice(token, token + 1))
                    result = found[step][row : row + 1, token : token + 1]
                    torch.testing.assert_close(result, right, rtol=0.0, atol=tolerance)
            for state, one in zip(states, own, strict=True):
                torch.testing.assert_close(state[row : row + 1], one, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize(("options", "wide"), KERNELS)
def test_tokens_that_are_pending(device, options, wide):
    """Whichever of them hold, results and states have the bits that these give one by one."""
    (q, k, v, g, state), beta = inputs(2, 16, 1, 2, 20, 16, torch.float16, wide=wide)
    tokens = [tensor.to(device).unflatten(1, (4, 4)) for tensor in (q, k, v, -g.abs(), beta.abs())]
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}

    def call(states, step, rows, tokens_of_step, **pending):
        taken = slice(0, tokens_of_step) if isinstance(tokens_of_step, int) else tokens_of_step
        *heads, decay, strength = (each[rows, step, taken] for each in tokens)
        more = {"beta": strength, "l2norm_eps": 1e-6, **options}
        return linear_attention_(*heads, None if options else decay, *states, 0.2, **more, **pending)

    pending = torch.full((2, 2, 5, 20 + 16 + 2 + (20 if wide else 1)), float("nan"), device=device)
    Steps(device).check([state.to(device)], pending, call)


def test_pending_tokens_that_leave_no_room_for_those_of_the_call(device):
    """Of heads of 200, 8 tokens are staged at a time: results and states have the bits of one call."""
    (q, k, v, g, state), beta = inputs(1, 11, 1, 1, 200, 4, torch.float32)
    heads = [tensor.to(device) for tensor in (q, k, v, -g.abs(), beta.abs())]
    whole, own = state.to(device), state.to(device, copy=True)
    *of_heads, strength = heads
    expected = linear_attention_(*of_heads, whole, 0.2, beta=strength, l2norm_eps=1e-6)
    pending, found = torch.full((1, 1, 8, 200 + 4 + 3), float("nan"), device=device), []
    parts = zip(*(each.split([5, 5, 1], 1) for each in heads), strict=True)
    for count, tokens in zip((0, 5, 5), parts, strict=True):
        *of_heads, strength = tokens
        counts = torch.tensor([[count]], dtype=torch.int32, device=device)
        kept = {"pending_": pending, "counts": counts, "keep": strength.shape[1] > 1}
        found.append(linear_attention_(*of_heads, own, 0.2, beta=strength, l2norm_eps=1e-6, **kept))
    assert torch.equal(torch.cat(found, 1).cpu(), expected.cpu()) and torch.equal(own.cpu(), whole.cpu())


def test_positions_that_are_pending(device):
    x, state, weight = (
        numbers(2, 4, 4, 70).to(device),
        numbers(2, 70, 4).to(device),
        numbers(70, 4).to(device),
    )

    def call(states, step, rows, tokens_of_step, **pending):
        taken = slice(0, tokens_of_step) if isinstance(tokens_of_step, int) else tokens_of_step
        return causal_conv1d_update_(x[rows, step, taken], *states, weight, **pending)

    pending = torch.full((2, 70, 8), float("nan"), device=device)
    Steps(device).check([state], pending, call, tolerance=1e-6)  # torch sums windows of many tokens otherwise


def test_a_call_of_no_tokens_takes_in_those_that_are_pending(device):
    (q, k, v, g, state), beta = inputs(1, 3, 1, 2, 20, 16, torch.float32)
    q, k, v, g, state, beta = (tensor.to(device) for tensor in (q, k, v, -g.abs(), state, beta))
    x, positions, weight = numbers(1, 3, 6).to(device), numbers(1, 6, 4).to(device), numbers(6, 4).to(device)
    pending, of_positions = torch.zeros(1, 2, 8, 39, device=device), torch.zeros(1, 6, 8, device=device)
    two = {"counts": torch.tensor([[2]], dtype=torch.int32, device=device)}
    none = {"counts": torch.tensor([[0]], dtype=torch.int32, device=device), "keep": True}
    right, right_positions = state.clone(), positions.clone()
    linear_attention_(q[:, :2], k[:, :2], v[:, :2], g[:, :2], right, 0.2, beta=beta[:, :2])
    causal_conv1d_update_(x[:, :2], right_positions, weight)
    linear_attention_(q, k, v, g, state, 0.2, beta=beta, pending_=pending, **none)
    causal_conv1d_update_(x, positions, weight, pending_=of_positions, **none)
    empty = (tensor[:, :0] for tensor in (q, k, v, g))
    out = linear_attention_(*empty, state, 0.2, beta=beta[:, :0], pending_=pending, **two)
    also_out = causal_conv1d_update_(x[:, :0], positions, weight, pending_=of_positions, **two)
    assert out.shape == (1, 0, 2, 16) and also_out.shape == (1, 0, 6)
    assert torch.equal(state, right) and torch.equal(positions, right_positions)


@pytest.mark.sweep
@pytest.mark.parametrize("decay", [-5.0, -1e-3, -1e-6, 0.0])
@pytest.mark.parametrize("wide", [False, True])
def test_long_contexts(device, decay, wide):
    """10,000 tokens against float64."""
    (q, k, v, g, state), beta = inputs(1, 10_000, 1, 1, 64, 16, torch.float32, wide=wide)
    check([q, k, v, decay * g.abs().clamp(max=1.0), state], device, l2norm_eps=1e-6, beta=beta.sigmoid())


# Mamba-1


def scanned(batch, tokens, channels, states, dtype, seed=0):
    """x, step, B, C, state, A_log."""
    x, step = (numbers(batch, tokens, channels, dtype=dtype, seed=seed + i) for i in range(2))
    b, c = (numbers(batch, tokens, states, dtype=dtype, seed=seed + i) for i in range(2))
    return [
        x,
        step,
        b,
        c,
        numbers(batch, channels, states, seed=seed),
        numbers(channels, states, dtype=dtype),
    ]


def test_a_selective_scan_in_pieces(device):
    """Wherever it is cut, results and state have the same bits; without tokens nothing changes."""
    x, step, b, c, state, a_log = (each.to(device) for each in scanned(1, 70, 6, 16, torch.float32))
    expected = None
    for sizes in ([70], [1, 69], [32, 32, 6], [31, 0, 34, 5]):
        own, results = state.clone(), []
        for part in zip(*(each.split(sizes, 1) for each in (x, step, b, c)), strict=True):
            results.append(selective_scan_(*part, own, a_log))
        found = torch.cat(results, 1).cpu(), own.cpu()
        expected = expected or found
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("channels", [6, 150])
def test_tokens_of_a_selective_scan_that_are_pending(device, channels):
    """Whichever of them hold, results and states have the bits that these give one by one.

    On a CPU torch's exp rounds the last elements of a tensor in another way.
    """
    dtype, tolerance = (torch.float16, 0.0) if device == "mps" else (torch.float32, 1e-5)
    *of_tokens, state, a_log = (t.to(device) for t in scanned(2, 16, channels, 5, dtype))
    gate, bias = numbers(2, 4, 4, channels, dtype=dtype).to(device), numbers(channels).to(device)
    tokens, options = [*(t.unflatten(1, (4, 4)) for t in of_tokens), gate], {"dt_bias": bias}

    def call(states, step, rows, tokens_of_step, **pending):
        taken = slice(0, tokens_of_step) if isinstance(tokens_of_step, int) else tokens_of_step
        *inputs, z = (each[rows, step, taken] for each in tokens)
        return selective_scan_(*inputs, *states, a_log, gate=z, **options, **pending)

    pending = torch.full((2, -(-channels // 128), 5, 256 + 5), float("nan"), device=device)
    Steps(device).check([state], pending, call, tolerance)


def test_pending_tokens_of_a_selective_scan_without_further_ones(device):
    x, step, b, c, state, a_log = (t.to(device) for t in scanned(1, 3, 130, 16, torch.float32))
    pending, right = torch.zeros(1, 2, 8, 272, device=device), state.clone()
    two, none = (torch.tensor([[n]], dtype=torch.int32, device=device) for n in (2, 0))
    selective_scan_(x[:, :2], step[:, :2], b[:, :2], c[:, :2], right, a_log)
    selective_scan_(x, step, b, c, state, a_log, pending_=pending, counts=none, keep=True)
    empty = (tensor[:, :0] for tensor in (x, step, b, c))
    out = selective_scan_(*empty, state, a_log, pending_=pending, counts=two)
    assert out.shape == (1, 0, 130) and torch.equal(state, right)


@pytest.mark.parametrize(
    ("shape", "keep", "message"),
    [
        ((1, 1, 8, 272), False, "of 2 groups of channels with 272 elements for a token, got 1 with 272"),
        ((1, 2, 8, 271), False, "got 2 with 271"),
        ((1, 2, 2, 272), True, "pending_ must be of T = 3 tokens or more, got 2"),
    ],
)
def test_pending_tokens_of_other_sizes(shape, keep, message):
    counts = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"selective_scan_: .*{message}"):
        selective_scan_(
            *scanned(1, 3, 130, 16, torch.float32), pending_=torch.zeros(shape), counts=counts, keep=keep
        )


def test_selective_scan_of_extreme_numbers(device):
    """Steps that forget everything and that keep everything; NaN and infinity stay in their channel."""
    arguments = scanned(1, 4, 3, 5, torch.float32)
    arguments[1] = torch.tensor([200.0, -200.0, 0.0, 90.0]).view(1, 4, 1).expand(1, 4, 3).contiguous()
    arguments = [each.to(device) for each in arguments]
    checked("selective_scan_", *arguments)
    arguments[0][0, 1, 0], arguments[4][0, 2, 3] = float("nan"), float("inf")
    arguments[1][:] = 0.0
    finite = selective_scan_(*arguments).isfinite().cpu()[0]
    assert finite[0, :2].all() and not finite[1:, 0].any() and finite[:, 1].all() and not finite[:, 2].any()


def test_the_steps_of_a_selective_scan(device):
    """Of a token that writes into an empty state: log(1 + exp(x)) to a few roundings of x, however small."""
    x = torch.linspace(-60.0, 60.0, 1201)
    one, state = torch.ones(1, 1, 1, device=device), torch.zeros(1, len(x), 1, device=device)
    step = x.view(1, 1, -1).to(device)
    selective_scan_(torch.ones_like(step), step, one, one, state, torch.zeros(len(x), 1, device=device))
    right = np.logaddexp(0.0, exact(x))
    assert (abs(exact(state).ravel() - right) <= 2 * (2 + abs(exact(x))) * FLOAT32_EPS * right).all()


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_scan_of_jamba(device, dtype):
    """The model's own functions, for a prompt and a token."""
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan, mamba_selective_state_update

    x, step, b, c, _, a_log = scanned(2, 6, 10, 8, torch.float32)
    bias, skip, gate = numbers(10), numbers(10, seed=1), numbers(2, 6, 10, seed=5)
    given = [each.to(dtype).float() for each in (x, step, b, c, gate)]
    wide = [each.double() for each in given]
    heads = [each.transpose(1, 2) for each in wide]
    options = {"D": skip.double(), "dt_softplus": True, "dt_bias": bias.double()}
    prompt = mamba_selective_scan(
        heads[0][..., :5], heads[1][..., :5], -a_log.double().exp(), heads[2][..., :5], heads[3][..., :5],
        skip.double(), heads[4][..., :5], bias.double(), True, True,
    )  # fmt: skip
    last = [each[:, 5] for each in wide]
    state = prompt[1].clone()
    one = mamba_selective_state_update(
        state, last[0], last[1], -a_log.double().exp(), last[2], last[3], z=last[4], **options
    )
    expected = torch.cat((prompt[0].transpose(1, 2), one.unsqueeze(1)), 1)
    *ours, z = (each.to(dtype).to(device) for each in given)
    own = torch.zeros(2, 10, 8, device=device)
    options = {"dt_bias": bias.to(device), "skip": skip.to(device), "gate": z}
    result = selective_scan_(*ours, own, a_log.to(device), **options)
    for actual, right in ((result, exact(expected)), (own, exact(state))):
        assert (abs(exact(actual) - right) <= spacing(right, actual.dtype) + 400 * FLOAT32_EPS).all()
