"""Protocol-independent requests, and field validation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._text import shown
from ..engine.defaults import choice
from ..engine.ranges import DRAWS, MOST, SEED, SETTINGS, TOKENS, Check, integer, is_list_of, number
from . import limits


class Refused(Exception):
    """Error of a rejected request: message, field and HTTP status.

    Args:
        retry_after: seconds until a retry may succeed, or None.
    """

    def __init__(
        self,
        message: str,
        field: str | None,
        code: str | None = "unsupported_value",
        status: int = 400,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.message, self.field, self.code, self.status = message, field, code, status
        self.retry_after = retry_after


def wrong(field: str, expected: str, got: object) -> Refused:
    """Error for an invalid field value."""
    return Refused(f"'{field}' must be {expected}, got {shown(got)}.", field, "invalid_value")


def check_count(field: str, count: int, limit: int, what: str) -> None:
    """Raises: Refused if a field has more than `limit` entries."""
    if count > limit:
        raise Refused(f"'{field}' must have at most {limit} {what}, got {count}.", field)


def unsupported(field: str, got: object) -> Refused:
    """Error for a known but unsupported field."""
    return Refused(f"'{field}' is not supported by this server, got {shown(got)}.", field)


def read_json(text: str | bytes) -> Any:
    """Value of a JSON text. Raises: ValueError."""
    import msgspec  # chat does without it

    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


@dataclass(frozen=True)
class Tool:
    """A client's tool, presented to the model as a function.

    Args:
        name: for the model.
        kind: "function", or "custom" for a tool with text input, a function with one argument `input`.
        own_name: for the client, within `namespace` if there is one.
        schema: of the arguments.
        is_strict: True if a forced call must keep all keywords of the schema.
    """

    name: str
    description: str
    schema: dict[str, Any]
    kind: str = "function"
    own_name: str = ""
    namespace: str | None = None
    is_strict: bool = False

    @property
    def function(self) -> dict[str, Any]:
        """Function definition in the form of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass
class Chat:
    """A conversation to continue.

    Args:
        messages: in the form of chat templates; contents are lists of text, image and audio parts.
        variables: for the chat template.
        goes_on: True if the last message is the start of the answer.
    """

    messages: list[dict[str, Any]]
    tools: list[Tool] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False


@dataclass(frozen=True)
class Forced:
    """Tools of a forced call.

    Args:
        name: of the only tool that may be called; None for any of them.
    """

    tools: list[Tool]
    name: str | None


@dataclass
class Request:
    """A parsed generation request.

    Args:
        prompts: conversations, texts or tokens; each has `count` answers.
        settings: GenerationConfig fields that override the model's.
        max_tokens: the maximum length of an answer; None for the rest of the context.
        frequency, presence: penalties as defined by OpenAI.
        form: JSON schema of structured output.
        form_field: field that `form` or `forced` came from.
        is_parallel: False to end an answer at its first tool call.
        logprobs: number of top log probabilities per token; None for no log probabilities.
        later: body fields that the response still needs; the others are freed before.
    """

    prompts: list[Chat | str | list[int]]
    prompt_field: str
    settings: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    seed: int | None = None
    frequency: float = 0.0
    presence: float = 0.0
    form: dict[str, Any] | None = None
    forced: Forced | None = None
    form_field: str = ""
    is_parallel: bool = True
    logprobs: int | None = None
    count: int = 1
    stream: bool = False
    later: dict[str, Any] = field(default_factory=dict)

    @property
    def tools(self) -> dict[str, Tool]:
        """{model-side name: tool}"""
        return {
            tool.name: tool for prompt in self.prompts if isinstance(prompt, Chat) for tool in prompt.tools
        }


_SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


def instance(kind: type, expected: str) -> Check:
    return lambda value: isinstance(value, kind), expected


def _are_stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > limits.STOPS or not is_list_of(str, stops):
        return False
    return all(0 < len(stop) <= limits.STOP_CHARACTERS for stop in stops)


def _are_biases(value: Any) -> bool:
    fits, _ = number(-100, 100)
    return (
        isinstance(value, dict)
        and len(value) <= TOKENS
        and all(_is_token(key) and fits(bias) for key, bias in value.items())
    )


def _is_token(key: str) -> bool:
    """True for the decimal digits of a token id. Python's `int` refuses a text of thousands of them."""
    return key.isdecimal() and len(key) <= len(str(MOST))


TEXT = instance(str, "a text")
OBJECT = instance(dict, "an object")
YES_OR_NO = instance(bool, "true or false")
STOPS: Check = (
    _are_stops,
    f"a text of 1 to {limits.STOP_CHARACTERS} characters, or a list of at most {limits.STOPS} of these",
)
# {field: check} of what all of OpenAI's protocols have, where it is not null.
SHARED: dict[str, Check] = {
    "frequency_penalty": number(-2, 2),
    "logit_bias": (_are_biases, f"an object of at most {TOKENS} token ids and numbers from -100 to 100"),
    "min_p": DRAWS["min_p"],
    "model": TEXT,
    "presence_penalty": number(-2, 2),
    "repetition_penalty": SETTINGS["repetition_penalty"],
    "seed": SEED,
    "stop": STOPS,
    "stream": YES_OR_NO,
    "temperature": number(0, 2),
    "top_k": integer(-1),
    "top_p": number(0, 1, open_at_low=True),
}
# Hints and names that change no answer.
HINTS = frozenset({
    "client_metadata", "max_tool_calls", "metadata", "parallel_tool_calls", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    "stream_options", "user", "verbosity",
})  # fmt: skip
_KEPT_ELSEWHERE = frozenset({"metadata", "store"})  # with answers, by OpenAI's own servers


@dataclass(frozen=True)
class Fields:
    """Known fields of an endpoint. Unknown ones are ignored, as agents keep sending new ones.

    Args:
        checks: {field: check of its value unless null}.
        needed: required fields.
        others: fields read elsewhere, or without effect on answers.
        nothing: {unsupported field: values without effect}.
    """

    checks: dict[str, Check]
    needed: str
    others: frozenset[str] = frozenset()
    nothing: dict[str, list[Any]] = field(default_factory=dict)

    def check(self, body: dict[str, Any], path: str, say_once: Callable[[str], None]) -> None:
        """Validates a body. Raises: Refused for the first invalid field.

        Args:
            say_once: called with a log line for each ignored field.
        """
        for name, (fits, expected) in self.checks.items():
            if body.get(name) is not None and not fits(body[name]):
                raise wrong(name, expected, body[name])
        for name, values in self.nothing.items():
            value = body.get(name)
            if value is not None and not any(value == v and type(value) is type(v) for v in values):
                raise unsupported(name, value)
        for name in _KEPT_ELSEWHERE & body.keys():
            if body[name]:
                say_once(f"{path}: {name!r} is ignored, as this server stores no answers")
        known = {*self.checks, *self.nothing, *self.others, self.needed}
        for name in sorted(body.keys() - known):
            say_once(f"{path}: the field {name!r} is not known and ignored")
        if body.get(self.needed) is None:
            line = f"'{self.needed}' must be there, got none."
            raise Refused(line, self.needed, "missing_required_parameter")


def stops_of(value: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings of a validated field."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def common(body: dict[str, Any], later: Sequence[str] = ("stream_options",)) -> dict[str, Any]:
    """Request arguments common to all protocols, from a validated body: sampling and streaming options.

    Args:
        later: names of fields that the response still needs.
    """
    settings: dict[str, Any] = {
        name: kind(body[name])  # transformers takes no integers where numbers are
        for name, kind in _SAMPLING.items()
        if body.get(name) is not None
    }
    settings = choice(settings)
    if body.get("logit_bias"):
        settings["sequence_bias"] = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
    return {
        "settings": settings,
        "stops": stops_of(body.get("stop")),
        "seed": body.get("seed"),
        "frequency": float(body.get("frequency_penalty") or 0),
        "presence": float(body.get("presence_penalty") or 0),
        "stream": bool(body.get("stream")),
        "later": {name: body[name] for name in later if name in body},
    }
