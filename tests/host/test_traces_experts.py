"""What the expert operators encode, and how many bytes of weights their kernels read."""

import re

import expecttest
import pytest
import torch

from torch_moe_mps.quantization import quantize

ops = torch.ops.moe_mps
FORMATS = {"int4": (4, 64, "affine"), "int8": (8, 64, "affine"), "mxfp4": (4, 32, "mxfp4")}
OTHER_GROUPS = {f"int{bits}-{group}": (bits, group, "affine") for bits in (4, 8) for group in (32, 128)}
TILE_ROWS, TILE_COLUMNS, DECODE_TOKENS = 32, 64, 32


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

    def check_read(self, dispatch, parts: list[torch.Tensor], experts: int, lanes: int) -> None:
        """The matrices of `experts` experts are read once, with 5 % to spare.

        Where `lanes` is more than 1, so many lanes that work on values of one group load its scale in one
        instruction from one address; the counters book it for each of them.
        """
        sizes = [experts * part.numel() * part.element_size() // self.experts for part in parts]
        must = sizes[0] + sum(sizes[1:])
        may = 1.05 * (sizes[0] + lanes * sum(sizes[1:]))
        assert must <= weight_bytes(dispatch) <= may

    def lanes_per_group(self, tokens: int) -> int:
        """The lanes that load a scale: in decode for several tokens one, which passes it on."""
        if self.format is None or 1 < tokens <= DECODE_TOKENS:
            return 1
        bits, group_size, _ = self.format
        values = 32 if tokens == 1 and bits == 4 else 16
        return group_size // values


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
expert_rows_single_f16 grid 4x2x1 of 256x1x1
 0=A[0:256] 1=B[0:262144] 2=B[0:262144] 3=B[0:262144]
4=C[0:8] 5=C[0:8] 6=D[0:256] 7=84 bytes
expert_down_single_f16 grid 32x1x1 of 64x1x1
 0=D[0:256] 1=E[0:131072] 2=E[0:131072] 3=E[0:131072]
4=C[0:8] 5=C[0:8] 6=F[0:256] 7=G[0:8]
8=G[0:8] 9=G[0:8] 10=G[0:8] 11=108 bytes
""",
        )

    def test_dense_decode(self):
        self.assertExpectedInline(
            self.encoded("dense", 4),
            """\
expert_rows_few_f16 grid 2x9x1 of 256x1x1
 0=A[0:1024] 1=B[0:262144] 2=B[0:262144] 3=B[0:262144]
4=C[0:32] 5=C[0:32] 6=D[0:1024] 7=84 bytes
8=E[0:128]
expert_down_few_f16 grid 16x1x1 of 256x1x1
 0=D[0:1024] 1=F[0:131072] 2=F[0:131072] 3=F[0:131072]
4=C[0:32] 5=C[0:32] 6=G[0:1024] 7=H[0:32]
8=H[0:32] 9=H[0:32] 10=H[0:32] 11=108 bytes 12=E[0:128]
 threadgroup(0)=288 bytes
""",
        )

    def test_dense_prefill(self):
        self.assertExpectedInline(
            self.encoded("dense", 40),
            """\
bucket_pairs_i32 grid 1x1x1 of 64x1x1
 0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:176]
4=E[0:24] 5=36 bytes
 threadgroup(0)=656 bytes
expert_gemm_f16 grid E[0:24] of 128x1x1
 0=F[0:10240] 1=G[0:262144] 2=G[0:262144] 3=G[0:262144]
4=A[0:320] 5=H[0:10240] 6=B[0:320] 7=D[0:176]
8=84 bytes
 threadgroup(0)=656 bytes
expert_gemm_f16 grid E[12:24] of 128x1x1
 0=H[0:10240] 1=I[0:131072] 2=I[0:131072] 3=I[0:131072]
4=A[0:320] 5=J[0:20480] 6=B[0:320] 7=D[0:176]
8=84 bytes
 threadgroup(0)=656 bytes
expert_combine_f16 grid 1x40x1 of 256x1x1
 0=J[0:20480] 1=A[0:320] 2=K[0:320] 3=K[0:320]
4=K[0:320] 5=K[0:320] 6=L[0:10240] 7=108 bytes
 threadgroup(0)=656 bytes
""",
        )

    def test_int4_single_token(self):
        self.assertExpectedInline(
            self.encoded("int4", 1),
            """\
expert_rows_single_affine4_f16 grid 4x2x1 of 256x1x1
 0=A[0:256] 1=B[0:65536] 2=C[0:4096] 3=D[0:4096]
4=E[0:8] 5=E[0:8] 6=F[0:256] 7=84 bytes
expert_down_single_affine4_f16 grid 32x1x1 of 64x1x1
 0=F[0:256] 1=G[0:32768] 2=H[0:2048] 3=I[0:2048]
4=E[0:8] 5=E[0:8] 6=J[0:256] 7=K[0:8]
8=K[0:8] 9=K[0:8] 10=K[0:8] 11=108 bytes
""",
        )

    def test_int4_decode(self):
        self.assertExpectedInline(
            self.encoded("int4", 4),
            """\
expert_rows_matrix_affine4_f16 grid 1x18x1 of 128x1x1
 0=A[0:1024] 1=B[0:65536] 2=C[0:4096] 3=D[0:4096]
4=E[0:32] 5=E[0:32] 6=F[0:1024] 7=84 bytes
8=G[0:128]
expert_down_parts_affine4_f16 grid 8x1x1 of 512x1x1
 0=F[0:1024] 1=H[0:32768] 2=I[0:2048] 3=J[0:2048]
4=E[0:32] 5=E[0:32] 6=K[0:1024] 7=L[0:32]
8=L[0:32] 9=L[0:32] 10=L[0:32] 11=108 bytes 12=G[0:128]
 threadgroup(0)=544 bytes
""",
        )

    def test_int4_prefill(self):
        self.assertExpectedInline(
            self.encoded("int4", 40),
            """\
bucket_pairs_i32 grid 1x1x1 of 64x1x1
 0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:176]
4=E[0:24] 5=36 bytes
 threadgroup(0)=656 bytes
expert_gemm_affine4_f16 grid E[0:24] of 128x1x1
 0=F[0:10240] 1=G[0:65536] 2=H[0:4096] 3=I[0:4096]
4=A[0:320] 5=J[0:10240] 6=B[0:320] 7=D[0:176]
8=84 bytes
 threadgroup(0)=656 bytes
expert_gemm_affine4_f16 grid E[12:24] of 128x1x1
 0=J[0:10240] 1=K[0:32768] 2=L[0:2048] 3=M[0:2048]
4=A[0:320] 5=N[0:20480] 6=B[0:320] 7=D[0:176]
8=84 bytes
 threadgroup(0)=656 bytes
expert_combine_f16 grid 1x40x1 of 256x1x1
 0=N[0:20480] 1=A[0:320] 2=O[0:320] 3=O[0:320]
4=O[0:320] 5=O[0:320] 6=P[0:10240] 7=108 bytes
 threadgroup(0)=656 bytes
""",
        )

    def test_int8_single_token(self):
        self.assertExpectedInline(
            self.encoded("int8", 1),
            """\
expert_rows_single_affine8_f16 grid 4x2x1 of 256x1x1
 0=A[0:256] 1=B[0:131072] 2=C[0:4096] 3=D[0:4096]
4=E[0:8] 5=E[0:8] 6=F[0:256] 7=84 bytes
expert_down_single_affine8_f16 grid 32x1x1 of 64x1x1
 0=F[0:256] 1=G[0:65536] 2=H[0:2048] 3=I[0:2048]
4=E[0:8] 5=E[0:8] 6=J[0:256] 7=K[0:8]
8=K[0:8] 9=K[0:8] 10=K[0:8] 11=108 bytes
""",
        )

    def test_int8_decode(self):
        self.assertExpectedInline(
            self.encoded("int8", 4),
            """\
expert_rows_matrix_affine8_f16 grid 1x18x1 of 128x1x1
 0=A[0:1024] 1=B[0:131072] 2=C[0:4096] 3=D[0:4096]
4=E[0:32] 5=E[0:32] 6=F[0:1024] 7=84 bytes
8=G[0:128]
expert_down_parts_affine8_f16 grid 8x1x1 of 512x1x1
 0=F[0:1024] 1=H[0:65536] 2=I[0:2048] 3=J[0:2048]
4=E[0:32] 5=E[0:32] 6=K[0:1024] 7=L[0:32]
8=L[0:32] 9=L[0:32] 10=L[0:32] 11=108 bytes 12=G[0:128]
 threadgroup(0)=544 bytes
""",
        )

    def test_int8_prefill(self):
        self.assertExpectedInline(
            self.encoded("int8", 40),
            """\
bucket_pairs_i32 grid 1x1x1 of 64x1x1
 0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:176]
4=E[0:24] 5=36 bytes
 threadgroup(0)=656 bytes
expert_gemm_affine8_f16 grid E[0:24] of 128x1x1
 0=F[0:10240] 1=G[0:131072] 2=H[0:4096] 3=I[0:4096]
4=A[0:320] 5=J[0:10240] 6=B[0:320] 7=D[0:176]
8=84 bytes
 threadgroup(0)=656 bytes
expert_gemm_affine8_f16 grid E[12:24] of 128x1x1
 0=J[0:10240] 1=K[0:65536] 2=L[0:2048] 3=M[0:2048]
4=A[0:320] 5=N[0:20480] 6=B[0:320] 7=D[0:176]
8=84 bytes
 threadgroup(0)=656 bytes
expert_combine_f16 grid 1x40x1 of 256x1x1
 0=N[0:20480] 1=A[0:320] 2=O[0:320] 3=O[0:320]
4=O[0:320] 5=O[0:320] 6=P[0:10240] 7=108 bytes
 threadgroup(0)=656 bytes
""",
        )

    def test_mxfp4_single_token(self):
        self.assertExpectedInline(
            self.encoded("mxfp4", 1),
            """\
expert_rows_single_mxfp4_f16 grid 4x2x1 of 256x1x1
 0=A[0:256] 1=B[0:65536] 2=C[0:4096] 3=C[0:4096]
4=D[0:8] 5=D[0:8] 6=E[0:256] 7=84 bytes
expert_down_single_mxfp4_f16 grid 32x1x1 of 64x1x1
 0=E[0:256] 1=F[0:32768] 2=G[0:2048] 3=G[0:2048]
4=D[0:8] 5=D[0:8] 6=H[0:256] 7=I[0:8]
8=I[0:8] 9=I[0:8] 10=I[0:8] 11=108 bytes
""",
        )

    def test_mxfp4_decode(self):
        self.assertExpectedInline(
            self.encoded("mxfp4", 4),
            """\
expert_rows_few_mxfp4_f16 grid 2x9x1 of 256x1x1
 0=A[0:1024] 1=B[0:65536] 2=C[0:4096] 3=C[0:4096]
4=D[0:32] 5=D[0:32] 6=E[0:1024] 7=84 bytes
8=F[0:128]
expert_down_few_mxfp4_f16 grid 16x1x1 of 256x1x1
 0=E[0:1024] 1=G[0:32768] 2=H[0:2048] 3=H[0:2048]
4=D[0:32] 5=D[0:32] 6=I[0:1024] 7=J[0:32]
8=J[0:32] 9=J[0:32] 10=J[0:32] 11=108 bytes 12=F[0:128]
 threadgroup(0)=288 bytes
""",
        )

    def test_mxfp4_prefill(self):
        self.assertExpectedInline(
            self.encoded("mxfp4", 40),
            """\
bucket_pairs_i32 grid 1x1x1 of 64x1x1
 0=A[0:320] 1=B[0:320] 2=C[0:36] 3=D[0:176]
4=E[0:24] 5=36 bytes
 threadgroup(0)=656 bytes
expert_gemm_mxfp4_f16 grid E[0:24] of 128x1x1
 0=F[0:10240] 1=G[0:65536] 2=H[0:4096] 3=H[0:4096]
4=A[0:320] 5=I[0:10240] 6=B[0:320] 7=D[0:176]
8=84 bytes
 threadgroup(0)=656 bytes
expert_gemm_mxfp4_f16 grid E[12:24] of 128x1x1
 0=I[0:10240] 1=J[0:32768] 2=K[0:2048] 3=K[0:2048]
4=A[0:320] 5=L[0:20480] 6=B[0:320] 7=D[0:176]
8=84 bytes
 threadgroup(0)=656 bytes
expert_combine_f16 grid 1x40x1 of 256x1x1
 0=L[0:20480] 1=A[0:320] 2=M[0:320] 3=M[0:320]
4=M[0:320] 5=M[0:320] 6=N[0:10240] 7=108 bytes
 threadgroup(0)=656 bytes
""",
        )


FORMAT_NAMES = ("dense", *FORMATS)


@pytest.mark.parametrize(("experts", "tokens"), [(16, 1), (16, 4), (16, 8), (16, 32), (5, 4), (5, 32)])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_decode_reads_each_expert_once(simulated, format, experts, tokens):
    layer = Layer(experts, 192, 128, format)
    for ids in (distinct_ids(tokens, 3, experts), distinct_ids(1, 3, experts).expand(tokens, 3)):
        with simulated.counters() as dispatches:
            layer(ids)
        assert len(dispatches) == 2
        for dispatch, parts in zip(dispatches, (layer.gate_up, layer.down), strict=True):
            layer.check_read(dispatch, parts, len(ids.unique()), layer.lanes_per_group(tokens))


@pytest.mark.parametrize("format", OTHER_GROUPS)
def test_decode_reads_scales_of_other_groups_once(simulated, format):
    layer = Layer(4, 384, 128, format)
    for ids in (distinct_ids(6, 2, 4), distinct_ids(1, 2, 4).expand(20, 2)):
        with simulated.counters() as dispatches:
            layer(ids)
        for dispatch, parts in zip(dispatches, (layer.gate_up, layer.down), strict=True):
            layer.check_read(dispatch, parts, len(ids.unique()), layer.lanes_per_group(len(ids)))


@pytest.mark.parametrize(("tokens", "units"), [(3, 18), (10, 20)])
def test_decode_takes_blocks_of_rows_in_twos_and_halves(simulated, tokens, units):
    """74 blocks of 32 outputs: of the units, pairs or experts, the last 9 have a threadgroup for each block,
    of these 2, and one for the sentinels, one for half a block, the others one for two."""
    layer, ids = Layer(20, 64, 74 * 32, "int4"), distinct_ids(tokens, 6, 20)
    with simulated.counters() as dispatches:
        layer(ids)
    assert dispatches[0].threadgroups == 37 * ((units - 9) + 2 * 7 + 4 * (2 + 1))
    layer.check_read(dispatches[0], layer.gate_up, len(ids.unique()), 1)


def test_a_short_grid_takes_blocks_of_rows_one_by_one(simulated):
    """16 pairs, each with 74 blocks: fewer than 1200. Two rows of the grid, half as long, for each unit."""
    layer = Layer(20, 64, 74 * 32, "int4")
    with simulated.counters() as dispatches:
        layer(distinct_ids(2, 8, 20))
    assert dispatches[0].threadgroups == 37 * 2 * (16 + 1)


@pytest.mark.parametrize(
    ("experts", "tokens", "slots", "kernel"),
    [
        (8, 2, 2, "expert_down_parts"),
        (9, 4, 2, "expert_down_parts"),
        (9, 5, 2, "expert_down_matrix"),
        (8, 32, 9, "expert_down_parts"),  # at most 8 + (288 - 8) / 32 = 16 starts of an expert
        (8, 32, 10, "expert_down_matrix"),
    ],
)
def test_few_experts_are_shared_by_simdgroups(simulated, experts, tokens, slots, kernel):
    layer = Layer(experts, 64, 64, "int4")
    with simulated.trace() as commands:
        layer(torch.arange(tokens * slots, dtype=torch.int32).reshape(tokens, slots) % experts)
    assert [command.split()[0] for command in commands] == [
        "expert_rows_matrix_affine4_f16",
        f"{kernel}_affine4_f16",
    ]


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_prefill_reads_a_weight_tile_once_per_tile_of_rows(simulated, format):
    """And launches as many threadgroups as there are tiles, even when all tokens choose one expert."""
    layer = Layer(4, 128, 64, format)
    for ids in (distinct_ids(70, 2, 4), torch.full((70, 1), 2, dtype=torch.int32)):
        with simulated.counters() as dispatches:
            layer(ids)
        assert len(dispatches) == 4
        tiles = int(((ids.flatten().bincount(minlength=4) + TILE_ROWS - 1) // TILE_ROWS).sum())
        rows = (2 * layer.intermediate, layer.hidden)
        for dispatch, parts, columns in zip(dispatches[1:3], (layer.gate_up, layer.down), rows, strict=True):
            assert dispatch.threadgroups == tiles * (columns // TILE_COLUMNS)
            layer.check_read(dispatch, parts, tiles, layer.lanes_per_group(len(ids)))


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
    assert command.startswith(f"expert_{kernel}_single_f16 ")
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
