"""Requests, in whatever protocol they come, and the checks of their fields."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._text import shown
from ..engine.defaults import choice
from ..engine.ranges import DRAWS, SEED, SETTINGS, TOKENS, Check, integer, is_list_of, number
from . import limits


class Refused(Exception):
    """A request that is refused: a line, the field that it is about, and an HTTP status.

    Args:
        retry_after: seconds after which it may be asked again; None where that is no use.
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
    """The error of a field whose value is none that it can have."""
    return Refused(f"'{field}' must be {expected}, got {shown(got)}.", field, "invalid_value")


def check_count(field: str, count: int, most: int, what: str) -> None:
    """Raises: Refused for a field with more of something than it may have."""
    if count > most:
        raise Refused(f"'{field}' must have at most {most} {what}, got {count}.", field)


def unsupported(field: str, got: object) -> Refused:
    """The error of a field that this server knows and does not serve."""
    return Refused(f"'{field}' is not supported by this server, got {shown(got)}.", field)


def read_json(text: str | bytes) -> Any:
    """The value of a text in JSON. Raises: ValueError."""
    import msgspec  # chat does without it

    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


@dataclass(frozen=True)
class Tool:
    """A tool of a client, which the model sees as a function.

    Args:
        name: as the model sees it.
        kind: "function", or "custom" for a tool whose input is a text: a function with one argument, `input`.
        own_name: as the client calls it, in its `namespace` if it has one.
        schema: of the arguments.
    """

    name: str
    description: str
    schema: dict[str, Any]
    kind: str = "function"
    own_name: str = ""
    namespace: str | None = None

    @property
    def function(self) -> dict[str, Any]:
        """The form that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass
class Chat:
    """A conversation that a model goes on with.

    Args:
        messages: in the form that chat templates read; contents are lists of parts of the type text, image,
            audio or video.
        variables: of the chat template.
        goes_on: whether the last message is the beginning of the answer.
    """

    messages: list[dict[str, Any]]
    tools: list[Tool] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False


@dataclass(frozen=True)
class Forced:
    """Tools for a forced call: of the named one, or of any.

    Args:
        parallel: whether there may be several calls.
    """

    tools: list[Tool]
    name: str | None
    parallel: bool


@dataclass
class Request:
    """The wishes of a client.

    Args:
        prompts: conversations, texts or tokens; each has `count` answers.
        settings: of a GenerationConfig, beside the model's own.
        config: all settings, in place of the model's own.
        most: tokens of an answer; None for the rest of the context.
        frequency, presence: penalties, as OpenAI defines them.
        form: of the answer: a schema in JSON, or the text of a grammar.
        form_field: names the field that `form` or `forced` came from.
        logprobs: how many alternatives each token of the answer shall have with its probability; None for no
            probabilities at all.
        likely: text that the answers probably have, whose tokens are drafted.
        later: fields of the body that are read once it is answered; the others go before.
    """

    prompts: list[Chat | str | list[int]]
    prompt_field: str
    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    most: int | None = None
    stops: tuple[str, ...] = ()
    seed: int | None = None
    frequency: float = 0.0
    presence: float = 0.0
    form: dict[str, Any] | str | None = None
    forced: Forced | None = None
    form_field: str = ""
    logprobs: int | None = None
    count: int = 1
    likely: str = ""
    stream: bool = False
    later: dict[str, Any] = field(default_factory=dict)

    @property
    def tools(self) -> dict[str, Tool]:
        """{name for the model: tool}"""
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
        and all(key.isdecimal() and fits(bias) for key, bias in value.items())
    )


def is_object_in_json(value: Any) -> bool:
    try:
        return len(value) <= limits.FORM_CHARACTERS and isinstance(read_json(value), dict)
    except (TypeError, ValueError):
        return False


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
    "generation_config": (
        is_object_in_json,
        f"the text of an object in JSON, of at most {limits.FORM_CHARACTERS} characters",
    ),
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
    """The fields that a path knows; others are ignored, as agents send new ones every month.

    Args:
        checks: {field: the check of its value unless it is null}.
        needed: must be there.
        others: fields that are read in another place, or change no answer.
        nothing: {field that this server has no answer to: the values that ask for nothing}.
    """

    checks: dict[str, Check]
    needed: str
    others: frozenset[str] = frozenset()
    nothing: dict[str, list[Any]] = field(default_factory=dict)

    def check(self, body: dict[str, Any], path: str, say_once: Callable[[str], None]) -> None:
        """Raises: Refused for the first field that is not as it must be.

        Args:
            say_once: takes a line on each field that is ignored.
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


def texts_or_tokens(value: Any, field: str, most: int) -> list[str | list[int]]:
    """A text, tokens, or a list of at most so many of these, as a list. Raises: Refused."""
    if _is_text_or_tokens(value):
        return [value]
    if isinstance(value, list) and 0 < len(value) <= most and all(map(_is_text_or_tokens, value)):
        return [*value]
    raise wrong(field, f"a text, a list of tokens, or a list of at most {most} of these", value)


def _is_text_or_tokens(value: Any) -> bool:
    return isinstance(value, str) or (bool(value) and is_list_of(int, value))


def common(body: dict[str, Any], later: Sequence[str] = ("stream_options",)) -> dict[str, Any]:
    """The parts of a Request that all bodies have, of one that was checked: how tokens are chosen, and how
    they are given out.

    Args:
        later: names of fields that are read once it is answered.
    """
    settings: dict[str, Any] = {
        name: kind(body[name])  # transformers takes no integers where numbers are
        for name, kind in _SAMPLING.items()
        if body.get(name) is not None
    }
    settings = choice(settings)
    if body.get("logit_bias"):
        settings["sequence_bias"] = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
    config, stop = body.get("generation_config"), body.get("stop")
    return {
        "settings": settings,
        "config": None if config is None else read_json(config),
        "stops": (stop,) if isinstance(stop, str) else tuple(stop or ()),
        "seed": body.get("seed"),
        "frequency": float(body.get("frequency_penalty") or 0),
        "presence": float(body.get("presence_penalty") or 0),
        "stream": bool(body.get("stream")),
        "later": {name: body[name] for name in later if name in body},
    }
