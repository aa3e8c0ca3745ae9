"""On a CPU a module whose own code is faster runs it; elsewhere, and in comparisons, the operators run."""

import copy

import pytest
import torch
from support import tiny_models
from support.sweep import in_sweep
from torch.utils._python_dispatch import TorchDispatchMode

import torch_moe_mps
from torch_moe_mps.models.basics import unmodified
from torch_moe_mps.models.capture.surroundings import default_device
from torch_moe_mps.models.trials.memory import on_the_cpu


class Called(TorchDispatchMode):
    """Counts the calls of this package's operators."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_mps":
            name = func._schema.name.removeprefix("moe_mps::")
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_shipped(monkeypatch) -> None:
    monkeypatch.setattr(unmodified, "_all_run", False)


def pair(architecture: str, dtype: torch.dtype = torch.float32):
    model = tiny_models.tiny_model(architecture, dtype).eval()
    return model, torch_moe_mps.accelerate(accelerated := copy.deepcopy(model)), accelerated


@torch.no_grad()
def called(model, device: str = "cpu") -> dict[str, int]:
    with Called() as mode:
        model(torch.arange(5, device=device)[None] + 3)
    return mode.counts


@pytest.mark.parametrize(
    "architecture",
    in_sweep(["mixtral", "qwen3_moe", "deepseek_v3", "phimoe", "deepseek_v4"], ["qwen3_moe", "deepseek_v4"]),
)
def test_no_slower_operator_runs_on_a_cpu(as_shipped, architecture):
    _, _, accelerated = pair(architecture)
    counts = called(accelerated)
    assert counts.keys().isdisjoint({"rms_norm", "layer_norm", "rms_norm_gated", "moe_router", "rope"})
    assert "router_logits" not in counts
    assert counts["_moe_experts"] > 0


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_give_their_own_bits(as_shipped, dtype):
    model, _, accelerated = pair("mixtral", dtype)
    x = torch.randn(1, 5, model.config.hidden_size).to(dtype)
    own, ours = model.model.layers[0], accelerated.model.layers[0]
    assert torch.equal(ours.input_layernorm(x), own.input_layernorm(x))
    assert all(map(torch.equal, ours.mlp.gate(x[0]), own.mlp.gate(x[0])))
    positions = torch.arange(5)[None]
    tables = own.self_attn, model.model.rotary_emb(x, positions)
    assert all(map(torch.equal, accelerated.model.rotary_emb(x=x, position_ids=positions), tables[1]))


def test_operators_run_where_they_are_compared(as_shipped):
    _, _, accelerated = pair("mixtral")
    with unmodified.all_operators():
        counts = called(accelerated)
    layers = accelerated.config.num_hidden_layers
    assert counts["rms_norm"] == 2 * layers + 1
    assert counts["moe_router"] == counts["rope"] == layers
    assert "rope" not in called(accelerated)


@pytest.mark.slow("a model on mps")
def test_operators_run_on_mps(as_shipped, simulated):
    _, _, accelerated = pair("mixtral")
    counts = called(accelerated.to("mps"), "mps")
    assert counts["rms_norm"] == 2 * accelerated.config.num_hidden_layers + 1


@pytest.mark.parametrize(
    ("architecture", "last"),
    [
        ("mixtral", "2 modules run on torch_moe_mps, 10 run eager code, which is faster on a CPU, 0 run"),
        ("gpt_oss", "4 modules run on torch_moe_mps, 8 run eager code, which is faster on a CPU, 0 run"),
    ],
)
def test_report_counts_what_runs_on_a_cpu(as_shipped, architecture, last):
    """Its rows name the operators that a call runs, and no others; torch's attention knows no sinks."""
    _, report, accelerated = pair(architecture)
    lines = str(report).splitlines()
    assert lines[-1] == f"{last} unmodified."
    table = lines[2 : lines.index("")]
    cells = [line.partition(" (on mps")[0] for line in table if "eager code (" not in line]
    assert len(cells) < len(table)
    named = {name for name in ("cached_attention", "moe_experts", "rope", "rms_norm") if name in str(cells)}
    assert named == {name.removeprefix("_") for name in called(accelerated)}


def test_report_where_operators_run_on_a_cpu_too():
    _, report, _ = pair("mixtral")
    assert str(report).endswith("12 modules run on torch_moe_mps, 0 run unmodified.")
    assert "eager" not in str(report) and "on mps" not in str(report)


@pytest.mark.slow("a model on mps")
def test_report_of_a_model_on_mps(as_shipped, simulated):
    report = torch_moe_mps.accelerate(tiny_models.tiny_model("mixtral").eval().to("mps"))
    assert not report.eager_on_cpu and "12 modules run on torch_moe_mps, 0 run unmodified." in str(report)


def test_trials_are_on_the_cpu_whatever_the_default_device():
    """By `set_default_device`, by `with`, and where it is the CPU."""
    torch.set_default_device("meta")
    try:
        with on_the_cpu():
            assert torch.empty(1).device.type == "cpu"
        assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    with torch.device("meta"), on_the_cpu():
        assert torch.empty(1).device.type == "cpu"
    with on_the_cpu():
        assert torch.empty(1).device.type == "cpu" and default_device() is None
