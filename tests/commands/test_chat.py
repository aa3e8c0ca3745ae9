"""The chat in the terminal, with a model that says what a test tells it to."""

import contextlib
import signal
import sys

import pytest

from torch_moe_mps.commands import chat, main
from torch_moe_mps.commands.arguments import parser


@pytest.fixture
def talk(here, monkeypatch, capsys):
    """Runs a chat of some lines with a model that says some texts. Returns: what is shown."""

    @contextlib.contextmanager
    def served_by(options):
        yield here.served

    monkeypatch.setattr(chat, "served_by", served_by)

    def run(*arguments: str, lines: list[str | bytes], says: list[str]) -> str:
        here.says(*says)
        left = iter(lines)

        def typed(prompt: str) -> str:
            assert prompt == "<you>:\n"  # as in the documentation
            line = next(left, None)
            if line is None:
                raise EOFError
            return line if isinstance(line, str) else line.decode()

        monkeypatch.setattr("builtins.input", typed)
        chat.run(parser().parse_args(["chat", "model", *arguments]))
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
    assert "3 tokens" in shown and "; !continue goes on" in shown
    assert here.generator.prompts[1].endswith("<|im_start|>assistant\nhel")
    assert "<|im_start|>assistant\nhello<|im_end|>" in here.generator.prompts[2]


def test_an_answer_that_ended_does_not_go_on(here, talk):
    shown = talk(lines=["!continue", "hi", "!continue", "!clear", "!continue"], says=["hello"])
    assert shown.count("!continue goes on with an answer that was cut off: there is none yet\n") == 2
    assert shown.count("!continue goes on with an answer that was cut off: the last one has ended\n") == 1
    assert len(here.generator.prompts) == 1


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
    talk("--temp", "0.5", "--top-p", "0.9", lines=["hi"], says=["hello"])
    config = here.generator.jobs[-1].config
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.5, 0.9)
    assert "!set must name arguments of generate(), got nothing" in shown
    assert "!set top_k must be a number" in shown
    assert "'max_new_tokens': 4" in shown and shown.count("!clear") == 1  # of the help
    assert "!what is not a command: !help lists them" in shown


def test_a_chat_goes_on_behind_what_cannot_be_read(talk):
    """Bytes that are not UTF-8, half a surrogate pair."""
    lines = ["hi", b"\xff", "\ud800", "so?"]
    shown = talk(lines=lines, says=["hello", "still here"])
    assert "messages must be in UTF-8" in shown and "still here" in shown


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
