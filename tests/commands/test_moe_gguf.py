"""scripts/bench/moe_gguf.py: llama.cpp reads the file, and has the model's probabilities."""

from pathlib import Path

import pytest
import torch
import train_moe
from moe_gguf import write_gguf
from support.llama_cpp import check_log_probabilities
from transformers import AutoTokenizer


@pytest.mark.sweep
def test_llama_cpp_has_the_same_probabilities(smollm2, tmp_path):
    model = _model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("def forward(self, hidden_states):\n    return", return_tensors="pt").input_ids
    check_log_probabilities(tmp_path / "model.gguf", model.float().eval(), ids, mean=0.02)


def _model(folder: Path):
    """One with random weights, spread wide enough that its tokens differ, and its file."""
    torch.manual_seed(0)
    tokenizer = train_moe.tokenizer_in(folder / "tokenizer")
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
