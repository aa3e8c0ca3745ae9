"""Jobs of the engine, and its counters. Jobs may be submitted from any thread."""

import functools
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from ..._text import first_line

if TYPE_CHECKING:
    from ..prefix_cache.memory import Images

logger = logging.getLogger(__name__)
Reason = Literal["stop", "length", "cancelled"]


def _no_progress(read: int, of: int) -> None:
    """Default of `on_progress`."""


@contextmanager
def as_errors() -> Iterator[None]:
    """Context that turns SystemExit and KeyboardInterrupt into RuntimeError, so that neither ends a thread.

    KeyboardInterrupt on the main thread is re-raised.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # a Ctrl-C is the caller's
        raise RuntimeError(f"moe_mps: a function of an answer raised {error!r}") from error


@dataclass
class Usage:
    """Token counts of a job: prefix cache hits and draft tokens.

    Attributes:
        cached_tokens: prompt tokens from the prefix cache; known before the first generated token.
        disk_tokens: cached tokens that were read from the disk.
        accepted_tokens, rejected_tokens: draft tokens verified so far.
    """

    cached_tokens: int = 0
    disk_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(eq=False)
class Job:
    """One generation request. Its callbacks run on the device thread and must not block.

    Args:
        inputs: processor outputs for `generate`, on the CPU: `input_ids` [1, T], and tensors of images or
            audio.
        config: `max_new_tokens`, end tokens and sampling settings. Stop strings are left to `on_token`.
        on_token: called with each generated token, the end token included. Returns True if the answer is
            complete. An exception ends the job, as does one of `on_progress` or the processors.
        on_end: called once after the last token with the reason: "stop" for an end token or a complete
            answer, "length" at the length or time limit, "cancelled", or the error. Its exceptions are
            logged.
        on_progress: called with the number of computed or cached prompt tokens, and the prompt's length.
        seed: for sampling; None takes one from the system's entropy.
        processors: logits processors of this job, such as a grammar mask. Their `input_ids` [1, T] are the
            prompt with the tokens generated so far. Those with `is_first` run before those of `config`.
        place: index among the answers to one request; later ones yield to other requests.
        request: that it answers, compared by identity.
        images: in the inputs, from `images_of`; None leaves hashing to the device thread.
    """

    inputs: dict[str, Tensor]
    config: GenerationConfig
    on_token: Callable[[int], bool]
    on_end: Callable[[Reason | Exception], None]
    on_progress: Callable[[int, int], None] = _no_progress
    seed: int | None = None
    processors: list[LogitsProcessor] = field(default_factory=list)
    place: int = 0
    request: object = None
    images: "Images | None" = None
    usage: Usage = field(default_factory=Usage)
    _cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    @functools.cached_property
    def own_seed(self) -> int:
        """Seed of the job's private random generator."""
        return secrets.randbits(63) if self.seed is None else self.seed

    def cancel(self) -> None:
        """Cancels the job before its next step or prefill chunk. Safe to call from any thread."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def report_progress(self, read: int, of: int) -> None:
        """Calls `on_progress`."""
        with as_errors():
            self.on_progress(read, of)

    def append(self, token: int) -> bool:
        """Calls `on_token`. Returns: True if the answer is complete."""
        with as_errors():
            return bool(self.on_token(token))

    def end(self, reason: Reason | Exception) -> None:
        """Calls `on_end` and logs its exceptions."""
        try:
            with as_errors():
                self.on_end(reason)
        except Exception as error:
            kind = type(error).__name__
            logger.error("moe_mps: on_end of an answer raised %s: %s", kind, first_line(error))


@dataclass
class Counts:
    """Counters of the engine.

    Attributes:
        active, waiting: admitted and queued jobs.
        computed, cached: prompt tokens that were computed, and that came from the prefix cache.
        accepted, rejected: draft tokens.
    """

    active: int = 0
    waiting: int = 0
    computed: int = 0
    cached: int = 0
    accepted: int = 0
    rejected: int = 0


def prompt_length(inputs: dict[str, Any]) -> int:
    """Number of tokens of a job's prompt."""
    return int(inputs["input_ids"].shape[-1])
