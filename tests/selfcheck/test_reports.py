"""A report names the fault of a kernel: six kinds, told apart by what is written alone."""

import contextlib
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.faults import with_faults, with_results
from support.processes import forked

from torch_moe_mps.ops._formats import FORMATS
from torch_moe_mps.ops._sample import Sample
from torch_moe_mps.selfcheck import differences, facts, journal, libraries, machine, once
from torch_moe_mps.selfcheck.calls import Call, Subject
from torch_moe_mps.selfcheck.compare import Finding, compare

SHARES = "share < kFewSimdgroups; ++share) {\n      sum"
WORD = "const uint low = words.v[max(word - 1, 0)], high = words.v[min(word, kWords - 1)];"
INPUTS, OUTPUTS = 1024, 300


def test_beside_the_largest_number_a_rounding_may_be_infinite():
    """Elsewhere an infinite result is wrong, as are one of the other sign and what is no number."""
    expected = torch.tensor([[-65504.0, 3.0, 65504.0, 1.0]], dtype=torch.half)
    inf, nan = float("inf"), float("nan")
    for actual, wrong in (
        ([-inf, 3.0, inf, 1.0], []),
        ([-inf, inf, 65504.0, 1.0], [1]),
        ([inf, 3.0, -inf, 1.0], [0, 2]),
        ([-65504.0, nan, 65504.0, -inf], [1, 3]),
    ):
        found = torch.tensor([actual], dtype=torch.half)
        for one, other in ((found, expected), (expected, found)):
            assert (differences.errors(one, other) > 5e-3)[0].nonzero().flatten().tolist() == wrong


def linear(tokens: int) -> Call:
    """x[tokens, 1024] by a matrix of 300 rows in 4 bits."""
    sample = Sample("cpu", torch.float32, FORMATS["affine4_32"], tokens)
    arguments = {"x": sample.values(tokens, INPUTS), **sample.quantized("", OUTPUTS, INPUTS, ())}
    arguments |= {"bias": None, "format": "affine4_32"}
    return Call("linear_quantized", torch.float32, arguments, "affine4_32")


def found(simulated, call: Call, run: Callable) -> Finding:
    assert compare(call) is None
    with simulated.intercepted(run):
        finding = compare(call)
    assert finding is not None and finding.kind == "differs"
    json.dumps(finding.details, allow_nan=False)
    return finding


def in_results(tokens: int, change: Callable) -> Callable:
    """Change what linear(tokens) gives, [tokens, 300], and gets as it was before, too."""

    def run(memory: np.ndarray, before: np.ndarray) -> None:
        change(*(each[: tokens * OUTPUTS].reshape(tokens, OUTPUTS) for each in (memory, before)))

    return with_results("matmul_rows", run)


def unwritten(now: np.ndarray, before: np.ndarray) -> None:
    now[:, -5:] = before[:, -5:]


def result(finding: Finding) -> dict:
    (only,) = finding.details["results"].values()
    return only


def test_a_wrong_sign_behind_a_row(simulated):
    def negate(now, _):
        now[:, 128:] *= -1

    finding = found(simulated, linear(1), in_results(1, negate))
    rows = result(finding)["along"][1]
    assert (rows["first"], rows["last"], rows["every"], rows["of"]) == (128, 299, 1, OUTPUTS)
    assert result(finding)["ratio"] == [-1.0, -1.0, -1.0] and result(finding)["shares"]["negated"] == 1.0
    assert finding.details["plan"] == ["matmul_rows_affine4_32_f32 grid 19x1x1 of 64x1x1"]
    assert finding.details["one_core"]["wrong"] == result(finding)["wrong"]  # so it is not the plan


def test_every_eighth_row(simulated):
    def clear(now, _):
        now[:, 5::8] = 0

    finding = found(simulated, linear(3), in_results(3, clear))
    tokens, rows = result(finding)["along"]
    assert (tokens["count"], rows["first"], rows["last"], rows["every"]) == (3, 5, 293, 8)
    assert result(finding)["shares"]["zero"] == 1.0 and result(finding)["wrong"] > 0.8 * 3 * 37
    assert result(finding)["ratio"] == [0.0, 0.0, 0.0]


def test_a_tail_that_nobody_writes(simulated):
    finding = found(simulated, linear(1), in_results(1, unwritten))
    assert result(finding)["shares"]["untouched"] == 1.0 and result(finding)["wrong"] == 5
    assert result(finding)["along"][1] == {"first": 295, "last": 299, "count": 5, "of": 300, "every": 1}


def test_a_torch_that_fills_no_memory(simulated, monkeypatch):
    """The share is left out, and not 0."""
    monkeypatch.setattr(differences, "_filled", contextlib.nullcontext)
    finding = found(simulated, linear(1), in_results(1, unwritten))
    assert "untouched" not in result(finding)["shares"] and result(finding)["wrong"] == 5


def test_nan_of_one_token(simulated):
    """Computed, not left: its bits are the same where memory was something else before."""

    def spoil(now, _):
        now[1] = np.nan

    finding = found(simulated, linear(3), in_results(3, spoil))
    shares = result(finding)["shares"]
    assert (shares["nan"], shares["untouched"]) == (1.0, 0.0)
    assert [place for place, *_ in result(finding)["first"]] == [[1, i] for i in range(differences.FIRST)]
    assert result(finding)["first"][0][1] == "nan"
    assert "1 (of 3), 0..299 (of 300)" in finding.lines()[0] and "100% nan" in finding.lines()[0]


def test_low_bits(simulated):
    """Small errors all over, and nothing else."""
    without = WORD.replace("low = words", "low = 0xeeeeeeeeu & words").replace(
        "high = ", "high = 0xeeeeeeeeu & "
    )
    finding = found(simulated, linear(3), with_faults({WORD: without}))
    of = result(finding)
    assert of["wrong"] > 0.9 * of["of"] and [each["every"] for each in of["along"]] == [1, 1]
    assert not any(of["shares"][name] for name in ("nan", "infinite", "zero", "untouched"))
    assert of["error"][-1] < 0.5 and 0.5 < of["ratio"][1] < 1.5
    assert finding.details["one_core"]["wrong"] > 0.9 * of["of"]


def test_only_with_many_cores(simulated):
    """The last share of the inputs is forgotten where simdgroups share them."""
    finding = found(simulated, linear(3), with_faults({SHARES: SHARES.replace("share <", "share + 1 <")}))
    one = finding.details["one_core"]
    assert one["wrong"] == 0 and finding.lines()[-1] == "planned for one core: all is right"
    assert "matmul_rows_few_split_" in finding.details["plan"][0]
    assert "matmul_rows_few_affine" in one["plan"][0]


def test_a_state_that_stays_as_it_was(simulated):
    """Of what is written in place, untouched is what it was."""
    calls = once.checks_of([Subject("causal_conv1d_update_", torch.float32)])[0].calls()
    call = next(calls)
    names = [name for name in call.arguments if name.endswith("_") and call.arguments[name] is not None]
    assert names
    before = [None, *(call.arguments[name] for name in names)]
    right = [torch.ones(2, 3), *(call.arguments[name] + 1 for name in names)]
    kept = differences.untouched(lambda: [torch.ones(2, 3), *before[1:]], before, right)
    assert [each is not None and bool(each.all()) for each in kept] == [False, *[True for _ in names]]
    calls.close()


def test_the_report_tells_nothing_of_the_user(monkeypatch):
    monkeypatch.setattr(facts, "_user", lambda: "janedoe")
    monkeypatch.setattr(facts, "_home", lambda: "janedoe")
    monkeypatch.setattr(facts.socket, "gethostname", lambda: "Janes-Mac.local")
    text = facts.anonymous(
        json.dumps(
            {"a": "no file /Users/janedoe/Library/x.metal", "b": "~/models/q", "c": "JaneDoe on janes-mac"}
        )
    )
    assert json.loads(text) == {"a": "no file .../x.metal", "b": ".../q", "c": "USER on HOST"}
    assert facts.anonymous("4 tokens/s, a 2/3 b") == "4 tokens/s, a 2/3 b"


SAID = {
    "ioreg": '    | |   "gpu-core-count" = 38\n',
    "sysctl -n hw.memsize": "34359738368",
    "sysctl -n iogpu.wired_limit_mb": "0",
    "memory_pressure": "The system has 34359738368\nSystem-wide memory free percentage: 71%",
    "system_profiler": '{"SPDisplaysDataType": [{"_name": "Apple M2 Max", "spdisplays_ndrvs": [{}, {}]}]}',
    "pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0",
    "pmset -g": "System-wide power settings:\n lowpowermode         1\n",
}


def test_the_machine_of_a_report(simulated, monkeypatch):
    def said(*command):
        return next((text for key, text in SAID.items() if " ".join(command).startswith(key)), "")

    monkeypatch.setattr(facts, "output_of", said)
    monkeypatch.setattr(facts.sys, "platform", "darwin")
    monkeypatch.setenv("MOE_MPS_COMMIT_EVERY", "64")
    monkeypatch.setenv("MOE_MPS_API_KEY", "a secret of the user")
    about = facts.facts()
    wanted = {"cores": 38, "memory": 34359738368, "memory_free_percent": 71, "displays": 2}
    wanted |= {"low_power_mode": 1, "power_source": "Battery Power", "wired_limit_mb": 0}
    assert wanted.items() <= about.items()
    assert about["switches"].items() >= {"MOE_MPS_COMMIT_EVERY": "64", "MOE_MPS_RESIDENCY": None}.items()
    assert "transformers" in about["versions"]
    assert "a secret of the user" not in str(about)
    monkeypatch.setattr(facts, "output_of", lambda *command: "")  # of a system without these programs
    assert "cores" not in facts.facts()


ABORTS = """
import os, sys
from torch_moe_mps.selfcheck import journal
with journal.noted("compiling norms_f32"):
    pass
with journal.noted("compiling rope_f32"), journal.noted("calling rope f32 #3"):
    os.abort() if sys.argv[1] == "abort" else None
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "torch_moe_mps"


def test_a_process_that_ends_by_itself_leaves_no_journal(cache):
    forked(ABORTS, "end")
    assert journal.stopped() == [] and not [*cache.glob("journal*")]


def test_where_a_process_was_when_it_was_aborted(cache):
    with pytest.raises(AssertionError):
        forked(ABORTS, "abort")
    left = [*cache.glob("journal*")]
    assert len(left) == 1
    assert journal.stopped() == ["compiling rope_f32", "calling rope f32 #3"]
    assert journal.stopped() == [] and not left[0].exists()  # told once


def test_the_first_use_tells_it(simulated, cache, monkeypatch):
    monkeypatch.setattr(journal, "_open", None)
    with pytest.raises(AssertionError):
        forked(ABORTS, "abort")
    with pytest.warns(
        UserWarning, match="stopped in its self-check, compiling rope_f32, calling rope f32 #3. If"
    ):
        assert libraries.compile_side_by_side(["norms_f32"]) == []
    journal._remove(journal._open)


def test_a_journal_has_a_line_before_each_call(simulated, cache, monkeypatch):
    monkeypatch.setattr(journal, "_open", None)
    seen = []

    def note(call, end):
        (file,) = cache.glob("journal*")
        seen.append(file.read_text().splitlines()[-1])

    monkeypatch.setattr(once, "compare", note)
    once.first_fault(once.checks_of([Subject("rms_norm", torch.float32)])[0])
    assert len(seen) > 2 and seen[1].partition(" ")[2].startswith("calling rms_norm f32 #1: rms_norm of x ")
    journal._remove(journal._open)


def test_a_journal_that_cannot_be_written(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(journal, "_open", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with journal.noted("calling nothing"):
        pass
    assert journal.stopped() == []


def test_calls_without_time_are_in_the_report(simulated, cache):
    norm = once.checks_of([Subject("rms_norm", torch.float32)])
    once.first_failures(norm, -1.0)
    assert machine.late_before() == {"rms_norm f32", "rms_norm f32 at size"}
    assert facts.facts()["late"] == ["rms_norm f32", "rms_norm f32 at size"]
    once.first_failures(norm, 600.0)
    assert machine.late_before() == set()
