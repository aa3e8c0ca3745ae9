"""What is tuned gives the same bits, is the fastest by a good clock, and costs nothing by a bad one."""

import copy
import ctypes
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from simulator import apple, shaderlib
from support import tiny_models
from support.expert_layers import layer
from support.launches import captured_call
from support.models import tiny
from support.quantized_layers import EVERY_FORMAT, bits_of, place, random_matrix, random_quantized
from support.sweep import in_sweep
from support.values import DTYPES
from support.values import random as random_values

import torch_moe_mps
from torch_moe_mps import _environment, _extension
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps.commands import check, main
from torch_moe_mps.ops.families.quantized import MATRICES
from torch_moe_mps.selfcheck import machine, once, tuner
from torch_moe_mps.transformers import compiling, self_check

ops = torch.ops.moe_mps
NUMBERS = [2, 1, 4, 8]


@pytest.fixture
def linear() -> Callable[[], torch.Tensor]:
    weight = place(random_matrix(64, 64, "affine4_64", torch.float32, 0), "mps")
    return partial(ops.linear_quantized, torch.ones(1, 64, device="mps"), *weight, format="affine4_64")


def traced(simulated, call) -> list[str]:
    with simulated.trace() as commands:
        call()
    return commands


# --- the same bits


def calls_of(format: str | None, dtype: torch.dtype):
    """{label: call}: one token, a few and a prompt, experts that a router chooses, a norm; sizes that fill no
    block."""
    values = partial(random_values, dtype=dtype, seed=1)
    group = 64 if format in ("affine4_64", "mxfp4") else 256  # of which inputs are a multiple
    hidden, inner = (group, 2 * group) if format else (52, 76)
    for tokens in (1, 4, 20) if format else (1, 4):
        x, weights, ids, *dense = (t.to("mps") for t in layer(tokens, 3, 5, hidden, inner, dtype))
        ids[0, 1] = -1
        if format is None:
            yield f"experts, {tokens}", partial(ops._moe_experts, x, weights, ids, *dense)
            continue
        parts = [
            part
            for rows, columns in ((2 * inner, hidden), (hidden, inner))
            for part in place(random_quantized(5, rows, columns, format, dtype, 0), "mps")
        ]
        yield (
            f"experts, {tokens}",
            partial(ops._moe_experts_quantized, x, weights, ids, *parts, format=format),
        )
        weight = [
            part if part is None else part[0]
            for part in place(random_quantized(1, 271, inner, format, dtype, 3), "mps")
        ]
        y, norm = values((tokens, inner)).to("mps"), values((inner,)).to("mps")
        yield f"linear, {tokens}", partial(ops.linear_quantized, y, *weight, format=format)
        if tokens == 1:
            wide = values((inner,), dtype=torch.float32).to("mps")
            yield (
                "linear, normed widely",
                partial(ops.linear_quantized, y, *weight, format=format, norm_weight=wide),
            )
            logits = values((1, 5)).to("mps")
            given = {"logits": logits, "top_k": 3, "norm_weight": norm[:hidden].clone()}
            chosen = partial(ops._moe_experts_quantized, x, None, None, *parts, format=format, **given)
            yield "experts of a router", chosen
            shared = zip(MATRICES, parts, strict=True)
            given = {f"shared_{key}": part if part is None else part[0] for key, part in shared}
            yield "experts of a router, and a shared one", partial(chosen, **given)
            yield "linear, normed", partial(ops.linear_quantized, y, *weight, format=format, norm_weight=norm)


def test_a_variant_that_does_not_compile_is_no_choice(simulated, monkeypatch):
    """A model's first call goes on with the others."""
    tuned = []
    monkeypatch.setattr(ops, "_tune", lambda kernel, number: tuned.append(number))

    def call() -> torch.Tensor:
        if tuned[-1] > tuner.VARIANT:
            raise RuntimeError("moe_mps: quantized_variants_q4_k_f32 does not compile: no such type")
        return torch.full((3,), float(tuned[-1] > 2))

    assert tuner._with_equal_bits("gemm", (2, tuner.VARIANT + 2, 4), call) == [2]
    assert tuned == [2, tuner.VARIANT + 2, 4]
    with pytest.raises(RuntimeError, match="does not compile"):
        tuner._with_equal_bits("gemm", (tuner.VARIANT + 2, 2), call)  # the planned one


@pytest.mark.parametrize("format", [None, *in_sweep(EVERY_FORMAT, {"affine4_64"})])
def test_bits(simulated, format):
    """Of every launch that is offered, in each of its kernels; what is launched has so many simdgroups."""
    dtype = DTYPES[0 if format is None else EVERY_FORMAT.index(format) % 3]
    kernels, varied = set(), set()
    ops._plan_for(1)  # so that simdgroups share no inputs, which would be other bits
    try:
        for label, call in calls_of(format, dtype):
            expected = bits_of(call().cpu())
            for name, numbers in tuner._tunable(call).items():
                kernel = name.split()[0]
                plain = re.sub(rf"(_{format})?_b?f(32|16)$", "", kernel)
                assert len(numbers) == len({*numbers}), label
                if len(numbers) == 1:
                    continue
                for number in numbers:
                    ops._tune(name, number)
                    with simulated.trace() as commands:
                        got = call()
                    ops._tune(name, 0)
                    launched = kernel
                    if number > tuner.VARIANT:
                        launched = re.sub(rf"(?=_{format}_b?f(32|16)$)", "_variant", kernel)
                        varied.add(plain)
                    lines = [line for line in commands if line.startswith(f"{launched} ")]
                    assert lines and f" of {32 * (number % tuner.VARIANT)}x1x1:" in lines[0], (label, number)
                    assert torch.equal(bits_of(got.cpu()), expected), (label, name, number)
                kernels.add(plain)
    finally:
        ops._plan_for(0)
    wanted, few = {"matmul_rows", "expert_down"}, {"matmul_rows_few", "expert_down_few"}
    if format:
        wanted |= {"matmul_rows_chosen8", "gemm32"}
        if re.search(r"\d", format)[0] > "2":
            wide = set() if dtype == torch.float32 else {"matmul_rows_normed_wide"}
            wanted |= {"matmul_rows_normed"} | wide
    assert kernels == wanted | few
    assert varied == (wanted if format else set())


def test_a_number_that_nobody_offers(simulated, linear):
    """What simdgroups share inputs for, and numbers of another machine, run as planned."""
    call = partial(linear.func, torch.ones(3, 64, device="mps"), *linear.args[1:], **linear.keywords)
    name = "matmul_rows_few_split_affine4_64_f32 1x64x64 by 4"
    assert tuner._tunable(call) == {name: [4]}
    before = traced(simulated, call)
    ops._tune(name, 2)
    assert traced(simulated, call) == before
    ops._tune(name, 0)
    (name,) = tuner._tunable(linear)
    before = traced(simulated, linear)
    ops._tune(name, 3)
    assert traced(simulated, linear) == before
    ops._tune(name, 0)


# --- the choice


def clock(factors: dict[int, float], seed: int, noise=0.0, outliers=0.0, first=1.0, tick=0.0):
    """Times of a GPU where each number takes its factor. `noise`: of each time, relative; `outliers`: part
    of the times, five times or a fifth; `first`: of the first of a round; `tick`: of a coarse clock."""
    chance = random.Random(seed)

    def timed(order):
        found = {}
        for place_in_round, number in enumerate(order):
            seconds = (
                factors[number] * max(0.01, chance.gauss(1, noise)) * (first if place_in_round == 0 else 1)
            )
            seconds *= chance.choice((5, 0.2)) if chance.random() < outliers else 1
            found[number] = seconds // tick * tick if tick else seconds
        return found

    return timed


WRONG = [
    {"noise": 0.02},
    {"noise": 0.1},
    {"noise": 0.3, "outliers": 0.1},
    {"noise": 1.0},
    {"first": 1.5, "noise": 0.05},
    {"tick": 0.5, "noise": 0.1},
    {"tick": 10.0},
    {"outliers": 0.5},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_clock_that_errs_costs_nothing(wrong):
    """Whatever it says, what is chosen takes at most 1.02 of what is planned."""
    for seed in range(1500):
        factors = {number: random.Random(seed + number).uniform(0.9, 1.3) for number in NUMBERS}
        factors[2] = 1.0
        found = tuner.choose(NUMBERS, clock(factors, seed, **wrong))
        assert factors[found.number] <= 1.02, seed


@pytest.mark.parametrize("said", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_says_what_cannot_be(said):
    for wrong in ({2}, {1}, {*NUMBERS}):
        times = {number: said if number in wrong else 1.0 for number in NUMBERS}
        assert tuner.choose(NUMBERS, lambda order, times=times: times) == (2, 2, 0.0)


def test_a_good_clock_finds_the_best():
    """With one outlier in each half, in any round; what is less than 3 % faster is not used."""
    for at in range(tuner.ROUNDS):
        good, round = clock({2: 1.0, 1: 0.9, 4: 0.8, 8: 1.1}, at, noise=0.01), itertools.count()

        def timed(order, good=good, round=round, at=at):
            times = good(order)
            times[4] *= 30 if next(round) % tuner.ROUNDS == at else 1
            return times

        found = tuner.choose(NUMBERS, timed)
        assert found[:2] == (4, 2) and 0.18 < found.gain < 0.22
    assert tuner.choose(NUMBERS, clock({2: 1.0, 1: 0.985, 4: 0.98, 8: 0.99}, 0, 0.002)).number == 2


# --- in a model


@pytest.fixture
def new_machine(simulated, monkeypatch, tmp_path):
    """One that has timed nothing yet, and whose self-check passes at once."""
    monkeypatch.setenv(_environment.CHECK, "1")
    monkeypatch.setenv(_environment.TUNE, "1")
    monkeypatch.setenv(CAPTURE, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(once, "compare", lambda call, end=0: None)
    monkeypatch.setattr(tuner, "SECONDS", 600.0)
    monkeypatch.setattr(tuner, "BUFFER_SECONDS", 1e-9)
    monkeypatch.setattr(tuner, "ROUNDS", 2)
    monkeypatch.setattr(tuner, "MOST_COPIES", 2)
    machine.remember_check(True)
    yield simulated
    self_check.reset()
    forget()


def forget() -> None:
    """As a new process."""
    for name in tuner._known:
        ops._tune(name, 0)
    tuner._known.clear()


FACTORS = {"matmul_rows": {4: 0.4}, "expert_down": {1: 0.3}}


def factor(dispatch) -> float | None:
    name = dispatch.kernel.contents.name.decode()
    if "_variant_" in name:
        return 5.0
    of_kernel = next((each for kernel, each in FACTORS.items() if name.startswith(kernel)), None)
    return None if of_kernel is None else of_kernel.get(dispatch.threads[0] // 32, 1.0)


def quantised():
    with tiny_models.groups_of_32():
        return tiny_models.tiny_model("qwen3_moe", torch.float32, num_hidden_layers=1).to("mps")


def fastest(kernel: str, predicted: dict[tuple, float]) -> int:
    """The number of simdgroups with the least time, of the largest grids of its kernel."""
    times: dict[int, float] = {}
    for (name, *_, threads, _, _), seconds in predicted.items():
        if name == kernel:
            one = FACTORS[next(filter(kernel.startswith, FACTORS))].get(threads // 32, 1.0)
            times[threads // 32] = max(seconds * one, times.get(threads // 32, 0))
    return min(times, key=times.__getitem__)


def threads_of_token(simulated, call) -> dict[str, int]:
    lines = [line.split() for line in traced(simulated, call) if line.startswith(tuple(FACTORS))]
    return {line[0]: int(line[line.index("of") + 1].partition("x")[0]) for line in lines}


@pytest.mark.sweep  # times each launch of a model's kernels
def test_a_model_runs_what_is_fastest(new_machine, monkeypatch, capsys):
    """Found at its first calls, also by a captured token, remembered for the next process, and shown."""
    model = quantised()
    torch_moe_mps.accelerate(plain := copy.deepcopy(model), bits=4, group_size=32, check=False)
    ids = torch.tensor([[5, 6, 7]], device="mps")
    expected = captured_call(plain)
    with torch.no_grad():
        logits = [plain(ids[:, :n]).logits.cpu() for n in (1, 3)]
    planned = threads_of_token(new_machine, expected)

    report = torch_moe_mps.accelerate(model, bits=4, group_size=32)
    assert "timed on this GPU" not in str(report)
    with apple.clocked(apple.GPUS["M1 Max"], factor) as predicted:
        token = captured_call(model)
        with torch.no_grad():
            assert all(torch.equal(model(ids[:, : e.shape[1]]).logits.cpu(), e) for e in logits)
    for name, found in tuner.known().items():
        assert found.number == fastest(name.split()[0], predicted), name
    tuned = threads_of_token(new_machine, token)
    assert tuned.keys() == planned.keys() and {"matmul_rows_normed_affine4_32_f32"} <= tuned.keys()
    for kernel, threads in tuned.items():
        best = 4 if kernel.startswith("matmul_rows") else 1
        assert threads == 32 * best != planned[kernel], kernel

    line = next(line for line in str(report).splitlines() if "timed on this GPU" in line)
    assert line.startswith(f"{len(tuner.known())} kernels timed")
    assert ": 4 simdgroups in place of 2, " in str(report)
    some = next(name for name in tuner.known() if name.startswith("matmul_rows_chosen"))
    ops._tune(some, 1)  # what was captured follows
    assert threads_of_token(new_machine, token)[some.split()[0]] == 32

    forget()
    assert threads_of_token(new_machine, token) == planned
    with monkeypatch.context() as never:
        never.setattr(tuner, "choose", None)
        torch_moe_mps.accelerate(model)
        token = captured_call(model)
    assert threads_of_token(new_machine, token) == tuned


def test_of_another_machine_or_damaged(new_machine):
    """What is in the file is ignored."""
    kept = {"matmul_rows_f32 1x2x3": tuner.Tuned(4, 2, 0.1)}
    machine.remember_tuned(kept)
    machine.remember({"rope f32"})
    assert tuner.remembered() == kept and machine.passed_before() == {"rope f32"}
    file = machine.cache_file()
    right = json.loads(file.read_text())
    for wrong in ([], {"a": 1}, {"a": [1, 2]}, {"a": ["4", 2, 0.1]}, {"a": [4, 2, 7]}, {"a": [4, 2, None]}):
        file.write_text(json.dumps(right | {"tuned": wrong}))
        with pytest.warns(UserWarning, match="what was timed before is damaged, and ignored"):
            assert tuner.remembered() == {}
    for text in ("", "[]", json.dumps(right | {"machine": right["machine"] | {"gpu": "another"}})):
        file.write_text(text)
        assert tuner.remembered() == {}


def first_call(call, clock=None) -> dict[str, tuner.Tuned]:
    """What is known behind it, in a new process with this clock."""
    forget()
    once.watch(True)
    tuner.start()
    with clock or apple.clocked(apple.GPUS["M1"], factor):
        call()
    return tuner.known()


def test_switched_off(new_machine, monkeypatch, linear):
    name = "matmul_rows_affine4_64_f32 1x64x64 by 1"
    machine.remember_tuned({name: tuner.Tuned(8, 2, 0.1)})
    monkeypatch.setenv(_environment.TUNE, "0")
    assert first_call(linear) == {}
    monkeypatch.setenv(_environment.TUNE, "1")
    assert first_call(linear) == {name: tuner.Tuned(8, 2, 0.1)}


def test_nothing_is_timed_until_a_check_has_passed(new_machine, monkeypatch, linear, capsys):
    """It is said once in a process, with the command; what was timed before a check failed is not used."""
    machine.say_what_waits.cache_clear()
    name = "matmul_rows_affine4_64_f32 1x64x64 by 1"
    machine.remember_tuned({name: tuner.Tuned(8, 2, 0.1)})
    model = tiny("qwen3_moe", dtype=torch.float32, num_hidden_layers=1).to("mps")
    quantized = torch_moe_mps.accelerate(model, bits=4, group_size=32, check=False).operators()
    has_variants = []
    for passed in (False, True):
        machine.remember_check(passed)
        tuner.start()  # of one model more
        assert first_call(linear) == ({name: tuner.Tuned(8, 2, 0.1)} if passed else {})
        assert ("of 256x1x1" in traced(new_machine, linear)[0]) is passed
        names = compiling.libraries_of(model, quantized)
        has_variants.append(any("variants" in each for each in names))
    assert has_variants == [False, True]
    said = [line for line in capsys.readouterr().err.splitlines() if "no check has passed" in line]
    assert len(said) == 1 and "matmuls are not timed" in said[0] and "torch-moe-mps check --first" in said[0]


def test_the_time_ends(new_machine, monkeypatch, linear):
    """Behind the round in which it does. What is not decided runs as planned, and is timed the next time."""
    now = itertools.count(0, 0.02)
    with monkeypatch.context() as short:
        short.setattr(tuner, "time", SimpleNamespace(monotonic=lambda: next(now)))
        short.setattr(tuner, "SECONDS", 0.1)
        assert first_call(linear) == {} and next(now) < 0.2
    assert "of 64x1x1" in traced(new_machine, linear)[0]
    assert [found[:2] for found in first_call(linear).values()] == [(4, 2)]
    assert "of 128x1x1" in traced(new_machine, linear)[0]


@pytest.mark.parametrize("tokens", [1, 20])
def test_another_kernel(new_machine, tokens):
    """For one token and for a prompt, of whose length the name says nothing."""
    call = dict(calls_of("affine4_64", torch.float16))[f"experts, {tokens}"]
    expected = call().cpu()
    wanted = {"matmul_rows", "expert_down"} if tokens == 1 else {"gemm32"}

    def variants_are_fast(dispatch) -> float:
        return 0.2 if b"_variant_" in dispatch.kernel.contents.name else 1.0

    found = first_call(call, apple.clocked(apple.GPUS["M1"], variants_are_fast))
    assert {name.partition("_affine")[0] for name in found} == wanted and len(found) == 2
    assert all(
        item.number > tuner.VARIANT and (" by " in name) == (tokens == 1) for name, item in found.items()
    )
    lines = [line.partition(" ")[0] for line in traced(new_machine, call) if line.startswith(tuple(wanted))]
    assert len(lines) == 2 and {line.partition("_affine")[0] for line in lines} == {
        f"{n}_variant" for n in wanted
    }
    assert torch.equal(bits_of(call().cpu()), bits_of(expected))


def test_other_bits_are_not_used(new_machine, linear):
    """However fast they are: a GPU on which a number gives another result."""

    def run(dispatch) -> float:
        shaderlib.execute(dispatch)
        if dispatch.threads[0] == 128:
            ctypes.c_float.from_address(dispatch.buffers[6].data).value += 1.0
        return 1e-6 * (factor(dispatch) or 1.0)

    assert [found[:2] for found in first_call(linear, new_machine.clocked(run)).values()] == [(2, 2)]


def test_a_variant_that_does_not_compile(simulated, linear, tmp_path):
    """Is not offered; nothing else needs it."""
    (numbers,) = tuner._tunable(linear).values()
    assert numbers == [2, 1, 4, 8, 102, 104]
    shaders = tmp_path / "shaders"
    shutil.copytree(_extension.SHADERS, shaders)
    (shaders / "quantized_variants.metal").write_text("no kernels")
    ops._set_shader_directory(str(shaders))
    try:
        weight = place(random_matrix(64, 64, "affine5_64", torch.float32, 0), "mps")
        call = partial(ops.linear_quantized, torch.ones(1, 64, device="mps"), *weight, format="affine5_64")
        assert list(tuner._tunable(call).values()) == [[2, 1, 4, 8]]
    finally:
        ops._set_shader_directory(str(_extension.SHADERS))


def test_check_shows_it(new_machine, monkeypatch, capsys, tmp_path):
    """What this machine remembers, printed and in the report."""
    kept = {"a 1x2x3": tuner.Tuned(4, 2, 0.125), "b 1x2x3": tuner.Tuned(8, 8, 0.0)}
    kept["c 1x2x3"] = tuner.Tuned(tuner.VARIANT + 2, 8, 0.25)
    machine.remember_tuned(kept)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "OPERATORS", [])
    for name in ("never_launched", "libraries", "check_model"):
        monkeypatch.setattr(check, name, lambda *arguments: [])
    assert main(["check", "--dtype", "float32", "--format", "affine4_32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    line = lines.index("3 kernels timed on this GPU, 2 run otherwise than planned")
    assert lines[line + 1] == "  a 1x2x3: 4 simdgroups in place of 2, 12% faster"
    assert lines[line + 2] == "  c 1x2x3: 2 simdgroups of the other kernel in place of 8, 25% faster"
    assert json.loads((tmp_path / check.REPORT).read_text())["tuned"] == {k: list(v) for k, v in kept.items()}
