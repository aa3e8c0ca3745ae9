"""What counted kernels write is as float64, the package's kernels and MLX's; and the command's tables."""

import numpy as np
import pytest
import torch
from simulator import apple
from simulator.apple import __main__ as command
from simulator.apple import cases, mlx, mlx_dense
from support.expert_layers import check_experts, layer
from support.msl_probes import linux_only
from support.quantized_layers import check_layer
from support.routing import check_gate, check_sorting, gate_arguments, random_ids

pytestmark = linux_only
SWEEP = pytest.mark.sweep
EXPERTS, SLOTS, TOKENS = 4, 2, 9


class TestOurs:
    """The checks are those of the operators' own tests; here counted kernels run."""

    def kernels(self, check) -> list[str]:
        with apple.measuring() as measurements:
            check()
        assert all(m.fraction == 1 and m.slots(apple.GPUS["M1"]) > 0 for m in measurements)
        return [m.kernel for m in measurements]

    @pytest.mark.parametrize("tokens, dispatches", [(1, 2), (7, 2), (40, 4)])
    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, *(pytest.param(d, marks=SWEEP) for d in (torch.float16, torch.float32))]
    )
    def test_experts(self, simulated, dtype, tokens, dispatches):
        assert (
            len(self.kernels(lambda: check_experts("mps", layer(tokens, 2, 5, 64, 40, dtype)))) == dispatches
        )

    @pytest.mark.parametrize("tokens", [1, 7, 40])
    @pytest.mark.parametrize(
        "format",
        [(4, 64, "affine"), *(pytest.param(f, marks=SWEEP) for f in ((8, 32, "affine"), (4, 32, "mxfp4")))],
    )
    def test_quantised_experts(self, simulated, format, tokens):
        shape = (tokens, 2, 5, 128, 64)
        assert self.kernels(lambda: check_layer("mps", shape, format, torch.bfloat16, tokens))

    def test_routing(self, simulated):
        """Later dispatches read what earlier ones wrote: grids and lists."""
        assert self.kernels(lambda: check_sorting(random_ids((300, 4), 0, 16, 1).to("mps"), 16))
        arguments = gate_arguments(5, 128, 24, torch.bfloat16, torch.bfloat16, 3)
        assert self.kernels(lambda: check_gate(*arguments, 4, True, "mps"))


class TestMlx:
    """Each kernel that the model launches as MLX would, on random numbers."""

    @staticmethod
    def placed(values: np.ndarray) -> np.ndarray:
        memory = cases.zeros(values.dtype.type, *values.shape)
        memory[...] = values
        return memory

    def x(self, *shape: int) -> np.ndarray:
        return self.placed(np.random.default_rng(5).standard_normal(shape).astype(np.float16))

    def matrices(self, format: mlx.Format, experts: int, rows: int, inputs: int):
        """What the kernels read, and in float64 what MLX makes of it on the CPU."""
        mx = pytest.importorskip("mlx.core")
        options = {"group_size": format.group, "bits": format.bits, "mode": format.mode}
        weight = mx.random.normal((experts, rows, inputs), scale=inputs**-0.5, key=mx.random.key(7))
        packed, *scales = mx.quantize(weight, **options)
        halves = [s.astype(mx.float16) if s.dtype == mx.float32 else s for s in scales]
        exact = [h.astype(s.dtype) for h, s in zip(halves, scales, strict=True)]
        dense = mx.dequantize(packed, *exact, **options, dtype=mx.float32)
        arrays = map(self.placed, map(np.array, (packed, *halves)))
        weights = dict(zip(("w", "scales", "biases"), arrays, strict=False))
        return mlx.Matrices(weights, format, experts, rows, inputs), np.array(dense).astype(np.float64)

    def check(self, launch: mlx.Launch, out: np.ndarray, expected: np.ndarray) -> str:
        measurement = mlx.measure(launch, apple.Work("", 1), apple.Recorder())
        assert measurement.fraction == 1
        error = np.abs(out.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error < 1.5e-3, measurement.kernel
        return measurement.kernel.split("<")[0]

    @pytest.mark.parametrize(
        "name, inputs, fast",
        [
            *(("int4", 512, "_fast"), ("mxfp4", 512, "_fast"), ("int4", 320, ""), ("int6", 320, "")),
            *(
                pytest.param(n, 512, "_fast", marks=SWEEP)
                for n in cases.FORMATS
                if n not in ("int4", "mxfp4")
            ),
            *(pytest.param(*c, marks=SWEEP) for c in (("int8", 768, "_fast"), ("mxfp4", 320, ""))),
        ],
    )
    def test_quantised_experts(self, name, inputs, fast):
        format, rows = cases.FORMATS[name], 64
        m, dense = self.matrices(format, EXPERTS, rows, inputs)
        ids = cases.routing(cases.Shape(EXPERTS, SLOTS, 0, 0), TOKENS)
        x, out = self.x(TOKENS, inputs), np.zeros((ids.size, rows), np.float16)
        x_rows = np.repeat(np.arange(TOKENS), SLOTS)
        expected = np.einsum("pi,pri->pr", x[x_rows].astype(np.float64), dense[ids.reshape(-1)])
        launch = mlx.gather_qmv(m, x, x_rows.reshape(ids.shape), ids, out, "f16")
        assert self.check(launch, out, expected) == f"{format.prefix}_gather_qmv{fast}"
        order = np.argsort(ids.reshape(-1), kind="stable")
        offsets = np.searchsorted(ids.reshape(-1)[order], np.arange(EXPERTS))
        launch = mlx.gather_qmm_rhs(m, self.placed(x[x_rows[order]]), offsets, out, "f16")
        assert self.check(launch, out, expected[order]) == f"{format.prefix}_gather_qmm_rhs"

    @pytest.mark.parametrize(
        "name, gpu",
        [
            *(("int4", "M4 Max"), ("mxfp4", "M2")),
            *(pytest.param(n, g, marks=SWEEP) for n, g in (("int4", "M2"), ("mxfp4", "M4 Max"))),
            *(pytest.param("int6", gpu, marks=SWEEP) for gpu in ("M2", "M4 Max")),
        ],
    )
    def test_one_quantised_matrix(self, name, gpu):
        format = cases.FORMATS[name]
        m, dense = self.matrices(format, 1, 64, 512)
        names = []
        for count in (1, 7, 40):
            x, out = self.x(count, 512), np.zeros((count, 64), np.float16)
            launch = mlx.quantized_matmul(apple.GPUS[gpu], m, x, out, "f16")
            if "splitk" in launch.template:
                parts = launch.arguments["y"]
                launch.run(apple.Recorder())
                np.testing.assert_allclose(parts.sum(0), x @ dense[0].T, atol=2e-2)
                names.append("splitk")
            else:
                names.append(self.check(launch, out, x.astype(np.float64) @ dense[0].T))
        wide = format.mode != "affine" or gpu == "M4 Max"
        assert names == [
            f"{format.prefix}_qmv_fast",
            f"{format.prefix}_qmv{'_wide' if wide else '_fast'}",
            "splitk",
        ]

    def test_a_tile_of_a_quantised_matrix(self):
        m, dense = self.matrices(cases.FORMATS["int4"], 1, 512 * 32, 64)
        x, out = self.x(40, 64), np.zeros((40, 512 * 32), np.float16)
        name = self.check(mlx.qmm(m, x, out, "f16"), out, x.astype(np.float64) @ dense[0].T)
        assert name == "affine_qmm_t"

    def test_dense_experts(self):
        rows, inputs = 96, 80
        w, ids = self.x(EXPERTS, rows, inputs), cases.routing(cases.Shape(EXPERTS, SLOTS, 0, 0), TOKENS)
        x, out = self.x(TOKENS, inputs), np.zeros((ids.size, rows), np.float16)
        x_rows = np.repeat(np.arange(TOKENS), SLOTS)
        matrices = w.astype(np.float64)[ids.reshape(-1)]
        expected = np.einsum("pi,pri->pr", x[x_rows].astype(np.float64), matrices)
        self.check(mlx_dense.gather_mv(w, x, x_rows.reshape(ids.shape), ids, out, "f16"), out, expected)
        order = np.argsort(ids.reshape(-1), kind="stable")
        offsets = np.searchsorted(ids.reshape(-1)[order], np.arange(EXPERTS))
        launch = mlx_dense.gather_mm_rhs(w, self.placed(x[x_rows[order]]), offsets, out, "f16")
        self.check(launch, out, expected[order])

    @pytest.mark.parametrize("gpu, names", [("M1", "gemv gemm gemm"), ("M4 Max", "gemv gemv_wide gemm")])
    def test_one_dense_matrix(self, gpu, names):
        found = []
        for count in (1, 7, 40):
            w, x, out = self.x(320, 128), self.x(count, 128), np.zeros((count, 320), np.float16)
            launch = mlx_dense.matmul(apple.GPUS[gpu], w, x, out, "f16")
            found.append(self.check(launch, out, x.astype(np.float64) @ w.astype(np.float64).T))
        assert found == names.split()

    def test_parts_of_a_dense_product(self):
        w, x = self.x(64, 1024), self.x(20, 1024)
        launch = mlx_dense.matmul(apple.GPUS["M1"], w, x, np.zeros((20, 64), np.float16), "f16")
        launch.run(apple.Recorder())
        expected = x.astype(np.float64) @ w.astype(np.float64).T
        np.testing.assert_allclose(launch.arguments["C"].sum(0), expected, atol=1e-2)


class TestCommand:
    def run(self, capsys, *arguments) -> list[str]:
        assert command.main(list(arguments)) == 0
        return capsys.readouterr().out.splitlines()

    def test_a_table(self, simulated, capsys):
        lines = self.run(
            capsys, "--shape", "8,2,512,256", "--tokens", "1,3", "--formats", "int4,bf16", "--gpu", "M1,M4"
        )
        titles = [line for line in lines if line.startswith("8 experts")]
        assert titles == [
            f"8 experts, 2 a token, 512 -> 2 x 256 -> 512; {name}, activations bf16"
            for name in ("int4", "bf16")
        ]
        for tokens in (1, 3):
            for matmul in ("gate+up", "down"):
                for side in ("ours", "MLX "):
                    start = f"{tokens:4} {matmul:7} {side:4} "
                    assert sum(line.startswith(start) for line in lines) == 2, start
        ratios = [line for line in lines if "MLX / ours" in line]
        assert len(ratios) == 8 and all("M1 " in line and "M4 " in line for line in ratios)

    def test_one_matrix_and_classes(self, simulated, capsys):
        lines = self.run(
            capsys, "--linear", "512,256", "--tokens", "2", "--no-mlx", "--classes", "--gpu", "M3"
        )
        assert lines[1].startswith("one matrix, 512 -> 256; int4")
        assert sum("   2 matrix  ours " in line for line in lines) == 1
        assert any(line.strip().startswith("float ") for line in lines)
        assert not any("MLX" in line for line in lines)

    def test_a_sample_is_marked(self, simulated, capsys):
        lines = self.run(capsys, "--linear", "2048,4096", "--tokens", "200", "--no-mlx")
        assert any("matrix  ours" in line and "~" in line for line in lines)

    def test_facts(self, capsys):
        assert self.run(capsys, "--facts") == apple.table().splitlines()

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ("--shape 8,2,512", "--shape takes 4 positive numbers with commas between, got '8,2,512'"),
            ("--shape 2,3,64,64", "--shape takes no more experts of a token than there are, got '2,3,64,64'"),
            ("--tokens 1,x", "--tokens takes positive numbers with commas between, got '1,x'"),
            ("--linear 0,64", "--linear takes 2 positive numbers with commas between, got '0,64'"),
            ("--formats f8", f"--formats takes some of {', '.join(cases.FORMATS)}, bf16, f16, got 'f8'"),
            ("--gpu M0", f"--gpu takes some of {', '.join(apple.GPUS)}, got 'M0'"),
        ],
    )
    def test_bad_input(self, capsys, arguments, message):
        assert command.main(arguments.split()) == 1
        assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("tokens", [3, 60])
def test_a_sample_of_one_dispatch_leaves_the_next_its_lists(simulated, tokens):
    shape = cases.Shape(8, 2, 512, 1024)
    whole = cases.ours(shape, "int4", "bf16", tokens)
    sample = cases.ours(shape, "int4", "bf16", tokens, apple.Limit(groups=12, slots=0))
    assert any(row.measurement.fraction < 1 for row in sample)
    for one, other in zip(whole, sample, strict=True):
        assert one.measurement.fraction == 1
        slots = [row.measurement.slots(apple.GPUS["M1"]) for row in (one, other)]
        assert slots[1] == pytest.approx(slots[0], rel=0.1)


def test_weights_that_are_touched_are_counted_once(simulated):
    """Whole runs count the lines of memory; it is what a matmul cannot but read and write."""
    shape = cases.Shape(8, 2, 512, 256)
    for name in ("int4", "mxfp4", "bf16"):
        for row in cases.ours(shape, name, "bf16", 3):
            if row.measurement.work:
                assert row.measurement.counts.distinct_bytes == pytest.approx(
                    row.measurement.work.dram_bytes, rel=0.02
                )
