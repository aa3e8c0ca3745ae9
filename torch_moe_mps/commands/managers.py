"""Managers of generation for transformers' server, in place of its own: one thread, answers as OpenAI's."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import torch
from transformers.cli.serving import utils

from ..ops._checks import first_line
from ..serving.generating import Generating
from ..serving.speculation import print_counts
from .logprobs import Logprobs, Shown
from .requests import Cut, Refused, cut, wrong
from .sources import context_of
from .structured import Grammars

# With continuous batching: {setting: its field}, of settings that no request can have for itself.
_OF_THE_MODEL = {
    "stop_strings": "stop",
    "sequence_bias": "logit_bias",
    "repetition_penalty": "frequency_penalty",
}
_OF_ALL_REQUESTS = ("temperature", "top_p", "top_k")


class Tokens(list[int]):
    """The tokens of an answer, with the stops that its text ends before."""

    stops: tuple[str, ...] = ()


class OnHost:
    """Stands for a model where a request is read: its inputs stay on the CPU."""

    device = torch.device("cpu")

    def __init__(self, model: Any):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # transformers asks for its name
        return type(self.model)


class Streamer(utils.DirectStreamer):
    """Shows tokens as text up to a stop.

    Attributes:
        ended: whether a stop has come: the answer is complete.
        tokens: of the answer, with those of the stop.
    """

    _first: bool

    def __init__(self, config: Any, on_cancel: Callable[[], None], *parts: Any, **others: Any):
        super().__init__(*parts, **others)
        stops = config.stop_strings or ()
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self.tokens = Tokens()
        self.tokens.stops = self.stops
        self.logprobs: Logprobs | None = None
        self._entries: list[Any] = []  # of `logprobs`, for tokens whose text is not shown yet
        self._text, self._config, self._on_cancel = Cut(self.stops), config, on_cancel
        last = config.eos_token_id
        self._last = last if isinstance(last, list) else [last]

    @property
    def ended(self) -> bool:
        return self._text.ended

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def put(self, value: Any) -> None:
        if self.is_cancelled:
            raise utils._GenerationCancelled
        if self._first:  # the prompt
            self._first = False
            return
        for token in value.tolist():
            if self.ended:
                return
            self.tokens.append(token)
            self.total_tokens += 1
            if self.logprobs is not None and token not in self._last:
                self._entries.append(self.logprobs.take(token))
            self._show(self._text.add(self._decode_stream.step(self._tokenizer, token) or ""))
            if self.ended or token in self._last:
                self._config.max_new_tokens = None  # it did not end by its length, whatever that is

    def _show(self, text: str) -> None:
        if text and self._parser is None:
            self._enqueue(text)
        elif text:
            for item in utils.response_events_to_chunks(self._parser.feed(text)):
                self._enqueue(item)

    def _enqueue(self, item: Any) -> None:
        if self._entries and isinstance(item, str | None):
            kind = utils.ReasoningText if isinstance(item, utils.ReasoningText) else Shown
            shown = kind(item or "")
            shown.logprobs, self._entries = self._entries, []
            super()._enqueue(shown)
            if item is not None:
                return
        super()._enqueue(item)

    def end(self) -> None:
        self._show(self._text.rest())
        super().end()

    def cancel(self) -> None:
        super().cancel()
        self._on_cancel()


class OneByOne(utils.GenerateManager):
    """Generates with what its model answers by, prompt by prompt, on a thread that is given.

    No other thread uses the device meanwhile: torch's mps does not bear two.
    """

    def __init__(self, thread: Any):
        self._thread, self._grammars = thread, Grammars()
        self._answering: Generating | None = None
        self._latest: Streamer | None = None
        self._running: Streamer | None = None

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        return self._start(model, processor, inputs, config, response_parser)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, config: Any, request_id: str
    ) -> Any:
        errors: list[Exception] = []
        queue, streamer = self._start(model, processor, inputs, config, None, errors)
        entries: list[Any] = []
        try:
            while (item := await queue.get()) is not None:
                entries += getattr(item, "logprobs", [])
        except asyncio.CancelledError:  # the client has gone
            streamer.cancel()
            raise
        if errors:
            raise errors[0]
        text = cut(processor.decode(streamer.tokens, skip_special_tokens=True), streamer.stops)
        if streamer.logprobs is not None:
            text = Shown.of(text, entries)
        return text, inputs["input_ids"].shape[-1], streamer.tokens

    def _start(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        config: Any,
        parser: Any,
        errors: list[Exception] | None = None,
    ) -> Any:
        """Returns: a queue of what is shown, which ends with None, and the streamer that fills it.

        Args:
            errors: takes an error; by default the queue does.
        """
        limit(model, inputs, config)
        asked = vars(config).pop("asked", None) or {}
        tokenizer = getattr(processor, "tokenizer", processor)
        if asked and (config.num_beams or 1) > 1:
            raise wrong("generation_config", f"of num_beams 1 with '{next(iter(asked))}'", config.num_beams)
        for field in {"response_format", "tool_choice"} & {*asked}:  # at most one
            form, count = asked[field], model.config.get_text_config().vocab_size
            if field == "tool_choice":
                template = utils.get_response_template(processor, model)
                form = form.grammar(template, tokenizer.decode(inputs["input_ids"][0]))
            config.mask = self._grammars.mask(tokenizer, config, count, form, field)
        self._answering = getattr(model, "answering", None)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        streamer = Streamer(
            config, lambda: self._leave(streamer), tokenizer._tokenizer, loop, queue, response_parser=parser
        )
        if "logprobs" in asked:
            streamer.logprobs = Logprobs(tokenizer, asked["logprobs"])
        self._latest = streamer

        def show(item: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        def run() -> None:
            self._running = streamer
            try:
                if streamer.is_cancelled:
                    return show(None)
                self._generate(model, processor, inputs, config, streamer)
            except utils._GenerationCancelled:
                show(None)
            except Exception as error:
                if errors is None:
                    show(utils._StreamError(json.dumps(first_line(error))[1:-1]))  # it goes into JSON
                else:
                    errors.append(error)
                    show(None)
            finally:
                self._running = None

        self.submit(run)
        return queue, streamer

    def _generate(self, model: OnHost, processor: Any, inputs: Any, config: Any, streamer: Streamer) -> None:
        config.stop_strings = None  # the streamer's
        if (seed := vars(config).pop("seed", None)) is not None:
            torch.manual_seed(seed)
        own = model.model
        given = {name: value.to(own.device) for name, value in inputs.items()}
        processors = [
            each for each in (vars(config).pop("mask", None), streamer.logprobs) if each is not None
        ]
        if processors:
            given["logits_processor"] = processors
        given |= {"generation_config": config, "tokenizer": processor}
        if hasattr(model, "has_talker"):  # it would speak, too
            given["generation_mode"] = "text"
        answers = self._answering or own
        if (config.num_beams or 1) == 1:
            answers.generate(**given, streamer=streamer)
            return
        result = answers.generate(**given)
        streamer.put(inputs["input_ids"][0])
        streamer.put(getattr(result, "sequences", result)[0, inputs["input_ids"].shape[-1] :].cpu())
        streamer.end()

    def _leave(self, streamer: Streamer) -> None:
        if streamer is self._running and self._answering is not None:
            self._answering.interrupt()

    def interrupt(self) -> None:
        if self._latest is not None:
            self._latest.cancel()
        if self._answering is not None:
            self._answering.interrupt()

    def stop(self) -> None:
        """A thread that is still in torch when Python ends would abort the process."""
        if self._answering is not None:
            self._answering.end()
            self.submit(self._answering.write).result()
            print_counts(self._answering.speculation)


class Batches(utils.CBGenerateManager):
    """transformers' own, for what it can do for each request."""

    first: Any = None  # the settings of the first request

    def init_cb(self, model: Any, config: Any) -> None:
        _check_shared(model, self.first or config, config)
        super().init_cb(model, config)
        self.first = self.first or config

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, config: Any, *a: Any, **b: Any
    ) -> Any:
        limit(model, inputs, config)
        return super().generate_streaming(model, processor, inputs, config, *a, **b)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, config: Any, request_id: str
    ) -> Any:
        limit(model, inputs, config)
        try:
            return await super().generate_non_streaming(model, processor, inputs, config, request_id)
        except asyncio.CancelledError:  # the client has gone
            if self._cb is not None:
                self._cb.cancel_request(request_id)
            raise

    def interrupt(self) -> None:
        """Answers end when their clients go."""


def _check_shared(model: Any, first: Any, config: Any) -> None:
    """Raises: Refused for settings that a request cannot have for itself with continuous batching."""
    for setting, field in _OF_THE_MODEL.items():
        if getattr(config, setting) != getattr(model.generation_config, setting):
            raise Refused(f"'{field}' is not supported with --continuous-batching.", field)
    if getattr(config, "seed", None) is not None:
        raise Refused("'seed' is not supported with --continuous-batching.", "seed")
    expected, got = (
        {name: getattr(asked, name) for name in _OF_ALL_REQUESTS} if asked.do_sample else "greedy"
        for asked in (first, config)
    )
    if got != expected:
        raise Refused(
            "With --continuous-batching all requests share the sampling of the first: it must be "
            f"{expected}, got {got}.",
            "temperature",
        )


def limit(model: Any, inputs: Any, config: Any) -> None:
    """Lets a request generate at most as many tokens as the model still reads.

    Raises: Refused for a prompt without tokens, for one that leaves no room for a token, and for a bias of a
        token that the model does not have.
    """
    ids, most = inputs["input_ids"], context_of(model.config)
    count = len(ids) if isinstance(ids, list) else ids.shape[-1]
    if count == 0:
        raise Refused("The prompt must have at least 1 token, got none.", "messages")
    if count >= most:
        message = f"This model's maximum context length is {most} tokens, and the prompt has {count}."
        raise Refused(message, "messages", "context_length_exceeded")
    if config.max_new_tokens is not None:
        config.max_new_tokens = min(config.max_new_tokens, most - count)
    tokens = model.config.get_text_config().vocab_size
    for (token,) in config.sequence_bias or ():
        if token >= tokens:
            raise wrong("logit_bias", f"of tokens below {tokens}", token)
