"""Each kernel of each library is broken in turn: its self-check and that of a model that runs it find it."""

import contextlib
import copy
import itertools
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from simulator import build
from simulator.language.translate import Translator
from support import tiny_models
from support.any_calls import calls as any_call
from support.faults import broken
from support.sweep import rows_in_sweep
from torch import Tensor

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._formats import FORMATS, dequantize_values
from torch_moe_mps.ops._sample import Sample
from torch_moe_mps.ops._samples import packet
from torch_moe_mps.selfcheck import calls, machine, once, tensor_units, variants
from torch_moe_mps.selfcheck import compare as compare_module
from torch_moe_mps.selfcheck.compare import compare
from torch_moe_mps.selfcheck.libraries import PARTS, libraries, pipelines
from torch_moe_mps.transformers import self_check

AFFINE = FORMATS["affine4_32"]


def launched(simulated, name: str, arguments: dict) -> set[str]:
    """The kernels that a call encodes; none is run."""
    placed = {n: v.to("mps", copy=True) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    # Unwatched, or its kernels would first be compared, and dropped there, too.
    with once._unwatched(), simulated.dropped(), simulated.trace() as commands:
        packet(name)(**placed)
    return {line.split()[0] for line in commands if " grid " in line}


launched_by: dict[str, list[tuple[int, set[str]]]] = {}  # by the label of a check


def kernels_of(simulated, check) -> list[tuple[int, set[str]]]:
    """(numbers in its arguments, kernels) of each call of a check."""
    if check.label not in launched_by:
        with contextlib.closing(check.calls()) as made:
            launched_by[check.label] = [
                (size_of(call), launched(simulated, call.operator, call.arguments)) for call in made
            ]
    return launched_by[check.label]


def size_of(call) -> int:
    return sum(value.numel() for value in call.arguments.values() if isinstance(value, Tensor))


def plain(subjects) -> list:
    """Their checks but for those at size, which test_branches.py is about."""
    return [check for check in once.checks_of(subjects) if not check.label.endswith(" at size")]


def kernels_in(names: list[str]) -> set[str]:
    """The kernels of libraries."""
    return {kernel["kernel"] for kernel in pipelines(names)}


def smallest_calls(simulated, every: set[str], checks: list) -> dict[str, tuple[int, int, int]]:
    """{kernel: (numbers in arguments, check, its turn) of the smallest call}; each of them has one."""
    smallest: dict[str, tuple[int, int, int]] = {}
    for number, check in enumerate(checks):
        for turn, (size, kernels) in enumerate(kernels_of(simulated, check)):
            for kernel in kernels:
                smallest[kernel] = min(smallest.get(kernel, (size, number, turn)), (size, number, turn))
    not_launched = every - smallest.keys()
    assert not not_launched
    return {kernel: smallest[kernel] for kernel in every}


def break_each_kernel(simulated, kernels: set[str], checks: list) -> None:
    """The smallest call that launches a kernel finds that it is broken."""
    smallest = smallest_calls(simulated, kernels, checks)
    unseen = []
    for number, check in enumerate(checks):
        with contextlib.closing(check.calls()) as made:
            for turn, call in enumerate(made):
                for kernel in [k for k in smallest if smallest[k][1:] == (number, turn)]:
                    with simulated.intercepted(broken(kernel)):
                        unseen += [kernel] if compare(call) is None else []
    assert not unseen


def test_a_call_launches_each_kernel(simulated):
    """With one format of weights, in float32; test_each_kernel breaks each, in the sweep."""
    arguments = [torch.float32], [AFFINE]
    kernels = kernels_in(libraries(*arguments))
    assert smallest_calls(simulated, kernels, plain(calls.subjects(OPERATORS, *arguments)))


def names_in_source(library: str) -> set[str]:
    """The kernels of a library, without its dtype, read from its text: compiling it takes long."""
    code = Translator(build.preprocess(torch.ops.moe_mps._library_source(library)), {})
    code.take_declarations()
    return {host.rpartition("_")[0] for _, _, host in code.instances if host is not None}


@pytest.mark.slow("kernels of attention and of experts are compiled once more")
def test_kernels_that_only_16_bits_have(simulated):
    """Float32 has the others, too, which the same calls launch. Each kernel is of float16 and of bfloat16."""
    kernels = set()
    for file, _, end in (name.rpartition("_") for name in libraries([torch.float32], [AFFINE])):
        if end == "f32":
            kernels |= names_in_source(f"{file}_bf16") - names_in_source(f"{file}_f32")
    assert {"attention32_64", "attention32_128", "matmul_rows_normed_wide"} <= kernels
    operators = ("cached_attention", "_moe_experts", "_moe_experts_quantized")
    subjects = calls.subjects(operators, [torch.bfloat16], [AFFINE])
    checks = plain(subject for subject in subjects if not subject.given)
    break_each_kernel(simulated, {f"{name}_bf16" for name in kernels}, checks)


@pytest.mark.sweep  # breaks each kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_kernel(simulated, dtype):
    """With one format of weights."""
    arguments = [dtype], [AFFINE]
    checks = plain(calls.subjects(OPERATORS, *arguments))
    break_each_kernel(simulated, kernels_in(libraries(*arguments)), checks)


def of_format(format: str, dtype: torch.dtype) -> tuple[set[str], list]:
    """The kernels of a format in a dtype, and the checks of all operators with such weights."""
    names = [f"quantized_{part}{format}_{calls.DTYPES[dtype]}" for part in PARTS]
    subjects = calls.subjects(OPERATORS, [dtype], [FORMATS[format]])
    return kernels_in(names), plain(subject for subject in subjects if subject.format)


def test_a_call_launches_each_kernel_of_blocks(simulated):
    """Rows of blocks of 256 are longer, and their calls are of the check's own plans alone."""
    assert smallest_calls(simulated, *of_format("q4_k", torch.bfloat16))


@pytest.mark.sweep  # breaks each kernel
@pytest.mark.parametrize(("format", "dtype"), [*zip(FORMATS, itertools.cycle(calls.DTYPES))], ids=str)
def test_each_kernel_of_a_format(simulated, format, dtype):
    """In one dtype: the calls do not depend on it, nor does which kernels there are."""
    break_each_kernel(simulated, *of_format(format, dtype))


@pytest.mark.parametrize(
    "format", ["dense", "affine4_32", *(pytest.param(f, marks=pytest.mark.sweep) for f in FORMATS)]
)
def test_each_kernel_for_tensor_units(simulated, monkeypatch, format):
    monkeypatch.setenv("SIMULATED_GPU", "Apple M5 Max")
    names = [
        name
        for name in tensor_units.libraries([torch.float16], [FORMATS.get(format, AFFINE)])
        if f"_{format}_" in name
    ]
    break_each_kernel(simulated, kernels_in(names), [tensor_units.check_of(name) for name in names])
    monkeypatch.undo()
    torch.ops.moe_mps._plan_for(0)


@pytest.mark.parametrize(
    ("format", "dtype"),
    rows_in_sweep([*zip(FORMATS, itertools.cycle(calls.DTYPES))], {("affine4_64", torch.float16)}),
    ids=str,
)
def test_each_variant(simulated, format, dtype):
    """Of the kernels that the tuner may take: they agree with the CPU, and broken ones are noticed."""
    names = variants.libraries([dtype], [FORMATS[format]])
    break_each_kernel(simulated, kernels_in(names), [variants.check_of(name) for name in names])


@pytest.mark.usefixtures("few_formats")
@pytest.mark.parametrize("name", OPERATORS)
def test_any_call_launches_what_was_compared(simulated, name):
    """Random valid calls of an operator launch no kernel that the calls of their subjects do not launch."""

    @settings(
        **{"max_examples": 3, "derandomize": True, "deadline": None, "database": None},
        **{"phases": (Phase.generate,), "suppress_health_check": list(HealthCheck)},
    )
    @given(call=any_call(name))
    def body(call):
        if call.good:
            arguments = call.on("mps")
            every = {argument: arguments.get(argument) for argument in calls.names_of(name)}
            subjects = calls.subjects_of(name, every)
            compared = [kernels_of(simulated, check) for check in once.checks_of(subjects)]
            now = launched(simulated, name, arguments)
            assert now <= {kernel for turns in compared for _, kernels in turns for kernel in kernels}

    body()


# Experts, slots, hidden and intermediate sizes: Mixtral, Qwen3-30B-A3B, gpt-oss, Qwen3-Next, DeepSeek-V3.
EXPERTS = (
    *((8, 2, 4096, 14336), (128, 8, 2048, 768), (32, 4, 2880, 2880)),
    *((512, 10, 2048, 512), (256, 8, 7168, 2048)),
)
# Heads, heads of keys, widths of keys and of values: Qwen3, Qwen3-Next, and DeepSeek-V3's latents.
ATTENTION = ((32, 4, 128, 128), (16, 2, 256, 256), (128, 1, 576, 512))


@pytest.mark.parametrize("format", [AFFINE, None], ids=["quantised", "dense"])
def test_plans_for_the_sizes_of_models_have_kernels_that_were_compared(simulated, format):
    """Calls of this size would take too long here; a kernel depends on sizes only through its plan."""

    def compared(name: str, head: tuple[int, int] | None = None) -> set[str]:
        checks = once.checks_of([calls.Subject(name, torch.float32, head=head, format=format)])
        kernels = set().union(*(each for check in checks for _, each in kernels_of(simulated, check)))
        return {re.sub(r"(_affine4_32)?_(f32|i32|i64)$", "", kernel) for kernel in kernels}

    def planned(plan, *sizes: int) -> set[str]:
        lines = [plan(*sizes, cores=cores) for cores in (7, 10, 20, 40, 80)]
        return {line.split()[0] for each in lines for line in ([each] if isinstance(each, str) else each)}

    ops, tokens = torch.ops.moe_mps, (*range(1, 17), 20, 32, 50, 100, 512, 2048, 8192)
    experts = compared("_moe_experts_quantized" if format else "_moe_experts")
    for (count, slots, *sizes), many in itertools.product(EXPERTS, tokens):
        assert planned(ops._plan, many, slots, count, *sizes) <= experts
    if format:
        linears = compared("linear_quantized")
        for rows, many in itertools.product((1, 8, 512, 2560, 7168, 151936), tokens):
            assert planned(ops._plan_linear, many, rows) <= linears
        return
    for heads, key_heads, *head in ATTENTION:
        attention = compared("cached_attention", tuple(head))
        for many in tokens:
            assert planned(ops._plan_attention, 1, many, heads, key_heads, 4096 + many, *head) <= attention


@pytest.fixture
def new_machine(simulated, monkeypatch, tmp_path):
    """A machine that has checked nothing yet, and makes no calls at size: see test_branches.py."""
    monkeypatch.setenv(_environment.CHECK, "1")
    monkeypatch.setattr(calls, "SIZES", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(once, "SECONDS", 600.0)
    yield simulated
    self_check.reset()


def run(model) -> None:
    """A prompt, a few tokens, and one."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for tokens in (20, 3, 1):
            ids = torch.arange(1, 1 + tokens)[None]
            model(ids.to(model.device), **cache_argument(model, cache)).logits.cpu()


def is_found(simulated, model, options: dict, kernel: str) -> bool:
    """Whether a model does without a broken kernel, or a warning or an error comes before its results."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with simulated.intercepted(broken(kernel)):
                torch_moe_mps.accelerate(model := copy.deepcopy(model).to("mps"), **options)
                with simulated.trace() as commands:
                    run(model)
        except (RuntimeError, UserWarning) as told:
            return "`torch-moe-mps check` writes a report" in str(told)
    return kernel not in {line.split()[0] for line in commands}


@pytest.mark.sweep  # a model runs once for each of its kernels
@pytest.mark.parametrize(
    ("architecture", "sizes", "options"),
    [
        ("qwen3_moe", {"head_dim": 64, "num_hidden_layers": 1}, {"bits": 4, "group_size": 32, "kv_bits": 8}),
        ("llama", {"head_dim": 128}, {}),
        ("gemma", {"head_dim": 256}, {}),
        ("qwen3_next", {}, {}),
        ("deepseek_v3", {}, {}),
        ("gpt_oss", {}, {}),
        ("gpt_oss", {}, {"mode": "mxfp4"}),
    ],
)
def test_each_kernel_of_a_model(new_machine, monkeypatch, architecture, sizes, options):
    """What does not launch it has passed before."""
    made: dict[str, once.CallsToCheck] = {}
    checks_of = once.checks_of

    def noted(subjects):
        noted_now = checks_of(subjects)
        made.update((check.label, check) for check in noted_now)
        return noted_now

    monkeypatch.setattr(once, "checks_of", noted)
    with tiny_models.groups_of_32() if options else contextlib.nullcontext():
        model = tiny_models.tiny_model(architecture, torch.float32, **sizes)
    accelerated = copy.deepcopy(model).to("mps")
    torch_moe_mps.accelerate(accelerated, **options)
    with new_machine.trace() as commands:
        run(accelerated)
    kernels = {line.split()[0] for line in commands if " grid " in line and line.split()[0].endswith("32")}
    assert len(kernels) >= 4
    passed = machine.passed_before()
    launching = {
        label: set().union(*(launched for _, launched in kernels_of(new_machine, check)))
        for label, check in made.items()
    }
    unseen = []
    for kernel in sorted(kernels):
        self_check.reset()
        machine.remember(passed - {label for label in launching if kernel in launching[label]})
        unseen += [] if is_found(new_machine, model, options, kernel) else [kernel]
    assert not unseen


def test_what_a_model_first_calls_is_compared_first(new_machine, monkeypatch):
    """A call of a kind that accelerate() has not compared; once it has failed, accelerate() knows."""
    model = tiny_models.tiny_model("llama", torch.float32).to("mps")
    with monkeypatch.context() as passing:
        passing.setattr(once, "compare", lambda *arguments: None)  # what the model calls
        torch_moe_mps.accelerate(model)
    logits = torch.randn(3, 8, dtype=torch.float16).to("mps")
    with new_machine.intercepted(broken("route2_f16")):
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"moe_router: must agree with the CPU, got .* \(float16\) diff"
            ):
                torch.ops.moe_mps.moe_router(logits, 2, scoring="softmax", norm_topk_prob=True)
    with pytest.raises(RuntimeError, match="must agree"):  # what is wrong stays wrong in this process
        torch.ops.moe_mps.moe_router(logits, 2, scoring="softmax", norm_topk_prob=True)
    found, _ = once.first_failures(once.checks_of([calls.Subject("moe_router", torch.float16)]))
    assert list(found) == ["moe_router"]
    torch_moe_mps.accelerate(model, check=False)
    torch.ops.moe_mps.moe_router(logits, 2, scoring="softmax", norm_topk_prob=True)


def test_accelerate_foresees_what_indexers_launch(new_machine, monkeypatch):
    """Their operators, in the width of their heads: no first call waits until these are compared."""
    compared = []
    monkeypatch.setattr(once, "compare", lambda call, end: compared.append(call.operator))
    model = tiny_models.tiny_model("deepseek_v32", torch.float32).to("mps")
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 5
    torch_moe_mps.accelerate(model)
    wanted = {"_index_topk", "_rope_cache_"}
    assert wanted <= {*compared}
    compared.clear()
    with new_machine.trace() as commands:
        run(model)
    assert {"rope_centred", "index_scores"} <= {line.split()[0].partition("_f32")[0] for line in commands}
    assert not wanted & {*compared}


def test_the_time_ends_within_an_operator(new_machine, monkeypatch):
    """After the launch in which it ends; the next time goes on where this one ended."""
    from simulator import shaderlib

    seconds = 0

    def slow(dispatch) -> None:
        nonlocal seconds
        seconds += 1
        shaderlib.execute(dispatch)

    for module in (once, compare_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds))
    norm = once.checks_of([calls.Subject("rms_norm", torch.float32)])
    with new_machine.intercepted(slow):
        assert once.first_failures(norm, 2.5) == ({}, {"rms_norm"})
    assert seconds == 3  # two launches of the first call, and one
    assert machine.passed_before() == {"rms_norm f32 #0"}
    assert once.first_failures(norm, 600.0) == ({}, set())
    assert machine.passed_before() == {"rms_norm f32"}


@pytest.mark.parametrize("format", calls.FORMATS, ids=str)
def test_results_of_a_check_are_numbers_in_float16(format):
    """Weights are of about 1: three matrices of an MLP give no infinity, which would hide mistakes."""
    sample = Sample("cpu", torch.float16, format)
    weights = sample.quantized("", 64, sample.H, ())
    values = dequantize_values(*weights.values(), format)
    assert 0.04 < values.square().mean().sqrt() < 2.1 and values.abs().max() < 16


def test_heads_that_no_operator_takes(new_machine):
    """A module may have an attribute of that name which means something else."""
    wide = [calls.Subject("cached_attention", torch.float32, None, (1000, 1000))]
    odd = [calls.Subject("rope", torch.float32, None, (15, 15))]
    assert once.first_failures(once.checks_of(wide + odd)) == ({}, set())


def test_a_pass_is_one_of_this_host_code(new_machine, monkeypatch, tmp_path):
    before = machine.cache_file()
    other = tmp_path / "other.so"
    other.write_bytes(machine.host_library().read_bytes() + b"changed")
    monkeypatch.setattr(machine, "host_library", lambda: other)
    assert machine.cache_file() != before
