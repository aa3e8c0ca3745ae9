"""The package on the null device: the host's work is done, but not the device's."""

import time

import pytest
import torch
from support import tiny_models
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

pytestmark = pytest.mark.usefixtures("simulated")


def test_kernels_are_encoded_and_forgotten(simulated):
    x, weight = torch.randn(4, 32, device="mps"), torch.ones(32, device="mps")
    with simulated.trace() as commands, simulated.counters() as dispatches:
        computed = torch.ops.moe_mps.fused_residual_norm(x, x, weight, norm_eps=1e-6)
    with simulated.dropped(), simulated.trace() as in_dropped, simulated.counters() as dispatches_in_dropped:
        forgotten = torch.ops.moe_mps.fused_residual_norm(x, x, weight, norm_eps=1e-6)
    assert list(in_dropped) == list(commands) and len(dispatches) == 1 and not dispatches_in_dropped
    for zeros, like in zip(forgotten, computed, strict=True):
        assert zeros.shape == like.shape and like.cpu().all() and not zeros.cpu().any()


def tiny_model(implementation: str | None):
    """On mps; accelerated unless one of its own implementations is named."""
    model = tiny_models.tiny_model("qwen3_moe", torch.bfloat16).to("mps")
    if implementation:
        model.set_experts_implementation(implementation)
    else:
        torch_moe_mps.accelerate(model)
    return model


def decode_steps(model, count: int) -> list[float]:
    """Seconds of each greedy decode step after a prompt of five tokens."""
    ids, times = torch.randint(2, 90, (1, 5)).to("mps"), []
    cache = cache_among(model(input_ids=ids, use_cache=True))
    token = ids[:, -1:]
    for _ in range(count):
        start = time.perf_counter()
        logits = model(input_ids=token, **cache_argument(model, cache)).logits
        token = logits[:, -1:].argmax(-1)
        assert token.item() == 0
        times.append(time.perf_counter() - start)
    assert (
        logits.shape == (1, 1, 97) and logits.dtype == torch.bfloat16 and cache.get_seq_length() == 5 + count
    )
    return times


@torch.no_grad()
@pytest.mark.parametrize(
    "implementation", in_sweep(["eager", "batched_mm", "grouped_mm", None], ["eager", None])
)
def test_decode_steps_of_a_model(simulated, implementation):
    model = tiny_model(implementation)
    for validate in (True, False):
        with simulated.dropped(validate):
            times = decode_steps(model, 12)
        print(f"{implementation or 'accelerated'}, validate={validate}: {1e3 * min(times):.2f} ms a token")
        assert min(times) < 0.5


@torch.no_grad()
def test_an_accelerated_model_encodes_what_it_encodes_otherwise(simulated):
    """Apart from where it waits: without values to compute, aten does not wait for the device."""
    model, traces = tiny_model(None), []
    ids = torch.randint(2, 90, (1, 5)).to("mps")
    for dropped in (False, True):
        with simulated.trace() as commands:
            if dropped:
                with simulated.dropped():
                    model(input_ids=ids).logits.cpu()
            else:
                model(input_ids=ids).logits.cpu()
        traces.append([line.split(":")[0] for line in commands if line != "synchronize"])
    assert traces[0] == traces[1] and len(traces[0]) > 6


@torch.no_grad()
def test_experts_of_an_eager_token_differ(simulated):
    """Its loop runs once for each of the two that the router chose, as on a device that computes."""
    model, inputs = tiny_model("eager"), []
    act = model.model.layers[1].mlp.experts.act_fn
    act.register_forward_hook(lambda module, arguments, output: inputs.append(output.shape))
    with simulated.dropped():
        decode_steps(model, 1)
        inputs.clear()
        decode_steps(model, 1)
    assert len(inputs) > 0 and inputs[-2:] == [(1, 24), (1, 24)]


@torch.no_grad()
def test_generation(simulated):
    model = tiny_model(None)
    ids = torch.randint(2, 90, (2, 5)).to("mps")
    with simulated.dropped():
        out = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert (
            torch.equal(out[:, :5].cpu(), ids.cpu()) and out.shape == (2, 11) and not out[:, 5:].cpu().any()
        )
