"""Gradients of the operators that declare a backward, against float64."""

import warnings

import pytest
import torch
from support.ops.combine import clamped
from support.oracles_experts import dequantise
from support.sweep import in_sweep
from torch import Tensor

from torch_moe_mps.ops._formats import Format
from torch_moe_mps.ops._registry import WITH_BACKWARD
from torch_moe_mps.ops._sample import Sample
from torch_moe_mps.ops._samples import packet

FORMS = in_sweep(
    ("affine4_32", "affine3_32", "mxfp4", "nvfp4", "q4_k", "q6_k", "iq2_xs", "q8_0"),
    ("affine4_32", "affine3_32", "mxfp4", "nvfp4", "q4_k"),
)
# 8 and -1 are no experts; 1, 2, 4 and 6 have no pair.
IDS = torch.tensor([[0, 7], [3, 8], [5, 3], [-1, 3], [0, 3]])


def sample(form: str, dtype: torch.dtype = torch.float32) -> Sample:
    return Sample("cpu", dtype, format=Format.named(form), tokens=5)


def dense(weight: dict, form: str) -> Tensor:
    """The values in float64 by numpy's own decoding."""
    return torch.from_numpy(dequantise(weight["packed"], weight["scales"], weight["zeros"], form))


def near(result: Tensor, right: Tensor, tolerance: float = 5e-6) -> None:
    assert result.shape == right.shape
    assert (result.cpu().double() - right).norm() <= tolerance * right.norm(), (result, right)


def of_pairs(experts: int) -> Tensor:
    """The experts of all pairs, where `experts` is none."""
    return IDS.where((IDS >= 0) & (experts > IDS), experts)


def placed(weight: dict, device: str) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in weight.values()]


@pytest.mark.parametrize("form", FORMS)
def test_of_a_linear_layer(device, form):
    s = sample(form)
    weight = s.quantized("", s.I, s.H, ())
    matrix = dense(weight, form)
    x, bias, residual, dy = s.values(2, 5, s.H), s.values(s.I), s.values(2, 5, s.I), s.values(2, 5, s.I)
    leaves = [tensor.to(device).requires_grad_() for tensor in (x, bias, residual)]
    out = packet("linear_quantized")(
        leaves[0], *placed(weight, device), format=form, bias=leaves[1], residual=leaves[2]
    )
    out.backward(dy.to(device))
    dy = dy.double()
    for leaf, right in zip(leaves, (dy @ matrix, dy.sum((0, 1)), dy), strict=True):
        near(leaf.grad, right)


@pytest.mark.parametrize("per_pair", [False, True], ids=["of tokens", "of pairs"])
@pytest.mark.parametrize("form", FORMS)
def test_of_experts(device, form, per_pair):
    s = sample(form)
    weight = s.quantized("", s.I, s.H)
    matrices = torch.cat((dense(weight, form), torch.zeros(1, s.I, s.H)))  # of no expert: zeros
    x, dy = s.values(5, *(2,) * per_pair, s.H), s.values(5, 2, s.I)
    leaf = x.to(device).requires_grad_()
    packet("expert_qmm")(leaf, IDS.to(device), *placed(weight, device), format=form).backward(dy.to(device))
    right = torch.einsum("tkn,tknh->tkh", dy.double(), matrices[of_pairs(s.E)])
    near(leaf.grad, right if per_pair else right.sum(1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("per_pair", [False, True])
def test_of_dense_experts(device, per_pair, transposed):
    s = sample("affine4_32")
    weight, dy = s.values(s.E, s.I, s.H), s.values(5, 2, s.I)
    x = s.values(5, *(2,) * per_pair, s.H)
    stored = weight.mT.contiguous() if transposed else weight
    leaves = [tensor.clone().to(device).requires_grad_() for tensor in (x, stored)]
    packet("expert_mm")(leaves[0], IDS.to(device), leaves[1], None, transposed=transposed).backward(
        dy.to(device)
    )
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    chosen = torch.cat((doubles[1], torch.zeros(1, s.I, s.H)))[of_pairs(s.E)]
    torch.einsum("tkh,tknh->tkn" if per_pair else "th,tknh->tkn", doubles[0], chosen).backward(dy.double())
    near(leaves[0].grad, doubles[0].grad)
    right = doubles[1].grad
    near(leaves[1].grad, right.mT if transposed else right)


def factors(s: Sample, rank: int = 3) -> tuple[Tensor, Tensor]:
    return s.values(rank * s.E, s.H), s.values(s.I, rank * s.E)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("per_pair", [False, True], ids=["of tokens", "of pairs"])
def test_of_an_adapter_of_experts(device, per_pair, listed):
    """By float64's autograd, of the factors taken apart as PEFT does it."""
    s = sample("affine4_32")
    x, added = s.values(5, *(2,) * per_pair, s.H), s.values(5, 2, s.I)
    dy, tensors = s.values(5, 2, s.I), (added, x, *factors(s))
    leaves = [tensor.clone().to(device).requires_grad_() for tensor in tensors]
    ids = IDS.to(device)
    pairs = packet("moe_bucket")(ids, num_experts=s.E) if listed else ()
    options = {"num_experts": s.E, "scaling": 0.5} | dict(zip(("pair_order", "offsets"), pairs, strict=False))
    packet("expert_lora")(*leaves[:2], ids, *leaves[2:], **options).backward(dy.to(device))
    doubles = [tensor.double().requires_grad_() for tensor in tensors]
    a, b = doubles[2].unflatten(0, (s.E, -1)), doubles[3].unflatten(1, (-1, s.E)).permute(2, 0, 1)
    chosen = of_pairs(s.E)
    a, b = (torch.cat((each, torch.zeros_like(each[:1])))[chosen] for each in (a, b))
    inner = torch.einsum("tkh,tkrh->tkr" if per_pair else "th,tkrh->tkr", doubles[1], a)
    (doubles[0] + 0.5 * torch.einsum("tkr,tknr->tkn", inner, b)).backward(dy.double())
    for leaf, right in zip(leaves, doubles, strict=True):
        near(leaf.grad, right.grad)


def test_of_a_weighted_sum(device):
    s = sample("affine4_32")
    weights, slots, dy = s.values(5, 2), s.values(5, 2, s.H), s.values(5, s.H)
    leaves = [tensor.to(device).requires_grad_() for tensor in (slots, weights)]
    packet("moe_weighted_reduce")(*leaves).backward(dy.to(device))
    near(leaves[0].grad, weights.double().unsqueeze(-1) * dy.double().unsqueeze(1))
    near(leaves[1].grad, (slots.double() * dy.double().unsqueeze(1)).sum(-1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_of_an_activation(device, interleaved):
    """Where a clamp takes another value the gradient is zero, at its limit it is not."""
    s = sample("affine4_32")
    rows, dy = 4 * s.values(5, 2, 64), s.values(5, 2, 32)
    rows[0, 0, :8] = 7.0
    leaf = rows.to(device).requires_grad_()
    out = packet("expert_activation")(
        leaf, activation="swiglu_oai", alpha=1.5, limit=7.0, interleaved=interleaved
    )
    out.backward(dy.to(device))
    right = rows.detach().double().requires_grad_()
    gate, up = (right[..., 0::2], right[..., 1::2]) if interleaved else right.chunk(2, -1)
    gate, up = clamped(gate, 7.0), clamped(up, 7.0, -7.0)
    ((up + 1) * gate * torch.sigmoid(1.5 * gate)).backward(dy.double())
    assert (right.grad == 0).any()
    near(leaf.grad, right.grad, 1e-6)


def test_of_a_stack_that_is_stored_the_other_way(simulated):
    """Its memory is [E, inputs, rows], whatever the argument says: it is read where it lies."""
    s = sample("affine4_32")
    stored, x = s.values(s.E, s.H, s.I), s.values(5, s.H)
    matrices = torch.cat((stored.mT.double(), torch.zeros(1, s.I, s.H)))
    right = torch.einsum("th,tknh->tkn", x.double(), matrices[of_pairs(s.E)])
    on_device = stored.to("mps")
    for weight, transposed in ((on_device, True), (on_device.mT, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            near(packet("expert_mm")(x.to("mps"), IDS.to("mps"), weight, None, transposed=transposed), right)


@pytest.mark.parametrize("operator", ["linear_quantized", "expert_qmm"])
def test_in_bfloat16(operator):
    """The error is at most 1.2 of that of a dense product with the values rounded to bfloat16."""
    s, form = (
        Sample("cpu", torch.bfloat16, format=Format.named("affine4_32"), tokens=64, wider=4),
        "affine4_32",
    )
    experts = () if operator == "linear_quantized" else (s.E,)
    weight = s.quantized("", s.I, s.H, experts)
    matrices = dense(weight, form)
    ids = torch.arange(128).view(64, 2) % s.E
    dy = s.values(64, *(2,) * len(experts), s.I)
    leaf = s.values(64, s.H).requires_grad_()
    chosen = (ids,) if experts else ()
    packet(operator)(leaf, *chosen, *weight.values(), format=form).backward(dy)
    chosen = matrices[ids] if experts else matrices

    def product(of: torch.dtype) -> Tensor:
        if experts:
            return torch.einsum("tkn,tknh->tkh", dy.to(of), chosen.to(of)).sum(1)
        return dy.to(of) @ chosen.to(of)

    right = product(torch.float64)
    assert (leaf.grad.double() - right).norm() <= 1.2 * (product(torch.bfloat16).double() - right).norm()


def test_a_frozen_layer_saves_no_input():
    s, saved = sample("affine4_32"), []
    weight = s.quantized("", s.I, s.H, ())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        packet("linear_quantized")(s.values(5, s.H).requires_grad_(), *weight.values(), format="affine4_32")
    assert not saved


@pytest.mark.parametrize("operator", sorted(WITH_BACKWARD))
def test_no_second_derivative(operator):
    s = sample("affine4_32")
    calls = {
        "linear_quantized": lambda x: (x, *s.quantized("", s.I, s.H, ()).values()),
        "expert_qmm": lambda x: (x, IDS, *s.quantized("", s.I, s.H).values()),
        "expert_mm": lambda x: (x, IDS, s.values(s.E, s.I, s.H)),
        "expert_lora": lambda x: (s.values(5, 2, s.I), x, IDS, *factors(s)),
        "moe_weighted_reduce": lambda x: (s.values(5, s.H, 3), x),
        "expert_activation": lambda x: (x,),
    }
    options = {name: {"format": "affine4_32"} for name in ("linear_quantized", "expert_qmm")}
    options["expert_lora"] = {"num_experts": s.E}
    x = s.values(5, s.H).requires_grad_()
    (gradient,) = torch.autograd.grad(
        packet(operator)(*calls[operator](x), **options.get(operator, {})).square().sum(),
        x,
        create_graph=True,
    )
    with pytest.raises(RuntimeError, match=f"moe_mps::{operator}: a backward of its backward"):
        gradient.sum().backward()


def test_compiled():
    """Forward and backward of a frozen layer and of experts are one graph each, with equal results."""
    s, form = sample("affine4_32"), "affine4_32"
    linear, experts = s.quantized("", s.H, s.H, ()), s.quantized("", s.I, s.H)

    def run(x: Tensor, dense: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = packet("linear_quantized")(x, *linear.values(), format=form)
        slots = packet("expert_qmm")(y.tanh(), IDS, *experts.values(), format=form)
        slots = packet("expert_lora")(slots, y, IDS, a, b, num_experts=s.E)
        return slots + packet("expert_mm")(y, IDS, dense)

    tensors = s.values(5, s.H), s.values(s.E, s.I, s.H), *factors(s)
    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        function(*leaves).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("argument", ["scales", "zeros", "bias"])
def test_other_gradients_fail_by_name(argument):
    s = sample("affine4_32")
    arguments = {"x": s.values(5, s.H), **s.quantized("", s.I, s.H), "topk_ids": IDS, "format": "affine4_32"}
    arguments["bias"] = s.values(s.E, s.I)
    arguments[argument].requires_grad_()
    out = packet("expert_qmm")(**arguments)
    with pytest.raises(
        RuntimeError, match=f"expert_qmm: backward is not implemented for {argument}, only for x"
    ):
        out.sum().backward()


def test_beside_other_arguments_they_fail_by_name():
    s = sample("affine4_32")
    x, weight = s.values(5, s.H).requires_grad_(), s.quantized("", s.I, s.H, ())
    out = packet("linear_quantized")(x, *weight.values(), format="affine4_32", norm_weight=s.values(s.H))
    with pytest.raises(RuntimeError, match="backward is not implemented with norm_weight"):
        out.sum().backward()


def in_float64(s: Sample, name: str) -> tuple[list, dict]:
    """Good arguments in float64 on the CPU: those with a gradient, and the others by name."""

    def doubles(*shape):
        return s.values(*shape).double().requires_grad_()

    ids, rank = IDS[:, :2], 3
    weight, stack = s.quantized("", s.I, s.H, ()), s.quantized("", s.I, s.H)
    cases = {
        "expert_activation": ({"x": doubles(5, 2 * s.I)}, {"activation": "gelu_tanh"}),
        "moe_weighted_reduce": ({"expert_out": doubles(5, 2, s.H), "topk_weights": doubles(5, 2)}, {}),
        "expert_mm": ({"x": doubles(5, s.H), "weight": doubles(s.E, s.I, s.H)}, {"topk_ids": ids}),
        "expert_qmm": ({"x": doubles(5, s.H)}, stack | {"topk_ids": ids, "format": "affine4_32"}),
        "linear_quantized": (
            {"x": doubles(5, s.H), "bias": doubles(s.I), "residual": doubles(5, s.I)},
            weight | {"format": "affine4_32"},
        ),
        "expert_lora": (
            {"added": doubles(5, 2, s.I), "x": doubles(5, s.H)}
            | {"a": doubles(rank * s.E, s.H), "b": doubles(s.I, rank * s.E)},
            {"topk_ids": ids, "num_experts": s.E, "scaling": 0.5},
        ),
    }
    return cases[name]


@pytest.mark.parametrize("name", sorted(WITH_BACKWARD))
def test_gradcheck(name):
    """Finite differences in float64, which the references compute in."""
    inputs, others = in_float64(sample("affine4_32"), name)
    assert set(inputs) == {*WITH_BACKWARD[name].reads}

    def call(*tensors):
        return packet(name)(**dict(zip(inputs, tensors, strict=True)), **others)

    assert call(*inputs.values()).dtype == torch.float64
    assert torch.autograd.gradcheck(call, [*inputs.values()], fast_mode=True)


def test_of_more_experts_than_can_be_sorted(device):
    """The experts at both ends of each thousand and a bit, and ids that are none."""
    s, experts = sample("affine4_32"), 1030
    ids = torch.tensor([[0, 1023], [1024, 1029], [1030, -1], [1023, 1024], [0, 5]])
    x, dy, weight = s.values(5, 4), s.values(5, 2, 3), s.values(experts, 3, 4)
    leaf = weight.to(device).requires_grad_()
    out = packet("expert_mm")(x.to(device), ids.to(device), leaf)
    out.backward(dy.to(device))
    right = torch.zeros(experts, 3, 4, dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if 0 <= expert < experts:
                right[expert] += torch.outer(dy[token, slot].double(), x[token].double())
    near(leaf.grad, right)


def test_of_a_layer_without_rows(device):
    s = sample("mxfp4")
    weight = {name: each if each is None else each[:0] for name, each in s.quantized("", 4, 32, ()).items()}
    x, bias = torch.ones(3, 32, device=device, requires_grad=True), torch.ones(0, device=device)
    out = packet("linear_quantized")(x, *placed(weight, device), format="mxfp4", bias=bias.requires_grad_())
    out.sum().backward()
    assert bias.grad.shape == (0,) and torch.equal(x.grad.cpu(), torch.zeros(3, 32))
