"""Grammars of forced tool calls, in the model's format."""

from typing import Any, Literal

from ..request import Forced, Refused
from .forms import Form


def grammar(forced: Forced, form: Form | None, begun: str, is_parallel: bool) -> Any:
    """xgrammar's structural tag of an answer with a forced tool call.

    Args:
        form: the model's answer format.
        begun: start of the answer that is part of the prompt; it may end inside of reasoning.
        is_parallel: True to allow several calls.

    Raises: Refused if xgrammar has no grammar for the model's calls.
    """
    from xgrammar import get_model_structural_tag

    if form is None or form.grammar is None:
        message = (
            "'tool_choice' needs a model whose form of calls this server knows, and this one's is not known."
        )
        raise Refused(message, "tool_choice")
    tools: list[Any] = [tool.function for tool in forced.tools]
    choice: Any = "required"
    if forced.name is not None:
        choice = {"type": "function", "function": {"name": forced.name}}
    if form.arguments == "harmony":
        return _harmony(tools, choice, is_parallel)
    return get_model_structural_tag(
        form.grammar,
        tools,
        choice,
        reasoning=_reasoning(form.thought, begun.rstrip()),
        max_whitespace_cnt=1,  # a model that may write any blanks may never end
        parallel_tool_calls=is_parallel,
    )


def _reasoning(thought: tuple[str, str], begun: str) -> Literal["enabled", "disabled", "auto"]:
    """Reasoning behind the start of an answer: in progress, impossible, or possible."""
    begin, end = (mark.strip() for mark in thought)
    if begun.endswith(end):
        return "disabled"
    return "enabled" if begun.endswith(begin) else "auto"


def _harmony(tools: list[Any], choice: Any, parallel: bool) -> Any:
    """Structural tag of optional reasoning and at least one call; xgrammar's built-in requires none."""
    from xgrammar import get_model_structural_tag
    from xgrammar import structural_tag as forms

    calls: Any = get_model_structural_tag(
        "harmony", tools, choice, reasoning="disabled", max_whitespace_cnt=1, parallel_tool_calls=True
    ).format
    calls.at_least_one, calls.stop_after_first = True, not parallel
    thought = forms.TagFormat(
        begin="<|channel|>analysis<|message|>", content=forms.AnyTextFormat(), end="<|end|>"
    )
    before = forms.SequenceFormat(elements=[thought, forms.ConstStringFormat(value=calls.separator)])
    return forms.StructuralTag(
        format=forms.SequenceFormat(elements=[forms.OptionalFormat(content=before), calls])
    )
