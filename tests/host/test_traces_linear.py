"""What linear layers, MLPs and embeddings encode, and how many bytes of weights their kernels read."""

import re

import expecttest
import pytest
import torch
from simulator.apple.facts import GPUS
from support.expert_layers import random
from support.operators import plans_for
from support.quantized_layers import place

from torch_moe_mps.quantization import quantize

ops = torch.ops.moe_mps
FORMAT = (4, 64, "affine")
pytestmark = pytest.mark.one_schedule


def matrix(rows, columns, format=FORMAT):
    return place(quantize(random((rows, columns), torch.float16, rows, columns**-0.5), *format), "mps")


class TestTraces(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _simulator(self, simulated):
        self.simulator = simulated

    def encoded(self, call, *arguments, **options) -> str:
        with self.simulator.trace() as commands:
            call(*arguments, **options)
        return re.sub(r":(?= 0=)| (?=[48]=)|(?= threadgroup)", "\n", "\n".join(commands)) + "\n"

    def linear(self, tokens: int) -> str:
        x = random((tokens, 128), torch.float16, 0).to("mps")
        return self.encoded(ops.linear_quantized, x, *matrix(320, 128), None, *FORMAT)

    def test_linear_single_token(self):
        self.assertExpectedInline(
            self.linear(1),
            """\
matmul_rows_affine4_64_f16 grid 20x1x1 of 64x1x1
 0=A[0:256] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280]
4=A[0:256] 5=A[0:256] 6=E[0:640] 7=A[0:256]
8=92 bytes
""",
        )

    def test_linear_normed_with_a_residual(self):
        x, norm = random((1, 128), torch.float16, 0).to("mps"), random((128,), torch.float16, 1).to("mps")
        residual = random((1, 320), torch.float16, 2).to("mps")
        self.assertExpectedInline(
            self.encoded(
                ops.linear_quantized, x, *matrix(320, 128), None, *FORMAT, residual=residual, norm_weight=norm
            ),
            """\
matmul_rows_normed_affine4_64_f16 grid 20x1x1 of 64x1x1
 0=A[0:256] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280]
4=A[0:256] 5=A[0:256] 6=E[0:640] 7=F[0:640]
8=92 bytes 9=G[0:256]
""",
        )

    def test_linear_of_several_tokens_normed(self):
        x, norm = random((4, 128), torch.float16, 0).to("mps"), random((128,), torch.float16, 1).to("mps")
        self.assertExpectedInline(
            self.encoded(ops.linear_quantized, x, *matrix(320, 128), None, *FORMAT, norm_weight=norm),
            """\
rms_norm_f16 grid 1x1x1 of 128x1x1
 0=A[0:1024] 1=B[0:1024] 2=C[0:256] 3=A[0:1024]
4=A[0:1024] 5=A[0:1024] 6=56 bytes
matmul_rows_few_affine4_64_f16 grid 20x1x1 of 128x1x1
 0=A[0:1024] 1=D[0:20480] 2=E[0:1280] 3=F[0:1280]
4=A[0:1024] 5=A[0:1024] 6=G[0:2560] 7=A[0:1024]
8=92 bytes 9=A[0:1024] 10=A[0:1024]
""",
        )

    def test_linear_decode(self):
        self.assertExpectedInline(
            self.linear(4),
            """\
matmul_rows_few_affine4_64_f16 grid 20x1x1 of 128x1x1
 0=A[0:1024] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280]
4=A[0:1024] 5=A[0:1024] 6=E[0:2560] 7=A[0:1024]
8=92 bytes 9=A[0:1024] 10=A[0:1024]
""",
        )

    def test_linear_eight(self):
        self.assertExpectedInline(
            self.linear(8),
            """\
gemm16_split_affine4_64_f16 grid 10x1x1 of 128x1x1
 0=A[0:2048] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280]
4=A[0:2048] 5=A[0:2048] 6=E[0:5120] 7=A[0:2048]
8=92 bytes 9=A[0:2048] 10=A[0:2048]
""",
        )

    def test_linear_prefill(self):
        self.assertExpectedInline(
            self.linear(40),
            """\
gemm16_split_affine4_64_f16 grid 10x3x1 of 128x1x1
 0=A[0:10240] 1=B[0:20480] 2=C[0:1280] 3=D[0:1280]
4=A[0:10240] 5=A[0:10240] 6=E[0:25600] 7=A[0:10240]
8=92 bytes 9=A[0:10240] 10=A[0:10240]
""",
        )

    def test_mlp_single_token(self):
        """Gates and ups in one dispatch, down of other bits and the residual in another."""
        x = random((1, 128), torch.float16, 0).to("mps")
        down = (6, 64, "affine")
        parts = (*matrix(512, 128), *matrix(128, 256, down))
        trace = self.encoded(ops.mlp_quantized, x, *parts, *FORMAT, residual=x, down_bits=6)
        self.assertExpectedInline(
            trace,
            """\
matmul_rows_affine4_64_f16 grid 32x1x1 of 64x1x1
 0=A[0:256] 1=B[0:32768] 2=C[0:2048] 3=D[0:2048]
4=A[0:256] 5=A[0:256] 6=E[0:512] 7=A[0:256]
8=92 bytes
matmul_rows_affine6_64_f16 grid 8x1x1 of 64x1x1
 0=E[0:512] 1=F[0:24576] 2=G[0:1024] 3=H[0:1024]
4=E[0:512] 5=E[0:512] 6=I[0:256] 7=A[0:256]
8=92 bytes
""",
        )

    def test_embedding(self):
        ids = torch.arange(3, dtype=torch.int32, device="mps")
        trace = self.encoded(ops.embedding_quantized, ids, *matrix(50, 128), *FORMAT, torch.bfloat16)
        self.assertExpectedInline(
            trace,
            """\
embedding_rows_affine4_64_f16 grid 3x1x1 of 128x1x1
 0=A[0:3200] 1=B[0:200] 2=C[0:200] 3=D[0:12]
4=E[0:768] 5=96 bytes
""",
        )


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_weights_are_read_once(simulated, tokens):
    """By one token, by two that share dot products, and by a tile of a matrix product."""
    parts = matrix(512, 1024)
    x = random((tokens, 1024), torch.float16, 0).to("mps")
    with simulated.counters() as counters:
        ops.linear_quantized(x, *parts, None, *FORMAT)
        torch.mps.synchronize()
    (dispatch,) = counters
    packed = dispatch.buffers[1]
    assert packed.bytes_read == packed.distinct_bytes_read == parts[0].nbytes


def test_an_embedding_reads_its_rows_alone(simulated):
    parts = matrix(50, 256)
    with simulated.counters() as counters:
        ops.embedding_quantized(torch.tensor([7, 3, -1], device="mps"), *parts, *FORMAT, torch.float16)
        torch.mps.synchronize()
    (dispatch,) = counters
    assert dispatch.buffers[0].bytes_read == 2 * parts[0].nbytes // 50


@pytest.mark.parametrize(
    "gpu, launch",
    [
        ("Apple M1", "gemm8_affine4_64_f16 grid 32x1x1"),
        ("Apple M4 Max", "gemm16_split_affine4_64_f16 grid 128x1x1"),
        ("Apple M9 Nano", "gemm16_split_affine4_64_f16 grid 128x1x1"),  # unknown: 16 cores
    ],
)
def test_grid_follows_the_cores(simulated, gpu, launch):
    x, weight = random((8, 64), torch.float16, 0).to("mps"), matrix(4096, 64)
    with plans_for(gpu), simulated.trace() as commands:
        ops.linear_quantized(x, *weight, None, *FORMAT)
    assert [command.startswith(launch) for command in commands] == [True]


def test_cores_of_a_gpu():
    """The same as those of the cost model, but for the smaller one of two chips of one name."""
    known = {name: gpu.cores for name, gpu in GPUS.items() if name != "M1 Pro 14"}
    assert {name: ops._gpu_cores(f"Apple {name}") for name in known} == known
    assert ops._gpu_cores("Simulated Apple GPU") == ops._gpu_cores("Apple M99") == 16
