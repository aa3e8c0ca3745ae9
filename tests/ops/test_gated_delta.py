"""Linear attention by the gated delta rule: the convolution's and the recurrence's step."""

import pytest
import torch
from support.oracles import FLOAT32_EPS, exact, spacing
from support.oracles_operators import checked
from support.values import DTYPES, numbers

from torch_moe_mps.ops.gated_delta import causal_conv1d_update_, gated_delta_rule_

# The convolution


def check_conv(x, state, weight, bias, activation):
    assert checked("causal_conv1d_update_", x, state, weight, bias, activation).dtype == x.dtype


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
    ]
    for i, (batch, channels, tokens, length, width) in enumerate(sizes):
        x = numbers(batch, channels, tokens, dtype=dtype, seed=i).to(device)
        state = numbers(batch, channels, length, dtype=torch.float32 if i % 3 == 1 else dtype).to(device)
        weight = numbers(channels, width, dtype=torch.float32 if i % 2 else dtype).to(device)
        bias = numbers(channels, dtype=dtype).to(device) if i % 2 else None
        check_conv(x, state, weight, bias, "none" if i == 1 else "silu")


def test_conv_strides(device):
    """x as the transposed view that models pass, a state with gaps, a weight without its middle dimension."""
    x = numbers(2, 3, 24, dtype=torch.float16).to(device).transpose(1, 2)[:, 3:19]
    state = numbers(2, 16, 10, dtype=torch.float16).to(device)
    weight = numbers(16, 1, 4, dtype=torch.float16).to(device).squeeze(1)
    check_conv(x, state[..., 1:5], weight, None, "silu")
    untouched = numbers(2, 16, 10, dtype=torch.float16)
    for columns in (slice(0, 1), slice(5, 10)):
        assert torch.equal(state[..., columns].cpu(), untouched[..., columns])
    check_conv(x, state[..., ::2], weight, None, "silu")


def test_conv_without_tokens(device):
    state = numbers(2, 6, 4).to(device)
    before = state.clone()
    result = causal_conv1d_update_(torch.zeros(2, 6, 0, device=device), state, numbers(6, 4).to(device))
    assert result.shape == (2, 6, 0) and torch.equal(state, before)


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_convolution_of_qwen3_next(device, dtype):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_update as model

    x, state = numbers(2, 48, 1, dtype=dtype), numbers(2, 48, 4, dtype=dtype)
    weight = numbers(48, 4, dtype=dtype)
    ours = state.clone().to(device)
    expected = model(x, state, weight, None, "silu")
    result = causal_conv1d_update_(x.to(device), ours, weight.to(device))
    allowed = 2 * spacing(exact(expected), dtype) + 16 * FLOAT32_EPS + (dtype != torch.float32) * 0.02
    assert (abs(exact(result) - exact(expected)) <= allowed).all()
    assert torch.equal(ours.cpu(), state)


# The recurrence


def inputs(batch, tokens, key_heads, heads, key_width, value_width, dtype, seed=0):
    """q, k, v, g, beta, state."""
    q, k = (numbers(batch, tokens, key_heads, key_width, dtype=dtype, seed=seed + i) for i in range(2))
    v = numbers(batch, tokens, heads, value_width, dtype=dtype, seed=seed)
    g, beta = (numbers(batch, tokens, heads, dtype=dtype, seed=seed + i) for i in range(2))
    return [q, k, v, g, beta, numbers(batch, heads, key_width, value_width, seed=seed)]


def check_delta(arguments, device, **options):
    on_device = [tensor.clone().to(device) for tensor in arguments]
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    result = checked("gated_delta_rule_", *on_device, arguments[0].shape[-1] ** -0.5, **options)
    assert result.dtype == arguments[2].dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_delta(device, dtype):
    """(B, T, Hk, Hv, Dk, Dv): part of a simdgroup's rows and columns, and more than one simdgroup's."""
    sizes = [(1, 1, 2, 4, 16, 32), (2, 3, 1, 3, 40, 33), (1, 2, 2, 2, 7, 5), (1, 8, 1, 2, 64, 8)]
    for i, size in enumerate(sizes):
        arguments = inputs(*size, dtype, seed=i)
        heads = size[3]
        A_log, dt_bias = numbers(heads, dtype=dtype, seed=i), numbers(heads, seed=i + 1)
        options = {"l2norm_eps": 1e-6, "A_log": A_log, "beta_is_logit": True}
        check_delta(arguments, device, **options, dt_bias=dt_bias if i % 2 else None)
        q, k, v, g, beta, state = arguments
        plain = [q / q.shape[-1] ** 0.5, k / k.shape[-1] ** 0.5, v, -g.abs(), beta.abs() / 4, state]
        check_delta(plain, device)
        norm = {"gate": numbers(*v.shape, dtype=dtype, seed=i), "norm_weight": numbers(v.shape[-1], seed=i)}
        check_delta(plain, device, **norm, norm_offset=float(i % 2))


@pytest.mark.parametrize(("key_width", "value_width"), [(256, 40), (100, 160)])
def test_wide_heads(device, key_width, value_width):
    """With a norm, one threadgroup takes the blocks of columns one after another, or a few at a time."""
    arguments = inputs(1, 2, 1, 1, key_width, value_width, torch.bfloat16)
    options = {"l2norm_eps": 1e-6, "beta_is_logit": True, "A_log": numbers(1)}
    check_delta(arguments, device, **options)
    norm = {"gate": numbers(1, 2, 1, value_width, dtype=torch.bfloat16), "norm_weight": numbers(value_width)}
    check_delta(arguments, device, **options, **norm, norm_eps=1e-5)


def test_decay_of_large_gates(device):
    """softplus where exp overflows, and a state that is forgotten at once."""
    arguments = inputs(1, 2, 1, 2, 16, 32, torch.float32)
    arguments[3] = torch.tensor([[[100.0, -100.0], [19.9, 20.1]]])
    A_log = torch.tensor([-4.0, 0.5])
    check_delta(arguments, device, l2norm_eps=1e-6, A_log=A_log, beta_is_logit=True)


def test_delta_strides(device):
    """Slices of a fused projection, and a state that is a slice of a longer one."""
    fused = numbers(2, 3, 2 * 16 + 2 * 16 + 4 * 8, dtype=torch.float16).to(device)
    q, k, v = fused.split([32, 32, 32], -1)
    q, k, v = q.unflatten(-1, (2, 16)), k.unflatten(-1, (2, 16)), v.unflatten(-1, (4, 8))
    b, a = numbers(2, 3, 8, dtype=torch.float16).to(device).chunk(2, -1)
    states = numbers(2, 5, 16, 8).to(device)
    state = states[:, 1:]
    arguments = [q, k, v, a, b, state]
    options = {"l2norm_eps": 1e-6, "A_log": numbers(4).to(device), "beta_is_logit": True}
    checked("gated_delta_rule_", *arguments, 0.25, **options)
    assert torch.equal(states[:, 0].cpu(), numbers(2, 5, 16, 8)[:, 0])


def test_delta_without_tokens(device):
    arguments = [tensor.to(device) for tensor in inputs(2, 0, 1, 2, 16, 8, torch.float32)]
    before = arguments[5].clone()
    assert gated_delta_rule_(*arguments, 1.0).shape == (2, 0, 2, 8)
    assert torch.equal(arguments[5], before)


@pytest.mark.one_schedule
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_recurrence_of_qwen3_next(device, dtype):
    """The model's own function, with the gates that its layer computes."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, a, b, state = inputs(2, 3, 2, 4, 32, 16, dtype)
    A_log, dt_bias = numbers(4), numbers(4, seed=3)
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    beta = b.float().sigmoid()
    model, model_state = torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    ours = [tensor.to(device) for tensor in (q, k, v, a, b, state)]
    options = {
        "l2norm_eps": 1e-6,
        "A_log": A_log.to(device),
        "dt_bias": dt_bias.to(device),
        "beta_is_logit": True,
    }
    result = gated_delta_rule_(*ours, 32**-0.5, **options)
    for actual, expected in ((result, exact(model)), (ours[5], exact(model_state))):
        allowed = spacing(expected, actual.dtype) + 192 * FLOAT32_EPS
        assert (abs(exact(actual) - expected) <= allowed).all()


def test_steps_one_by_one(device):
    """A token at a time gives what several tokens give."""
    q, k, v, g, beta, state = (t.to(device) for t in inputs(1, 4, 1, 2, 32, 16, torch.float32))
    together = state.clone()
    options = {"l2norm_eps": 1e-6, "A_log": numbers(2).to(device), "beta_is_logit": True}
    whole = gated_delta_rule_(q, k, v, g, beta, together, 0.2, **options)
    steps = [
        gated_delta_rule_(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), state, 0.2, **options)
        for t in range(4)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=0)
    torch.testing.assert_close(state, together, rtol=0, atol=0)
