"""Thread-safe tokenizer and chat template of a model."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ...models.programs import variables_of
from .calls import CallForm, Message, call_form
from .protocols.forms import form_of
from .request import Chat, Tool

# For a model that knows no roles: an answer continues what is above it, and a message begins a line.
_CONTINUED = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role != 'user' and not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
# Variables of a chat template that the chat itself sets, and arguments of what applies it.
_OF_THE_CHAT = {
    "add_generation_prompt", "continue_final_message", "conversation", "messages", "return_dict",
    "return_tensors", "tokenize", "tools",
}  # fmt: skip
NOT_READ = (
    "Tool calls of this model come as text: the form in which its chat template writes them is not known."
)
NOT_SHOWN = "Tools of requests are left out: the chat template of this model shows none."
# {type of a part: what a processor has that reads it}
READERS = {"image": "image_processor", "audio": "feature_extractor"}


class ChatTemplate:
    """Converts texts and chats to model inputs.

    Args:
        processor: a tokenizer, or a processor that contains one.
        name: of the model, for warnings.

    Attributes:
        form: answer format of tool calls and reasoning; None for plain text.
    """

    def __init__(self, processor: Any, name: str):
        self.processor, self._lock = processor, threading.Lock()
        self.tokenizer = getattr(processor, "tokenizer", processor)
        if getattr(processor, "chat_template", None) is None:
            print(f"{name} has no chat template: it continues the text of the messages", file=sys.stderr)
            processor.chat_template = _begun_by(self.tokenizer) + _CONTINUED
        self.form = form_of(processor)

    @functools.cached_property
    def hidden(self) -> set[int]:
        """Special tokens without text: all except the marks of the answer format."""
        marks = set() if self.form is None else self.form.marks
        known = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {number for number, token in known.items() if token.special and token.content not in marks}

    @functools.cached_property
    def tools_warning(self) -> str | None:
        """Warning for requests with tools: the model reads no tools, or its calls are not read."""
        if not self._shows_tools:
            return NOT_SHOWN
        return NOT_READ if self.form is None else None

    @functools.cached_property
    def _shows_tools(self) -> bool:
        """True if the chat template renders tools."""
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        probe = Tool("probe", "", {"type": "object", "properties": {}})
        try:
            without, with_tool = (
                self.apply(Chat(messages, tools), messages)["input_ids"] for tools in ([], [probe])
            )
        except Exception:  # a template that refuses so short a chat says nothing about tools
            return True
        return not torch.equal(tensor(without), tensor(with_tool))

    @functools.cached_property
    def call_form(self) -> CallForm:
        """Form of earlier tool calls."""

        def render(messages: list[Message]) -> str:
            contents, more = self._contents(messages), {"add_generation_prompt": True, "tokenize": False}
            return str(self.processor.apply_chat_template(contents, **more))

        return call_form(render)

    def _contents(self, messages: list[Message]) -> list[Message]:
        """Messages whose contents are texts for a tokenizer, and lists of parts for a processor."""
        if self.processor is not self.tokenizer:
            return messages
        return [message | {"content": _text_of(message)} for message in messages]

    def reads(self, kind: str) -> bool:
        """True if messages may have parts of this kind: image or audio."""
        return hasattr(self.processor, READERS[kind])

    @functools.cached_property
    def variables(self) -> set[str]:
        """Chat template variables that a request may set."""
        templates = self.processor.chat_template
        templates = templates.values() if isinstance(templates, dict) else [templates]
        return {name for template in templates for name in variables_of(template)} - _OF_THE_CHAT

    @contextlib.contextmanager
    def tokenizing(self) -> Iterator[Any]:
        """Context that yields the tokenizer. Fast tokenizers are shared by threads.

        Processors and slow tokenizers are used by one thread at a time.
        """
        is_shared = self.tokenizer is self.processor and getattr(self.tokenizer, "is_fast", False)
        with contextlib.nullcontext() if is_shared else self._lock:
            yield self.tokenizer

    def apply(self, chat: Chat, messages: list[Message]) -> dict[str, Any]:
        """Model inputs of a chat: tensors [1, T] or lists [T].

        Args:
            messages: of the chat, with decoded images and audio in place of URLs.
        """
        is_text = self.processor is self.tokenizer
        shape = {"tokenize": True, "return_dict": True, "return_tensors": None if is_text else "pt"}
        inputs = self._rendered(chat, messages, not chat.goes_on, chat.goes_on, **shape)
        if is_text:
            return {**inputs}
        return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}

    def begun(self, chat: Chat, messages: list[dict[str, Any]]) -> str:
        """Start of the answer at the end of a chat's prompt.

        It is what the generation prompt, or a last message that goes on, adds to the messages before it.
        """
        if self.form is None and not chat.goes_on:
            return ""

        def text(messages: list[dict[str, Any]], begins: bool, goes_on: bool = False) -> str:
            return str(self._rendered(chat, messages, begins, goes_on, tokenize=False)) if messages else ""

        before = messages[:-1] if chat.goes_on else messages
        plain, header = text(before, False), text(before, True)
        last = text(messages, False, True) if chat.goes_on else header
        added, start = _added(plain, last), _added(plain, header)
        return added.removeprefix(start) if self.form is None else self.form.begun(added, start)

    def _rendered(
        self, chat: Chat, messages: list[dict[str, Any]], begins: bool, goes_on: bool, **shape: Any
    ) -> Any:
        """Messages in the chat template: a text, or model inputs.

        Args:
            begins: True to end with the generation prompt.
            goes_on: True to leave the last message open.
        """
        more = {name: value for name, value in chat.variables.items() if name in self.variables}
        contents = self._contents(self.call_form.convert(messages))
        with self.tokenizing():
            return self.processor.apply_chat_template(
                contents,
                tools=[tool.function for tool in chat.tools] or None,
                add_generation_prompt=begins,
                continue_final_message=goes_on,
                **shape,
                **more,
            )


def _added(start: str, text: str) -> str:
    """Text behind the common prefix with another text."""
    return text[len(os.path.commonprefix([start, text])) :]  # noqa: RUF071 (texts, no paths)


def tensor(value: Any) -> torch.Tensor:
    """Input tensor [1, T] of a list [T]."""
    return value if isinstance(value, torch.Tensor) else torch.tensor([value], dtype=torch.long)


def _begun_by(tokenizer: Any) -> str:
    """BOS token that the tokenizer prepends, if the chat template starts with it."""
    first = tokenizer("a")["input_ids"][:1]
    return "{{ bos_token }}" if first == [tokenizer.bos_token_id] else ""


def _text_of(message: Message) -> str:
    return "\n".join(part["text"] for part in message["content"])
