"""The header of a GGUF file is read once, and says what transformers' own readers find in it."""

import os
import sys
from pathlib import Path

import gguf
import pytest
from support.gguf_files import FIRST_LOADER, of_architecture, write, write_file
from transformers import modeling_gguf_pytorch_utils
from transformers.integrations.gguf import get_gguf_config, reader

import torch_moe_mps
from torch_moe_mps.checkpoints.gguf import header
from torch_moe_mps.checkpoints.gguf.file import stated_config
from torch_moe_mps.commands import main

TOKENS = 30_000


def vocabulary() -> dict[str, object]:
    """A tokenizer's lists."""
    tokens = [f"t{number}" for number in range(TOKENS)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.5] * TOKENS,
        "tokenizer.ggml.token_type": [1] * TOKENS,
    }


@pytest.fixture
def counts(monkeypatch, tmp_path):
    """How often a header is taken apart here and by transformers, and gguf reads the file."""
    found = {"headers": 0, "others": 0, "readers": 0}
    own, others, reads = header.parsed, reader._read_metadata, gguf.GGUFReader.__init__

    def parsed(path: str, is_first: bool = True):
        found["headers"] += 1
        return own(path, is_first)

    def metadata(*arguments):
        found["others"] += 1
        return others(*arguments)

    def read(self, path, *others, **named):
        found["readers"] += tmp_path in Path(path).parents
        reads(self, path, *others, **named)

    monkeypatch.setattr(header, "parsed", parsed)
    monkeypatch.setattr(reader, "_read_metadata", metadata)
    monkeypatch.setattr(gguf.GGUFReader, "__init__", read)
    return found


@pytest.mark.sweep
def test_a_header_is_read_once_without_lists(tmp_path, counts):
    """By `fit` and by loading together; a file that was written again is read again."""
    stored, keys, matrices, _ = of_architecture("gemma3", "q8_0")
    path = write(tmp_path / "model.gguf", stored, keys | vocabulary(), matrices)
    assert main(["fit", str(path)]) == 0
    assert counts == {"headers": 1, "others": 0, "readers": 0}
    model = torch_moe_mps.from_pretrained(path)
    assert model.config.vocab_size == 96 and counts == {"headers": 1, "others": 0, "readers": 0}
    write(path, stored, keys | {"general.name": "another"}, matrices)
    os.utime(path, ns=(1, 1))
    assert stated_config(str(path))["vocab_size"] == 96
    assert counts == {"headers": 2, "others": 0, "readers": 0}


def test_the_length_of_a_vocabulary_is_its_size(tmp_path, counts):
    """Where the file has no key of it, as transformers counts it."""
    stored, keys, matrices, _ = of_architecture("gemma3", "q8_0")
    del keys["vocab_size"]
    path = write(tmp_path / "model.gguf", stored, keys | vocabulary(), matrices)
    assert stated_config(str(path))["vocab_size"] == TOKENS
    assert counts["others"] == counts["readers"] == 0


@pytest.mark.parametrize("architecture", [*FIRST_LOADER, "qwen35", "lfm2"])
def test_configs_are_those_of_transformers_own_readers(architecture, tmp_path):
    path = tmp_path / "model.gguf"
    if architecture in FIRST_LOADER:
        stored, keys, matrices, _ = of_architecture(architecture, "q8_0")
        write(path, stored, keys | {"tokenizer.ggml.tokens": ["a", "b"]}, matrices)
    else:
        write_file(path, architecture, ("q8_0",) * 3, tokenizer=True)
    if architecture in FIRST_LOADER:
        expected = modeling_gguf_pytorch_utils.load_gguf_checkpoint(str(path))["config"]
        assert expected.items() <= (found := stated_config(str(path))).items()
        assert {*found} - {*expected} <= {"moe_intermediate_size", "shared_expert_intermediate_size"}
    else:
        expected = reader.read_gguf_metadata(str(path))
        assert get_gguf_config(*expected) == stated_config(str(path))


def test_without_the_package_gguf_transformers_says_what_to_install(tmp_path, monkeypatch):
    stored, keys, matrices, _ = of_architecture("gemma3", "q8_0")
    path = write(tmp_path / "model.gguf", stored, keys | vocabulary(), matrices)
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(modeling_gguf_pytorch_utils, "is_gguf_available", lambda: False)
    with pytest.raises(ImportError, match="Please install torch and gguf"):
        torch_moe_mps.from_pretrained(path)
