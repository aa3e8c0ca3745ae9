"""expert_mm and _moe_experts against the float64 oracle."""

import pytest
import torch
from numpy.testing import assert_allclose
from support.expert_layers import check_experts, layer
from support.oracles import exact
from support.oracles_experts import assert_close
from support.oracles_experts import expert_mm as expected_mm
from support.oracles_experts import moe_experts as expected_experts
from support.oracles_operators import checked
from support.values import numbers, random

from torch_moe_mps import ops
from torch_moe_mps.ops.families.experts import _moe_experts, expert_mm
from torch_moe_mps.ops.families.quantized import _moe_experts_quantized
from torch_moe_mps.quantization import dequantize, quantize


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("swapped", [{"gate_up"}, {"down"}, {"gate_up", "down"}])
def test_weights_with_swapped_dimensions_in_memory(device, tokens, swapped):
    """Each matrix of a layer may be stored with its input dimension first, whatever the other is."""
    x, weights, ids, gate_up, down = layer(tokens, 2, 8, 64, 32, torch.float32, tokens)
    tensors = [x, weights, ids, gate_up, down]
    for i, name in ((3, "gate_up"), (4, "down")):
        stored = tensors[i].to(device)
        tensors[i] = stored.mT.contiguous().mT if name in swapped else stored
    tensors = [tensor.to(device) for tensor in tensors]
    checked("_moe_experts", *tensors)
    turned = [tensor.mT if i in (3, 4) else tensor for i, tensor in enumerate(tensors)]
    checked("_moe_experts", *turned, transposed=True)


SENTINELS = (-1, -(2**31), 2**31 - 1)


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_sentinels_contribute_and_read_nothing(device, tokens):
    """Experts that no valid id names, tokens without one, and the weights of sentinels are NaN."""
    for ids_dtype, outside in (
        (torch.int32, SENTINELS),
        (torch.int64, (*SENTINELS, 2**32, -(2**32) + 1, 2**62)),
    ):
        x, weights, ids, gate_up, down = layer(tokens, 4, 6, 48, 32, torch.float32, ids_dtype=ids_dtype)
        ids[ids >= 3] += 3
        gate_up[3:], down[3:] = torch.nan, torch.nan
        mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) < 0.5
        ids[mask] = torch.tensor(outside, dtype=ids_dtype)[torch.arange(int(mask.sum())) % len(outside)]
        ids[-1] = 6
        weights[(ids < 0) | (ids >= 6)] = torch.nan
        x[-1] = torch.nan
        x, weights, ids, gate_up, down = (t.to(device) for t in (x, weights, ids, gate_up, down))
        out = checked("_moe_experts", x, weights, ids, gate_up, down)
        slots = checked("expert_mm", x, ids, gate_up)
        assert (out[-1] == 0).all() and (slots[-1] == 0).all()


def test_no_columns(device):
    """A product over nothing is zero; the bias is left, and a sentinel has none."""
    x, weight = torch.zeros(3, 0, device=device), torch.zeros(4, 5, 0, device=device)
    ids = torch.tensor([[1, 3], [0, 9], [2, 2]], dtype=torch.int32, device=device)
    bias = torch.arange(1.0, 21.0, device=device).view(4, 5)
    expected = torch.stack([bias.cpu()[i] if i < 4 else torch.zeros(5) for i in (1, 3, 0, 9, 2, 2)])
    assert torch.equal(expert_mm(x, ids, weight, bias).cpu(), expected.view(3, 2, 5))


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("experts", "intermediate"), [(0, 8), (3, 0)])
def test_no_experts_or_nothing_between_their_matrices(device, experts, intermediate, transposed, tokens):
    """Only the biases of down, the shared expert and the residual are left."""
    x, shared, residual = (random((tokens, 16), torch.float32, seed) for seed in range(3))
    gate_up, down = torch.zeros(experts, 2 * intermediate, 16), torch.zeros(experts, 16, intermediate)
    if transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    ids = torch.tensor([[2, 7]] * tokens, dtype=torch.int32)
    weights, bias = torch.full((tokens, 2), 0.5), random((experts, 16), torch.float32, 3)
    x, weights, ids, gate_up, down = (t.to(device) for t in (x, weights, ids, gate_up, down))
    options = {"transposed": transposed, "shared_out": shared.to(device), "residual": residual.to(device)}
    expected = exact(shared) + exact(residual)
    assert_allclose(
        exact(_moe_experts(x, weights, ids, gate_up, down, **options)), expected, rtol=1e-6, atol=1e-6
    )
    assert not _moe_experts(x, weights, ids, gate_up, down, transposed=transposed).cpu().any()
    if experts:
        expected = expected + 0.5 * exact(bias)[2]
    options["down_bias"] = bias.to(device)
    assert_allclose(
        exact(_moe_experts(x, weights, ids, gate_up, down, **options)), expected, rtol=1e-6, atol=1e-6
    )
    assert not expert_mm(x, ids, gate_up, transposed=transposed).cpu().any()


def test_more_tiles_than_one_pass_writes(device):
    """The sort moves the places of its pairs on only when every tile has been written from them."""
    check_experts(device, layer(80, 4, 48, 32, 16, torch.float32))


def test_the_same_bits_every_time(device, every_order):
    """In float32, where another order of the slots' sum shows."""
    for tokens in (1, 6, 40):
        arguments = [t.to(device) for t in layer(tokens, 8, 16, 64, 32, torch.float32)]
        first, *others = [_moe_experts(*arguments).cpu() for _ in every_order()]
        assert all(torch.equal(other, first) for other in others)


def test_sums_are_not_in_16_bit(device):
    """4096 halves of the smallest step that 1 has in bfloat16: summed in bfloat16 they would vanish."""
    x = torch.full((1, 4097), 2.0**-9, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    weight = torch.ones(1, 3, 4097, dtype=torch.bfloat16)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    assert (expert_mm(x.to(device), ids.to(device), weight.to(device)) == 9.0).all()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_large_arguments_of_activations(device, activation):
    """Where exp or tanh leave float32 the activation has its limit: 0 or the gate."""
    values = torch.tensor([-3e38, -1e4, -100.0, 100.0, 1e4, 3e38])
    gate_up = torch.stack([values, torch.ones(6)], dim=1).view(1, 12, 1)
    down = torch.ones(1, 1, 1, device=device)
    one, ids = torch.ones(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    for which in range(6):
        rows = gate_up[:, 2 * which : 2 * which + 2].to(device)
        out = _moe_experts(one, one, ids, rows, down, activation=activation)
        limit = values[which].clamp(min=0)
        limit = 2 * limit.clamp(max=7) if activation == "swiglu_oai" else limit
        torch.testing.assert_close(out.cpu(), limit.view(1, 1), rtol=1e-4, atol=1e-30)


def test_nan_and_infinity_stay_with_their_token(device):
    for tokens in (3, 40):
        arguments = list(layer(tokens, 2, 4, 32, 16, torch.float32))
        arguments[0][0, 3], arguments[0][1, 5] = torch.nan, torch.inf
        out = checked("_moe_experts", *(tensor.to(device) for tensor in arguments))
        assert out[0].isnan().all() and not out[1].isfinite().any()


@pytest.mark.sweep
def test_weights_over_4_gib(device):
    """Only the pages of the expert that is read exist: beyond element 2^31 and byte 2^32."""
    hidden, rows, experts = 1024, 1024, 2**11 + 5
    weight = torch.empty(experts, rows, hidden, dtype=torch.bfloat16, device=device)
    last = random((rows, hidden), torch.bfloat16, 0, hidden**-0.5)
    weight[-1] = last.to(device)
    assert (experts - 1) * rows * hidden > 2**31
    ids = torch.full((1, 1), experts - 1, dtype=torch.int32)
    x = random((1, hidden), torch.bfloat16, 1)
    out = expert_mm(x.to(device), ids.to(device), weight)
    zero = torch.zeros_like(ids)
    assert_close(out, expected_mm(x, exact(last)[None], zero))
    gate_up, down = weight, weight[:, :, : rows // 2]
    ones = torch.ones(1, 1, device=device)
    out = _moe_experts(x.to(device), ones, ids.to(device), gate_up, down)
    expected = expected_experts(x, exact(last)[None], exact(last)[None, :, : rows // 2], zero, ones, {})
    assert_close(out, expected)


@pytest.mark.parametrize("tokens", [2, 33])
@pytest.mark.parametrize("transposed", [False, True])
def test_more_experts_than_can_be_sorted(device, tokens, transposed):
    """moe_bucket's counters have no room for them; each pair then reads its expert by itself."""
    check_experts(device, layer(tokens, 2, 3000, 16, 8, torch.float32), transposed=transposed)


def test_the_stack_is_never_copied():
    """On the CPU: the weights seem to be 64 GiB, in 4 MiB of memory; a copy would not fit."""
    weight = random((1, 1024, 1024), torch.float32, 0, 1 / 32).expand(2**14, -1, -1)
    x = random((2, 1024), torch.float32, 1)
    ids = torch.tensor([[3, 16000], [7, 3]])
    weights = torch.ones(2, 2)
    zero = torch.zeros_like(ids)
    for transposed in (False, True):
        stored = weight.mT if transposed else weight
        assert_close(
            expert_mm(x, ids, stored, None, transposed=transposed), expected_mm(x, exact(weight[:1]), zero)
        )
        out = _moe_experts(x, weights, ids, stored, stored, gated=False, transposed=transposed)
        expected = expected_experts(x, *2 * [exact(weight[:1])], zero, weights, {"gated": False})
        assert_close(out, expected)


def test_a_long_prefill_is_cut_into_pieces(monkeypatch):
    """On the CPU: the pieces of the reference meet inside an expert and between two."""
    monkeypatch.setattr("torch_moe_mps.ops.families.experts.PAIRS_AT_ONCE", 7)
    check_experts("cpu", layer(29, 3, 5, 32, 16, torch.float32), down_bias=random((5, 32), torch.float32, 3))
    x, _, ids, weight, _ = layer(29, 3, 5, 32, 16, torch.float32)
    ids[::2] = -1
    assert_close(expert_mm(x, ids, weight), expected_mm(x, exact(weight), ids))


LEADING = [(), (2, 3), (0, 4), (2, 1, 20)]


@pytest.mark.parametrize("leading", LEADING)
def test_leading_dimensions(device, leading):
    """Dense and quantised layers, with a shared expert, a norm and a residual, against float64."""
    hidden, inner, experts, top_k = 64, 32, 4, 2
    x, residual, shared = (numbers(*leading, hidden, seed=seed) for seed in (1, 2, 3))
    gate, weights = numbers(*leading, seed=4), numbers(*leading, top_k, seed=5)
    ids = torch.randint(0, experts, (*leading, top_k), generator=torch.Generator().manual_seed(6))
    gate_up = quantize(numbers(experts, 2 * inner, hidden, seed=7) / 8, 4, 32)
    down = quantize(numbers(experts, hidden, inner, seed=8) / 8, 4, 32)
    norm_weight = numbers(hidden, seed=9)
    around = {"shared_gate": gate, "shared_out": shared, "residual": residual, "norm_weight": norm_weight}
    placed = {name: tensor.to(device) for name, tensor in around.items()}
    first, second = dequantize(gate_up), dequantize(down)
    rows = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight
    a, b = torch.einsum("...h,...knh->...kn", rows, first.double()[ids]).chunk(2, -1)
    slots = torch.einsum("...kn,...khn->...kh", torch.nn.functional.silu(a) * b, second.double()[ids])
    right = (slots * weights.unsqueeze(-1)).sum(-2) + gate.unsqueeze(-1) * shared + residual
    dense = [tensor.to(device) for tensor in (x, weights, ids, first, second)]
    packed = [tensor.to(device) for tensor in (x, weights, ids, *gate_up, *down)]
    for out in (
        _moe_experts(*dense, **placed),
        _moe_experts_quantized(*packed, format=gate_up.format.name, **placed),
    ):
        torch.testing.assert_close(out.cpu().double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("leading", LEADING)
def test_leading_dimensions_of_single_steps(device, leading):
    """A layer in one operator for each step, with an adapter, and its gradients, against float64."""
    hidden, inner, experts, top_k, rank = 64, 32, 4, 2, 3
    ids = torch.randint(0, experts, (*leading, top_k), generator=torch.Generator().manual_seed(6))
    gate_up = quantize(numbers(experts, 2 * inner, hidden, seed=7) / 8, 8, 32)
    tensors = {
        "x": numbers(*leading, hidden, seed=1),
        "weights": numbers(*leading, top_k, seed=2),
        "down": numbers(experts, hidden, inner, seed=3) / 8,
        "a": numbers(rank * experts, hidden, seed=4) / 8,
        "b": numbers(2 * inner, rank * experts, seed=5),
    }
    leaves = {name: tensor.clone().to(device).requires_grad_() for name, tensor in tensors.items()}
    doubles = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    dy, gate, shared = (
        numbers(*shape, seed=8) for shape in ((*leading, hidden), leading, (*leading, hidden))
    )

    on_device, packed = ids.to(device), [tensor.to(device) for tensor in gate_up]
    x, weights, down, a, b = leaves.values()
    rows = ops.expert_qmm(x, on_device, *packed, format=gate_up.format.name)
    pairs = ops.moe_bucket(on_device, num_experts=experts)
    listed = dict(zip(("pair_order", "offsets"), pairs, strict=True))
    rows = ops.expert_lora(rows, x, on_device, a, b, num_experts=experts, **listed, scaling=0.5)
    slots = ops.expert_mm(ops.expert_activation(rows), on_device, down)
    out = ops.moe_weighted_reduce(slots, weights)
    out.backward(dy.to(device))

    x, weights, down, a, b = doubles.values()
    of_a = torch.einsum("...h,...krh->...kr", x, a.unflatten(0, (experts, rank))[ids])
    of_b = torch.einsum("...kr,...knr->...kn", of_a, b.unflatten(1, (rank, experts)).permute(2, 0, 1)[ids])
    right = torch.einsum("...h,...knh->...kn", x, dequantize(gate_up).double()[ids]) + 0.5 * of_b
    half, up = right.chunk(2, -1)
    right = torch.einsum("...kn,...khn->...kh", torch.nn.functional.silu(half) * up, down[ids])
    right = (right * weights.unsqueeze(-1)).sum(-2)
    right.backward(dy.double())
    torch.testing.assert_close(out.cpu().double(), right, rtol=1e-4, atol=1e-4)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad.cpu().double(), doubles[name].grad, rtol=1e-4, atol=1e-4)

    order, offsets = pairs
    assert torch.equal(order.cpu(), ids.flatten().argsort(stable=True).int())
    assert offsets.diff().tolist() == ids.flatten().bincount(minlength=experts).tolist()
    assert torch.equal(
        ops.moe_compute_ids_tpe(on_device, num_experts=experts, gate_up_rows=64, down_rows=32)[0],
        offsets.diff(),
    )
    with torch.no_grad():
        around = (gate.to(device), shared.to(device))
        out = ops.moe_weighted_reduce(slots.flatten(0, -2), weights.float().to(device), *around)
    right = right + gate.unsqueeze(-1) * shared
    torch.testing.assert_close(out.cpu().double(), right.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_products_beyond_the_range_of_float16(device, tokens):
    """76,800, which float16 does not hold, less 20,000."""
    dtype, expected = torch.float16, 240.0 * 320.0 - 20000.0
    x = torch.full((tokens, 1), 240.0, dtype=dtype, device=device)
    weight = torch.full((1, 2, 1), 320.0, dtype=dtype, device=device)
    bias = torch.full((1, 2), -20000.0, dtype=dtype, device=device)
    ids = torch.zeros(tokens, 1, dtype=torch.int32, device=device)
    found = expert_mm(x, ids, weight, bias).cpu()
    assert torch.equal(found, torch.full((tokens, 1, 2), expected, dtype=torch.float64).to(dtype))
    one = torch.ones(tokens, 1, device=device)
    down = torch.ones(1, 1, 2, dtype=dtype, device=device) / 2
    layer = _moe_experts(x, one, ids, weight, down, gate_up_bias=bias, activation="relu", gated=False)
    assert torch.equal(layer.cpu(), torch.full((tokens, 1), expected, dtype=torch.float64).to(dtype))
