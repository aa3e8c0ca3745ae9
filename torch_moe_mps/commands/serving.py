"""Shared by serve and chat: loads a model, which answers until the command ends."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .._environment import processes
from .._interrupts import at_ctrl_c
from ..macs import machine_memory
from ..models.programs import KVCache
from ..serving.engine.loop import EngineThread
from ..serving.engine.memory import MOST_ROWS, Memory
from ..serving.http.served import Served
from ..serving.prefix_cache.memory import PrefixCache
from .prefixes import disk_of
from .sources import (
    check_adapter,
    check_generates,
    context_of,
    folder_of,
    load,
    name_of,
    skeleton_of,
    tokenizer_of,
    usable_device,
    with_adapter,
)
from .speculative import draft_cache, drafts_of


@contextmanager
def served_by(options: argparse.Namespace) -> Iterator[Served]:
    """Block with a running engine of the model; cached prefixes are written at its end.

    Raises: ValueError, OSError, ImportError with a one-line message.
    """
    device = usable_device(options.device)
    folder = folder_of(options.model, options.revision)
    check_generates(options, folder)
    processor = _processor(options, folder)
    with ExitStack() as stack:
        check_adapter(options, folder)
        model = with_adapter(options, load(options, folder, device))
        model = getattr(model, "thinker", model)  # Qwen3-Omni's model of text
        generator = _generator(options, model, folder, device)
        stack.callback(_closed, generator)
        context = context_of(model.config)
        if processes() == 1:
            context = _context_in(generator, context, options, folder, model)
        yield Served(name_of(options), model, processor, context, generator)


def _context_in(
    generator: EngineThread, longest: int, options: argparse.Namespace, folder: str, model: Any
) -> int:
    """Number of tokens a sequence may have beside the weights, at most `longest`; prints a smaller one.

    Layers of the checkpoint that draft have a cache as the model's last layer; a draft has its own. Where not
    even one token fits, the model answers all the same, as well as the system can.
    """
    assert generator.memory is not None
    room, more = generator.memory.free, generator.mtp_layers
    cache = KVCache.of_model(skeleton_of(options, folder)[1].to(model.dtype), options.kv_bits, more)
    if cache is not None and (of_draft := draft_cache(options, model.dtype)) is not None:
        cache += of_draft
    context = longest if cache is None else cache.tokens_in(room, longest)
    if context == longest:
        return longest
    space = f"fit into the {room / 1e9:.1f} GB beside the model"
    if context == 0:
        print(f"No sequences {space}: it may be slow", file=sys.stderr)
        return longest
    line = f"Sequences have at most {context:,} tokens, of {longest:,} that the model reads: no more {space}"
    print(line, file=sys.stderr)
    return context


def _generator(options: argparse.Namespace, model: Any, folder: str, device: str) -> EngineThread:
    """The engine on its thread."""
    prompts = prompts_of(options)
    speculative = drafts_of(options, model, folder, device, prompts)
    memory = Memory(model, beside=speculative.modules if speculative else ())
    return EngineThread(model, prompts, options.parallel or MOST_ROWS, memory, speculative)


def _closed(generator: EngineThread) -> None:
    """Shuts the engine down; a first Ctrl-C meanwhile loses no cached prefix, a second one does."""
    line = "torch-moe-mps: the prefix cache is being written; Ctrl-C once more leaves it"
    with at_ctrl_c(lambda: print(line, file=sys.stderr)):
        generator.close()


def _processor(options: argparse.Namespace, folder: str) -> Any:
    if Path(folder).is_file():
        return tokenizer_of(folder)
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder, trust_remote_code=options.trust_remote_code)


def prompts_of(options: argparse.Namespace) -> PrefixCache:
    """The prefix cache of chat and serve."""
    gigabytes = machine_memory() / 8e9 if options.prompt_memory is None else options.prompt_memory
    memory = int(gigabytes * 1e9)
    return PrefixCache(memory, disk_of(options))
