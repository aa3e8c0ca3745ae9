"""Linear attention by the gated delta rule, for prompts and single tokens."""

import pytest
import torch
from support.ops.pending import Steps
from support.oracles_operators import checked
from support.values import far_apart, numbers

from torch_moe_mps.ops.families.gated_delta_rule import _gated_delta_rule_, gated_delta_rule_


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
    name = "_gated_delta_rule_" if "gate" in options else "gated_delta_rule_"
    result = checked(name, *arguments, arguments[0].shape[-1] ** -0.5, **options)
    assert result.dtype == arguments[2].dtype


def test_values_of_tokens_far_apart(device):
    (q, k, v, g, state), beta = inputs(1, 2, 1, 2, 16, 8, torch.float16)
    q, k, v, g, state, beta = (tensor.to(device) for tensor in (q, k, v, g, state, beta))
    options = {"beta": beta, "A_log": numbers(2).to(device), **RULE}
    checked("gated_delta_rule_", q, k, far_apart(v, 1), g, state, scale=0.25, **options)


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
    result = gated_delta_rule_(*on_device, scale=0.25, beta=beta.abs().to(device), l2norm_eps=1e-6)
    finite = result.isfinite().cpu()
    assert finite[0, :, 0, [0, 1, 3, 4, 5, 6, 7]].all() and finite[0, :, 1, [0, 1, 2, 3, 4, 6, 7]].all()
    assert finite[0, 0, 0].all() and not finite[0, 1:, 0, 2].any() and not finite[0, :, 1, 5].any()


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
            results.append(gated_delta_rule_(*heads, None if options else decay, own, scale=0.2, **more))
        found = torch.cat(results, 1).cpu(), own.cpu()
        expected = expected or found
        assert all(map(torch.equal, found, expected))


# Every function of the decay and of beta.
DECAYS = [
    {"decay_form": "softplus", "beta_activation": "sigmoid", "A_log": numbers(5), "dt_bias": numbers(5)},
    {"decay_form": "sigmoid", "A_log": numbers(5), "lower_bound": -5.0},
    {"decay_form": "times_beta", "beta_activation": "softplus", "A_log": numbers(5)},
]


@pytest.mark.parametrize("options", DECAYS)
def test_a_batch_of_prompts_in_two_pieces(device, options):
    """Heads of several prompts, which fill no vector: each is computed alike, wherever it lies in memory."""
    (*heads, g, state), beta = inputs(2, 7, 1, 5, 6, 3, torch.float32)
    options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    expected = None
    for cut in range(7):
        own, results = state.to(device, copy=True), []
        for part in zip(*(x.to(device).split([cut, 7 - cut], 1) for x in (*heads, g, beta)), strict=True):
            *of_heads, decay, strength = part
            decay = None if options["decay_form"] == "times_beta" else decay
            results.append(gated_delta_rule_(*of_heads, decay, own, scale=0.4, beta=strength, **options))
        found = torch.cat(results, 1).cpu(), own.cpu()
        expected = expected or found
        assert all(map(torch.equal, found, expected)), cut


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
        decay = None if options else decay
        return _gated_delta_rule_(*heads, decay, *states, scale=0.2, **more, **pending)

    pending = torch.full((2, 2, 5, 20 + 16 + 2 + (20 if wide else 1)), float("nan"), device=device)
    Steps(device).check([state.to(device)], pending, call)


def test_pending_tokens_that_leave_no_room_for_those_of_the_call(device):
    """Of heads of 200, 8 tokens are staged at a time: results and states have the bits of one call."""
    (q, k, v, g, state), beta = inputs(1, 11, 1, 1, 200, 4, torch.float32)
    heads = [tensor.to(device) for tensor in (q, k, v, -g.abs(), beta.abs())]
    whole, own = state.to(device), state.to(device, copy=True)
    *of_heads, strength = heads
    expected = gated_delta_rule_(*of_heads, whole, scale=0.2, beta=strength, l2norm_eps=1e-6)
    pending, found = torch.full((1, 1, 8, 200 + 4 + 3), float("nan"), device=device), []
    parts = zip(*(each.split([5, 5, 1], 1) for each in heads), strict=True)
    for count, tokens in zip((0, 5, 5), parts, strict=True):
        *of_heads, strength = tokens
        counts = torch.tensor([[count]], dtype=torch.int32, device=device)
        kept = {"pending_": pending, "counts": counts, "keep": strength.shape[1] > 1}
        found.append(_gated_delta_rule_(*of_heads, own, scale=0.2, beta=strength, l2norm_eps=1e-6, **kept))
    assert torch.equal(torch.cat(found, 1).cpu(), expected.cpu()) and torch.equal(own.cpu(), whole.cpu())


def test_a_call_of_no_tokens_takes_in_those_that_are_pending(device):
    (q, k, v, g, state), beta = inputs(1, 3, 1, 2, 20, 16, torch.float32)
    q, k, v, g, state, beta = (tensor.to(device) for tensor in (q, k, v, -g.abs(), state, beta.abs()))
    pending, right = torch.zeros(1, 2, 8, 39, device=device), state.clone()
    two, none = (torch.tensor([[n]], dtype=torch.int32, device=device) for n in (2, 0))
    gated_delta_rule_(q[:, :2], k[:, :2], v[:, :2], g[:, :2], right, scale=0.2, beta=beta[:, :2])
    _gated_delta_rule_(q, k, v, g, state, scale=0.2, beta=beta, pending_=pending, counts=none, keep=True)
    empty = (tensor[:, :0] for tensor in (q, k, v, g))
    out = _gated_delta_rule_(*empty, state, scale=0.2, beta=beta[:, :0], pending_=pending, counts=two)
    assert out.shape == (1, 0, 2, 16) and torch.equal(state, right)


@pytest.mark.sweep
@pytest.mark.parametrize("decay", [-5.0, -1e-3, -1e-6, 0.0])
@pytest.mark.parametrize("wide", [False, True])
def test_long_contexts(device, decay, wide):
    """10,000 tokens against float64."""
    (q, k, v, g, state), beta = inputs(1, 10_000, 1, 1, 64, 16, torch.float32, wide=wide)
    check([q, k, v, decay * g.abs().clamp(max=1.0), state], device, l2norm_eps=1e-6, beta=beta.sigmoid())
