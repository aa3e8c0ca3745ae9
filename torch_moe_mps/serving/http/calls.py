"""Tool calls of earlier turns, in the form that a chat template takes.

Templates differ in arguments, ids, the number of calls in a message, and content next to calls. For a form
that they do not take, some raise, and some render calls without their name or in Python's syntax, or no
content. A probe finds the form.
"""

import hashlib
import itertools
import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Ids = Literal["any", "short", "named"]
Content = Literal["beside", "thought", "apart"]
_SHORT = re.compile(r"[a-zA-Z0-9]{9}")
# {id of a call of the probe, shorter or longer than a template's own: number in its name and arguments}
_CONTENT = "probe_content"
_PROBE = {"a": 1, "call_0123456789abcdef": 2}


@dataclass(frozen=True)
class CallForm:
    """Form of tool calls.

    Args:
        arguments: an object, or its JSON as text.
        ids: any text; "short", of 9 letters and digits; "named", the function's name with the number of the
            call, which templates render in place of the name.
        is_single: True for one call a message.
        content: of a message with calls: "beside" them, "thought" for the end of the message's reasoning if
            it has some, or "apart" for a message of its own before it.
    """

    arguments: Literal["object", "text"] = "object"
    ids: Ids = "any"
    is_single: bool = False
    content: Content = "beside"

    def new_id(self) -> str:
        """Id of a call to which the model gives none."""
        digits = uuid.uuid4().hex
        return digits[:9] if self.ids == "short" else f"call_{digits}"

    def convert(self, messages: list[Message]) -> list[Message]:
        """Messages with calls and ids in this form. Ids that have it are kept, and results get a name."""
        converted, ids, number = list[Message](), dict[str, str](), itertools.count()
        names = dict[str, str]()
        for message in messages:
            if "tool_calls" in message:
                names |= {call.get("id"): call["function"]["name"] for call in message["tool_calls"]}
                calls = [self._call(call, ids, next(number)) for call in message["tool_calls"]]
                *before, message = self._with_content(message)
                converted += before
                message = message | {"tool_calls": calls}
            elif "tool_call_id" in message:
                call_id = message["tool_call_id"]
                named = {"name": names[call_id]} if call_id in names else {}
                message = named | message | {"tool_call_id": ids.get(call_id, call_id)}
            converted.append(message)
        return [*_one_by_one(converted)] if self.is_single else converted

    def _with_content(self, message: Message) -> list[Message]:
        """The messages for one with calls: its content stands before, inside or in its reasoning."""
        content, thought = message["content"], message.get("reasoning_content")
        if content and self.content == "apart":
            return [{"role": message["role"], "content": content}, message | {"content": []}]
        if content and thought and self.content == "thought":
            text = "\n\n".join((thought, *(part["text"] for part in content if part["type"] == "text")))
            others = [part for part in content if part["type"] != "text"]
            return [message | {"content": others, "reasoning_content": text}]
        return [message]

    def _call(self, call: dict[str, Any], ids: dict[str, str], number: int) -> dict[str, Any]:
        function = call["function"]
        converted = {name: value for name, value in call.items() if name != "text"}
        if self.arguments == "text":
            text = call.get("text")
            if text is None and not isinstance(text := function["arguments"], str):
                text = json.dumps(text, ensure_ascii=False)
            converted["function"] = function | {"arguments": text}
        if isinstance(call_id := call.get("id"), str):
            converted["id"] = ids[call_id] = self._id(call_id, function["name"], number)
        return converted

    def _id(self, call_id: str, name: str, number: int) -> str:
        if self.ids == "short" and not _SHORT.fullmatch(call_id):
            return hashlib.sha256(call_id.encode()).hexdigest()[:9]
        if self.ids == "named" and not re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", call_id):
            return f"functions.{name}:{number}"
        return call_id


def _one_by_one(messages: list[Message]) -> Iterator[Message]:
    """Yields messages with one call each, followed by its result."""
    rest = [*messages]
    while rest:
        message, *rest = rest
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = [*itertools.takewhile(lambda each: each["role"] == "tool", rest)]
        rest = rest[len(results) :]
        for call in calls:
            yield message | {"tool_calls": [call]}
            message = {"role": message["role"], "content": []}
            call_results = [each for each in results if each.get("tool_call_id") == call.get("id")]
            results = [each for each in results if each not in call_results]
            yield from call_results
        yield from results


def call_form(render: Callable[[list[Message]], str]) -> CallForm:
    """First form whose calls a template renders whole, with the content next to them if any form has it.

    The simplest form if there is none.

    Args:
        render: text of messages.
    """
    ids: tuple[Ids, ...] = "any", "short", "named"
    arguments: tuple[Literal["object", "text"], ...] = "object", "text"
    contents: tuple[Content, ...] = "beside", "thought", "apart"
    forms = [
        CallForm(argument_form, named, is_single, content)
        for named, content, argument_form, is_single in itertools.product(
            ids, contents, arguments, (False, True)
        )
    ]
    for content, form in itertools.product((_CONTENT, ""), forms):
        try:
            texts = [render(form.convert(_probe(content, thinks))) for thinks in {bool(content), False}]
        except Exception:  # a template may raise anything for a form that it does not take
            continue
        shows = itertools.product(texts, _PROBE.values())
        if all(content in text and _shows(text, number, form.arguments) for text, number in shows):
            return form
    return CallForm()


def _shows(text: str, number: int, arguments: str) -> bool:
    """True if a text has a call of the probe, with arguments in JSON or a syntax of the template's own."""
    function = _function(number)
    if arguments == "text":
        return function["name"] in text and json.dumps(function["arguments"]) in text
    words = function["name"], f"key_{number}", f"value_{number}"
    return all(word in text for word in words) and repr(function["arguments"]) not in text


def _function(number: int) -> dict[str, Any]:
    return {"name": f"probe_{number}", "arguments": {f"key_{number}": [f"value_{number}"]}}


def _probe(content: str, thinks: bool) -> list[Message]:
    """A conversation whose last turn has two calls and their results, and perhaps content and reasoning."""

    def message(role: str, **more: Any) -> Message:
        return {"role": role, "content": [{"type": "text", "text": "a"}]} | more

    calls = [{"id": call_id, "type": "function", "function": _function(n)} for call_id, n in _PROBE.items()]
    results = [message("tool", tool_call_id=call_id) for call_id in _PROBE]
    answer: Message = {"role": "assistant", "content": [], "tool_calls": calls}
    if content:
        answer["content"] = [{"type": "text", "text": content}]
    if thinks:
        answer["reasoning_content"] = "a"
    return [message("user"), answer, *results]
