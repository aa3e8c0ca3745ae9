"""A server of this package in this process, and OpenAI's client of it."""

import contextlib
import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import torch
import transformers
from tokenizers import decoders

import torch_moe_mps
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of
from support.processes import COMMAND, Forked
from torch_moe_mps.commands import serving as commands
from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.commands.option_checks import check_options
from torch_moe_mps.commands.serve import key_of, server_of, sockets_of
from torch_moe_mps.serving.engine.loop import EngineThread

QUANTISED = ["--bits", 4, "--group-size", 32]  # as `quantised`


@contextlib.contextmanager
def client_of(*arguments: object, key: str = "none") -> Iterator[openai.OpenAI]:
    """OpenAI's client of `serve` with these arguments, on the CPU unless they say where."""
    with (
        server_at(*arguments) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client,
    ):
        yield client


@contextlib.contextmanager
def server_at(*arguments: object) -> Iterator[str]:
    """The URL of `serve` with these arguments, in this process."""
    given = [*map(str, arguments)]
    if "--prompt-folder" not in given:  # the user's cache is no place for tests
        given += ["--prompt-disk", "0"]
    options = parser().parse_args(["serve", "--device", "cpu", "--log-level", "error", *given])
    check_options(options)
    sockets = sockets_of("localhost", 0)
    with commands.served_by(options) as served:
        server = server_of(served, options, key_of(options))
        thread = threading.Thread(target=server.run, args=(sockets,))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://localhost:{sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def process_at(*arguments: object) -> Iterator[tuple[Forked, str]]:
    """The process and the URL of `serve` with these arguments: its threads share no lock with the clients."""
    port = free_port()
    reader, writer = os.pipe()
    with open(os.devnull) as none, open(reader) as errors:
        given = ("serve", "--device", "cpu", "--port", port, *arguments)
        process = Forked(COMMAND, *given, files=(none, writer, writer))
        os.close(writer)
        rest = threading.Thread(target=errors.read)
        try:
            assert any("answers at" in line for line in errors)
            rest.start()
            yield process, f"http://localhost:{port}"
        finally:
            process.kill()
            process.wait(60)
            if rest.ident is not None:
                rest.join()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
)


def chat_checkpoint(folder: Path, architecture: str = "mixtral") -> Path:
    """With a tokenizer of letters, and a chat template without roles. It reads 256 tokens.

    A Mixtral: transformers' server does not look for parts of an answer, such as thinking, in its text.
    """
    with tiny_models.groups_of_32():
        tiny_models.tiny_model(architecture, head_dim=32, vocab_size=27).save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


def printable_checkpoint(folder: Path, **settings: object) -> Path:
    """As that of `chat_checkpoint`, with a tokenizer of the printable characters, an end and lines.

    Args:
        settings: of the tokenizer.
    """
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("mixtral", head_dim=32, vocab_size=97)
    model.generation_config.eos_token_id = 95
    model.save_pretrained(folder)
    ends = {"unk_token": "<end>", "eos_token": "<end>", "chat_template": TEMPLATE}
    tokenizer = tokenizer_of([*map(chr, range(32, 127)), "<end>", "\n"], **ends | settings)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.save_pretrained(folder)
    return folder


def last_until_the_server_ends(step: int, seconds: float = 60) -> None:
    """The engine's step of this number lasts until the server ends, for so many seconds at most: how many
    tokens a client then sees does not depend on the load."""
    run = EngineThread._run

    def lasting(self: EngineThread) -> None:
        take, steps = self._engine.step, itertools.count(1)

        def one() -> None:
            take()
            end = time.monotonic() + seconds * (next(steps) == step)
            while not self._closed and time.monotonic() < end:
                time.sleep(0.01)

        self._engine.step = one
        run(self)

    EngineThread._run = lasting


def letters() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of letters, with `TEMPLATE`."""
    return tokenizer_of(LETTERS, unk_token="?", chat_template=TEMPLATE)


@functools.cache
def quantised(checkpoint):
    return torch_moe_mps.from_pretrained(checkpoint, bits=4, group_size=32)


def expected_text(checkpoint, prompt: str, tokens: int, **settings: object) -> str:
    model = quantised(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False} | settings
    with torch.no_grad():
        output = model.generate(ids, **given)
    text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(text) >= tokens / 2
    return text


def said(text: str | list) -> list[dict]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]
