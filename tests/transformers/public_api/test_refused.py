"""MOE_MPS_REFUSE: the operators and passes that it names do not run, and results stay."""

import warnings

import pytest
import torch
from support import tiny_models
from support.launches import operators_of_token
from support.models import output
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE, REFUSE
from torch_moe_mps.models.basics.state import kv_bits_of
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.models.upstream.calls import cache_argument

FUSED = {"router_logits", "_rope_attention_"}  # only passes put them in
IDS = torch.tensor([[1, 2, 3, 4, 5]])


class Called(TorchDispatchMode):
    """Notes the operators of this package that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_mps":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.fixture
def model(simulated):
    return tiny_models.tiny_model("qwen3_moe", torch.float32, num_hidden_layers=1)


def called(model) -> tuple[set[str], torch.Tensor]:
    with Called() as found:
        logits = output(model, IDS.to("mps"))
    return found.names, logits.cpu()


@pytest.mark.parametrize(
    ("name", "operator", "cls"),
    [
        ("moe_router", "moe_router", "Qwen3MoeTopKRouter"),
        ("cached_attention", "cached_attention", "Qwen3MoeAttention"),
        ("moe_experts", "_moe_experts", "Qwen3MoeExperts"),
    ],
)
def test_an_operator_is_refused_while_the_variable_is_there(model, monkeypatch, name, operator, cls):
    """A module that a rule rewrites, attention, and experts; all others run on operators."""
    expected = output(model, IDS)
    model.to("mps")
    torch_moe_mps.accelerate(model)
    every, logits = called(model)
    assert operator in every
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    monkeypatch.setenv(REFUSE, f"{name}, fused_norm_add")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experts that are left alone
        report = torch_moe_mps.accelerate(model)
    without, logits = called(model)
    assert without == every - {operator}
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    if name != "cached_attention":  # functions of its forward still have operators
        (row,) = [row for row in report.rows if row.cls == cls]
        assert not row.done and row.reason == f"MOE_MPS_REFUSE names {name}"

    monkeypatch.delenv(REFUSE)
    torch_moe_mps.accelerate(model)
    assert called(model)[0] == every


@pytest.mark.parametrize(
    ("names", "gone"),
    [
        ("", set()),
        ("router_logits", {"router_logits"}),
        ("turn_in_attention", {"_rope_attention_"}),
        ("fusion", FUSED),
    ],
)
def test_captured_steps_are_not_fused(model, monkeypatch, names, gone):
    monkeypatch.setenv(CAPTURE, "1")
    monkeypatch.setenv(REFUSE, names)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    expected = output(model, ids)
    model.to("mps")
    torch_moe_mps.accelerate(model)
    cache, logits = DynamicCache(config=model.config), []
    for token in ids.split(1, 1):
        logits.append(output(model, token.to("mps"), **cache_argument(model, cache)).cpu())
    operators = operators_of_token(model).keys()
    assert FUSED - gone <= operators and not gone & operators
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            "moe_ruter",
            "MOE_MPS_REFUSE must be names of operators or of passes with commas between, or fusion, "
            "got 'moe_ruter'; the nearest is moe_router",
        ),
        (
            "rope,moe_experts_quantized",
            "MOE_MPS_REFUSE must be operators in place of a model's own code, got 'moe_experts_quantized', "
            "which runs the quantised weights of this model",
        ),
    ],
)
def test_a_name_that_cannot_be_refused(monkeypatch, names, message):
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", torch.float32)
    monkeypatch.setenv(REFUSE, names)
    before = model.state_dict()
    with pytest.raises(ValueError) as raised:
        torch_moe_mps.accelerate(model, bits=4, group_size=32)
    assert str(raised.value) == f"moe_mps::accelerate: {message}"
    assert model.state_dict().keys() == before.keys()  # nothing is quantised


def test_a_cache_of_8_bits_that_is_refused(model, monkeypatch):
    monkeypatch.setenv(REFUSE, "_write_cache_quantized_")
    with pytest.warns(UserWarning, match="MOE_MPS_REFUSE names _write_cache_quantized_; .* stay in 16 bits"):
        torch_moe_mps.accelerate(model.to("mps"), kv_bits=8)
    with torch.no_grad():
        cache = model(IDS.to("mps"), use_cache=True).past_key_values
    assert not isinstance(cache.layers[0].keys, QuantizedStates)


def test_a_cache_of_4_bits_that_is_refused(model, monkeypatch):
    """It holds 8 bits, or 16 where these are refused, too."""
    monkeypatch.setenv(REFUSE, "_tiled_attention")
    with pytest.warns(UserWarning, match="MOE_MPS_REFUSE names _tiled_attention; .* are held in 8 bits"):
        torch_moe_mps.accelerate(model, kv_bits=4)
    assert kv_bits_of(model) == 8
    monkeypatch.setenv(REFUSE, "_seal_tiles_,cached_attention")
    with pytest.warns(UserWarning, match="MOE_MPS_REFUSE names cached_attention; .* stay in 16 bits"):
        torch_moe_mps.accelerate(model, kv_bits="k4v2")
    assert kv_bits_of(model) == 16
