"""_moe_experts_quantized with a router's logits: as moe_router and the experts after it."""

import pytest
import torch
from support.oracles_operators import checked
from support.quantized_layers import place, random_quantized
from support.routing import ROUTERS, router_options
from support.sweep import covering
from support.values import DTYPES, EACH_DTYPE, random

from torch_moe_mps.ops.families.quantized import MATRICES, _moe_experts_quantized
from torch_moe_mps.ops.families.routing import moe_router

HIDDEN, INNER = 64, 32


def layer(device, experts: int, dtype: torch.dtype, format: str = "affine4_32") -> list:
    gate_up = random_quantized(experts, 2 * INNER, HIDDEN, format, dtype, 1)
    down = random_quantized(experts, HIDDEN, INNER, format, dtype, 2)
    return [*place(gate_up, device), *place(down, device)]


def on(device, options: dict) -> dict:
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}


def check_chosen(device, logits, top_k: int, dtype=torch.float32, weights=None, others=None, **router):
    """As two operators but for the last bits: weights are summed in another order. Returns: the experts."""
    format, tokens = "affine4_32", logits.shape[0]
    matrices = layer(device, logits.shape[1], dtype) if weights is None else weights
    x = random((tokens, HIDDEN), dtype, 3).to(device)
    others = {"norm_weight": random((HIDDEN,), dtype, 4).to(device)} if others is None else others
    logits, router = logits.to(device), on(device, router)
    chosen, ids = moe_router(logits, top_k, **router)
    two = _moe_experts_quantized(x, chosen, ids, *matrices, format=format, **others)
    one = checked(
        "_moe_experts_quantized",
        *(x, None, None, *matrices, format),
        **{"logits": logits, "top_k": top_k, **router, **others},
    )
    roundings = 16 if others.get("weights_on_inputs") else 4  # of each input times its weight, too
    bound = roundings * torch.finfo(two.dtype).eps * max([0.0, *two.abs().flatten().tolist()])
    torch.testing.assert_close(one.cpu(), two.cpu(), rtol=0, atol=bound)
    return ids.cpu()


@pytest.mark.on("mps")
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_each_kind(device, name, dtype):
    for i, (experts, top_k) in enumerate([(8, 2), (60, 4), (128, 8)]):
        logits = random((1, experts), dtype, 10 * i, 1.5)
        check_chosen(device, logits, top_k, dtype, **router_options(name, experts, top_k, 10 * i + 1))


@pytest.mark.on("mps")
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize(
    ("sizes", "of_logits"), covering([(1, 1), (9, 9), (160, 6), (256, 8), (512, 10), (600, 2)], DTYPES)
)
def test_numbers_of_experts(device, sizes, of_logits, dtype):
    """A lane has up to 16; more are chosen by a launch of their own."""
    experts, top_k = sizes
    logits = random((1, experts), of_logits, top_k)
    check_chosen(device, logits, top_k, dtype, scoring="softmax", norm_topk_prob=True)


def test_ties_and_what_is_no_number(device):
    """The lower id; NaN is the lowest."""
    nan, inf = float("nan"), float("inf")
    router = {"scoring": "softmax", "norm_topk_prob": True}
    for row, chosen in (
        ([1.0, 2.0, 2.0, 1.0, 1.0], [1, 2, 0]),
        ([nan] * 5, [0, 1, 2]),
        ([-inf, nan, inf, -inf, 3.0], [2, 4, 0]),
        ([0.0, -0.0, -1.0, 0.0, -0.0], [0, 1, 3]),
    ):
        assert check_chosen(device, torch.tensor([row]), 3, **router).tolist() == [chosen]


@pytest.mark.on("mps")
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("name", ROUTERS)
def test_weights_on_inputs(device, name, dtype):
    """Of one expert as of several, in the product that chooses and in those behind a choice."""
    for i, (experts, top_k, tokens) in enumerate([(8, 1, 1), (60, 4, 1), (600, 2, 1), (60, 4, 3)]):
        logits = random((tokens, experts), dtype, 10 * i, 1.5)
        norm = {"norm_weight": random((HIDDEN,), dtype, 4).to(device)} if i % 2 else {}
        options = router_options(name, experts, top_k, 10 * i + 1)
        check_chosen(device, logits, top_k, dtype, None, {"weights_on_inputs": True, **norm}, **options)


def test_several_tokens_and_none(device):
    for tokens in (0, 2, 40):
        check_chosen(
            device, random((tokens, 16), torch.float32, 1), 4, scoring="sigmoid", norm_topk_prob=True
        )


def test_one_launch_fewer(simulated):
    """With a norm in the product and without; with many experts there are three."""

    def launches(experts: int = 8, dtype=torch.float32, **others) -> list[str]:
        matrices = layer("mps", experts, dtype)
        with simulated.trace() as commands:
            logits = random((1, experts), dtype, 0)
            check_chosen("mps", logits, 2, dtype, matrices, others, scoring="softmax", norm_topk_prob=True)
        names = [line.split()[0].partition("_affine")[0] for line in commands if " grid " in line]
        return names[names.index("expert_down") + 1 :]

    norm = {"norm_weight": random((HIDDEN,), torch.float32, 4).to("mps")}
    assert launches(**norm) == ["matmul_rows_chosen8", "expert_down"]
    assert launches(300, **norm) == ["matmul_rows_chosen16", "expert_down"]
    assert launches(600, **norm) == ["route32_f32", "matmul_rows_normed", "expert_down"]
    half = {"dtype": torch.float16, **norm}
    assert launches(**half) == ["matmul_rows_chosen8_wide", "expert_down"]
    assert launches(300, **half) == ["matmul_rows_chosen16_wide", "expert_down"]
    assert launches(weights_on_inputs=True, **norm) == ["matmul_rows_chosen8", "expert_down"]
    assert launches(600, **half) == ["route32_f16", "matmul_rows_normed_wide", "expert_down"]
    assert launches() == ["matmul_rows_chosen8", "expert_down"]


def beside(device, experts: int, tokens: int, dtype: torch.dtype, format: str = "affine4_32") -> tuple:
    """Arguments of a layer with a shared expert."""
    matrices = layer(device, experts + 1, dtype, format)
    own = [None if m is None else m[:-1].contiguous() for m in matrices]
    shared = {f"shared_{MATRICES[i]}": m if m is None else m[-1].clone() for i, m in enumerate(matrices)}
    x, logits = (random((tokens, n), dtype, n).to(device) for n in (HIDDEN, experts))
    around = {"logits": logits, "norm_weight": random((HIDDEN,), dtype, 4).to(device), **shared}
    options = {"format": format, "scoring": "sigmoid", "norm_topk_prob": True}
    return (x, None, None, *own), around | options


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("format", ["affine4_32", "mxfp4"])
def test_a_shared_expert(device, format, dtype):
    """One token's in both products; that of several tokens, or beside many experts, by itself."""
    for i, (tokens, experts, top_k) in enumerate(((1, 8, 2), (1, 9, 9), (1, 300, 4), (1, 600, 2), (3, 9, 4))):
        arguments, options = beside(device, experts, tokens, dtype, format)
        gate = random((tokens, 1), torch.float32, i).to(device)
        added = {"shared_gate": gate, "gate_is_logit": i % 2 == 0, "residual": arguments[0]}
        clamped = {"activation": "silu_clamped", "limit": 0.5, "shared_activation": "silu"}
        for others in ({}, added, {"norm_weight": None}, clamped):
            checked("_moe_experts_quantized", *arguments, top_k=top_k, **options | others)


def test_a_shared_expert_takes_no_launch(simulated):
    for experts, expected in (
        (8, ["matmul_rows_chosen8", "expert_down"]),
        (600, ["route32_f32", "matmul_rows_normed", "matmul_rows", "matmul_rows_normed", "expert_down"]),
    ):
        arguments, options = beside("mps", experts, 1, torch.float32)
        with simulated.trace() as commands:
            _moe_experts_quantized(*arguments, top_k=2, **options)
        assert [line.split()[0].partition("_affine")[0] for line in commands if " grid " in line] == expected


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_same_bits_every_time(device, every_order, dtype):
    matrices = layer(device, 128, dtype)
    options = {"logits": random((1, 128), dtype, 5).to(device), "top_k": 8, "scoring": "softmax"}
    options["norm_weight"] = random((HIDDEN,), dtype, 4).to(device)
    x = random((1, HIDDEN), dtype, 3).to(device)
    first, *others = [
        _moe_experts_quantized(x, None, None, *matrices, format="affine4_32", **options).cpu()
        for _ in every_order()
    ]
    assert all(torch.equal(other, first) for other in others)
