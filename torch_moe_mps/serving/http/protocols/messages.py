"""Anthropic's messages API, as Claude Code uses it: `/v1/messages` and `/v1/messages/count_tokens`."""

from typing import Any

from ...engine.ranges import integer
from ..answer import Answer, Arguments, Item, Piece, ToolCall, new_id
from ..answers import Answers
from ..request import (
    OBJECT,
    SHARED,
    STOPS,
    Chat,
    Fields,
    Forced,
    Refused,
    Request,
    Tool,
    common,
    stops_of,
    wrong,
)
from ..served import Served
from ..structured import schema_of
from . import conversation
from .protocol import AnswerWriter, Protocol, Text, blocks, event, input_of
from .values import in_json, object_of

_FIELDS = Fields(
    SHARED
    | {
        "max_tokens": integer(1),
        "output_config": OBJECT,
        "output_format": OBJECT,
        "stop_sequences": STOPS,
        "thinking": OBJECT,
        "tool_choice": OBJECT,
    },
    needed="messages",
    others=frozenset({
        "anthropic_version", "cache_control", "container", "context_management", "inference_geo",
        "mcp_servers", "metadata", "service_tier", "speed", "system", "tools",
    }),
)  # fmt: skip
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    503: "overloaded_error",
}  # fmt: skip


def anthropic_error(refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    where = "" if refused.field is None or refused.field in refused.message else f"{refused.field}: "
    return {"type": "error", "error": {"type": kind, "message": f"{where}{refused.message}"}}


class Messages(Protocol):
    path = "/v1/messages"

    def read(self, body: dict[str, Any], served: Served) -> Request:
        request = self.read_prompt(body, served)
        if body.get("max_tokens") is None:
            raise Refused("'max_tokens' must be there, got none.", "max_tokens", "missing_required_parameter")
        request.stops = tuple(stop for stop in stops_of(body.get("stop_sequences")) if stop.strip())
        return request

    def read_prompt(self, body: dict[str, Any], served: Served) -> Request:
        """Request that needs no `max_tokens`. Raises: Refused."""
        _FIELDS.check(body, self.path, served.say_once)
        messages = _messages(body["messages"], served)
        if body.get("system"):
            system = _Content("system", served).texts(body["system"], "system")
            messages = [{"role": "system", "content": system}, *messages]
        messages = conversation.joined(messages)
        tools, forced = _chosen(body, _tools(body.get("tools"), served))
        asked = (body.get("output_config") or {}).get("format") or body.get("output_format")
        schema = schema_of(asked, "output_config.format")
        return Request(
            prompts=[Chat(messages, tools, _variables(body), conversation.goes_on(messages, "messages"))],
            prompt_field="messages",
            max_tokens=body.get("max_tokens"),
            form=None if forced else schema,
            forced=forced,
            form_field="tool_choice" if forced else "output_config.format",
            is_parallel=not (body.get("tool_choice") or {}).get("disable_parallel_tool_use"),
            **common(body),
        )

    def whole(self, request: Request, answers: Answers, served: Served) -> dict[str, Any]:
        content = [_block(block) for block in blocks(answers.answers[0].items)]
        return _message(request, served) | {"content": content, **_ending(answers), "usage": _usage(answers)}

    def writer(self, request: Request, answers: Answers, served: Served) -> AnswerWriter:
        return _MessageEvents(request, answers, served)


class _MessageEvents(AnswerWriter):
    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._index, self._open = 0, ""  # the kind of the block that is being written

    def opening(self) -> str:
        usage = _usage(self.answers) | {"output_tokens": 1}
        started = _message(self.request, self.served) | {"usage": usage}
        return self._event("message_start", {"message": started}) + self.ping()

    def ping(self) -> str:
        return self._event("ping", {})

    def item(self, number: int, item: Item) -> str:
        if isinstance(item, Piece):
            if not item.text:
                return ""
            begun = "" if self._open == item.kind else self._close() + self._begun(item.kind)
            name = "text" if item.kind == "text" else "thinking"
            return begun + self._delta({"type": f"{name}_delta", name: item.text})
        if isinstance(item, ToolCall):
            return self._close() + self._start("call", _block(item) | {"input": {}})
        is_object = item.call.parts[0].startswith("{")
        if isinstance(item, Arguments):
            return self._input(item.text) if is_object else ""
        return ("" if is_object else self._input(in_json(_block(item.call)["input"]))) + self._close()

    def end(self) -> str:
        delta = {"delta": _ending(self.answers), "usage": _usage(self.answers)}
        return self._close() + self._event("message_delta", delta) + self._event("message_stop", {})

    def failed(self, refused: Refused) -> str:
        return event(anthropic_error(refused), "error")

    def _event(self, kind: str, data: dict[str, Any]) -> str:
        return event({"type": kind} | data, kind)

    def _begun(self, kind: str) -> str:
        return self._start(kind, _block(Text(kind, [])))

    def _start(self, kind: str, block: dict[str, Any]) -> str:
        self._open = kind
        return self._event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> str:
        return self._event("content_block_delta", {"index": self._index, "delta": delta})

    def _input(self, text: str) -> str:
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _close(self) -> str:
        if not self._open:
            return ""
        signed = (
            self._delta({"type": "signature_delta", "signature": ""}) if self._open == "reasoning" else ""
        )
        stopped = self._event("content_block_stop", {"index": self._index})
        self._index, self._open = self._index + 1, ""
        return signed + stopped


class _Content:
    """Converts content blocks of messages."""

    def __init__(self, role: str, served: Served):
        self.role, self.served = role, served

    def texts(self, value: Any, where: str) -> list[conversation.Part]:
        """Content parts of a text or blocks; blocks of Anthropic's server tools are dropped.

        Raises: Refused.
        """
        if isinstance(value, str):
            return [conversation.text_part(value)] if value else []
        if not isinstance(value, list):
            raise wrong(where, "a text or a list of blocks", value)
        parts = [self.part(block, f"{where}[{number}]") for number, block in enumerate(value)]
        return [part for part in parts if part is not None]

    def part(self, block: Any, where: str) -> conversation.Part | None:
        """Part of a message for a block of text, an image or a text document; None for an ignored block.

        Raises: Refused for a malformed block, and for one whose content cannot be ignored.
        """
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise wrong(where, "an object with a type", block)
        match block["type"]:
            case "text":
                if not isinstance(block.get("text"), str):
                    raise wrong(f"{where}.text", "a text", block.get("text"))
                return conversation.text_part(block["text"])
            case "image":
                return _picture(block.get("source"), f"{where}.source")
            case "document":
                source = block.get("source")
                if isinstance(source, dict) and source.get("type") == "text":
                    return conversation.text_part(str(source.get("data", "")))
                kind = source.get("type") if isinstance(source, dict) else source
                expected = "of the type text: this server reads no other document block"
                raise wrong(f"{where}.source", expected, kind)
            case "search_result" | "container_upload":
                raise wrong(where, "a block of the type text, image or document", block["type"])
        self.served.say_once(f"blocks of the type {block['type']!r} are left out: this server reads none")
        return None


def _picture(source: Any, where: str) -> conversation.Part:
    if not isinstance(source, dict):
        raise wrong(where, "an object with a type", source)
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type', 'image/png')};base64,{source['data']}"
        return {"type": "image", "url": url, "field": f"{where}.data", "as": "image"}
    if source.get("type") == "url" and isinstance(source.get("url"), str):
        return {"type": "image", "url": source["url"], "field": f"{where}.url", "as": "image"}
    raise wrong(where, "a source of the type base64 or url", source.get("type"))


def _messages(values: Any, served: Served) -> list[dict[str, Any]]:
    """Messages for the chat template from Anthropic's; one with results of tools becomes several."""
    if not isinstance(values, list) or not values:
        raise wrong("messages", "a list of at least one message", values)
    messages: list[dict[str, Any]] = []
    for place, value in enumerate(values):
        where = f"messages[{place}]"
        if not isinstance(value, dict):
            raise wrong(where, "an object with role and content", value)
        role = value.get("role")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{where}.role", "user or assistant", role)
        content = value.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise wrong(f"{where}.content", "a text or a list of blocks", content)
        reads = _of_assistant if role == "assistant" else _of_user
        messages += reads(_Content(role, served), parts, f"{where}.content")
    return messages


def _of_assistant(reader: _Content, values: list[Any], where: str) -> list[dict[str, Any]]:
    """The assistant's message of some content blocks: its text, reasoning and tool calls."""
    message: dict[str, Any] = {"role": "assistant", "content": []}
    for place, block in enumerate(values):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise wrong(f"{where}[{place}].name", "a text", block.get("name"))
            say = reader.served.say_once
            call = conversation.call(block.get("id"), block["name"], block.get("input"), say)
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
        elif kind != "redacted_thinking" and (part := reader.part(block, f"{where}[{place}]")) is not None:
            message["content"].append(part)
    return [message]


def _of_user(reader: _Content, values: list[Any], where: str) -> list[dict[str, Any]]:
    """Messages of a user turn: tool results first, then the user's content."""
    results, parts = [], []
    for place, block in enumerate(values):
        inside = f"{where}[{place}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise wrong(f"{inside}.tool_use_id", "a text", block.get("tool_use_id"))
            texts = reader.texts(block.get("content") or [], f"{inside}.content")
            pictures = [part for part in texts if part["type"] != "text"]
            if pictures and not reader.served.template.reads("image"):
                reader.served.say_once("pictures in results of tools are left out: the model reads none")
            elif pictures:  # few templates read them in a result
                parts += pictures
            text_parts = [part for part in texts if part["type"] == "text"]
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text_parts})
        elif (part := reader.part(block, inside)) is not None:
            parts.append(part)
    turn = [{"role": reader.role, "content": parts}] if parts or not results else []
    return [*results, *turn]


def _tools(values: Any, served: Served) -> list[Tool]:
    """Tools with a schema. A tool that only Anthropic's servers run is left out with a line in the log."""
    if values is None:
        return []
    if not isinstance(values, list):
        raise wrong("tools", "a list of tools with names", values)
    tools = []
    for place, value in enumerate(values):
        where = f"tools[{place}]"
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise wrong(where, "a tool with a name", value)
        schema = value.get("input_schema")
        if schema is None and value.get("type", "custom") != "custom":
            served.say_once(f"tools of the type {value['type']!r} are left out: this server runs none")
            continue
        if not isinstance(schema, dict):
            raise wrong(f"{where}.input_schema", "a schema in JSON", schema)
        name, description = value["name"], str(value.get("description") or "")
        is_strict = value.get("strict") is True
        tools.append(Tool(name, description, schema, own_name=name, is_strict=is_strict))
    return tools


def _chosen(body: dict[str, Any], tools: list[Tool]) -> tuple[list[Tool], Forced | None]:
    choice = body.get("tool_choice") or {"type": "auto"}
    kinds: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": choice}
    if not isinstance(choice.get("type"), str) or choice["type"] not in kinds:
        raise wrong("tool_choice.type", "auto, any, tool or none", choice.get("type"))
    return conversation.chosen(kinds[choice["type"]], tools)


def _variables(body: dict[str, Any]) -> dict[str, Any]:
    kind = (body.get("thinking") or {}).get("type")
    variables = {} if kind in (None, "adaptive") else {"enable_thinking": kind == "enabled"}
    return conversation.effort((body.get("output_config") or {}).get("effort")) | variables


def _block(block: Text | ToolCall) -> dict[str, Any]:
    if isinstance(block, ToolCall):
        arguments = object_of(block.arguments)
        if arguments is None:
            arguments = {"input": input_of(block)}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _message(request: Request, served: Served) -> dict[str, Any]:
    return served.warning(request) | {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": served.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _ending(answers: Answers) -> dict[str, Any]:
    answer: Answer = answers.answers[0]
    reason = "end_turn"
    if answer.reason == "length":
        reason = "max_tokens"
    elif any(call.is_whole for call in answer.calls):
        reason = "tool_use"
    elif answer.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(answers: Answers) -> dict[str, Any]:
    """`usage` of an answer. Cached prompt tokens are separate; draft tokens use OpenAI's names."""
    return answers.drafts_form | {
        "input_tokens": answers.prompt_tokens - answers.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answers.cached_tokens,
        "disk_tokens": answers.disk_tokens,
        "output_tokens": answers.tokens,
    }
