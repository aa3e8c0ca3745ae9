"""gpt-oss's answers: how transformers' server reads them, and xgrammar's tag of calls."""

from typing import Any

MARKS = ("<|channel|>commentary", "<|channel|>analysis")  # in its chat template
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open": "<|channel|>analysis<|message|>", "close": ["<|end|>", "<|return|>"], "content": "text",
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|channel\|>commentary)?\s*to=functions\.(?P<name>[^\s<]+)"
            r"(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
            "close": ["<|end|>", "<|return|>"],
            "content": "text",
        },
    },
}  # fmt: skip


def grammar(tools: list[Any], choice: Any, parallel: bool) -> Any:
    """Grammar: optional reasoning, then at least one tool call; xgrammar's own form asks for none."""
    from xgrammar import get_model_structural_tag
    from xgrammar import structural_tag as forms

    calls: Any = get_model_structural_tag(
        "harmony",
        tools,
        choice,
        reasoning="disabled",
        max_whitespace_cnt=1,  # a model that may write any blanks may never end
        parallel_tool_calls=True,
    ).format
    calls.at_least_one, calls.stop_after_first = True, not parallel
    thought = forms.TagFormat(
        begin="<|channel|>analysis<|message|>", content=forms.AnyTextFormat(), end="<|end|>"
    )
    before = forms.SequenceFormat(elements=[thought, forms.ConstStringFormat(value=calls.separator)])
    return forms.StructuralTag(
        format=forms.SequenceFormat(elements=[forms.OptionalFormat(content=before), calls])
    )
