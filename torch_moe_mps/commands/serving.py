"""transformers' own server with a model that this package has loaded and quantised.

What is asked of it that it would not do, it refuses: transformers ignores such fields of a request.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ..ops._checks import first_line
from .generating import Generating
from .prompts import Prompts, machine_memory
from .sources import context_of, folder_of, is_first_process, load, name_of, processes, usable_device
from .speculation import check_speculation, speculation_of

# {field of a request: values that ask for nothing}. Hints such as `user` or `store` change no answer.
_ASKS_NOTHING: dict[str, list[Any]] = {
    "audio": [], "background": [False], "best_of": [1], "echo": [False], "function_call": ["auto"],
    "functions": [[]], "include": [[]], "logprobs": [False], "max_tool_calls": [], "modalities": [["text"]],
    "n": [1], "presence_penalty": [0], "previous_response_id": [], "prompt": [],
    "response_format": [{"type": "text"}], "tool_choice": ["auto"], "top_logprobs": [0],
    "truncation": ["disabled"], "web_search_options": [],
}  # fmt: skip
# With continuous batching: {setting: its field}, of settings that no request can have for itself.
_OF_THE_MODEL = {
    "stop_strings": "stop",
    "sequence_bias": "logit_bias",
    "repetition_penalty": "frequency_penalty",
}
_OF_ALL_REQUESTS = ("temperature", "top_p", "top_k")


class Refused(Exception):
    """What a client asks for and does not get, for OpenAI's form of an error."""

    def __init__(self, message: str, field: str | None, code: str = "unsupported_value"):
        super().__init__(message)
        self.body = {"message": message, "type": "invalid_request_error", "param": field, "code": code}


@contextmanager
def server(options: argparse.Namespace, **settings: Any) -> Iterator[tuple[Any, Callable[[], None]]]:
    """transformers' `Serve`, which answers every request with the model, and what ends the current answer.

    Args:
        settings: for `Serve`. It returns when the server ends, or at once if they have non_blocking=True.

    Raises: ValueError, OSError, ImportError with one line that says what is wrong.
    """
    check_speculation(options)
    prompts_of(options)  # its errors come before the model is loaded
    device = usable_device(options.device)
    folder = folder_of(options.model, options.revision)
    from transformers.cli.serve import Serve
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():  # Serve raises; its parts, which are replaced here, cannot be imported
        Serve()
    stage = _stage(options, folder, device) if processes() > 1 else None  # all load at the same time
    made: list[Any] = []  # managers of generation

    def load_model(*names: Any, **progress: Any) -> Any:
        if stage is not None:  # the other processes would not know of an end
            return stage
        model = load(options, folder, device)
        model.answering = Generating(
            model, prompts_of(options), speculation_of(options, model, folder, device)
        )
        return model

    with ExitStack() as stack:
        if stage is not None:
            stack.enter_context(stage.pipeline.leading())
            stack.callback(_report, stage.pipeline.answering)
        for name, replaced in _replacements(name_of(options), load_model, made):
            stack.enter_context(mock.patch(f"transformers.cli.serving.{name}", replaced))
        stack.callback(lambda: [manager.stop() for manager in made])
        serve = Serve(
            force_model=name_of(options),
            trust_remote_code=options.trust_remote_code,
            device=device,
            **settings,
        )

        def interrupt() -> None:
            for manager in made:
                manager.interrupt()

        yield serve, interrupt


class _Within:
    """Lets a manager generate what the model's context has room for."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, config: Any, *others: Any, **named: Any
    ) -> Any:
        _limit(model, inputs, config)
        below: Any = super()
        self.answer = below.generate_streaming(self.seen(model), processor, inputs, config, *others, **named)
        return self.answer

    def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, config: Any, *others: Any, **named: Any
    ) -> Any:
        _limit(model, inputs, config)
        below: Any = super()
        return below.generate_non_streaming(self.seen(model), processor, inputs, config, *others, **named)

    def seen(self, model: Any) -> Any:
        """What the manager calls `generate` of."""
        return model


class _OneByOne(_Within):
    """Lets a manager generate with what its model answers by, prompt by prompt."""

    answer: Any = None  # the queue and the streamer of the last one that is streamed
    answering: Any = None
    submit: Any  # of transformers' manager

    def seen(self, model: Any) -> Any:
        self.answering = getattr(model, "answering", None)
        return self.answering or model

    def interrupt(self) -> None:
        if self.answer is not None:
            self.answer[1].cancel()
        if self.answering is not None:
            self.answering.interrupt()

    def stop(self) -> None:
        """A thread that is still in torch when Python ends would abort the process."""
        if self.answering is not None:
            self.answering.end()
            self.submit(lambda: None).result()
            self.answering.prompts.write(self.answering.model)
            _report(self.answering)


def _replacements(model_name: str, load_model: Any, made: list[Any]) -> list[tuple[str, Any]]:
    """(name in transformers' server, what takes its place); managers of generation are added to `made`."""
    from transformers.cli.serving import server as app
    from transformers.cli.serving import utils

    now = int(time.time())
    entry = {"id": model_name, "object": "model", "created": now, "owned_by": "torch-moe-mps"}
    build, validate = app.build_server, utils.BaseHandler._validate_request
    read = utils.BaseHandler.get_processor_inputs_from_messages

    class OneByOne(_OneByOne, utils.GenerateManager):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    class Batches(_Within, utils.CBGenerateManager):
        first: Any = None  # the settings of the first request

        def init_cb(self, model: Any, config: Any) -> None:
            _check_shared(model, self.first or config, config)
            super().init_cb(model, config)
            self.first = self.first or config

    def validated(handler: Any, body: dict[str, Any]) -> None:
        validate(handler, body)
        for field in {*body} & handler._unused_fields & {*_ASKS_NOTHING, "text"}:
            _refuse_unless_empty(field, body[field])

    def read_all(messages: list[dict[str, Any]], modality: Any) -> Any:
        for message in messages:
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                alone = [{"role": "user", "content": [part]}]
                if "text" not in part and not read(alone, modality)[0]["content"]:
                    raise Refused(f"This model does not read '{part['type']}'.", "messages")
        return read(messages, modality)

    def build_server(*parts: Any, **others: Any) -> Any:
        from jinja2 import TemplateError
        from starlette.exceptions import HTTPException

        built = build(*parts, **others)
        for kind in (Refused, HTTPException, TemplateError, ValueError, Exception):
            built.add_exception_handler(kind, _error)
        return built

    return [
        ("model_manager.ModelManager._load_model", load_model),
        ("model_manager.ModelManager.get_gen_models", staticmethod(lambda: [entry])),
        ("utils.BaseHandler._validate_request", validated),
        ("utils.BaseHandler.get_processor_inputs_from_messages", staticmethod(read_all)),
        ("utils.GenerateManager", OneByOne),
        ("utils.CBGenerateManager", Batches),
        ("server.build_server", build_server),
    ]


def _report(answering: Generating) -> None:
    if answering.speculation is not None:
        print(answering.speculation, file=sys.stderr)


def _check_shared(model: Any, first: Any, config: Any) -> None:
    """Raises: Refused for settings that a request cannot have for itself with continuous batching."""
    for setting, field in _OF_THE_MODEL.items():
        if getattr(config, setting) != getattr(model.generation_config, setting):
            raise Refused(f"'{field}' is not supported with --continuous-batching.", field)
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


def _refuse_unless_empty(field: str, value: Any) -> None:
    """Raises: Refused for a field that would be ignored, and asks for something."""
    if field == "text":  # of the Responses API, with the format inside
        field, value = "response_format", value.get("format") if isinstance(value, dict) else value
    empty = any(value == nothing and type(value) is type(nothing) for nothing in _ASKS_NOTHING[field])
    if value is not None and not empty and not (field == "presence_penalty" and value == 0):
        raise Refused(f"'{field}' is not supported by this server, got {value!r}.", field)


def _limit(model: Any, inputs: Any, config: Any) -> None:
    """Lets a request generate at most as many tokens as the model still reads.

    Raises: Refused for a prompt without tokens, and for one that leaves no room for a token.
    """
    ids, limit = inputs["input_ids"], context_of(model.config)
    count = len(ids) if isinstance(ids, list) else ids.shape[-1]
    if count == 0:
        raise Refused("The prompt must have at least 1 token, got none.", "messages")
    if count >= limit:
        message = f"This model's maximum context length is {limit} tokens, and the prompt has {count}."
        raise Refused(message, "messages", "context_length_exceeded")
    if config.max_new_tokens is not None:
        config.max_new_tokens = min(config.max_new_tokens, limit - count)


async def _error(request: Any, error: Any) -> Any:
    """Errors in OpenAI's form, those of transformers and of a chat template, too."""
    from fastapi.responses import JSONResponse
    from jinja2 import TemplateError

    is_asked_wrongly = isinstance(error, (Refused, TemplateError, ValueError))
    status = getattr(error, "status_code", 400 if is_asked_wrongly else 500)
    message = getattr(error, "detail", f"{type(error).__name__}: {first_line(error)}")
    kind = "server_error" if status == 500 else "invalid_request_error"
    body = {"message": str(message), "type": kind, "param": None, "code": None}
    return JSONResponse({"error": getattr(error, "body", body)}, status_code=status)


def prompts_of(options: argparse.Namespace) -> Prompts:
    """Where chat and serve keep prompts.

    Raises: ValueError for a pipeline, for what is no size of memory, and for what is no folder.
    """
    if options.prompt_cache is not None and processes() > 1:
        raise ValueError("--prompt-cache is for one process, got a pipeline of several")
    gigabytes = machine_memory() / 8e9 if options.prompt_memory is None else options.prompt_memory
    if not 0 <= gigabytes < math.inf:
        raise ValueError(f"--prompt-memory must be at least 0 GB, and finite, got {gigabytes:g}")
    memory = int(gigabytes * 1e9)
    if options.command == "chat" or options.prompt_cache is None:
        return Prompts(memory, file=options.prompt_cache)
    try:
        Path(options.prompt_cache).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--prompt-cache must be a folder, got {options.prompt_cache}: {error.strerror}"
        ) from None
    return Prompts(memory, folder=options.prompt_cache)


def follow(options: argparse.Namespace) -> None:
    """What every process of torchrun but the first does: it generates what the first is asked for."""
    check_speculation(options)
    device = usable_device(options.device)
    _stage(options, folder_of(options.model, options.revision), device).pipeline.follow()


def _stage(options: argparse.Namespace, folder: str, device: str) -> Any:
    """The part of a model in this process; all keep the prompts that the first one keeps."""
    model = load(options, folder, device)
    prompts = prompts_of(options) if is_first_process() else Prompts(sys.maxsize)
    speculation = speculation_of(options, model, folder, device)
    model.pipeline.answering = Generating(model, prompts, speculation)
    return model
