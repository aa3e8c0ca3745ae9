"""Commands under torchrun: the first of two processes says what one process says, the second nothing."""

import re

import pytest
import transformers
from support import tiny_models
from support.pipeline import launch
from tokenizers import Tokenizer, models, pre_tokenizers

from torch_moe_mps.commands import main

ON_THE_CPU = ["--device", "cpu"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Mixtral with a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("model")
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("mixtral").save_pretrained(folder)
    letters = {chr(97 + i): i for i in range(26)} | {"?": 26}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", chat_template=template
    )
    fast.save_pretrained(folder)
    return str(folder)


def test_perplexity(checkpoint, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 3)
    arguments = ["perplexity", checkpoint, "--text", str(text), "--window", "64", *ON_THE_CPU]
    assert main(arguments) == 0
    first, second = launch("command", arguments, [])
    assert first == capsys.readouterr().out and "perplexity" in first
    assert second == ""


def test_bench(checkpoint):
    arguments = ["bench", checkpoint, "--prompt", "8", "--generate", "4", "--depth", "0,16", "--repeats", "1"]
    first, second = launch("command", [*arguments, "--turn", "4", *ON_THE_CPU], [])
    assert [line.split(" | ")[3] for line in first.splitlines()[2:]] == [
        "pp8", "tg4", "pp8 @ d16", "tg4 @ d16", "ttft4 @ d16",
    ]  # fmt: skip
    assert "| 2 x cpu |" in first and second == ""


def test_chat(checkpoint, capsys, monkeypatch):
    """Through the server of `serve`, with two questions."""
    flags = ["--set", "max_new_tokens=6", "--set", "do_sample=False", "--bits", "4", "--group-size", "32"]
    said = ["hello", "goodbye", "!exit"]
    arguments = ["chat", checkpoint, *flags, *ON_THE_CPU]
    (alone,) = launch("command", arguments, said, processes=1)
    first, second = launch("command", arguments, said)
    plain = [re.sub(r"\d+(\.\d+)?", "", output) for output in (first, alone)]  # not its times
    assert plain[0] == plain[1] and len(first) > 100
    assert second == ""
