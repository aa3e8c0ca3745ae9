"""Table of answer formats: the marks of reasoning and tool calls of each model family.

A model's format is the first one whose marks are all in its chat template.
"""

from dataclasses import dataclass
from typing import Any, Literal

import regex

# A name in a call's header; blanks there. Both have a bound, so that a header is text again after it.
_NAME = r'(?P<name>[^\s<>{}()\[\]":]{1,256})'
_BLANKS = r"\s{0,64}"


@dataclass(frozen=True)
class Tags:
    """Marks of tagged arguments: `begin` KEY `key_end` attributes `value` VALUE `value_end`.

    Args:
        name_end: mark after the function's name.
        value: mark before a value, after attributes; "" if values start at `key_end`.
        end: mark after the call.
        padding: surrounds a value without being part of it.
    """

    name_end: str
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
        header: pattern between a call's mark and its arguments, with groups for name and id. It ends with a
            mark or a lookahead, so that more text does not change a match.
        opens: marks in front of calls. They are text where no call follows.
        closes: marks behind calls. They are text where they stand behind no call.
        thought: marks around reasoning.
        grammar: xgrammar's name of the family, or None.
        needs_tool: True if only names of the request's tools start a call, as its mark is one of JSON.
        ends_thought: True if a call also ends reasoning that was not closed.
    """

    in_template: tuple[str, ...]
    begins: tuple[str, ...]
    arguments: Literal["json", "gemma", "python", "harmony"] | Tags
    grammar: str | None = None
    header: regex.Pattern[str] | None = None
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    thought: tuple[str, str] = ("<think>", "</think>")
    needs_tool: bool = False
    ends_thought: bool = False

    @property
    def marks(self) -> set[str]:
        """All marks of the format, special tokens included."""
        inner = vars(self.arguments).values() if isinstance(self.arguments, Tags) else _INNER
        return {*self.begins, *self.opens, *self.closes, *self.thought, *inner}

    @property
    def ends(self) -> tuple[str, ...]:
        """Marks that end a broken call."""
        return (*self.opens, *(() if self.needs_tool else (*self.begins, *self.closes)))

    def begun(self, last: str, header: str) -> str:
        """Start of the answer in the last message of a prompt.

        Args:
            last: that message, as far as the prompt has it.
            header: the generation prompt: the header of the model's messages, and marks of the answer.
        """
        marks = _HARMONY if self.arguments == "harmony" else (*self.thought, *self.opens, *self.begins)
        places = [at for mark in marks if (at := header.find(mark)) >= 0]
        return last.removeprefix(header[: min(places, default=len(header))])


_HARMONY = ("<|start|>", "<|channel|>")
_INNER = {  # marks inside of calls, and of harmony's messages
    "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", "[ARGS]", "[CALL_ID]", '<|"|>', "<|start|>",
    "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
}  # fmt: skip


def _header(pattern: str, *ends: str) -> regex.Pattern[str]:
    """Pattern of a header with `NAME` in it, in front of one of the marks."""
    last = "|".join(map(regex.escape, ends))
    return regex.compile(f"{pattern.replace('NAME', _NAME)}{_BLANKS}(?={last})")


def _tagged(
    in_template: tuple[str, ...], begin: str, tags: Tags, grammar: str, around: tuple[str, str] | None = None
) -> Form:
    """Format of calls with tagged arguments."""
    opens, closes = ((around[0],), (around[1],)) if around else ((), ())
    header = _header(f"NAME{_BLANKS}{regex.escape(tags.name_end)}", tags.begin, tags.end, *closes)
    return Form(in_template, (begin,), tags, grammar, header, opens, closes)


def _dsml(calls: str, grammar: str, space: str = "") -> Form:
    """Format of DeepSeek from V3.2 on (DSML)."""
    tag = f"｜DSML｜{space}"
    tags = Tags(
        name_end='">',
        begin=f'<{tag}parameter name="',
        key_end='"',
        value=">",
        value_end=f"</{tag}parameter>",
        end=f"</{tag}invoke>",
    )
    around = (f"<{tag}{calls}>", f"</{tag}{calls}>")
    return _tagged((around[0],), f'<{tag}invoke name="', tags, grammar, around)


def _deepseek(in_template: tuple[str, ...], grammar: str, header: str, end: str) -> Form:
    """Format of DeepSeek up to V3.1."""
    return Form(
        in_template, ("<｜tool▁call▁begin｜>",), "json", grammar, _header(header, "{", end),
        ("<｜tool▁calls▁begin｜>",), (end, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    )  # fmt: skip


FORMS = (
    Form(("<|channel|>commentary", "<|channel|>analysis"), (), "harmony", "harmony"),
    Form(
        ("<|turn>", "<|tool_call>"), ("<|tool_call>",), "gemma", "gemma_4", _header("call:NAME", "{"),
        closes=("<tool_call|>",), thought=("<|channel>thought\n", "<channel|>"),
    ),
    _dsml("function_calls", "deepseek_v3_2"),
    _dsml("tool_calls", "deepseek_v4"),
    _dsml("calls", "deepseek_v4_1", " "),
    _deepseek(
        ("<｜tool▁call▁begin｜>", "```json"), "deepseek_r1",
        rf"function<｜tool▁sep｜>NAME{_BLANKS}```json", "```<｜tool▁call▁end｜>",
    ),
    _deepseek(
        ("<｜tool▁call▁begin｜>",), "deepseek_v3_1", rf"NAME{_BLANKS}<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    ),
    Form(
        ("<|tool_call_begin|>",), ("<|tool_call_begin|>",), "json", "kimi",
        _header(
            rf"(?P<id>(?:functions\.)?NAME:\d{{1,9}}){_BLANKS}<\|tool_call_argument_begin\|>",
            "{", "<|tool_call_end|>",
        ),
        ("<|tool_calls_section_begin|>",), ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ends_thought=True,
    ),
    _tagged(
        ("<minimax:tool_call>",), '<invoke name="',
        Tags('">', '<parameter name="', '">', "</parameter>", "</invoke>"), "minimax",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    _tagged(
        ("<tool_call>", "<arg_key>"), "<tool_call>",
        Tags("", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", "<arg_value>"), "glm_4_7",
    ),
    _tagged(
        ("<tool_call>", "<function="), "<function=",
        Tags(">", "<parameter=", ">", "</parameter>", "</function>", padding="\n"), "qwen_3_5",
        ("<tool_call>", "</tool_call>"),
    ),
    Form(
        ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), "json",
        header=_header(rf"NAME(?:\[CALL_ID\](?P<id>\w{{1,64}}))?{_BLANKS}(?:\[ARGS\])?", "{"),
        thought=("[THINK]", "[/THINK]"),
    ),
    Form(
        ("<|tool_call_start|>",), ("<|tool_call_start|>",), "python", closes=("<|tool_call_end|>",),
    ),
    Form(("<tool_call>",), ("<tool_call>",), "json", "qwen_3", closes=("</tool_call>",)),
    Form(
        ("<|start_header_id|>", '"parameters":'), ("{",), "json", "llama", opens=("<|python_tag|>",),
        closes=(";",), needs_tool=True,
    ),
)  # fmt: skip


def form_of(processor: Any) -> Form | None:
    """Answer format for a chat template, or None."""
    tokenizer = getattr(processor, "tokenizer", processor)
    template = getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    templates = [*template.values()] if isinstance(template, dict) else [template]
    text = "\n".join(each for each in templates if isinstance(each, str))
    return next((form for form in FORMS if all(mark in text for mark in form.in_template)), None)
