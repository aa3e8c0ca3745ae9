"""`check --large`: calls of the sizes of real models, here of smaller ones."""

import json
import math

import pytest
import torch
from support.processes import python

from torch_moe_mps.commands import check, main
from torch_moe_mps.ops._formats import FORMATS
from torch_moe_mps.selfcheck import large

AFFINE = FORMATS["affine4_64"]


@pytest.mark.slow("35 calls, on the GPU and on the CPU")
def test_every_call_is_right(simulated):
    made = []
    for what, call in large.calls(torch.bfloat16, AFFINE, smaller=128):
        assert check.compare(call) is None, what
        made.append(what)
    assert len(made) == 35 and len(set(made)) == 35
    operators = {call.operator for _, call in large.calls(torch.bfloat16, AFFINE, smaller=512)}
    assert operators == {
        *(
            "linear_quantized",
            "_moe_experts_quantized",
            "_mlp_quantized",
            "moe_router",
            "rms_norm",
            "cached_attention",
        )
    }


def test_a_wrong_one_is_in_the_report(simulated, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    wanted = [each for each in large.calls(torch.bfloat16, AFFINE, smaller=512) if "norm" in each[0]]
    monkeypatch.setattr(large, "calls", lambda dtype, format: iter(wanted))
    assert main(["check", "--large"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("Qwen3-30B-A3B, norm, 1 token: right (")
    monkeypatch.setattr(check, "compare", lambda call: check.Finding("rms_norm", "differs", error=math.inf))
    assert main(["check", "--large", "--json", "large.json"]) == 1
    out = capsys.readouterr().out
    assert "Qwen3-30B-A3B, norm, 1 token: wrong" in out
    assert "FAILED: rms_norm differs (largest error inf): Llama-3.1-8B, norm, 1 token" in out
    report = json.loads((tmp_path / "large.json").read_text())
    assert [each["error"] for each in report["failures"]] == ["inf"] * 3
    assert [each["right"] for each in report["large"]] == [False] * 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--large", "--dtype", "float32,float16"],
            "--dtype must be one name with --large, got 'float32,float16'",
        ),
        (["--probe", "--format", "mxfp4"], "--format must be left out with --probe, got 'mxfp4'"),
        (
            ["--probe", "--json", "/missing/x.json"],
            "--json must be a file that can be written, got /missing/",
        ),
    ],
)
def test_bad_options(simulated, capsys, options, error):
    assert main(["check", *options]) == 1
    assert error in capsys.readouterr().err


def test_either_large_or_probe(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--large", "--probe"])
    assert "not allowed with argument" in capsys.readouterr().err


# What takes most: all weights, and all scores of the reference.
REAL = """
MOST = (
    "output head, 3 tokens",
    "experts, 512 tokens",
    "attention of 512 tokens to 4608 keys",
    "attention of 64 tokens to 32832 keys",
    "attention of 32 tokens to 32800 keys",
)
import resource, sys, time
from support.simulated import install
install()
import simulator, torch
from torch_moe_mps.ops._formats import FORMATS
from torch_moe_mps.selfcheck import compare, large
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sizes = []
with simulator.dropped():
    for what, call in large.calls(torch.bfloat16, FORMATS["affine4_64"]):
        if what.partition(", ")[2] in MOST:
            for device in ("mps", "cpu"):
                compare._results(call, device, float("inf"))
        tensors = [v for v in call.arguments.values() if isinstance(v, torch.Tensor)]
        sizes.append((sum(t.nbytes for t in tensors), what))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((peak - before) * 1024, max(sizes)[0])
"""


@pytest.mark.sweep  # of real sizes
def test_the_real_sizes_fit(simulated):
    """The kernels are encoded and do not run; the references do, and the memory of all is counted."""
    peak, arguments = map(int, python(REAL).split())
    assert peak < large.MEMORY and arguments > 3e8, (peak, arguments)
