"""What counted kernels write is as float64, the package's kernels and MLX's; and the command's tables."""

import functools
import re

import numpy as np
import pytest
import torch
from measured.apple import __main__ as command
from measured.apple import cases, goals, layers, mlx
from measured.apple import tokens as of_tokens
from measured.cases import formats, mlx_dense, mlx_quantized
from measured.cases import mlx as launches
from measured.cases.formats import DENSE
from measured.cases.mlx_launch import Launch, Matrices
from measured.cases.values import Values
from simulator import apple
from simulator.testing import linux_only
from support.expert_layers import check_experts, layer
from support.oracles_operators import checked
from support.processes import REPOSITORY
from support.quantized_layers import check_layer
from support.routing import gate_arguments, random_ids

pytestmark = linux_only
SWEEP = pytest.mark.sweep
EXPERTS, SLOTS, TOKENS = 4, 2, 9


class TestOurs:
    """The same checks as in the operators' own tests, here with the instrumented kernels."""

    def kernels(self, check) -> list[str]:
        measurements = apple.measure(check)
        assert all(m.fraction == 1 and m.slots(apple.GPUS["M1"]) > 0 for m in measurements)
        return [m.kernel for m in measurements]

    @pytest.mark.parametrize(
        "tokens, dispatches", [(1, 2), *(pytest.param(*more, marks=SWEEP) for more in ((7, 2), (40, 4)))]
    )
    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, *(pytest.param(d, marks=SWEEP) for d in (torch.float16, torch.float32))]
    )
    def test_experts(self, simulated, dtype, tokens, dispatches):
        assert (
            len(self.kernels(lambda: check_experts("mps", layer(tokens, 2, 5, 64, 40, dtype)))) == dispatches
        )

    @pytest.mark.parametrize("tokens", [1, *(pytest.param(more, marks=SWEEP) for more in (7, 40))])
    @pytest.mark.parametrize(
        "format", ["affine4_64", *(pytest.param(f, marks=SWEEP) for f in ("affine8_32", "mxfp4"))]
    )
    def test_quantised_experts(self, simulated, format, tokens):
        shape = (tokens, 2, 5, 128, 64)
        assert self.kernels(lambda: check_layer("mps", shape, format, torch.bfloat16, tokens))

    def test_routing(self, simulated):
        """Later dispatches read what earlier ones wrote: grids and lists."""
        ids = random_ids((300, 4), 0, 16, 1).to("mps")
        assert self.kernels(
            lambda: checked("moe_compute_ids_tpe", ids, num_experts=16, gate_up_rows=100, down_rows=65)
        )
        gate = [each.to("mps") for each in gate_arguments(5, 128, 24, torch.bfloat16, torch.bfloat16, 3)]
        assert self.kernels(lambda: checked("moe_gate", *gate, 4, 1e-6, True))


class TestMlx:
    """Each kernel that MLX would launch, on random numbers."""

    @staticmethod
    def placed(values: np.ndarray) -> np.ndarray:
        memory = mlx.zeros(values.dtype.type, *values.shape)
        memory[...] = values
        return memory

    def x(self, *shape: int) -> np.ndarray:
        return self.placed(np.random.default_rng(5).standard_normal(shape).astype(np.float16))

    def weights(self, m: Matrices) -> tuple[dict, np.ndarray]:
        """What the kernels read, and in float64 what MLX makes of it on the CPU."""
        if m.format == DENSE:
            w = self.x(m.experts, m.rows, m.inputs)
            return {"w": w}, w.astype(np.float64)
        mx = pytest.importorskip("mlx.core")
        options = {"group_size": m.format.group, "bits": m.format.bits, "mode": m.format.mode}
        shape = (m.experts, m.rows, m.inputs)
        weight = mx.random.normal(shape, scale=m.inputs**-0.5, key=mx.random.key(7))
        packed, *scales = mx.quantize(weight, **options)
        halves = [s.astype(mx.float16) if s.dtype == mx.float32 else s for s in scales]
        exact = [h.astype(s.dtype) for h, s in zip(halves, scales, strict=True)]
        dense = mx.dequantize(packed, *exact, **options, dtype=mx.float32)
        arrays = map(self.placed, map(np.array, (packed, *halves)))
        return dict(zip(("w", "scales", "biases"), arrays, strict=False)), np.array(dense).astype(np.float64)

    def check(self, launch: Launch, arrays: dict, expected: np.ndarray) -> str:
        """The kernel's name; its result, or the sum of its parts, is right."""
        kind, parts = (np.float32, (launch.parts,)) if launch.parts > 1 else (np.float16, ())
        out = np.zeros((*parts, *expected.shape), kind)
        assert mlx.run(launch, {**arrays, "out": out}, apple.Recorder()).fraction == 1
        result = out.astype(np.float64).sum(0) if parts else out.astype(np.float64)
        error = np.abs(result - expected).max() / np.abs(expected).max()
        assert error < 1.5e-3, launch.kernel
        return launch.kernel

    @pytest.mark.parametrize(
        "name, inputs, fast",
        [
            # MLX has no scales in float32.
            *((n, 512, "_fast") for n, f in cases.FORMATS.items() if not isinstance(f, formats.Floats)),
            *((n, 320, "") for n in ("int4", "int6", "mxfp4")),
            ("int8", 768, "_fast"),
        ],
    )
    @pytest.mark.sweep  # compiles MLX's kernels
    def test_quantised_experts(self, name, inputs, fast):
        m = Matrices(cases.FORMATS[name], "f16", 64, inputs, EXPERTS)
        prefix = "affine" if m.format.mode == "affine" else "fp"
        names = self.experts(m, mlx_quantized.gather_qmv, mlx_quantized.gather_qmm_rhs)
        assert names == [f"{prefix}_gather_qmv{fast}", f"{prefix}_gather_qmm_rhs"]

    @pytest.mark.sweep  # compiles MLX's kernels
    def test_dense_experts(self):
        m = Matrices(DENSE, "f16", 96, 80, EXPERTS)
        assert self.experts(m, mlx_dense.gather_mv, mlx_dense.gather_mm_rhs)

    def experts(self, m: Matrices, gather, gather_sorted) -> list[str]:
        ids, (weights, dense) = cases.routing(cases.Shape(EXPERTS, SLOTS, 0, 0), TOKENS), self.weights(m)
        x, x_rows, experts = self.x(TOKENS, m.inputs), np.repeat(np.arange(TOKENS), SLOTS), ids.reshape(-1)
        expected = np.einsum("pi,pri->pr", x[x_rows].astype(np.float64), dense[experts])
        lists = {"x_rows": x_rows.astype(np.uint32), "ids": ids.astype(np.uint32)}
        order = np.argsort(experts, kind="stable")
        offsets = np.searchsorted(experts[order], np.arange(EXPERTS)).astype(np.int32)
        in_order = {"x": self.placed(x[x_rows[order]]), "offsets": offsets}
        return [
            self.check(gather(m, TOKENS, SLOTS, TOKENS), {**weights, **lists, "x": x}, expected),
            self.check(gather_sorted(m, ids.size), {**weights, **in_order}, expected[order]),
        ]

    def linears(self, m: Matrices, gpu: str, counts: tuple[int, ...] = (1, 7, 40)) -> list[str]:
        weights, dense = self.weights(m)
        names = []
        for count in counts:
            x = self.x(count, m.inputs)
            launch = launches.linear(apple.GPUS[gpu], m, count)
            names.append(self.check(launch, {**weights, "x": x}, x.astype(np.float64) @ dense[0].T))
        return names

    @pytest.mark.sweep  # compiles MLX's kernels
    @pytest.mark.parametrize("gpu", ["M2", "M4 Max"])
    @pytest.mark.parametrize("name", ["int4", "mxfp4", "int6"])
    def test_one_quantised_matrix(self, name, gpu):
        m = Matrices(cases.FORMATS[name], "f16", 64, 512)
        prefix = "affine" if m.format.mode == "affine" else "fp"
        few = "wide" if prefix == "fp" or gpu == "M4 Max" else "fast"
        assert self.linears(m, gpu) == [f"{prefix}_{n}" for n in ("qmv_fast", f"qmv_{few}", "qmm_t_splitk")]

    @pytest.mark.sweep  # compiles MLX's kernels
    def test_a_tile_of_a_quantised_matrix(self):
        """With enough tiles the inputs are not shared out."""
        m = Matrices(cases.FORMATS["int4"], "f16", 512 * 32, 64)
        assert self.linears(m, "M1", (40,)) == ["affine_qmm_t"]

    @pytest.mark.sweep  # compiles MLX's kernels
    @pytest.mark.parametrize("gpu, names", [("M1", "gemv gemm gemm"), ("M4 Max", "gemv gemv_wide gemm")])
    def test_one_dense_matrix(self, gpu, names):
        assert self.linears(Matrices(DENSE, "f16", 320, 128), gpu) == names.split()

    def test_parts_of_a_dense_product(self):
        assert self.linears(Matrices(DENSE, "f16", 64, 1024), "M1", (20,)) == ["gemm_splitk"]

    @pytest.mark.parametrize(
        "name", [name for name, kind in formats.FORMATS.items() if not isinstance(kind, formats.Floats)]
    )
    def test_formats(self, name):
        """What the cases take for the weights' values is what MLX makes of them."""
        format_ = formats.FORMATS[name]
        made = format_.make(Values("cpu", 3), "w", 2, 4, 256, torch.float16)
        found = torch.stack([format_.matrix(made, "w", expert) for expert in range(2)])
        if name == "dense":
            assert torch.equal(found, made["w"].double())
            return
        mx = pytest.importorskip("mlx.core")
        packed, *scales = (
            mx.array(p.view(torch.uint32).numpy() if p.dtype == torch.int32 else p.numpy())
            for p in made.values()
        )
        options = {"group_size": format_.group, "bits": format_.bits, "mode": format_.mode}
        scales = [s.astype(mx.float32) if s.dtype == mx.float16 else s for s in scales]
        expected = np.array(mx.dequantize(packed, *scales, **options, dtype=mx.float32))
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.sweep  # measures ours and MLX's kernels for each table
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

    def test_layers(self, simulated, capsys, monkeypatch):
        """Attention takes as long as memory needs for its keys, a recurrence the same for each token."""
        found = layers.Softmax("one", 8, 1, 128), layers.Delta("two", 1, 2, channels=False)
        monkeypatch.setattr(layers, "LAYERS", found)
        *_, one, two = self.run(capsys, "--layers", "--gpu", "M1 Max")
        first, second = (float(cell) for cell in one.split("|")[4:6])
        for keys, us in ((4096, first), (32768, second)):
            least = 2 * keys * 128 * 2 / apple.GPUS["M1 Max"].dram_bytes_per_us
            assert 0.97 * least <= us <= 1.5 * least
        token, same, short, long = (float(cell) for cell in two.split("|")[4:8])
        assert token == same > 0 and long == pytest.approx(8 * short, rel=0.05)

    def test_a_token_of_a_model(self, simulated, capsys):
        """The sum of both lines, as docs/speed.md has it."""
        lines = self.run(capsys, "--token", "--gpu", "M1 Max,M4 Max")
        document = (REPOSITORY / "docs" / "speed.md").read_text()
        tokens, drafts, _ = "\n".join(lines).split("\n\n")
        assert tokens in document and drafts in document
        reading, launches, _, total = (re.findall("[0-9.]+", cell)[0] for cell in lines[2].split("|")[3:7])
        assert float(reading) == pytest.approx(1730 / (409.6 * 0.8), abs=0.05)
        assert float(total) == pytest.approx(float(reading) + int(launches) * 3e-3, abs=0.1)

    def test_goals(self, simulated):
        """Bytes and starts of tokens, and parts of a prompt: products at the rate of issue."""
        *_, line = goals.table([gpu := apple.GPUS["M4 Max"]], 1024)
        assert "| 4.92 ms | 471 tokens/s of 515 by bytes |" in line
        parts = dict(re.findall(r"([a-z ]+) (\d+\.\d+)", line.rpartition(":")[2]))
        products = {
            "experts": 8 * 3 * 768,
            "linear layers": 2 * 4096 + 1024,
            "attention": 32 * 1024 * 128 / 2048,
        }
        for name, of_a_token in products.items():
            seconds = 48 * 1024 * 2048 * of_a_token / (128e6 * gpu.core_cycles_per_us)
            assert 1.0 < float(parts[" " + name]) / seconds < 2.0

    @pytest.mark.sweep  # of real sizes
    def test_a_prompt_of_mlx(self, simulated):
        """Products at the rate of issue, too; an expert's 16 rows or so fill a tile in part."""
        gpu, tokens = apple.GPUS["M4 Max"], 256
        parts = goals.prompt(tokens, gpu, of_mlx=True)
        products = {"experts": 8 * 3 * 768, "linear layers": 2 * 4096 + 1024, "attention": 32 * tokens / 16}
        for name, of_a_token in products.items():
            seconds = 48 * tokens * 2048 * of_a_token / (128e6 * gpu.core_cycles_per_us)
            assert 1.0 < parts[name] / seconds < 3.0, name

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


@pytest.mark.parametrize("tokens", [3, pytest.param(60, marks=SWEEP)])
def test_a_sample_of_one_dispatch_leaves_the_next_its_lists(simulated, tokens):
    shape = cases.Shape(8, 2, 512, 1024)
    whole = cases.ours(shape, "int4", "bf16", tokens)
    sample = cases.ours(shape, "int4", "bf16", tokens, apple.Limit(groups=12, slots=0))
    assert any(row.measurement.fraction < 1 for row in sample)
    for one, other in zip(whole, sample, strict=True):
        assert one.measurement.fraction == 1
        slots = [row.measurement.slots(apple.GPUS["M1"]) for row in (one, other)]
        assert slots[1] == pytest.approx(slots[0], rel=0.1)


@pytest.mark.sweep  # whole runs
@pytest.mark.parametrize("format", ["int4", "mxfp4", "bf16"])
def test_weights_that_are_touched_are_counted_once(simulated, format):
    """Whole runs count the lines of memory; it is what a matmul cannot but read and write."""
    shape = cases.Shape(8, 2, 512, 256)
    for row in cases.ours(shape, format, "bf16", 3):
        if row.measurement.work:
            assert row.measurement.counts.distinct_bytes == pytest.approx(
                row.measurement.work.dram_bytes, rel=0.02
            )


def test_an_adapter_of_a_token_reads_the_columns_of_its_experts(simulated):
    """Lines of memory, where columns of B lie one after another; rows have a part of all lines of B."""
    experts, slots, hidden, rows, rank = 128, 8, 256, 768, 4
    ids = torch.arange(0, experts, experts // slots, device="mps")[None]
    tensors = [torch.ones(shape, device="mps") for shape in ((1, slots, rows), (1, hidden))]
    a, b = (torch.ones(shape, device="mps") for shape in ((rank * experts, hidden), (rows, rank * experts)))
    around, factors = 2 * slots * rows * 4, slots * rank * (hidden + rows) * 4
    for factor, expected in ((b.t().contiguous().t(), around + factors), (b, around + b.nbytes)):
        lora = torch.ops.moe_mps.expert_lora
        call = functools.partial(lora, *tensors, ids, a, factor, num_experts=experts)
        (measured,) = apple.measure(call)
        assert measured.counts.distinct_bytes == pytest.approx(expected, rel=0.05)


def test_draft_tokens_by_hand():
    """Three drafts with the token before them; experts by draws of four tokens that choose 8 of 128."""
    gpu, (token, dense, _) = apple.GPUS["M4 Max"], of_tokens.TOKENS
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2000, 4, 128, generator=generator).topk(8).indices.flatten(1)
    chosen = torch.zeros(2000, 128).scatter_(1, drawn, 1.0).sum(1).mean().item()
    few = token.verifying(4)
    assert few.experts == pytest.approx(token.experts * chosen / 8, rel=0.01)
    assert few.nbytes - few.experts == pytest.approx(token.nbytes - token.experts)
    assert (few.launches, dense.verifying(4).nbytes) == (485, dense.nbytes)
    repeats = of_tokens.DRAFTED[0]  # three steps without drafts, and five of four tokens
    one, four = 1e3 * token.bytes_ms(gpu) + 293 * 3, 1e3 * few.bytes_ms(gpu) + 485 * 3
    assert repeats.gain(token, gpu, 3) == pytest.approx(21 * one / (3 * one + 5 * four))
    likely, states = of_tokens.DRAFTED[-1], of_tokens.OF_STATES
    rate = 546e9 * 0.86
    one = 329 * 3e-6 + (1.97e9 + 0.151e9) / rate
    four = 881 * 3e-6 + (1.97e9 + 0.151e9 + 0.85e9 * (512 * (1 - (502 / 512) ** 4) / 10 - 1)) / rate
    gain = (1 + 0.85 + 0.85**2 + 0.85**3) * one / four
    assert likely.gain(states, gpu, 3) == pytest.approx(gain, rel=1e-3)


def test_tokens_by_hand():
    """Weights at the read rate, experts at 0.75 to 0.60 of it, and 3 to 6 us a launch; docs have the rows."""
    gpu, (token, dense, _) = apple.GPUS["M1 Max"], of_tokens.TOKENS
    rate = 409.6e9 * 0.80
    assert token.bytes_ms(gpu) == pytest.approx(1.73e9 / rate * 1e3)
    least = 293 * 3e-3 + (0.71e9 + 1.02e9 / 0.75) / rate * 1e3
    most = 293 * 6e-3 + (0.71e9 + 1.02e9 / 0.60) / rate * 1e3
    assert (token.ms(gpu, 3, 0.75), token.ms(gpu, 6, 0.60)) == pytest.approx((least, most))
    assert dense.ms(gpu, 3, 0.60) == dense.ms(gpu, 3, 1.0)  # without experts
    # 4 heads of keys and of values, of 128 16-bit elements, in 48 layers; a merge in each from 256 keys on
    behind = 341 * 3e-3 + (1.73e9 + 4096 * 48 * 2 * 4 * 128 * 2) / rate * 1e3
    assert token.behind(4096).ms(gpu, 3, 1.0) == pytest.approx(behind)
    assert (token.behind(255).launches, token.behind(256).launches) == (293, 341)
    ultra = apple.GPUS["M3 Ultra"]
    assert of_tokens.starts(ultra, (3, 6)) == (5.4, 6) and of_tokens.starts(ultra, (4, 4)) == (4, 4)
    rows = [*of_tokens.table([gpu, apple.GPUS["M4 Max"]])]
    page = (REPOSITORY / "docs" / "speed.md").read_text()
    assert [row for row in rows if row.startswith("|") and row not in page] == []
    (omlx, *_, prompt) = of_tokens.PUBLISHED
    assert omlx.reach == pytest.approx(2.77 * 84.5 / (819.2 * 0.86))
    assert prompt.prompt_on(gpu) == pytest.approx(2045 * 32 * 1.296 / (76 * 1.398))
