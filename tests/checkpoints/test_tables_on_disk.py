"""Embeddings that are too large for memory: their rows are read from the checkpoint's own files."""

import copy

import peft
import pytest
import torch
from support import gguf_files
from support.experts_on_disk import NGRAMS, same
from support.models import Conversation, prompt, tiny

from torch_moe_mps import from_pretrained
from torch_moe_mps._limits import LARGEST_CHUNK
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.checkpoints.quantize import sizes
from torch_moe_mps.checkpoints.source import Source
from torch_moe_mps.disk import pool as pool_module
from torch_moe_mps.models.basics.interface import on_disk_of
from torch_moe_mps.models.caches.prompt_cache import fingerprint
from torch_moe_mps.models.modules.experts_on_disk import expert_pools, reads_of

BITS = {"bits": 4, "group_size": 32}


@pytest.fixture
def few(monkeypatch):
    """Slots of few experts, a table that counts as large, and few of its rows."""
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)
    monkeypatch.setattr(sizes, "_TABLE", 1e-12)
    monkeypatch.setattr(pool_module, "TABLE_ROWS", 40)


def tables_of(model) -> dict:
    every = {name: on_disk_of(module) for name, module in model.named_modules()}
    return {name: own for name, own in every.items() if own is not None and own.pools.staging is None}


def write(folder, **options) -> str:
    tiny("qwen4_exp", dtype=torch.bfloat16, **NGRAMS).save_pretrained(folder / "dense")
    if not options:
        return str(folder / "dense")
    from_pretrained(str(folder / "dense"), **options).save_pretrained(folder / "packed")
    return str(folder / "packed")


@pytest.mark.slow("loads two models")
@pytest.mark.parametrize("options", [{}, BITS], ids=["dense, in parts", "4 bit"])
def test_the_resident_model(tmp_path, few, options):
    path = write(tmp_path, **options)
    resident, model = from_pretrained(path), from_pretrained(path, experts_memory="1GB")
    found = tables_of(model)
    assert {own.pool.about.experts: own.pool.size for own in found.values()} == {97: 40, 128: 40}
    with torch.no_grad():
        a, b = Conversation(resident), Conversation(model)
        assert torch.equal(a.token, b.token)
        for mine, other in zip(a.tokens(3), b.tokens(3), strict=True):
            assert same(mine, other)
        assert same(resident(prompt()).logits, model(prompt()).logits)  # more rows than have slots
    counters = reads_of(model)["embeddings"]
    assert (
        counters is not reads_of(model)["experts"]
        and counters.hits > 0
        and counters.misses > 40
        and counters.bytes_read > 0
    )
    with pytest.raises(ValueError, match="embed_tokens is on the disk: load another one for a copy"):
        copy.deepcopy(model.get_input_embeddings())
    with pytest.raises(ValueError, match="is on the disk: its device and dtype are those that from_pre"):
        model.get_input_embeddings().half()
    before = fingerprint(model)
    with torch.no_grad():
        model(prompt() + 1)
        assert fingerprint(model) == before
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        assert same(adapted.eval()(prompt()).logits, resident(prompt()).logits)


def test_rows_of_a_gguf_file(tmp_path, few):
    """Its blocks become rows as they are read, in place of experts' matrices."""
    path = str(gguf_files.write_file(tmp_path / "model.gguf", "qwen3moe", ("q4_k", "q6_k", "q5_k")))
    model = from_pretrained(path, experts_memory="1GB", device_map="cpu")
    (table,) = tables_of(model).values()
    assert (table.pool.about.experts, table.pool.size) == (gguf_files.VOCABULARY, 40)
    assert [*tmp_path.iterdir()] == [tmp_path / "model.gguf"]
    with torch.no_grad():
        resident = from_pretrained(path, device_map="cpu")
        ids = torch.arange(gguf_files.VOCABULARY).unsqueeze(0)
        assert same(model.get_input_embeddings()(ids), resident.get_input_embeddings()(ids))


def test_tables_alone(tmp_path, monkeypatch, capsys):
    """Where the experts fit beside what is left, they are as ever, and no file is written."""
    path = write(tmp_path)
    monkeypatch.setattr(sizes, "_TABLE", 1e-12)
    monkeypatch.setattr(sizes, "_BESIDE", 0)
    source = Source(path, {})
    placed = on_disk.placed(source, None)
    rows = sum(sizes.large_tables(placed, 10**9).values())
    needed = sizes.prompt_bytes(placed, LARGEST_CHUNK) + sizes.total_bytes(placed)
    monkeypatch.setattr(on_disk, "memory_for_models", lambda on_gpu: needed - rows)
    model = from_pretrained(path, experts_memory="auto")
    assert "the others and 0.00 GB of embeddings on the disk: " in capsys.readouterr().err
    assert len(tables_of(model)) == 2 and expert_pools(model) is None
    assert not [*tmp_path.rglob(f"*{on_disk.NAME}")]
    with torch.no_grad():
        assert same(model(prompt()).logits, from_pretrained(path)(prompt()).logits)
    monkeypatch.setattr(on_disk, "memory_for_models", lambda on_gpu: needed)
    assert on_disk.planned(source, None, "auto") is None


@pytest.mark.slow("quantises a model, and loads it twice")
def test_a_tied_table_stays_in_memory(tmp_path, few):
    """Quantised, too: the output head reads all of its codes."""
    tiny("qwen3_moe", dtype=torch.bfloat16, tie_word_embeddings=True).save_pretrained(tmp_path / "dense")
    from_pretrained(str(tmp_path / "dense"), **BITS).save_pretrained(tmp_path / "packed")
    for path, options in (("packed", {}), ("dense", BITS)):
        model = from_pretrained(str(tmp_path / path), experts_memory="1GB", **options)
        assert tables_of(model) == {} and expert_pools(model) is not None
        resident = from_pretrained(str(tmp_path / "packed"))
        with torch.no_grad():
            assert same(model(prompt()).logits, resident(prompt()).logits)


def test_no_ids(tmp_path, few):
    """A batch without a token has no rows; the disk is not asked."""
    model = from_pretrained(write(tmp_path), experts_memory="1GB")
    for shape in ((1, 0), (0,), (0, 3)):
        rows = model.get_input_embeddings()(torch.empty(shape, dtype=torch.int64))
        assert rows.shape == (*shape, 64) and rows.dtype == torch.bfloat16
    assert reads_of(model)["embeddings"].bytes_read == 0


def test_which_tables_are_large():
    """Those above a sixteenth of the memory, but for tied ones: an output head reads all of its rows."""
    model, tied = tiny("qwen4_exp", **NGRAMS), tiny("qwen4_exp", tie_word_embeddings=True, **NGRAMS)
    own, grams = 97 * 64 * 4, 128 * 32 * 4
    name = "model.layers.0.ple.ple_embedding.ngram_embedding"
    assert sizes.large_tables(model, 16 * grams - 1) == {"model.embed_tokens": own, name: grams}
    assert sizes.large_tables(model, 16 * grams) == {"model.embed_tokens": own}
    assert sizes.large_tables(tied, 16 * grams - 1) == {name: grams}
