"""`check --probe` measures what the GPU does, here the simulator's; and the cost model takes its page."""

import json

import pytest
import torch
from measured.apple import __main__ as model
from measured.apple import fit
from simulator.apple.facts import COSTS, GPUS, Cost
from simulator.testing import linux_only
from support.faults import with_faults

from torch_moe_mps.commands import check, main
from torch_moe_mps.selfcheck import machine, probe

pytestmark = linux_only
SMALL = probe.ProbeSizes(
    **{"dispatches": 20, "buffers": (1, 5), "reads": (1 << 16, 1 << 18)},
    **{"groups": 2, "fma_steps": 2, "matrix_steps": 2, "repeats": 1},
    **{"expert_groups": 1, "expert_steps": 1},
    **{"chunk": (24, 72, 16), "asked": 3, "late": (0.001, 0.01), "queued": (2, 0.002)},
)
RATES = ("dispatch_us", "read_gbs", "expert_reads_gbs", "fma_tmacs", "matrix_tmacs")
AS_ASSUMED = {
    "matrix_layout": {"as_assumed": True},
    "nan": {
        **{"isnan": True, "compares": False, "as_uint": 0, "as_int": -(2**31), "clamp_to_0_and_1": 0.0},
        **{"max_of_nan_and_1": 1.0, "max_of_1_and_nan": 1.0, "simd_max": 1.0, "simd_min": 1.0},
    },
    "subnormals": {
        **{"single_operand": False, "single_result": False},
        **{"half_operand": True, "half_result": True},
    },
    "bfloat_rounding": {"to_nearest_even": True, "nan_stays": True},
}


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    return [value]


def test_a_page(simulated, monkeypatch, capsys):
    monkeypatch.setattr(probe, "ProbeSizes", lambda: SMALL)
    monkeypatch.setattr(check, "libraries", lambda *arguments: ["norms_f32", "bucket_i32"])
    assert main(["check", "--probe"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["machine"]["gpu"] == "Simulated Apple GPU" and page.keys() >= {*probe.PARTS, "compiling_s"}
    assert {name: page[name] for name in AS_ASSUMED} == AS_ASSUMED
    assert all(number >= 0 for name in RATES for number in numbers(page[name]))
    assert page["slots_of_experts_us"] > 0
    assert page["goes_on_after_s"] == {"0.001": True, "2 x 0.002": True, "0.01": True}
    assert page["compiling_s"].keys() == {"probe_f32", "norms_f32"}
    assert [*page["read_gbs"]] == ["0.0625", "0.25"] and [*page["dispatch_us"]["run"]] == ["1", "5"]


def test_what_is_launched(simulated):
    """1,000 dispatches in so many buffers, and memory that is read once."""
    counter = torch.zeros(1, dtype=torch.int32, device="mps")
    probe._run("probe_empty", [counter], 1, 32, times=12, in_buffer=4)
    assert counter.item() == 12
    with probe.no_commits(), simulated.trace() as commands:
        probe.dispatches(SMALL._replace(dispatches=10, buffers=(5,)))
    lines = [line.partition(" ")[0] for line in commands if not line.startswith("synchronize")]
    assert lines == ["probe_empty_f32"] + 5 * ["probe_empty_f32", "probe_empty_f32", "commit"]
    read, size = probe._reader(3 << 16, 2)
    with simulated.counters() as counters:
        read(1)
    (counted,) = counters
    assert size == 6 * 2 * probe.THREADS * 64 and counted.buffers[0].bytes_read == size


def test_reads_of_experts(simulated):
    """Each layer's eight once: at random places, in one block and in two, and side by side."""
    size, of_expert = 1 << 20, 2 * probe.THREADS * 64
    with simulated.counters() as counters:
        probe.expert_reads(SMALL._replace(reads=(size,), expert_groups=2))
    layers = size // of_expert // probe.EXPERTS
    assert [counted.kernel for counted in counters] == 3 * 2 * layers * ["probe_read_pieces_f32"]
    read = {counted.buffers[0].distinct_bytes_read for counted in counters}
    assert read == {probe.EXPERTS * of_expert}
    data, out = torch.arange(4096.0).to("mps"), torch.empty(2 * 32, device="mps")
    starts = torch.tensor([512, 0], dtype=torch.int32).to("mps")
    probe._run("probe_read_pieces", [data, starts, out], 2, 32, 2)
    pieces = torch.arange(4096.0).view(1024, 4)[[*range(512, 768), *range(256)]]
    assert torch.equal(out.cpu(), pieces.view(2, 8, 32, 4).sum((1, 3)).flatten())


def test_slots_that_stop_the_gpu(simulated):
    """As macOS may stop a GPU that waits too long."""
    with simulated.failing("timeout"):
        found = probe.late_answers(SMALL)
    assert "Caused GPU Timeout Error" in found["0.001"]
    assert found["2 x 0.002"] is found["0.01"] is True


def test_waits_that_macos_may_end_come_last(simulated, monkeypatch):
    """It may ignore the process from then on; what was measured before stays."""

    def late(sizes) -> dict:
        with simulated.failing("timeout"):
            return probe.late_answers(sizes)

    assert [*probe.PARTS][-1] == "goes_on_after_s"
    parts = {name: probe.PARTS[name] for name in ("nan", "slots_of_experts_us")} | {"goes_on_after_s": late}
    monkeypatch.setattr(probe, "PARTS", parts)
    with simulated.ignoring(1):
        page = probe.probe(SMALL, [])
    assert page["nan"] == AS_ASSUMED["nan"] and page["slots_of_experts_us"] > 0
    first, *others = page["goes_on_after_s"].values()
    assert "Caused GPU Timeout Error" in first
    assert len(others) == 2 and all(
        "macOS has stopped all GPU work of this process" in each for each in others
    )


@pytest.mark.parametrize(("own", "sdpa"), [(0.003, 0.002), (0.002, 0.003)])
def test_attention_of_a_chunk(simulated, monkeypatch, tmp_path, own, sdpa):
    """Both kernels compute the same; the faster one is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SIMULATED_GPU", "Apple M5 Max")
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    seconds, results = iter((own, sdpa)), []

    def timed(call, repeats):
        results.append(call().float().cpu())
        return next(seconds)

    monkeypatch.setattr(probe, "_best", timed)
    found = probe.chunk_of_a_prompt(SMALL)
    assert found == {"own": 1e3 * own, "torch": 1e3 * sdpa}
    assert machine.was_faster(machine.SDPA) is (sdpa < own)
    ours, torchs = results
    torch.testing.assert_close(ours, torchs.transpose(1, 2), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("2.14.1", "it needs torch 2.15 or newer, this is 2.14.1"),
        ("2.15.0", "Simulated Apple GPU has none, which the M5 and later have"),
    ],
)
def test_attention_of_a_chunk_elsewhere(simulated, monkeypatch, version, lacks):
    """torch has no kernel for tensor units there, and would keep the scores of all tokens."""
    monkeypatch.setattr(torch, "__version__", version)
    assert probe.chunk_of_a_prompt(SMALL) == {"left_out": lacks}


# Faults of different parts, which are compiled together.
FAULTS = (
    ("matrix_layout", "held.thread_elements()[1];", "held.thread_elements()[0];"),
    ("nan", "isnan(nan) ? 1 : 0", "0"),
    ("subnormals", "half(x[i]) * half(scales[i])", "half(0.0f)"),
    (
        "bfloat_rounding",
        "out[i] = bfloat(x[i])",
        "out[i] = as_type<bfloat>(ushort(as_type<uint>(x[i]) >> 16))",
    ),
)


def test_what_is_not_as_assumed(simulated):
    with simulated.intercepted(with_faults({text: wrong for _, text, wrong in FAULTS})):
        found = {part: probe.PARTS[part](SMALL) for part, *_ in FAULTS}
    for part, values in found.items():
        assert any(values[key] != value for key, value in AS_ASSUMED[part].items()), part


def test_a_part_that_fails_is_in_the_page(simulated, monkeypatch, capsys):
    def fails(sizes):
        raise RuntimeError("no pipeline for probe_fma\n/Users/jane/x")

    monkeypatch.setattr(probe, "ProbeSizes", lambda: SMALL)
    monkeypatch.setattr(probe, "PARTS", {"nan": probe.nan_rules, "fma_tmacs": fails})
    monkeypatch.setattr(check, "libraries", lambda *arguments: [])
    assert main(["check", "--probe"]) == 1
    page = json.loads(capsys.readouterr().out)
    assert page["fma_tmacs"] == {"error": "no pipeline for probe_fma"} and page["nan"] == AS_ASSUMED["nan"]


def test_a_gpu_that_fails_is_in_the_page(simulated, monkeypatch):
    monkeypatch.setattr(probe, "PARTS", {"nan": probe.nan_rules, "subnormals": probe.subnormals})
    with simulated.failing("fault"):
        page = probe.probe(SMALL, [])
    assert "Fault" in page["nan"]["error"] and page["subnormals"] == AS_ASSUMED["subnormals"]


# Of an imagined M1 Max: 32 cores at 1.2 GHz, 320 GB/s, 16 cycles a product of halves.
PAGE = AS_ASSUMED | {
    "machine": {"gpu": "Apple M1 Max", "macos": "15.1 (24B83)", "cores": 32, "cores_planned_for": 32},
    "expert_reads_gbs": {"experts": 250.0, "ranges": 210.0, "stream": 300.0},
    "read_gbs": {"16": 900.0, "200": 330.0, "2048": 320.0},
    "fma_tmacs": 32 * 128 * 1.2e9 / 1e12,
    "matrix_tmacs": {"half": 32 * 4 * 1.2e9 * 512 / 16 / 1e12, "float": 32 * 4 * 1.2e9 * 512 / 20 / 1e12},
    "dispatch_us": {"run": {"1": 4.5}},
}


@pytest.fixture
def costs(monkeypatch):
    for name in ("mma16", "mma32"):
        monkeypatch.setitem(COSTS, name, COSTS[name])
    return COSTS


def test_the_model_takes_a_page(simulated, tmp_path, capsys, costs):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(PAGE | {"matrix_layout": {"as_assumed": False, "elements": []}}))
    assert model.main(["--facts", str(file), "--linear", "512,512", "--tokens", "1", "--no-mlx"]) == 0
    out = capsys.readouterr().out
    reach = GPUS["M1 Max"].dram_bytes_per_us / 1e3
    assert f"  GHz: 1.2 (1.296)\n  GB/s of reads of 2048 MB: 320 ({reach:.4g})\n" in out
    assert "  issue slots of mma16: 16 (17)\n  issue slots of mma32: 20 (18)\n" in out
    assert "  NOT as assumed: matrix_layout has as_assumed False\n" in out and "subnormals" not in out
    assert "M1 Max, measured: bound (next), predicted us" in out
    assert costs["mma16"] == Cost(16.0)
    assert model.main(["--facts", str(file), "--token"]) == 0
    out = capsys.readouterr().out
    assert "  us of a dependent dispatch: 4.5 (3 to 6)\n" in out
    assert "  reads of experts, times those of a stream: 0.7 (0.6 to 0.75)\n" in out
    assert "| Qwen3-30B-A3B | M1 Max, measured | 5.4 | 293 | 341 | 6.7 | 7.2 | 8.2 | 7.8-8.8 |" in out
    assert fit.fitted(str(file)).gpu.dram_bytes_per_us == pytest.approx(320e3)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "is not JSON"),
        ("[]", "must be the page of `torch-moe-mps check --probe`"),
        (json.dumps(PAGE | {"read_gbs": {"error": "x"}}), "must be the page of"),
        (json.dumps(PAGE | {"machine": {"gpu": "AMD Radeon"}}), "must be one of M1 to M5, got AMD Radeon"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_page(tmp_path, capsys, costs, text, error):
    file = tmp_path / "gpu.json"
    if text is not None:
        file.write_text(text)
    assert model.main(["--facts", str(file)]) == 1
    out, err = capsys.readouterr()
    assert error in err and len(err.splitlines()) == 1 and out == ""
