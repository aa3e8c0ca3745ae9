"""What operators encode for one shape each."""

import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import expecttest
import pytest
import torch
from support.expert_layers import random_ids
from support.on_mps import INT4, matrix, tensor
from support.operators import plans_for
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
    ids, inv_freq = torch.arange(6).view(2, 3).to("mps"), tensor(32, dtype=torch.float32)
    yield "rope_tables", partial(ops.rope_tables, ids, inv_freq, 1.0, torch.float16)


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


class TestEncoded(expecttest.TestCase):
    """Kernel and grid; then for each index the buffer and the bytes bound there; then threadgroup memory."""

    @pytest.fixture(autouse=True)
    def _simulator(self, simulated):
        self.simulator = simulated

    def encoded(self, calls: Callable[[], Calls]) -> str:
        lines = []
        for label, call in calls():
            with self.simulator.trace() as commands:
                call()
            lines.append(label)
            for part in re.split(r": |\n|(?= threadgroup)", str(commands)):
                lines.append(textwrap.fill(part.strip(), 108, initial_indent="  ", subsequent_indent="    "))
        return "\n".join(lines) + "\n"

    def test_norms(self):
        self.assertExpectedInline(
            self.encoded(norms),
            """\
rms_norm of a slice
  rms_norm_f16 grid 6x1x1 of 512x1x1
  0=A[0:24576] 1=B[1024:36864] 2=C[0:8192] 3=A[0:24576] 4=A[0:24576] 5=A[0:24576] 6=72 bytes
rms_norm of heads
  rms_norm_f16 grid 4x1x1 of 256x1x1
  0=A[0:8192] 1=B[0:8192] 2=A[0:8192] 3=A[0:8192] 4=A[0:8192] 5=A[0:8192] 6=72 bytes
layer_norm
  layer_norm_f16 grid 6x1x1 of 512x1x1
  0=A[0:24576] 1=B[0:24576] 2=C[0:8192] 3=D[0:4096] 4=A[0:24576] 5=A[0:24576] 6=72 bytes
rms_norm_gated
  rms_norm_gated_f16 grid 4x1x1 of 256x1x1
  0=A[0:8192] 1=B[0:8192] 2=C[0:256] 3=D[0:8192] 4=D[0:8192] 5=D[0:8192] 6=72 bytes
fused_norm_add
  norm_add_f16 grid 6x1x1 of 512x1x1
  0=A[0:24576] 1=A[0:24576] 2=B[0:8192] 3=C[0:24576] 4=C[0:24576] 5=C[0:24576] 6=72 bytes
fused_norm_add_scalar
  norm_add_f16 grid 6x1x1 of 512x1x1
  0=A[0:24576] 1=A[0:24576] 2=B[0:4096] 3=C[0:2] 4=D[0:24576] 5=D[0:24576] 6=72 bytes
fused_residual_norm
  residual_norm_f16 grid 300x1x1 of 128x1x1
  0=A[0:1228800] 1=A[0:1228800] 2=B[0:4096] 3=C[0:1228800] 4=C[0:1228800] 5=D[0:1228800] 6=72 bytes
fused_residual_norm without the sum
  residual_norm_f16 grid 3x1x1 of 256x1x1
  0=A[0:5120] 1=A[0:5120] 2=B[0:256] 3=C[0:5120] 4=C[0:5120] 5=C[0:5120] 6=72 bytes
fused_residual_norm_scalar
  residual_norm_f16 grid 6x1x1 of 512x1x1
  0=A[0:24576] 1=A[0:24576] 2=B[0:4096] 3=C[0:4096] 4=D[0:24576] 5=D[0:24576] 6=72 bytes
""",
        )

    def test_rope(self):
        self.assertExpectedInline(
            self.encoded(rope),
            """\
rope with norms
  rope_f16 grid 2x1x1 of 128x1x1
  0=A[0:1536] 1=A[1024:1536] 2=A[0:1536] 3=B[0:256] 4=B[0:256] 5=C[0:256] 6=C[0:256] 7=D[0:1024] 8=D[0:1024]
    9=E[0:256] 10=D[0:1024] 11=272 bytes
rope of q alone
  rope_f16 grid 6x1x1 of 128x1x1
  0=A[0:3072] 1=A[0:3072] 2=A[0:3072] 3=B[0:96] 4=B[0:96] 5=C[0:3072] 6=C[0:3072] 7=C[0:3072] 8=C[0:3072]
    9=C[0:3072] 10=C[0:3072] 11=272 bytes
rope_cache_ of an indexer
  rope_centred_f16 grid 9x1x1 of 128x1x1
  0=A[0:8192] 1=B[0:384] 2=A[0:8192] 3=C[0:128] 4=D[0:128] 5=E[0:8192] 6=F[0:256] 7=F[0:256] 8=E[0:8192]
    9=G[50944:76800] 10=E[0:8192] 11=272 bytes
rope_tables
  rope_tables_f16 grid 3x1x1 of 64x1x1
  0=A[0:48] 1=B[0:128] 2=C[0:768] 3=D[0:768] 4=B[0:128] 5=32 bytes
""",
        )

    def test_attention(self):
        self.assertExpectedInline(
            self.encoded(attention),
            """\
with sinks
  attention8_64_f16 grid 1x1x2 of 128x1x1
  0=A[0:2048] 1=B[0:76800] 2=C[0:51200] 3=D[0:2048] 4=E[0:32] 5=D[0:2048] 6=D[0:2048] 7=D[0:2048]
    8=D[0:2048] 9=D[0:2048] 10=D[0:2048] 11=D[0:2048] 12=D[0:2048] 13=400 bytes
  threadgroup(0)=2048 bytes
with a gate
  attention8_64_f16 grid 1x1x2 of 128x1x1
  0=A[0:2048] 1=B[0:76800] 2=C[0:51200] 3=D[0:2048] 4=D[0:2048] 5=D[0:2048] 6=D[0:2048] 7=D[0:2048]
    8=D[0:2048] 9=D[0:2048] 10=D[0:2048] 11=D[0:2048] 12=E[128:4096] 13=400 bytes
  threadgroup(0)=2048 bytes
over a long cache in 8 bits
  attention8_128_affine8_f16 grid 22x1x4 of 128x1x1
  0=A[0:1024] 1=B[0:2097152] 2=B[0:2097152] 3=C[0:4096] 4=D[0:1024] 5=D[0:1024] 6=E[0:45760] 7=F[0:65536]
    8=F[0:65536] 9=F[0:65536] 10=F[0:65536] 11=D[0:1024] 12=D[0:1024] 13=400 bytes
  threadgroup(0)=4096 bytes
  attention_merge_affine8_f16 grid 4x1x1 of 256x1x1
  0=E[0:45760] 1=D[0:1024] 2=D[0:1024] 3=D[0:1024] 4=400 bytes
  threadgroup(0)=4096 bytes
writing a cache in 8 bits
  write_cache_quantized_affine8_f16 grid 3x1x1 of 128x1x1
  0=A[0:3072] 1=B[0:51200] 2=C[0:800] 3=D[0:800] 4=96 bytes
""",
        )

    def test_index(self):
        self.assertExpectedInline(
            self.encoded(index),
            """\
index_topk, 1 tokens
  index_scores_f16 grid 33x1x1 of 64x1x1
  0=A[0:8192] 1=B[0:1280000] 2=C[0:64] 3=D[0:8192] 4=E[0:16400] 5=152 bytes
  index_select_f16 grid 1x1x1 of 1024x1x1
  0=E[0:16400] 1=D[0:8192] 2=D[0:8192] 3=152 bytes
index_topk, 5 tokens
  index_scores_f16 grid 33x5x1 of 64x1x1
  0=A[0:40960] 1=B[0:1280000] 2=C[0:320] 3=D[0:40960] 4=E[0:82000] 5=152 bytes
  index_select_f16 grid 5x1x1 of 1024x1x1
  0=E[0:82000] 1=D[0:40960] 2=D[0:40960] 3=152 bytes
index_topk of blocks
  index_block_scores_f16 grid 17x5x1 of 64x1x1
  0=A[0:5120] 1=B[0:1280000] 2=C[0:10320] 3=D[0:2640] 4=152 bytes
  index_select_f16 grid 5x4x1 of 1024x1x1
  0=D[0:2640] 1=C[0:10320] 2=C[0:10320] 3=152 bytes
""",
        )

    def test_sampling(self):
        self.assertExpectedInline(
            self.encoded(sampling),
            """\
sample_ of two rows
  sample_rows_f16 grid 2x1x1 of 1024x1x1
  0=A[20000:60000] 1=B[0:40000] 2=C[0:8] 3=D[0:16] 4=40 bytes
""",
        )

    def test_linear_attention(self):
        self.assertExpectedInline(
            self.encoded(linear_attention),
            """\
causal_conv1d_update_
  causal_conv1d_update_f16 grid 4x1x1 of 64x1x1
  0=A[0:512] 1=B[0:2048] 2=C[0:2048] 3=D[0:512] 4=D[0:512] 5=72 bytes
linear_attention_
  delta_scan128_f16 grid 1x2x1 of 256x1x1
  0=A[0:768] 1=A[256:768] 2=A[512:768] 3=B[0:8] 4=B[4:8] 5=C[0:4] 6=D[0:256] 7=D[0:256] 8=E[0:65536]
    9=D[0:256] 10=D[0:256] 11=D[0:256] 12=280 bytes
linear_attention_ with its norm
  delta_scan128_f16 grid 1x2x1 of 256x1x1
  0=A[0:768] 1=A[256:768] 2=A[512:768] 3=B[0:8] 4=B[4:8] 5=C[0:4] 6=D[0:256] 7=D[0:256] 8=E[0:65536]
    9=D[0:256] 10=A[512:768] 11=F[0:128] 12=280 bytes
linear_attention_ of a prompt with its norm: heads are fewer than cores
  delta_scan128_f16 grid 1x2x1 of 256x1x1
  0=A[0:8192] 1=A[0:8192] 2=B[0:8192] 3=C[0:128] 4=D[0:8192] 5=D[0:8192] 6=D[0:8192] 7=D[0:8192]
    8=E[0:65536] 9=D[0:8192] 10=B[0:8192] 11=F[0:128] 12=280 bytes
  rms_norm_gated_f16 grid 8x1x1 of 256x1x1
  0=B[0:8192] 1=D[0:8192] 2=F[0:128] 3=D[0:8192] 4=D[0:8192] 5=D[0:8192] 6=72 bytes
selective_scan_
  selective_scan_f16 grid 1x1x1 of 128x1x1
  0=A[0:420] 1=A[0:420] 2=B[0:96] 3=B[0:96] 4=C[0:2240] 5=D[0:420] 6=D[0:420] 7=A[0:420] 8=E[0:4480]
    9=D[0:420] 10=184 bytes
""",
        )

    def test_hyper_connection(self):
        self.assertExpectedInline(
            self.encoded(hyper_connection),
            """\
hyper_connection, 1 tokens
  hyper_products_f16 grid 16x1x1 of 256x1x1
  0=A[0:16384] 1=B[0:4096] 2=C[0:16] 3=A[0:16384] 4=D[0:16384] 5=E[0:786432] 6=F[0:1600] 7=60 bytes
  hyper_mix_f16 grid 2x1x1 of 256x1x1
  0=D[0:16384] 1=F[0:1600] 2=G[0:96] 3=H[0:12] 4=I[0:4096] 5=J[0:16] 6=K[0:64] 7=60 bytes
hyper_connection, 20 tokens
  hyper_products_of_tokens_f16 grid 16x3x1 of 256x1x1
  0=A[0:327680] 1=B[0:81920] 2=C[0:320] 3=A[0:327680] 4=D[0:327680] 5=E[0:786432] 6=F[0:32000] 7=60 bytes
  hyper_mix_f16 grid 2x20x1 of 256x1x1
  0=D[0:327680] 1=F[0:32000] 2=G[0:96] 3=H[0:12] 4=I[0:81920] 5=J[0:320] 6=K[0:1280] 7=60 bytes
hyper_update
  hyper_update_f16 grid 2x20x1 of 256x1x1
  0=A[0:327680] 1=B[0:81920] 2=C[0:320] 3=A[0:327680] 4=D[0:327680] 5=60 bytes
""",
        )

    def test_pointwise(self):
        self.assertExpectedInline(
            self.encoded(pointwise),
            """\
pointwise
  pointwise_f16 grid 2x1x1 of 64x1x1
  0=A[0:256] 1=B[0:256] 2=C[0:256] 3=C[0:256] 4=C[0:256] 5=C[0:256] 6=C[0:256] 7=308 bytes
""",
        )

    def test_combine(self):
        self.assertExpectedInline(
            self.encoded(combine),
            """\
silu_mul_stacked
  silu_mul_stacked_f16 grid 12x1x1 of 128x1x1
  0=A[0:12288] 1=B[0:12288] 2=C[0:12288] 3=16 bytes
weighted_sum_stacked
  weighted_sum_f16 grid 16x3x1 of 32x1x1
  0=A[0:98304] 1=B[0:96] 2=A[0:98304] 3=A[0:98304] 4=A[0:98304] 5=C[0:12288] 6=40 bytes
weighted_sum_residual_stacked_
  weighted_sum_f16 grid 4x20x1 of 128x1x1
  0=A[0:655360] 1=B[0:640] 2=A[0:655360] 3=A[0:655360] 4=A[0:655360] 5=C[0:81920] 6=40 bytes
weighted_sum_residual_norm_stacked_
  weighted_sum_norm_f16 grid 2x1x1 of 384x1x1
  0=A[0:8192] 1=B[0:65536] 2=C[0:64] 3=D[0:4096] 4=E[0:8192] 5=24 bytes
moe_weighted_reduce
  weighted_sum_f16 grid 4x4x1 of 32x1x1
  0=A[0:32768] 1=B[0:128] 2=A[0:32768] 3=A[0:32768] 4=C[0:4096] 5=D[0:4096] 6=40 bytes
""",
        )

    def test_routing(self):
        self.assertExpectedInline(
            self.encoded(routing),
            """\
moe_router
  route8_f32 grid 5x1x1 of 32x1x1
  0=A[0:5120] 1=B[0:1024] 2=A[0:5120] 3=C[0:160] 4=D[0:160] 5=84 bytes
moe_router_topk_softmax
  route4_f16 grid 75x1x1 of 128x1x1
  0=A[0:76800] 1=A[0:76800] 2=A[0:76800] 3=B[0:9600] 4=C[0:9600] 5=84 bytes
fused_moe_routing
  route2_f16 grid 1x1x1 of 32x1x1
  0=A[0:120] 1=A[0:120] 2=B[0:240] 3=C[0:16] 4=D[0:16] 5=84 bytes
router_logits
  logits_few_f32 grid 64x1x1 of 128x1x1
  0=A[0:4096] 1=B[0:1048576] 2=C[0:512] 3=D[0:256] 4=C[0:512] 5=48 bytes
router_logits of several tokens
  logits_many_f16 grid 4x8x1 of 128x1x1
  0=A[0:131072] 1=B[0:262144] 2=C[0:8192] 3=C[0:8192] 4=C[0:8192] 5=48 bytes
moe_hash_router
  normed_hash_route_f16 grid 3x1x1 of 128x1x1
  0=A[0:768] 1=B[0:16384] 2=C[0:256] 3=D[0:216] 4=E[0:24] 5=F[0:36] 6=G[0:36] 7=80 bytes
moe_gate
  normed_logits_few_f32 grid 64x1x1 of 128x1x1
  0=A[0:5632] 1=B[0:1441792] 2=C[0:5632] 3=D[0:512] 4=D[0:512] 5=48 bytes
  route4_f32 grid 1x1x1 of 32x1x1
  0=D[0:512] 1=D[0:512] 2=E[0:256] 3=F[0:32] 4=G[0:32] 5=84 bytes
moe_gate of many tokens
  normed_logits_many_f16 grid 4x258x1 of 128x1x1
  0=A[0:527360] 1=B[0:32768] 2=C[0:512] 3=D[0:263680] 4=D[0:263680] 5=48 bytes
  route2_f32 grid 258x1x1 of 128x1x1
  0=D[0:263680] 1=D[0:263680] 2=E[0:128] 3=F[0:32960] 4=G[0:32960] 5=84 bytes
moe_compute_ids_tpe
  ids_by_expert_i32 grid 17x1x1 of 64x1x1
  0=A[0:160] 1=B[0:64] 2=C[0:2560] 3=D[0:12] 4=E[0:12] 5=16 bytes
  threadgroup(0)=80 bytes
moe_bucket
  bucket_pairs_i32 grid 3x1x1 of 800x1x1
  0=A[0:19200] 1=B[0:19200] 2=C[0:516] 3=C[0:516] 4=C[0:516] 5=36 bytes
  threadgroup(0)=20336 bytes
""",
        )

    def test_experts(self):
        self.assertExpectedInline(
            self.encoded(experts),
            """\
dense, 1 tokens
  matmul_rows_f16 grid 8x2x1 of 64x1x1
  0=A[0:256] 1=B[0:262144] 2=B[0:262144] 3=B[0:262144] 4=C[0:8] 5=C[0:8] 6=D[0:256] 7=A[0:256] 8=100 bytes
  expert_down_f16 grid 16x1x1 of 64x1x1
  0=D[0:256] 1=E[0:131072] 2=E[0:131072] 3=E[0:131072] 4=C[0:8] 5=C[0:8] 6=F[0:256] 7=G[0:8] 8=F[0:256]
    9=F[0:256] 10=F[0:256] 11=128 bytes 12=D[0:256] 13=D[0:256] 14=D[0:256]
affine4_64, 1 tokens
  matmul_rows_affine4_64_f16 grid 8x2x1 of 64x1x1
  0=A[0:256] 1=B[0:65536] 2=C[0:4096] 3=D[0:4096] 4=E[0:8] 5=E[0:8] 6=F[0:256] 7=A[0:256] 8=100 bytes
  expert_down_affine4_64_f16 grid 16x1x1 of 64x1x1
  0=F[0:256] 1=G[0:32768] 2=H[0:2048] 3=I[0:2048] 4=E[0:8] 5=E[0:8] 6=J[0:256] 7=K[0:8] 8=J[0:256]
    9=J[0:256] 10=J[0:256] 11=128 bytes 12=F[0:256] 13=F[0:256] 14=F[0:256]
mxfp4, 1 tokens
  matmul_rows_mxfp4_f16 grid 8x2x1 of 64x1x1
  0=A[0:256] 1=B[0:65536] 2=C[0:4096] 3=C[0:4096] 4=D[0:8] 5=D[0:8] 6=E[0:256] 7=A[0:256] 8=100 bytes
  expert_down_mxfp4_f16 grid 16x1x1 of 64x1x1
  0=E[0:256] 1=F[0:32768] 2=G[0:2048] 3=G[0:2048] 4=D[0:8] 5=D[0:8] 6=H[0:256] 7=I[0:8] 8=H[0:256]
    9=H[0:256] 10=H[0:256] 11=128 bytes 12=E[0:256] 13=E[0:256] 14=E[0:256]
dense, 4 tokens
  matmul_rows_few_split_f16 grid 8x9x1 of 128x1x1
  0=A[0:1024] 1=B[0:262144] 2=B[0:262144] 3=B[0:262144] 4=C[0:32] 5=C[0:32] 6=D[0:1024] 7=A[0:1024] 8=100
    bytes 9=E[0:32] 10=F[0:128]
  expert_down_few_f16 grid 16x1x1 of 256x1x1
  0=D[0:1024] 1=G[0:131072] 2=G[0:131072] 3=G[0:131072] 4=C[0:32] 5=C[0:32] 6=H[0:1024] 7=I[0:32]
    8=H[0:1024] 9=H[0:1024] 10=H[0:1024] 11=128 bytes 12=E[0:32] 13=F[0:128]
  threadgroup(0)=256 bytes
affine4_64, 4 tokens
  matmul_rows_few_split_affine4_64_f16 grid 8x9x1 of 128x1x1
  0=A[0:1024] 1=B[0:65536] 2=C[0:4096] 3=D[0:4096] 4=E[0:32] 5=E[0:32] 6=F[0:1024] 7=A[0:1024] 8=100 bytes
    9=G[0:32] 10=H[0:128]
  expert_down_few_affine4_64_f16 grid 16x1x1 of 256x1x1
  0=F[0:1024] 1=I[0:32768] 2=J[0:2048] 3=K[0:2048] 4=E[0:32] 5=E[0:32] 6=L[0:1024] 7=M[0:32] 8=L[0:1024]
    9=L[0:1024] 10=L[0:1024] 11=128 bytes 12=G[0:32] 13=H[0:128]
  threadgroup(0)=256 bytes
dense, 40 tokens
  bucket_pairs_i32 grid 1x1x1 of 64x1x1
  0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:304] 4=E[0:24] 5=36 bytes
  threadgroup(0)=656 bytes
  gemm8_f16 grid E[0:24] of 128x1x1
  0=F[0:10240] 1=G[0:262144] 2=G[0:262144] 3=G[0:262144] 4=A[0:320] 5=A[0:320] 6=H[0:10240] 7=F[0:10240]
    8=100 bytes 9=B[0:320] 10=D[0:304]
  threadgroup(0)=656 bytes
  gemm8_f16 grid E[12:24] of 128x1x1
  0=H[0:10240] 1=I[0:131072] 2=I[0:131072] 3=I[0:131072] 4=A[0:320] 5=A[0:320] 6=J[0:20480] 7=H[0:10240]
    8=100 bytes 9=B[0:320] 10=D[0:304]
  threadgroup(0)=656 bytes
  expert_combine_f16 grid 1x40x1 of 256x1x1
  0=J[0:20480] 1=A[0:320] 2=K[0:320] 3=L[0:10240] 4=L[0:10240] 5=L[0:10240] 6=L[0:10240] 7=128 bytes
  threadgroup(0)=656 bytes
affine4_64, 40 tokens
  bucket_pairs_i32 grid 1x1x1 of 64x1x1
  0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:304] 4=E[0:24] 5=36 bytes
  threadgroup(0)=656 bytes
  gemm8_affine4_64_f16 grid E[0:24] of 128x1x1
  0=F[0:10240] 1=G[0:65536] 2=H[0:4096] 3=I[0:4096] 4=A[0:320] 5=A[0:320] 6=J[0:10240] 7=F[0:10240] 8=100
    bytes 9=B[0:320] 10=D[0:304]
  threadgroup(0)=656 bytes
  gemm8_affine4_64_f16 grid E[12:24] of 128x1x1
  0=J[0:10240] 1=K[0:32768] 2=L[0:2048] 3=M[0:2048] 4=A[0:320] 5=A[0:320] 6=N[0:20480] 7=J[0:10240] 8=100
    bytes 9=B[0:320] 10=D[0:304]
  threadgroup(0)=656 bytes
  expert_combine_affine4_64_f16 grid 1x40x1 of 256x1x1
  0=N[0:20480] 1=A[0:320] 2=O[0:320] 3=P[0:10240] 4=P[0:10240] 5=P[0:10240] 6=P[0:10240] 7=128 bytes
  threadgroup(0)=656 bytes
""",
        )

    def test_heads(self):
        self.assertExpectedInline(
            self.encoded(heads),
            """\
queries of latents, 1 tokens
  heads_columns_f16 grid 2x4x1 of 256x1x1
  0=A[0:960] 1=B[0:81920] 2=B[0:81920] 3=B[0:81920] 4=A[48:960] 5=C[0:2176] 6=168 bytes
queries of latents, 3 tokens
  heads_columns_few_f16 grid 2x4x2 of 256x1x1
  0=A[0:960] 1=B[0:81920] 2=B[0:81920] 3=B[0:81920] 4=A[48:960] 5=C[0:6528] 6=168 bytes
values of latents
  heads_rows_f16 grid 1x4x1 of 64x1x1
  0=A[0:4096] 1=B[12288:81920] 2=B[12288:81920] 3=B[12288:81920] 4=A[0:4096] 5=C[0:128] 6=168 bytes
""",
        )

    def test_linear(self):
        self.assertExpectedInline(
            self.encoded(linear),
            """\
linear, 1 tokens
  matmul_rows_affine4_64_f16 grid 20x1x1 of 64x1x1
  0=A[0:256] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280] 4=A[0:256] 5=A[0:256] 6=E[0:640] 7=A[0:256] 8=100 bytes
linear, 4 tokens
  matmul_rows_few_split_affine4_64_f16 grid 20x1x1 of 128x1x1
  0=A[0:1024] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280] 4=A[0:1024] 5=A[0:1024] 6=E[0:2560] 7=A[0:1024] 8=100
    bytes 9=A[0:1024] 10=A[0:1024]
linear, 8 tokens
  gemm16_split_affine4_64_f16 grid 10x1x1 of 128x1x1
  0=A[0:2048] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280] 4=A[0:2048] 5=A[0:2048] 6=E[0:5120] 7=A[0:2048] 8=100
    bytes 9=A[0:2048] 10=A[0:2048]
linear, 40 tokens
  gemm32_split_affine4_64_f16 grid 10x2x1 of 128x1x1
  0=A[0:10240] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280] 4=A[0:10240] 5=A[0:10240] 6=E[0:25600] 7=A[0:10240]
    8=100 bytes 9=A[0:10240] 10=A[0:10240]
linear, normed, with a residual
  matmul_rows_normed_affine4_64_f16 grid 20x1x1 of 64x1x1
  0=A[0:256] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280] 4=A[0:256] 5=A[0:256] 6=E[0:640] 7=F[0:640] 8=100 bytes
    9=G[0:256]
linear, normed, 4 tokens
  rms_norm_f16 grid 1x1x1 of 128x1x1
  0=A[0:1024] 1=B[0:1024] 2=C[0:256] 3=A[0:1024] 4=A[0:1024] 5=A[0:1024] 6=72 bytes
  matmul_rows_few_split_affine4_64_f16 grid 20x1x1 of 128x1x1
  0=A[0:1024] 1=D[0:20480] 2=E[0:1280] 3=F[0:1280] 4=A[0:1024] 5=A[0:1024] 6=G[0:2560] 7=A[0:1024] 8=100
    bytes 9=A[0:1024] 10=A[0:1024]
mlp, down of 6 bits
  matmul_rows_affine4_64_f16 grid 32x1x1 of 64x1x1
  0=A[0:256] 1=B[0:32768] 2=C[0:2048] 3=D[0:2048] 4=A[0:256] 5=A[0:256] 6=E[0:512] 7=A[0:256] 8=100 bytes
  matmul_rows_affine6_64_f16 grid 8x1x1 of 64x1x1
  0=E[0:512] 1=F[0:24576] 2=G[0:1024] 3=H[0:1024] 4=E[0:512] 5=E[0:512] 6=I[0:256] 7=A[0:256] 8=100 bytes
embedding
  embedding_rows_affine4_64_f16 grid 3x1x1 of 128x1x1
  0=A[0:3200] 1=B[0:200] 2=C[0:200] 3=D[0:12] 4=E[0:768] 5=104 bytes
""",
        )


@pytest.mark.parametrize(
    "gpu, launch",
    [
        ("M1", "gemm32_affine4_64_f16 grid 16x2x1"),
        ("M4 Max", "gemm32_split_affine4_64_f16 grid 64x2x1"),
    ],
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
