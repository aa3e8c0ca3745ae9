"""Preparation of a request: model inputs of its prompts, generation settings, and jobs."""

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jinja2 import TemplateError

from ..._text import first_line
from ..engine.defaults import settings_of_answer
from ..engine.inputs import images_of
from ..engine.job import Job, prompt_length
from ..engine.penalties import Penalties
from ..engine.ranges import MOST, check_settings, unknown_token, vocabulary_of
from ..prefix_cache.memory import Images
from . import limits
from .answer import Answer, Event, Items, text_stream
from .answers import Answers
from .logprobs import Logprobs
from .media.decoding import MediaFile, decoded
from .media.loading import opened
from .protocols import grammar
from .protocols.reader import Reader, Sink
from .request import STOPS, Chat, Refused, Request, check_count, stops_of, wrong
from .schemas import check_keywords
from .served import Served
from .structured import check_size
from .template import tensor

log = logging.getLogger(__name__)
Show = Callable[[int, Event], None]
# Settings of a checkpoint that no client has wished for, and their values here
_UNASKED: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "cache_implementation": None}


@dataclass
class Prompt:
    """Common part of all answers to one prompt.

    Args:
        stops: stop strings of the request and its settings.
        begun: start of the answer that is part of the prompt.
        new_reader: makes the parser of reasoning and tool calls; None if answers are plain text.
    """

    inputs: dict[str, Any]
    config: Any
    stops: tuple[str, ...]
    begun: str
    images: Images | None
    new_reader: Callable[[Sink], Reader] | None


def prepare(served: Served, request: Request, show: Show) -> Answers:
    """Answers to a request with their jobs, after tokenizing, decoding media and compiling grammars.

    Args:
        show: called with an answer's index and its next event, on the device thread.

    Raises: Refused.
    """
    if request.form is not None:
        check_size(request.form, request.form_field)
        check_keywords(request.form, request.form_field)
    if request.forced is not None:
        check_size([tool.schema for tool in request.forced.tools], request.form_field)
        for tool in request.forced.tools:
            if tool.is_strict:
                check_keywords(tool.schema, request.form_field)
    if (count := len(request.prompts) * request.count) > limits.ANSWERS:
        message = f"'n' times the number of prompts must be at most {limits.ANSWERS}, got {count}."
        raise Refused(message, "n", "invalid_value")
    answers, mark = Answers(), object()
    for prompt in [_prompt(served, prompt, request) for prompt in request.prompts]:
        for place in range(request.count):
            answer, job = _job(served, request, prompt, len(answers.jobs), show)
            job.request, job.seed = mark, None if request.seed is None else _seed(request.seed + place)
            answers.add(answer, job)
    return answers


def _seed(number: int) -> int:
    """Seed of the signed 64 bits of a number."""
    return (number + MOST + 1) % (2 * MOST + 2) - MOST - 1


def count_tokens(served: Served, request: Request) -> int:
    """Number of tokens of the first prompt. Raises: Refused."""
    return _length(_inputs(served, request.prompts[0], request.prompt_field)[0])


# Prompts


def _prompt(served: Served, prompt: Chat | str | list[int], request: Request) -> Prompt:
    """Tokens, settings and parser of one prompt of a request.

    Raises: Refused for a prompt that is too long, or has tokens that the model does not know.
    """
    read, begun = _inputs(served, prompt, request.prompt_field)
    length = _length(read)
    _check_length(length, served.context, request.prompt_field)
    config = _settings(served, request, length)
    if (token := unknown_token(served.model, read["input_ids"])) is not None:
        raise wrong(request.prompt_field, f"of tokens below {vocabulary_of(served.model)}", token)
    inputs = {name: tensor(value) for name, value in read.items()}
    form, new_reader = served.template.form, None
    if isinstance(prompt, Chat) and form is not None:
        schemas = {tool.name: tool.schema for tool in prompt.tools}
        if not schemas:  # marks of calls are text
            form = dataclasses.replace(form, begins=(), opens=(), closes=())
        new_reader = functools.partial(Reader, form, schemas=schemas)
    return Prompt(inputs, config, _stops(request, config), begun, images_of(served.model, inputs), new_reader)


def _inputs(served: Served, prompt: Chat | str | list[int], field: str) -> tuple[dict[str, Any], str]:
    """(model inputs of a prompt, start of the answer in it).

    Model inputs are tensors [1, T] from a processor, otherwise lists [T].

    Raises: Refused.
    """
    if isinstance(prompt, Chat):
        return _templated(served, prompt, field)
    ids: Any = prompt
    if isinstance(prompt, str):
        check_count(field, len(prompt), limits.CHARACTERS, "characters")
        with served.template.tokenizing() as tokenizer:
            ids = tokenizer(prompt)["input_ids"]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}, ""


def _templated(served: Served, chat: Chat, field: str) -> tuple[dict[str, Any], str]:
    """(model inputs of a chat, start of the answer in them). Raises: Refused."""
    template, messages = served.template, chat.messages
    parts = sum(len(message["content"]) for message in messages)
    check_count(field, len(messages), limits.MESSAGES, "messages")
    check_count(field, parts, limits.MESSAGES, "parts")
    check_count("tools", len(chat.tools), limits.TOOLS, "tools")
    characters = sum(len(part.get("text", "")) for message in messages for part in message["content"])
    check_count(field, characters, limits.CHARACTERS, "characters")
    messages = _with_media(served, messages)
    if chat.tools and template.tools_warning is not None:
        log.warning(template.tools_warning)
    try:
        return template.apply(chat, messages), template.begun(chat, messages)
    except (TemplateError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    try:
        messages = _plainer(messages)
        return template.apply(chat, messages), template.begun(chat, messages)
    except Exception:
        line = f"The chat template refuses the messages: {reason}"
        raise Refused(line, field, "invalid_value") from None


def _with_media(served: Served, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with decoded images and audio in place of their URLs. Raises: Refused."""
    files = [_file(served, part) for part in media_parts(messages)]
    if not files:
        return messages
    decoded_media = iter(decoded(files, served.limits))
    return [
        message | {"content": [_with_medium(part, decoded_media) for part in message["content"]]}
        for message in messages
    ]


def media_parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the image and audio parts of messages."""
    return (part for message in messages for part in message["content"] if part["type"] != "text")


def _file(served: Served, part: dict[str, Any]) -> MediaFile:
    """Opened image or audio. Raises: Refused for a kind that the model or the server does not read."""
    if not served.template.reads(part["type"]):
        raise Refused(f"This model does not read '{part['as']}'.", part["field"])
    return MediaFile(part["type"], part["field"], opened(part))


def _with_medium(part: dict[str, Any], decoded_media: Iterator[Any]) -> dict[str, Any]:
    """Message part, with the next decoded image or audio in place of a URL."""
    kind = part["type"]
    return part if kind == "text" else {"type": kind, kind: next(decoded_media)}


def _length(inputs: dict[str, Any]) -> int:
    """Number of tokens of a prompt."""
    ids = inputs["input_ids"]
    return int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else len(ids)


def _plainer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages simplified for templates that reject late system messages or non-object arguments."""
    simplified = []
    for number, message in enumerate(messages):
        message = dict(message)
        if message["role"] == "system" and number > 0:
            message["role"] = "user"
        if "tool_calls" in message:
            message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        simplified.append(message)
    return simplified


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], dict):
        function = function | {"arguments": {"arguments": function["arguments"]}}
    return call | {"function": function}


# Settings


def _check_length(length: int, context: int, field: str) -> None:
    """Raises: Refused for an empty prompt, or a prompt that fills the context."""
    if length == 0:
        raise Refused("The prompt must have at least 1 token, got none.", field)
    if length >= context:
        message = (  # text by which OpenAI's and Anthropic's agents detect that they must shorten the prompt
            f"This model's maximum context length is {context} tokens, one of the answer included: "
            f"prompt is too long: {length} tokens > {context - 1} maximum."
        )
        raise Refused(message, field, "context_length_exceeded")


def _settings(served: Served, request: Request, length: int) -> Any:
    """Generation settings of a request, limited by the context. Raises: Refused."""
    model, asked, vocabulary = served.model, request.settings, vocabulary_of(served.model)
    try:
        tokenizer = served.template.tokenizer
        config = settings_of_answer(model, tokenizer, asked, length, served.context, request.max_tokens)
        config.update(**{name: value for name, value in _UNASKED.items() if name not in asked})
        check_settings(config, model.generation_config, vocabulary)
    except (TypeError, ValueError, AttributeError) as error:
        raise Refused(f"{first_line(error)}.", None, "invalid_value") from None
    for tokens in config.sequence_bias or ():
        if tokens[0] >= vocabulary:
            raise wrong("logit_bias", f"of tokens below {vocabulary}", tokens[0])
    return config


def _stops(request: Request, config: Any) -> tuple[str, ...]:
    """Stop strings of a request and of its settings; they are removed from the settings.

    Raises: Refused.
    """
    config_stops, config.stop_strings = config.stop_strings or [], None
    fits, expected = STOPS
    if not fits(config_stops):
        raise wrong("stop_strings", expected, config_stops)
    return (*request.stops, *stops_of(config_stops))


# Answers


def _job(served: Served, request: Request, prompt: Prompt, number: int, show: Show) -> tuple[Answer, Job]:
    """(answer, job) of one prompt: the job samples tokens, and the answer makes events of them for `show`."""
    processors, logprobs = _processors(served, request, prompt)
    last = prompt.config.eos_token_id
    ends = set(last) if isinstance(last, list) else {last}
    step = text_stream(served.template.tokenizer, skips_special=prompt.new_reader is None)
    is_constrained = request.forced is not None or request.form is not None
    ends_at: Literal["call", "text"] | None = "text" if is_constrained else None
    items = Items(
        prompt.new_reader,
        prompt.begun,
        bool(request.tools),
        ends_at if request.is_parallel else "call",
        served.template.call_form.new_id,
    )
    hidden = served.template.hidden
    answer = Answer(step, prompt.stops, items, ends, hidden, logprobs, lambda event: show(number, event))
    answer.prompt_tokens = prompt_length(prompt.inputs)
    job = Job(
        prompt.inputs,
        copy.deepcopy(prompt.config),
        answer.append,
        answer.end,
        answer.progress,
        processors=processors,
        place=number,
        images=prompt.images,
    )
    return answer, job


def _processors(served: Served, request: Request, prompt: Prompt) -> tuple[list[Any], Logprobs | None]:
    """(logits processors of one answer, the `Logprobs` among them or None).

    Raises: Refused.
    """
    processors: list[Any] = []
    if request.frequency or request.presence:
        processors.append(Penalties(prompt_length(prompt.inputs), request.frequency, request.presence))
    if (constrained := _grammar(served, request, prompt)) is not None:
        tokenizer, vocabulary = served.template.tokenizer, vocabulary_of(served.model)
        mask = served.grammars.mask(tokenizer, prompt.config, vocabulary, *constrained, request.form_field)
        processors.append(mask)
    logprobs = None
    if request.logprobs is not None:
        logprobs = Logprobs(served.template.tokenizer, request.logprobs)
        processors.append(logprobs)
    return processors, logprobs


def _grammar(served: Served, request: Request, prompt: Prompt) -> tuple[Any, str] | None:
    """(structural tag of a constrained answer, start of it in the prompt), or None. Raises: Refused."""
    form = served.template.form
    if request.forced is not None:
        tag = grammar.of_calls(request.forced, form, request.is_parallel)
    elif request.form is not None:
        tag = grammar.of_content(request.form, form, [*request.tools.values()])
    else:
        return None
    return tag, grammar.start(form, prompt.begun, is_forced=request.forced is not None)
