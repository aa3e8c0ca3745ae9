"""A GPU that stops in the middle of a command: an error in one line, and the next request is answered."""

import itertools

import openai
import pytest
from support import serving, tiny_models
from support.jobs import on_thread
from support.serving import expected_text, said
from support.sweep import in_sweep, rows_in_sweep

from torch_moe_mps.commands import main
from torch_moe_mps.serving.engine.loop import EngineThread

SAYS = {"timeout": "GPU Timeout Error", "fault": "GPU Address Fault Error", "memory": "Insufficient Memory"}


def some_buffers(step: int):
    """Kinds of failures, and how many buffers come before them."""
    return zip(itertools.count(0, step), itertools.cycle(SAYS.items()))


SERVED = (
    (False, (), 13),
    (True, (), 13),
    (True, (), 7),
    (True, ("--parallel", 1), 13),
)


@pytest.mark.parametrize(
    ("streams", "options", "step"),
    rows_in_sweep(SERVED, SERVED[1:2]),
    ids=["side by side", "side by side, streamed", "at more buffers", "one by one"],
)
def test_the_server_answers_the_next_request(checkpoint, simulated, streams, options, step, monkeypatch):
    """Chat is a client that streams."""
    generators = []

    def generator(*arguments):
        generators.append(EngineThread(*arguments))
        return generators[-1]

    monkeypatch.setattr("torch_moe_mps.commands.serving.EngineThread", generator)
    text = expected_text(checkpoint, "hello", 3)
    on_mps = [*serving.QUANTISED, "--device", "mps", *options]
    with serving.client_of(checkpoint, *on_mps) as client:

        def answer() -> str:
            create, asked = client.chat.completions.create, {"temperature": 0, "max_tokens": 3}
            got = create(model=str(checkpoint), messages=said("hello"), stream=streams, **asked)
            text = "".join(c.choices[0].delta.content or "" for c in got) if streams else None
            on_thread(generators[0])  # nothing is left of the request
            return got.choices[0].message.content if text is None else text

        def happens(number: int) -> bool:
            with simulated.failing("fault", number) as failure:
                answer()
            return failure.happened

        assert answer() == text
        for number, (failing, says) in some_buffers(step):
            try:
                with simulated.failing(failing, number) as failure:
                    got = answer()
            except openai.APIError as error:
                assert says in str(error.body) and failure.happened
                assert answer() == text
            else:
                assert got == text
                # Behind the answer one waits again: that buffer has no work in it.
                assert not failure.happened or not happens(number + 1), f"nobody says that {number} failed"
                break
        assert number > 20


def fails_at_each(simulated, step: int, run, failed) -> None:
    """Runs a command with one buffer after the other failing, until none does."""
    for number, (kind, says) in some_buffers(step):
        with simulated.failing(kind, number) as failure:
            code = run()
        if not failure.happened:
            assert code == 0 and number > 0
            return
        failed(code, says)


LINES = (
    ["generate", "--prompt", "hello", "--max-tokens", "3"],
    ["perplexity", "--text", "{text}", "--window", "20"],
    ["bench", "--prompt", "4", "--max-tokens", "2", "--turn", "2", "--repeats", "1", "--depth", "0"],
)


@pytest.mark.parametrize("command", in_sweep(LINES, LINES[:1]), ids=lambda command: command[0])
def test_a_command_ends_with_one_line(checkpoint, simulated, tmp_path, capsys, command):
    text = tmp_path / "text"
    text.write_text("a text of letters")
    name, *given = (each.format(text=text) for each in command)

    def failed(code: int, says: str) -> None:
        assert code == 1 and says in capsys.readouterr().err.splitlines()[-1]

    fails_at_each(simulated, 79, lambda: main([name, str(checkpoint), *given, "--device", "mps"]), failed)


def test_convert_writes_nothing(simulated, tmp_path, capsys):
    """Where importance is collected on the GPU, which runs the model's own code."""
    source, new, text = tmp_path / "source", tmp_path / "new", tmp_path / "text"
    text.write_text("a text of letters" * 40)
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("llama", num_hidden_layers=1, vocab_size=27).save_pretrained(source)
    serving.letters().save_pretrained(source)
    arguments = ["--bits", "4", "--group-size", "32", "--importance", str(text)]

    def failed(code: int, says: str) -> None:
        assert code == 1 and says in capsys.readouterr().err.splitlines()[-1]
        assert not new.exists()

    fails_at_each(simulated, 11, lambda: main(["convert", str(source), str(new), *arguments]), failed)
    assert new.exists()
