"""--kv-bits in commands, against attention to numbers that NumPy has rounded."""

import json
from collections.abc import Iterator

import pytest
import torch
import transformers
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of
from support.models import eager
from support.tiles import TILE, Oracle

from torch_moe_mps.commands import main

SHARPER = 4.0  # scores of attention, which are small in a model with random weights
PROMPT = "thequickbrownfoxjumpsoverthelazydog" * 9  # 315 letters
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model whose tokens are letters."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"head_dim": 32, "vocab_size": 27, "max_position_embeddings": 1024}
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("mixtral", **sizes)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= SHARPER
    model.save_pretrained(folder)
    tokenizer_of(LETTERS, unk_token="?", pad_token="?", chat_template=TEMPLATE).save_pretrained(folder)
    return folder


def own(checkpoint):
    return eager(transformers.AutoModelForCausalLM.from_pretrained(checkpoint)).eval()


def ids_of(checkpoint, text: str) -> torch.Tensor:
    return transformers.AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt").input_ids[0]


@pytest.mark.slow("a model reads 315 tokens")
@pytest.mark.parametrize("bits", [4, "k4v2"])
@torch.no_grad()
def test_perplexity(bits, checkpoint, tmp_path, monkeypatch):
    """Of a text in one window: each token reads the tiles in front of its own as they are quantised."""
    (tmp_path / "text").write_text(PROMPT)
    asked = ["perplexity", checkpoint, "--text", tmp_path / "text", "--window", 512, "--kv-bits", bits]
    asked += ["--against", checkpoint, "--device", "cpu", "--dtype", "float32", "--json", tmp_path / "x.json"]
    assert main([*map(str, asked)]) == 0
    data = json.loads((tmp_path / "x.json").read_text())
    model, ids = own(checkpoint), ids_of(checkpoint, PROMPT)
    dense = model(ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    Oracle(model, bits, monkeypatch)
    logs = model(ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
    loss = -logs.gather(1, ids[1:, None]).mean()
    divergence = (dense.exp() * (dense - logs)).sum(1)
    (found,) = data["models"]
    assert data["kv_bits"] == bits
    assert found["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)
    assert found["divergence"] == pytest.approx(divergence.mean().item(), rel=1e-2)
    assert divergence[: 2 * TILE].max() < 1e-6 < 1e-3 < divergence[2 * TILE :].mean()


@torch.no_grad()
def greedy(model, ids: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        ids = torch.cat((ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)))
    return ids[-count:]


@pytest.mark.slow("a model reads 315 tokens, in four ways")
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_answers(command, checkpoint, monkeypatch, capsys):
    """They are others than with 16 bits."""
    model, ids = own(checkpoint), ids_of(checkpoint, PROMPT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    lines: Iterator[str] = iter(())
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    asked = [checkpoint, "--max-tokens", 4, "--temperature", 0, "--device", "cpu", "--dtype", "float32"]
    asked += ["-p", PROMPT] if command == "generate" else []
    found, expected = [], []
    for bits in (16, 4):
        if bits == 4:
            Oracle(model, bits, monkeypatch)
        expected.append(f"{tokenizer.decode(greedy(model, ids, 4))}\n")
        lines = iter([PROMPT, "!exit"])
        capsys.readouterr()
        assert main([command, *map(str, asked), "--kv-bits", str(bits)]) == 0
        found.append(capsys.readouterr().out)
    assert expected[0] != expected[1]
    assert all(answer in out for answer, out in zip(expected, found, strict=True))
