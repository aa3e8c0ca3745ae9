"""torch.compile and torch.export of every kind of operator."""

import re

import pytest
import torch
import torch._dynamo.testing
from support.oracles_experts import dequantise
from support.processes import REPOSITORY
from torch import Tensor

from torch_moe_mps import ops
from torch_moe_mps.ops import PUBLIC
from torch_moe_mps.ops._sample import E, H, I, K
from torch_moe_mps.ops._samples import copies, sample_arguments


class Layer(torch.nn.Module):
    """An MoE layer that calls an operator of every kind, including those that write in place."""

    def __init__(self, device: str):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape):
            return torch.nn.Buffer((torch.randn(shape, generator=generator) * H**-0.5).to(device))

        self.norm_weight, self.scale, self.bias = weight(H), weight(E), weight(E)
        self.router, self.gate_up, self.down = weight(E, H), weight(E, 2 * I, H), weight(E, H, I)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ops = torch.ops.moe_mps
        normed, stream = ops.fused_residual_norm(x, x, self.norm_weight, norm_eps=1e-6)
        weights, ids = ops.moe_router(
            normed @ self.router.T, K, scoring="sigmoid", correction_bias=self.bias, norm_topk_prob=True
        )
        _, gate_ids = ops.moe_gate(
            stream, self.router, self.norm_weight, self.scale, K, norm_eps=1e-6, renormalize_after_scale=False
        )
        order, offsets = ops.moe_bucket(ids, num_experts=E)
        out = ops._moe_experts(normed, weights, ids, self.gate_up, self.down, residual=stream)
        slots = ops.expert_mm(normed, gate_ids, self.down.mT.contiguous())
        slots = ops.silu_mul_stacked(slots, slots + 1.0)
        total = ops.weighted_sum_stacked(slots, weights)
        updated = out.clone()
        next_input = ops.weighted_sum_residual_norm_stacked_(
            updated, out.unsqueeze(1).expand(-1, K, -1), weights, self.norm_weight, norm_eps=1e-6
        )
        heads = ops.rms_norm(updated, None, norm_eps=1e-6).view(1, -1, 4, H // 4)
        positions = torch.arange(heads.shape[1], device=x.device).unsqueeze(0)
        cos, sin = (
            ops._pointwise(positions.unsqueeze(-1), f"mul a b f32; {name} %0 f32", "float32", self.scale)
            for name in ("cos", "sin")
        )
        q, k = ops.rope(heads, heads[:, :, :2], cos, sin, rotary_dim=H // 4)
        attended = ops.cached_attention(q, k, k, scale=0.5, window=3, sinks=self.bias[:4])
        next_input = next_input + attended.flatten(2)[0]
        ops.weighted_sum_residual_stacked_(updated, out.unsqueeze(1), weights[:, :1])
        return updated, next_input, total, order, offsets


def check_compiled(device: str, backend: str, *lengths: int) -> None:
    """Any number of tokens from 2 on runs in one graph."""
    layer = Layer(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    torch._dynamo.reset()
    with torch.no_grad():
        for tokens in lengths:
            x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(tokens)).to(device)
            torch.testing.assert_close(compiled(x), layer(x))
            assert counter.frame_count == (2 if tokens == 1 else 1)


@pytest.mark.on("cpu")
def test_compile_with_aot_eager(device):
    check_compiled(device, "aot_eager", 5, 12, 200, 1)


@pytest.mark.sweep
def test_compile_with_inductor():
    check_compiled("cpu", "inductor", 5, 12)


@pytest.mark.on("cpu")
def test_export(device):
    layer = Layer(device)
    x = torch.randn(6, H).to(device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert torch.ops.moe_mps._moe_experts.default in called
    for tokens in (6, 9, 1):
        x = torch.randn(tokens, H).to(device)
        torch.testing.assert_close(program.module()(x), layer(x))


VIEWS = {
    "an entry of a batch": lambda buffer: buffer[1],
    "the last of a strided one": lambda buffer: buffer.movedim(0, 1)[:, 1],
    "the whole": lambda buffer: buffer[0].flatten().unflatten(0, buffer.shape[1:]),
}
IN_PLACE = [name for name in PUBLIC if name.endswith("_")]


def check_in_place_on_views(name: str, backend: str, views: dict) -> None:
    """What is written, and what is around it, as without torch.compile: for sizes that are symbols."""
    base = copies(sample_arguments(name, "cpu", torch.float32))
    written = [each for each in base if each.endswith("_") and base[each] is not None]
    rest = {each: value for each, value in base.items() if each not in written}

    for view in views.values():

        def call(buffers: list[Tensor], rest=rest, view=view) -> tuple:
            targets = {each: view(buffer) for each, buffer in zip(written, buffers, strict=True)}
            return PUBLIC[name](**rest, **targets), [target * 2 for target in targets.values()]

        buffers = [torch.stack([base[each] * 0.5, base[each]]) for each in written]
        expected, own = [buffer.clone() for buffer in buffers], [buffer.clone() for buffer in buffers]
        results = call(expected)
        torch._dynamo.reset()
        with torch.no_grad():
            found = torch.compile(call, backend=backend, dynamic=True)(own)
        torch.testing.assert_close((found, own), (results, expected))


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_views(name):
    check_in_place_on_views(name, "aot_eager_decomp_partition", VIEWS)


def test_in_place_on_views_with_inductor():
    check_in_place_on_views(
        "weighted_sum_residual_stacked_", "inductor", {"entry": VIEWS["an entry of a batch"]}
    )


@pytest.mark.sweep
@pytest.mark.parametrize("name", IN_PLACE)
def test_every_one_in_place_on_views_with_inductor(name):
    check_in_place_on_views(name, "inductor", VIEWS)


def test_eager_calls_between_compiled_ones_compile_nothing():
    """A compiled decode step guards on nothing that calls of other shapes leave."""

    def step(x: Tensor) -> Tensor:
        normed = ops.rms_norm(x, None, norm_eps=1e-6)
        return ops.weighted_sum_residual_stacked_(x.clone(), normed.unsqueeze(1), torch.ones(1, 1))

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    x = torch.randn(1, H)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in range(2, 14):
            torch.testing.assert_close(compiled(x), step(x))
            ops.rms_norm(torch.randn(tokens, H), None, norm_eps=1e-6)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_of_unknown_number():
    """Slots of the tokens that a mask selects, as [T, K, H] and as [T * K, H]."""

    def reduced(mask: Tensor, slots: Tensor, weights: Tensor, flat: bool) -> Tensor:
        rows = mask.nonzero().squeeze(1)
        chosen = slots[rows]
        return ops.moe_weighted_reduce(chosen.flatten(0, 1) if flat else chosen, weights[rows])

    mask, slots, weights = torch.tensor([True, False, True, True]), torch.randn(4, K, H), torch.rand(4, K)
    expected = torch.einsum("tkh,tk->th", slots.double(), weights.double())[mask]
    for flat in (False, True):
        torch._dynamo.reset()
        with torch.no_grad():
            found = torch.compile(reduced, backend="aot_eager", fullgraph=True)(mask, slots, weights, flat)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def right(layer, x, keys, values):
    """The layer of docs/compile.md in float64, by torch's own functions."""

    def dense(name: str) -> torch.Tensor:
        packed, scales, zeros = layer.weight(name)
        return torch.from_numpy(dequantise(packed, scales, zeros, "affine4_32"))

    x, keys, values, router = (each.detach().double() for each in (x, keys, values, layer.router))
    width, weight = keys.shape[-1], torch.ones(x.shape[1], dtype=torch.float64)
    qkv = torch.rms_norm(x, weight.shape, weight, 1e-6) @ dense("qkv").T
    q, k, v = qkv.view(1, len(x), 3, layer.heads, width).permute(2, 0, 3, 1, 4)
    keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
    past = torch.arange(keys.shape[2]) - torch.arange(len(x))[:, None]
    scores = (q @ keys.mT * width**-0.5).masked_fill(past > keys.shape[2] - len(x), -torch.inf)
    x = x + (scores.softmax(-1) @ values).transpose(1, 2).reshape(x.shape) @ dense("out").T
    normed = torch.rms_norm(x, weight.shape, weight, 1e-6)
    best = (normed @ router.T).softmax(-1).topk(2)
    gate, up = torch.einsum("th,tknh->tkn", normed, dense("gate_up")[best.indices]).chunk(2, -1)
    experts = torch.einsum("tkn,tkhn->tkh", torch.nn.functional.silu(gate) * up, dense("down")[best.indices])
    weights = best.values / best.values.sum(-1, keepdim=True)
    return x + (experts * weights.unsqueeze(-1)).sum(1), keys, values


@pytest.mark.slow("torch compiles and exports a layer")
@torch.no_grad()
def test_a_module_of_the_documents_compiles_and_exports():
    """As a whole, for any number of tokens and keys."""
    page = (REPOSITORY / "docs" / "compile.md").read_text()
    (source,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "nn.Module" in block
    )
    exec(compile(source, "compile.md", "exec"), found := {})
    torch.manual_seed(0)
    layer = found["Layer"]()

    def inputs(tokens: int, past: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(tokens, 64), torch.randn(1, 4, past, 16), torch.randn(1, 4, past, 16)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    tokens, past = torch.export.Dim("tokens", min=2), torch.export.Dim("past", min=2)
    shapes = {0: tokens}, {2: past}, {2: past}
    exported = torch.export.export(layer, inputs(3, 5), dynamic_shapes=shapes).module()
    for sizes in ((3, 5), (2, 9), (7, 4)):
        given = inputs(*sizes)
        expected = right(layer, *given)
        for run in (layer, compiled, exported):
            for result, value in zip(run(*given), expected, strict=True):
                torch.testing.assert_close(result.double(), value, rtol=1e-4, atol=1e-4)
