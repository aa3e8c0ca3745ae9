"""Isolation: which error ends one sequence, and which ends all.

Everything that the engine does for one sequence runs inside `Isolation.one`: restoring, prefill, sampling,
its functions, and its end. An error there ends that sequence. A step of several sequences runs inside
`Isolation.step`: without memory for it, the sequence with the fewest tokens ends; any other error ends all
that have begun, as their caches may be wrong. A fault of the GPU ends all, wherever it is seen.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ..._faults import is_out_of_memory
from ..._text import first_line
from .job import as_errors

logger = logging.getLogger(__name__)


class Ends(Protocol):
    """Ends sequences: a `Pool`."""

    def fail(self, sequence: Any, error: Exception) -> None:
        """Ends one, whose cache may be wrong."""

    def fail_all(self, error: Exception) -> None:
        """Ends all that have begun."""

    def preempt(self, error: Exception) -> None:
        """Ends the one with the fewest tokens; the others begin again."""

    def free(self) -> None:
        """Gives memory up after an allocation has failed."""


class Isolation:
    """Ends sequences by the errors of blocks."""

    def __init__(self, ends: Ends):
        self._ends = ends

    @contextmanager
    def one(self, sequence: Any) -> Iterator[None]:
        """Block for one sequence. Raises: torch.AcceleratorError, and a Ctrl-C of the main thread."""
        try:
            with as_errors():
                yield
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                self._ends.fail(sequence, error)
                raise
            self._frees(error)
            self._ends.fail(sequence, error)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Block with a step of several sequences. Raises: torch.AcceleratorError, and a Ctrl-C."""
        try:
            with as_errors():
                yield
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if self._frees(error):
                self._ends.preempt(error)
            else:
                self._ends.fail_all(error)

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Block that caches a prefix: where that fails, the answer is whole all the same."""
        try:
            with as_errors():
                yield
        except torch.AcceleratorError:
            raise
        except Exception as error:
            line = first_line(error) or type(error).__name__
            logger.warning("torch_moe_mps: a prefix is not cached: %s", line)

    def _frees(self, error: Exception) -> bool:
        """Whether an allocation has failed; memory is given up then, of the frames of the error too."""
        if not is_out_of_memory(error):
            return False
        traceback.clear_frames(error.__traceback__)
        self._ends.free()
        return True
