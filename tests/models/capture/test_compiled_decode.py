"""One token with a static cache, compiled as a whole."""

import pytest
import torch
from support import tiny_models
from torch._dynamo.backends.debugging import aot_eager
from transformers import CompileConfig, DynamicCache, StaticCache

import torch_moe_mps
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.models.upstream.calls import cache_argument

EVERY = ["gpt_oss", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gemma4", "qwen3_next"]


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Several tests compile the same code, and torch limits the number of versions per process."""
    torch._dynamo.reset()


def after_a_prompt(model) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(torch.arange(4, device=model.device)[None], **cache_argument(model, cache))
    return cache


def check_decode_step(architecture: str, device: str) -> None:
    """Compiled without a graph break, quantised: the logits of the step that is not compiled."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model(architecture).to(device)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    token = torch.tensor([[5]], device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(token, **cache_argument(model, after_a_prompt(model))).logits
        result = compiled(token, **cache_argument(model, after_a_prompt(model))).logits
    torch.testing.assert_close(result.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", EVERY)
def test_decode_step_compiles(architecture):
    check_decode_step(architecture, "cpu")


def model_in_8_bits():
    model = tiny_models.tiny_model("qwen3_moe", head_dim=32)
    torch_moe_mps.accelerate(model, kv_bits=8)
    return model


@torch.no_grad()
def test_a_graph_with_16_bits_in_place_of_8_is_refused():
    whole = torch.compile(model_in_8_bits(), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"kv_bits=8 needs a DynamicCache, .* got a compiled call"):
        whole(torch.tensor([[5]]), **cache_argument(whole, DynamicCache()))


@pytest.mark.sweep
@torch.no_grad()
def test_a_dynamic_cache_in_8_bits_is_compiled_in_part():
    model, results = model_in_8_bits(), []
    for call in (model, torch.compile(model, backend="aot_eager")):
        cache = DynamicCache(config=model.config)
        results += [call(torch.tensor([[5]]), **cache_argument(call, cache)).logits for _ in range(2)][1:]
        assert type(cache.layers[0].keys) is QuantizedStates
    torch.testing.assert_close(*results)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", EVERY)
def test_decode_step_compiles_on_mps(simulated, architecture):
    check_decode_step(architecture, "mps")


@pytest.mark.sweep
def test_generate_compiles_its_decode_step():
    """As docs/compile.md calls it: the tokens of an uncompiled run, from one graph."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe")
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    config = CompileConfig(fullgraph=True, mode=None, backend=backend, dynamic=False)
    config._compile_all_devices = True
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.arange(4)[None]
    expected = model.generate(ids, **options)
    result = model.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert result.tolist() == expected.tolist()
    assert len(graphs) == 1
