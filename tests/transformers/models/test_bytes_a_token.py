"""How many bytes of the context a token reads: counted in the simulator."""

import pytest
import torch
from support import tiny_models
from support.launches import FREE, prompted
from support.sweep import in_sweep, rows_in_sweep
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.models.caches.state import parts
from torch_moe_mps.models.capture import replay
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_argument

# Contexts of two lengths -------------------------------------------------------------------------------

LATENT = [
    "deepseek_v3",
    "kimi_linear",
    "deepseek_v2",
    "glm4_moe_lite",
    "mistral4",
    "axk1",
    "bailing_hybrid",
    "youtu",
    "minicpm3",
]


class MovedByAten(TorchDispatchMode):
    """Bytes that operators of aten read and write; views move nothing."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and not function.is_view and name not in FREE:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.total += sum(tensor.nbytes for tensor in tensors)
        return out


def behind(simulated, model, context: int) -> DynamicCache:
    """A cache of so many tokens; nobody asks for its values."""
    prompted(model, [1])  # computes the constants that are kept for later models
    with simulated.dropped():
        return prompted(model, [1 + i % 90 for i in range(context)])


def moved_and_held(simulated, model, context: int, names: tuple[str, ...]) -> tuple[int, int]:
    """Bytes that a token moves behind so many, and those of what its cache has by these names, as a.b.

    A dispatch of ours reads each byte once here: values are columns of latents, which were just read as keys.
    """
    cache = behind(simulated, model, context)
    states = [_named(layer, name) for layer in cache.layers for name in names]
    held = sum(part.nbytes for each in states if each is not None for part in parts(each))
    token = torch.tensor([[5]], device="mps")
    with torch.no_grad(), simulated.counters() as dispatches, MovedByAten() as moved:
        model(token, **cache_argument(model, cache), use_cache=True)
    return moved.total + moved_by(dispatches), held


def moved_by(dispatches) -> int:
    """Bytes that dispatches read, each once, and write."""
    total = 0
    for dispatch in dispatches:
        *buffers, _parameters = (traffic for _, traffic in sorted(dispatch.buffers.items()))
        total += sum(buffer.distinct_bytes_read + buffer.bytes_written for buffer in buffers)
    return total


def _named(layer, name: str) -> Tensor | None:
    name, _, key = name.partition(".")
    found = getattr(layer, name, None)
    return found[key] if key else found


def slope(simulated, model, *names: str) -> float:
    """Bytes moved for one held; windows of 2, 3, 4 or 8 tokens are as full behind both contexts."""
    names = names or ("keys", "values")
    contexts = (moved_and_held(simulated, model, context, names) for context in (60, 132))
    (few, held), (many, held_more) = contexts
    return (many - few) / (held_more - held)


@pytest.mark.parametrize("name", in_sweep(LATENT, ["deepseek_v3"]))
def test_a_longer_context_costs_a_token_its_bytes(simulated, name):
    """Latents are read once by a token, whose own code expands all of them."""
    model = tiny_models.tiny_model(name, torch.bfloat16).to("mps")
    assert slope(simulated, model) > 8
    torch_moe_mps.accelerate(model)
    assert slope(simulated, model) <= 1.3


INDEXED = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4", "dots3_note", "axk2"]


# With the fewest heads of their indexers, too, which give many entries equal scores.
FEW_HEADS = [(name, 4) for name in ("deepseek_v32", "axk2", "hy_v4")]


@pytest.mark.parametrize(
    ("name", "heads"), rows_in_sweep([*((name, 16) for name in INDEXED), *FEW_HEADS], FEW_HEADS[:1])
)
def test_a_longer_context_costs_a_token_its_indexers_keys(simulated, name, heads):
    """Of everything else it reads what they select."""
    with tiny_models.sizes(index_head_dim=128, index_n_heads=heads):
        model = tiny_models.tiny_model(name, torch.bfloat16).to("mps")
    for module in model.modules():
        if isinstance(getattr(module, "index_topk", None), int):
            module.index_topk = 32
    torch_moe_mps.accelerate(model)
    assert 1.0 <= slope(simulated, model, "indexer_keys") <= 1.3


# Layers that choose blocks of keys, and what their caches have to choose by.
BLOCKS = {
    "minimax_m3_vl": ("minimax_m3_sparse", "idx_keys", {"index_block_size": 8, "index_topk_blocks": 2}),
    "glm5_next": ("indexed_attention", "pools", {"index_kpool": 4, "index_topk": 16}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", BLOCKS)
def test_a_longer_context_costs_a_token_the_keys_of_blocks(simulated, name, monkeypatch):
    layer, held, sizes = BLOCKS[name]
    text = f"{name}_text"
    extra = sizes | {"layer_types": [layer] * 2, "index_head_dim": 128}
    monkeypatch.setitem(tiny_models.EXTRA, text, tiny_models.EXTRA[text] | extra)
    model = tiny_models.tiny_model(name, torch.bfloat16).to("mps")
    torch_moe_mps.accelerate(model)
    assert 1.0 <= slope(simulated, model, held) <= 1.3


# Layers of DeepSeek-V4, and what of its cache a token reads whole: compressed keys, or those of indexers.
COMPRESSED = {"heavily_compressed_attention": "compressor", "compressed_sparse_attention": "indexer"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "layer",
    [pytest.param("heavily_compressed_attention", marks=pytest.mark.sweep), "compressed_sparse_attention"],
)
def test_a_longer_context_costs_a_token_its_compressed_keys(simulated, layer, monkeypatch):
    extra = {"layer_types": [layer] * 2, "index_head_dim": 128}
    monkeypatch.setitem(tiny_models.EXTRA, "deepseek_v4", tiny_models.EXTRA["deepseek_v4"] | extra)
    with tiny_models.sizes(head_dim=64):
        model = tiny_models.tiny_model("deepseek_v4", torch.bfloat16).to("mps")
    held = f"compressed_kv.{COMPRESSED[layer]}"
    assert slope(simulated, model, held) > 3
    torch_moe_mps.accelerate(model)
    assert 1.0 <= slope(simulated, model, held) <= 1.3


def captured_bytes(simulated, model, context: int, monkeypatch) -> tuple[int, int]:
    """Bytes that a captured token moves behind so many, and those of the pools' keys that its cache has."""
    cache, captures = behind(simulated, model, context), captures_of(model)
    token = torch.tensor([[5]], device="mps")
    with simulated.dropped():
        for _ in range(8):  # those that complete a pool have a program of their own
            model(token, **cache_argument(model, cache), use_cache=True)
    captures.reason = "the program does not fit the next token"
    held = sum(layer.pools.nbytes for layer in cache.layers)
    with monkeypatch.context() as patch, simulated.counters() as dispatches, MovedByAten() as moved:
        patch.setattr(replay, "forbidden", lambda: None)  # the mode only counts
        model(token, **cache_argument(model, cache), use_cache=True)
    assert captures.reason is None
    return moved.total + moved_by(dispatches), held


@pytest.mark.sweep
def test_a_longer_context_costs_a_captured_token_the_keys_of_pools(simulated, monkeypatch):
    text = "qwen4_exp_text"
    sizes = {"indexer_head_dim": 128, "indexer_compress_ratio": 4, "indexer_budget": 16}
    extra = sizes | {"layer_types": ["indexed_attention"] * 2}
    monkeypatch.setitem(tiny_models.EXTRA, text, tiny_models.EXTRA[text] | extra)
    monkeypatch.setenv("MOE_MPS_CAPTURE", "1")
    model = tiny_models.tiny_model("qwen4_exp", torch.bfloat16).to("mps")
    torch_moe_mps.accelerate(model)
    with torch.no_grad():
        few, held = captured_bytes(simulated, model, 60, monkeypatch)
        many, held_more = captured_bytes(simulated, model, 140, monkeypatch)
    copied = 2 * 3 * 8 * (140 - 60)  # the model's positions of tokens, once for all layers
    assert 1.0 <= (many - few - copied) / (held_more - held) <= 1.1


# Heads of whole groups.
WIDE = {
    "qwen3_moe": {"head_dim": 32},
    "deepseek_v3": {"head_dim": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
}


@pytest.mark.parametrize("name", WIDE)
def test_a_longer_context_in_8_bits_costs_a_token_its_bytes(simulated, name):
    model = tiny_models.tiny_model(name, torch.bfloat16, **WIDE[name]).to("mps")
    torch_moe_mps.accelerate(model, kv_bits=8)
    assert 1.0 <= slope(simulated, model) <= 1.3
