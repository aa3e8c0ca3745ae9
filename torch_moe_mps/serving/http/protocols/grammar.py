"""Grammars of answers: optional reasoning, then content in a JSON schema, tool calls, or either of them.

A grammar describes the whole answer, so the start of the answer that a prompt has is part of it.
"""

from dataclasses import replace
from typing import Any

from ..request import Forced, Refused, Tool
from .forms import Form

_BLANKS = 8  # at most, after reasoning and between JSON's marks: a model that may write any may never end
_START, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"  # Harmony's
_ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|>")


def of_calls(forced: Forced, form: Form | None, is_parallel: bool) -> Any:
    """xgrammar's structural tag of an answer with a forced tool call.

    Args:
        form: the model's answer format.
        is_parallel: True to allow several calls.

    Raises: Refused if xgrammar has no grammar for the model's calls.
    """
    if form is None or form.grammar is None:
        message = (
            "'tool_choice' needs a model whose form of calls this server knows, and this one's is not known."
        )
        raise Refused(message, "tool_choice")
    return _answer(form, _calls(form, form.grammar, forced.tools, forced.name, is_parallel))


def start(form: Form | None, begun: str, is_forced: bool) -> str:
    """Start of an answer in a prompt, as the answer's grammar has it.

    Reasoning that a prompt only ends is begun, too. Content before a forced call is left out.
    """
    if form is None:
        return "" if is_forced else begun
    begin, end = form.thought
    begun = f"{begin}{begun}" if begun.lstrip().startswith(end) else begun
    if not is_forced or form.arguments == "harmony":
        return begun
    reasoning, found, _ = begun.rpartition(end)
    return f"{reasoning}{found}" if found else begun if begin.strip() in begun else ""


def of_content(schema: dict[str, Any], form: Form | None, tools: list[Tool]) -> Any:
    """xgrammar's structural tag of an answer whose content fits a JSON schema.

    Args:
        form: the model's answer format; None for content without reasoning and calls.
        tools: tools that the model may call instead. Their arguments are not constrained.
    """
    from xgrammar import structural_tag as tags

    content: Any = tags.JSONSchemaFormat(json_schema=schema, max_whitespace_cnt=1)
    if form is None:
        return tags.StructuralTag(format=content)
    if form.arguments == "harmony":
        content = tags.TagFormat(begin=_FINAL, content=content, end="")
    if tools and form.grammar is not None:
        free = [replace(tool, schema={"type": "object"}) for tool in tools]
        calls = _calls(form, form.grammar, free, None, is_parallel=True)
        content = tags.OrFormat(elements=[content, calls])
    elif tools:
        marks, names = (
            tags.OrFormat(elements=[tags.ConstStringFormat(value=value) for value in values])
            for values in ((*form.opens, *form.begins), (tool.name for tool in tools))
        )
        between = tags.RegexFormat(pattern=r'\s{0,2}\[?(\{"name": ")?')  # one call, or a list of them
        calls = tags.SequenceFormat(elements=[marks, between, names, tags.AnyTextFormat()])
        content = tags.OrFormat(elements=[content, calls])
    return _answer(form, content)


def _calls(form: Form, grammar: str, tools: list[Tool], name: str | None, is_parallel: bool) -> Any:
    """Format of at least one tool call, without reasoning."""
    from xgrammar import get_model_structural_tag
    from xgrammar import structural_tag as tags

    choice: Any = "required"
    if name is not None:
        choice = {"type": "function", "function": {"name": name}}
    functions: list[Any] = [tool.function for tool in tools]
    # Harmony's own grammars need no call at all.
    is_harmony = form.arguments == "harmony"
    calls: Any = get_model_structural_tag(
        grammar,
        functions,
        choice,
        reasoning="disabled" if is_harmony else "auto",
        max_whitespace_cnt=1,
        parallel_tool_calls=is_parallel or is_harmony,
    ).format
    if is_harmony:
        calls.at_least_one, calls.stop_after_first = True, not is_parallel
    elif isinstance(calls, tags.SequenceFormat) and isinstance(calls.elements[0], tags.OptionalFormat):
        calls = calls.elements[-1]  # the calls after optional reasoning
    return calls


def _answer(form: Form, rest: Any) -> Any:
    """Structural tag of optional reasoning and the rest of an answer."""
    from xgrammar import structural_tag as tags

    def optional(*elements: Any) -> Any:
        return tags.OptionalFormat(content=tags.SequenceFormat(elements=[*elements]))

    if form.arguments == "harmony":
        begin, end = _ANALYSIS
        thought = tags.TagFormat(begin=begin, content=tags.AnyTextFormat(), end=end)
        start = tags.ConstStringFormat(value=_START)
        elements = [tags.OptionalFormat(content=start), optional(thought, start), rest]
    else:
        begin, end = form.thought
        inside = tags.AnyTextFormat(excludes=[begin.strip(), end])
        thought = tags.TagFormat(begin=begin, content=inside, end=end)
        blanks = tags.RegexFormat(pattern=rf"\s{{0,{_BLANKS}}}")
        elements = [optional(thought, blanks), rest]
    return tags.StructuralTag(format=tags.SequenceFormat(elements=elements))
