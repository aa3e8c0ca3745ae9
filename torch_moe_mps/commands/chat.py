"""`chat MODEL`: a conversation in the terminal, with what generates for the server.

Ctrl-C ends the answer; at the prompt it ends the chat, as Ctrl-D does.
"""

import argparse
import contextlib
import queue
import sys
import threading
from typing import Any

from .._interrupts import at_ctrl_c
from .._text import first_line
from ..serving.engine.defaults import choice
from ..serving.http.answer import Answer, CallEnd, Event, Piece, ToolCall
from ..serving.http.answers import Answers
from ..serving.http.preparing import prepare
from ..serving.http.request import Chat, Refused, Request
from ..serving.http.served import Served
from .serving import served_by
from .settings import read_settings, settings_of

_HELP = """\
!clear              begins a new conversation
!continue           goes on with an answer that was cut off
!set FLAG=VALUE ... changes arguments of generate(), such as max_new_tokens=1000 or temperature=0.6
!status             shows the model and what was set
!exit               ends the chat, as Ctrl-D does; Ctrl-C ends an answer"""


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, ImportError with a one-line message."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (edits what is typed)
    with served_by(options) as served:
        print(f"{served.name} is loaded. !help lists what can be typed beside messages.\n")
        _Conversation(served, settings_of(options), options).run()


class _Conversation:
    def __init__(self, served: Served, settings: dict[str, Any], options: argparse.Namespace):
        self.served, self.settings, self.system = served, settings, options.system_prompt
        self.messages: list[dict[str, Any]] = []
        self._clear()

    def run(self) -> None:
        """Reads and answers lines until the input ends or `!exit`."""
        while (line := self._read()) is not None:
            command, _, rest = line.strip().partition(" ")
            match command:
                case "":
                    continue
                case "!exit":
                    return
                case "!clear":
                    self._clear()
                case "!set":
                    self._set(rest.split())
                case "!status":
                    print(f"{self.served.name}: {self.settings}\n")
                case "!continue" if self.is_cut and self.messages[-1]["role"] == "assistant":
                    self._answer()
                case "!help":
                    print(f"{_HELP}\n")
                case "!continue":
                    ended = any(message["role"] == "assistant" for message in self.messages)
                    why = "the last one has ended" if ended else "there is none yet"
                    print(f"!continue goes on with an answer that was cut off: {why}\n")
                case _ if command.startswith("!"):
                    print(f"{command} is not a command: !help lists them\n")
                case _:
                    self.messages.append(_message("user", line))
                    self._answer()

    def _read(self) -> str | None:
        """The next line; None at the end."""
        with at_ctrl_c():
            try:
                return input("<you>:\n")
            except UnicodeDecodeError as error:
                print(f"messages must be in UTF-8: {error}\n")
                return ""
            except (EOFError, KeyboardInterrupt):
                print()
                return None

    def _clear(self) -> None:
        self.messages = [_message("system", self.system)] if self.system else []
        self.is_cut = False  # the last answer

    def _set(self, texts: list[str]) -> None:
        try:
            self.settings |= read_settings(texts, "!set")
        except ValueError as error:
            print(f"{error}\n")

    def _answer(self) -> None:
        """Shows the answer to the messages, and adds it to them."""
        goes_on = self.messages[-1]["role"] == "assistant"
        prompt = Chat([*self.messages], goes_on=goes_on)
        request = Request([prompt], "messages", choice(self.settings))
        shown: queue.SimpleQueue[Event] = queue.SimpleQueue()
        prepared: list[Answers] = []
        is_stopped = threading.Event()

        def stop() -> None:
            is_stopped.set()
            for answers in prepared:
                answers.cancel()

        with at_ctrl_c(stop):
            print(f"<{self.served.name}>:", flush=True)
            try:
                prepared.append(prepare(self.served, request, lambda number, event: shown.put(event)))
            except Exception as error:  # from the typed text, or from the chat template
                print(f"{error.message if isinstance(error, Refused) else first_line(error)}\n")
                if not goes_on:
                    self.messages.pop()
                return
            if is_stopped.is_set():
                prepared[0].cancel()
            prepared[0].submit(self.served.generator)
            _show(prepared[0].answers[0], shown)
        self._ended(prepared[0], goes_on)

    def _ended(self, answers: Answers, goes_on: bool) -> None:
        """Prints how an answer ended, and adds it to the conversation.

        Args:
            goes_on: True if it continues the last answer.
        """
        (answer,) = answers.answers
        if isinstance(answer.reason, Exception):
            print(f"\n{first_line(answer.reason) or type(answer.reason).__name__}\n")
            return
        count, seconds = answer.tokens, answer.times.generating
        speed = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
        self.is_cut = answer.reason != "stop"
        cut = "; !continue goes on" if answer.reason == "length" else ""
        print(f"\n({count} tokens{speed}{cut})\n")
        if goes_on:
            self.messages[-1]["content"][0]["text"] += answer.text
        else:
            self.messages.append(_message("assistant", answer.text))


def _show(answer: Answer, shown: "queue.SimpleQueue[Event]") -> None:
    """Writes an answer as it comes: reasoning is grey on a terminal."""
    is_grey, is_terminal = False, sys.stdout.isatty()
    while answer.reason is None:
        for item in answer.read(shown.get()):
            match item:
                case ToolCall():
                    text = f"\n{item.name}("
                case CallEnd():
                    text = ")"
                case _:
                    text = item.text
            thinks = isinstance(item, Piece) and item.kind == "reasoning"
            if thinks != is_grey:
                is_grey = thinks
                mark = ("\033[2m" if thinks else "\033[0m") if is_terminal else ""
                text = f"{mark}{text}" if thinks else f"{mark}\n\n{text}"
            print(text, end="", flush=True)
    if is_grey and is_terminal:
        print("\033[0m", end="")


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}
