"""Models whose experts are quantised in place."""

import copy
import sys

import expecttest
import pytest
import torch
from support import tiny_models
from support.interrupts import Interrupts, interrupted
from support.memory import Memory
from support.models import eager, quantize_experts
from support.ours import is_file_of_ours
from support.quantized_layers import bits_of
from support.tiny_models import dense_twin, tiny_model

import torch_moe_mps
from torch_moe_mps.checkpoints import in_place
from torch_moe_mps.checkpoints.quantize import weights
from torch_moe_mps.models.basics import interface
from torch_moe_mps.models.basics.report import QuantizedProjection
from torch_moe_mps.quantization import Format, formats
from torch_moe_mps.transformers import QuantizationReport, experts_of, is_quantized


def small(architecture, **overrides):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}
    return tiny_model(architecture, **(sizes | overrides))


class TestReport(expecttest.TestCase):
    def test_table(self):
        """Equal layers share a line."""
        form = Format(4, 32)
        entries = [QuantizedProjection("gate_up_proj", 0.1, 3 << 20, 1 << 20, form)]
        entries += [QuantizedProjection("down_proj", 0.09, 2 << 20, 1 << 19, form)]
        other = [entries[0]._replace(error=0.2), entries[1]]
        report = QuantizationReport(
            {"layers.0.experts": entries, "layers.11.experts": other},
            {"lm_head": "embed_tokens"},
            {f"layers.{i}.experts": "already mxfp4" for i in (3, 4)},
            10_000_000,
            3_450_000,
        )
        assert (report.dense_bytes, report.quantized_bytes) == (10 << 20, 3 << 20)
        self.assertExpectedInline(
            str(report),
            """\
weights                        format      n  mean error  largest  before   after
layers.*.experts.gate_up_proj  affine4_32  2       15.0%    20.0%  6.3 MB  2.1 MB
layers.*.experts.down_proj     affine4_32  2        9.0%     9.0%  4.2 MB  1.0 MB
lm_head: shares the weight of embed_tokens
layers.*.experts (2): not quantised, already mxfp4
4 matrices quantised: 10.5 MB before, 3.1 MB after; weights read for a token: 10.0 MB before, 3.5 MB after""",
        )
        report.modules.clear()
        self.assertExpectedInline(
            str(report),
            """\
lm_head: shares the weight of embed_tokens
layers.*.experts (2): not quantised, already mxfp4""",
        )
        self.assertExpectedInline(str(QuantizationReport()), """Nothing in this model can be quantised.""")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_models_on_a_device(device, architecture, monkeypatch):
    """The same bits as on the CPU, and the allocator's cache is given back after every layer."""
    released = []
    monkeypatch.setattr(in_place, "release_cache", lambda device: released.append(device.type))
    model = small(architecture)
    expected = copy.deepcopy(model)
    quantize_experts(expected, 4, 32)
    released.clear()
    report = quantize_experts(model.to(device), 4, 32)
    assert released == [device] * len(report.modules)
    state = expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == device and torch.equal(bits_of(tensor.cpu()), bits_of(state[name]))


def test_want_of_memory_leaves_a_model_that_runs_and_saves(monkeypatch, tmp_path):
    model = small("qwen3_moe")
    tokens, calls, quantize_stack = torch.arange(1, 9).view(1, 8), [], weights.quantize_stack

    def fourth_time_fails(*arguments):
        calls.append(None)
        if len(calls) == 4:
            raise MemoryError
        return quantize_stack(*arguments)

    monkeypatch.setattr(weights, "quantize_stack", fourth_time_fails)
    with pytest.raises(MemoryError):
        quantize_experts(model, 4, 32)
    assert [is_quantized(module) for module in experts_of(model).values()] == [True, False]
    model.save_pretrained(tmp_path)
    loaded = torch_moe_mps.from_pretrained(tmp_path, type(model)).eval()
    with torch.no_grad():
        # Not to the bit: products of dense weights depend on where memory begins.
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("parameters", [["gate_up_proj"], ["gate_up_proj", "down_proj"]], ids=len)
def test_rejects_experts_under_an_adapter(parameters):
    peft = pytest.importorskip("peft")
    targets = [f"mlp.experts.{name}" for name in parameters]
    config = peft.LoraConfig(r=2, target_parameters=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(small("qwen3_moe"), config).eval()
    tokens = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        expected = adapted(input_ids=tokens).logits
        with pytest.raises(
            ValueError, match=r"a PEFT adapter is on \S+layers.0.mlp.experts\S*; merge_and_unload"
        ):
            quantize_experts(adapted, 4, 32)
        assert torch.equal(adapted(input_ids=tokens).logits, expected)
        merged = adapted.merge_and_unload()
        assert len(quantize_experts(merged, 4, 32).modules) == 2


def test_rejects_distributed_weights(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import distribute_tensor

    model = small("qwen3_moe")
    module = model.model.layers[1].mlp.experts
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        module.down_proj = torch.nn.Parameter(distribute_tensor(module.down_proj.detach(), mesh))
        message = (
            r"layers.1.mlp.experts.down_proj must be a plain tensor, without expert parallelism, got DTensor"
        )
        with pytest.raises(ValueError, match=message):
            quantize_experts(model, 4, 32)
    finally:
        distributed.destroy_process_group()
    assert not any("packed" in name for name in model.state_dict())


def test_peak_memory_while_quantising(monkeypatch):
    """Under the dense model plus one layer, counting every tensor that is alive."""
    monkeypatch.setattr(formats, "CHUNK", 4096)
    model = small("qwen3_moe", num_hidden_layers=4, hidden_size=128, moe_intermediate_size=64)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in next(iter(experts_of(model).values())).parameters())
    with Memory([*model.parameters(), *model.buffers()]) as memory:
        started = memory.held()
        report = quantize_experts(model, 4, 64)
        ended = memory.held()
    assert report.dense_bytes == 4 * layer and started >= dense
    assert memory.peak < started + layer
    assert ended == started - report.dense_bytes + report.quantized_bytes


def test_progress_bar(capsys):
    torch_moe_mps.accelerate(small("qwen3_moe"), 4, 32, check=False)
    assert "Quantising" in capsys.readouterr().err


def check_interrupted(after: int) -> bool:
    """A model that was interrupted computes, and can be quantised again. False if it came too late."""
    model = small("qwen3_moe")
    twin = copy.deepcopy(model)
    came = interrupted(lambda: quantize_experts(model, 4, 32), after)
    assert_same(model, dense_twin(twin, model))
    quantize_experts(model, 4, 32)
    assert all(map(is_quantized, experts_of(model).values()))
    assert_same(model, dense_twin(twin, model))
    return came


def assert_same(model, twin) -> None:
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=1e-4, atol=1e-4)


def test_an_interrupt_leaves_a_model_that_computes():
    quantize_experts(small("qwen3_moe"), 4, 32)  # what is imported and cached once
    with Interrupts(10**9) as counter:
        quantize_experts(small("qwen3_moe"), 4, 32)
    lines = 10**9 - counter.left
    generator = torch.Generator().manual_seed(0)
    points = sorted(torch.randint(1, lines, (6,), generator=generator).tolist())
    for after in points:
        assert check_interrupted(after)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "dbrx"])
def test_experts_compute_at_every_line_that_replaces_them(architecture, monkeypatch):
    """A user may interrupt at any of them. The dense stacks of DBRX have other names."""
    model, outputs, states = small(architecture, num_hidden_layers=1), [], []
    (module,) = experts_of(model).values()
    twin = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    x, ids = torch.randn(3, 64, generator=generator), torch.tensor([[0, 1], [2, 1], [1, 3]])
    inputs = x, ids, torch.rand(3, 2, generator=generator)

    def state():
        return type(module), *map(id, vars(module).values()), *map(id, module.parameters())

    def at_each_line(frame, event, argument):
        if not is_file_of_ours(frame.f_code.co_filename):
            return None
        if event == "line" and states[-1:] != [state()]:
            outputs.append(module(*inputs))
            states.append(state())
        return at_each_line

    def traced(*arguments):
        sys.settrace(at_each_line)
        try:
            replace(*arguments)
        finally:
            sys.settrace(None)

    replace = weights.replace
    monkeypatch.setattr(weights, "replace", traced)
    with torch.no_grad():
        dense = twin(*inputs)
        quantize_experts(model, 4, 32)
        quantized = dense_twin(twin, module)(*inputs)
    outputs.append(module(*inputs))
    assert not torch.allclose(dense, quantized, 1e-2, 1e-2)
    is_dense = [torch.allclose(output, dense, 1e-4, 1e-5) for output in outputs]
    assert is_dense == sorted(is_dense, reverse=True) and is_dense[0] and not is_dense[-1]
    for output in outputs[is_dense.index(False) :]:
        torch.testing.assert_close(output, quantized, rtol=1e-4, atol=1e-5)


def test_an_interrupt_leaves_no_dense_weights_next_to_packed_ones(monkeypatch):
    model = small("dbrx", num_hidden_layers=1)

    def interrupt(module):
        raise KeyboardInterrupt

    monkeypatch.setattr(interface, "remove_unread", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize_experts(model, 4, 32)
    (module,) = experts_of(model).values()
    assert is_quantized(module)
    names = {name.partition("_proj_")[0] for name in module.state_dict()}
    assert names == {"gate_up", "down"}


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(1, 50, 7))
def test_an_interrupt_at_every_seventh_line(first):
    """A seventh of them in each test: together they take minutes, and a test ends after some."""
    after = first
    while check_interrupted(after):
        after += 49
    assert after > 1000


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_quantised_model_stays_in_its_format_and_the_report_says_so(architecture, shipped_defaults):
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model(architecture))
    first = torch_moe_mps.accelerate(model, bits=8, group_size=32).quantization
    said = torch_moe_mps.accelerate(model, bits=4, group_size=32).quantization
    assert {name: said.skipped[name] for name in (*first.modules, *first.shared)} == dict.fromkeys(
        (*first.modules, *first.shared), "already affine8_32"
    )
    assert "self_attn.q_proj (2): not quantised, already affine8_32" in str(said)
