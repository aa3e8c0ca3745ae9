"""`--speculative` with MTP layers and with the folder of an assistant: the text is equal to that without."""

import shutil
from argparse import Namespace

import pytest
import torch
from support.checkpoints import changed
from support.dflash import assistant_of
from support.mtp import with_mtp
from support.serving import QUANTISED, client_of, expected_text, letters, said
from support.speculative import Answered, prompts, settings

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.commands.speculative import draft_cache, drafts_of
from torch_moe_mps.models.modules.linears import formats_in
from torch_moe_mps.serving.engine.drafter import DraftedSequence
from torch_moe_mps.serving.engine.width import Width
from torch_moe_mps.serving.prefix_cache import disk
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache
from torch_moe_mps.serving.speculative.dflash import DFlash

PROMPT = "abcabcabc"


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    """(model, its dense assistant)"""
    folder = tmp_path_factory.mktemp("assistant")
    assistant_of(torch_moe_mps.from_pretrained(checkpoint)).save_pretrained(folder)
    return checkpoint, folder


def answers(capsys, *arguments) -> str:
    capsys.readouterr()
    given = ["-p", PROMPT, "--raw", "--max-tokens", "20", "--device", "cpu"]
    assert main(["generate", *map(str, arguments), *given]) == 0
    out, err = capsys.readouterr()
    if "--speculative" in arguments:
        accepted, drafted = (int(err.splitlines()[-1].split()[i]) for i in (0, 2))
        assert 0 <= accepted <= drafted and drafted > 0
    return out


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(disk, "BLOCK", 4)


def test_generate_with_an_assistant(folders, tmp_path, capsys, small_blocks):
    """In a prompt that is kept, too, of which it needs all states."""
    model, assistant = folders
    own = answers(capsys, model)
    for _ in range(2):
        kept = ("--prompt-folder", tmp_path / "kept")
        assert answers(capsys, model, "--speculative", assistant, *kept) == own


def test_generate_with_layers_of_the_checkpoint(tmp_path, capsys, small_blocks):
    with with_mtp("deepseek_v3", tmp_path / "model", vocab_size=27):
        letters().save_pretrained(tmp_path / "model")
        own = answers(capsys, tmp_path / "model")
        for _ in range(2):
            kept = ("--prompt-folder", tmp_path / "kept")
            assert answers(capsys, tmp_path / "model", "--speculative", "mtp", *kept) == own


def test_serve_with_an_assistant(folders, monkeypatch):
    model, assistant = folders
    monkeypatch.setattr("torch_moe_mps.serving.speculative.asked.Width", lambda width: Width(3))
    with client_of(model, *QUANTISED, "--speculative", assistant) as client:
        asked = {"model": "m", "messages": said(PROMPT), "temperature": 0, "max_tokens": 20}
        for _ in range(2):
            answer = client.chat.completions.create(**asked)
            assert answer.choices[0].message.content == expected_text(model, PROMPT, 20)
            counts = answer.usage.completion_tokens_details
            assert counts.accepted_prediction_tokens + counts.rejected_prediction_tokens > 6


def options_for(assistant) -> Namespace:
    return Namespace(speculative=str(assistant), dtype="auto", trust_remote_code=False, kv_bits=16)


@torch.no_grad()
def test_the_cache_of_a_draft_is_what_it_holds(folders):
    """By tokens: of a model, and of an assistant, whose window holds few."""
    checkpoint, assistant = folders
    model = torch_moe_mps.from_pretrained(checkpoint)
    asked, block = torch.arange(1, 21)[None], assistant_of(model)
    cache = model(asked, use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert draft_cache(options_for(checkpoint), model.dtype).at(20) == held
    source, row = DFlash(model, block), DraftedSequence(asked[0].tolist(), 20, max_drafts=2)
    source.computed(row, 0, torch.randn(1, 19, 2 * model.config.hidden_size))
    assert source.draft([row]) != [[]]
    heads = 2 * block.config.num_key_value_heads * block.config.head_dim * 4
    assert draft_cache(options_for(assistant), torch.float32).at(19) == (19 + 8) * heads
    layers = source._read[row].cache.cache.layers
    shown = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert shown == (19 + 7) * heads  # the token that comes is the last one of a window


def test_an_assistant_is_quantised_as_the_last_layer(folders, tmp_path):
    """And computes in the dtype of the model; one that is quantised stays as it is."""
    folder, dense = folders
    three = tmp_path / "three"
    assert main(["convert", str(dense), str(three), "--bits", "3", "--group-size", "32"]) == 0
    how = {"bits": 4, "group_size": 32, "dtype": torch.bfloat16}
    model, many = torch_moe_mps.from_pretrained(folder, **how), prompts(2)
    many = [ids % 27 for ids in many]
    plain = Answered(model, many, [settings(12)] * 2).answers
    for assistant, expected in ((dense, "affine4_32"), (three, "affine3_32")):
        speculative = drafts_of(options_for(assistant), model, str(folder), "cpu", PrefixCache(0))
        (source,) = speculative._drafters.values()
        assert isinstance(source, DFlash) and source.modules[0].dtype == torch.bfloat16
        modules = source.modules[0].modules()
        formats = [str(format) for module in modules for format in formats_in(module).values()]
        assert {*formats} == {expected} and len(formats) == 15
        found = Answered(model, many, [settings(12)] * 2, source, width=3)
        assert found.answers == plain and found.batch.drafts.drafting.rejected > 0


@pytest.mark.parametrize("command", ["generate", "serve", "chat"])
def test_the_assistant_of_another_model_is_one_line(command, folders, tmp_path, capsys):
    model, _ = folders
    assistant_of(torch_moe_mps.from_pretrained(model), hidden_size=96).save_pretrained(tmp_path)
    more = ["-p", "a"] if command == "generate" else []
    capsys.readouterr()
    assert main([command, str(model), "--speculative", str(tmp_path), "--device", "cpu", *more]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "an assistant must be of a model of 2 layers, 64 wide, and 27 tokens, got 2 layers, 96" in error


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_draft_with_other_texts_for_its_tokens_is_one_line(command, folders, tmp_path, capsys):
    """Of as many tokens as the model."""
    model, _ = folders
    shutil.copytree(model, tmp_path / "draft")
    with changed(tmp_path / "draft" / "tokenizer.json") as stored:
        vocabulary = stored["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    assert main([command, str(model), "--speculative", str(tmp_path / "draft"), "--device", "cpu"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("a draft must have the model's 27 tokens, got 27 others")
