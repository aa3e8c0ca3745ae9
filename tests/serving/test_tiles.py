"""Sequences whose caches hold tiles of 4 and 2 bits: beside others, with drafts, behind cached prefixes."""

import random
import shutil

import pytest
import torch
from support import jobs
from support.jobs import MEMORY, answer
from support.speculative import Answered, Partly, settings
from support.sweep import in_sweep, rows_in_sweep
from support.tiles import TILE, tiny_model_of

import torch_moe_mps
from torch_moe_mps.models.caches.tiled import TiledLayer
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.prefix_cache.disk import Disk
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

pytestmark = pytest.mark.filterwarnings("ignore:torch_moe_mps. kv_bits=.* is for layers that hold")
# Heads, sinks and windows, latents, two of them a layer, shared keys, blocks of an indexer, states beside.
ARCHITECTURES = (
    "qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral", "qwen3_next", "glm4_moe", "gemma3", "gemma4",
    "longcat_flash", "minimax_m3_vl", "lfm2_moe", "hunyuan_v1_moe",
)  # fmt: skip
CASES = [(name, bits) for name in ARCHITECTURES for bits in (4, "k4v2")]


def model_of(architecture: str, bits):
    model = tiny_model_of(architecture, max_position_embeddings=2048)
    torch_moe_mps.accelerate(model, kv_bits=bits)
    return model


def drawn(chance: random.Random, before: list[list[int]]) -> list[int]:
    """A prompt that ends near the bound of a tile; some begin as one before."""
    length = chance.randrange(1, 4) * TILE + chance.randrange(-6, 7)
    start = before and chance.random() < 0.5 and chance.choice(before)
    begun = start[: chance.randrange(len(start) + 1)] if start else []
    return [*begun, *(chance.randrange(2, 90) for _ in range(length - len(begun)))][:length]


@pytest.mark.slow("answers of a model, alone and beside others")
@pytest.mark.parametrize(
    ("architecture", "bits"), rows_in_sweep(CASES, [("qwen3_moe", 4), ("gpt_oss", "k4v2")])
)
@torch.no_grad()
def test_random_jobs_beside_each_alone(architecture, bits):
    """Tokens are those alone, where tiles fill up meanwhile, without drafts and with many wrong ones."""
    model, chance, many = model_of(architecture, bits), random.Random(5), list[list[int]]()
    for _ in range(6):
        many.append(drawn(chance, many))
    prompts, configs = [torch.tensor(ids) for ids in many], [settings(chance.randrange(4, 16)) for _ in many]
    expected = []
    for ids, config in zip(prompts, configs, strict=True):
        given = {"max_new_tokens": config.max_new_tokens, "eos_token_id": None, "pad_token_id": 0}
        expected.append(model.generate(ids[None], do_sample=False, **given)[0, len(ids) :].tolist())
    plain = Answered(model, prompts, configs, most=3)
    assert plain.answers == expected
    drafted = Answered(model, prompts, configs, Partly(prompts, expected), most=3, width=4)
    assert drafted.answers == expected
    assert drafted.batch.drafts.drafting.accepted > 0
    layers = [layer for kept in plain.batch.prefix_cache.kept for layer in kept.cache.layers]
    assert any(isinstance(layer, TiledLayer) for layer in layers)


@pytest.mark.slow("three servers")
@pytest.mark.parametrize(
    ("architecture", "bits"),
    rows_in_sweep(CASES, [("deepseek_v3", 4), ("gpt_oss", "k4v2")]),
)
@torch.no_grad()
def test_a_turn_behind_a_restart(architecture, bits, tmp_path):
    """It goes on with the tokens of a model that computes all of it. 8 bits read other files."""
    model, ids = model_of(architecture, bits), jobs.ids_of(1, 600)
    first = jobs.Asked(ids, 20)
    answer(model, Disk(tmp_path, MEMORY), first)
    second = jobs.Asked(torch.cat((ids, torch.tensor([first.tokens]), jobs.ids_of(2, 9)), 1), 12)
    answer(model, Disk(tmp_path, MEMORY), second)
    assert second.tokens == second.expected(model)
    assert second.job.usage.disk_tokens == 619  # all but the last one of the answer
    other = jobs.Asked(torch.cat((ids[:, :550], jobs.ids_of(3, 40)), 1), 12)  # leaves within a tile
    answer(model, Disk(tmp_path, MEMORY), other)
    assert other.tokens == other.expected(model)
    torch_moe_mps.accelerate(model, kv_bits=8)
    eight = jobs.Asked(ids, 3)
    answer(model, Disk(tmp_path, MEMORY), eight)
    assert eight.job.usage.disk_tokens == 0


@pytest.mark.slow("a server for each damaged file")
@pytest.mark.parametrize("bits", in_sweep([4, "k4v2"], ["k4v2"]))
@torch.no_grad()
def test_damaged_blocks(bits, tmp_path):
    """What is in front of a damaged block is used, and tokens are those of a model that computes all."""
    model, ids, used = model_of("qwen3_moe", bits), jobs.ids_of(1, 600), []
    answer(model, Disk(tmp_path / "whole", MEMORY), jobs.Asked(ids, 2))
    files = sorted((tmp_path / "whole").glob("*/*"))
    for number, path in enumerate(files):
        folder, content = tmp_path / str(number), path.read_bytes()
        shutil.copytree(tmp_path / "whole", folder)
        damaged = content[: len(content) // 2] if number % 2 else content[:-1] + bytes([content[-1] ^ 1])
        (folder / path.parent.name / path.name).write_bytes(damaged)
        asked = jobs.Asked(torch.cat((ids, jobs.ids_of(2, 9)), 1), 6)
        answer(model, Disk(folder, MEMORY), asked)
        assert asked.tokens == asked.expected(model)
        used.append(asked.job.usage.disk_tokens)
    assert sorted(used) == [0, 256, 512]


@torch.no_grad()
def test_a_prefix_that_leaves_within_a_tile():
    """It is cut between two tiles if the tokens behind are in tiles alone: what follows is as without it."""
    model, ids = model_of("qwen3_moe", 4), jobs.ids_of(1, 600)
    prompts = PrefixCache(MEMORY)
    batch, used = Engine(model, prompts, 2), []
    for number, length in enumerate((600, 550, 300, 100)):
        asked = jobs.Asked(torch.cat((ids[:, :length], jobs.ids_of(2 + number, 9)), 1), 4)
        batch.submit(asked.job)
        while batch.has_work:
            batch.step()
        assert asked.tokens == asked.expected(model)
        used.append(asked.job.usage.cached_tokens)
    assert used == [0, 550, 256, 100]
