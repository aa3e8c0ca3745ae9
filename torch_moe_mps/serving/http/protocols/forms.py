"""Table of answer formats: the marks of reasoning and tool calls of each model family.

A model's format is the first one whose marks are all in its chat template.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Tags:
    """Marks of tagged arguments: `begin` KEY `key_end` attributes `value` VALUE `value_end`.

    Args:
        name_ends: marks after the function's name.
        value: mark before a value, after attributes; "" if values start at `key_end`.
        end: mark after the call.
        padding: surrounds a value without being part of it.
    """

    name_ends: tuple[str, ...]
    begin: str
    key_end: str
    value_end: str
    end: str
    value: str = ""
    padding: str = ""


@dataclass(frozen=True)
class Form:
    """Answer format of a model family.

    Args:
        in_template: marks that identify its chat templates.
        begins: marks before a tool call.
        arguments: syntax of calls. "json": an object with the name in it, a list of these, or an object after
            a `header`. "gemma": JSON without quotes around keys, after a `header`. "python": a list of calls
            in Python syntax. "harmony": messages in channels.
        header: pattern between a call's mark and its arguments, with groups for name and id.
        around: marks that are neither text nor part of a call, such as section marks.
        thought: marks around reasoning.
        grammar: xgrammar's name of the family, or None.
        needs_tool: True if only names of the request's tools start a call.
    """

    in_template: tuple[str, ...]
    begins: tuple[str, ...]
    arguments: Literal["json", "gemma", "python", "harmony"] | Tags
    grammar: str | None = None
    header: re.Pattern[str] | None = None
    around: tuple[str, ...] = ()
    thought: tuple[str, str] = ("<think>", "</think>")
    needs_tool: bool = False

    @property
    def marks(self) -> set[str]:
        """All marks of the format, special tokens included."""
        tags = self.arguments
        inner = {*vars(tags).values()} - {tags.name_ends} if isinstance(tags, Tags) else _INNER
        return {*self.begins, *self.around, *self.thought, *inner}


_INNER = {  # marks inside of calls, and of harmony's messages
    "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "[ARGS]", "[CALL_ID]", '<|"|>', "<|start|>",
    "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
}  # fmt: skip
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")


def _dsml(calls: str, grammar: str, space: str = "") -> Form:
    """Format of DeepSeek from V3.2 on (DSML)."""
    tag = f"｜DSML｜{space}"
    arguments = Tags(
        name_ends=('">',),
        begin=f'<{tag}parameter name="',
        key_end='"',
        value=">",
        value_end=f"</{tag}parameter>",
        end=f"</{tag}invoke>",
    )
    around = (f"<{tag}{calls}>", f"</{tag}{calls}>")
    return Form((around[0],), (f'<{tag}invoke name="',), arguments, grammar, around=around)


FORMS = (
    Form(("<|channel|>commentary", "<|channel|>analysis"), (), "harmony", "harmony"),
    Form(
        ("<|turn>", "<|tool_call>"), ("<|tool_call>",), "gemma",
        header=re.compile(r"call:(?P<name>[\w.-]+)"), around=("<tool_call|>",),
        thought=("<|channel>thought\n", "<channel|>"),
    ),
    _dsml("function_calls", "deepseek_v3_2"),
    _dsml("tool_calls", "deepseek_v4"),
    _dsml("calls", "deepseek_v4_1", " "),
    Form(
        ("<｜tool▁call▁begin｜>", "```json"), ("<｜tool▁call▁begin｜>",), "json", "deepseek_r1",
        re.compile(r"function<｜tool▁sep｜>(?P<name>\S+)\s+```json"), (*_DEEPSEEK, "```<｜tool▁call▁end｜>"),
    ),
    Form(
        ("<｜tool▁call▁begin｜>",), ("<｜tool▁call▁begin｜>",), "json", "deepseek_v3_1",
        re.compile(r"(?P<name>[^\s<]+)\s*<｜tool▁sep｜>"), _DEEPSEEK,
    ),
    Form(
        ("<|tool_call_begin|>",), ("<|tool_call_begin|>",), "json", "kimi",
        re.compile(r"(?P<id>(?:functions\.)?(?P<name>[^\s:]+):\d+)\s*<\|tool_call_argument_begin\|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>"),
    ),
    Form(
        ("<minimax:tool_call>",), ('<invoke name="',),
        Tags(('">',), '<parameter name="', '">', "</parameter>", "</invoke>"), "minimax",
        around=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Form(
        ("<tool_call>", "<arg_key>"), ("<tool_call>",),
        Tags(("\n", "<arg_key>", "</tool_call>"), "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>",
             "<arg_value>"), "glm_4_7",
    ),
    Form(
        ("<tool_call>", "<function="), ("<function=",),
        Tags((">",), "<parameter=", ">", "</parameter>", "</function>", padding="\n"), "qwen_3_5",
        around=("<tool_call>", "</tool_call>"),
    ),
    Form(
        ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), "json",
        header=re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\s*(?:\[ARGS\])?"),
        thought=("[THINK]", "[/THINK]"),
    ),
    Form(
        ("<|tool_call_start|>",), ("<|tool_call_start|>",), "python", around=("<|tool_call_end|>",),
    ),
    Form(("<tool_call>",), ("<tool_call>",), "json", "qwen_3", around=("</tool_call>",)),
    Form(
        ("<|start_header_id|>", '"parameters":'), ("{",), "json", "llama", around=("<|python_tag|>",),
        needs_tool=True,
    ),
)  # fmt: skip
# Ends of prompts, behind which an answer begins.
_ANCHORS = (
    "<|im_start|>assistant\n", "<|assistant|>", "<｜Assistant｜>", "<|im_assistant|>assistant<|im_middle|>",
    "]~b]ai\n", "[/INST]", "<|start_header_id|>assistant<|end_header_id|>", "<|turn>model\n",
    "<tool_response|>", "<|start|>assistant",
)  # fmt: skip


def form_of(processor: Any) -> Form | None:
    """Answer format for a chat template, or None."""
    tokenizer = getattr(processor, "tokenizer", processor)
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    templates = [*template.values()] if isinstance(template, dict) else [template]
    text = "\n".join(each for each in templates if isinstance(each, str))
    return next((form for form in FORMS if all(mark in text for mark in form.in_template)), None)


def begun_by(prompt: str) -> str:
    """Start of the answer at the end of a templated prompt."""
    ends = [at + len(anchor) for anchor in _ANCHORS if (at := prompt.rfind(anchor)) >= 0]
    return prompt[max(ends) :] if ends else ""
