"""What operators encode for one shape each."""

import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from support.expert_layers import random_ids
from support.on_mps import INT4, matrix, tensor
from support.operators import plans_for
from support.pinned import assert_pinned
from support.quantized_layers import place, random_quantized

pytestmark = pytest.mark.one_schedule

ops = torch.ops.moe_mps
EPS = 1e-6
INT6, MXFP4 = "affine6_64", "mxfp4"
Calls = Iterator[tuple[str, Callable[[], object]]]


def ids_of(tokens: int, slots: int, experts: int) -> torch.Tensor:
    return random_ids(tokens, slots, experts, tokens, torch.int32).to("mps")


def norms() -> Calls:
    wide, x, short = tensor(6, 3072), tensor(6, 2048), tensor(20, 128)
    weight, weight_f32 = tensor(2048), tensor(2048, dtype=torch.float32)
    yield "rms_norm of a slice", partial(ops.rms_norm, wide[:, 512:2560], weight_f32, EPS)
    yield "rms_norm of heads", partial(ops.rms_norm, tensor(1, 1, 32, 128), None, EPS)
    yield "layer_norm", partial(ops.layer_norm, x, weight_f32, weight, EPS)
    gate = tensor(32, 256)[:, 128:].clone()
    yield "rms_norm_gated", partial(ops.rms_norm_gated, tensor(32, 128), gate, tensor(128), EPS)
    yield "fused_norm_add", partial(ops.fused_norm_add, x, x[:], weight_f32, EPS)
    yield "fused_norm_add_scalar", partial(ops.fused_norm_add_scalar, x, x[:], weight, tensor(1), EPS)
    many = tensor(300, 2048)
    yield "fused_residual_norm", partial(ops.fused_residual_norm, many, many[:], weight, EPS)
    without_sum = partial(ops.fused_residual_norm, short, short[:], tensor(128), EPS, False)
    yield "fused_residual_norm without the sum", without_sum
    scalar = tensor(2048)
    yield "fused_residual_norm_scalar", partial(ops.fused_residual_norm_scalar, x, x[:], weight, scalar, EPS)


def rope() -> Calls:
    qkv, table, weight = tensor(1, 1, 6 * 128), tensor(1, 1, 128), tensor(128)
    q, k = qkv[..., : 4 * 128].view(1, 1, 4, 128), qkv[..., 4 * 128 : 5 * 128].view(1, 1, 1, 128)
    yield "rope with norms", partial(ops.rope, q, k, table, table[:], weight, weight[:], EPS)
    q, table = tensor(2, 3, 4, 64), tensor(1, 3, 16)
    alone = partial(ops.rope, q, None, table, table[:], pairs="interleaved", rotary_dim=32)
    yield "rope of q alone", alone
    k, slots, norm = tensor(1, 1, 1, 192)[..., :128], tensor(1, 1, 300, 128)[:, :, :200], tensor(128)
    queries = tensor(1, 32, 1, 128).transpose(1, 2)
    keys = (queries, k, None, slots, None, tensor(1, 1, 64), tensor(1, 1, 64))
    yield "rope_cache_ of an indexer", partial(ops.rope_cache_, *keys, k_weight=norm, k_bias=norm[:], eps=EPS)


def attention() -> Calls:
    q, k, v = tensor(1, 16, 1, 64), tensor(1, 2, 300, 64)[:, :, :200], tensor(1, 2, 200, 64)
    yield "with sinks", partial(ops.attention, q, k, v, 0.125, sinks=tensor(16))
    gate = tensor(1, 1, 16, 128)[..., 64:]
    yield "with a gate", partial(ops.attention, q, k, v, 0.125, gate=gate)
    q, mask = tensor(1, 4, 1, 128), torch.ones(1, 1, 1, 4096, dtype=torch.bool, device="mps")
    cache, groups = torch.zeros(1, 4, 4096, 32, dtype=torch.int32, device="mps"), tensor(1, 4, 4096, 2)
    parts = {"k_scales": groups, "k_biases": groups[:], "v_scales": groups[:], "v_biases": groups[:]}
    long = partial(ops.attention, q, cache, cache[:], 0.125, mask=mask, **parts)
    yield "over a long cache in 8 bits", long
    states = tensor(1, 3, 4, 128).transpose(1, 2)
    packed = torch.zeros(1, 4, 100, 32, dtype=torch.int32, device="mps")
    groups = [tensor(1, 4, 100, 1) for _ in range(2)]
    yield "writing a cache in 8 bits", partial(ops.write_cache_quantized_, states, packed, *groups, 7)


def index() -> Calls:
    for tokens in (1, 5):
        memory, weights = tensor(1, 5000, 128), tensor(1, tokens, 32)
        arguments = tensor(1, 32, tokens, 128).transpose(1, 2), memory[:, :4100], weights, 2048, 0.1
        yield f"index_topk, {tokens} tokens", partial(ops.index_topk, *arguments)
    q, k = tensor(1, 5, 4, 128), memory[:, :4100]
    options = {"reduce": "keys", "block": 128, "tail": 1, "as_bits": True}
    yield "index_topk of blocks", partial(ops.index_topk, q, k, None, 16, 1.0, **options)


def sampling() -> Calls:
    logits, draws = tensor(2, 3, 5000)[:, -1], tensor(2, 5000, dtype=torch.float32)
    invalid = torch.zeros(2, dtype=torch.int32, device="mps")
    yield "sample_ of two rows", partial(ops.sample_, logits, draws, invalid, 0.7, 20, 0.8, 0.05)


def quantising() -> Calls:
    weight, importance = tensor(3, 5, 512)[..., 128:], tensor(3, 384, dtype=torch.float32).square()
    for to in ("affine3_128", "nvfp4"):
        yield f"quantize_by_importance to {to}", partial(ops.quantize_by_importance, weight, importance, to)


def linear_attention() -> Calls:
    x, state = tensor(1, 1, 256), tensor(1, 256, 4)
    yield "causal_conv1d_update_", partial(ops.causal_conv1d_update_, x, state, tensor(256, 4))
    qkv, gates = tensor(1, 1, 2 * 128 + 2 * 64), tensor(2, 1, 1, 2)
    q, k = (qkv[..., start : start + 128].view(1, 1, 1, 128) for start in (0, 128))
    v, state = qkv[..., 256:].view(1, 1, 2, 64), tensor(1, 2, 128, 64, dtype=torch.float32)
    options = {"A_log": tensor(2), "decay": "softplus", "beta": gates[1], "beta_activation": "sigmoid"}
    norm = {"gate": v, "norm_weight": tensor(64)}
    yield "linear_attention_", partial(ops.linear_attention_, q, k, v, gates[0], state, 0.1, **options)
    yield (
        "linear_attention_ with its norm",
        partial(ops.linear_attention_, q, k, v, gates[0], state, 0.1, **options, **norm),
    )
    q, v, g = tensor(1, 32, 1, 128), tensor(1, 32, 2, 64), tensor(1, 32, 2)
    yield (
        "linear_attention_ of a prompt with its norm: heads are fewer than cores",
        partial(ops.linear_attention_, q, q, v, g, state, 0.1, gate=v, norm_weight=tensor(64)),
    )
    x, b, state = tensor(1, 3, 70), tensor(1, 3, 16), tensor(1, 70, 16, dtype=torch.float32)
    yield "selective_scan_", partial(ops.selective_scan_, x, x, b, b, state, tensor(70, 16), gate=x)


def hyper_connection() -> Calls:
    fn, base, scale = (tensor(*shape, dtype=torch.float32) for shape in ((24, 4 * 2048), (24,), (3,)))
    for tokens in (1, 20):
        streams, out, post = tensor(tokens, 4, 2048), tensor(tokens, 2048), tensor(tokens, 4, dtype=fn.dtype)
        first = partial(ops.hyper_connection, streams, fn, base, scale)
        yield f"hyper_connection, {tokens} tokens", partial(first, out=out, post=post)
    yield "hyper_update", partial(ops.hyper_update, streams, out, post)


def pointwise() -> Calls:
    x, gate = tensor(1, 2, 64), tensor(64, dtype=torch.float32)
    formula = "sigmoid b f16; mul a %0 f16; add %1 0.5 f32"
    yield "pointwise", partial(ops.pointwise, x, formula, torch.float16, gate)


def combine() -> Calls:
    yield "silu_mul_stacked", partial(ops.silu_mul_stacked, tensor(8, 768), tensor(8, 768))
    for operator, tokens, *rest in (
        (ops.weighted_sum_stacked, 3),
        (ops.weighted_sum_residual_stacked_, 20),
        (ops.weighted_sum_residual_norm_stacked_, 2, tensor(2048), EPS),
    ):
        slots, weights = tensor(tokens, 8, 2048), tensor(tokens, 8, dtype=torch.float32)
        residual = [tensor(tokens, 2048)] if "residual" in operator.__name__ else []
        yield operator.__name__, partial(operator, *residual, slots, weights, *rest)
    weights, out, residual = tensor(4, 8, dtype=torch.float32), tensor(4, 8, 512), tensor(4, 512)
    yield "moe_weighted_reduce", partial(ops.moe_weighted_reduce, weights, out, residual=residual)


def routing() -> Calls:
    logits, bias = tensor(5, 256, dtype=torch.float32), tensor(256, dtype=torch.float32)
    groups = {"num_groups": 8, "top_groups": 4, "norm_topk_prob": True}
    yield "moe_router", partial(ops.moe_router, logits, 8, scoring="sigmoid", bias=bias, **groups)
    yield "moe_router_topk_softmax", partial(ops.moe_router_topk_softmax, tensor(300, 128), 8, True)
    scale = tensor(60, dtype=torch.float32)
    yield "fused_moe_routing", partial(ops.fused_moe_routing, tensor(60), scale, 4)
    router = tensor(128, 2048, dtype=torch.float32)
    yield "router_logits", partial(ops.router_logits, tensor(1, 2048), router, tensor(128))
    several = partial(ops.router_logits, tensor(32, 2048), tensor(64, 2048))
    yield "router_logits of several tokens", several
    hashed = partial(ops.moe_hash_router, scoring="sigmoid", norm_topk_prob=True, norm_weight=tensor(128))
    tokens = torch.zeros(3, dtype=torch.int64, device="mps")
    yield (
        "moe_hash_router",
        partial(hashed, tensor(3, 128), tensor(64, 128), tokens.expand(9, 3).clone(), tokens),
    )
    router = tensor(128, 2816, dtype=torch.float32)
    yield "moe_gate", partial(ops.moe_gate, tensor(1, 2816), router, tensor(2816), tensor(128), 8, EPS)
    many = partial(ops.moe_gate, tensor(1030, 256), tensor(64, 256), tensor(256), tensor(64), 8, EPS)
    yield "moe_gate of many tokens", many
    ids = ids_of(10, 4, 16)
    yield "moe_compute_ids_tpe", partial(ops.moe_compute_ids_tpe, ids, 16, 768, 2048)
    yield "moe_bucket", partial(ops.moe_bucket, ids_of(600, 8, 128), 128)


def experts() -> Calls:
    """Bindings do not depend on the format, except that formats without biases bind their scales instead."""
    gate_up, down = tensor(8, 128, 128), tensor(8, 128, 64)
    packed = {
        form: [
            part
            for rows, columns in ((128, 128), (128, 64))
            for part in place(random_quantized(8, rows, columns, form, torch.float16, 0), "mps")
        ]
        for form in (INT4, MXFP4)
    }
    for tokens, forms in ((1, (INT4, MXFP4)), (4, (INT4,)), (40, (INT4,))):
        x, weights = tensor(tokens, 128), tensor(tokens, 2, dtype=torch.float32)
        ids = ids_of(tokens, 2, 8)
        yield f"dense, {tokens} tokens", partial(ops.moe_experts, x, gate_up, down, ids, weights)
        for form in forms:
            call = partial(ops.moe_experts_quantized, x, *packed[form], ids, weights, form)
            yield f"{form}, {tokens} tokens", call


def heads() -> Calls:
    weight, query = tensor(4 * 40, 256).view(4, 40, 256), tensor(1, 4, 3, 40).transpose(1, 2)
    into, tail = weight[:, :24], query[..., 24:]
    for tokens in (1, 3):
        few = query[:, :tokens]
        part = {"transposed": True, "tail": tail[:, :tokens]}
        yield f"queries of latents, {tokens} tokens", partial(ops.heads_mm, few[..., :24], into, **part)
    yield "values of latents", partial(ops.heads_mm, tensor(1, 1, 4, 256).float(), weight[:, 24:])


def linear() -> Calls:
    weight, norm, x = matrix(320, 128), {"norm_weight": tensor(128)}, tensor(1, 128)
    for tokens in (1, 4, 8, 40):
        call = partial(ops.linear_quantized, tensor(tokens, 128), *weight, None, INT4)
        yield f"linear, {tokens} tokens", call
    normed = partial(ops.linear_quantized, x, *weight, None, INT4, residual=tensor(1, 320), **norm)
    yield "linear, normed, with a residual", normed
    normed = partial(ops.linear_quantized, tensor(4, 128), *weight, None, INT4, **norm)
    yield "linear, normed, 4 tokens", normed
    parts = (*matrix(512, 128), *matrix(128, 256, INT6))
    yield "mlp, down of 6 bits", partial(ops.mlp_quantized, x, *parts, INT4, residual=x, down_format=INT6)
    ids = torch.arange(3, dtype=torch.int32, device="mps")
    rows = partial(ops.embedding_quantized, ids, *matrix(50, 128), INT4, torch.bfloat16)
    yield "embedding", rows


GROUPS = [norms, rope, attention, index, sampling, quantising, linear_attention, hyper_connection]
GROUPS += [pointwise, combine, routing, experts, heads, linear]


@pytest.mark.parametrize("calls", GROUPS, ids=lambda calls: calls.__name__)
def test_encoded(simulated, calls):
    """Kernel and grid; then for each index the buffer and the bytes bound there; then threadgroup memory."""
    lines = []
    for label, call in calls():
        with simulated.trace() as commands:
            call()
        lines.append(label)
        for part in re.split(r": |\n|(?= threadgroup)", str(commands)):
            lines.append(textwrap.fill(part.strip(), 108, initial_indent="  ", subsequent_indent="    "))
    assert_pinned(__file__, f"traces_{calls.__name__}", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "gpu, launch",
    [("M1", "gemm32_affine4_64_f16 grid 16x2x1"), ("M4 Max", "gemm32_split_affine4_64_f16 grid 64x2x1")],
)
def test_grid_follows_the_cores(simulated, gpu, launch):
    x, weight = tensor(40, 64), matrix(2048, 64)
    with plans_for(gpu), simulated.trace() as commands:
        ops.linear_quantized(x, *weight, None, INT4)
    assert [command.startswith(launch) for command in commands] == [True]


@pytest.mark.parametrize(("counted", "cores"), [("8", 8), ("0", 16)])
def test_cores_are_those_that_the_system_counts(simulated, monkeypatch, counted, cores):
    monkeypatch.setenv("SIMULATED_CORES", counted)
    ops._plan_for(0)
    try:
        assert ops._gpu_cores() == cores
    finally:
        monkeypatch.undo()
        ops._plan_for(0)


def test_a_sum_in_place_has_its_residual_once(simulated):
    residual, slots, weights = tensor(3, 64), tensor(3, 2, 64), tensor(3, 2)
    with simulated.trace() as commands:
        ops.weighted_sum_residual_stacked_(residual, slots, weights)
    (command,) = commands
    bound = [binding.partition("=")[2].partition("[")[0] for binding in re.findall(r"\d+=\w+\[", command)]
    assert bound.count(bound[-1]) == 1, command
