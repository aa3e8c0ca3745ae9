"""Making a model on mps ready for its first token."""

import os
import re
from types import SimpleNamespace

import expecttest
import pytest
import torch
from support import tiny_models
from support.on_mps import warnings_of_operators
from support.processes import forked
from transformers import AutoModelForCausalLM, core_model_loading, modeling_utils

import torch_moe_mps
from torch_moe_mps import macs
from torch_moe_mps._environment import ONE_THREAD
from torch_moe_mps.checkpoints import threads
from torch_moe_mps.commands.sources import usable_device
from torch_moe_mps.models.modules.linears import QuantizedLinear
from torch_moe_mps.quantization import quantize
from torch_moe_mps.transformers import compiling
from torch_moe_mps.transformers.compiling import libraries_of

FIRST_TOKEN = """
import sys
import torch
from support import tiny_models
import torch_moe_mps
from torch_moe_mps.transformers.compiling import libraries_of
built = lambda: {name for name in torch.ops.moe_mps._libraries() if torch.ops.moe_mps._is_built(name)}
architecture, bits, dtype = sys.argv[1], int(sys.argv[2]) or None, getattr(torch, sys.argv[3])
with tiny_models.groups_of_32():
    model = tiny_models.tiny_model(architecture, dtype).to("mps")
report = torch_moe_mps.accelerate(model, bits=bits, group_size=32 if bits else None, capture=True)
before, own = built(), libraries_of(model, report.operators())
assert {*own} <= before
assert report.compiled in str(report)
with torch.no_grad():
    for tokens in (1, 40):
        model.generate(torch.arange(1, 1 + tokens, device="mps")[None], max_new_tokens=3, do_sample=False)
(of_captured_steps,) = (name for name in own if name.startswith("attention_turned"))
was_captured = any(kernel.split()[2] != "0" for kernel in torch.ops.moe_mps._pipelines(of_captured_steps))
print(before == built(), was_captured, *sorted(own))
"""
# What a first token launches, and what prompts, captured steps and 256 keys do.
FAMILIES = ("norms", "pointwise", "rope", "routing_2", "attention_64", "sampling")
LATER = ("norms_residual", "routing_logits", "attention_turned_64", "attention_merge")
PARTS_LATER = ("quantized_joined", "quantized_few", "quantized_prompts")


@pytest.mark.parametrize(
    ("bits", "dtype", "experts"),
    [
        pytest.param(0, "float16", "experts_f16", marks=pytest.mark.sweep),
        pytest.param(4, "float16", "quantized_affine4_32_f16", marks=pytest.mark.sweep),
        (4, "bfloat16", "quantized_affine4_32_bf16"),
    ],
)
def test_nothing_compiles_while_tokens_are_generated(simulated, bits, dtype, experts):
    """Nor do captured steps. A model compiles nothing for other dtypes and kinds of layers, and only its own
    weight format."""
    same, was_captured, *built = forked(FIRST_TOKEN, "qwen3_moe", bits, dtype).splitlines()[-1].split()
    own = experts.rpartition("_")[2]
    assert same == was_captured == "True"
    families = {f"{family}_{own}" for family in (*FAMILIES, *LATER)}
    parts = {experts.replace("quantized", part) for part in PARTS_LATER}
    assert {*built} == families | {experts, "bucket_i64"} | (parts - {experts})


@pytest.mark.parametrize("bits", [pytest.param(4, marks=pytest.mark.sweep), 0])
@pytest.mark.parametrize("architecture", ["dbrx", pytest.param("jetmoe", marks=pytest.mark.sweep)])
@pytest.mark.slow("a process with a model")
def test_nor_of_models_whose_stacks_have_other_names(simulated, architecture, bits):
    """Blocks of theirs route, with ids of 32 bits."""
    same, _, *built = forked(FIRST_TOKEN, architecture, bits, "bfloat16").splitlines()[-1].split()
    assert same == "True"
    assert {"routing_2_bf16", "bucket_i32", "bucket_i64"} <= {*built}


def lines_of(library: str) -> int:
    """Of a library's text, without comments, blank lines, and those that only name a file."""
    source = re.sub("//.*", "", torch.ops.moe_mps._library_source(library))
    return sum(bool(line.strip()) and not line.startswith("#line") for line in source.splitlines())


class TestLines(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _simulator(self, simulated):
        del simulated

    def test_lines_that_a_first_token_compiles(self):
        """Of Qwen3-MoE or Mixtral at 4 bits, greedy: what samples compiles beside it."""
        families = "norms", "pointwise", "rope", "routing_4", "attention_128"
        own = ["quantized_affine4_64_bf16", *(f"{family}_bf16" for family in families)]
        lines = {name: lines_of(name) for name in own}
        total = sum(lines.values())
        text = "".join(f"{name}: {count}\n" for name, count in lines.items())
        self.assertExpectedInline(
            f"{text}all: {total}\n",
            """\
quantized_affine4_64_bf16: 1061
norms_bf16: 356
pointwise_bf16: 185
rope_bf16: 357
routing_4_bf16: 425
attention_128_bf16: 884
all: 3268
""",
        )


def test_a_model_elsewhere_compiles_nothing(capfd):
    report = torch_moe_mps.accelerate(tiny_models.tiny_model("qwen3_moe"))
    assert report.compiled is None and "compiled" not in capfd.readouterr().err


def test_libraries_of_a_model_without_experts(simulated):
    assert libraries_of(torch.nn.Linear(4, 4, device="mps")) == []


@pytest.mark.parametrize("version", ["2.12.1", "2.9.0+cpu"])
def test_an_older_torch_is_refused_on_mps(simulated, monkeypatch, version):
    """Its own attention on MPS is wrong without an error. Elsewhere it serves."""
    model = tiny_models.tiny_model("qwen3_moe")
    monkeypatch.setattr(torch, "__version__", version)
    torch_moe_mps.restore(model)
    torch_moe_mps.accelerate(model)
    torch_moe_mps.restore(model)
    own = type(model.model.layers[0])
    model.to("mps")
    with pytest.raises(RuntimeError) as raised:
        torch_moe_mps.accelerate(model, bits=4, group_size=32)
    line = str(raised.value)
    assert line.startswith(
        f"moe_mps::accelerate: torch must be 2.13 or newer for a model on mps, got {version}"
    )
    assert "wrong results" in line and "\n" not in line
    assert type(model.model.layers[0]) is own


@pytest.mark.parametrize(
    ("version", "macos", "message"),
    [
        ("2.13.1", (27, 0), "torch must be 2.14 or newer on macOS 27, got 2.13: its F.linear aborts"),
        ("2.15.0", (14, 7, 1), "macOS must be 15 or newer with torch 2.15, got 14.7.1"),
        ("2.14.0", (13, 6), "macOS must be 14 or newer with torch 2.14, got 13.6"),
        ("2.13.1", (26, 5), None),
        ("2.14.0", (27, 1), None),
        ("2.14.0", (14, 0), None),
        ("2.15.0", (15, 0), None),
    ],
)
def test_torch_and_macos_that_do_not_go_together(simulated, monkeypatch, version, macos, message):
    """One line, before anything changes; a model on the CPU has no part in it."""
    model = torch.nn.Linear(4, 4)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(macs, "macos", lambda: macos)
    compiling.require_torch("accelerate", model)
    model.to("mps")
    if message is None:
        assert usable_device("mps") == "mps"
        return compiling.require_torch("accelerate", model)
    with pytest.raises(ValueError, match=re.escape(message)):
        usable_device("mps")
    with pytest.raises(RuntimeError) as raised:
        torch_moe_mps.accelerate(model)
    assert str(raised.value).startswith(f"moe_mps::accelerate: {message}") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "version"), [("26.1", (26, 1)), ("15", (15, 0)), ("14.7.1", (14, 7, 1)), ("", None)]
)
def test_the_version_of_macos(monkeypatch, said, version):
    monkeypatch.setattr(macs, "output_of", lambda *command: said)
    assert macs.macos.__wrapped__() == version


@pytest.mark.parametrize(
    ("platform", "version", "expected"),
    [("darwin", "2.14.1", "1"), ("darwin", "2.15.0", None), ("linux", "2.13.0", None)],
)
def test_loading_takes_one_thread_where_torch_needs_it(monkeypatch, tmp_path, platform, version, expected):
    """While a checkpoint of ours is read, by plain transformers too; not behind it."""
    monkeypatch.delenv(ONE_THREAD, raising=False)
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("llama")
    torch_moe_mps.accelerate(model, 4, 32)
    model.save_pretrained(tmp_path)
    seen, load = [], core_model_loading.convert_and_load_state_dict_in_model

    def noted(*args, **kwargs):
        seen.append(os.environ.get(ONE_THREAD))
        return load(*args, **kwargs)

    monkeypatch.setattr(modeling_utils, "convert_and_load_state_dict_in_model", noted)
    monkeypatch.setattr(threads, "sys", SimpleNamespace(platform=platform))
    monkeypatch.setattr(torch, "__version__", version)
    torch_moe_mps.from_pretrained(tmp_path)
    assert seen == [expected] and ONE_THREAD not in os.environ


def test_transformers_reads_without_threads_when_asked(monkeypatch, tmp_path):
    """The variable is transformers'."""
    tiny_models.tiny_model("qwen3_moe").save_pretrained(tmp_path)

    def no_threads(*args, **kwargs):
        raise AssertionError("loaded with threads")

    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", no_threads)
    with pytest.raises(AssertionError, match="loaded with threads"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setenv(ONE_THREAD, "1")
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_packed_weights_are_put_on_16_bytes_once(simulated):
    """A tensor of a file may start anywhere. Left there, it would be copied in every call."""
    weight = quantize(torch.randn(32, 64), 4, 32)
    layer = QuantizedLinear(weight, torch.float32).to("mps")
    expected = layer(torch.ones(1, 64, device="mps")).cpu()
    memory = torch.zeros(layer.packed.numel() + 1, dtype=torch.int32, device="mps")
    layer.packed.data = memory[1:].view(layer.packed.shape).copy_(layer.packed)
    parameter = layer.packed
    assert layer.packed.storage_offset() == 1
    torch_moe_mps.accelerate(layer)
    assert layer.packed is parameter and layer.packed.storage_offset() == 0
    first = layer.packed.data_ptr()
    torch_moe_mps.accelerate(layer)
    assert layer.packed.data_ptr() == first
    assert torch.equal(layer(torch.ones(1, 64, device="mps")).cpu(), expected)


def test_experts_whose_inputs_come_first_are_laid_out_once(simulated, capfd, tmp_path):
    """gpt-oss multiplies x @ weight. The kernels read rows of inputs, in every call the same memory."""
    own, model = (tiny_models.tiny_model("gpt_oss", torch.bfloat16) for _ in range(2))
    torch_moe_mps.accelerate(model.to("mps"))
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        assert weight.mT.is_contiguous() and torch.equal(
            weight.cpu(), getattr(own.model.layers[0].mlp.experts, name)
        )
    memory = experts.down_proj.data_ptr()
    torch_moe_mps.accelerate(model)
    assert experts.down_proj.data_ptr() == memory
    with warnings_of_operators(capfd) as said, simulated.trace() as commands, torch.no_grad():
        model(torch.tensor([[5]], device="mps"))
    assert "is copied in every call" not in said()
    kernels = [line.split()[0] for line in commands if " grid " in line]
    assert "expert_down_bf16" in kernels
    model.save_pretrained(tmp_path)
    loaded = type(own).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(map(torch.equal, loaded.state_dict().values(), own.state_dict().values()))
