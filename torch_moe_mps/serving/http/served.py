"""The model that is served: what a request becomes before it is generated, and its answers."""

import contextlib
import copy
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError

from ..._text import first_line
from ...transformers.upstream.chat import variables_of
from ..engine.defaults import settings_of_answer
from ..engine.encoder import NO_TEXT, Encoder
from ..engine.generating import images_of
from ..engine.job import Generator, Job, Reason, prompt_length
from ..engine.penalties import Penalties
from ..engine.ranges import check_settings, unknown_token, unserved_settings, vocabulary_of
from ..media.decoding import File, Limits, decoded, limits_of
from ..media.loading import SECONDS, Media, of_base64
from ..prefix_cache.memory import Images
from .answer import Answer, Decoder, Item
from .limited import Turns
from .logprobs import Logprobs
from .protocols.forms import form_of
from .protocols.tools import Parser, family_of, grammar
from .request import Chat, Refused, Request, Tool, unsupported, wrong
from .structured import Grammars, check_size

log = logging.getLogger(__name__)
Show = Callable[[int, Item | None], None]
# For a model that knows no roles: an answer continues what is above it, and a message begins a line.
_CONTINUED = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role != 'user' and not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
# Variables of a chat template that the chat itself sets, and arguments of what applies it.
_OF_THE_CHAT = {
    "add_generation_prompt", "continue_final_message", "conversation", "messages", "return_dict",
    "return_tensors", "tokenize", "tools",
}  # fmt: skip
_MOST_CHARACTERS = 1 << 23  # more than any context has
_MOST_MESSAGES = 10_000  # in a conversation
_FRAMES = 32  # in a video
# {type of a part: what a processor has that reads it}
_READERS = {"image": "image_processor", "audio": "feature_extractor", "video": "video_processor"}
_MOST_LINES, _LONGEST_LINE = 1000, 200


@dataclass
class Prepared:
    """A prompt with all that its answers have in common.

    Args:
        text: of the prompt, by which the parser knows what it begins of the answer; None where all is text.
    """

    inputs: dict[str, Any]
    config: Any
    text: str | None
    images: Images | None


class Served:
    """A model with its processor and what generates.

    Args:
        name: by which clients know it.
        processor: a tokenizer, or one with a tokenizer in it.
        context: the tokens that the model reads, LONGEST for any number.
        generator: generates for all requests.
        media: may be opened for messages.
        in_pipeline: whether the layers are spread over processes, which know of no processors of logits.
        encoder: makes vectors and scores; None for a model that only generates.

    Attributes:
        turns: of requests that take long to read.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        processor: Any,
        context: int,
        generator: Generator,
        media: Media,
        in_pipeline: bool = False,
        encoder: Encoder | None = None,
    ):
        self.name, self.model, self.processor, self.context = name, model, processor, context
        self.generator, self.media, self.in_pipeline = generator, media, in_pipeline
        self.encoder, self.generates = encoder, bool(model.can_generate())
        self.created = int(time.time())
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.turns = Turns(lambda: generator.active > 0)
        self._grammars, self._lock, self._saying = Grammars(), threading.Lock(), threading.Lock()
        self._said: dict[str, None] = {}
        if self.generates and getattr(processor, "chat_template", None) is None:
            print(f"{name} has no chat template: it continues the text of the messages", file=sys.stderr)
            processor.chat_template = _begun_by(self.tokenizer) + _CONTINUED
        self.form = form_of(processor)

    @functools.cached_property
    def _family(self) -> str | None:
        return family_of(self.form)

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template writes a tool into a prompt."""
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        probe = Tool("probe", "", {"type": "object", "properties": {}})
        try:
            without, with_tool = (
                self._templated(Chat(messages, tools), messages)["input_ids"] for tools in ([], [probe])
            )
        except Exception:  # a template that refuses so short a chat says nothing about tools
            return True
        return not torch.equal(_tensor(without), _tensor(with_tool))

    @property
    def reads_media(self) -> bool:
        """Whether messages may have pictures or sound."""
        return any(hasattr(self.processor, reader) for reader in _READERS.values())

    @functools.cached_property
    def _variables(self) -> set[str]:
        """Variables of the chat template that a request may set: those that it reads but a chat's own."""
        templates = self.processor.chat_template
        templates = templates.values() if isinstance(templates, dict) else [templates]
        return {name for template in templates for name in variables_of(template)} - _OF_THE_CHAT

    def say_once(self, line: str) -> None:
        """Logs a line the first time that there is reason to, among the last: clients choose words."""
        line = line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."
        with self._saying:
            if line not in self._said:
                self._said[line] = None
                log.info(line)
            if len(self._said) > _MOST_LINES:
                del self._said[next(iter(self._said))]

    @contextlib.contextmanager
    def tokenizing(self, splits: bool = False) -> Iterator[Any]:
        """Block with the tokenizer: several threads at a time may encode and decode with a fast one.

        Processors and slow tokenizers are for one thread at a time.

        Args:
            splits: whether special tokens are read as text: it is another tokenizer that does.
        """
        if self.tokenizer is self.processor and getattr(self.tokenizer, "is_fast", False) and not splits:
            yield self.tokenizer
            return
        with self._lock:
            yield self._splitting if splits else self.tokenizer

    @functools.cached_property
    def _splitting(self) -> Any:
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.split_special_tokens = True
        return tokenizer

    # PrefixCache

    def prepare(self, request: Request, show: Show) -> "Answers":
        """Reads the prompts of a request, and makes a job of each answer; long prompts take a while.

        Args:
            show: takes the number of an answer and a part of it, None behind the last; on any thread.

        Raises: Refused.
        """
        self._check_generates()
        answers, mark = Answers(), object()
        for prompt in request.prompts:
            prepared = self._prepared(prompt, request)
            for _ in range(request.count):
                answer, job = self._job(request, prepared, len(answers.jobs), show)
                job.request = mark
                answers.add(answer, job)
        return answers

    def submit(self, answers: "Answers") -> None:
        """Lets the answers be generated."""
        for answer, job in zip(answers.answers, answers.jobs, strict=True):
            answer.submitted = answer.first = answer.ended = time.monotonic()
            answer.begun = None
            self.generator.submit(job)

    def count(self, request: Request) -> int:
        """The tokens of the first prompt."""
        self._check_generates()
        return _length(self._tokens(request.prompts[0], request.prompt_field))

    def prompt_text(self, request: Request) -> str:
        """The text of the first prompt, which is a conversation. Raises: Refused."""
        self._check_generates()
        return str(self._of_chat(request.prompts[0], request.prompt_field, tokenize=False))

    def _check_generates(self) -> None:
        if not self.generates:
            raise Refused(NO_TEXT, "model")

    def _prepared(self, prompt: Chat | str | list[int], request: Request) -> Prepared:
        read = self._tokens(prompt, request.prompt_field)
        self.turns.rest()
        config = self._config(request, _length(read))
        self.check_tokens(read["input_ids"], request.prompt_field)
        self.turns.rest()
        inputs = {name: _tensor(value) for name, value in read.items()}
        is_parsed = isinstance(prompt, Chat) and self.form is not None
        text = self.tokenizer.decode(inputs["input_ids"][0]) if is_parsed or request.forced else None
        return Prepared(inputs, config, text, images_of(self.model, inputs))

    def _tokens(self, prompt: Chat | str | list[int], field: str) -> dict[str, Any]:
        """The inputs of a prompt, as lists [T] where no processor makes tensors [1, T]. Raises: Refused."""
        if isinstance(prompt, Chat):
            inputs: dict[str, Any] = self._of_chat(prompt, field)
            return inputs
        ids: Any = prompt
        if isinstance(prompt, str):
            check_characters(len(prompt), field)
            with self.tokenizing() as tokenizer:
                ids = tokenizer(prompt)["input_ids"]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def check_tokens(self, ids: Any, field: str) -> None:
        """Raises: Refused for tokens that the model does not know."""
        if (token := unknown_token(self.model, ids)) is not None:
            raise wrong(field, f"of tokens below {vocabulary_of(self.model)}", token)

    def _of_chat(self, prompt: Any, field: str, tokenize: bool = True) -> Any:
        if len(prompt.messages) > _MOST_MESSAGES:
            raise Refused(
                f"'{field}' must have at most {_MOST_MESSAGES} messages, got {len(prompt.messages)}.", field
            )
        messages = self._with_media(prompt.messages)
        check_characters(sum(map(_characters, messages)), field)
        if prompt.tools and not self.shows_tools:
            log.warning("tools are left out, %d of them: prompts of this model show none", len(prompt.tools))
        try:
            return self._templated(prompt, messages, tokenize)
        except Exception as error:
            if not isinstance(error, TemplateError | TypeError | ValueError):
                raise
            try:
                return self._templated(prompt, _plainer(messages), tokenize)
            except Exception:
                line = f"The chat template refuses the messages: {type(error).__name__}: {first_line(error)}"
                raise Refused(line, field, "invalid_value") from None

    def _templated(self, prompt: Chat, messages: list[dict[str, Any]], tokenize: bool = True) -> Any:
        """The inputs of the model, or the text that they are made of."""
        more = {name: value for name, value in prompt.variables.items() if name in self._variables}
        if any(part["type"] == "video" for message in messages for part in _parts(message)):
            more["num_frames"] = _FRAMES
        if is_text := self.processor is self.tokenizer:
            messages = [message | {"content": _text_of(message)} for message in messages]
        with self.tokenizing():
            inputs = self.processor.apply_chat_template(
                messages,
                tools=[tool.function for tool in prompt.tools] or None,
                add_generation_prompt=not prompt.goes_on,
                continue_final_message=prompt.goes_on,
                tokenize=tokenize,
                return_dict=tokenize,
                return_tensors=None if is_text else "pt",
                **more,
            )
        if not tokenize:
            return inputs
        if is_text:
            return {**inputs}
        return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}

    def _with_media(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with pictures in place of their URLs. Raises: Refused for what the model does not read."""
        ends = time.monotonic() + SECONDS
        parts = [part for message in messages for part in message["content"] if part["type"] != "text"]
        files = [self._opened(part, ends) for part in parts]
        if not files:
            return messages
        with self.turns.turn():
            made = iter(decoded(files, self._limits))
        return [
            message | {"content": [_with_medium(part, made) for part in message["content"]]}
            for message in messages
        ]

    @functools.cached_property
    def _limits(self) -> Limits:
        memory = self.generator.memory
        return limits_of(self.processor, None if memory is None else memory.free)

    def _opened(self, part: dict[str, Any], ends: float) -> File:
        if not hasattr(self.processor, _READERS[part["type"]]):
            raise Refused(f"This model does not read '{part['as']}'.", part["field"])
        kind, url, field = part["type"], part["url"], part["field"]
        if kind == "video":
            raise unsupported(field, part["as"])
        is_bare = kind == "audio" and ":" not in url[:8]
        is_here = is_bare or url.startswith("data:")
        with self.turns.turn() if is_here else self.turns.pause():  # it may be far away
            seconds = ends - time.monotonic()
            rest = self.turns.rest
            file = of_base64(url, field, rest) if is_bare else self.media.opened(url, field, seconds, rest)
        return File(kind, field, file)

    # Settings

    def _config(self, request: Request, length: int) -> Any:
        """The settings of a request, which generates at most as many tokens as the model still reads.

        Raises: Refused for a prompt without tokens, for one that leaves no room for a token, and for settings
            that do not exist.
        """
        if length == 0:
            raise Refused("The prompt must have at least 1 token, got none.", request.prompt_field)
        if length >= self.context:
            message = (  # the words by which OpenAI's and Anthropic's agents know that they must shorten it
                f"This model's maximum context length is {self.context} tokens, one of the answer included: "
                f"prompt is too long: {length} tokens > {self.context - 1} maximum."
            )
            raise Refused(message, request.prompt_field, "context_length_exceeded")
        asked, whole = request.settings, request.config
        try:
            config = settings_of_answer(self.model, asked, length, self.context, request.most, whole)
        except (TypeError, ValueError, AttributeError) as error:
            raise wrong("generation_config", "of settings that exist", first_line(error)) from None
        for name in unserved_settings(whole or {}):
            raise wrong("generation_config", "of settings that this server knows", name)
        try:
            check_settings(config, self.model.generation_config, vocabulary_of(self.model))
        except ValueError as error:
            raise Refused(f"'generation_config': {error}.", "generation_config", "invalid_value") from None
        if (config.num_return_sequences or 1) > 1:
            raise wrong(
                "generation_config", "of num_return_sequences 1 (see 'n')", config.num_return_sequences
            )
        config.stop_strings = None
        vocabulary = vocabulary_of(self.model)
        for tokens in config.sequence_bias or ():
            if tokens[0] >= vocabulary:
                raise wrong("logit_bias", f"of tokens below {vocabulary}", tokens[0])
        return config

    def _processors(self, request: Request, prepared: Prepared) -> tuple[list[Any], Logprobs | None]:
        """The processors of one answer's logits, and the one among them that keeps probabilities.

        Raises: Refused.
        """
        made: list[Any] = []
        if request.frequency or request.presence:
            field = "frequency_penalty" if request.frequency else "presence_penalty"
            self._check_alone(field)
            made.append(Penalties(prompt_length(prepared.inputs), request.frequency, request.presence))
        form: Any = request.form
        if request.forced is not None:
            form = grammar(request.forced, self.form, self._family, prepared.text or "")
        if form is not None:
            field = request.form_field
            self._check_alone(field)
            if (prepared.config.num_beams or 1) > 1:
                raise wrong("generation_config", f"of num_beams 1 with '{field}'", prepared.config.num_beams)
            self.turns.rest()
            check_size(form, field)
            self.turns.rest()
            vocabulary = vocabulary_of(self.model)
            with self.turns.pause():  # it compiles on a thread of its own
                made.append(self._grammars.mask(self.tokenizer, prepared.config, vocabulary, form, field))
        logprobs = None
        if request.logprobs is not None:
            self._check_alone("logprobs")
            if (prepared.config.num_beams or 1) > 1:
                raise wrong("generation_config", "of num_beams 1 with 'logprobs'", prepared.config.num_beams)
            logprobs = Logprobs(self.tokenizer, request.logprobs)
            made.append(logprobs)
        return made, logprobs

    def _check_alone(self, field: str) -> None:
        if self.in_pipeline:
            raise Refused(f"'{field}' is not supported by a pipeline.", field)

    # Answers

    def _job(self, request: Request, prepared: Prepared, number: int, show: Show) -> tuple[Answer, Job]:
        processors, logprobs = self._processors(request, prepared)
        last = prepared.config.eos_token_id
        ends = set(last) if isinstance(last, list) else {last}
        parser = None
        if prepared.text is not None and self.form is not None and isinstance(request.prompts[0], Chat):
            tools = [tool.function for tool in request.tools.values()] or None
            parser = Parser(self.form, prefix=prepared.text, tools=tools)
        decoder = Decoder(self.tokenizer, skips_special=parser is None)
        answer = Answer(decoder, request.stops, parser, ends, logprobs, lambda item: show(number, item))
        answer.prompt_tokens = prompt_length(prepared.inputs)
        job = Job(
            prepared.inputs,
            copy.deepcopy(prepared.config),
            answer.take,
            answer.end,
            answer.progress,
            seed=None if request.seed is None else request.seed + number % request.count,
            processors=processors,
            likely=self._likely(request),
            place=number,
            images=prepared.images,
        )
        return answer, job

    def _likely(self, request: Request) -> list[int]:
        if not request.likely:
            return []
        tokens: list[int] = self.tokenizer(request.likely, add_special_tokens=False)["input_ids"]
        return tokens


class Answers:
    """The answers to one request, which may still be coming."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.jobs: list[Job] = []

    def add(self, answer: Answer, job: Job) -> None:
        self.answers.append(answer)
        self.jobs.append(job)

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancel()

    @property
    def error(self) -> Exception | None:
        return next((a.reason for a in self.answers if isinstance(a.reason, Exception)), None)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt, once however many answers it has."""
        return sum(
            {id(j.inputs): a.prompt_tokens for a, j in zip(self.answers, self.jobs, strict=True)}.values()
        )

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were kept, of each prompt's first answer."""
        first: dict[int, int] = {}
        for job in self.jobs:
            first.setdefault(id(job.inputs), job.cached_tokens)
        return sum(first.values())

    @property
    def disk_tokens(self) -> int:
        """Cached tokens that were read from a disk."""
        return sum({id(job.inputs): job.disk_tokens for job in reversed(self.jobs)}.values())

    @property
    def read_seconds(self) -> float:
        """Seconds for which the prompts were computed, where nothing else was computed beside them."""
        answer = self.answers[0]
        return max(0.0, answer.first - answer.begun) if answer.begun is not None and answer.tokens else 0.0

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def draft_tokens(self) -> tuple[int, int]:
        """Draft tokens that were accepted, and that were rejected."""
        return sum(job.accepted_tokens for job in self.jobs), sum(job.rejected_tokens for job in self.jobs)

    @property
    def drafts_form(self) -> dict[str, int]:
        """OpenAI's names of the draft tokens in a usage."""
        names = "accepted_prediction_tokens", "rejected_prediction_tokens"
        return dict(zip(names, self.draft_tokens, strict=True))

    @property
    def reasoning_tokens(self) -> int:
        return sum(answer.reasoning_tokens for answer in self.answers)

    def __str__(self) -> str:
        """The line of a log."""
        now = time.monotonic()  # where the client leaves before the end
        first = min(now if a.reason is None and not a.tokens else a.first for a in self.answers)
        submitted = min(answer.submitted for answer in self.answers)
        unread = submitted if self.tokens else first  # where nothing told that a prompt is read
        begun = min((a.begun for a in self.answers if a.begun is not None), default=unread)
        ended = max(now if a.reason is None else a.ended for a in self.answers)
        tokens, seconds = self.tokens, ended - first
        speed = f" ({(tokens - 1) / seconds:.1f} tokens/s)" if tokens > 1 and seconds > 0 else ""
        disk = f", {self.disk_tokens} of the disk" if self.disk_tokens else ""
        held, wrong = self.draft_tokens
        drafted = f", {held} of {held + wrong} draft tokens accepted" if held + wrong else ""
        reasons = {_in_words(answer.reason) for answer in self.answers}
        return (
            f"waited {begun - submitted:.2f} s, "
            f"prompt {self.prompt_tokens} tokens ({self.cached_tokens} kept{disk}) in {first - begun:.2f} s, "
            f"answer {tokens} tokens in {seconds:.2f} s{speed}{drafted}, {', '.join(sorted(reasons))}"
        )


def _begun_by(tokenizer: Any) -> str:
    """The part of a chat template with the token that a tokenizer puts in front of each text."""
    first = tokenizer("a")["input_ids"][:1]
    return "{{ bos_token }}" if first == [tokenizer.bos_token_id] else ""


def _in_words(reason: Reason | Exception | None) -> str:
    if reason is None:
        return "the client left"
    return reason if isinstance(reason, str) else "error"


def check_characters(count: int, field: str) -> None:
    """Raises: Refused for a text that takes too long to read."""
    if count > _MOST_CHARACTERS:
        raise Refused(f"'{field}' must have at most {_MOST_CHARACTERS} characters, got {count}.", field)


def _length(inputs: dict[str, Any]) -> int:
    """How many tokens a prompt has."""
    ids = inputs["input_ids"]
    return int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else len(ids)


def _tensor(value: Any) -> torch.Tensor:
    """An input [1, T] of a list [T]."""
    return value if isinstance(value, torch.Tensor) else torch.tensor([value], dtype=torch.long)


def _with_medium(part: dict[str, Any], made: Iterator[Any]) -> dict[str, Any]:
    """A part of a message, with the next picture or sound where it names one."""
    kind = part["type"]
    return part if kind == "text" else {"type": kind, kind: next(made)}


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []


def _characters(message: dict[str, Any]) -> int:
    return sum(len(part.get("text", "")) for part in _parts(message))


def _text_of(message: dict[str, Any]) -> str:
    return "\n".join(part["text"] for part in _parts(message))


def _plainer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for templates that refuse a system message behind others, or arguments that are no object."""
    made = []
    for number, message in enumerate(messages):
        message = dict(message)
        if message["role"] == "system" and number > 0:
            message["role"] = "user"
        if "tool_calls" in message:
            message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        made.append(message)
    return made


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], dict):
        function = function | {"arguments": {"arguments": function["arguments"]}}
    return call | {"function": function}
