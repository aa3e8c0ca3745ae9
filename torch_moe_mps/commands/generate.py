"""`generate MODEL --prompt TEXT`: one answer, or one for each line of a file. Only answers go to stdout.

Ctrl-C ends an answer; what was computed of its prompt is kept.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from .._interrupts import at_ctrl_c
from ..macs import machine_memory
from ..serving.engine.defaults import choice, settings_of_answer
from ..serving.engine.engine import Engine
from ..serving.engine.job import Job
from ..serving.generate_batch import BatchAnswer, generate_all
from ..serving.prefix_cache.memory import PrefixCache
from .arguments import NO_DRAFTS
from .prefixes import disk_of
from .settings import settings_of
from .sources import (
    check_adapter,
    check_generates,
    context_of,
    folder_of,
    load,
    tokenizer_of,
    usable_device,
    with_adapter,
)
from .speculative import drafts_of


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, RuntimeError with a one-line message."""
    asked = choice(settings_of(options))
    device = usable_device(options.device)
    folder = folder_of(options.model, options.revision)
    check_generates(options, folder)
    reader = _processor(options, folder) if options.image else tokenizer_of(folder, options.trust_remote_code)
    tokenizer = getattr(reader, "tokenizer", reader)
    inputs = [_inputs(options, reader, prompt) for prompt in options.texts]
    lengths = [each["input_ids"].shape[1] for each in inputs]
    if min(lengths) == 0:
        raise ValueError("the prompt must have at least 1 token, got none")
    check_adapter(options, folder)
    model = with_adapter(options, load(options, folder, device))
    limit = context_of(model.config)
    if max(lengths) >= limit:
        raise ValueError(f"the prompt must have fewer than the model's {limit} tokens, got {max(lengths)}")
    cache, drafting = PrefixCache(machine_memory(), disk_of(options)), None
    if options.speculative not in (None, NO_DRAFTS):
        drafting = drafts_of(options, model, folder, device, cache)
    engine = Engine(model, cache, options.batch, drafting=drafting)
    streamer = _Streamer(tokenizer, lengths[0]) if options.prompts is None else None
    answers, jobs = list[BatchAnswer](), list[Job]()
    for encoded, length in zip(inputs, lengths, strict=True):
        config = settings_of_answer(model, tokenizer, asked, length, limit)
        answer = BatchAnswer(encoded["input_ids"][0].tolist(), config, tokenizer, streamer, lambda: None)
        config.stop_strings = None  # the answer looks for them
        answers.append(answer)
        jobs.append(Job(dict(encoded), config, answer.take, answer.end))
    engine.submit(*jobs)
    with contextlib.closing(cache):
        if streamer is None:
            for prompt, answer in zip(options.texts, answers, strict=True):
                generate_all(engine, answers, until=answer)
                text = reader.decode(answer.tokens, skip_special_tokens=True)
                print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)
        else:
            with at_ctrl_c(jobs[0].cancel):
                generate_all(engine, answers)
                print(streamer, file=sys.stderr)
            if jobs[0].is_cancelled:
                raise KeyboardInterrupt
    if drafting is not None:
        print(drafting, file=sys.stderr)


def _inputs(options: argparse.Namespace, reader: Any, prompt: str) -> Any:
    """The inputs of the model."""
    template = getattr(reader, "chat_template", None)
    if options.image and not template:
        raise ValueError(
            f"--image is for a model with a chat template that takes images, got {options.model}"
        )
    if options.raw or not template:
        if options.system_prompt:
            raise ValueError("--system-prompt is for a chat template, and none is used")
        return reader(prompt, return_tensors="pt", return_token_type_ids=False)
    system = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
    chat = [*system, {"role": "user", "content": _content(options, prompt)}]
    wanted = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    return reader.apply_chat_template([chat], **wanted)


def _content(options: argparse.Namespace, prompt: str) -> Any:
    if not options.image:
        return prompt
    return [*({"type": "image", "path": file} for file in options.image), {"type": "text", "text": prompt}]


def _processor(options: argparse.Namespace, folder: str) -> Any:
    from transformers import AutoProcessor

    is_gguf = Path(folder).is_file()  # the file of a language model alone
    trust = {"trust_remote_code": options.trust_remote_code}
    processor = None if is_gguf else AutoProcessor.from_pretrained(folder, **trust)
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"--image is for a model that takes images, got {options.model}")
    return processor


class _Streamer(TextStreamer):
    """Writes an answer while it is generated; as text: its speed."""

    def __init__(self, tokenizer: Any, prompt: int):
        super().__init__(tokenizer, skip_special_tokens=True)
        self._prompt, self._count = prompt, 0
        self._start = self._first = self._end = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self._count == 0:
            self._first = time.perf_counter()
        self._count += 1
        super().put(value)

    def end(self) -> None:
        super().end()
        self._end = time.perf_counter()

    def __str__(self) -> str:
        seconds = self._end - self._first
        rate = f", then {(self._count - 1) / seconds:.1f} tokens/s" if self._count > 1 and seconds > 0 else ""
        prefill = f"{self._prompt} tokens of prompt in {self._first - self._start:.1f} s"
        return f"{prefill}, {self._count} generated{rate}"
