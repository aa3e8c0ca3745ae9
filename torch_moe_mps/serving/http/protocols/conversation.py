"""Conversion of OpenAI messages and tools to the form of chat templates."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..request import Forced, Refused, Tool, read_json, wrong

Part = dict[str, Any]
Say = Callable[[str], None]
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
# {type of a part: what it is for a processor}
_MEDIA = {
    "image_url": "image", "input_image": "image", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_ORDER = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def content(value: Any, where: str) -> list[Part]:
    """Parts of a message's content. Raises: Refused."""
    if isinstance(value, str):
        return [text_part(value)] if value else []
    if not isinstance(value, list):
        raise wrong(where, "a text or a list of parts", value)
    return [_part(part, f"{where}[{number}]") for number, part in enumerate(value)]


def _part(part: Any, where: str) -> Part:
    """Part of a message: a text, or an image or sound by its URL."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong(where, "an object with a type", part)
    kind: str = part["type"]
    if kind in _TEXTS:
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise wrong(f"{where}.text", "a text", text)
        return text_part(text)
    if kind not in _MEDIA:
        raise Refused(f"This model does not read '{kind}'.", where)
    field = "image_url" if kind == "input_image" else kind
    value = part.get(field)
    url = value.get("data" if kind == "input_audio" else "url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise wrong(f"{where}.{field}", "an object with a url", value)
    return {"type": _MEDIA[kind], "url": url, "field": f"{where}.{field}", "as": kind}


def messages(values: Any, field: str, say: Say) -> list[dict[str, Any]]:
    """Messages of a chat request. Raises: Refused."""
    if not isinstance(values, list) or not values:
        raise wrong(field, "a list of at least one message", values)
    return joined([message(value, f"{field}[{number}]", say) for number, value in enumerate(values)])


def message(value: Any, where: str, say: Say) -> dict[str, Any]:
    """Message for the chat template from a message of OpenAI's: role, parts, calls, reasoning."""
    if not isinstance(value, dict):
        raise wrong(where, "an object with role and content", value)
    role = value.get("role")
    if role not in _ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    calls, text = value.get("tool_calls"), value.get("content")
    parsed: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(role, role)}
    is_silent = text is None and role == "assistant"
    parsed["content"] = [] if is_silent else content(text, f"{where}.content")
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            parsed[name] = value[name]
    for name in ("reasoning_content", "reasoning"):
        if role == "assistant" and isinstance(value.get(name), str) and value[name]:
            parsed["reasoning_content"] = value[name]
    if calls:
        parsed["tool_calls"] = _calls(calls, f"{where}.tool_calls", say)
    elif calls is not None and calls != []:
        raise wrong(f"{where}.tool_calls", "a list of calls", calls)
    return parsed


def _calls(values: Any, where: str, say: Say) -> list[dict[str, Any]]:
    """Tool calls of an assistant's message, as templates take them. Raises: Refused for a malformed list."""
    if not isinstance(values, list):
        raise wrong(where, "a list of calls", values)
    calls = []
    for number, value in enumerate(values):
        custom = value.get("custom") if isinstance(value, dict) else None
        function = (value.get("function") or value) if isinstance(value, dict) else None
        if isinstance(custom, dict) and isinstance(custom.get("name"), str):
            calls.append(call(value.get("id"), custom["name"], {"input": str(custom.get("input", ""))}, say))
        elif isinstance(function, dict) and isinstance(function.get("name"), str):
            calls.append(call(value.get("id"), function["name"], function.get("arguments"), say))
        else:
            raise wrong(f"{where}[{number}]", "a function with a name and arguments", value)
    return calls


def call(name: Any, function: str, value: Any, say: Say) -> dict[str, Any]:
    """Tool call with its arguments as an object, and as the client's `text` if there is one.

    `CallForm.convert` keeps one of them. The prefix cache knows the text, as the model has written it.
    """
    tool_call: dict[str, Any] = {"id": name} if isinstance(name, str) else {}
    tool_call |= {"type": "function", "function": {"name": function, "arguments": arguments(value, say)}}
    return tool_call | {"text": value} if value and isinstance(value, str) else tool_call


def arguments(value: Any, say: Say) -> Any:
    """Arguments of a tool call as an object; other JSON stays text."""
    if isinstance(value, dict):
        return value
    try:
        read = read_json(value) if value else {}
    except (TypeError, ValueError):
        read = None
    if isinstance(read, dict):
        return read
    say("arguments of an earlier call are no object in JSON: the model reads them as a text")
    return value if isinstance(value, str) else json.dumps(value)


def joined(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with leading system messages merged, and tool calls merged into the assistant's text."""
    merged: list[dict[str, Any]] = []
    for value in values:
        last = merged[-1] if merged else None
        if last is not None and last["role"] == value["role"] == "system" and len(merged) == 1:
            last["content"] = [
                *last["content"],
                *([text_part("")] if value["content"] else []),
                *value["content"],
            ]
        else:
            merged.append(value)
    return merged


def tool(value: Any, where: str, say: Say) -> list[Tool]:
    """Functions of a tool; none for tools hosted by OpenAI."""
    if not isinstance(value, dict):
        raise wrong(where, "an object with a type", value)
    kind = value.get("type", "function")
    if kind == "function":
        return [_function(value.get("function", value), where)]
    if kind == "custom":
        return [_custom(value.get("custom", value), where)]
    if kind == "namespace":
        space = value.get("name")
        if not isinstance(space, str) or not isinstance(value.get("tools"), list):
            raise wrong(where, "a namespace with a name and a list of tools", value)
        inner = [t for n, v in enumerate(value["tools"]) for t in tool(v, f"{where}.tools[{n}]", say)]
        return [replace(t, name=in_namespace(space, t.name), namespace=space) for t in inner]
    if not isinstance(kind, str):
        raise wrong(f"{where}.type", "a text", kind)
    say(f"tools of the type {kind!r} are left out: this server runs none")
    return []


def in_namespace(space: str | None, name: str) -> str:
    """Name of a namespaced function for the model."""
    if space is None:
        return name
    return f"{space}{name}" if space.endswith("__") else f"{space}__{name}"


def _function(value: Any, where: str) -> Tool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise wrong(where, "a function with a name", value)
    schema = value.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise wrong(f"{where}.parameters", "a schema in JSON", schema)
    name, description = value["name"], str(value.get("description") or "")
    is_strict = value.get("strict") is True
    return Tool(name, description, schema or _NOTHING, own_name=name, is_strict=is_strict)


def _custom(value: Any, where: str) -> Tool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise wrong(where, "a tool with a name", value)
    description, form = str(value.get("description") or ""), value.get("format")
    definition = form.get("definition") or form.get("grammar") if isinstance(form, dict) else None
    if isinstance(definition, dict):
        definition = definition.get("definition")
    if isinstance(definition, str):
        description += f"\nThe input follows this grammar:\n{definition}"
    return Tool(value["name"], description, _INPUT, "custom", value["name"])


def tools(values: Any, field: str, say: Say) -> list[Tool]:
    """Tools of a request; none for None. Raises: Refused, which names the whole field."""
    if values is None:
        return []
    if not isinstance(values, list):
        raise wrong(field, "a list of functions with names", values)
    try:
        return [
            parsed_tool
            for number, value in enumerate(values)
            for parsed_tool in tool(value, f"{field}[{number}]", say)
        ]
    except Refused as refused:
        refused.field = field  # the whole of it, as OpenAI's server has it
        raise


def chosen(choice: Any, declared_tools: list[Tool]) -> tuple[list[Tool], Forced | None]:
    """(tools that the model may call, forced tools) for a `tool_choice`.

    Raises: Refused for an invalid choice.
    """
    if choice is None or choice == "auto":
        return declared_tools, None
    if choice == "none":
        return [], None
    if choice == "required":
        if not declared_tools:
            raise wrong("tools", "a list of at least one tool with 'tool_choice' required", [])
        return declared_tools, Forced(declared_tools, None)
    return declared_tools, Forced(declared_tools, _named(choice, declared_tools).name)


def _named(choice: Any, declared_tools: list[Tool]) -> Tool:
    """Tool named by a choice. Raises: Refused."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom", "tool"):
        raise wrong("tool_choice", "none, auto, required or a function by its name", choice)
    name = _name_of(choice)
    named = [t for t in declared_tools if name in (t.own_name, t.name)]
    if not named:
        known = ", ".join(t.own_name for t in declared_tools) or "(none)"
        raise wrong("tool_choice", f"one of the tools {known}", name)
    return named[0]


def _name_of(value: dict[str, Any]) -> Any:
    kind = value.get("type")
    inner = value.get(kind, value) if isinstance(kind, str) else value
    return inner.get("name") if isinstance(inner, dict) else None


def effort(value: Any) -> dict[str, Any]:
    """Chat template variables for a reasoning effort."""
    if value is None:
        return {}
    if value not in _ORDER:
        raise wrong("reasoning_effort", f"one of {', '.join(_ORDER)}", value)
    if value == "none":
        return {"enable_thinking": False}
    level = {"minimal": "low", "xhigh": "high", "max": "high"}.get(value, value)
    return {"reasoning_effort": level}


def goes_on(values: list[dict[str, Any]], field: str) -> bool:
    """True if the last message is the start of the answer (prefill of the assistant).

    Raises: Refused for two of them.
    """
    *_, before, last = [False, False, *map(_says, values)]
    if before and last:
        raise wrong(field, "with at most one message of the assistant at the end", "two")
    return last and bool(values[-1]["content"])


def _says(value: dict[str, Any]) -> bool:
    """True for an assistant message without tool calls."""
    return value["role"] == "assistant" and "tool_calls" not in value
