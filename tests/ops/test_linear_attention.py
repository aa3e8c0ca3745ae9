"""Linear attention: the convolution and the recurrence, for prompts and single tokens."""

import numpy as np
import pytest
import torch
from support.oracles import FLOAT32_EPS, exact, spacing
from support.oracles_operators import checked
from support.values import DTYPES, numbers

from torch_moe_mps.ops.linear_attention import causal_conv1d_update_, linear_attention_, selective_scan_

# The convolution


def check_conv(x, state, weight, bias, activation, add_input=False):
    assert checked("causal_conv1d_update_", x, state, weight, bias, activation, add_input).dtype == x.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv(device, dtype):
    """(B, C, T, S, W): states longer than the window needs, more tokens than the state is long."""
    sizes = [
        (1, 70, 1, 4, 4),
        (2, 5, 3, 3, 4),
        (1, 3, 8, 4, 2),
        (2, 65, 2, 6, 3),
        (1, 4, 2, 1, 1),
        (1, 2, 2, 0, 1),
        (1, 3, 30, 11, 12),
    ]
    for i, (batch, channels, tokens, length, width) in enumerate(sizes):
        x = numbers(batch, tokens, channels, dtype=dtype, seed=i).to(device)
        state = numbers(batch, channels, length, dtype=torch.float32 if i % 3 == 1 else dtype).to(device)
        weight = numbers(channels, width, dtype=torch.float32 if i % 2 else dtype).to(device)
        bias = numbers(channels, dtype=dtype).to(device) if i % 2 else None
        check_conv(x, state, weight, bias, "none" if i in (1, 3) else "silu", add_input=i in (0, 3, 6))


def test_conv_strides(device):
    """x a slice of a projection or transposed, a state with gaps, a weight without its middle dimension."""
    x = numbers(2, 3, 24, dtype=torch.float16).to(device)[..., 3:19]
    state = numbers(2, 16, 10, dtype=torch.float16).to(device)
    weight = numbers(16, 1, 4, dtype=torch.float16).to(device).squeeze(1)
    check_conv(x, state[..., 1:5], weight, None, "silu", add_input=True)
    untouched = numbers(2, 16, 10, dtype=torch.float16)
    for columns in (slice(0, 1), slice(5, 10)):
        assert torch.equal(state[..., columns].cpu(), untouched[..., columns])
    check_conv(x, state[..., ::2], weight, None, "silu")
    check_conv(numbers(2, 16, 3, dtype=torch.float16).to(device).mT, state[..., ::2], weight, None, "silu")


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
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


RULE = {"l2norm_eps": 1e-6, "decay": "softplus", "beta_activation": "sigmoid"}
MAMBA = {"delta": False, "decay": "times_beta", "beta_activation": "softplus"}


def check(arguments, device, **options):
    arguments = [None if tensor is None else tensor.clone().to(device) for tensor in arguments]
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    result = checked("linear_attention_", *arguments, arguments[0].shape[-1] ** -0.5, **options)
    assert result.dtype == arguments[2].dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_attention(device, dtype):
    """(B, T, Hk, Hv, Dk, Dv): part of a simdgroup's rows and columns, more than one, more than one block."""
    sizes = [(1, 1, 2, 4, 16, 32), (2, 3, 1, 3, 40, 33), (1, 17, 2, 2, 7, 5), (1, 8, 1, 2, 64, 8)]
    for i, size in enumerate(sizes):
        for wide in (False, True):
            arguments, beta = inputs(*size, dtype, seed=i, wide=wide)
            heads = size[3]
            bias = numbers(heads, *[size[4]] * wide, seed=i + 1) if i % 2 else None
            options = RULE | {"beta": beta, "A_log": numbers(heads, dtype=dtype, seed=i), "dt_bias": bias}
            check(arguments, device, **options)
            check(arguments, device, **options | {"decay": "sigmoid", "lower_bound": -5.0})
            q, k, v, g, state = arguments
            plain = [q / q.shape[-1] ** 0.5, k / k.shape[-1] ** 0.5, v, -g.abs(), state]
            options = {"beta": beta.abs() / 4, "skip": numbers(heads) if i % 2 else None}
            check(plain, device, **options)
            norm = {"gate": numbers(*v.shape, dtype=dtype, seed=i), "norm_weight": numbers(v.shape[-1])}
            activation = "sigmoid" if i % 2 else "silu"
            check(plain, device, **options, **norm, norm_offset=float(i % 2), gate_activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_delta_rule(device, dtype):
    """Mamba-2, with and without the bound on its time step; lightning attention, with a constant decay."""
    (q, k, v, _, state), step = inputs(2, 19, 2, 4, 24, 20, dtype)
    options = MAMBA | {"beta": step, "A_log": numbers(4), "skip": numbers(4, dtype=dtype)}
    for others in ({}, {"beta_min": 0.5}, {"dt_bias": numbers(4, dtype=dtype)}):
        check([q, k, v, None, state], device, **options, **others)
    check([q, k, v, -numbers(4).abs(), state], device, delta=False)


@pytest.mark.parametrize(("key_width", "value_width"), [(256, 40), (100, 160)])
def test_wide_heads(device, key_width, value_width):
    """With a norm, one threadgroup takes the columns a few at a time."""
    arguments, beta = inputs(1, 2, 1, 1, key_width, value_width, torch.bfloat16)
    options = RULE | {"beta": beta, "A_log": numbers(1)}
    check(arguments, device, **options)
    norm = {"gate": numbers(1, 2, 1, value_width, dtype=torch.bfloat16), "norm_weight": numbers(value_width)}
    check(arguments, device, **options, **norm, norm_eps=1e-5)


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


def test_linear_attention_strides(device):
    """Slices of a fused projection, and states with gaps and with rows for columns."""
    fused = numbers(2, 3, 2 * 16 + 2 * 16 + 2 * 4 * 8 + 1, dtype=torch.float16).to(device)[..., 1:]
    q, k, v, gate = fused.split([32, 32, 32, 32], -1)
    q, k, v, gate = q.unflatten(-1, (2, 16)), k.unflatten(-1, (2, 16)), v.unflatten(-1, (4, 8)), gate
    b, a = numbers(2, 3, 8, dtype=torch.float16).to(device).chunk(2, -1)
    options = RULE | {"beta": b, "A_log": numbers(4).to(device)}
    options |= {"gate": gate.unflatten(-1, (4, 8)), "norm_weight": numbers(8).to(device)}
    states = numbers(2, 5, 16, 8).to(device)
    checked("linear_attention_", q, k, v, a, states[:, 1:], 0.25, **options)
    assert torch.equal(states[:, 0].cpu(), numbers(2, 5, 16, 8)[:, 0])
    checked("linear_attention_", q, k, v, a, numbers(2, 4, 8, 16).to(device).mT, 0.25, **options)
    checked("linear_attention_", q.mT.contiguous().mT, k, v, a, states[:, :4], 0.25, **options)


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize(("delta", "wide"), [(False, False), (True, False), (True, True)])
def test_a_prompt_in_pieces(device, delta, wide):
    """Wherever it is cut, results and state have the same bits."""
    (q, k, v, g, state), beta = inputs(1, 37, 1, 2, 20, 16, torch.float32, wide=wide)
    q, k, v, g, state, beta = (tensor.to(device) for tensor in (q, k, v, -g.abs(), state, beta))
    expected = None
    for sizes in ([37], [1, 36], [16, 16, 5], [15, 17, 5], [7, 1, 1, 28]):
        own, results = state.clone(), []
        for part in zip(*(x.split(sizes, 1) for x in (q, k, v, g, beta)), strict=True):
            *heads, strength = part
            options = {"beta": strength, "delta": delta, "l2norm_eps": 1e-6}
            results.append(linear_attention_(*heads, own, 0.2, **options))
        found = torch.cat(results, 1).cpu(), own.cpu()
        expected = expected or found
        assert all(map(torch.equal, found, expected))


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_selective_scan(device, dtype):
    """(B, T, I, N): part of a threadgroup's channels, more than one, more tokens than are staged."""
    for i, size in enumerate([(1, 1, 70, 16), (2, 3, 5, 4), (1, 40, 3, 1), (2, 33, 65, 15)]):
        arguments = [tensor.to(device) for tensor in scanned(*size, dtype, seed=i)]
        channels = size[2]
        bias = numbers(channels, dtype=dtype).to(device) if i % 2 else None
        options = {"dt_bias": bias, "skip": None if i % 2 else numbers(channels).to(device)}
        gate = numbers(*size[:3], dtype=dtype, seed=7).to(device) if i != 1 else None
        result = checked("selective_scan_", *arguments, **options, gate=gate)
        assert result.dtype == dtype


def test_selective_scan_strides(device):
    """Slices of fused projections, transposed tensors, a state with gaps."""
    fused = numbers(2, 3, 41, dtype=torch.float16).to(device)
    x, gate = fused[..., 1:13].chunk(2, -1)
    step = numbers(2, 6, 3, dtype=torch.float16).to(device).mT
    b, c = fused[..., 13:25].chunk(2, -1)
    state = numbers(2, 7, 12).to(device)
    checked("selective_scan_", x, step, b, c, state[:, 1:, ::2], numbers(6, 6).to(device).mT, gate=gate)
    untouched = numbers(2, 7, 12)
    assert torch.equal(state[:, 0].cpu(), untouched[:, 0])
    assert torch.equal(state[:, :, 1::2].cpu(), untouched[:, :, 1::2])


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


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
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
