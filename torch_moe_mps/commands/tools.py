"""`tool_choice`: tools that must be called, by a grammar of a call as the model's chat template writes it.

How a model writes a call is known from what the server reads as one: xgrammar has the grammars of families of
models, and that family is the model's whose call the server reads back whole.
"""

import importlib
from typing import Any, Literal, NamedTuple

from transformers.cli.serving import utils

from ..transformers.families import ANSWERS
from .requests import Refused, wrong
from .structured import check_extra

# Families of xgrammar; where several read the same, the first.
_FAMILIES = (
    "qwen_3", "qwen_3_5", "glm_4_7", "kimi", "deepseek_v3_1", "deepseek_v3_2", "llama", "minimax", *ANSWERS,
)  # fmt: skip
_ANSWERS = {family: importlib.import_module(module) for family, module in ANSWERS.items()}
# What xgrammar calls a style: an argument "a" that is "b".
_ARGUMENTS = {
    "json": '{"a": "b"}',
    "qwen_xml": "<parameter=a>\nb\n</parameter>",
    "glm_xml": "<arg_key>a</arg_key><arg_value>b</arg_value>",
    "minimax_xml": '<parameter name="a">b</parameter>',
    "deepseek_xml": '<｜DSML｜parameter name="a" string="true">b</｜DSML｜parameter>',
}
_NOTHING = {"type": "object", "properties": {}}


class Forced(NamedTuple):
    """Tools of which one must be called: any if `choice` is "required", else the one that it names."""

    tools: list[dict[str, Any]]
    choice: str | dict[str, Any]
    parallel: bool

    def grammar(self, template: dict[str, Any] | None, prompt: str) -> Any:
        """xgrammar's structural tag of an answer.

        Args:
            template: by which the server reads answers.
            prompt: it may end inside of the model's reasoning, or behind it.

        Raises: Refused where calls of the model are not known.
        """
        from xgrammar import get_model_structural_tag

        family = _family_of(template)
        if template is None or family is None:
            message = "'tool_choice' needs a model whose calls this server reads, got one of another form."
            raise Refused(message, "tool_choice")
        tools: list[Any] = [*self.tools]
        choice: Any = self.choice
        if family in _ANSWERS:
            return _ANSWERS[family].grammar(tools, choice, self.parallel)
        return get_model_structural_tag(
            family,
            tools,
            choice,
            reasoning=_reasoning(template["fields"], prompt.rstrip()),
            max_whitespace_cnt=1,  # a model that may write any blanks may never end
            parallel_tool_calls=self.parallel,
        )


def forced_by(body: dict[str, Any]) -> Forced | None:
    """Takes `tool_choice` out of a request, and all tools if none may be called.

    Returns: None where the model may call, or may not.
    Raises: Refused.
    """
    choice = body.get("tool_choice")
    if choice is None or choice == "auto":
        return None
    functions = [tool.get("function", tool) for tool in body.get("tools") or ()]
    if choice == "none":
        body.pop("tools", None)
        del body["tool_choice"]
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = choice.get("function", choice)  # of responses, without `function`
        name = named.get("name") if isinstance(named, dict) else None
        names = [function["name"] for function in functions]
        if name not in names:
            raise wrong("tool_choice", f"one of the tools {', '.join(names) or '(none)'}", name)
        choice = {"type": "function", "function": {"name": name}}
    elif choice != "required":
        raise wrong("tool_choice", "none, auto, required or a function by its name", choice)
    elif not functions:
        raise wrong("tools", "a list of at least one tool with 'tool_choice' required", [])
    check_extra("tool_choice", choice)
    del body["tool_choice"]
    tools = [
        {"type": "function", "function": {"name": f["name"], "parameters": f.get("parameters") or _NOTHING}}
        for f in functions
    ]
    return Forced(tools, choice, body.get("parallel_tool_calls") is not False)


class Parser(utils.ResponseParser):
    """transformers' own, but of a call inside of which an answer ends it makes none."""

    _buffer: str

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


def parsed(
    processor: Any, model: Any, text: Any, input_ids: Any, cleaned_content: str = "", tools: Any = None
) -> tuple[Any, Any, Any]:
    """Results of transformers' `parse_assistant_message`, by the parser of streams."""
    parser = utils.build_response_parser(processor, model, input_ids, tools)
    if parser is None:
        return cleaned_content, None, None
    words = getattr(processor, "tokenizer", processor)
    parser.feed(text if isinstance(text, str) else words.decode(text))
    message, _ = parser.finalize()
    thought = next((message[name] for name in utils._REASONING_FIELDS if name in message), None)
    calls = [utils._normalize_tool_call(call) for call in message.get("tool_calls") or ()]
    return message.get("content", ""), thought, [call for call in calls if call is not None] or None


def with_derived(own: Any) -> Any:
    """transformers' `get_response_template`, and where it has none that of the chat template's own marks."""

    def template(processor: Any, model: Any) -> dict[str, Any] | None:
        found: dict[str, Any] | None = own(processor, model)
        text = getattr(getattr(processor, "tokenizer", processor), "chat_template", None)
        return _derived(text) if found is None and isinstance(text, str) else found

    return template


def _derived(chat_template: str) -> dict[str, Any] | None:
    for answers in _ANSWERS.values():
        if all(mark in chat_template for mark in answers.MARKS):
            return answers.TEMPLATE
    chat_ml = "<|im_start|>" in chat_template and "<tool_call>" in chat_template
    if not chat_ml or "<arg_key>" in chat_template:
        return None
    like = "qwen3_5" if "<function=" in chat_template else "qwen3"
    fallbacks = utils._RESPONSE_TEMPLATE_FALLBACKS.items()
    return next((template for types, template in fallbacks if like in types), None)


def _family_of(template: dict[str, Any] | None) -> str | None:
    """The family a call of which this template reads."""
    from xgrammar import get_model_structural_tag

    name = {"name": "probe"}
    tool = {"type": "function", "function": name | {"parameters": _NOTHING}}
    for family in _FAMILIES if template is not None else ():
        forced = {"type": "function", "function": name}
        text = _sample(get_model_structural_tag(family, [tool], forced, reasoning="disabled").format)
        parser = utils.ResponseParser(template, prefix="")
        try:
            found = utils.response_events_to_chunks([*parser.feed(text), *parser.finalize()[1]])
        except (ValueError, RuntimeError):
            continue
        if found == [utils.ToolCall("probe", _ARGUMENTS["json"])]:
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
    field: dict[str, Any] = next((fields[name] for name in utils._REASONING_FIELDS if name in fields), {})
    opener, closer = (str(field.get(name)).strip() for name in ("open", "close"))
    if not field or prompt.endswith(closer):
        return "disabled"
    return "enabled" if prompt.endswith(opener) else "auto"
