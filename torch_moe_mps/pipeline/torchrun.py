"""The processes that torchrun starts for a command: the first talks, all load their layers.

Importing this costs nothing: --help must not wait for torch.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any


def processes() -> int:
    """How many there are; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the process that talks: the only one, or rank 0."""
    return processes() == 1 or os.environ.get("RANK") == "0"


@contextmanager
def first_process_talks() -> Iterator[None]:
    """The other processes print nothing but errors."""
    if is_first_process():
        yield
        return
    os.environ.setdefault("TQDM_DISABLE", "1")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def tell_other_processes(error: Exception) -> None:
    peers = sys.modules.get(f"{__package__}.peers")
    if peers is not None:
        peers.tell(error)


def load(folder: str, shares: Sequence[int] | None, **asked: Any) -> Any:
    """`from_pretrained` of a folder, its layers spread over all processes. Raises: ValueError."""
    if processes() == 1:
        from ..transformers.loading import from_pretrained

        return from_pretrained(folder, **asked)
    from ..transformers.upstream.processes import DistributedConfig
    from . import loading

    size = DistributedConfig(pp_size=processes())
    return loading.from_pretrained(folder, distributed_config=size, shares=shares, **asked)


def sum_of_processes(model: Any, number: int) -> int:
    """The sum of a number that each process has."""
    if processes() == 1:
        return number
    return sum(facts["number"] for facts in model.pipeline.peers.gather({"number": number}))
