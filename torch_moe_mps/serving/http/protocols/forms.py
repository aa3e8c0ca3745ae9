"""Forms of answers: how a family of models marks its reasoning and tool calls, a row each.

A model's form is the first one whose marks are all in its chat template.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Tags:
    """Marks of arguments that have a tag each: `begin` KEY `key_end` attributes `value` VALUE `value_end`.

    Args:
        name_ends: end the name of the function.
        value: begins a value, behind attributes; "" where it is at `key_end`.
        end: of the call.
        padding: stands in front of a value and behind it, and is not part of it.
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
    """A form of answers.

    Args:
        in_template: marks by which a chat template is recognised.
        begins: marks of a call.
        arguments: how they lie. "json": an object with the name in it, a list of these, or an object behind
            a `header`. "gemma": JSON without quotes around keys, behind a `header`. "python": a list of calls
            as Python writes them. "harmony": messages of channels.
        header: matches what stands between a mark of a call and its arguments; its groups are name and id.
        around: marks that are part of no text and no call: of sections, and of the ends of calls.
        thought: marks around reasoning.
        grammar: xgrammar's name of the family; None where it has none.
        needs_tool: True if only the name of a tool of the request makes a call.
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
        """All marks, some of which are special tokens."""
        tags = self.arguments
        inner = {*vars(tags).values()} - {tags.name_ends} if isinstance(tags, Tags) else _INNER
        return {*self.begins, *self.around, *self.thought, *inner}


_INNER = {  # marks inside of calls, and of harmony's messages
    "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "[ARGS]", "[CALL_ID]", '<|"|>', "<|start|>",
    "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
}  # fmt: skip
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")


def _dsml(calls: str, grammar: str, space: str = "") -> Form:
    """DeepSeek's markup from V3.2 on."""
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
        header=re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?"),
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
    """The form of a model's answers; None where its chat template has the marks of none."""
    tokenizer = getattr(processor, "tokenizer", processor)
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    templates = [*template.values()] if isinstance(template, dict) else [template]
    text = "\n".join(each for each in templates if isinstance(each, str))
    return next((form for form in FORMS if all(mark in text for mark in form.in_template)), None)


def begun_by(prompt: str) -> str:
    """The beginning of an answer at the end of a prompt."""
    ends = [at + len(anchor) for anchor in _ANCHORS if (at := prompt.rfind(anchor)) >= 0]
    return prompt[max(ends) :] if ends else ""
