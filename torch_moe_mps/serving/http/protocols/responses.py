"""OpenAI's responses API, as Codex uses it: `/v1/responses`."""

import time
from typing import Any

from ...engine.ranges import integer
from ..answer import Answer, Arguments, CallEnd, Item, Piece, ToolCall, new_id
from ..answers import Answers
from ..request import (
    HINTS,
    OBJECT,
    SHARED,
    TEXT,
    Chat,
    Fields,
    Refused,
    Request,
    Tool,
    common,
    instance,
    wrong,
)
from ..served import Served
from ..structured import schema_of
from . import conversation
from .chat import MOST_LOGPROBS, logprobs_of
from .protocol import AnswerWriter, Protocol, Text, blocks, event, input_of

_INCLUDED = "message.output_text.logprobs"
_FIELDS = Fields(
    SHARED
    | {
        "chat_template_kwargs": OBJECT,
        "include": instance(list, "a list of texts"),
        "instructions": TEXT,
        "max_output_tokens": integer(1),
        "reasoning": OBJECT,
        "text": OBJECT,
        "top_logprobs": integer(0, MOST_LOGPROBS),
    },
    needed="input",
    others=HINTS | {"tool_choice", "tools"},
    nothing={
        "background": [False],
        "conversation": [],
        "previous_response_id": [],
        "prompt": [],
        "response_format": [],
        "truncation": ["disabled"],
    },
)

# Fields of a request that its response says again.
_SAID_AGAIN = (
    "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature",
    "text", "tool_choice", "tools", "top_p",
)  # fmt: skip


class Responses(Protocol):
    path = "/v1/responses"

    def read(self, body: dict[str, Any], served: Served) -> Request:
        """Request of a body for /v1/responses. Raises: Refused for fields that it has wrong."""
        _FIELDS.check(body, self.path, served.say_once)
        messages = _items(body["input"], served)
        if body.get("instructions"):
            system = {"role": "system", "content": [conversation.text_part(body["instructions"])]}
            messages = [system, *messages]
        messages = conversation.joined(messages)
        included = body.get("include") or []
        for name in included:
            if name != _INCLUDED:
                served.say_once(f"'include' of {name} is left out: this server has none")
        schema = schema_of((body.get("text") or {}).get("format"), "text.format")
        declared_tools = conversation.tools(body.get("tools"), "tools", served.say_once)
        tools, forced = conversation.chosen(body.get("tool_choice"), declared_tools)
        variables = conversation.effort((body.get("reasoning") or {}).get("effort"))
        variables |= body.get("chat_template_kwargs") or {}
        return Request(
            prompts=[Chat(messages, tools, variables, conversation.goes_on(messages, "input"))],
            prompt_field="input",
            max_tokens=body.get("max_output_tokens"),
            form=None if forced else schema,
            forced=forced,
            form_field="tool_choice" if forced else "text.format",
            is_parallel=body.get("parallel_tool_calls") is not False,
            logprobs=logprobs_of(body, _INCLUDED in included, f"'include' of {_INCLUDED}"),
            **common(body, _SAID_AGAIN),
        )

    def whole(self, request: Request, answers: Answers, served: Served) -> dict[str, Any]:
        answer = answers.answers[0]
        parts = blocks(answer.made)
        items = [
            _item(part, request.tools, answer.entries is not None, _is_cut(part, answer, part is parts[-1]))
            for part in parts
        ]
        return _response(new_id("resp_"), request, served) | _ending(answers, items)

    def writer(self, request: Request, answers: Answers, served: Served) -> AnswerWriter:
        return _ResponseEvents(request, answers, served)


class _ResponseEvents(AnswerWriter):
    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._response = _response(new_id("resp_"), self.request, self.served)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: Text | ToolCall | None = None
        self._id = ""

    def opening(self) -> str:
        started = {"response": self._response}
        return self._event("response.created", started) + self._event("response.in_progress", started)

    def item(self, number: int, item: Item) -> str:
        if not isinstance(item, Piece):
            return self._called(item)
        if isinstance(self._open, Text) and (self._open.kind == item.kind or not item.text):
            self._open.deltas.append(item)
            return self._delta(item)
        return self._close() + self._opened(item) + self._delta(item)

    def end(self) -> str:
        last = self._close(is_last=True)
        ending = self._response | _ending(self.answers, self._items)
        return last + self._event(f"response.{ending['status']}", {"response": ending})

    def failed(self, refused: Refused) -> str:
        error = {"code": refused.code or "server_error", "message": refused.message}
        failed = self._response | {"status": "failed", "error": error}
        return self._event("response.failed", {"response": failed})

    def _event(self, kind: str, data: dict[str, Any]) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1} | data, kind)

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._items)}

    def _opened(self, first: Piece) -> str:
        self._open = Text(first.kind, [first])
        empty = _item(Text(first.kind, []), {}, False, False)
        self._id = empty["id"]
        begun = self._event(
            "response.output_item.added",
            {"output_index": len(self._items), "item": empty | {"status": "in_progress", "content": []}},
        )
        part = {"content_index": 0, "part": empty["content"][0]}
        return begun + self._event("response.content_part.added", self._where | part)

    def _delta(self, item: Piece) -> str:
        data = self._where | {"content_index": 0, "delta": item.text}
        if item.kind == "reasoning":
            return self._event("response.reasoning_text.delta", data)
        entries = [entry.response_form() for entry in item.entries]
        return self._event("response.output_text.delta", data | {"logprobs": entries})

    def _close(self, is_last: bool = False) -> str:
        """Events at the end of the open item. A call that was still open is incomplete."""
        open_item, self._open = self._open, None
        if open_item is None:
            return ""
        answer = self.answers.answers[0]
        is_cut = _is_cut(open_item, answer, is_last)
        item = _item(open_item, self.request.tools, answer.entries is not None, is_cut) | {"id": self._id}
        if isinstance(open_item, ToolCall):
            return self._ended(item)
        (part,) = item["content"]
        data = self._where | {"content_index": 0}
        if open_item.kind == "reasoning":
            done = self._event("response.reasoning_text.done", data | {"text": part["text"]})
        else:
            texts = {"text": part["text"], "logprobs": part["logprobs"] or []}
            done = self._event("response.output_text.done", data | texts)
        done += self._event("response.content_part.done", data | {"part": part})
        return done + self._ended(item)

    def _called(self, part: ToolCall | Arguments | CallEnd) -> str:
        """Events for the begin of a call, for a piece of its arguments, or for its end."""
        call = part if isinstance(part, ToolCall) else part.call
        item = _item(call, self.request.tools, False, not call.is_whole)
        is_custom = item["type"] == "custom_tool_call"
        field, kind = (
            ("input", "custom_tool_call_input") if is_custom else ("arguments", "function_call_arguments")
        )
        if isinstance(part, ToolCall):
            closed, self._id, self._open = self._close(), item["id"], call
            empty = item | {field: "", "status": "in_progress"}
            added = {"output_index": len(self._items), "item": empty}
            return closed + self._event("response.output_item.added", added)
        item["id"] = self._id
        if isinstance(part, Arguments):
            delta = "" if is_custom else part.text  # a custom tool has its text at the end
            return self._event(f"response.{kind}.delta", self._where | {"delta": delta}) if delta else ""
        shown, self._open = "", None
        if is_custom:
            shown = self._event(f"response.{kind}.delta", self._where | {"delta": item[field]})
        final_fields = {field: item[field]} if is_custom else {field: item[field], "name": item["name"]}
        return shown + self._event(f"response.{kind}.done", self._where | final_fields) + self._ended(item)

    def _ended(self, item: dict[str, Any]) -> str:
        done = self._event("response.output_item.done", {"output_index": len(self._items), "item": item})
        self._items.append(item)
        return done


def _items(values: Any, served: Served) -> list[dict[str, Any]]:
    """Items of an `input`: a text, message parts, or items. Raises: Refused."""
    is_list = isinstance(values, list) and values and all(isinstance(item, dict) for item in values)
    if not isinstance(values, str) and not is_list:
        raise wrong("input", "a text or a list of at least one item", values)
    if isinstance(values, str) or (
        "role" not in values[0] and values[0].get("type") in ("input_text", "input_image")
    ):
        return [{"role": "user", "content": conversation.content(values, "input")}]
    if not (messages := _messages(values, served)):
        raise wrong("input", "a text or a list with at least one message", values)
    return messages


def _messages(items: list[dict[str, Any]], served: Served) -> list[dict[str, Any]]:
    """Messages of items; reasoning joins the assistant message after it. Raises: Refused."""
    messages: list[dict[str, Any]] = []
    thought: str | None = None
    for number, item in enumerate(items):
        where, kind = f"input[{number}]", item.get("type")
        if kind == "reasoning":
            parts = conversation.content(item.get("content") or [], f"{where}.content")
            thought = "".join(part.get("text", "") for part in parts) or None
            continue
        message = _message(item, where, served)
        if message is None:
            continue
        if message["role"] == "assistant" and thought is not None:
            message["reasoning_content"] = thought
        thought = None
        _append(messages, message, is_call=kind != "message" and "role" not in item)
    return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any], is_call: bool) -> None:
    """Appends a message; a tool call joins the assistant message before it."""
    last = messages[-1] if messages else None
    if is_call and last is not None and last["role"] == message["role"] == "assistant":
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
        last |= {name: message[name] for name in ("reasoning_content",) if name in message}
    else:
        messages.append(message)


def _message(item: dict[str, Any], where: str, served: Served) -> dict[str, Any] | None:
    """Message of an item; None if it is dropped. Raises: Refused."""
    kind = item.get("type")
    if "role" in item:
        return conversation.message(item, where, served.say_once)
    match kind:
        case "function_call":
            return _calling(item, _in_namespace(item, where), item.get("arguments"), where, served)
        case "custom_tool_call":
            arguments = {"input": str(item.get("input", ""))}
            return _calling(item, _in_namespace(item, where), arguments, where, served)
        case "local_shell_call":
            action = item.get("action")
            arguments = action if isinstance(action, dict) else {}
            return _calling(item, "local_shell", arguments, where, served)
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            output = conversation.content(item.get("output"), f"{where}.output")
            return {"role": "tool", "tool_call_id": _call_id(item, where), "content": output}
    if not isinstance(kind, str):
        raise wrong(f"{where}.type", "a text", kind)
    served.say_once(f"items of the type {kind!r} are left out: this server knows none")
    return None


def _text(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise wrong(f"{where}.{name}", "a text", item.get(name))
    return str(item[name])


def _in_namespace(item: dict[str, Any], where: str) -> str:
    """Model-side name of the function that an item calls."""
    space = None if item.get("namespace") is None else _text(item, "namespace", where)
    return conversation.in_namespace(space, _text(item, "name", where))


def _call_id(item: dict[str, Any], where: str) -> str:
    name = item.get("call_id") or item.get("id")
    if not isinstance(name, str):
        raise wrong(f"{where}.call_id", "a text", item.get("call_id"))
    return name


def _calling(item: dict[str, Any], name: str, arguments: Any, where: str, served: Served) -> dict[str, Any]:
    call = conversation.call(_call_id(item, where), name, arguments, served.say_once)
    return {"role": "assistant", "content": [], "tool_calls": [call]}


def _is_cut(part: Text | ToolCall, answer: Answer, is_last: bool) -> bool:
    """True for a part of an answer that is not whole: a broken call, or the text at the maximum length."""
    return not part.is_whole if isinstance(part, ToolCall) else is_last and answer.reason == "length"


def _item(block: Text | ToolCall, tools: dict[str, Tool], has_logprobs: bool, is_cut: bool) -> dict[str, Any]:
    """One item of `output`."""
    status = "incomplete" if is_cut else "completed"
    if isinstance(block, ToolCall):
        tool = tools.get(block.name)
        named: dict[str, Any] = {"name": block.name if tool is None else tool.own_name}
        if tool is not None and tool.namespace is not None:
            named["namespace"] = tool.namespace
        if tool is not None and tool.kind == "custom":
            call_fields = {"type": "custom_tool_call", "id": new_id("ctc_"), "input": input_of(block)}
        else:
            call_fields = {"type": "function_call", "id": new_id("fc_"), "arguments": block.arguments}
        return {**call_fields, "call_id": block.id, "status": status, **named}
    if block.kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": block.text}
        kind = {"type": "reasoning", "id": new_id("rs_"), "summary": []}
        return {**kind, "status": status, "content": [part]}
    entries = [entry.response_form() for delta in block.deltas for entry in delta.entries]
    logprobs = entries if has_logprobs else None
    part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
    message = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": status}
    return {**message, "content": [part]}


def _response(name: str, request: Request, served: Served) -> dict[str, Any]:
    """Response object at the start of an answer."""
    body = request.later
    return served.warning(request) | {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": served.name,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _ending(answers: Answers, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields added to a response at its end."""
    answer: Answer = answers.answers[0]
    is_cut = answer.reason == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": answers.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": answers.cached_tokens,
                "disk_tokens": answers.disk_tokens,
            },
            "output_tokens": answers.tokens,
            "output_tokens_details": {"reasoning_tokens": answers.reasoning_tokens} | answers.drafts_form,
            "total_tokens": answers.prompt_tokens + answers.tokens,
        },
    }
