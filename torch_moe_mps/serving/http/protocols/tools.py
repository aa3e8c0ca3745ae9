"""Calls of tools: read out of answers, and forced by a grammar of a call as the chat template writes it.

How a model writes a call is known from what the server reads as one: xgrammar has the grammars of families of
models, and that family is the model's whose call the server reads back whole.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from ....transformers.upstream import ResponseParser
from ..request import Forced, Refused
from .forms import FAMILIES

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the field in forms of answers
# Families of xgrammar; where several read the same, the first.
_NAMES = (
    "qwen_3", "qwen_3_5", "glm_4_7", "kimi", "deepseek_v3_1", "deepseek_v3_2", "llama", "minimax", *FAMILIES,
)  # fmt: skip
# {style of xgrammar: an argument "a" that is "b"}.
_ARGUMENTS = {
    "json": '{"a": "b"}',
    "qwen_xml": "<parameter=a>\nb\n</parameter>",
    "glm_xml": "<arg_key>a</arg_key><arg_value>b</arg_value>",
    "minimax_xml": '<parameter name="a">b</parameter>',
    "deepseek_xml": '<｜DSML｜parameter name="a" string="true">b</｜DSML｜parameter>',
}
_NOTHING = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Call:
    """A call of a tool in an answer; `arguments` are the text of an object in JSON."""

    name: str
    arguments: str


def grammar(forced: Forced, form: dict[str, Any] | None, family: str | None, prompt: str) -> Any:
    """xgrammar's structural tag of an answer that must call.

    Args:
        form: by which the server reads answers.
        family: see `family_of`.
        prompt: it may end inside of the model's reasoning, or behind it.

    Raises: Refused where calls of the model are not known.
    """
    from xgrammar import get_model_structural_tag

    if form is None or family is None:
        message = (
            "'tool_choice' needs a model whose form of calls this server knows, and this one's is not known."
        )
        raise Refused(message, "tool_choice")
    tools: list[Any] = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.schema}}
        for tool in forced.tools
    ]
    choice: Any = "required"
    if forced.name is not None:
        choice = {"type": "function", "function": {"name": forced.name}}
    if family in FAMILIES:
        return FAMILIES[family].grammar(tools, choice, forced.parallel)
    return get_model_structural_tag(
        family,
        tools,
        choice,
        reasoning=_reasoning(form["fields"], prompt.rstrip()),
        max_whitespace_cnt=1,  # a model that may write any blanks may never end
        parallel_tool_calls=forced.parallel,
    )


class Parser(ResponseParser):
    """transformers' own, without a call that is cut off by the end of an answer.

    What stands where a call should be and is none is part of the text.
    """

    _buffer: str

    @property
    def is_thinking(self) -> bool:
        """Whether the next token is part of the model's reasoning."""
        return self._current in REASONING

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        calls, start = self._spec.fields.get("tool_calls"), self._pos
        inside = self._current == "tool_calls"
        if calls is not None and not inside and self._current == self._implicit_name:
            opened = calls.open_re.search(self._buffer, start)  # it waits for what may belong to its mark
            start, inside = (opened.start(), True) if opened else (start, False)
        if inside and calls.close_re is not None and calls.close_re.search(self._buffer, start) is None:
            self._buffer = self._buffer[:start]
            if self._current == "tool_calls":
                self._reset_to_implicit()
        return super().finalize()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        body, is_call = self._body, self._current == "tool_calls"
        try:
            super()._close_current(events)
            if not is_call or call_of(events[-1]["value"]) is not None:
                return
            events.pop()
        except ValueError:
            self._reset_to_implicit()
        events.append({"type": "region_chunk", "field": "content", "text": body, "dirty": False})


def call_of(value: Any) -> Call | None:
    """The call of a value that a form has read; None where it has no name."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", {})
    return Call(function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def calls_in(events: list[dict[str, Any]]) -> list[Call]:
    values = [event["value"] for event in events if _is_call(event)]
    return [call for call in map(call_of, values) if call is not None]


def _is_call(event: dict[str, Any]) -> bool:
    return event["type"] == "region_close" and event["field"] == "tool_calls"


def family_of(form: dict[str, Any] | None) -> str | None:
    """The family of xgrammar whose calls this form of answers reads; None for none."""
    from xgrammar import get_model_structural_tag

    name = {"name": "probe"}
    tool = {"type": "function", "function": name | {"parameters": _NOTHING}}
    for family in _NAMES if form is not None else ():
        forced = {"type": "function", "function": name}
        text = _sample(get_model_structural_tag(family, [tool], forced, reasoning="disabled").format)
        parser = Parser(form, prefix="")
        if calls_in([*parser.feed(text), *parser.finalize()[1]]) == [Call("probe", _ARGUMENTS["json"])]:
            return family
    return None


def _sample(form: Any) -> str:
    """A text of a structural tag."""
    match form.type:
        case "const_string":
            return str(form.value)
        case "regex":
            return "0"
        case "json_schema":
            return _ARGUMENTS[form.style]
        case "tag":
            return f"{form.begin}{_sample(form.content)}{form.end}"
        case "triggered_tags" | "tags_with_separator":
            return _sample(form.tags[0])
    return "".join(map(_sample, form.elements))


def _reasoning(fields: dict[str, Any], prompt: str) -> Literal["enabled", "disabled", "auto"]:
    """Whether reasoning goes on at the end of a prompt, may begin, or cannot."""
    field: dict[str, Any] = next((fields[name] for name in REASONING if name in fields), {})
    opener, closer = (str(field.get(name)).strip() for name in ("open", "close"))
    if not field or prompt.endswith(closer):
        return "disabled"
    return "enabled" if prompt.endswith(opener) else "auto"
