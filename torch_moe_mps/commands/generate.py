"""`generate MODEL --prompt TEXT`: one answer, or one for each line of a file. Only answers go to stdout.

Ctrl-C ends an answer; what was computed of its prompt is kept.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch

from ..macs import machine_memory
from ..serving.engine.defaults import choice, settings_of_answer
from ..serving.engine.generating import Generating
from ..serving.prefix_cache.memory import PrefixCache
from ..transformers.caches.cache import pools_padding
from .arguments import NO_DRAFTS
from .interrupts import at_ctrl_c
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
from .speculative import speculation_of


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, RuntimeError with a one-line message."""
    asked = choice(settings_of(options))
    prompts = options.texts
    device = usable_device(options.device)
    folder = folder_of(options.model, options.revision)
    check_generates(options, folder)
    reader = _processor(options, folder) if options.image else tokenizer_of(folder, options.trust_remote_code)
    words = {"tokenizer": getattr(reader, "tokenizer", reader)}  # for stop_strings
    is_assisted = options.speculative not in (None, NO_DRAFTS)  # and takes one sequence
    size = 1 if is_assisted else options.batch
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    inputs = [_inputs(options, reader, some) for some in batches]
    lengths = [batch["input_ids"].shape[1] for batch in inputs]
    if min(lengths) == 0:
        raise ValueError("the prompt must have at least 1 token, got none")
    check_adapter(options, folder)
    model = with_adapter(options, load(options, folder, device))
    limit = context_of(model.config)
    if max(lengths) >= limit:
        raise ValueError(f"the prompt must have fewer than the model's {limit} tokens, got {max(lengths)}")
    if len(batches) < len(prompts) and pools_padding(model.config):
        batches = [[prompt] for prompt in prompts]
        inputs = [_inputs(options, reader, some) for some in batches]
    kept = PrefixCache(machine_memory(), file=options.prompt_cache)
    generating = Generating(model, kept, speculation_of(options, model, folder, device))
    if options.prompts is None:
        with at_ctrl_c(generating.end):
            config = settings_of_answer(model, asked, lengths[0], limit)
            _stream(generating, reader, inputs[0].to(model.device), {"generation_config": config, **words})
            kept.write(model)
        if generating.has_ended:
            raise KeyboardInterrupt
    else:
        for some, batch in zip(batches, inputs, strict=True):
            start = batch["input_ids"].shape[1]
            config = settings_of_answer(model, asked, start, limit)
            given = {**batch.to(model.device), "generation_config": config, **words}
            answers = generating.generate(**given)[:, start:]
            for prompt, answer in zip(some, answers, strict=True):
                text = reader.decode(answer, skip_special_tokens=True)
                print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)
    if generating.speculation is not None:
        print(generating.speculation, file=sys.stderr)


def _inputs(options: argparse.Namespace, reader: Any, prompts: list[str]) -> Any:
    """The arguments of `generate`, padded on the left."""
    tokenizer = getattr(reader, "tokenizer", reader)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "left"
    template = getattr(reader, "chat_template", None)
    if options.image and not template:
        raise ValueError(
            f"--image is for a model with a chat template that takes images, got {options.model}"
        )
    if options.raw or not template:
        if options.system_prompt:
            raise ValueError("--system-prompt is for a chat template, and none is used")
        return tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    system = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
    chats = [[*system, {"role": "user", "content": _content(options, prompt)}] for prompt in prompts]
    wanted = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    if not options.image:  # with one there is one prompt, and processors take no `padding` here
        wanted["padding"] = True
    return reader.apply_chat_template(chats, **wanted)


def _content(options: argparse.Namespace, prompt: str) -> Any:
    if not options.image:
        return prompt
    return [*({"type": "image", "path": file} for file in options.image), {"type": "text", "text": prompt}]


def _processor(options: argparse.Namespace, folder: str) -> Any:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"--image is for a model that takes images, got {options.model}")
    return processor


def _stream(generating: Generating, reader: Any, inputs: Any, settings: dict[str, Any]) -> None:
    """Writes the answer while it is generated, and its speed to stderr."""
    from transformers import TextStreamer

    class Timed(TextStreamer):
        tokens, first = 0, 0.0

        def put(self, value: torch.Tensor) -> None:
            if not self.next_tokens_are_prompt:
                self.tokens += value.numel()
                self.first = self.first or time.perf_counter()
            is_several = value.numel() > 1 and not self.next_tokens_are_prompt
            for token in value.split(1) if is_several else [value]:
                super().put(token)

    start = time.perf_counter()
    streamer = Timed(getattr(reader, "tokenizer", reader), skip_prompt=True, skip_special_tokens=True)
    generating.generate(**inputs, **settings, streamer=streamer)
    prompt, seconds = inputs["input_ids"].shape[1], time.perf_counter() - streamer.first
    rate = f", then {(streamer.tokens - 1) / seconds:.1f} tokens/s" if streamer.tokens > 1 else ""
    print(
        f"{prompt} tokens of prompt in {streamer.first - start:.1f} s, {streamer.tokens} generated{rate}",
        file=sys.stderr,
    )
