"""Modules that compute the tables of rotary embeddings: two launches against their own code."""

import pytest
import torch
from support import tiny_models
from support.models import eager, operators_of
from support.recognition import by_operators
from support.sweep import covering
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

import torch_moe_mps
from torch_moe_mps.models.basics import tensors
from torch_moe_mps.models.trials.comparing import tried
from torch_moe_mps.transformers.install import rewrite

KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 4096},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 4096,
    },
    "dynamic": {"factor": 2.0},
    "longrope": {
        **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0},
        "original_max_position_embeddings": 4096,
    },
}
IDS = torch.tensor([[0, 1, 5, 4095, 131071, 999999]])


def rotary_of(kind: str = "default", **options) -> nn.Module:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind], **options}
    config = Qwen3MoeConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=parameters)
    return Qwen3MoeRotaryEmbedding(config).eval()


def tables(module, dtype=torch.float32, ids=IDS):
    with torch.no_grad():
        return module(torch.zeros(1, dtype=dtype, device=ids.device), ids)


def assert_same(ours, own, tolerance=1e-6):
    for a, b in zip(ours, own, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind):
    """Tables whose frequencies depend on the length are left alone."""
    module = rotary_of(kind)
    own = tables(module)
    fixed = kind not in ("dynamic", "longrope")
    assert list(map(str, rewrite(module)[0])) == (["rotary tables"] if fixed else [])
    assert operators_of(lambda: tables(module)) == ({"_pointwise": 2} if fixed else {})
    assert_same(tables(module), own)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    covering(("gpt_oss", "gemma4", "glm4_moe", "deepseek_v3", "qwen3_next"), (torch.float32, torch.bfloat16)),
)
def test_the_modules_of_models(architecture, dtype):
    """Half the width, a part of the head, one for each type of layers; frequencies of 16 bit, too."""
    model = eager(tiny_models.tiny_model(architecture, dtype))
    (rotary,) = (m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    types = list(rotary.rope_type) if isinstance(rotary.rope_type, dict) else [None]
    calls = [{} if kind is None else {"layer_type": kind} for kind in types]
    own = [rotary(torch.zeros(1, dtype=dtype), IDS, **call) for call in calls]
    torch_moe_mps.accelerate(model)
    with torch.no_grad():
        for call, expected in zip(calls, own, strict=True):
            run = lambda: rotary(torch.zeros(1, dtype=dtype), IDS, **call)  # noqa: E731, B023
            assert operators_of(run) == {"_pointwise": 2}
            assert_same(run(), expected, 1e-6 if dtype == torch.float32 else 2.0**-8)


def spatial() -> nn.Module:
    """Qwen4's, whose tokens have positions in time, height and width."""
    model = eager(tiny_models.tiny_model("qwen4_exp"))
    (rotary,) = (m for m in model.modules() if type(m).__name__ == "Qwen4ExpTextRotaryEmbedding")
    rotary.mrope_section = [1, 2, 1]
    return rotary


def test_positions_in_time_height_and_width():
    module, ids = spatial(), torch.tensor([[[0, 5, 4095]], [[7, 5, 11]], [[3, 5, 99]]])
    own, alike = tables(module, ids=ids), tables(module, ids=ids[0])
    assert list(map(str, rewrite(module)[0])) == ["rotary tables"]
    for each, expected in ((ids, own), (ids[0], alike)):
        assert operators_of(lambda: tables(module, ids=each)) == {"_pointwise": 2}  # noqa: B023
        assert_same(tables(module, ids=each), expected)
    assert not torch.equal(own[0], alike[0])
    for count in (1, 2):  # of positions; the model's own code expands one, and takes no two
        assert operators_of(lambda: tried(tables, module, ids=ids[:count])) == {}  # noqa: B023


def test_frequencies_that_change_are_read_again():
    module, other = rotary_of(), rotary_of("linear")
    rewrite(module)
    module.inv_freq.copy_(other.inv_freq)
    assert_same(by_operators(lambda: tables(module), "_pointwise"), tables(other))
    module.attention_scaling = other.attention_scaling = 1.5
    assert operators_of(lambda: tables(module)) == {}  # the trace has the factor
    assert_same(tables(module), tables(other))


def test_a_type_that_changes():
    module = rotary_of()
    rewrite(module)
    by_operators(lambda: tables(module), "_pointwise")
    module.rope_type = "another"
    assert operators_of(lambda: tables(module)) == {}


def test_positions_that_the_operator_does_not_take():
    module = rotary_of()
    ids = IDS.double()
    own = tables(module, ids=ids)
    rewrite(module)
    by_operators(lambda: tables(module), "_pointwise")
    assert operators_of(lambda: tables(module, ids=ids)) == {}
    assert_same(tables(module, ids=ids), own, 0.0)


def scaled(tables, factor):
    return tuple(factor * table for table in tables)


FACTOR = 1.0


def factor() -> float:
    return FACTOR


def reads_attribute(self, x, position_ids):
    return scaled(Qwen3MoeRotaryEmbedding.forward(self, x, position_ids), self.factor)


def reads_config(self, x, position_ids):
    own = self.config.rope_parameters["rope_theta"]
    return scaled(Qwen3MoeRotaryEmbedding.forward(self, x, position_ids), 1.0 if own == 10000.0 else 2.0)


def reads_global(self, x, position_ids):
    return scaled(Qwen3MoeRotaryEmbedding.forward(self, x, position_ids), FACTOR)


def asks_helper(self, x, position_ids):
    return scaled(Qwen3MoeRotaryEmbedding.forward(self, x, position_ids), factor())


def computes_frequencies(self, x, position_ids):
    own = 1.0 / self.config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2, dtype=torch.float) / 16)
    angles = position_ids[..., None].float() * own.to(x.device)
    return angles.cos().repeat(1, 1, 2).to(x.dtype), angles.sin().repeat(1, 1, 2).to(x.dtype)


def variant(forward) -> nn.Module:
    cls = type("Variant", (Qwen3MoeRotaryEmbedding,), {"forward": forward})
    module = cls(rotary_of().config).eval()
    module.factor = 1.0
    return module


# {what the code reads: (it, a change of it)}
READS = {
    "attribute": (reads_attribute, lambda module, patch: setattr(module, "factor", 2.0)),
    "config": (reads_config, lambda module, patch: module.config.rope_parameters.update(rope_theta=3.0)),
    "config, written": (
        reads_config,
        lambda module, patch: setattr(module.config, "rope_parameters", {"rope_theta": 3.0}),
    ),
    "global": (reads_global, lambda module, patch: patch.setitem(globals(), "FACTOR", 2.0)),
    "helper's global": (asks_helper, lambda module, patch: patch.setitem(globals(), "FACTOR", 2.0)),
    "helper": (asks_helper, lambda module, patch: patch.setitem(globals(), "factor", lambda: 2.0)),
    "frequencies": (
        computes_frequencies,
        lambda module, patch: module.config.rope_parameters.update(rope_theta=3.0),
    ),
    "no buffer": (computes_frequencies, lambda module, patch: module.inv_freq.mul_(2)),
}


@pytest.mark.parametrize("name", READS)
def test_what_the_code_reads_changes(name, monkeypatch):
    forward, change = READS[name]
    module, own = variant(forward), variant(forward)
    rewrite(module)
    before = by_operators(lambda: tables(module), "_pointwise")
    assert_same(before, tables(own))
    change(module, monkeypatch), change(own, monkeypatch)
    assert_same(tables(module), tables(own), 0.0 if name != "no buffer" else 1e-6)
    if name != "no buffer":  # the eager code does not read it
        assert not torch.allclose(before[0], tables(module)[0], atol=1e-3)


def reads_buffer(self, x, position_ids):
    return scaled(Qwen3MoeRotaryEmbedding.forward(self, x, position_ids), self.factors)


def doubled_if(condition):
    def forward(self, x, position_ids):
        return scaled(
            Qwen3MoeRotaryEmbedding.forward(self, x, position_ids), 2.0 if condition(x, position_ids) else 1.0
        )

    return forward


OTHERS = {
    "a buffer": reads_buffer,
    "a bound": lambda self, x, position_ids: Qwen3MoeRotaryEmbedding.forward(
        self, x, position_ids.clamp(max=8192)
    ),
    "a far bound": lambda self, x, position_ids: Qwen3MoeRotaryEmbedding.forward(
        self, x, torch.where(position_ids > 900_000, 0, position_ids)
    ),
    "no bound that is reached": lambda self, x, position_ids: Qwen3MoeRotaryEmbedding.forward(
        self, x, position_ids.clamp(max=2**21)
    ),
    "a period": lambda self, x, position_ids: Qwen3MoeRotaryEmbedding.forward(self, x, position_ids % 8192),
    "one token": doubled_if(lambda x, ids: ids.shape[1] == 1),
    "64 tokens": doubled_if(lambda x, ids: ids.shape[-1] > 64),
    "one sequence": doubled_if(lambda x, ids: x.shape[0] == 1),
    "heads": doubled_if(lambda x, ids: x.dim() == 4),
    "width": doubled_if(lambda x, ids: x.shape[-1] == 64),
    "values": doubled_if(lambda x, ids: bool(ids.max() > 5000)),
    "hidden states": lambda self, x, position_ids: scaled(
        Qwen3MoeRotaryEmbedding.forward(self, x, position_ids), 1.0 + 0.0 * x.flatten()[0]
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_computations_run_unmodified(name):
    module = variant(OTHERS[name])
    module.register_buffer("factors", torch.ones(1))
    assert rewrite(module)[0] == []


def test_a_plain_variant_is_recognised():
    """So that the others above are left for what they add."""
    module = variant(lambda self, x, position_ids: Qwen3MoeRotaryEmbedding.forward(self, x, position_ids))
    rewrite(module)
    by_operators(lambda: tables(module), "_pointwise")


class Thirds(Qwen3MoeRotaryEmbedding):
    def forward(self, x, position_ids):
        return tuple(table[..., ::2] for table in super().forward(x, position_ids))


def test_other_tables_are_left_alone():
    module = Thirds(rotary_of().config).eval()
    assert rewrite(module)[0] == []


@torch.no_grad()
def test_axes_that_a_recording_made_are_not_held(monkeypatch):
    """They are fake there, and every later call would get them."""
    monkeypatch.setattr(tensors, "_constants", {})
    model = eager(tiny_models.tiny_model("qwen4_exp"))
    rotary = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    x, ids = torch.zeros(1), torch.randint(100, (3, 2, 5), generator=torch.Generator().manual_seed(0))
    expected = rotary(x, ids)
    assert rewrite(rotary)[0]
    tensors._constants.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        rotary(x, ids)
    assert operators_of(lambda: torch.testing.assert_close(rotary(x, ids), expected))["_pointwise"] == 2
