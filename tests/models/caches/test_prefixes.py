"""Caches that are cut, written and read: the model computes from them what it computes anew, bit for bit."""

import random

import pytest
import torch
from support import tiny_models

import torch_moe_mps
from torch_moe_mps.models.caches.parts import CachePart, classes_of
from torch_moe_mps.models.caches.prefix_state import PrefixState
from torch_moe_mps.models.caches.prompt_cache import can_be_cut, kept_states, key_of, new_cache, prefix
from torch_moe_mps.models.upstream.calls import cache_argument

# {kind of cache: architecture, its sizes, kv_bits, whether it can be cut anywhere}
KINDS = {
    "growing": ("qwen3_moe", {}, None, True),
    "8 bits": ("qwen3_moe", {"head_dim": 32}, 8, True),
    "windows": ("gpt_oss", {"sliding_window": 24}, None, False),
    "windows, 8 bits": ("gpt_oss", {"sliding_window": 24, "head_dim": 32}, 8, False),
    "latents": ("deepseek_v3", {}, None, True),
    "latents, two a layer": ("longcat_flash", {}, None, True),
    "in chunks": ("llama4", {"attention_chunk_size": 24}, None, False),
    "latents, 8 bits": ("deepseek_v3", {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32}, 8, True),
    "indexed": ("glm_moe_dsa", {}, None, True),
    "shared": ("gemma4", {"sliding_window": 24}, None, False),
    "recurrent": ("qwen3_next", {}, None, False),
    "convolutions": ("lfm2_moe", {}, None, False),
    "state space": ("granitemoehybrid", {}, None, False),
}
PIECES, LATER = (16, 16, 14), (3, *[1] * 8)
IDS = torch.randint(2, 26, (1, 80), generator=torch.Generator().manual_seed(0))


def model_of(kind: str):
    architecture, sizes, bits, _ = KINDS[kind]
    model = tiny_models.tiny_model(architecture, **sizes)
    torch_moe_mps.accelerate(model, kv_bits=bits)
    return model


@torch.no_grad()
def read(model, cache, pieces, start: int = 0) -> torch.Tensor:
    """The logits of the last piece."""
    for size in pieces:
        ids = IDS[:, start : start + size]
        logits = model(input_ids=ids, **cache_argument(model, cache), use_cache=True).logits
        start += size
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_and_files(kind, tmp_path):
    """A cache that went on is cut to 32 and to 46 tokens; written in two parts, it is read whole and cut."""
    model = model_of(kind)
    cache, states, start = new_cache(model), {}, 0
    for index, size in enumerate(PIECES):
        read(model, cache, (size,), start)
        start += size
        if index and (kept := kept_states(cache)):
            states[start] = kept
    read(model, cache, LATER, start)
    end = start + sum(LATER)
    assert all(map(can_be_cut, cache.layers)) == KINDS[kind][3] == (not states)
    joined = PrefixState(new_cache(model), {}).joining(end)
    state = PrefixState(cache, {})
    state.mark(end)
    for first, last in ((0, 40), (40, end)):
        (tmp_path / "x").write_bytes(state.end(first, last).begun_copy().to_bytes("x"))
        joined.add(CachePart.read(tmp_path / "x", "x"), last)
    read_cache = joined.cache
    for tokens, pieces in ((32, PIECES[:2]), (46, PIECES), (end, (*PIECES, *LATER))):
        fresh = new_cache(model)
        read(model, fresh, pieces)
        expected = read(model, fresh, (2, 1), tokens)
        for whole, kept in ((cache, dict(states)), (read_cache, dict(states))):
            kept |= {end: kept_states(whole)}
            for _ in range(2 if tokens in states else 1):  # who goes on leaves the states as they are
                cut = prefix(whole, tokens, kept)
                assert cut.get_seq_length() == tokens
                assert torch.equal(read(model, cut, (2, 1), tokens), expected)
    assert torch.equal(read(model, cache, (2,), end), read(model, read_cache, (2,), end))


@pytest.mark.parametrize("kind", ["windows", "windows, 8 bits"])
def test_a_window_can_be_cut_until_it_is_full(kind):
    """A layer that says so has what any prefix needs."""
    model, cut = model_of(kind), []
    for count in (22, 23, 24, 25):
        cache, fresh = new_cache(model), new_cache(model)
        read(model, cache, (20, count - 20))
        cut.append(all(map(can_be_cut, cache.layers)))
        if cut[-1]:
            read(model, fresh, (20,))
            expected = read(model, fresh, (2, 4), 20)
            assert torch.equal(read(model, prefix(cache, 20, {}), (2, 4), 20), expected)
    assert cut == [True, True, False, False]


def test_a_key_is_for_one_model(monkeypatch):
    """Of these weights, bits and versions."""
    model = model_of("growing")
    key = key_of(model)
    assert key == key_of(model_of("growing"))
    with torch.no_grad():
        weight = model.model.layers[1].self_attn.q_proj.weight
        kept, weight[0, 0] = weight[0, 0].clone(), 5.0
        assert key_of(model)["model"] != key["model"]
        weight[0, 0] = kept
    torch_moe_mps.accelerate(model, kv_bits=8)
    monkeypatch.setattr(torch_moe_mps, "__version__", "9.9.9")
    assert key_of(model) == {**key, "kv_bits": 8, "torch_moe_mps": "9.9.9"}


def _same(one, other) -> bool:
    """Whether two parts have the same bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one == other


def test_no_single_bit_of_a_file_changes_what_is_read(tmp_path):
    """A flipped bit of the header or of the tensors is an error, or changes nothing."""
    model, file = model_of("recurrent"), tmp_path / "x"
    cache = new_cache(model)
    read(model, cache, (8,))
    whole = CachePart(kept_states(cache), classes_of(cache)).to_bytes("x 8")
    file.write_bytes(whole)
    expected, classes = CachePart.read(file, "x 8")
    header = 8 + int.from_bytes(whole[:8], "little")
    draw, refused = random.Random(0), 0
    places = [draw.randrange(8 * header) for _ in range(200)]
    places += [draw.randrange(8 * header, 8 * len(whole)) for _ in range(40)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            part, found = CachePart.read(file, "x 8")
        except Exception:
            refused += 1
        else:
            assert _same(part, expected) and found == classes, place
    assert refused > 0.95 * len(places)
    file.write_bytes(whole)
    with pytest.raises(ValueError, match="its header must be x 7, got x 8"):
        CachePart.read(file, "x 7")
