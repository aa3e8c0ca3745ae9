"""Training examples from a JSON lines file.

A line has {"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or
{"text": ...}. The loss is on answers and completions; of a text, and where a chat template does not show
where an answer is, on all tokens.
"""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from .._text import first_line

_IGNORED = -100  # a label that counts in no loss
_FORMS = (("messages",), ("prompt", "completion"), ("text",))  # the keys of a line
_ONE_OF_THEM = 'must have "messages", "prompt" and "completion", or "text"'
_PREFERENCES = {"dpo": ("prompt", "chosen", "rejected"), "grpo": ("prompt",)}  # the keys of a line
_ARGUMENTS = ("prompts", "completions")  # arguments that TRL itself gives a reward, beside the columns


@dataclass
class Example:
    """Token ids of a line and the labels of a causal language model, -100 where there is no loss.

    Attributes:
        line: its number in the file, from 1.
        kind: "answers", "completion", "text" or "conversation", the last with the loss on all tokens.
        is_cut: whether it was truncated.
    """

    ids: list[int]
    labels: list[int]
    line: int
    kind: str
    is_cut: bool

    @property
    def learnt(self) -> int:
        """The number of tokens with a loss; the first is never predicted."""
        return sum(label != _IGNORED for label in self.labels[1:])


def read_examples(file: str, tokenizer: Any, longest: int) -> list[Example]:
    """The examples of a file, each truncated to `longest` tokens.

    Raises: ValueError with file and line number.
    """
    result = [_example(file, number, row, tokenizer, longest) for number, row in rows_of(file)]
    if not result:
        raise ValueError(f"{file} must have a line with an example, got none")
    return result


def _refuse(file: str, line: int, what: str, came: object) -> NoReturn:
    raise ValueError(f"{file}:{line}: {what}, got {came}")


def rows_of(file: str, is_any: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty.

    Args:
        is_any: accept any keys.

    Raises: ValueError with file and line number, for what needs no tokenizer.
    """
    try:
        lines = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ValueError(f"{file} must be a file that can be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            _refuse(file, number, "must be in UTF-8", error.reason)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}:{number}: not valid JSON: {error.msg} at column {error.colno}"
            ) from None
        except (ValueError, RecursionError) as error:  # numbers of too many digits, too many brackets
            raise ValueError(f"{file}:{number}: not valid JSON: {first_line(error)}") from None
        if not isinstance(row, dict):
            _refuse(file, number, "must be a JSON object", f"a {type(row).__name__}")
        if not is_any and row.keys() & {*chain(*_FORMS)} not in map(set, _FORMS):
            _refuse(file, number, _ONE_OF_THEM, ", ".join(map(repr, row)) or "nothing")
        yield number, row


def read_preferences(file: str, method: str) -> dict[int, dict[str, Any]]:
    """{line number: object} of a file for "dpo" or "grpo", each with the same keys, None for a missing value.

    Raises: ValueError with file and line number, for what needs no tokenizer.
    """
    rows, kinds = dict(rows_of(file, is_any=True)), set()
    for number, row in rows.items():
        for key in _PREFERENCES[method]:
            if not isinstance(value := row.get(key), str | list) or not value:
                _refuse(file, number, f'"{key}" must be a text or a list of messages', f"{value!r:.60}")
            if isinstance(value, list):
                for message in value:
                    _check_message(file, number, message)
            kinds.add(type(value))
            if len(kinds) > 1:
                _refuse(
                    file, number, "all lines must have texts, or all messages", f'another kind under "{key}"'
                )
        if method == "grpo" and (taken := row.keys() & {*_ARGUMENTS}):
            expected = "a column must not have the name of an argument that every reward gets"
            _refuse(file, number, expected, ", ".join(sorted(taken)))
    if not rows:
        raise ValueError(f"{file} must have a line with an example, got none")
    keys = dict.fromkeys(chain.from_iterable(rows.values()))
    return {number: {key: row.get(key) for key in keys} for number, row in rows.items()}


def _example(file: str, number: int, row: dict[str, Any], tokenizer: Any, longest: int) -> Example:
    text, spans, kind = _text_of(file, number, row, tokenizer)
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        _refuse(file, number, "must have characters of Unicode", "half of a surrogate pair")
    encoded = tokenizer(
        text, add_special_tokens=kind in ("completion", "text"), return_offsets_mapping=True, verbose=False
    )
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    labels = [
        token if any(first <= start and start < end <= last for first, last in spans) else _IGNORED
        for token, (start, end) in zip(ids, places, strict=True)
    ]
    ends = tokenizer.eos_token_id
    if kind in ("completion", "text") and ends is not None:
        has_end = ids[-1:] == [ends]  # some tokenizers write it, which is then no part of the text
        ids, labels = [*ids[: len(ids) - has_end], ends], [*labels[: len(ids) - has_end], ends]
    made = Example(ids[:longest], labels[:longest], number, kind, len(ids) > longest)
    if made.learnt == 0:
        got = "none" if len(ids) <= longest else f"none in the first {longest}"
        _refuse(file, number, "must have a token behind the first that the loss is on", got)
    return made


def _text_of(
    file: str, number: int, row: dict[str, Any], tokenizer: Any
) -> tuple[str, list[tuple[int, int]], str]:
    """Text of an example, [start, end) of the characters with a loss, and its kind."""
    match sorted(row.keys() & {*chain(*_FORMS)}):
        case ["messages"]:
            return _conversation(file, number, row["messages"], tokenizer)
        case ["completion", "prompt"]:
            prompt, completion = (_string(file, number, row, key) for key in ("prompt", "completion"))
            return prompt + completion, [(len(prompt), len(prompt + completion))], "completion"
        case _:
            text = _string(file, number, row, "text")
            return text, [(0, len(text))], "text"


def _string(file: str, number: int, row: dict[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        _refuse(file, number, f'"{key}" must be a string', f"a {type(value).__name__}")
    if not value and key != "prompt":
        _refuse(file, number, f'"{key}" must have characters', "none")
    return value


def _conversation(
    file: str, number: int, messages: Any, tokenizer: Any
) -> tuple[str, list[tuple[int, int]], str]:
    _check_messages(file, number, messages)
    if not tokenizer.chat_template:
        _refuse(file, number, '"messages" need a chat template', "a model without one")
    try:
        text, spans = _answers(messages, tokenizer)
    except Exception as error:  # whatever the template raises
        _refuse(file, number, "must be a conversation that the chat template takes", first_line(error))
    if spans:
        return text, spans, "answers"
    return text, [(0, len(text))], "conversation"


def _check_messages(file: str, number: int, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        _refuse(file, number, '"messages" must be a list of messages', f"{messages!r:.60}")
    for message in messages:
        _check_message(file, number, message)
    if messages[-1]["role"] != "assistant":
        _refuse(file, number, "the last message must be of the assistant", f"one of {messages[-1]['role']}")


def _check_message(file: str, number: int, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        _refuse(file, number, 'a message must have "role" and "content"', f"{message!r:.60}")
    if not isinstance(message.get("content"), str) and "tool_calls" not in message:
        _refuse(file, number, 'the "content" of a message must be a string', f"{message!r:.60}")


def _answers(messages: list[Any], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as the chat template writes it, and [start, end) of its answers.

    An answer is what follows the text that asks for it, up to the text that the conversation has until then.
    Of a template that writes earlier answers otherwise, as without their reasoning, only some are.
    """

    def written(count: int, asks: bool = False) -> str:
        text: str = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=asks
        )
        return text

    text, spans = written(len(messages)), []
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and place > 0:
            before, until = written(place, asks=True), written(place + 1)
            if text.startswith(before) and text.startswith(until) and len(before) < len(until):
                spans.append((len(before), len(until)))
    return text, spans
