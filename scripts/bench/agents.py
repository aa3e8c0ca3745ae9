"""Coding agents that ask a server as Codex CLI 0.171.0 and Claude Code 2.1.197 do.

Their requests have the shape of those that these clients sent to this server over a small task: paths,
fields, numbers of tools and turns, lengths of instructions, tools and results. The words are others.
"""

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from paths import REPOSITORY

WORDS = (REPOSITORY / "LICENSE").read_text().split()
JSON = {"content-type": "application/json"}
COMMANDS = ["ls", "cat", "git status", "git diff", "make", "pytest"]
TRIES = 20  # of a request, until it counts as lost
LONGEST = {"call": 64, "text": 16}  # tokens of an answer


class Shape(NamedTuple):
    """A client's requests, in characters.

    Args:
        tools: how many, and of all together.
        instructions: of each text in front of the first message, of the client and the session.
        message: of a person's message.
        results: of the calls for one message; a text ends them.
    """

    path: str
    tools: tuple[int, int]
    instructions: tuple[int, ...]
    message: int
    results: tuple[int, ...]


CODEX = Shape("/v1/responses", (9, 18693), (17600, 2200, 400), 70, (340, 10840, 800, 90, 10840))
CLAUDE = Shape("/v1/messages", (24, 64493), (70, 60, 5880, 6220), 400, (330, 26370, 1400, 230, 1630))


def words(draws: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += draws.choice(WORDS) + " "
    return text[:characters].rstrip() or "a"


class Failed(Exception):
    """A request without a whole answer, which is asked again."""


class Left(Exception):
    """A request that its client has given up."""


@dataclass
class Asked:
    """A request that was answered.

    Attributes:
        said: the texts and calls of the answer, as `parts`.
        sent, ended: when.
        tokens, cached: of the prompt, and how many of them were kept.
        ids: of the prompt, once somebody knows them.
    """

    agent: int
    body: dict[str, Any]
    said: list[tuple[str, str]]
    sent: float
    ended: float
    tokens: int
    cached: int
    path: str
    ids: Any = None


@dataclass
class Played:
    """The hour so far.

    Attributes:
        again, left, lost: requests that failed and were asked again, that their clients gave up, and that had
            no answer at all.
    """

    asked: list[Asked] = field(default_factory=list)
    again: int = 0
    left: int = 0
    lost: int = 0
    conversations: int = 0


class Server(Protocol):
    """A server that answers at a port, which it may stop to do for a while."""

    port: int
    context: int

    def wait(self) -> None:
        """Waits until it answers."""


class Agent(threading.Thread):
    """A client that asks one request after the other.

    Args:
        requests: that it asks.
        shrink: how many times shorter its texts are.
    """

    def __init__(
        self, number: int, shape: Shape, server: Server, played: Played, requests: int, shrink: float
    ):
        super().__init__(name=f"agent {number}", daemon=True)
        self.number, self.shape, self.server, self.played = number, shape, server, played
        self.requests, self.shrink, self.draws = requests, shrink, random.Random(number)
        of_client = random.Random(shape.path)  # the same in all conversations of a client
        count, characters = shape.tools
        self.tools = [self._tool(of_client, n, characters / shrink / count - 200) for n in range(count)]
        self.instructions = [self._words(of_client, size) for size in shape.instructions]

    def _words(self, draws: random.Random, size: float) -> str:
        return words(draws, max(1, int(size / self.shrink)))

    def _tool(self, draws: random.Random, number: int, characters: float) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": {"cmd": {"enum": COMMANDS}},
            "required": ["cmd"],
            "additionalProperties": False,
        }
        about = {"name": f"tool_{number}", "description": words(draws, max(1, int(characters)))}
        if self.shape is CODEX:
            return about | {"type": "function", "strict": False, "parameters": schema}
        return about | {"input_schema": schema}

    def run(self) -> None:
        while self.requests > 0:
            self.played.conversations += 1
            self._converse()

    def _converse(self) -> None:
        """A conversation until the context is full."""
        items = self._beginning()
        while self.requests > 0:
            items.append(self._message(self._words(self.draws, self.shape.message)))
            for size in (*self.shape.results, None):
                self.requests -= 1
                asked = self._ask(self._body(items, size is not None))
                if asked is None or asked.tokens + LONGEST["text"] > self.server.context * 0.75:
                    return
                items += self._said(asked.said)
                if size is not None:
                    items += self._results(asked.said, self._words(self.draws, size))
                if self.requests <= 0:
                    return

    # Bodies

    def _beginning(self) -> list[dict[str, Any]]:
        if self.shape is CODEX:
            first, *rest = self.instructions
            parts = [{"type": "input_text", "text": text} for text in rest]
            return [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": first}]},
                {"type": "message", "role": "developer", "content": parts},
            ]
        return []

    def _message(self, text: str) -> dict[str, Any]:
        if self.shape is CODEX:
            return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    def _body(self, items: list[dict[str, Any]], calls: bool) -> dict[str, Any]:
        most = LONGEST["call" if calls else "text"]
        about: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0.0, "tools": self.tools}
        if self.shape is CODEX:
            choice = "required" if calls else "auto"
            about |= {"tool_choice": choice, "parallel_tool_calls": False, "store": False}
            return about | {"input": [*items], "max_output_tokens": most}
        choice = {"type": "any" if calls else "auto", "disable_parallel_tool_use": True}
        system = [{"type": "text", "text": text} for text in self.instructions]
        return about | {"tool_choice": choice, "system": system, "messages": [*items], "max_tokens": most}

    def _said(self, said: list[tuple[str, str]]) -> list[dict[str, Any]]:
        """An answer as a part of the next request."""
        if self.shape is CODEX:
            return [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": value}]}
                if name == "text"
                else {"type": "function_call", "call_id": f"c{n}", "name": name, "arguments": value}
                for n, (name, value) in enumerate(said)
            ]
        blocks = [
            {"type": "text", "text": value}
            if name == "text"
            else {"type": "tool_use", "id": f"c{n}", "name": name, "input": json.loads(value)}
            for n, (name, value) in enumerate(said)
        ]
        return [{"role": "assistant", "content": blocks or [{"type": "text", "text": "a"}]}]

    def _results(self, said: list[tuple[str, str]], text: str) -> list[dict[str, Any]]:
        calls = [f"c{n}" for n, (name, _) in enumerate(said) if name != "text"]
        if self.shape is CODEX:
            made = [{"type": "function_call_output", "call_id": call, "output": text} for call in calls]
            return made or [self._message(text)]
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": text} for call in calls]
        return [{"role": "user", "content": blocks}] if blocks else [self._message(text)]

    # Answers

    def _ask(self, body: dict[str, Any]) -> Asked | None:
        """Asks until there is a whole answer; None for none."""
        leaves = self.draws.random() < 0.08
        for _ in range(TRIES):
            self.server.wait()
            sent = time.monotonic()
            try:
                said, tokens, cached = self._answer(body, self.draws.uniform(0.05, 1.5) if leaves else None)
            except Left:
                self.played.left += 1
                leaves = False
                continue
            except (Failed, OSError, http.client.HTTPException, ValueError):
                self.played.again += 1
                time.sleep(0.2)
                continue
            asked = Asked(self.number, body, said, sent, time.monotonic(), tokens, cached, self.shape.path)
            self.played.asked.append(asked)
            return asked
        self.played.lost += 1
        return None

    def _answer(self, body: dict[str, Any], leaves: float | None) -> tuple[list[tuple[str, str]], int, int]:
        """The answer to a request, the tokens of its prompt, and how many of them were kept.

        Args:
            leaves: seconds after which the client has had enough.

        Raises: Left, Failed, OSError.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        begun = time.monotonic()
        try:
            connection.request(
                "POST", self.shape.path, json.dumps(body), {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise Failed(answer.read())
            events = []
            for line in answer:
                if leaves is not None and time.monotonic() - begun > leaves:
                    raise Left
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
            return self._read(events)
        finally:
            connection.close()

    def _read(self, events: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], int, int]:
        kinds = [event["type"] for event in events]
        if self.shape is CODEX:
            if not kinds or kinds[-1] not in ("response.completed", "response.incomplete"):
                raise Failed(kinds[-1:])
            whole = events[-1]["response"]
            usage = whole["usage"]
            return parts(whole), usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        if not kinds or kinds[-1] != "message_stop":
            raise Failed(kinds[-1:])
        blocks: dict[int, dict[str, Any]] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks[event["index"]] = event["content_block"] | {"input": ""}
            elif event["type"] == "content_block_delta":
                name = "text" if "text" in event["delta"] else "input"
                blocks[event["index"]][name] += event["delta"].get("text", event["delta"].get("partial_json"))
        for block in blocks.values():
            block["input"] = json.loads(block["input"] or "{}")
        usage = events[-2]["usage"]
        cached = usage["cache_read_input_tokens"]
        return parts({"content": [*blocks.values()]}), usage["input_tokens"] + cached, cached


def parts(whole: dict[str, Any]) -> list[tuple[str, str]]:
    """The texts and calls of a Response or a Message."""
    made = []
    for item in whole.get("output", whole.get("content", [])):
        match item["type"]:
            case "message":
                made.append(("text", "".join(part["text"] for part in item["content"])))
            case "text":
                made.append(("text", item["text"]))
            case "function_call":
                made.append((item["name"], json.dumps(json.loads(item["arguments"]))))
            case "tool_use":
                made.append((item["name"], json.dumps(item["input"])))
    return made
