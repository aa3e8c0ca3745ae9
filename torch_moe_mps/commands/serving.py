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

from ..macs import machine_memory
from ..pipeline.torchrun import is_first_process, processes
from ..serving.generating import Generating
from ..serving.prompts import Prompts
from ..serving.speculation import print_counts
from . import logprobs, tools
from .guard import Guard, error_response
from .requests import Refused, check, cut, refuse_unless_empty
from .sources import folder_of, load, name_of, usable_device
from .speculation import check_speculation, speculation_of
from .structured import schema_of

# {handler of transformers' server: the field with the prompt}.
_PROMPTS = {"ChatCompletionHandler": "messages", "CompletionHandler": "prompt", "ResponseHandler": "input"}
# For a model that knows no roles: an answer continues what is above it, and a message begins a line.
_CONTINUED = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role != 'user' and not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)


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
        answering = _answering(options, folder, device)
        answering.model.answering = answering
        return answering.model

    with ExitStack() as stack:
        if stage is not None:
            stack.enter_context(stage.pipeline.leading())
            stack.callback(lambda: print_counts(stage.pipeline.answering.speculation))
        for name, replaced in _replacements(options, load_model, made):
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


def _replacements(options: argparse.Namespace, load_model: Any, made: list[Any]) -> list[tuple[str, Any]]:
    """(name in transformers' server, what takes its place); managers of generation are added to `made`."""
    from transformers.cli.serving import chat_completion, completion, model_manager, response, utils
    from transformers.cli.serving import server as app

    from . import managers

    name, thread = name_of(options), utils.InferenceThread()
    entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "torch-moe-mps"}
    repository, file = utils.split_model_id(name)
    pinned = model_manager.ModelManager.process_model_name(repository)
    build, handler, manager = app.build_server, utils.BaseHandler, model_manager.ModelManager
    validate, resolve, config_of = (
        handler._validate_request, handler._resolve_model, handler._build_generation_config
    )  # fmt: skip
    read, load = handler.get_processor_inputs_from_messages, manager.load_model_and_processor

    chat = chat_completion.ChatCompletionHandler

    class OneByOne(managers.OneByOne):
        def __init__(self) -> None:
            super().__init__(thread)
            made.append(self)

    def validated(handler: Any, body: dict[str, Any]) -> None:
        check(body, _PROMPTS.get(type(handler).__name__))
        if options.only_model and body.get("model", name) != name:
            raise Refused(f"The model must be {name}, got {body['model']}.", "model", "model_not_found", 404)
        body["model"] = name
        asked: dict[str, Any] = {"response_format": schema_of(body)}
        asked["tool_choice"] = tools.forced_by(body)
        asked["logprobs"] = logprobs.count_of(body, _PROMPTS.get(type(handler).__name__))
        asked = {field: value for field, value in asked.items() if value is not None}
        batched = options.command == "serve" and options.continuous_batching
        if asked and (batched or processes() > 1):
            field, where = next(iter(asked)), "with --continuous-batching" if batched else "by a pipeline"
            raise Refused(f"'{field}' is not supported {where}.", field)
        if {"response_format", "tool_choice"} <= {*asked}:
            raise Refused("'response_format' must be text where a tool must be called.", "response_format")
        validate(handler, body)
        for field in {*body} & handler._unused_fields:
            refuse_unless_empty(field, body[field])
        body["asked"] = asked

    def resolved(handler: Any, body: dict[str, Any]) -> Any:
        model_id, model, processor = resolve(handler, body)
        return model_id, managers.OnHost(model), processor

    def config_for(handler: Any, body: dict[str, Any], *others: Any, **named: Any) -> Any:
        seed, asked = body.pop("seed", None), body.pop("asked", None)  # for where tokens are drawn
        config = config_of(handler, body, *others, **named)
        config.seed, config.asked = seed, asked
        if body.get("temperature") or (body.get("top_p") is not None and body.get("temperature") != 0):
            config.do_sample = True
        return config

    def load_pinned(manager: Any, _: str, *others: Any, gguf_file: str | None = None, **named: Any) -> Any:
        model, processor = load(manager, pinned, *others, gguf_file=file, **named)
        if getattr(processor, "chat_template", None) is None:
            print(f"{name} has no chat template: it continues the text of the messages", file=sys.stderr)
            processor.chat_template = _CONTINUED
        return model, processor

    def read_all(messages: list[dict[str, Any]], modality: Any) -> Any:
        for message in messages:
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                alone = [{"role": "user", "content": [part]}]
                if "text" not in part and not read(alone, modality)[0]["content"]:
                    raise Refused(f"This model does not read '{part['type']}'.", "messages")
        return read(messages, modality)

    def parsed(processor: Any, model: Any, ids: Any, *others: Any, **named: Any) -> Any:
        stops = getattr(ids, "stops", ())
        text = cut(getattr(processor, "tokenizer", processor).decode(ids), stops) if stops else ids
        content, *parts = tools.parsed(processor, model, text, *others, **named)
        if (entries := getattr(named.get("cleaned_content"), "logprobs", None)) is not None:
            content = logprobs.Shown.of(content, entries)
        return content, *parts

    def build_server(*parts: Any, **others: Any) -> Any:
        from fastapi.exceptions import RequestValidationError
        from jinja2 import TemplateError
        from starlette.exceptions import HTTPException

        built = build(*parts, **others)
        known = (Refused, HTTPException, RequestValidationError, TemplateError, ValueError, RuntimeError)
        for kind in (*known, Exception):  # the server closes the connection behind one that is not known
            built.add_exception_handler(kind, error_response)
        built.add_middleware(Guard, hosts=(options.host, *options.allow_host), token=options.token)
        return built

    return [
        ("model_manager.ModelManager._load_model", load_model),
        ("model_manager.ModelManager.load_model_and_processor", load_pinned),
        ("model_manager.ModelManager.get_gen_models", staticmethod(lambda: [entry])),
        ("utils.BaseHandler._validate_request", validated),
        ("utils.BaseHandler._resolve_model", resolved),
        ("utils.BaseHandler._build_generation_config", config_for),
        ("utils.BaseHandler.get_processor_inputs_from_messages", staticmethod(read_all)),
        ("utils.ResponseParser", tools.Parser),
        ("utils.get_response_template", tools.with_derived(utils.get_response_template)),
        ("chat_completion.parse_assistant_message", parsed),
        ("response.parse_assistant_message", parsed),
        (
            f"chat_completion.{chat.__name__}._build_completion",
            logprobs.in_completion(chat._build_completion),
        ),
        (f"chat_completion.{chat.__name__}._build_chunk_sse", logprobs.in_chunk(chat._build_chunk_sse)),
        (
            "completion.CompletionChoice",
            logprobs.filled(completion.CompletionChoice, logprobs.completion_form),
        ),
        *(
            (f"response.{part}", logprobs.filled(getattr(response, part), logprobs.response_form))
            for part in ("ResponseOutputText", "ResponseTextDeltaEvent", "ResponseTextDoneEvent")
        ),
        ("utils.GenerateManager", OneByOne),
        ("utils.CBGenerateManager", managers.Batches),
        ("server.build_server", build_server),
    ]


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
    """Work of every process of torchrun but the first: it generates what the first is asked for."""
    check_speculation(options)
    device = usable_device(options.device)
    _stage(options, folder_of(options.model, options.revision), device).pipeline.follow()


def _stage(options: argparse.Namespace, folder: str, device: str) -> Any:
    """The part of a model in this process."""
    answering = _answering(options, folder, device)
    answering.model.pipeline.answering = answering
    return answering.model


def _answering(options: argparse.Namespace, folder: str, device: str) -> Generating:
    """Generator with the model in a folder; all processes keep the prompts that the first one keeps."""
    model = load(options, folder, device)
    prompts = prompts_of(options) if is_first_process() else Prompts(sys.maxsize)
    return Generating(model, prompts, speculation_of(options, model, folder, device))
