"""scripts/bench/moe_gguf.py: llama.cpp reads the file, and has the model's probabilities."""

import json
from pathlib import Path

import pytest
import torch
import train_moe
from moe_gguf import write_gguf
from support.llama_cpp import check_log_probabilities
from transformers import AutoTokenizer, GgufConfig

import torch_moe_mps


@pytest.mark.slow("a tokenizer of 2,000 words is written and read")
def test_weights_come_back_as_they_were(smollm2, tmp_path):
    """By transformers' own reader of the file, and by ours: bit for bit in bfloat16."""
    model = _model(tmp_path, words=2_000)
    own = torch_moe_mps.from_pretrained(str(tmp_path / "model.gguf"), dtype=torch.bfloat16, check=False)
    read = {"gguf_file": "model.gguf", "quantization_config": GgufConfig(dequantize=True)}
    read["config"] = model.config  # transformers leaves widths of heads at their defaults
    theirs = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, **read)
    for name, value in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value), name
        assert torch.equal(own.state_dict()[name], value), name


@pytest.mark.sweep
def test_llama_cpp_has_the_same_probabilities(smollm2, tmp_path):
    model = _model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("def forward(self, hidden_states):\n    return", return_tensors="pt").input_ids
    check_log_probabilities(tmp_path / "model.gguf", model.float().eval(), ids, mean=0.02)


def _model(folder: Path, words: int | None = None):
    """One with random weights, spread wide enough that its tokens differ, and its file.

    `words`: so many of the tokenizer's, the first ones.
    """
    torch.manual_seed(0)
    tokenizer = train_moe.tokenizer_in(folder / "tokenizer")
    if words is not None:
        tokenizer = _with_first_words(tokenizer, folder / "tokenizer", words)
    model = train_moe.model_of(train_moe.SIZES["small"], len(tokenizer)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                parameter * 4 if parameter.dim() > 1 else parameter + 0.1 * torch.randn_like(parameter)
            )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_gguf(folder, folder / "model.gguf")
    return model


def _with_first_words(tokenizer, folder: Path, count: int):
    tokenizer.save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    model = stored["model"]
    model["vocab"] = {word: number for word, number in model["vocab"].items() if number < count}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return AutoTokenizer.from_pretrained(folder)
