"""A GPU that stops in the middle of a command: an error in one line, and the next request is answered."""

import contextlib
import itertools
import json
import threading
import urllib.error
import urllib.request

import openai
import pytest
from support import serving, tiny_models
from support.jobs import on_thread
from support.serving import expected_text, said
from support.sweep import in_sweep, rows_in_sweep

from torch_moe_mps.commands import main
from torch_moe_mps.serving.engine.loop import EngineThread
from torch_moe_mps.serving.prefix_cache import disk

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


def health(port: int) -> str:
    """The state that a server says it is in; nothing where none answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            return json.load(answer)["status"]
    except urllib.error.HTTPError as error:
        return json.load(error)["status"]
    except OSError:
        return ""


@pytest.mark.slow("a server that answers, dies, and is started again")
def test_a_server_ends_once_macos_ignores_it(checkpoint, simulated, tmp_path, capsys, monkeypatch):
    """Who started it may start it again, and finds the prompts on the disk."""
    monkeypatch.setattr(disk, "BLOCK", 16)
    port, folder, over = serving.free_port(), tmp_path / "prompts", threading.Event()
    texts, errors, states = [], [], []

    def ask(client) -> int:
        given = {"temperature": 0, "max_tokens": 3, "prompt": "hello" * 10}
        answer = client.completions.create(model=str(checkpoint), **given)
        texts.append(answer.choices[0].text)
        return answer.usage.prompt_tokens_details.cached_tokens

    def use() -> None:
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            while not over.wait(0.05) and not health(port):
                pass
            ask(client)
            with simulated.ignoring(1):
                while not over.wait(0.02):  # until it has ended
                    fails = contextlib.nullcontext() if errors else simulated.failing("timeout")
                    with fails, pytest.raises(openai.APIError) as raised:
                        ask(client)
                    errors.append(str(raised.value))
                    states.append(health(port))

    given = [*serving.QUANTISED, "--device", "mps", "--prompt-folder", folder]
    client = threading.Thread(target=use)
    client.start()
    code = main(["serve", str(checkpoint), "--port", str(port), *map(str, given)])
    over.set(), client.join()
    assert code == 1 and "Caused GPU Timeout Error" in errors[0]
    line = capsys.readouterr().err.splitlines()[-1]
    assert "macOS has stopped all GPU work of this process" in line and "restart it" in line
    assert {*states} <= {"died", ""}, states
    assert [*folder.rglob("*.block")] and not [*folder.rglob("*.new")]
    with serving.client_of(checkpoint, *given) as client:
        assert ask(client) > 0
    assert texts[0] == texts[1] and len(texts) == 2
