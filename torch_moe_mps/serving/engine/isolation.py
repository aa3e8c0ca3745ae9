"""Isolation: which error ends one sequence, and which ends all.

Everything that the engine does for one sequence runs inside `Isolation.one`: restoring, prefill, sampling,
its functions, and its end. An error there ends that sequence. A step of several sequences runs inside
`Isolation.step`: without memory for it, the sequence with the fewest tokens ends; any other error ends all
that have begun, as their caches may be wrong. A fault of the GPU ends all, wherever it is seen.
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
    """Ends sequences: a `Pool`."""

    def end(self, sequence: Sequence, reason: Exception) -> None: ...
    def fail_all(self, error: Exception) -> None: ...
    def preempt(self, error: Exception) -> None: ...
    def free(self) -> None: ...


class Isolation:
    """Ends the sequences of a pool by the errors of blocks.

    All blocks raise torch.AcceleratorError, and a Ctrl-C of the main thread.
    """

    def __init__(self, pool: Ends):
        self._pool = pool

    def one(self, sequence: Sequence) -> AbstractContextManager[None]:
        """Block for one sequence."""

        def end(error: Exception) -> None:
            self._frees(error)
            self._pool.end(sequence, error)

        return self._block(end, is_of_one=True)

    def step(self) -> AbstractContextManager[None]:
        """Block with a step of several sequences."""

        def end(error: Exception) -> None:
            if self._frees(error):
                self._pool.preempt(error)
            else:
                self._pool.fail_all(error)

        return self._block(end)

    def optional(self) -> AbstractContextManager[None]:
        """Block that caches a prefix: where that fails, the answer is whole all the same."""

        def end(error: Exception) -> None:
            line = first_line(error) or type(error).__name__
            logger.warning("torch_moe_mps: a prefix is not cached: %s", line)

        return self._block(end)

    @contextmanager
    def _block(self, end: Callable[[Exception], None], is_of_one: bool = False) -> Iterator[None]:
        """Block whose error is handed to `end`; a fault of the GPU goes on to whoever ends all.

        Args:
            is_of_one: whether a fault ends the sequence of the block, too: it may be one that runs in no
                cache of the engine, and is none of all.
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
        """Whether an allocation has failed; memory is given up then, of the frames of the error too."""
        if not is_out_of_memory(error):
            return False
        traceback.clear_frames(error.__traceback__)
        self._pool.free()
        return True
