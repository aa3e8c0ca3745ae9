"""Caches that are cut, written and read: the model computes from them what it computes anew, bit for bit."""

import json
import random
from types import NoneType
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from support import tiny_models
from transformers import DynamicCache, StaticCache

import torch_moe_mps
from torch_moe_mps.transformers.caches.prompt_cache import (
    can_be_cut,
    fingerprint,
    kept_states,
    load_with_states,
    new_cache,
    prefix,
)
from torch_moe_mps.transformers.upstream.calls import cache_argument

# {kind of cache: architecture, its sizes, kv_bits, whether it can be cut anywhere}
KINDS = {
    "growing": ("qwen3_moe", {}, None, True),
    "8 bits": ("qwen3_moe", {"head_dim": 32}, 8, True),
    "windows": ("gpt_oss", {"sliding_window": 24}, None, False),
    "windows, 8 bits": ("gpt_oss", {"sliding_window": 24, "head_dim": 32}, 8, False),
    "latents": ("deepseek_v3", {}, None, True),
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
    """A cache that went on is cut to 32 and to 46 tokens; it is written, and read whole and cut."""
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
    torch_moe_mps.save_prompt_cache(tmp_path / "x", model, IDS[:, :end], cache, states)
    ids, read_cache, read_states = load_with_states(tmp_path / "x", model)
    assert torch.equal(ids, IDS[:, :end]) and read_states.keys() == states.keys()
    for tokens, pieces in ((32, PIECES[:2]), (46, PIECES), (end, (*PIECES, *LATER))):
        fresh = new_cache(model)
        read(model, fresh, pieces)
        expected = read(model, fresh, (2, 1), tokens)
        for whole, kept in ((cache, states), (read_cache, read_states)):
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


def test_a_file_is_for_one_model(tmp_path):
    """Of other weights, bits, a later version, or damaged; nothing but a cache of its length is written."""
    model, file = model_of("growing"), tmp_path / "x.safetensors"
    cache = new_cache(model)
    read(model, cache, (8,))
    torch_moe_mps.save_prompt_cache(file, model, IDS[0, :8], cache)
    ids, loaded = torch_moe_mps.load_prompt_cache(file, model)
    more = torch.cat((ids, IDS[:, 8:12]), 1)
    given = {"attention_mask": torch.ones_like(more), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(
        model.generate(more, **cache_argument(model, loaded), **given), model.generate(more, **given)
    )
    assert fingerprint(model) == fingerprint(model_of("growing"))

    def message() -> str:
        with pytest.raises(ValueError) as raised:
            torch_moe_mps.load_prompt_cache(file, model)
        return str(raised.value)

    with torch.no_grad():
        weight = model.model.layers[1].self_attn.q_proj.weight
        kept, weight[0, 0] = weight[0, 0].clone(), 5.0
        assert message() == f"{file} is for another model, or for other weights of this one"
        weight[0, 0] = kept
    torch_moe_mps.accelerate(model, kv_bits=8)
    assert message() == f"{file} must be for kv_bits 8, got None"
    model = model_of("growing")
    with safe_open(file, "pt") as stored:
        key = json.loads(stored.metadata()["key"])
    content = file.read_bytes()
    version = key["torch_moe_mps"].encode()
    file.write_bytes(content.replace(b'torch_moe_mps\\": \\"' + version, b'torch_moe_mps\\": \\"9.9.9'))
    assert message() == f"{file} must be for torch_moe_mps {torch_moe_mps.__version__}, got 9.9.9"
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert message() == f"{file} is damaged: its checksum is another"
    for broken in (content[:-9], content[:30], b"", b"notes"):
        file.write_bytes(broken)
        assert message().startswith(f"{file} is damaged or not a prompt cache: ")
    with pytest.raises(ValueError, match=r"x\.safetensors is not a prompt cache; it was not changed"):
        torch_moe_mps.save_prompt_cache(file, model, IDS[:, :8], cache)
    assert file.read_bytes() == b"notes"
    with pytest.raises(FileNotFoundError, match="nowhere is no file"):
        torch_moe_mps.load_prompt_cache(tmp_path / "nowhere", model)
    for wrong in (DynamicCache(), StaticCache(model.config, max_cache_len=8)):
        with pytest.raises(
            ValueError, match=f"cache must be a DynamicCache of 8, got a {type(wrong).__name__}"
        ):
            torch_moe_mps.save_prompt_cache(tmp_path / "y", model, IDS[:, :8], wrong)
    uncounted = DynamicCache(config=tiny_models.tiny_config("mamba2"))
    with pytest.raises(ValueError, match=r"cache must have keys, .* got recurrent states alone"):
        torch_moe_mps.save_prompt_cache(tmp_path / "y", model, IDS[:, :8], uncounted)


def _same(one, other) -> bool:
    """Whether two caches have the same bits."""
    if isinstance(one, torch.Tensor):
        octets = [value.contiguous().view(-1).view(torch.uint8) for value in (one, other)]
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*octets)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other if isinstance(one, NoneType | bool | int | float | str) else str(one) == str(other)


def test_no_single_bit_of_a_file_changes_what_is_read(tmp_path):
    """A flipped bit of the header or of the tensors is an error of one line, or changes nothing."""
    model, file = model_of("recurrent"), tmp_path / "x.safetensors"
    cache = new_cache(model)
    read(model, cache, (8,))
    torch_moe_mps.save_prompt_cache(file, model, IDS[:, :8], cache, {8: kept_states(cache)})

    def content(loaded) -> list:
        ids, whole, states = loaded
        return [ids, [vars(layer) for layer in whole.layers], states]

    expected, whole = content(load_with_states(file, model)), file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw, refused = random.Random(0), 0
    places = [draw.randrange(8 * header) for _ in range(1500)]
    places += [draw.randrange(8 * header, 8 * len(whole)) for _ in range(200)]
    with mock.patch(
        "torch_moe_mps.transformers.caches.prompt_cache.fingerprint", return_value=fingerprint(model)
    ):
        for place in places:
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            file.write_bytes(damaged)
            try:
                loaded = load_with_states(file, model)
            except ValueError as error:
                assert str(error).startswith(str(file)) and "\n" not in str(error)
                refused += 1
            else:
                assert _same(content(loaded), expected), place
    assert refused > 0.95 * len(places)
