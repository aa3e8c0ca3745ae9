"""Caches in `fit`: their bytes against arithmetic and against caches of models that run."""

import bisect
import json
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models
from support.fit import PROMPT, QWEN3, context, table
from support.models import eager
from support.sweep import covering, in_sweep

import torch_moe_mps
from torch_moe_mps import macs
from torch_moe_mps.commands import fit, main
from torch_moe_mps.models.caches.batched import BatchedCache
from torch_moe_mps.models.caches.prompt_cache import new_cache
from torch_moe_mps.models.caches.state import parts
from torch_moe_mps.models.kv_sizes import KVCache
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument
from torch_moe_mps.transformers.deferrable import deferrable_layers


def test_a_cache_in_8_bits(tmp_path, capsys):
    """Against arithmetic: a head of 128 is 128 codes, a scale and a bias."""
    longest = 1 << 21
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"max_position_embeddings": longest}))
    token = 6 * 2 * 4 * (128 + 2 * 2)
    outputs = []
    for bits in (16, 8):
        assert main(["fit", str(tmp_path), "--kv-bits", str(bits), "--context", "32768"]) == 0
        outputs.append(capsys.readouterr().out)
    dense, output = outputs
    assert f"KV cache in 8 bits: {token / 1e6:.3f} GB for each 1,000 tokens" in output
    assert table(output, "weights") == table(dense, "weights")
    two = fit.sizes_of(fit.Source(str(tmp_path), {"dtype": "bfloat16"}).skeleton(), 64)[-1]
    fits = context(macs.wired_limit(16) - PROMPT - two.weights, token)
    assert table(output, "Mac")["16 GB"][7] == f"{fits:,}" and 500_000 < fits < longest
    bounds = table(output, "chip")["M4 Max (40 cores), 546 GB/s"]
    assert bounds[6] == f"{546e9 / (two.token + 32768 * token):.0f}"


def tile(width: int, bits: int, factors: bool) -> int:
    """Bytes of 128 tokens: the codes, 16 bits twice for each channel, and a factor for each token."""
    return 128 * width * bits // 8 + 2 * (2 * width + 128 * factors)


def context_in_tiles(space: int, token: int, tile: int) -> int:
    """The most tokens that fit: as they are at most three tiles, with room for two more, and the full tiles,
    with room for a sixteenth more of them, or for two.
    """

    def memory(tokens: int) -> int:
        full = tokens // 128
        dense = 256 if tokens <= 256 else min(tokens, 384) + 256
        return dense * token + (full + max(2, full // 16)) * tile

    return bisect.bisect_right(range(1, 1 << 22), space, key=memory)


@pytest.mark.parametrize(
    ("bits", "named"), [(4, "in 4 bits"), ("k4v2", "with keys in 4 bits and values in 2")]
)
def test_a_cache_in_tiles(bits, named, tmp_path, capsys):
    """Against arithmetic; all four formats have a column."""
    longest = 1 << 22
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"max_position_embeddings": longest}))
    heads = 6 * 4
    tiles = {16: 0, 8: 0, 4: heads * (tile(128, 4, False) + tile(128, 4, True))}
    tiles["k4v2"] = heads * (tile(128, 4, False) + tile(128, 2, True))
    tokens = {16: heads * 2 * 128 * 2, 8: heads * 2 * (128 + 2 * 2), 4: tiles[4] // 128}
    tokens["k4v2"] = tiles["k4v2"] // 128
    file = tmp_path / "x.json"
    command = ["fit", tmp_path, "--kv-bits", bits, "--context", 32768, "--json", file]
    assert main([*map(str, command)]) == 0
    output, data = capsys.readouterr().out, json.loads(file.read_text())
    assert f"KV cache {named}: {tokens[bits] / 1e6:.3f} GB for each 1,000 tokens" in output
    rest = 2 * 128 * (tokens[16] - tokens[bits])
    assert f"states and tokens in 16 bits take at most {rest / 1e9:.3f} GB" in output
    two = fit.sizes_of(fit.Source(str(tmp_path), {"dtype": "bfloat16"}).skeleton(), 64)[-1]
    space = macs.wired_limit(16) - PROMPT - two.weights
    fits = {dense: context(space, tokens[dense]) for dense in (16, 8)}
    fits |= {tiled: context_in_tiles(space, tokens[16], tiles[tiled]) for tiled in (4, "k4v2")}
    assert 1_000_000 < fits[4] < fits["k4v2"] < longest
    assert table(output, "Mac")["16 GB"][7] == f"{fits[bits]:,}"
    shown = table(output, "--kv-bits")
    assert shown["GB for each 1,000 tokens"][-4:] == [f"{tokens[key] / 1e6:.3f}" for key in fits]
    for mac in data["macs"]:
        by_bits = mac["contexts_by_kv_bits"]
        assert by_bits.keys() == {"16", "8", "4", "k4v2"} and by_bits[str(bits)] == mac["contexts"]
    assert {key: by["2 bit"] for key, by in data["macs"][0]["contexts_by_kv_bits"].items()} == {
        str(key): value for key, value in fits.items()
    }
    dense = 256 * tokens[16] + (32768 - 256) * tokens[bits]
    bounds = table(output, "chip")["M4 Max (40 cores), 546 GB/s"]
    assert bounds[6] == f"{546e9 / (two.token + dense):.0f}"


def read_in_tiles(tokens: int) -> tuple[int, int]:
    """Of the tokens that the last one reads, those in 16 bits, and those in tiles, counted one by one."""
    last = (tokens - 1) // 128
    dense = sum(token // 128 in (0, last) for token in range(tokens))
    return dense, tokens - dense


SHORT = {"vocab_size": 64, "num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8}
# Two layers of published models: {architecture: sizes, bytes of a token in 16 bits, bytes of a tile with 4
# bits and with k4v2, bytes of a token in the other layers with 8 bits, and their window}.
PUBLISHED = {
    "qwen3_moe": (  # Qwen3-30B-A3B
        {"num_hidden_layers": 2, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128},
        2 * 4 * 2 * 128 * 2,
        2 * 4 * (tile(128, 4, False) + tile(128, 4, True)),
        2 * 4 * (tile(128, 4, False) + tile(128, 2, True)),
        0,
        None,
    ),
    "gpt_oss": (  # gpt-oss-20b: every other layer has a window of 128 tokens
        {"num_hidden_layers": 2, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 64, "sliding_window": 128},
        8 * 2 * 64 * 2,
        8 * (tile(64, 4, False) + tile(64, 4, True)),
        8 * (tile(64, 4, False) + tile(64, 2, True)),
        8 * 2 * (64 + 2 * 2),
        128,
    ),
    "deepseek_v3": (  # DeepSeek-V3: latents of 512 and 64 columns that turn lie in one tile
        {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64},
        2 * 576 * 2,
        2 * tile(576, 4, False),
        2 * tile(576, 4, False),
        0,
        None,
    ),
    "glm4_moe_lite": (  # GLM-4.7-Flash
        {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        2 * 576 * 2,
        2 * tile(576, 4, False),
        2 * tile(576, 4, False),
        0,
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_the_bytes_of_tiles_are_those_of_published_shapes(architecture):
    """On both sides of the bounds of tiles; layers with a window hold 8 bits."""
    sizes, dense, four, mixed, rest, window = PUBLISHED[architecture]
    config = tiny_models.tiny_config(architecture, **{**SHORT, **sizes})
    with torch.device("meta"):
        model = tiny_models.model_class(architecture)(config).to(torch.bfloat16)
        found = KVCache.by_bits(model)
    assert found.keys() == {4, "k4v2", 8, 16} and found[16].token == dense
    for bits, nbytes in ((4, four), ("k4v2", mixed)):
        assert found[bits].token * 128 == nbytes
        for tokens in (1, 127, 128, 129, 255, 256, 257, 384, 385, 513, 40_960):
            as_they_are, in_tiles = read_in_tiles(tokens)
            expected = as_they_are * dense + in_tiles * nbytes // 128
            expected += min(tokens, window or 0) * rest
            assert found[bits].at(tokens) == expected, (bits, tokens)
    shares = {"qwen3_moe": (0.2695, 0.207), "gpt_oss": (0.273, 0.211), "deepseek_v3": (0.2656, 0.2656)}
    for bits, share in zip((4, "k4v2"), shares.get(architecture, ()), strict=False):
        assert found[bits].token / dense == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(
    ("architecture", "sizes", "same_as"),
    [("qwen3_moe", {"head_dim": 48}, 16), ("deepseek_v32", {"kv_lora_rank": 64, "qk_rope_head_dim": 32}, 8)],
)
def test_layers_that_tiles_cannot_hold(architecture, sizes, same_as):
    """Heads whose width is no multiple of 32 stay in 16 bits, layers with an indexer in 8."""
    with torch.device("meta"):
        model = tiny_models.model_class(architecture)(tiny_models.tiny_config(architecture, **sizes))
        found = KVCache.by_bits(model)
    for bits in (4, "k4v2"):
        assert vars(found[bits]) == vars(found[same_as])
    assert (found[8].token < found[16].token) is (same_as == 8)


# {architecture: sizes of a model whose caches have tiles}: latents lie in one, and a layer has a window.
TILED = {
    "qwen3_moe": {"head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 32},
    "gpt_oss": {"head_dim": 64, "sliding_window": 16},
}
CALLS = ([1], [127], [128], [129], [256], [257, 1], [383], [383, 1, 1], [520, *[1] * 4], [128] * 7, [700])


def read_of(layer: Any, tokens: int) -> int:
    """Bytes of a layer of a cache that its last token reads."""
    states = [layer.keys, layer.values]
    if not hasattr(layer, "key_tiles"):
        return min(tokens, 16) * sum(part.nbytes for part in states) // states[0].shape[2]
    dense, in_tiles = read_in_tiles(tokens)
    tiles = [part for part in (layer.key_tiles, layer.value_tiles) if part is not None and part.shape[2] > 0]
    assert not in_tiles or all(part.shape[2] >= (tokens - 1) // 128 for part in tiles)
    of_tiles = sum(part[:, :, :1].nbytes for part in tiles)
    return dense * sum(part[:, :, :1].nbytes for part in states) + in_tiles // 128 * of_tiles


def allocated(layer: Any) -> int:
    """Bytes of the memory that a layer of a cache has."""
    states = [getattr(layer, name, None) for name in ("keys", "values", "key_tiles", "value_tiles")]
    storages = [part.untyped_storage() for state in states if state is not None for part in parts(state)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.slow("models read many tokens")
@pytest.mark.filterwarnings("ignore:torch_moe_mps. kv_bits=.* is for layers that hold")
@pytest.mark.parametrize(("architecture", "bits"), covering(TILED, (4, "k4v2")))
def test_the_bytes_of_a_cache_in_tiles_are_those_of_a_run(architecture, bits):
    """On both sides of the bounds of tiles, in one call and in several; the window is set to 16."""
    config = tiny_models.tiny_config(architecture, **TILED[architecture])
    with torch.device("meta"):
        found = KVCache.of_model(tiny_models.model_class(architecture)(config), bits)
    model = tiny_models.tiny_model(architecture, **TILED[architecture])
    torch_moe_mps.accelerate(model, kv_bits=bits)
    for calls in CALLS:
        cache, tokens = transformers.DynamicCache(config=model.config), sum(calls)
        for count in calls:
            with torch.no_grad():
                model(torch.ones(1, count, dtype=torch.long), **cache_argument(model, cache))
        assert any(hasattr(layer, "key_tiles") for layer in cache.layers)
        assert found.at(tokens) == sum(read_of(layer, tokens) for layer in cache.layers)
        memory = sum(map(allocated, cache.layers))
        assert memory <= found.memory(tokens) <= 1.3 * memory
        if calls in ([1], [129], [383]) and architecture != "gpt_oss":
            assert memory == found.memory(tokens)


@pytest.mark.parametrize(("architecture", "bits"), covering(("qwen3_moe", "gpt_oss"), (16, 8)))
def test_the_memory_of_a_cache_is_at_most_what_fit_says(architecture, bits):
    """Of the caches of accelerated models after prompts and tokens; the window of gpt-oss is set to 16."""
    options = {"head_dim": 64, "sliding_window": 16}
    with torch.device("meta"):
        config = tiny_models.tiny_config(architecture, **options)
        found = KVCache.of_model(tiny_models.model_class(architecture)(config), bits)
    model = tiny_models.tiny_model(architecture, **options)
    torch_moe_mps.accelerate(model, kv_bits=bits)
    for calls in ([3], [700, 1], [400, 300, *[1] * 70]):
        cache = transformers.DynamicCache(config=model.config)
        for tokens in calls:
            with torch.no_grad():
                model(torch.ones(1, tokens, dtype=torch.long), **cache_argument(model, cache))
        states = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        held = sum(part.untyped_storage().nbytes() for tensor in states for part in parts(tensor))
        read = sum(calls)
        assert found.at(read) <= held <= found.memory(read) <= 1.5 * held
        if len(calls) == 1:  # memory that is made for just so many tokens has room for none more
            assert [found.tokens_in(space, 4096) for space in (held, held - 1)] == [read, read - 1]


OF_A_RUN = (
    "qwen3_moe",
    "gemma4",
    "small gemma4",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "glm5_next",
    "qwen4_exp",
    "llama4",
    "longcat_flash",
    "step3p7",
)


@pytest.mark.parametrize(
    "architecture",
    in_sweep(
        OF_A_RUN, ("small gemma4", "deepseek_v3", "qwen3_next", "qwen4_exp", "longcat_flash", "step3p7")
    ),
)
def test_the_cache_on_the_meta_device_is_that_of_a_run(architecture):
    """At 1, 5 and 40 tokens; gemma4's sliding window is set to 16."""
    overrides = tiny_models.SMALL_GEMMA4 if architecture == "small gemma4" else {}
    architecture = architecture.removeprefix("small ")
    config = tiny_models.tiny_config(architecture, **overrides)
    text = config.get_text_config()
    if getattr(text, "sliding_window", None):
        text.sliding_window = 16
    with torch.device("meta"):
        found = KVCache.of_model(tiny_models.model_class(architecture)(config))
    model = tiny_models.model_class(architecture)(config).eval()
    for tokens in (1, 5, 40):
        with torch.no_grad():
            cache = cache_among(model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=True))
        nbytes = 0
        for layer in cache.layers:
            for value in vars(layer).values():
                parts = value.values() if isinstance(value, dict) else [value]
                tensors = [t for t in parts if isinstance(t, torch.Tensor) and t.is_floating_point()]
                nbytes += sum(t.nbytes for t in tensors)
        window = 16 if tokens > 16 and getattr(text, "sliding_window", None) else 0
        # transformers keeps one token less than the window, which it adds in the next step.
        assert nbytes <= found.at(tokens) <= nbytes + (window > 0) * nbytes / (window - 1)


LAGGING = ("qwen3_next", "kimi_linear", "granitemoehybrid", "lfm2_moe", "zamba2")


@pytest.mark.parametrize("architecture", in_sweep(LAGGING, ("kimi_linear", "lfm2_moe")))
def test_the_memory_beside_states_has_room_for_drafts(architecture):
    """For what is pending in a row of a model, of whose kind of states fit does not know."""
    config = tiny_models.tiny_config(architecture)
    with torch.device("meta"):
        found = KVCache.of_model(tiny_models.model_class(architecture)(config))
    model = eager(tiny_models.tiny_model(architecture))
    torch_moe_mps.accelerate(model)
    rows, cache = BatchedCache(model, deferrable_layers(model)), new_cache(model)
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.long), **cache_argument(model, cache))
        rows.admit(cache, 5)
    pending = [layer.uncommitted for layer in rows.cache.layers if hasattr(layer, "uncommitted")]
    held = sum(p.nbytes for each in pending for p in each.values() if p.is_floating_point())
    assert 0 < held <= found.beside <= 1.7 * held
    assert found.memory(5) - found.beside >= found.at(5)


def test_mtp_layers_have_a_cache_as_the_last_layer():
    """A model with two layers more has the same."""

    def of(layers: int, more: int):
        with torch.device("meta"):
            model = tiny_models.tiny_model("glm4_moe", num_hidden_layers=layers)
        return KVCache.of_model(model, more=more).rates

    assert of(2, 2) == of(4, 0) != of(2, 0)
