"""The command generate: answers against generate() of transformers, and everything else on stderr."""

import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import types

import pytest
import torch
import transformers
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of
from support.processes import environment
from support.sweep import in_sweep
from tokenizers import decoders

import torch_moe_mps
from torch_moe_mps.commands import generate, main
from torch_moe_mps.serving.prefix_cache import disk

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"


def write(folder, architecture="mixtral", seed: int = 0, **sizes) -> None:
    """A checkpoint whose tokens are letters; it reads 256 of them."""
    with tiny_models.groups_of_32():
        config = tiny_models.tiny_config(architecture, head_dim=32, vocab_size=27, **sizes)
    torch.manual_seed(seed)
    tiny_models.model_class(architecture)(config).save_pretrained(folder)
    tokenizer_of(LETTERS, unk_token="?", pad_token="?", chat_template=TEMPLATE).save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "model"
    write(folder)
    return folder


def run(*arguments) -> int:
    return main(["generate", *map(str, arguments), "--device", "cpu"])


def expected(checkpoint, prompt: str, tokens: int = 12, **options) -> str:
    model = torch_moe_mps.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
    output = model.generate(ids, **given, **options)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_an_answer_goes_to_stdout(checkpoint, capsys, monkeypatch):
    """From an argument and from stdin, with a template and raw; figures go to stderr."""
    capsys.readouterr()
    assert run(checkpoint, "-p", "hello", "--max-tokens", 12) == 0
    out, err = capsys.readouterr()
    assert out == expected(checkpoint, "uhello") + "\n" and "6 tokens of prompt in " in err
    assert "12 generated, then " in err
    system = ["--system-prompt", "be", "--set", "max_new_tokens=12"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    assert run(checkpoint, *system) == 0
    assert capsys.readouterr().out == expected(checkpoint, "sbeuhello") + "\n"
    assert run(checkpoint, "--raw", "-p", "hello", "--max-tokens", 12) == 0
    assert capsys.readouterr().out == expected(checkpoint, "hello") + "\n"


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v4"])
def test_several_prompts(architecture, tmp_path, capsys):
    """Of different lengths, side by side or, where padding would count, alone: a line of JSON for each."""
    write(folder := tmp_path / "model", architecture)
    prompts = ["hello", "a", "question\u2028\f"]  # what ends a line for some, but not in a file
    (tmp_path / "prompts.txt").write_text("\n".join([prompts[0], "", *prompts[1:], ""]))
    arguments = ["--prompts", tmp_path / "prompts.txt", "--max-tokens", 6, "--batch", 2, "--raw"]
    capsys.readouterr()
    assert run(folder, *arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.rstrip("\n").split("\n")]
    texts = [expected(folder, prompt, 6).replace(" ", "") for prompt in prompts]
    assert [line["prompt"] for line in lines] == prompts
    assert [line["text"].replace(" ", "").replace("?", "") for line in lines] == [
        text.replace("?", "") for text in texts
    ]


def test_drafts_are_for_one_prompt_after_the_other(checkpoint, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("abcabcabc\nhello\n")
    arguments = ["--prompts", tmp_path / "prompts.txt", "--max-tokens", 12, "--batch", 2, "--raw"]
    assert run(checkpoint, *arguments, "--speculative", "lookup") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [expected(checkpoint, p) for p in ("abcabcabc", "hello")]


def test_the_speed_is_that_of_tokens_behind_the_first(checkpoint, capsys, monkeypatch):
    """Times are those of a start, a first token and an end, a second from each other."""
    seconds = itertools.count()
    monkeypatch.setattr(generate, "time", types.SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    assert run(checkpoint, "--raw", "-p", "hello", "--max-tokens", 12) == 0
    said = "5 tokens of prompt in 1.0 s, 12 generated, then 11.0 tokens/s"
    assert said in capsys.readouterr().err


@pytest.fixture
def draft(checkpoint, tmp_path):
    write(tmp_path / "draft", "llama", seed=1)
    return tmp_path / "draft"


@pytest.mark.parametrize("way", in_sweep(("draft", "itself", "lookup"), ("draft",)))
def test_speculation_gives_the_same_text(way, checkpoint, draft, capsys):
    """Greedily; the model as its own draft drafts all tokens."""
    arguments = {
        "draft": ["--speculative", draft],
        "itself": ["--speculative", checkpoint],
        "lookup": ["--speculative", "lookup"],
    }[way]
    text = expected(checkpoint, "abcabcabc", 40)
    assert run(checkpoint, "--raw", "-p", "abcabcabc", "--max-tokens", 40, *arguments) == 0
    out, err = capsys.readouterr()
    assert out == text + "\n"
    accepted, drafted = (int(err.splitlines()[-1].split()[i]) for i in (0, 2))
    assert 0 <= accepted <= drafted and drafted > 0
    assert way != "itself" or drafted - accepted <= 1  # the last draft is one too many


def test_a_prompt_is_computed_once(checkpoint, tmp_path, capsys, monkeypatch):
    """In a second call that begins alike, only the rest; the text is that of one call."""
    monkeypatch.setattr(disk, "BLOCK", 16)
    counts = list[int]()
    own = transformers.MixtralModel.forward

    def counted(self, input_ids=None, **kwargs):
        counts.append(input_ids.shape[1])
        return own(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(transformers.MixtralModel, "forward", counted)
    document = "thequickbrownfoxjumpsoverthelazydog" * 3
    for question, computed in (("why", 108), ("who", 12), ("when", 13)):
        text = expected(checkpoint, document + question)
        del counts[:]
        arguments = ["--raw", "-p", document + question, "--max-tokens", 12, "--prompt-folder", tmp_path]
        assert run(checkpoint, *arguments) == 0
        assert capsys.readouterr().out == text + "\n"
        assert counts[0] == computed


def test_ctrl_c_ends_the_answer_and_keeps_the_prompt(checkpoint, tmp_path, capsys, monkeypatch):
    own, calls = transformers.MixtralModel.forward, []
    monkeypatch.setattr(disk, "BLOCK", 4)

    def interrupted(self, input_ids=None, **kwargs):
        calls.append(input_ids.shape[1])
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return own(self, input_ids=input_ids, **kwargs)

    arguments = ["--raw", "-p", "hello", "--prompt-folder", tmp_path]
    text = expected(checkpoint, "hello", 5)
    capsys.readouterr()
    monkeypatch.setattr(transformers.MixtralModel, "forward", interrupted)
    assert run(checkpoint, *arguments, "--max-tokens", 200) == 128 + signal.SIGINT
    out, err = capsys.readouterr()
    assert out == text + "\n" and err.splitlines()[-1] == "torch-moe-mps: interrupted"
    assert run(checkpoint, *arguments, "--max-tokens", 5) == 0
    assert capsys.readouterr().out == text + "\n" and calls[5] == 1


def test_bad_input_is_one_line(checkpoint, tmp_path, refused, monkeypatch):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    hello = ["-p", "hello"]
    for arguments, message in (
        ([], "stdin must be in UTF-8: "),
        (["--raw", "-p", ""], "the prompt must have at least 1 token, got none"),
        (["--raw", "-p", "a" * 256], "the prompt must have fewer than the model's 256 tokens, got 256"),
        ([*hello, "--image", tmp_path / "empty.txt"], "--image is for a model that takes images, got "),
        (
            [*hello, "--raw", "--system-prompt", "a"],
            "--system-prompt is for a chat template, and none is used",
        ),
    ):
        assert message in refused("generate", checkpoint, *arguments, "--device", "cpu", progress=True)


def test_stop_strings(checkpoint, tmp_path, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # words without blanks between their tokens
    tokenizer.save_pretrained(folder)
    text = expected(folder, "hello")
    assert run(folder, "--raw", "-p", "hello", "--set", f"stop_strings={text[4:6]}") == 0
    assert capsys.readouterr().out == text[: text.index(text[4:6]) + 2] + "\n"


def test_what_a_chat_template_refuses_is_one_line(checkpoint, tmp_path, refused):
    shutil.copytree(checkpoint, tmp_path / "model")
    template = "{{ raise_exception('System role not supported') }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    error = refused("generate", tmp_path / "model", "-p", "hello", "--system-prompt", "a", "--device", "cpu")
    assert error == "the model's chat template: System role not supported"


# A command that only imports torch.
TORCH_ALONE = """
import sys, types
import torch_moe_mps_command
from torch_moe_mps import commands
sys.modules["torch_moe_mps.commands.generate"] = command = types.ModuleType("generate")
command.run = lambda options: print(__import__("torch").__version__)
sys.exit(commands.run())
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="torch has libgomp on Linux alone")
@pytest.mark.parametrize(
    "own, shown", [({}, "1000"), pytest.param({"GOMP_SPINCOUNT": "77"}, "77", marks=pytest.mark.sweep)]
)
def test_waiting_threads_leave_the_cores_to_others(own, shown, checkpoint):
    """libgomp says at its start how long its threads spin; what a user has set stays."""
    variables = environment() | {"OMP_DISPLAY_ENV": "verbose"} | own
    command = [sys.executable, "-c", TORCH_ALONE, "generate", str(checkpoint), "-p", "a"]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0 and f"GOMP_SPINCOUNT = '{shown}'" in said.stderr
