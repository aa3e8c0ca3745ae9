"""Error isolation: whether an error ends one sequence or all of them.

Work for one sequence (restoring, prefill, sampling, callbacks, its end) runs inside `Isolation.one`: an error
ends that sequence. A batched step runs inside `Isolation.step`: out of memory ends the sequence with the
fewest tokens; any other error ends all admitted sequences, whose caches may be wrong. A GPU fault always ends
all.
"""

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ..._faults import fault_behind, fault_of, is_out_of_memory
from ..._text import first_line
from .job import as_errors
from .sequence import Sequence

logger = logging.getLogger(__name__)


class Ends(Protocol):
    """Interface of `Pool` for ending sequences."""

    def end(self, sequence: Sequence, reason: Exception) -> None: ...
    def fail_all(self, error: Exception) -> None: ...
    def preempt(self, error: Exception) -> None: ...
    def free(self) -> None: ...


class Isolation:
    """Context managers that turn an error into the end of the affected sequences.

    All of them re-raise torch.AcceleratorError, and Ctrl-C on the main thread.
    """

    def __init__(self, pool: Ends):
        self._pool = pool

    def one(self, sequence: Sequence) -> AbstractContextManager[None]:
        """Context of work for one sequence; an error ends it."""

        def end(error: Exception) -> None:
            self._frees(error)
            self._pool.end(sequence, error)

        return self._block(end, is_of_one=True)

    def step(self) -> AbstractContextManager[None]:
        """Context of a batched step; an error ends all admitted sequences, out of memory only one."""

        def end(error: Exception) -> None:
            if self._frees(error):
                self._pool.preempt(error)
            else:
                self._pool.fail_all(error)

        return self._block(end)

    def optional(self) -> AbstractContextManager[None]:
        """Context of prefix caching; an error is logged and ends no sequence."""

        def end(error: Exception) -> None:
            line = first_line(error) or type(error).__name__
            logger.warning("torch_moe_mps: a prefix is not cached: %s", line)

        return self._block(end)

    @contextmanager
    def _block(self, end: Callable[[Exception], None], is_of_one: bool = False) -> Iterator[None]:
        """Context whose error is passed to `end`; a GPU fault is re-raised.

        Args:
            is_of_one: passes a GPU fault to `end`, too: `fail_all` ends no sequence that has not begun.
        """
        try:
            with as_errors():
                yield
        except Exception as error:
            fault = fault_of(error) if is_of_one else fault_behind(error)
            if fault is None:
                end(error)
                return
            if is_of_one:
                end(fault)
            raise fault from None

    def _frees(self, error: Exception) -> bool:
        """True for an out-of-memory error; cached prefixes and the traceback's frames are released."""
        if not is_out_of_memory(error):
            return False
        traceback.clear_frames(error.__traceback__)
        self._pool.free()
        return True
