"""A server whose model says what a test tells it to: what clients send and get, at no cost of a model."""

import contextlib
import json
import socket
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import transformers
import uvicorn
from tokenizers import decoders

from support.checkpoints import tokenizer_of
from torch_moe_mps.serving.engine.job import Counts, Job
from torch_moe_mps.serving.http.app import Access, Server
from torch_moe_mps.serving.http.connections import config_of
from torch_moe_mps.serving.http.reading import RequestReading
from torch_moe_mps.serving.http.served import Served
from torch_moe_mps.serving.http.template import ChatTemplate

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
# ChatML's messages; a system message elsewhere than in front is refused, as by Qwen 3.5's template.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }} "
    "{% for name, value in call.function.arguments | items %}{{ name }}={{ value }};{% endfor %}"
    "</tool_call>{% endfor %}"
    "{% if not (loop.last and message.role == 'assistant') %}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


class Scripted:
    """In place of an engine's thread: it says texts, in turn, and then the token that ends an answer.

    Attributes:
        says: the texts; the last one again and again.
        cached, of_disk: tokens of each prompt that are said to be kept, and how many of them on a disk.
        wait: called before a prompt is read.
        jobs, prompts: what was asked for.
    """

    max_sequences, death, disk, memory = 1, None, None, None

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.clear()

    def clear(self) -> None:
        self.says: list[str] = [""]
        self.cached = self.of_disk = 0
        self.wait: Callable[[Job], None] = lambda job: None
        self.jobs: list[Job] = []
        self.prompts: list[str] = []
        self.counts = Counts()

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        self.prompts.append(self._tokenizer.decode(job.inputs["input_ids"][0]))
        text = self.says[min(len(self.jobs), len(self.says)) - 1]
        threading.Thread(target=self._say, args=(job, text)).start()

    def _say(self, job: Job, text: str) -> None:
        job.usage.cached_tokens, job.usage.disk_tokens = self.cached, self.of_disk
        self.wait(job)
        ids = self._tokenizer(text, add_special_tokens=False).input_ids
        for number, token in enumerate([*ids, self._tokenizer.eos_token_id]):
            if job.is_cancelled:
                return job.on_end("cancelled")
            if number == job.config.max_new_tokens:
                return job.on_end("length")
            if job.on_token(token):
                break
        job.on_end("stop")

    def prompts_held(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        for job in self.jobs:
            job.cancel()


def tokenizer() -> Any:
    """A tokenizer of the printable characters and of marks, with `TEMPLATE`."""
    characters = [*map(chr, range(32, 127)), "\n", "é", "☃", "｜", "▁"]
    made = tokenizer_of([*characters, *MARKS], unk_token="☃", eos_token="<|im_end|>", chat_template=TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": [*MARKS]})
    made.backend_tokenizer.decoder = decoders.Fuse()
    return made


def ask(here: "Here", path: str, body: object = None) -> tuple[int, dict]:
    """Status and body of the answer to a POST, or to a GET without a body."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    asked = urllib.request.Request(here.url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


class Here:
    """A server in this process."""

    def __init__(self, url: str, generator: Scripted, served: Served, reading: RequestReading):
        self.url, self.generator, self.served, self.reading = url, generator, served, reading

    def says(self, *texts: str, cached: int = 0, disk: int = 0) -> Scripted:
        """Lets the model say texts from now on."""
        self.generator.clear()
        self.generator.says, self.generator.cached, self.generator.of_disk = [*texts], cached, disk
        return self.generator


@contextlib.contextmanager
def templated(here: Here, template: str) -> Iterator[ChatTemplate]:
    """Block in which the server's model has a chat template."""
    own, processor = here.served.template, here.served.template.processor
    processor.chat_template = template
    here.served.template = ChatTemplate(processor, "m")
    try:
        yield here.served.template
    finally:
        here.served.template, processor.chat_template = own, TEMPLATE


@contextlib.contextmanager
def server(context: int = 4096, **access: Any) -> Iterator[Here]:
    words = tokenizer()
    generator = Scripted(words)
    config = types.SimpleNamespace(vocab_size=len(words))
    config.get_text_config = lambda: config
    settings = transformers.GenerationConfig(eos_token_id=words.eos_token_id)
    model = types.SimpleNamespace(
        config=config, generation_config=settings, can_generate=lambda: True, named_modules=lambda: ()
    )
    model.parameters = model.buffers = lambda: []
    served = Served("scripted", model, words, context, generator)
    paths = Server(served, Access(**access))
    listener = socket.create_server(("127.0.0.1", 0))
    runs = uvicorn.Server(config_of(paths.application(), log_level="error"))
    thread = threading.Thread(target=runs.run, args=([listener],))
    thread.start()
    try:
        while not runs.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Here(f"http://127.0.0.1:{listener.getsockname()[1]}", generator, served, paths.reading)
    finally:
        runs.should_exit = True
        thread.join()
