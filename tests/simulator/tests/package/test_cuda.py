"""The translation to CUDA, and the benchmark's plans: recorded, and replayed in the simulator."""

import functools
import json
import re
from dataclasses import replace

import pytest
import torch
from measured.cases import experts, fused, layer
from measured.cases.attention import Attention
from measured.cases.experts import Experts, Linear
from measured.cases.values import Shapes
from measured.cuda import main, peers_mlx, programs, record, report, timing
from measured.cuda.run import Row, Runner
from measured.cuda.worker import right_case, supervise
from simulator import build
from simulator.cuda import nvrtc
from simulator.cuda.compile import Job, compile_job
from simulator.cuda.plan import Plan
from simulator.cuda.simulated import SimulatedGpu
from simulator.cuda.translate import Entry, kernel_names, translate
from simulator.errors import ShaderError
from simulator.mlx_kernels import include_folder
from support.processes import REPOSITORY, python
from support.sweep import in_sweep

SHADERS = REPOSITORY / "torch_moe_mps" / "shaders"
# One of each file but that of the probe, which no operator launches.
OTHERS = {"probe": [], "bucket": ["bucket_i32"], "tensor_units": ["tensor_units_affine4_64_f16"]}
OTHERS["quantized"] = [f"quantized_{name}" for name in ("affine4_64_f16", "affine3_32_bf16", "nvfp4_f32")]
PARTS_OF_FORMATS = ("joined", "few", "prompts", "heads", "variants")
OTHERS |= {f"quantized_{part}": [f"quantized_{part}_affine4_64_f16"] for part in PARTS_OF_FORMATS}
OTHERS |= {f"attention{of}": [f"attention{of}_128_f16"] for of in ("", "_turned", "_selected")}
OTHERS |= {"attention_tailed": ["attention_tailed_512_f16"], "routing": ["routing_8_f16"]}
OTHERS["tiles"] = ["tiles_128_k4v2_f16"]
FILES = sorted(path.stem for path in SHADERS.glob("*.metal"))
LIBRARIES = [name for file in FILES for name in OTHERS.get(file, [f"{file}_f16"])]
# A simdgroup a row, or a thread an element, and as many registers as it takes.
UNBOUNDED = ["hyper_connection_f16", "pointwise_f16", "routing_8_f16"]
UNBOUNDED += ["routing_logits_f16"]
# With bounds and without; tensor units; function constants of a format.
ALWAYS = ("attention_128_f16", "routing_8_f16", "tensor_units_affine4_64_f16", "quantized_affine4_64_f16")
BUFFER_WORDS = {"device", "threadgroup", "thread", "kernel", "constant"}
SHAPE = (8, 2, 512, 128)  # experts, of them a token, hidden, intermediate


def preprocessed(library: str) -> str:
    return record.preprocessed(torch.ops.moe_mps._library_source(library), (SHADERS,))


def all_entries(source: str) -> dict:
    return {f"entry{i}": Entry(name) for i, name in enumerate(kernel_names(source))}


@pytest.mark.parametrize("library", in_sweep(LIBRARIES, ALWAYS))
def test_translated_libraries(simulated, library):
    """Every kernel has an entry, bounds are kept, and nothing of Metal's syntax is left."""
    source = preprocessed(library)
    entries = all_entries(source)
    code = translate(source, entries)
    names = set(re.findall(r'host_name\("(.*?)"\s*\)', source.replace('" "', "")))
    assert {entry.instance for entry in entries.values()} == names and names
    declared = re.findall(r'extern "C" __global__ (__launch_bounds__\(.*?\) )?void (\w+)\(void\* b0', code)
    assert [name for _, name in declared] == list(entries)
    unbounded = [entries[name].instance for bound, name in declared if not bound]
    assert (len(unbounded) == len(entries)) == (library in UNBOUNDED) and "[[" not in code
    assert not BUFFER_WORDS & set(re.findall(r"\w+", re.sub(r'".*?"', "", code)))


KERNEL = """
#include <metal_stdlib>
using namespace metal;
struct Params { uint count; float scale; };
constant bool doubled [[function_constant(0)]];
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(N * 32)]] void scaled(
    device const T* in [[buffer(0)]], device T* out [[buffer(1)]], constant Params& p [[buffer(2)]],
    threadgroup float* shared [[threadgroup(0)]], uint i [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup T row[N];
  if (lane < N) row[lane] = in[i];
  shared[lane] = 2.0 * p.scale;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (i < p.count) out[i] = T(row[lane % N] * shared[lane] * (doubled ? 2 : 1));
}
template [[host_name("scaled_f16")]] [[kernel]] decltype(scaled<half, 4>) scaled<half, 4>;
"""


def test_entry(simulated):
    """A bound out of template arguments, parameters by value, threadgroup memory, function constants."""
    entry = Entry("scaled_f16", by_value={2: 8})
    code = translate(record.preprocessed(KERNEL), {"entry": entry}, {0: True})
    assert (entry.buffers, entry.threadgroups) == ([0, 1, 2], [0])
    assert "__launch_bounds__(threads_of_scaled<half, 4>)" in code
    assert "__shared__ __align__(16) T row[N]" in code and "constexpr bool doubled = bool(1)" in code
    _, ptx = nvrtc.compile_program(code)
    assert ".maxntid 128" in ptx
    assert ".param .align 16 .b8 entry_param_2[16]" in ptx
    assert "ld.param" in ptx and "depot" not in ptx  # the parameters are read where they lie
    assert ".ftz.f32" in ptx and "f64" not in ptx


def test_unknown_kernel(simulated):
    with pytest.raises(ShaderError, match="no kernel scaled_f32; there are scaled_f16"):
        translate(record.preprocessed(KERNEL), {"entry": Entry("scaled_f32")}, {0: True})


def test_compile_error(simulated):
    with pytest.raises(nvrtc.CompileError, match=r'program.cu\(1\): error: identifier "undeclared"'):
        nvrtc.compile_program('extern "C" __global__ void f() { undeclared(); }')


LANES = """
#include "metal_simd.h"
using namespace metal;
constexpr bool right() {
  for (uint t = 0; t < 32; ++t) {
    const uint lane = lane_of_thread(t), quad = lane / 4;
    if (thread_of_lane(lane) != t) return false;
    // Where Apple's GPUs have a lane's two elements, as MLX's BaseMMAFrag::get_coord says.
    if ((quad & 4) + lane / 2 % 4 != t / 4 || (quad & 2) * 2 + lane % 2 * 2 != t % 4 * 2) return false;
    for (uint mask = 0; mask < 32; ++mask)
      if (lane_of_thread(t ^ thread_of_lane(mask)) != (lane ^ mask)) return false;
  }
  return true;
}
static_assert(right() == EXPECTED, "lanes");
"""


@pytest.mark.parametrize("matrices", (True, False))
def test_lanes(simulated, matrices):
    """Numbered for matrices, a lane's elements are where the tensor cores have them, and xor stays xor."""
    options = ["-DMETAL_MATRIX_LANES"] if matrices else []
    nvrtc.compile_program(LANES.replace("EXPECTED", "true" if matrices else "false"), options=tuple(options))


def test_numbering_follows_the_kernel(simulated, tmp_path, monkeypatch):
    """Lanes are numbered for matrices in a kernel that has some, not in its neighbour that has none."""
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path)
    source = record.preprocessed("""
    #include <metal_stdlib>
    using namespace metal;
    kernel void plain(device uint* out [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
      out[lane] = 1;
    }
    kernel void product(device const half* a [[buffer(0)]], device float* out [[buffer(1)]]) {
      simdgroup_matrix<half, 8, 8> m(a[0]);
      simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      simdgroup_multiply_accumulate(sums, m, m, sums);
      out[0] = sums.thread_elements()[0];
    }""")
    jobs = {name: Job(source, name, (), (), True, "sm_90") for name in ("plain", "product")}
    compiled = {name: compile_job(job) for name, job in jobs.items()}
    assert {name: c.matrices for name, c in compiled.items()} == {"plain": False, "product": True}
    assert compile_job(jobs["plain"]) == compiled["plain"]  # kept


@pytest.mark.parametrize("library", in_sweep(LIBRARIES, ("pointwise_f16",)))
def test_all_kernels_compile(simulated, library):
    """Every kernel of a library."""
    source = preprocessed(library)
    program = translate(source, all_entries(source))
    name = f"cuda-size-{build.digest(program, nvrtc.identity())}"
    assert build.kept(name, lambda: len(nvrtc.compile_program(program)[0])) > 10000


# Plans


def some_cases() -> list:
    return [
        Experts("experts", "int4", "f16", 1, *SHAPE),
        Experts("experts", "mxfp4", "bf16", 3, *SHAPE),
        Experts("prefill", "dense", "f32", 40, *SHAPE),
        Experts("sanitize", "int4", "f16", 70, *SHAPE, tensor_units=True),
        Experts("variants", "int4", "f16", 40, *SHAPE, variants=True),
        Linear("linear", "int8", "f16", 2, 512, 64),
        Experts("experts", "q3_k", "bf16", 3, *experts.GGUF_SHAPE),
        Linear("linear", "q4_k", "f16", 1, 256, 37),
        Linear("linear", "iq2_xs", "f16", 3, 256, 37),
        layer.Gate(3, 64, 130, 4, "bf16"),
        layer.Router("moe_router", 2, 64, 4, "f32"),
        layer.Bucket("moe_bucket", 9, 16, 2, "i64"),
        layer.WeightedSum("weighted_sum_residual_norm_stacked_", 2, 3, 256, "bf16"),
        layer.Norm("fused_residual_norm", 2, 512, "f32"),
        layer.LayerNorm(2, 130, "f16"),
        fused.FusedExperts("fused", "int4", "f16", 1, *SHAPE),
        fused.ChosenExperts("fused", "int4", "f16", 1, *SHAPE),
        fused.RoutedExperts("fused", "int4", "f16", 1, *SHAPE),
        fused.SharedExperts("fused", "int4", "f16", 1, *SHAPE),
        fused.ApartExperts("fused", "mxfp4", "bf16", 1, *SHAPE),
        fused.FusedLinear("fused", "int8", "f16", 1, 512, 60),
        fused.FusedLinear("fused", "int8", "f16", 3, 512, 60),
        fused.Logits("fused", 1, 20, 130, "f16"),
        fused.Delta("fused", 2, 1, 2, 40, "f16"),
        fused.Hyper("fused", 2, 132, "f16"),
        fused.SelectiveScan("fused", 3, 70, "bf16"),
        fused.RopeCache("fused", 2, 3, 1, 64, 5, "f16"),
        fused.RopeAttention("fused", 1, 3, 1, 64, 300, "f16"),
        fused.RopeThenAttention("fused", 1, 3, 1, 64, 300, "f16"),
        fused.IndexKeys("fused", 2, 3, 64, 5, "f16"),
        fused.Pointwise("sanitize", 3, 130, "f16"),
        fused.PoolWindow("sanitize", 5, 70, 4, 2, "f16"),
        fused.Quantise("sanitize", 5, 192, "affine5_64", "f16"),
        fused.Tailed("sanitize", 1, 9, 64, 40, 5, "f16"),
    ]


@pytest.fixture
def plan(simulated, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "COLD_BYTES", 1)  # one input set
    return Plan(tmp_path / "plan")


def loaded(plan, cases: list):
    """The plan with these cases, out of its files."""
    for case in cases:
        record.record(plan, case)
    plan.save()
    return Plan.load(plan.folder)


def runner(plan, time=lambda calls: [call() for call in calls] and 2.0, machine=None):
    return Runner(machine or SimulatedGpu(plan), plan, only_check=False, time=time)


def traced(dispatch) -> str:
    """A recorded dispatch in the words of runtime.trace, without buffers."""

    def size(numbers) -> str:
        return "x".join(map(str, numbers))

    memory = "".join(f" threadgroup({i})={n} bytes" for i, n in dispatch.threadgroup_bytes.items())
    grid = "indirect" if dispatch.indirect else size(dispatch.grid)
    return f"{dispatch.kernel} grid {grid} of {size(dispatch.threads)}:{memory}"


@pytest.mark.sweep  # of each kernel that is timed
def test_recorded_is_what_is_encoded(plan, simulated):
    """Kernels, grids, threads, threadgroup memory and setBytes lengths equal those of a trace."""
    cases = some_cases()
    for recording, case in zip(loaded(plan, cases).recordings, cases, strict=True):
        shapes = Shapes("mps")
        inputs = {**case.weights(shapes), **case.inputs(shapes)}
        with simulated.intercepted(lambda dispatch: None), simulated.trace() as commands:
            case.call(inputs)
        lines = [re.sub(r" \d+=\S+( bytes)?", "", line) for line in commands if " grid " in line]
        lines = [re.sub(r"grid [A-Z]+\[\S+", "grid indirect", line) for line in lines]
        assert [traced(dispatch) for dispatch in recording.dispatches] == lines and lines
        lengths = [re.findall(r" (\d+)=(\d+) bytes", line) for line in commands if " grid " in line]
        by_value = [
            [(str(b.index), str(len(b.data) // 2)) for b in dispatch.bindings if b.data]
            for dispatch in recording.dispatches
        ]
        assert by_value == [[(i, n) for i, n in line] for line in lengths]


def test_every_fused_kernel_is_run_on_a_gpu(simulated):
    """Norms, residuals and orders within kernels, timed and under the sanitizers; not what is beside them."""
    beside = {"RoutedExperts", "ApartExperts", "RopeThenAttention"}
    every = {name for name, family in experts.FAMILIES.items() if family.__module__ == fused.__name__}
    for group in ("fused", "sanitize"):
        found = {type(case).__name__ for case in main.all_cases(experts.SHAPE) if case.group == group}
        assert every - beside <= found


@pytest.mark.sweep  # of each kernel that is timed
def test_replayed_results(plan):
    """A plan that went through its files gives results that are right against float64."""
    plan = loaded(plan, some_cases())
    assert any(dispatch.indirect for recording in plan.recordings for dispatch in recording.dispatches)
    for recording in plan.recordings:
        for row in runner(plan).run(recording):
            assert (row.wrong, row.peer, row.ours_us) == ("", "", 2.0), row


def test_parts(plan):
    """Both products are also timed separately, whatever their kernels are called."""
    rows = runner(loaded(plan, some_cases()[:1])).run(plan.recordings[0])
    assert [row.part for row in rows] == ["gate+up", "down", ""]
    gate_up, down, whole = (row.bytes for row in rows)
    bits = 4 + 2 * 16 / 64
    assert gate_up == 2 * 2 * 128 * 512 * bits / 8 and down == gate_up / 2 and whole == gate_up + down


@pytest.mark.sweep  # of each kernel that is timed
def test_wrong_results_show(plan):
    """Where kernels write nothing, every case says so."""

    class Idle(SimulatedGpu):
        def prepare(self, dispatch, arguments):
            return lambda grid: None

    plan, shown = loaded(plan, some_cases()), 0
    for recording in plan.recordings:
        run = functools.partial(runner(plan, machine=Idle(plan)).run, recording)
        if any(dispatch.indirect for dispatch in recording.dispatches):
            with pytest.raises(RuntimeError, match=r"the indirect grid in scratch\d was not written"):
                run()
        else:
            assert all(row.wrong for row in run()), recording
            shown += 1
    assert shown


def test_only_checked(plan):
    """What compute-sanitizer watches: one set of inputs, one launch of ours, no times."""
    plan = loaded(plan, some_cases()[:1])
    (row,) = Runner(SimulatedGpu(plan), plan, only_check=True, time=None).run(plan.recordings[0])
    assert (row.wrong, row.ours_us, row.peer) == ("", None, "")


def test_lines_of_a_sanitizer(plan):
    plan, said = loaded(plan, some_cases()[:1]), []
    row = {"case": "c", "group": "g", "part": ""}
    lines = [
        "========= ERROR SUMMARY: 0 errors\n",
        json.dumps({"device": "a GPU", "copy": 0.0}),
        json.dumps({"number": 0, "rows": [row]}),
        json.dumps({"number": 0, "rows": [row | {"wrong": "error 1.0e+00"}]}),
        json.dumps({"number": 0, "error": "CudaError: misaligned"}),
    ]
    assert [right_case(plan, line, said.append) for line in lines] == [None, None, 0, None, None]
    name = "experts int4 f16 T 1"
    assert said == [lines[0].strip(), f"{name}: error 1.0e+00", f"{name}: CudaError: misaligned"]


def test_parts_of_a_sanitizer_say_what_is_left(plan, tmp_path, monkeypatch, capsys):
    """Two parts, one after the other, of which the second has a case that is wrong."""
    sanitized = [case for case in some_cases() if case.group == "sanitize"][:3]
    plan = loaded(plan, sanitized)
    said, ran = [], []

    def part(options, plan, tool, numbers):
        ran.append((tool, numbers))
        return [number for number in numbers if (tool, number) != ("racecheck", 1)], 0

    monkeypatch.setattr(main, "say", said.append)
    monkeypatch.setattr(main, "sanitize_part", part)
    monkeypatch.setattr(main, "compiled", lambda *arguments, **options: None)
    monkeypatch.setattr(main.Plan, "load", lambda folder: plan)
    arguments = ["sanitize", "--plan", str(tmp_path), "--part"]
    assert main.sanitize(main.parse([*arguments, "1/2"])) == 0
    assert ran == [("memcheck", [2, 0]), ("racecheck", [2, 0])] and said[-1].split() == [
        "3",
        "2",
        "2",
        "1",
        "all",
    ]
    assert main.sanitize(main.parse([*arguments, "2/2"])) == 1
    assert said[-1].split() == ["3", "3", "2", "1", "all"]
    with pytest.raises(SystemExit):
        main.parse([*arguments, "3/2"])
    assert "--part: must be K/N with K from 1 to N, got 3/2" in capsys.readouterr().err


def test_a_sanitizer_that_hangs_is_ended(plan, tmp_path, monkeypatch):
    """With what it has said until then; the cases behind are not counted."""
    plan = loaded(plan, some_cases()[:1])
    stand_in, said = tmp_path / "compute-sanitizer", []
    right = json.dumps({"number": 0, "rows": [{"case": "c", "group": "g", "part": ""}]})
    stand_in.write_text(f"#!/bin/sh\necho '{right}'\nsleep 600\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(main, "say", said.append)
    options = main.parse(["sanitize", "--plan", str(tmp_path), "--seconds", "0.5"])
    assert main.sanitize_part(options, plan, "memcheck", [0, 0]) == ([0], -9)
    assert said == ["memcheck: 1 of 2 cases right, exit code -9"]


def test_filled_scratch_is_refused(plan):
    """Memory that aten fills is no dispatch: a plan cannot say what is in it."""

    class Filled(layer.SiluMul):
        def call(self, t):
            return torch.ops.moe_mps.silu_mul_stacked(torch.zeros_like(t["gate"]), t["up"])

    with pytest.raises(record.RecordError, match="scratch0 was filled without a kernel"):
        record.record(plan, Filled(2, 64, "f32"))


@pytest.fixture
def mlx_plan(plan):
    peers_mlx.record(plan, include_folder())
    return plan


@pytest.mark.parametrize(
    ("format_", "tokens", "expected"),
    (
        ("int4", 3, ["MLX affine_gather_qmv_fast", "MLX affine_gather_qmv"]),
        ("int4", 33, ["MLX affine_gather_qmm_rhs"] * 2),
        ("dense", 3, ["MLX gemv_gather"] * 2),
        ("dense", 33, ["MLX gather_mm_rhs"] * 2),
        ("mxfp4", 2, ["MLX fp_gather_qmv_fast", "MLX fp_gather_qmv"]),
    ),
)
@pytest.mark.sweep  # compiles MLX's kernels
def test_mlx_peers(mlx_plan, format_, tokens, expected):
    """MLX's kernels, launched as cases/mlx.py says, are right against float64."""
    plan = loaded(mlx_plan, [Experts("experts", format_, "f16", tokens, *SHAPE)])
    rows = [row for row in runner(plan).run(plan.recordings[0]) if row.peer]
    assert [row.peer for row in rows] == expected
    assert all((row.peer_wrong, row.ratio) == ("", 1.0) for row in rows), rows


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.sweep  # compiles MLX's kernels
def test_mlx_attention_peer(mlx_plan, tokens):
    """Ours and MLX's attention are right against float64."""
    plan = loaded(mlx_plan, [Attention(4, 2, tokens, 130, 64, 64, "f16")])
    (row,) = runner(plan).run(plan.recordings[0])
    assert (row.wrong, row.peer, row.peer_wrong) == ("", "MLX sdpa_vector_2pass", "")


@pytest.mark.sweep  # compiles MLX's kernels
def test_mlx_gated_delta_peer(mlx_plan):
    """Ours, and MLX's recurrence alone, are right against float64: a token and some."""
    plan = loaded(mlx_plan, [fused.Delta("fused", tokens, 1, 2, 128, "bf16") for tokens in (1, 3)])
    for recording in plan.recordings:
        (row,) = runner(plan).run(recording)
        assert (row.wrong, row.peer, row.peer_wrong) == ("", "MLX gated_delta_step", "")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    (
        (1, ["qmv_fast"]),
        (8, ["qmv_fast", "qmv_wide"]),
        (14, ["qmm_t_splitk", "qmv_fast", "qmv_wide"]),
    ),
)
@pytest.mark.sweep  # compiles MLX's kernels
def test_mlx_linear_peers(mlx_plan, tokens, expected):
    """Ours is compared with every kernel that MLX takes on one of Apple's GPUs, split inputs included."""
    plan = loaded(mlx_plan, [Linear("linear", "int4", "f16", tokens, 512, 64)])
    rows = runner(plan).run(plan.recordings[0])
    assert sorted(row.peer for row in rows) == [f"MLX affine_{name}" for name in expected]
    assert all(row.peer_wrong == "" for row in rows), rows


def test_a_peer_that_is_wrong(plan, monkeypatch):
    """Its fault is not ours."""
    plan = loaded(plan, [layer.SiluMul(3, 300, "f32")])
    for index in (1, 0):

        def peers(plan, case, index=index):
            """Ours, with `up` at the second place, or with `gate` there, too."""
            program = programs.ours(case, plan.recordings[0])
            gate, up, *others = program.dispatches[0].bindings
            second = replace((gate, up)[index], index=up.index)
            dispatch = replace(program.dispatches[0], bindings=[gate, second, *others])
            return [replace(program, label="another", dispatches=[dispatch])]

        monkeypatch.setattr(peers_mlx, "peers", peers)
        (row,) = runner(plan).run(plan.recordings[0])
        assert (row.wrong, row.peer, row.peer_wrong != "") == ("", "another", index == 0)


def test_a_worker_that_dies_costs_one_case(simulated, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys\n"
        "for n in map(int, sys.argv[sys.argv.index('--cases') + 1].split(',')):\n"
        "    if n == 5: sys.exit(3)\n"
        "    print(json.dumps({'number': n, 'rows': []}), flush=True)\n"
    )
    messages = list(supervise(script, tmp_path, [4, 5, 6], []))
    assert messages == [
        {"number": 4, "rows": []},
        {"number": 5, "error": "the worker ended with 3"},
        {"number": 6, "rows": []},
    ]


def test_report():
    row = Row("experts int4 f16 T 1", "experts", "down", "", 5.0, 10_000_000, "MLX qmv", 7.5)
    line = report.line(row, 4000.0)
    assert " ".join(line.split()) == f"{row.case} down 5.0 7.5 1.50 2000 50% ok MLX qmv"
    alone = Row("moe_bucket T 1", "routing", "", "order differs", 2.0, 0)
    assert alone.ratio is None and "order differs" in report.line(alone, 0.0)
    slower = Row("experts int4 f16 T 4", "experts", "", "", 5.0, 1, "MLX qmv", 5.5)
    text = "experts: the lowest ratio is 1.10, experts int4 f16 T 4, MLX qmv"
    assert report.summary([row, slower, alone]) == [text]


def test_command_line(simulated, tmp_path, capsys):
    folder = tmp_path / "plan"
    arguments = ["record", "--plan", str(folder), "--only", "norms"]
    assert main.main(arguments) == 0
    assert re.search(r"recorded \d+ cases in .*, 0\.\d MB", capsys.readouterr().out)
    content = json.loads((folder / "plan.json").read_text())
    assert {case["family"] for case in content["cases"]} == {"LayerNorm", "Norm"} and content["about"]["mlx"]
    for wrong, message in (
        ("--only=linears", "there is no group linears"),
        ("--shape=1,2", "four numbers"),
        ("--mlx=/", "there is no mlx"),
    ):
        with pytest.raises(SystemExit):
            main.main(["record", wrong])
        assert message in capsys.readouterr().err
    for command in ("run", "record"):  # nothing that is no plan is replayed or removed
        with pytest.raises(SystemExit, match=r"error: .*(has no plan\.json|there are other files in it)"):
            main.main([command, "--plan", str(tmp_path)])


WITHOUT_TESTS = """
import importlib, sys

sys.modules |= dict.fromkeys(("pytest", "hypothesis", "gguf", "mlx", "transformers"))
from torch_moe_mps.ops._samples import FAMILIES

for name in ("measured.cuda.run", "measured.cuda.worker", *(f"support.ops.{family}" for family in FAMILIES)):
    importlib.import_module(name)
"""


@pytest.mark.slow("imports torch in a process of its own")
def test_a_machine_that_replays_has_no_packages_of_tests():
    python(WITHOUT_TESTS)
