"""Jobs: what the engine generates, and what it counts. Its thread takes them from any other."""

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
    """Block in which SystemExit is an error as any other, and so is KeyboardInterrupt on any thread but the
    main one: neither ends a thread.
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
    """Tokens that a job has not computed, or has computed ahead.

    Attributes:
        cached_tokens: of the prompt, from the prefix cache; known before the first token of the answer.
        disk_tokens: of these, read from a disk.
        accepted_tokens, rejected_tokens: draft tokens that were verified so far.
    """

    cached_tokens: int = 0
    disk_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0


@dataclass(eq=False)
class Job:
    """One answer to generate. Its functions are called on the thread of the device, and may not wait.

    Args:
        inputs: of the model's `generate`, as its processor makes them, on the CPU: `input_ids` [1, T], and
            what images or sound have become.
        config: `max_new_tokens`, the tokens that end an answer, and how tokens are chosen; no stop strings,
            which `on_token` looks for, but with beams, each of which ends by them.
        on_token: takes the tokens of the answer one by one, the token that ends it included. Returns:
            whether the answer is complete; no token follows then. What it raises ends the job, as what
            `on_progress` and the processors raise.
        on_end: called once, behind the last token, with the reason: "stop" for a token that ends answers and
            for a complete answer, "length" where its length or its time is over, "cancelled", or the error.
            What it raises is logged.
        on_progress: takes how many tokens of the prompt are computed or cached, and how many it has.
        seed: of the drawn tokens; None is one from the system's entropy.
        processors: of this job's logits, such as the mask of a grammar. Their `input_ids` are the prompt with
            the answer so far, [1, T]. Those with `is_first` get the logits before the settings of `config`
            change them.
        likely: tokens that the answer probably has, in their order; they are drafted first.
        place: among the answers to one request; later ones let other requests go first.
        request: that it answers, known by identity.
        images: in the inputs, from `images_of`; None lets the thread of the device hash them.
    """

    inputs: dict[str, Tensor]
    config: GenerationConfig
    on_token: Callable[[int], bool]
    on_end: Callable[[Reason | Exception], None]
    on_progress: Callable[[int, int], None] = _no_progress
    seed: int | None = None
    processors: list[LogitsProcessor] = field(default_factory=list)
    tokenizer: Any = None
    likely: list[int] = field(default_factory=list)
    place: int = 0
    request: object = None
    images: "Images | None" = None
    usage: Usage = field(default_factory=Usage)
    _cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    @functools.cached_property
    def own_seed(self) -> int:
        """Seed of the drawn tokens, whoever draws them: nobody else's numbers are used or changed."""
        return secrets.randbits(63) if self.seed is None else self.seed

    def cancel(self) -> None:
        """Ends the job before its next step, or before the next chunk of its prompt; from any thread."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def report_progress(self, read: int, of: int) -> None:
        """Calls `on_progress`."""
        with as_errors():
            self.on_progress(read, of)

    def append(self, token: int) -> bool:
        """Calls `on_token`. Returns: whether the answer is complete."""
        with as_errors():
            return bool(self.on_token(token))

    def end(self, reason: Reason | Exception) -> None:
        """Calls `on_end`; an exception of it is logged."""
        try:
            with as_errors():
                self.on_end(reason)
        except Exception as error:
            kind = type(error).__name__
            logger.error("moe_mps: on_end of an answer raised %s: %s", kind, first_line(error))


@dataclass
class Counts:
    """Jobs that the engine has, and tokens so far.

    Attributes:
        active, waiting: jobs that have begun, and that have not.
        computed, cached: tokens of all prompts that were computed, and from the prefix cache.
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
