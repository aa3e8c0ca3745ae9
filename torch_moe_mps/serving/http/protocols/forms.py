"""Forms of answers: how a model marks its thoughts and calls, known by the marks in its chat template.

They are in the declarative language of `transformers.utils.chat_parsing`, which reads answers by them.
"""

import importlib
from typing import Any

from ....transformers.families import ANSWERS

FAMILIES = {family: importlib.import_module(module) for family, module in ANSWERS.items()}
_CHAT_ML = "<|im_start|>assistant\n"
_ENDS = r"\s*<\|(?:im_end|endoftext|eot_id)\|>"  # with the blanks in front, which are not part of an answer
_CALLED = {"name": "{name}", "arguments": "{content}"}
_THOUGHT = {"open": "<think>", "close": "</think>", "content": "text"}
_CONTENT = {"close_pattern": _ENDS, "content": "text"}


def _form(
    anchor: Any, thought: dict[str, Any], call: dict[str, Any], content: dict[str, Any]
) -> dict[str, Any]:
    fields = {"reasoning_content": thought, "tool_calls": call | {"repeats": True}, "content": content}
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


# A call is an object in JSON: Hermes, Qwen 2 and 3.
JSON_IN_TAGS = _form(
    _CHAT_ML,
    _THOUGHT,
    {
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    _CONTENT,
)
# A call has a tag for each argument: Qwen 3.5, Qwen3-Coder.
TAGS = _form(
    _CHAT_ML,
    _THOUGHT,
    {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^\n>]+)>\s*(?P<value>.*?)\s*</parameter>"},
        "transform": {"type": "function", "function": _CALLED},
    },
    _CONTENT,
)
# A call is an object without quotes around its names, and texts between marks of their own: Gemma 4.
GEMMA = _form(
    ["<|turn>model\n", "<tool_response|>"],
    {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
    {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": {"type": "function", "function": _CALLED},
    },
    {"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
)


def form_of(processor: Any) -> dict[str, Any] | None:
    """The form of a model's answers: its tokenizer's own, or the one whose marks are in the chat template."""
    tokenizer = getattr(processor, "tokenizer", processor)
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return dict(own)
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    return by_marks(template) if isinstance(template, str) else None


def by_marks(chat_template: str) -> dict[str, Any] | None:
    for answers in FAMILIES.values():
        if all(mark in chat_template for mark in answers.MARKS):
            return answers.TEMPLATE
    if "<|turn>" in chat_template and "<|tool_call>" in chat_template:
        return GEMMA
    if "<|im_start|>" not in chat_template or "<tool_call>" not in chat_template:
        return None
    if "<arg_key>" in chat_template:
        return None
    return TAGS if "<function=" in chat_template else JSON_IN_TAGS
