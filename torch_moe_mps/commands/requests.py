"""Rules of OpenAI for a request to the server, checked before anything is done for it."""

import json
import math
from collections.abc import Callable
from typing import Any

# {field of a request: values that ask for nothing}. Hints such as `user` or `store` change no answer.
_ASKS_NOTHING: dict[str, list[Any]] = {
    "audio": [], "background": [False], "best_of": [1], "echo": [False], "function_call": ["auto"],
    "functions": [[]], "include": [[]], "logprobs": [False], "max_tool_calls": [], "modalities": [["text"]],
    "n": [1], "presence_penalty": [0], "previous_response_id": [], "prompt": [],
    "response_format": [{"type": "text"}], "tool_choice": ["auto"], "top_logprobs": [0],
    "truncation": ["disabled"], "web_search_options": [],
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MOST_STOPS = 4


class Refused(Exception):
    """Refusal of a client's request, in OpenAI's form of an error."""

    def __init__(
        self, message: str, field: str | None, code: str | None = "unsupported_value", status: int = 400
    ):
        super().__init__(message)
        self.body = {"message": message, "type": "invalid_request_error", "param": field, "code": code}
        self.status_code = status


def wrong(field: str, expected: str, got: object) -> Refused:
    """The error of a field whose value is none that it can have."""
    shown = repr(got)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return Refused(f"'{field}' must be {expected}, got {shown}.", field, "invalid_value")


def _number(low: float, high: float, open_at_low: bool = False) -> tuple[Callable[[Any], bool], str]:
    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and low <= value <= high and not (open_at_low and value == low)

    between = "above {:g} and at most {:g}" if open_at_low else "from {:g} to {:g}"
    return fits, f"a number {between.format(low, high)}"


def _integer(low: int, high: float = math.inf) -> tuple[Callable[[Any], bool], str]:
    expected = f"an integer of at least {low}" if high == math.inf else f"an integer from {low} to {high}"
    return lambda value: type(value) is int and low <= value <= high, expected


def _of(kind: type, expected: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, kind), expected


def _are_stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    are_texts = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    return are_texts and len(stops) <= _MOST_STOPS


def _are_biases(value: Any) -> bool:
    fits, _ = _number(-100, 100)
    return isinstance(value, dict) and all(key.isdecimal() and fits(bias) for key, bias in value.items())


def _are_functions(value: Any) -> bool:
    """Functions as of chats, with `function`, or of responses, without."""
    return isinstance(value, list) and all(
        isinstance(tool, dict)
        and isinstance(function := tool.get("function", tool), dict)
        and isinstance(function.get("name"), str)
        for tool in value
    )


def _is_config(value: Any) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except (TypeError, ValueError):
        return False


# {field: (whether it can be so, what it must be)}, where it is not null.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "chat_template_kwargs": _of(dict, "an object"),
    "frequency_penalty": _number(-1, 2, open_at_low=True),  # transformers adds 1, and divides by it
    "generation_config": (_is_config, "the text of an object in JSON"),
    "instructions": _of(str, "a text"),
    "logit_bias": (_are_biases, "an object of token ids and numbers from -100 to 100"),
    "max_completion_tokens": _integer(1),
    "max_output_tokens": _integer(1),
    "max_tokens": _integer(1),
    "model": _of(str, "a text"),
    "seed": _integer(-(1 << 63), (1 << 63) - 1),
    "stop": (_are_stops, f"a text, or a list of at most {_MOST_STOPS}, none of them empty"),
    "stream": _of(bool, "true or false"),
    "stream_options": _of(dict, "an object"),
    "suffix": _of(str, "a text"),
    "temperature": _number(0, 2),
    "tools": (_are_functions, "a list of functions with names"),
    "top_p": _number(0, 1, open_at_low=True),
}


def check(body: dict[str, Any], prompt: str | None) -> None:
    """Brings a request to what transformers' server reads, and checks it.

    Args:
        prompt: the field with the prompt, which is "messages", "prompt" or "input"; None if there is none.

    Raises: Refused.
    """
    for field, (fits, expected) in _FIELDS.items():
        if body.get(field) is not None and not fits(body[field]):
            raise wrong(field, expected, body[field])
    body["stream"] = bool(body.get("stream"))  # of responses, transformers' own default is true
    for field in ("stop", "logit_bias", "tools"):
        if not body.get(field):
            body.pop(field, None)
    if body.get("logit_bias"):  # transformers takes no integers
        body["logit_bias"] = {token: float(bias) for token, bias in body["logit_bias"].items()}
    if prompt is not None and body.get(prompt) is None:
        raise Refused(f"'{prompt}' must be there, got none.", prompt, "missing_required_parameter")
    if prompt == "messages":
        _check_messages(body[prompt], prompt)
    elif prompt == "input" and not isinstance(body[prompt], str):
        _check_items(body[prompt])
    elif prompt == "prompt" and not isinstance(body[prompt], str):
        raise wrong(prompt, "a text", body[prompt])


def _check_messages(messages: Any, field: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise wrong(field, "a list of at least one message", messages)
    for number, message in enumerate(messages):
        _check_message(message, f"{field}[{number}]")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise wrong(where, "an object with role and content", message)
    if message.get("role") not in _ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", message.get("role"))
    if message["role"] == "developer":  # OpenAI's later name of it, which few chat templates know
        message["role"] = "system"
    calls, content = message.get("tool_calls"), message.get("content")
    if calls is None:
        message.pop("tool_calls", None)
    elif not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise wrong(f"{where}.tool_calls", "a list of functions with names and arguments in JSON", calls)
    if content is None and message["role"] == "assistant":
        return
    _check_content(content, f"{where}.content")


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise wrong(where, "a text or a list of parts", content)
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise wrong(f"{where}[{number}]", "an object with a type", part)
        own = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
        kind: str = part["type"]
        name = own.get(kind, kind)
        value = part.get(name)
        if name == "text" and not isinstance(value, str):
            raise wrong(f"{where}[{number}].text", "a text", value)
        url = value.get("url") if isinstance(value, dict) else value
        if name.endswith("_url") and not isinstance(url, str):
            raise wrong(f"{where}[{number}].{name}", "an object with a url", value)


def _is_call(call: Any) -> bool:
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    return isinstance(arguments, dict) or _is_config(arguments)


def _check_items(items: Any) -> None:
    """Check the items of a response's input: messages, calls, their results, parts of a message."""
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise wrong("input", "a text or a list of at least one item", items)
    if "role" not in items[0] and items[0].get("type") in ("input_text", "input_image"):
        return _check_content(items, "input")
    for number, item in enumerate(items):
        where, kind = f"input[{number}]", item.get("type")
        if "role" in item:
            _check_message(item, where)
        elif kind == "function_call":
            if not isinstance(item.get("call_id"), str) or not _is_call(item):
                raise wrong(where, "a call with call_id, name and arguments in JSON", item)
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise wrong(f"{where}.call_id", "a text", item.get("call_id"))
            _check_content(item.get("output"), f"{where}.output")
        elif kind == "reasoning":
            _check_content(item.get("content") or [], f"{where}.content")
        else:
            raise wrong(f"{where}.type", "message, reasoning, function_call or function_call_output", kind)


def refuse_unless_empty(field: str, value: Any) -> None:
    """Raises: Refused for a field that would be ignored, and asks for something."""
    if field == "text":  # of the Responses API: the format inside is read before
        field, value = "response_format", None if isinstance(value, dict) else value
    if field not in _ASKS_NOTHING or value is None or (field == "presence_penalty" and value == 0):
        return
    if not any(value == nothing and type(value) is type(nothing) for nothing in _ASKS_NOTHING[field]):
        raise Refused(f"'{field}' is not supported by this server, got {value!r}.", field)


class Cut:
    """Text that ends before the first of some stops, given piece by piece.

    What may be the beginning of a stop is held back until it is known not to be one.

    Attributes:
        ended: whether a stop has come.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._stops, self._back, self.ended = stops, "", False

    def add(self, piece: str) -> str:
        """Returns: what can be shown now."""
        if self.ended:
            return ""
        text, self._back = self._back + piece, ""
        ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.ended = True
            return text[: min(ends)]
        most = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(most, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                self._back = text[-count:]
                return text[:-count]
        return text

    def rest(self) -> str:
        """Text that was held back, at the end."""
        rest, self._back = self._back, ""
        return rest


def cut(text: str, stops: tuple[str, ...]) -> str:
    """A text up to the first of some stops."""
    return Cut(stops).add(text) if any(stop in text for stop in stops) else text
