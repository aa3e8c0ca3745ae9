"""The chat in the terminal, with a model that says what a test tells it to."""

import contextlib
import json
import signal
import sys

import pytest
from support import disk

from torch_moe_mps.commands import chat, main
from torch_moe_mps.commands.arguments import parser


@pytest.fixture
def talk(here, monkeypatch, capsys, tmp_path):
    """Runs a chat of some lines with a model that says some texts. Returns: what is shown."""

    @contextlib.contextmanager
    def served_by(options):
        yield here.served

    monkeypatch.setattr(chat, "served_by", served_by)

    def run(*arguments: str, lines: list[str | bytes], says: list[str]) -> str:
        here.says(*says)
        left = iter(lines)

        def typed(prompt: str) -> str:
            line = next(left, None)
            if line is None:
                raise EOFError
            return line if isinstance(line, str) else line.decode()

        monkeypatch.setattr("builtins.input", typed)
        chat.run(parser().parse_args(["chat", "model", "--save-folder", str(tmp_path), *arguments]))
        return capsys.readouterr().out

    return run


def test_a_conversation(here, talk):
    """Each prompt has what was said before, without reasoning; !clear leaves the system's prompt alone."""
    says = ["<think>\nhm\n</think>\n\nblue", "really", "new"]
    shown = talk("--system-prompt", "be", lines=["sky?", "", "sure?", "!clear", "hi"], says=says)
    assert "hm\n\nblue" in shown and "really" in shown and "tokens/s" in shown
    first, second, third = here.generator.prompts
    assert (
        first == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nsky?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second == f"{first}blue<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert third == first.replace("sky?", "hi")
    config = here.generator.jobs[0].config
    assert not config.do_sample and config.max_new_tokens == 4096 - len(
        here.served.template.tokenizer(first).input_ids
    )


def test_an_answer_that_was_cut_off_goes_on(here, talk):
    shown = talk("--set", "max_new_tokens=3", lines=["hi", "!continue", "so?"], says=["hello", "lo", "end"])
    assert "3 tokens" in shown and "!continue goes on" in shown
    assert here.generator.prompts[1].endswith("<|im_start|>assistant\nhel")
    assert "<|im_start|>assistant\nhello<|im_end|>" in here.generator.prompts[2]


def test_settings(here, talk):
    lines = [
        "!set do_sample=false max_new_tokens=4",
        "hi",
        "!set nothing=1",
        "!set top_k=many",
        "!status",
        "!what now",
        "!help",
    ]
    shown = talk("--set", "temperature=0.5", lines=lines, says=["hello"])
    config = here.generator.jobs[0].config
    assert (config.do_sample, config.max_new_tokens) == (False, 4)
    assert "--set must name arguments of generate(), got nothing" in shown
    assert "--set top_k must be a number" in shown
    assert "'max_new_tokens': 4" in shown and shown.count("!clear") == 1  # of the help
    assert "!what is not a command: !help lists them" in shown


def test_a_chat_is_written(talk, tmp_path):
    shown = talk(
        lines=["hi", "!save", f"!save {tmp_path}/own.json", "!save /proc/nowhere/a.json"], says=["hello"]
    )
    (file,) = (tmp_path / "scripted").iterdir()
    for path in (file, tmp_path / "own.json"):
        said = json.loads(path.read_text())["chat_history"]
        assert said == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert "/proc/nowhere/a.json cannot be written: No such file or directory" in shown


def test_save_never_overwrites_a_file(talk, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = ["hi", "!save ~/notes.txt", f"!save {tmp_path}/link", "!save ~/new.json"]
    shown = talk(lines=lines, says=["hello"])
    assert (tmp_path / "notes.txt").read_text() == "mine" and not (tmp_path / "nowhere").exists()
    for name in ("notes.txt", "link"):
        assert f"{tmp_path / name} exists: !save writes a new file" in shown
    assert json.loads((tmp_path / "new.json").read_text())["chat_history"][-1]["content"] == "hello"
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "link", "new.json"}


def test_a_full_disk_leaves_no_part_of_a_saved_chat(talk, tmp_path):
    with disk.files_of(10):
        shown = talk(lines=["hi", f"!save {tmp_path}/own.json", "still there?"], says=["hello", "yes"])
    assert "own.json cannot be written: File too large" in shown and "yes" in shown
    assert not [*tmp_path.iterdir()]


def test_a_chat_goes_on_behind_what_cannot_be_read(talk, monkeypatch, tmp_path):
    """A NUL in the name of a file, a user without a home, bytes that are not UTF-8, half a surrogate pair."""
    lines = ["hi", "!save a\0b", "!save ~nobody-at-all/x", b"\xff", "\ud800", "so?"]
    shown = talk(lines=lines, says=["hello", "still here"])
    assert "a\0b cannot be written: embedded null byte" in shown and "still here" in shown
    assert "~nobody-at-all/x cannot be written: Could not determine home directory" in shown
    assert "messages must be in UTF-8" in shown


def test_a_closed_stdout_is_no_traceback(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "/nowhere", "-p", "hi"]) == 1


def test_ctrl_c_while_a_message_is_read(here, talk, monkeypatch):
    """The answer to it ends before it begins, and the chat goes on."""
    own, pressed = chat.prepare, []

    def prepare(*given):
        if not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return own(*given)

    monkeypatch.setattr(chat, "prepare", prepare)
    shown = talk(lines=["hi", "so?"], says=["hello", "end"])
    assert "hello" not in shown and "end" in shown


def test_what_cannot_be_read_is_forgotten(here, talk):
    """A prompt that is too long, and an error of the model; the chat goes on."""
    shown = talk(lines=["a" * 5000, "hi"], says=["hello"])
    assert "This model's maximum context length is 4096 tokens" in shown and "hello" in shown
    assert len(here.generator.prompts) == 1 and "aaa" not in here.generator.prompts[0]
