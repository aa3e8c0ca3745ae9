"""The null device: the host's work is done, but not the device's."""

import resource

import pytest
import torch
import torch.nn.functional as F

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
