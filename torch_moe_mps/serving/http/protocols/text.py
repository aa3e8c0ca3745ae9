"""llama.cpp's `/tokenize` and `/detokenize`."""

from typing import Any

from ...engine.ranges import is_list_of
from .. import limits
from ..logprobs import text_of
from ..request import TEXT, YES_OR_NO, Fields, check_count, wrong
from ..served import Served

_OPTIONS = {"add_special": YES_OR_NO, "parse_special": YES_OR_NO, "with_pieces": YES_OR_NO}
_TOKENIZE = Fields({"content": TEXT, "model": TEXT, **_OPTIONS}, "content")
_DETOKENIZE = Fields({"model": TEXT}, "tokens")


def tokenize(body: dict[str, Any], served: Served) -> dict[str, Any]:
    """Tokens of `content`, and their texts if `with_pieces` is set. Raises: Refused."""
    _TOKENIZE.check(body, "/tokenize", served.say_once)
    check_count("content", len(body["content"]), limits.CHARACTERS, "characters")
    with served.template.tokenizing(splits=body.get("parse_special") is False) as tokenizer:
        ids = tokenizer(body["content"], add_special_tokens=bool(body.get("add_special")))["input_ids"]
        if not body.get("with_pieces"):
            return {"tokens": [*ids]}
        if len(ids) > limits.PIECES:
            raise wrong("with_pieces", f"false for more than {limits.PIECES} tokens", True)
        texts = {token: _text_of_token(served, token) for token in {*ids}}
        return {"tokens": [{"id": token, "piece": texts[token]} for token in ids]}


def detokenize(body: dict[str, Any], served: Served) -> dict[str, Any]:
    """Text of `tokens`. Raises: Refused."""
    _DETOKENIZE.check(body, "/detokenize", served.say_once)
    tokens = body["tokens"]
    if not is_list_of(int, tokens):
        raise wrong("tokens", "a list of tokens", tokens)
    check_count("tokens", len(tokens), served.context, "tokens")
    served.check_tokens(tokens, "tokens")
    with served.template.tokenizing() as tokenizer:
        return {"content": tokenizer.decode(tokens)}


def _text_of_token(served: Served, token: int) -> str | list[int] | None:
    """Text of a token, or its bytes where they are part of a character."""
    text, data = text_of(served.template.tokenizer, token)
    return data if "\ufffd" in text else text


PATHS = {"/tokenize": tokenize, "/detokenize": detokenize}
