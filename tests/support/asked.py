"""Requests of agents and other clients to a scripted server, and what its answers say.

tests/serving/http/agents/ has bodies of requests that Codex CLI 0.171.0 and Claude Code 2.1.197 sent to this
server, two turns and a title of each, with short texts in place of their own, and fewer tools and arguments.
"""

import json
import urllib.error
import urllib.request

from support.processes import REPOSITORY

SKY = {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]}


CALL = '<tool_call>\n{"name": "look", "arguments": {"of": "sky"}}\n</tool_call>'


THOUGHT = "<think>\nhm\n</think>\n\n"


def post(here, path: str, body: object) -> tuple[int, str]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(here.url + path, content, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def recorded(name: str) -> list[dict]:
    return json.loads((REPOSITORY / "tests/serving/http/agents" / f"{name}.json").read_text())


def events_of(text: str) -> list[dict]:
    """The data of server-sent events, whose names are their types."""
    made = []
    for event in text.strip().split("\n\n"):
        if not event.startswith(":"):
            name, data = event.split("\n")
            made.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {made[-1]['type']}"
    return made


def prompt_ids(here, number: int) -> list[int]:
    return here.generator.jobs[number].inputs["input_ids"][0].tolist()


LOOK = {"name": "look", "parameters": SKY}


class Spelled:
    """In place of a reader: each character of an answer is one step of it."""

    is_thinking = False

    def __init__(self, form, sink, schemas):
        self._sink = sink

    def feed(self, text):
        steps = {"(": lambda: self._sink.call("look", ""), ")": lambda: self._sink.end_call(True)}
        for letter in text:
            if letter in steps:
                steps[letter]()
            elif letter.isupper():
                self._sink.text(letter)
            elif letter.strip():
                self._sink.arguments(letter)

    def end(self, is_cut):
        pass
