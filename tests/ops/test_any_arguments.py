"""Random arguments: CPU, meta, fake tensors and mps agree in errors, shapes, dtypes; values are float64's.

Each operator is called some hundred times on two devices, about 40 CPU seconds in all.
"""

import contextlib
import itertools
import re

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.any_calls import Call, calls, check_values, fake_outcome, outcome
from support.layouts import LAYOUTS
from support.quantized_layers import ALWAYS, EVERY_FORMAT
from support.sweep import in_sweep, rows_in_sweep
from support.values import DTYPES
from torch import Tensor

from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._formats import FORMATS
from torch_moe_mps.ops._samples import more_samples, packet, sample_arguments
from torch_moe_mps.selfcheck import calls as calls_to_check
from torch_moe_mps.selfcheck import once

SETTINGS = {
    "phases": (Phase.explicit, Phase.generate),
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "print_blob": True,
}


def check(call, device: str, reference: bool = True, fakes: bool = True) -> None:
    """`reference`: the CPU's results, too. `fakes`: those of meta and fake tensors."""
    results = outcome(call, device)
    if device != "cpu" and reference:
        on_cpu = outcome(call, "cpu")
        assert results.form == on_cpu.form
        if on_cpu.error is None:
            check_values(call, on_cpu)
    if fakes and "meta" not in call.layouts.values() and not is_refused_for_overlap(results.error):
        assert results.form == outcome(call, "meta").form
        assert results.form == fake_outcome(call).form
    if results.error is None:
        check_values(call, results)
    else:
        assert not call.good, results.error
        assert results.error.startswith(f"ValueError: moe_mps::{call.name}: ") and "\n" not in results.error


def is_refused_for_overlap(error: str | None) -> bool:
    """It takes addresses, which meta and fake tensors have not."""
    return error is not None and "free of overlap" in error


def run(name: str, device: str, request, examples: int, drawn=None, **options) -> None:
    @settings(max_examples=examples, **options, **SETTINGS)
    @given(call=calls(name) if drawn is None else drawn, order=st.integers(0, 3))
    def body(call, order):
        if device == "mps" and "simulated" in request.fixturenames:
            request.getfixturevalue("simulated").set_schedule(order)
        check(call, device)

    body()


def runs_in_float32(call) -> bool:
    """Whether the kernels of a call are those of float32; its other tensors may have other dtypes."""
    typed = calls_to_check.TYPED_BY.get(call.name) or next(iter(call.arguments))
    given = call.arguments[typed]
    return (given.dtype if isinstance(given, Tensor) else given) in (torch.float32, "float32", None)


@pytest.mark.on("mps")
@pytest.mark.usefixtures("few_formats")
@pytest.mark.parametrize("name", OPERATORS)
def test_a_few(device, name, request):
    drawn = calls(name, faults=(0, 0, 0, 1))
    if name not in calls_to_check.ON_IDS:
        drawn = drawn.filter(runs_in_float32)
    run(name, device, request, 2, drawn, derandomize=True)


@pytest.mark.on("mps")
@pytest.mark.usefixtures("few_formats")
@pytest.mark.parametrize("name", OPERATORS)
def test_without_elements(device, name, request):
    """Calls in which a size is 0."""
    drawn = calls(name, faults=(0,)).filter(lambda call: not all(t.numel() for t in call.tensors().values()))
    run(name, device, request, 2, drawn, derandomize=True)


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", OPERATORS)
def test_layouts(device, name):
    """All tensors in one layout; each alone at an odd element, where nothing can be read as a vector.

    Calls of other paths have one layout after the other. The sweep has the references. Fake tensors have no
    addresses, so that an odd element is for the kernels alone.
    """
    dtype = torch.float32
    arguments = sample_arguments(name, "cpu", dtype)
    given = [argument for argument, value in arguments.items() if isinstance(value, Tensor)]
    laid = [(arguments, dict.fromkeys(arguments, layout)) for layout in LAYOUTS]
    odd = [(arguments, dict.fromkeys(given, "contiguous") | {one: "offset"}) for one in given]
    others = [arguments | changes for changes in more_samples(name, "cpu", dtype)]
    turns = itertools.cycle(("offset", "rows", "strided"))
    laid += [(other, dict.fromkeys(other, layout)) for other, layout in zip(others, turns, strict=False)]
    for fakes, (each, layouts) in [*((True, one) for one in laid), *((False, one) for one in odd)]:
        tensors = {n: layouts[n] for n, value in each.items() if isinstance(value, Tensor)}
        check(Call(name, each, tensors, good=True), device, reference=False, fakes=fakes)


# Calls that always run in 16 bits, too: shaders have code of their own for matrices and fragments in these.
WITH_16_BITS = (
    ("linear_quantized", torch.bfloat16),
    ("expert_qmm", torch.float16),
    ("expert_mm", torch.bfloat16),
    ("fused_residual_norm", torch.bfloat16),
)
# Their oracles say nothing of the odd values that calls at real sizes have.
OF_ODD_VALUES = ("_index_topk", "moe_router", "sample", "_sample_with_flags")


def check_calls_of_the_self_check(
    name: str, device: str, dtype: torch.dtype, format: str = "affine4_32", at_size: bool = True, **heads
) -> None:
    subjects = calls_to_check.subjects([name], [dtype], [FORMATS[format]], **heads)
    for made in once.checks_of(subjects):
        if made.label.endswith(" at size") and (name in OF_ODD_VALUES or not at_size):
            continue
        with once._unwatched(), contextlib.closing(made.calls()) as each_call:
            for each in each_call:
                tensors = {n: "contiguous" for n, v in each.arguments.items() if isinstance(v, Tensor)}
                call = Call(name, each.arguments, tensors, good=True)
                results = outcome(call, device)
                assert results.error is None
                check_values(call, results)


@pytest.mark.on("mps")
@pytest.mark.parametrize(
    ("name", "dtype"),
    rows_in_sweep(
        itertools.product(OPERATORS, DTYPES),
        [*((name, torch.float32) for name in OPERATORS), *WITH_16_BITS],
    ),
)
def test_calls_of_the_self_check(device, name, dtype):
    """They launch each kernel, with every plan, and take every branch of the shaders."""
    check_calls_of_the_self_check(name, device, dtype, heads={})


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", calls_to_check.HEADS)
@pytest.mark.parametrize("device", ["mps"], indirect=True)
def test_heads_of_every_width(device, name, dtype):
    check_calls_of_the_self_check(name, device, dtype)


@pytest.mark.parametrize("name", OPERATORS)
def test_references_in_calls_of_the_self_check(name, request):
    """In one dtype, and heads of one width: the others are for kernels of their own."""
    if request.config.getoption("references"):
        pytest.skip("the host plans these calls")
    check_calls_of_the_self_check(name, "cpu", torch.float32, heads={})


QUANTIZED = [name for name in OPERATORS if "format" in calls_to_check.names_of(name)]
# Operators share how a format is read: each runs in one of a few, and in the others in the sweep.
# Experts in a small format: a layer of them has four matrices.
TURNS = {*zip(QUANTIZED, itertools.cycle((*ALWAYS[1:], ALWAYS[0])), strict=False), ("expert_qmm", "iq2_xs")}
OF_FORMATS = itertools.product(QUANTIZED, EVERY_FORMAT)


@pytest.mark.on("mps")
@pytest.mark.parametrize("case", in_sweep(OF_FORMATS, TURNS), ids="-".join)
def test_formats(device, case):
    """In one dtype."""
    name, format = case
    dtype = DTYPES[0 if format in ALWAYS else EVERY_FORMAT.index(format) % 3]
    check_calls_of_the_self_check(name, device, dtype, format, at_size=False, heads={})


# Integers that are compared with others, and are no size, count of steps or place in memory.
ANY_SIZE = {
    ("cached_attention", "window"),
    ("cached_attention", "lookahead"),
    *(("_cached_attention", each) for each in ("window", "lookahead", "tail_rate", "position")),
    ("_index_topk", "top_k"),
    ("sample", "top_k"),
    ("_sample_with_flags", "top_k"),
    ("moe_compute_ids_tpe", "gate_up_rows"),
    ("moe_compute_ids_tpe", "down_rows"),
    ("_rope_cache_", "rotary_dim"),
    ("_rope_attention_", "rotary_dim"),
    ("_rope_attention_", "window"),
}
HUGE = (2**62 + 1, 2**31 - 1, -1)


def numbers_of(name: str) -> list[str]:
    kinds = ("int", "SymInt", "Optional[int]")
    arguments = packet(name).default._schema.arguments
    return [a.name for a in arguments if str(a.type) in kinds and not a.name.endswith("dtype")]


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", [*filter(numbers_of, OPERATORS)])
def test_huge_integers(device, name):
    """Each is refused, which names the operator, or costs nothing: a loop that long would hang a GPU."""
    plain, changes = sample_arguments(name, "cpu", torch.float32), more_samples(name, "cpu", torch.float32)
    for argument in numbers_of(name):
        for sample in (plain, *(plain | changed for changed in changes if argument in changed)):
            tensors = {n: "contiguous" for n, given in sample.items() if isinstance(given, Tensor)}
            each = [Call(name, sample | {argument: value}, tensors, good=True) for value in HUGE]
            errors = [outcome(call, "meta").error for call in each]
            for error in filter(None, errors):
                assert error.startswith(f"ValueError: moe_mps::{name}: ") and "\n" not in error
            assert all(errors) or (name, argument) in ANY_SIZE, f"{argument} has no bound"
            for call in [call for call, error in zip(each, errors, strict=True) if error is None][:1]:
                check(call, device)


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", OPERATORS)
def test_a_tensor_on_another_device(device, name):
    """Whichever it is, the error reads as that of the CPU."""
    sample = sample_arguments(name, "cpu", torch.float32)
    tensors = {n: "contiguous" for n, given in sample.items() if isinstance(given, Tensor)}
    for other in tensors if len(tensors) > 1 else ():
        call = Call(name, sample, tensors | {other: "meta"}, good=False)
        on_cpu = outcome(call, "cpu")
        says = rf"ValueError: moe_mps::{name}: \w+ must be on the device of .*, got \w+"
        assert re.fullmatch(says, on_cpu.error) and "meta" in on_cpu.error
        assert outcome(call, device).error == on_cpu.error


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPERATORS)
def test_many(device, name, request):
    run(name, device, request, 100 if device == "cpu" else 40)
