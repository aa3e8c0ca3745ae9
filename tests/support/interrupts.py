"""Ctrl-C at a chosen line of the package."""

import contextlib
import sys
from collections.abc import Callable

from .ours import is_file_of_ours


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line that the package runs, as Ctrl-C may."""

    def __init__(self, after: int):
        self.left = after

    def __call__(self, frame, event, argument):
        if not is_file_of_ours(frame.f_code.co_filename):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


def interrupted(action: Callable[[], object], after: int) -> bool:
    """Whether the action was interrupted; False if it came too late."""
    with contextlib.suppress(KeyboardInterrupt), Interrupts(after) as interrupts:
        action()
    return interrupts.left <= 0
