"""What norms, routing and combine encode for one shape per operator, and the bytes their kernels move."""

import re
import textwrap

import expecttest
import pytest
import torch

ops = torch.ops.moe_mps
EPS = 1e-6


def tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to("mps")


def expert_ids(tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices.int().to("mps")


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class TestEncoded(expecttest.TestCase):
    """Kernel and grid; then for each index the buffer and the bytes bound there; then threadgroup memory."""

    @pytest.fixture(autouse=True)
    def _simulator(self, simulated):
        self.simulator = simulated

    def encoded(self, operator, *args, **kwargs) -> str:
        with self.simulator.trace() as commands:
            operator(*args, **kwargs)
        lines = [
            re.sub(r": 0=|(?= threadgroup)", lambda m: "\n0=" if m[0] else "\n", line) for line in commands
        ]
        return (
            "\n".join(
                textwrap.fill(line, 110, subsequent_indent="  ") for line in "\n".join(lines).splitlines()
            )
            + "\n"
        )

    def test_rms_norm(self):
        wide = tensor(6, 3072)
        self.assertExpectedInline(
            self.encoded(ops.rms_norm, wide[:, 512:2560], tensor(2048, dtype=torch.float32), EPS),
            """\
rms_norm_f16 grid 6x1x1 of 512x1x1
0=A[0:24576] 1=B[1024:36864] 2=C[0:8192] 3=A[0:24576] 4=A[0:24576] 5=A[0:24576] 6=56 bytes
""",
        )

    def test_rms_norm_of_heads(self):
        self.assertExpectedInline(
            self.encoded(ops.rms_norm, tensor(1, 1, 32, 128), None, EPS),
            """\
rms_norm_f16 grid 4x1x1 of 256x1x1
0=A[0:8192] 1=B[0:8192] 2=A[0:8192] 3=A[0:8192] 4=A[0:8192] 5=A[0:8192] 6=56 bytes
""",
        )

    def test_rope(self):
        qkv, table, weight = tensor(1, 1, 6 * 128), tensor(1, 1, 128), tensor(128)
        q, k = qkv[..., : 4 * 128].view(1, 1, 4, 128), qkv[..., 4 * 128 : 5 * 128].view(1, 1, 1, 128)
        self.assertExpectedInline(
            self.encoded(ops.rope, q, k, table, table[:], weight, weight[:], EPS),
            """\
rope_f16 grid 2x1x1 of 128x1x1
0=A[0:1536] 1=A[1024:1536] 2=A[0:1536] 3=B[0:256] 4=B[0:256] 5=C[0:256] 6=C[0:256] 7=D[0:1024] 8=D[0:1024]
  9=E[0:256] 10=D[0:1024] 11=272 bytes
""",
        )

    def test_rope_tables(self):
        ids, inv_freq = torch.arange(6).view(2, 3).to("mps"), tensor(32, dtype=torch.float32)
        self.assertExpectedInline(
            self.encoded(ops.rope_tables, ids, inv_freq, 1.0, torch.float16),
            """\
rope_tables_f16 grid 3x1x1 of 64x1x1
0=A[0:48] 1=B[0:128] 2=C[0:768] 3=D[0:768] 4=24 bytes
""",
        )

    def test_rms_norm_gated(self):
        x, gate = tensor(32, 128), tensor(32, 256)[:, 128:]
        self.assertExpectedInline(
            self.encoded(ops.rms_norm_gated, x, gate.clone(), tensor(128), EPS),
            """\
rms_norm_gated_f16 grid 4x1x1 of 256x1x1
0=A[0:8192] 1=B[0:8192] 2=C[0:256] 3=D[0:8192] 4=D[0:8192] 5=D[0:8192] 6=56 bytes
""",
        )

    def test_causal_conv1d_update(self):
        x, state = tensor(1, 1, 256).transpose(1, 2), tensor(1, 256, 4)
        self.assertExpectedInline(
            self.encoded(ops.causal_conv1d_update_, x, state, tensor(256, 4)),
            """\
causal_conv1d_update_f16 grid 4x1x1 of 64x1x1
0=A[0:512] 1=B[0:2048] 2=C[0:2048] 3=D[0:512] 4=D[0:512] 5=64 bytes
""",
        )

    def test_gated_delta_rule(self):
        qkv, gates = tensor(1, 1, 2 * 128 + 2 * 64), tensor(2, 1, 1, 2)
        q, k = (qkv[..., start : start + 128].view(1, 1, 1, 128) for start in (0, 128))
        v, state = qkv[..., 256:].view(1, 1, 2, 64), tensor(1, 2, 128, 64, dtype=torch.float32)
        self.assertExpectedInline(
            self.encoded(
                ops.gated_delta_rule_, q, k, v, *gates, state, 0.1, A_log=tensor(2), beta_is_logit=True
            ),
            """\
gated_delta_rule_f16 grid 2x2x1 of 256x1x1
0=A[0:768] 1=A[256:768] 2=A[512:768] 3=B[0:8] 4=B[4:8] 5=C[0:4] 6=D[0:256] 7=E[0:65536] 8=D[0:256] 9=D[0:256]
  10=D[0:256] 11=76 bytes
""",
        )

    def test_rope_of_q_alone(self):
        q, table = tensor(2, 3, 4, 64), tensor(1, 3, 16)
        self.assertExpectedInline(
            self.encoded(ops.rope, q, None, table, table[:], pairs="interleaved", rotary_dim=32),
            """\
rope_f16 grid 6x1x1 of 128x1x1
0=A[0:3072] 1=A[0:3072] 2=A[0:3072] 3=B[0:96] 4=B[0:96] 5=C[0:3072] 6=C[0:3072] 7=C[0:3072] 8=C[0:3072]
  9=C[0:3072] 10=C[0:3072] 11=272 bytes
""",
        )

    def test_attention(self):
        q, k, v = tensor(1, 16, 1, 64), tensor(1, 2, 300, 64)[:, :, :200], tensor(1, 2, 200, 64)
        self.assertExpectedInline(
            self.encoded(ops.attention, q, k, v, 0.125, sinks=tensor(16)),
            """\
attention8_64_f16 grid 1x1x2 of 128x1x1
0=A[0:2048] 1=B[0:76800] 2=C[0:51200] 3=D[0:2048] 4=E[0:32] 5=D[0:2048] 6=D[0:2048] 7=D[0:2048] 8=D[0:2048]
  9=D[0:2048] 10=D[0:2048] 11=D[0:2048] 12=216 bytes
 threadgroup(0)=2048 bytes
""",
        )

    def test_attention_over_a_long_cache_in_8_bits(self):
        q, mask = tensor(1, 4, 1, 128), torch.ones(1, 1, 1, 4096, dtype=torch.bool, device="mps")
        cache = torch.zeros(1, 4, 4096, 32, dtype=torch.int32, device="mps")
        groups = tensor(1, 4, 4096, 2)
        parts = {"k_scales": groups, "k_biases": groups[:], "v_scales": groups[:], "v_biases": groups[:]}
        self.assertExpectedInline(
            self.encoded(ops.attention, q, cache, cache[:], 0.125, mask=mask, **parts),
            """\
attention8_128_affine8_f16 grid 22x1x4 of 128x1x1
0=A[0:1024] 1=B[0:2097152] 2=B[0:2097152] 3=C[0:4096] 4=D[0:1024] 5=D[0:1024] 6=E[0:45760] 7=F[0:65536]
  8=F[0:65536] 9=F[0:65536] 10=F[0:65536] 11=D[0:1024] 12=216 bytes
 threadgroup(0)=4096 bytes
attention_merge_affine8_f16 grid 4x1x1 of 256x1x1
0=E[0:45760] 1=D[0:1024] 2=D[0:1024] 3=216 bytes
 threadgroup(0)=4096 bytes
""",
        )

    def test_writing_a_cache_in_8_bits(self):
        states = tensor(1, 3, 4, 128).transpose(1, 2)
        packed = torch.zeros(1, 4, 100, 32, dtype=torch.int32, device="mps")
        self.assertExpectedInline(
            self.encoded(
                ops.write_cache_quantized_, states, packed, tensor(1, 4, 100, 1), tensor(1, 4, 100, 1), 7
            ),
            """\
write_cache_quantized_affine8_f16 grid 3x1x1 of 128x1x1
0=A[0:3072] 1=B[0:51200] 2=C[0:800] 3=D[0:800] 4=112 bytes
""",
        )

    def test_fused_norm_add(self):
        x, w = tensor(6, 2048), tensor(2048, dtype=torch.float32)
        self.assertExpectedInline(
            self.encoded(ops.fused_norm_add, x, x[:], w, EPS),
            """\
norm_add_f16 grid 6x1x1 of 512x1x1
0=A[0:24576] 1=A[0:24576] 2=B[0:8192] 3=C[0:24576] 4=C[0:24576] 5=C[0:24576] 6=56 bytes
""",
        )

    def test_fused_norm_add_scalar(self):
        x, w, s = tensor(6, 2048), tensor(2048), tensor(1)
        self.assertExpectedInline(
            self.encoded(ops.fused_norm_add_scalar, x, x[:], w, s, EPS),
            """\
norm_add_f16 grid 6x1x1 of 512x1x1
0=A[0:24576] 1=A[0:24576] 2=B[0:4096] 3=C[0:2] 4=D[0:24576] 5=D[0:24576] 6=56 bytes
""",
        )

    def test_fused_residual_norm(self):
        x, w = tensor(300, 2048), tensor(2048)
        self.assertExpectedInline(
            self.encoded(ops.fused_residual_norm, x, x[:], w, EPS),
            """\
residual_norm_f16 grid 300x1x1 of 128x1x1
0=A[0:1228800] 1=A[0:1228800] 2=B[0:4096] 3=C[0:1228800] 4=C[0:1228800] 5=D[0:1228800] 6=56 bytes
""",
        )

    def test_fused_residual_norm_without_sum(self):
        x, w = tensor(20, 128), tensor(128)
        self.assertExpectedInline(
            self.encoded(ops.fused_residual_norm, x, x[:], w, EPS, False),
            """\
residual_norm_f16 grid 3x1x1 of 256x1x1
0=A[0:5120] 1=A[0:5120] 2=B[0:256] 3=C[0:5120] 4=C[0:5120] 5=C[0:5120] 6=56 bytes
""",
        )

    def test_fused_residual_norm_scalar(self):
        x, w, s = tensor(6, 2048), tensor(2048), tensor(2048)
        self.assertExpectedInline(
            self.encoded(ops.fused_residual_norm_scalar, x, x[:], w, s, EPS),
            """\
residual_norm_f16 grid 6x1x1 of 512x1x1
0=A[0:24576] 1=A[0:24576] 2=B[0:4096] 3=C[0:4096] 4=D[0:24576] 5=D[0:24576] 6=56 bytes
""",
        )

    def test_silu_mul_stacked(self):
        gate, up = tensor(8, 768), tensor(8, 768)
        self.assertExpectedInline(
            self.encoded(ops.silu_mul_stacked, gate, up),
            """\
silu_mul_stacked_f16 grid 12x1x1 of 128x1x1
0=A[0:12288] 1=B[0:12288] 2=C[0:12288] 3=16 bytes
""",
        )

    def test_weighted_sum_stacked(self):
        slots, weights = tensor(3, 8, 2048), tensor(3, 8, dtype=torch.float32)
        self.assertExpectedInline(
            self.encoded(ops.weighted_sum_stacked, slots, weights),
            """\
weighted_sum_f16 grid 16x3x1 of 32x1x1
0=A[0:98304] 1=B[0:96] 2=C[0:12288] 3=C[0:12288] 4=C[0:12288] 5=C[0:12288] 6=40 bytes
""",
        )

    def test_weighted_sum_residual_stacked(self):
        residual, slots, weights = tensor(20, 2048), tensor(20, 8, 2048), tensor(20, 8, dtype=torch.float32)
        self.assertExpectedInline(
            self.encoded(ops.weighted_sum_residual_stacked_, residual, slots, weights),
            """\
weighted_sum_f16 grid 4x20x1 of 128x1x1
0=A[0:655360] 1=B[0:640] 2=C[0:81920] 3=C[0:81920] 4=C[0:81920] 5=C[0:81920] 6=40 bytes
""",
        )

    def test_weighted_sum_residual_norm_stacked(self):
        residual, slots, weights = tensor(2, 2048), tensor(2, 8, 2048), tensor(2, 8, dtype=torch.float32)
        self.assertExpectedInline(
            self.encoded(
                ops.weighted_sum_residual_norm_stacked_, residual, slots, weights, tensor(2048), EPS
            ),
            """\
weighted_sum_norm_f16 grid 2x1x1 of 384x1x1
0=A[0:8192] 1=B[0:65536] 2=C[0:64] 3=D[0:4096] 4=E[0:8192] 5=24 bytes
""",
        )

    def test_moe_weighted_reduce(self):
        weights, out, residual = tensor(4, 8, dtype=torch.float32), tensor(4, 8, 512), tensor(4, 512)
        self.assertExpectedInline(
            self.encoded(ops.moe_weighted_reduce, weights, out, residual=residual),
            """\
weighted_sum_f16 grid 4x4x1 of 32x1x1
0=A[0:32768] 1=B[0:128] 2=C[0:4096] 3=C[0:4096] 4=D[0:4096] 5=C[0:4096] 6=40 bytes
""",
        )

    def test_moe_router(self):
        logits, bias = tensor(5, 256, dtype=torch.float32), tensor(256, dtype=torch.float32)
        self.assertExpectedInline(
            self.encoded(
                ops.moe_router,
                logits,
                8,
                scoring="sigmoid",
                bias=bias,
                num_groups=8,
                top_groups=4,
                norm_topk_prob=True,
            ),
            """\
route8_f32 grid 5x1x1 of 32x1x1
0=A[0:5120] 1=B[0:1024] 2=A[0:5120] 3=C[0:160] 4=D[0:160] 5=80 bytes
""",
        )

    def test_moe_router_topk_softmax(self):
        logits = tensor(300, 128)
        self.assertExpectedInline(
            self.encoded(ops.moe_router_topk_softmax, logits, 8, True),
            """\
route4_f16 grid 75x1x1 of 128x1x1
0=A[0:76800] 1=A[0:76800] 2=A[0:76800] 3=B[0:9600] 4=C[0:9600] 5=80 bytes
""",
        )

    def test_fused_moe_routing(self):
        logits, scale = tensor(60), tensor(60, dtype=torch.float32)
        self.assertExpectedInline(
            self.encoded(ops.fused_moe_routing, logits, scale, 4),
            """\
route2_f16 grid 1x1x1 of 32x1x1
0=A[0:120] 1=A[0:120] 2=B[0:240] 3=C[0:16] 4=D[0:16] 5=80 bytes
""",
        )

    def test_router_logits(self):
        self.assertExpectedInline(
            self.encoded(
                ops.router_logits, tensor(1, 2048), tensor(128, 2048, dtype=torch.float32), tensor(128)
            ),
            """\
logits_few_f32 grid 64x1x1 of 128x1x1
0=A[0:4096] 1=B[0:1048576] 2=C[0:512] 3=D[0:256] 4=C[0:512] 5=44 bytes
""",
        )

    def test_router_logits_of_several_tokens(self):
        self.assertExpectedInline(
            self.encoded(ops.router_logits, tensor(32, 2048), tensor(64, 2048)),
            """\
logits_many_f16 grid 4x8x1 of 128x1x1
0=A[0:131072] 1=B[0:262144] 2=C[0:8192] 3=C[0:8192] 4=C[0:8192] 5=44 bytes
""",
        )

    def test_moe_gate(self):
        args = [tensor(1, 2816), tensor(128, 2816, dtype=torch.float32), tensor(2816), tensor(128)]
        self.assertExpectedInline(
            self.encoded(ops.moe_gate, *args, 8, EPS),
            """\
normed_logits_few_f32 grid 64x1x1 of 128x1x1
0=A[0:5632] 1=B[0:1441792] 2=C[0:5632] 3=D[0:512] 4=D[0:512] 5=44 bytes
route4_f32 grid 1x1x1 of 32x1x1
0=D[0:512] 1=D[0:512] 2=E[0:256] 3=F[0:32] 4=G[0:32] 5=80 bytes
""",
        )

    def test_moe_gate_many_tokens(self):
        args = [tensor(1030, 256), tensor(64, 256), tensor(256), tensor(64)]
        self.assertExpectedInline(
            self.encoded(ops.moe_gate, *args, 8, EPS),
            """\
normed_logits_many_f16 grid 4x258x1 of 128x1x1
0=A[0:527360] 1=B[0:32768] 2=C[0:512] 3=D[0:263680] 4=D[0:263680] 5=44 bytes
route2_f32 grid 258x1x1 of 128x1x1
0=D[0:263680] 1=D[0:263680] 2=E[0:128] 3=F[0:32960] 4=G[0:32960] 5=80 bytes
""",
        )

    def test_moe_compute_ids_tpe(self):
        ids = expert_ids(10, 4, 16)
        self.assertExpectedInline(
            self.encoded(ops.moe_compute_ids_tpe, ids, 16, 768, 2048),
            """\
ids_by_expert_i32 grid 17x1x1 of 64x1x1
0=A[0:160] 1=B[0:64] 2=C[0:2560] 3=D[0:12] 4=E[0:12] 5=16 bytes
 threadgroup(0)=80 bytes
""",
        )

    def test_moe_bucket(self):
        ids = expert_ids(600, 8, 128)
        self.assertExpectedInline(
            self.encoded(ops.moe_bucket, ids, 128),
            """\
bucket_pairs_i32 grid 3x1x1 of 800x1x1
0=A[0:19200] 1=B[0:19200] 2=C[0:516] 3=C[0:516] 4=C[0:516] 5=36 bytes
 threadgroup(0)=20336 bytes
""",
        )


class TestTraffic:
    """Every access counts, cached or not. Each operand must move once, and the norms' weights once a row."""

    def moved(self, simulated, call) -> int:
        with simulated.counters() as dispatches:
            call()
        (dispatch,) = dispatches
        *tensors, _parameters = sorted(dispatch.buffers)
        return sum(dispatch.buffers[i].bytes_read + dispatch.buffers[i].bytes_written for i in tensors)

    @pytest.mark.parametrize("rows, width", [(1, 2048), (3, 4096), (300, 512), (2, 8192)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_norms(self, simulated, rows, width, dtype):
        residual, x, w = tensor(rows, width, dtype=dtype), tensor(rows, width, dtype=dtype), tensor(width)
        must = nbytes(x, x) + rows * nbytes(w)
        assert self.moved(simulated, lambda: ops.rms_norm(x, w, EPS)) <= 1.05 * must
        out = sum_out = residual
        must = nbytes(residual, x, out) + rows * nbytes(w)
        assert self.moved(simulated, lambda: ops.fused_norm_add(residual, x, w, EPS)) <= 1.05 * must
        assert (
            self.moved(simulated, lambda: ops.fused_residual_norm(residual, x, w, EPS, False)) <= 1.05 * must
        )
        must += nbytes(sum_out)
        assert self.moved(simulated, lambda: ops.fused_residual_norm(residual, x, w, EPS)) <= 1.05 * must

    @pytest.mark.parametrize("rows, slots, width", [(1, 8, 2048), (5, 4, 1024), (2, 40, 512)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_weighted_sums(self, simulated, rows, slots, width, dtype):
        x, residual = tensor(rows, slots, width, dtype=dtype), tensor(rows, width, dtype=dtype)
        weights, norm = tensor(rows, slots, dtype=torch.float32), tensor(width)
        must = nbytes(x, weights, residual)
        assert self.moved(simulated, lambda: ops.weighted_sum_stacked(x, weights)) <= 1.05 * must
        must += nbytes(residual)
        residual_args = (residual, x, weights)
        assert (
            self.moved(simulated, lambda: ops.weighted_sum_residual_stacked_(*residual_args)) <= 1.05 * must
        )
        reduced = self.moved(simulated, lambda: ops.moe_weighted_reduce(weights, x, residual=residual))
        assert reduced <= 1.05 * must
        must += nbytes(residual) + rows * nbytes(norm)
        normed = self.moved(
            simulated, lambda: ops.weighted_sum_residual_norm_stacked_(*residual_args, norm, EPS)
        )
        assert normed <= 1.05 * must

    def test_silu_mul(self, simulated):
        gate, up = tensor(7, 300), tensor(7, 300)
        moved = self.moved(simulated, lambda: ops.silu_mul_stacked(gate, up))
        assert moved == nbytes(gate, up, gate)

    @pytest.mark.parametrize("num_experts", [8, 60, 128, 512])
    def test_router_reads_its_logits_once(self, simulated, num_experts):
        logits = tensor(5, num_experts)
        with simulated.counters() as dispatches:
            ops.moe_router_topk_softmax(logits, 4, True)
        (dispatch,) = dispatches
        *tensors, _parameters = sorted(dispatch.buffers)
        assert sum(dispatch.buffers[i].bytes_read for i in tensors) == nbytes(logits)

    def test_delta_moves_its_state_once(self, simulated):
        q, v, gate = tensor(1, 4, 2, 128), tensor(1, 4, 4, 128), tensor(1, 4, 4)
        state = tensor(1, 4, 128, 128, dtype=torch.float32)
        with simulated.counters() as dispatches:
            ops.gated_delta_rule_(q, q, v, gate, gate, state, 0.1)
        (dispatch,) = dispatches
        moved = dispatch.buffers[7]
        assert moved.bytes_read == moved.bytes_written == nbytes(state)

    def test_gate_reads_the_router_once_for_four_tokens(self, simulated):
        hidden, router = tensor(1024, 128), tensor(16, 128)
        with simulated.counters() as dispatches:
            ops.moe_gate(hidden, router, tensor(128), tensor(16), 4, EPS)
        assert len(dispatches) == 2
        assert dispatches[0].buffers[1].bytes_read == 1024 // 4 * nbytes(router)
