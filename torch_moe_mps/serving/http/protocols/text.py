"""Texts and tokens, as llama.cpp's server has them: `/tokenize`, `/detokenize` and `/apply-template`."""

from typing import Any

from ..logprobs import text_of
from ..request import TEXT, YES_OR_NO, Fields, wrong
from ..served import Served, check_characters
from .chat import ChatCompletions

_OPTIONS = {"add_special": YES_OR_NO, "parse_special": YES_OR_NO, "with_pieces": YES_OR_NO}
_TOKENIZE = Fields({"content": TEXT, "model": TEXT, **_OPTIONS}, "content")
_DETOKENIZE = Fields({"model": TEXT}, "tokens")


def tokenize(body: dict[str, Any], served: Served) -> dict[str, Any]:
    """The tokens of `content`, and with `with_pieces` their texts. Raises: Refused."""
    _TOKENIZE.check(body, "/tokenize", served.say_once)
    check_characters(len(body["content"]), "content")
    with served.tokenizing(splits=body.get("parse_special") is False) as tokenizer:
        ids = tokenizer(body["content"], add_special_tokens=bool(body.get("add_special")))["input_ids"]
        if not body.get("with_pieces"):
            return {"tokens": [*ids]}
        pieces = {token: _piece(served, token) for token in {*ids}}
        return {"tokens": [{"id": token, "piece": pieces[token]} for token in ids]}


def detokenize(body: dict[str, Any], served: Served) -> dict[str, Any]:
    """The text of `tokens`. Raises: Refused."""
    _DETOKENIZE.check(body, "/detokenize", served.say_once)
    tokens = body["tokens"]
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise wrong("tokens", "a list of tokens", tokens)
    served.check_tokens(tokens, "tokens")
    with served.tokenizing() as tokenizer:
        return {"content": tokenizer.decode(tokens)}


def apply_template(body: dict[str, Any], served: Served) -> dict[str, Any]:
    """The prompt that a chat becomes, as text. Raises: Refused."""
    return {"prompt": served.prompt_text(ChatCompletions().read(body, served))}


def _piece(served: Served, token: int) -> str | list[int] | None:
    """A token's text, its octets where they are a part of a character."""
    text, octets = text_of(served.tokenizer, token)
    return octets if "\ufffd" in text else text


PATHS = {"/tokenize": tokenize, "/detokenize": detokenize, "/apply-template": apply_template}
