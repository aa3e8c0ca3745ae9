"""Processes that torchrun starts for a command: each loads its layers, the first prints.

Importing this costs nothing: --help must not wait for torch.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple

from .._environment import is_first_process, processes, show_no_progress
from ..serving.speculative import LOOKUP
from .arguments import NO_DRAFTS

# Commands whose jobs an engine in the first process generates; in those of others, all compute alike.
_LED = ("bench", "chat", "generate", "serve")
_PIPELINE = f"{__package__.rpartition('.')[0]}.pipeline"


def follows(command: str) -> bool:
    """True in processes that only follow the first one."""
    return command in _LED and not is_first_process()


def follow(model: Any) -> None:
    """Computes the layers of this process for the engine in the first one, until that ends."""
    from ..pipeline.follower import Follower

    Follower(model.pipeline).run()


def check_processes(options: argparse.Namespace) -> None:
    """Checks and adapts a command's options for several processes.

    Raises: ValueError.
    """
    if processes() == 1:
        if getattr(options, "shares", None) is not None:
            raise ValueError("--shares is for the processes that torchrun starts, got one process")
        return
    for name in ("--prompt-folder", "--adapter", "--experts-memory"):
        if getattr(options, name[2:].replace("-", "_"), None) is not None:
            raise ValueError(f"{name} is for one process, got a pipeline of several")
    if getattr(options, "speculative", None) not in (None, NO_DRAFTS, LOOKUP):
        raise ValueError(
            "--speculative MODEL is for one process, as the processes of a pipeline would draft differently; "
            f"--speculative {LOOKUP} drafts there"
        )
    options.speculative = getattr(options, "speculative", None) or NO_DRAFTS
    options.prompt_disk = 0  # each process has a part of each prefix
    if not is_first_process():
        options.log_level, options.json = "error", None


@contextmanager
def first_process_talks() -> Iterator[None]:
    """Context where processes other than the first print only errors, and exit with it."""
    if is_first_process():
        try:
            yield
        finally:
            if (executor := sys.modules.get(f"{_PIPELINE}.executor")) is not None:
                executor.end_all()
        return
    show_no_progress()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def load_spread(options: argparse.Namespace, folder: str, **asked: Any) -> Any:
    """`from_pretrained` of a folder, its layers spread over all processes. Raises: ValueError."""
    if processes() == 1:
        from ..transformers.loading import from_pretrained

        return from_pretrained(folder, **asked)
    from transformers import DistributedConfig

    from ..pipeline import executor, loading

    size = DistributedConfig(pp_size=processes())
    model = loading.from_pretrained(folder, distributed_config=size, shares=options.shares, **asked)
    if options.command in _LED and is_first_process():
        executor.lead(model)
    return model


class WeightBytes(NamedTuple):
    """Bytes of a model's weights, and bytes read per token."""

    total: int
    a_token: int


def sizes_of(model: Any) -> WeightBytes:
    """The sizes of a model, in all processes together."""
    if processes() == 1:
        from ..checkpoints.quantize.sizes import bytes_a_token, total_bytes

        return WeightBytes(total_bytes(model), bytes_a_token(model))
    parts = model.pipeline.parts
    return WeightBytes(sum(part["bytes"] for part in parts), sum(part["bytes_a_token"] for part in parts))
