"""Commands under torchrun: the first of two processes prints what one process prints, the second nothing."""

import re

import pytest
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of
from support.pipeline import launch

from torch_moe_mps.commands import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Mixtral with a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("model")
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("mixtral").save_pretrained(folder)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer_of(LETTERS, unk_token="?", chat_template=template).save_pretrained(folder)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 3)
    return str(folder)


PERPLEXITY = ["perplexity", "--window", "64"]
BENCH = ["bench", "--prompt", "8", "--max-tokens", "4", "--depth", "0,16", "--repeats", "1", "--turn", "4"]
# Through the server of `serve`, with two questions.
CHAT = ["chat", "--set", "max_new_tokens=6", "--set", "do_sample=False", "--bits", "4", "--group-size", "32"]
SAID = ["hello", "goodbye", "!exit"]
GENERATE = ["generate", "--prompt", "hello", "--max-tokens", "30"]


@pytest.mark.sweep
def test_commands(checkpoint, capsys):
    def line(command: list[str], *further: str) -> list[str]:
        return [*command, checkpoint, *further, "--device", "cpu"]

    perplexity, chat = line(PERPLEXITY, "--text", f"{checkpoint}/text.txt"), line(CHAT)
    first, second = launch("commands", [perplexity, line(BENCH), chat, line(GENERATE)], SAID)
    assert second == ["", "", "", ""]

    assert main(line(GENERATE)) == 0
    assert first[3] == capsys.readouterr().out and len(first[3]) > 3
    assert main(perplexity) == 0
    assert first[0] == capsys.readouterr().out and "perplexity" in first[0]

    assert [row.split(" | ")[3] for row in first[1].splitlines()[2:]] == [
        "pp8", "tg4", "tg4 sampled", "pp8 @ d16", "tg4 @ d16", "tg4 sampled @ d16", "ttft4 @ d16",
    ]  # fmt: skip
    assert "| 2 x cpu |" in first[1]

    (alone,) = launch("commands", [chat], SAID, processes=1)
    plain = [re.sub(r"\d+(\.\d+)?", "", output) for output in (first[2], *alone)]  # not its times
    assert plain[0] == plain[1] and len(first[2]) > 100


def test_a_draft_in_a_pipeline_is_refused(checkpoint, refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    error = refused("serve", checkpoint, "--speculative", checkpoint, "--device", "cpu")
    assert (
        "--speculative MODEL is for one process, as the processes of a pipeline would draft differently"
        in error
    )
