"""What the expert operators encode, and how many bytes of weights their kernels read."""

import re

import expecttest
import pytest
import torch

from torch_moe_mps.quantization import quantize

ops = torch.ops.moe_mps
FORMATS = {"int4": (4, 64, "affine"), "int8": (8, 64, "affine"), "mxfp4": (4, 32, "mxfp4")}
OTHER_GROUPS = {f"int{bits}-{group}": (bits, group, "affine") for bits in (4, 8) for group in (32, 128)}
PAIRS_AT_ONCE, LANES_OF_A_SCALE = 2, 4
TILE_ROWS = 128  # of a weight


def random(*shape, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


class Layer:
    """The weights of E experts in one format, on the device."""

    def __init__(self, experts: int, hidden: int, intermediate: int, format: str):
        self.experts, self.hidden, self.intermediate = experts, hidden, intermediate
        matrices = [
            random(experts, 2 * intermediate, hidden) * hidden**-0.5,
            random(experts, hidden, intermediate) * intermediate**-0.5,
        ]
        self.format = {**FORMATS, **OTHER_GROUPS}.get(format)
        if self.format is None:
            self.gate_up, self.down = ([matrix.to("mps")] for matrix in matrices)
        else:
            quantized = [quantize(matrix, *self.format) for matrix in matrices]
            self.gate_up, self.down = (
                [part.to("mps") for part in parts if part is not None] for parts in quantized
            )

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        x = random(len(ids), self.hidden).to("mps")
        routing = torch.rand(ids.shape).to("mps")
        if self.format is None:
            return ops.moe_experts(x, *self.gate_up, *self.down, ids.to("mps"), routing)
        gate_up, down = ([*parts, None] if len(parts) == 2 else parts for parts in (self.gate_up, self.down))
        return ops.moe_experts_quantized(x, *gate_up, *down, ids.to("mps"), routing, *self.format)

    def check_read(self, dispatch, parts: list[torch.Tensor], experts: int, times: int) -> None:
        """Of the matrices every byte of `experts` experts is read, in all `times` experts' bytes at most.

        Lanes that share a scale load it in one instruction; the counters book it for each of them.
        """
        sizes = [part.numel() * part.element_size() // self.experts for part in parts]
        read = [dispatch.buffers[index] for index in (1, 2, 3) if index in dispatch.buffers]
        assert sum(buffer.distinct_bytes_read for buffer in read) == experts * sum(sizes)
        assert weight_bytes(dispatch) <= 1.05 * times * (sizes[0] + LANES_OF_A_SCALE * sum(sizes[1:]))

    def readings(self, ids: torch.Tensor) -> int:
        """How often an expert is read, over all experts: once for every two of its pairs."""
        return int(((ids.flatten().bincount() + PAIRS_AT_ONCE - 1) // PAIRS_AT_ONCE).sum())


def distinct_ids(tokens: int, slots: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :slots].int()


def weight_bytes(dispatch) -> int:
    """Of what is bound at 1, 2 and 3: the matrix, its scales and biases, or the matrix again."""
    return sum(dispatch.buffers[index].bytes_read for index in (1, 2, 3) if index in dispatch.buffers)


class TestEncoded(expecttest.TestCase):
    """Kernel and grid; then for each index the buffer and the bytes bound there; then threadgroup memory."""

    @pytest.fixture(autouse=True)
    def _simulator(self, simulated):
        self.simulator = simulated

    def encoded(self, format: str, tokens: int) -> str:
        layer = Layer(8, 128, 64, format)
        with self.simulator.trace() as commands:
            layer(distinct_ids(tokens, 2, 8))
        return re.sub(r":(?= 0=)| (?=[48]=| 12=)|(?= threadgroup)", "\n", "\n".join(commands)) + "\n"

    def test_dense_single_token(self):
        self.assertExpectedInline(
            self.encoded("dense", 1),
            """\
matmul_rows_f16 grid 8x2x1 of 64x1x1
 0=A[0:256] 1=B[0:262144] 2=B[0:262144] 3=B[0:262144]
4=C[0:8] 5=C[0:8] 6=D[0:256] 7=A[0:256]
8=92 bytes
expert_down_f16 grid 16x1x1 of 64x1x1
 0=D[0:256] 1=E[0:131072] 2=E[0:131072] 3=E[0:131072]
4=C[0:8] 5=C[0:8] 6=F[0:256] 7=G[0:8]
8=G[0:8] 9=G[0:8] 10=G[0:8] 11=116 bytes
""",
        )

    def test_dense_decode(self):
        self.assertExpectedInline(
            self.encoded("dense", 4),
            """\
matmul_rows_few_f16 grid 8x9x1 of 128x1x1
 0=A[0:1024] 1=B[0:262144] 2=B[0:262144] 3=B[0:262144]
4=C[0:32] 5=C[0:32] 6=D[0:1024] 7=A[0:1024]
8=92 bytes 9=E[0:32] 10=F[0:128]
expert_down_few_f16 grid 16x1x1 of 256x1x1
 0=D[0:1024] 1=G[0:131072] 2=G[0:131072] 3=G[0:131072]
4=C[0:32] 5=C[0:32] 6=H[0:1024] 7=I[0:32]
8=I[0:32] 9=I[0:32] 10=I[0:32] 11=116 bytes 12=E[0:32] 13=F[0:128]
 threadgroup(0)=256 bytes
""",
        )

    def test_dense_prefill(self):
        self.assertExpectedInline(
            self.encoded("dense", 40),
            """\
bucket_pairs_i32 grid 1x1x1 of 64x1x1
 0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:304]
4=E[0:24] 5=36 bytes
 threadgroup(0)=656 bytes
gemm8_f16 grid E[0:24] of 128x1x1
 0=F[0:10240] 1=G[0:262144] 2=G[0:262144] 3=G[0:262144]
4=A[0:320] 5=A[0:320] 6=H[0:10240] 7=F[0:10240]
8=92 bytes 9=B[0:320] 10=D[0:304]
 threadgroup(0)=656 bytes
gemm8_f16 grid E[12:24] of 128x1x1
 0=H[0:10240] 1=I[0:131072] 2=I[0:131072] 3=I[0:131072]
4=A[0:320] 5=A[0:320] 6=J[0:20480] 7=H[0:10240]
8=92 bytes 9=B[0:320] 10=D[0:304]
 threadgroup(0)=656 bytes
expert_combine_f16 grid 1x40x1 of 256x1x1
 0=J[0:20480] 1=A[0:320] 2=K[0:320] 3=K[0:320]
4=K[0:320] 5=K[0:320] 6=L[0:10240] 7=116 bytes
 threadgroup(0)=656 bytes
""",
        )

    def test_int4_single_token(self):
        self.assertExpectedInline(
            self.encoded("int4", 1),
            """\
matmul_rows_affine4_64_f16 grid 8x2x1 of 64x1x1
 0=A[0:256] 1=B[0:65536] 2=C[0:4096] 3=D[0:4096]
4=E[0:8] 5=E[0:8] 6=F[0:256] 7=A[0:256]
8=92 bytes
expert_down_affine4_64_f16 grid 16x1x1 of 64x1x1
 0=F[0:256] 1=G[0:32768] 2=H[0:2048] 3=I[0:2048]
4=E[0:8] 5=E[0:8] 6=J[0:256] 7=K[0:8]
8=K[0:8] 9=K[0:8] 10=K[0:8] 11=116 bytes
""",
        )

    def test_int4_decode(self):
        self.assertExpectedInline(
            self.encoded("int4", 4),
            """\
matmul_rows_few_affine4_64_f16 grid 8x9x1 of 128x1x1
 0=A[0:1024] 1=B[0:65536] 2=C[0:4096] 3=D[0:4096]
4=E[0:32] 5=E[0:32] 6=F[0:1024] 7=A[0:1024]
8=92 bytes 9=G[0:32] 10=H[0:128]
expert_down_few_affine4_64_f16 grid 16x1x1 of 256x1x1
 0=F[0:1024] 1=I[0:32768] 2=J[0:2048] 3=K[0:2048]
4=E[0:32] 5=E[0:32] 6=L[0:1024] 7=M[0:32]
8=M[0:32] 9=M[0:32] 10=M[0:32] 11=116 bytes 12=G[0:32] 13=H[0:128]
 threadgroup(0)=256 bytes
""",
        )

    def test_int4_prefill(self):
        self.assertExpectedInline(
            self.encoded("int4", 40),
            """\
bucket_pairs_i32 grid 1x1x1 of 64x1x1
 0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:304]
4=E[0:24] 5=36 bytes
 threadgroup(0)=656 bytes
gemm8_affine4_64_f16 grid E[0:24] of 128x1x1
 0=F[0:10240] 1=G[0:65536] 2=H[0:4096] 3=I[0:4096]
4=A[0:320] 5=A[0:320] 6=J[0:10240] 7=F[0:10240]
8=92 bytes 9=B[0:320] 10=D[0:304]
 threadgroup(0)=656 bytes
gemm8_affine4_64_f16 grid E[12:24] of 128x1x1
 0=J[0:10240] 1=K[0:32768] 2=L[0:2048] 3=M[0:2048]
4=A[0:320] 5=A[0:320] 6=N[0:20480] 7=J[0:10240]
8=92 bytes 9=B[0:320] 10=D[0:304]
 threadgroup(0)=656 bytes
expert_combine_f16 grid 1x40x1 of 256x1x1
 0=N[0:20480] 1=A[0:320] 2=O[0:320] 3=O[0:320]
4=O[0:320] 5=O[0:320] 6=P[0:10240] 7=116 bytes
 threadgroup(0)=656 bytes
""",
        )

    def test_int8_single_token(self):
        self.assertExpectedInline(
            self.encoded("int8", 1),
            """\
matmul_rows_affine8_64_f16 grid 8x2x1 of 64x1x1
 0=A[0:256] 1=B[0:131072] 2=C[0:4096] 3=D[0:4096]
4=E[0:8] 5=E[0:8] 6=F[0:256] 7=A[0:256]
8=92 bytes
expert_down_affine8_64_f16 grid 16x1x1 of 64x1x1
 0=F[0:256] 1=G[0:65536] 2=H[0:2048] 3=I[0:2048]
4=E[0:8] 5=E[0:8] 6=J[0:256] 7=K[0:8]
8=K[0:8] 9=K[0:8] 10=K[0:8] 11=116 bytes
""",
        )

    def test_int8_decode(self):
        self.assertExpectedInline(
            self.encoded("int8", 4),
            """\
matmul_rows_few_affine8_64_f16 grid 8x9x1 of 128x1x1
 0=A[0:1024] 1=B[0:131072] 2=C[0:4096] 3=D[0:4096]
4=E[0:32] 5=E[0:32] 6=F[0:1024] 7=A[0:1024]
8=92 bytes 9=G[0:32] 10=H[0:128]
expert_down_few_affine8_64_f16 grid 16x1x1 of 256x1x1
 0=F[0:1024] 1=I[0:65536] 2=J[0:2048] 3=K[0:2048]
4=E[0:32] 5=E[0:32] 6=L[0:1024] 7=M[0:32]
8=M[0:32] 9=M[0:32] 10=M[0:32] 11=116 bytes 12=G[0:32] 13=H[0:128]
 threadgroup(0)=256 bytes
""",
        )

    def test_int8_prefill(self):
        self.assertExpectedInline(
            self.encoded("int8", 40),
            """\
bucket_pairs_i32 grid 1x1x1 of 64x1x1
 0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:304]
4=E[0:24] 5=36 bytes
 threadgroup(0)=656 bytes
gemm8_affine8_64_f16 grid E[0:24] of 128x1x1
 0=F[0:10240] 1=G[0:131072] 2=H[0:4096] 3=I[0:4096]
4=A[0:320] 5=A[0:320] 6=J[0:10240] 7=F[0:10240]
8=92 bytes 9=B[0:320] 10=D[0:304]
 threadgroup(0)=656 bytes
gemm8_affine8_64_f16 grid E[12:24] of 128x1x1
 0=J[0:10240] 1=K[0:65536] 2=L[0:2048] 3=M[0:2048]
4=A[0:320] 5=A[0:320] 6=N[0:20480] 7=J[0:10240]
8=92 bytes 9=B[0:320] 10=D[0:304]
 threadgroup(0)=656 bytes
expert_combine_f16 grid 1x40x1 of 256x1x1
 0=N[0:20480] 1=A[0:320] 2=O[0:320] 3=O[0:320]
4=O[0:320] 5=O[0:320] 6=P[0:10240] 7=116 bytes
 threadgroup(0)=656 bytes
""",
        )

    def test_mxfp4_single_token(self):
        self.assertExpectedInline(
            self.encoded("mxfp4", 1),
            """\
matmul_rows_mxfp4_f16 grid 8x2x1 of 64x1x1
 0=A[0:256] 1=B[0:65536] 2=C[0:4096] 3=C[0:4096]
4=D[0:8] 5=D[0:8] 6=E[0:256] 7=A[0:256]
8=92 bytes
expert_down_mxfp4_f16 grid 16x1x1 of 64x1x1
 0=E[0:256] 1=F[0:32768] 2=G[0:2048] 3=G[0:2048]
4=D[0:8] 5=D[0:8] 6=H[0:256] 7=I[0:8]
8=I[0:8] 9=I[0:8] 10=I[0:8] 11=116 bytes
""",
        )

    def test_mxfp4_decode(self):
        self.assertExpectedInline(
            self.encoded("mxfp4", 4),
            """\
matmul_rows_few_mxfp4_f16 grid 8x9x1 of 128x1x1
 0=A[0:1024] 1=B[0:65536] 2=C[0:4096] 3=C[0:4096]
4=D[0:32] 5=D[0:32] 6=E[0:1024] 7=A[0:1024]
8=92 bytes 9=F[0:32] 10=G[0:128]
expert_down_few_mxfp4_f16 grid 16x1x1 of 256x1x1
 0=E[0:1024] 1=H[0:32768] 2=I[0:2048] 3=I[0:2048]
4=D[0:32] 5=D[0:32] 6=J[0:1024] 7=K[0:32]
8=K[0:32] 9=K[0:32] 10=K[0:32] 11=116 bytes 12=F[0:32] 13=G[0:128]
 threadgroup(0)=256 bytes
""",
        )

    def test_mxfp4_prefill(self):
        self.assertExpectedInline(
            self.encoded("mxfp4", 40),
            """\
bucket_pairs_i32 grid 1x1x1 of 64x1x1
 0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:304]
4=E[0:24] 5=36 bytes
 threadgroup(0)=656 bytes
gemm8_mxfp4_f16 grid E[0:24] of 128x1x1
 0=F[0:10240] 1=G[0:65536] 2=H[0:4096] 3=H[0:4096]
4=A[0:320] 5=A[0:320] 6=I[0:10240] 7=F[0:10240]
8=92 bytes 9=B[0:320] 10=D[0:304]
 threadgroup(0)=656 bytes
gemm8_mxfp4_f16 grid E[12:24] of 128x1x1
 0=I[0:10240] 1=J[0:32768] 2=K[0:2048] 3=K[0:2048]
4=A[0:320] 5=A[0:320] 6=L[0:20480] 7=I[0:10240]
8=92 bytes 9=B[0:320] 10=D[0:304]
 threadgroup(0)=656 bytes
expert_combine_f16 grid 1x40x1 of 256x1x1
 0=L[0:20480] 1=A[0:320] 2=M[0:320] 3=M[0:320]
4=M[0:320] 5=M[0:320] 6=N[0:10240] 7=116 bytes
 threadgroup(0)=656 bytes
""",
        )


FORMAT_NAMES = ("dense", *FORMATS)


@pytest.mark.parametrize(("experts", "tokens"), [(16, 1), (16, 4), (16, 8), (16, 31), (5, 4), (5, 9)])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_decode_reads_each_expert_once(simulated, format, experts, tokens):
    """From memory. A threadgroup goes through its rows again for every two pairs."""
    layer = Layer(experts, 192, 128, format)
    for ids in (distinct_ids(tokens, 3, experts), distinct_ids(1, 3, experts).expand(tokens, 3)):
        with simulated.counters() as dispatches:
            layer(ids)
        assert len(dispatches) == 2
        for dispatch, parts in zip(dispatches, (layer.gate_up, layer.down), strict=True):
            layer.check_read(dispatch, parts, len(ids.unique()), layer.readings(ids))


@pytest.mark.parametrize("format", OTHER_GROUPS)
def test_decode_reads_scales_of_other_groups_once(simulated, format):
    layer = Layer(4, 384, 128, format)
    for ids in (distinct_ids(6, 2, 4), distinct_ids(1, 2, 4).expand(11, 2)):
        with simulated.counters() as dispatches:
            layer(ids)
        assert len(dispatches) == 2
        for dispatch, parts in zip(dispatches, (layer.gate_up, layer.down), strict=True):
            layer.check_read(dispatch, parts, len(ids.unique()), layer.readings(ids))


@pytest.mark.parametrize(
    ("tokens", "kernel", "pairs"),
    [(12, "gemm8", 8), (24, "gemm8", 8), (25, "gemm32", 32), (70, "gemm32", 32)],
)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_prefill_reads_a_weight_tile_once_per_tile_of_pairs(simulated, format, tokens, kernel, pairs):
    """And launches as many threadgroups as there are tiles, even when all tokens choose one expert.

    Matrix products begin with six pairs an expert; with more than twelve the tiles are long.
    """
    layer = Layer(4, 128, 128, format)
    for ids in (distinct_ids(tokens, 2, 4), torch.full((tokens, 2), 2, dtype=torch.int32)):
        with simulated.counters() as dispatches:
            layer(ids)
        assert all(dispatch.kernel.startswith(f"{kernel}_") for dispatch in dispatches[1:3])
        tiles = int(((ids.flatten().bincount(minlength=4) + pairs - 1) // pairs).sum())
        rows = (2 * layer.intermediate, layer.hidden)
        for dispatch, parts, count in zip(dispatches[1:3], (layer.gate_up, layer.down), rows, strict=True):
            assert dispatch.threadgroups == tiles * -(-count // TILE_ROWS)
            layer.check_read(dispatch, parts, len(ids.unique()), tiles)


def test_prefill_of_sentinels_alone(simulated):
    """No tile: the grids are not empty, nothing is read, and the result is zero."""
    layer = Layer(4, 128, 64, "int4")
    with simulated.counters() as dispatches:
        out = layer(torch.full((40, 2), -1, dtype=torch.int32))
    assert not out.cpu().any()
    for dispatch in dispatches[1:3]:
        assert weight_bytes(dispatch) == 0


@pytest.mark.parametrize(
    ("swapped", "transposed", "kernel"),
    [(False, False, "rows"), (True, False, "columns"), (False, True, "columns"), (True, True, "rows")],
)
def test_a_stack_is_bound_where_it_lies(simulated, swapped, transposed, kernel):
    """Contiguous, or with its last two dimensions swapped. A copy would not begin behind another expert."""
    stack = random(9, 64, 96).to("mps")[1:]
    weight = stack.mT if swapped else stack
    x = random(1, weight.shape[1 if transposed else 2]).to("mps")
    with simulated.trace() as commands:
        ops.expert_mm(x, weight, torch.tensor([[5]], device="mps"), None, transposed)
    (command,) = commands
    assert command.startswith(f"matmul_{kernel}_f16 ")
    assert f" 1=B[{64 * 96 * 2}:{9 * 64 * 96 * 2}] " in command


def test_other_strides_are_copied_with_a_warning(simulated, capfd):
    stack = random(8, 128, 96).to("mps")[:, :64]
    x, ids = random(1, 96).to("mps"), torch.tensor([[5]], device="mps")
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with simulated.trace() as commands:
            ops.expert_mm(x, stack, ids)
    finally:
        torch.set_warn_always(always)
    assert f" 1=B[0:{8 * 64 * 96 * 2}] " in commands[0]
    assert "a stack of experts of shape [8, 64, 96]" in capfd.readouterr().err
