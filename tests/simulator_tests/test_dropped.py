"""The null device: the host's work is done, but not the device's."""

import resource
import time

import pytest
import torch
import torch.nn.functional as F
from support import tiny_models

import torch_moe_mps

pytestmark = pytest.mark.usefixtures("simulated")

OPERATORS = {
    "add_": lambda x, m: x.add_(1),
    "broadcast": lambda x, m: x[:, :1] * m.t()[0],
    "mean": lambda x, m: x.pow(2).mean(-1, keepdim=True),
    "matmul": lambda x, m: x @ m,
    "linear": lambda x, m: F.linear(x, m.t().contiguous(), m[0]),
    "bmm": lambda x, m: x[None].expand(3, -1, -1) @ m,
    "softmax": lambda x, m: x.softmax(-1, dtype=torch.float32),
    "attention": lambda x, m: F.scaled_dot_product_attention(
        x[None, None], m.t()[None, None], m.t()[None, None]
    ),
    "conv1d": lambda x, m: F.conv1d(x[None], x[:, None, :3], groups=6, padding=2),
    "cat": lambda x, m: torch.cat([torch.tensor([], device=x.device), x, x, m.t()]),
    "cat_last": lambda x, m: torch.cat([x, x.to(torch.float16)], -1),
    "cat_out": lambda x, m: torch.cat([x, x], out=torch.empty(0, device=x.device)),
    "stack": lambda x, m: torch.stack([x, x], 1),
    "transposed": lambda x, m: x.t() * 2,
    "topk": lambda x, m: x.topk(3, -1),
    "sort": lambda x, m: x.sort(0, descending=True),
    "argmax": lambda x, m: x.argmax(-1),
    "index": lambda x, m: x[torch.tensor([5, 0, 0], device=x.device)],
    "index_add_": lambda x, m: x.index_add_(0, torch.tensor([1, 1], device=x.device), m[:2]),
    "embedding": lambda x, m: F.embedding(torch.ones(2, 3, dtype=torch.int64, device=x.device), x),
    "where": lambda x, m: torch.where(x > 0, x, torch.tensor(0.5, device=x.device)),
    "masked_fill": lambda x, m: x.masked_fill(x > 0, float("-inf")),
    "scatter": lambda x, m: torch.zeros_like(x).scatter_(1, x.topk(2).indices, 1.0),
    "split": lambda x, m: x.split([2, 6], -1),
    "contiguous": lambda x, m: x.t().contiguous(),
    "to_half": lambda x, m: x.to(torch.bfloat16),
    "cumsum": lambda x, m: x.cumsum(0) / x.norm(dim=-1, keepdim=True),
    "numbers": lambda x, m: 1 - x.to(torch.bfloat16) * 2 + 1e-6,
    "layer_norm": lambda x, m: F.layer_norm(x, (8,), m.t()[0], m.t()[1]),
    "random": lambda x, m: torch.randn_like(x),
    "multinomial": lambda x, m: x.softmax(-1).multinomial(1),
}


def flat(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def operands(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(1.0, 49).view(6, 8).to(device), torch.ones(8, 8).to(device)


@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_of_operators(simulated, name):
    """Twice: as inferred, and as remembered."""
    expected = flat(OPERATORS[name](*operands("cpu")))
    with simulated.dropped():
        for _ in range(2):
            for found, like in zip(flat(OPERATORS[name](*operands("mps"))), expected, strict=True):
                assert found.device.type == "mps"
                assert (found.shape, found.dtype, found.stride()) == (like.shape, like.dtype, like.stride())


def test_a_shape_error_stays_an_error(simulated):
    x, _ = operands("mps")
    with simulated.dropped():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="6x8 and 6x8"):
                x @ x


def test_nothing_on_floats_is_computed(simulated):
    x, m = operands("mps")
    before = x.cpu()
    with simulated.dropped():
        results = [
            x * 2,
            x @ m,
            x.softmax(-1),
            x.clone(),
            torch.ones_like(x),
            F.silu(x),
            x.add_(1),
            x.zero_(),
        ]
        assert all(not result.cpu().any() for result in results[:-2])
        assert x[0, 0].item() == 1 and (x.max() > 0).item() is False
    assert torch.equal(x.cpu(), before)
    assert torch.equal((x * 2).cpu(), before * 2)


def test_large_models_take_no_memory(simulated):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with simulated.dropped():
        weight = torch.randn(128, 2048, 1 << 17, dtype=torch.bfloat16, device="mps")  # 64 GiB
        assert (weight * 2).shape == weight.shape and weight[7, 7, 7].item() == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_what_decides_a_programs_flow_is_computed(simulated):
    with simulated.dropped():
        ids = torch.arange(5, device="mps") + 2
        assert ids.tolist() == [2, 3, 4, 5, 6] and (ids > 3).sum().item() == 3
        assert (ids > 3).nonzero().ravel().tolist() == [2, 3, 4]
        assert F.one_hot(ids, 8).sum(0).tolist() == [0, 0, 1, 1, 1, 1, 1, 0]
        x = torch.randn(3, 6, device="mps")
        assert x.topk(4).indices.tolist() == [[0, 1, 2, 3]] * 3
        assert x.sort(0).indices.tolist() == [[i] * 6 for i in range(3)]
        assert x.nonzero().shape == (0, 2) and torch.equal(x, torch.ones_like(x))
        assert x.to("cpu").add(1).sum() == 18


def test_kernels_are_encoded_and_forgotten(simulated):
    x, weight = torch.randn(4, 32, device="mps"), torch.ones(32, device="mps")
    with simulated.trace() as commands, simulated.counters() as dispatches:
        computed = torch.ops.moe_mps.fused_residual_norm(x, x, weight, 1e-6)
    with simulated.dropped(), simulated.trace() as in_dropped, simulated.counters() as dispatches_in_dropped:
        forgotten = torch.ops.moe_mps.fused_residual_norm(x, x, weight, 1e-6)
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
    cache = model(input_ids=ids, use_cache=True).past_key_values
    token = ids[:, -1:]
    for _ in range(count):
        start = time.perf_counter()
        logits = model(input_ids=token, past_key_values=cache).logits
        token = logits[:, -1:].argmax(-1)
        assert token.item() == 0
        times.append(time.perf_counter() - start)
    assert (
        logits.shape == (1, 1, 97) and logits.dtype == torch.bfloat16 and cache.get_seq_length() == 5 + count
    )
    return times


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm", None])
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
