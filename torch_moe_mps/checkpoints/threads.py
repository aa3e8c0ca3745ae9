"""How many threads of transformers' loader read a checkpoint."""

import contextlib
import sys
import threading
from collections.abc import Iterator

from .._environment import set_one_thread
from .._extension import torch_version


class _OneByOne:
    """Sets transformers to one loading thread while any thread of ours loads."""

    def __init__(self) -> None:
        self._lock, self._loading = threading.Lock(), 0
        self._before: str | None = None

    @contextlib.contextmanager
    def __call__(self, enabled: bool) -> Iterator[None]:
        """Context where transformers loads with one thread; four would outrun quantising."""
        if not enabled:
            yield
            return
        with self._lock:
            if self._loading == 0:
                self._before = set_one_thread("1")
            self._loading += 1
        try:
            yield
        finally:
            with self._lock:
                self._loading -= 1
                if self._loading == 0:
                    set_one_thread(self._before)


one_by_one = _OneByOne()


def threads_crash() -> bool:
    """True before torch 2.15 on a Mac: threads that convert dtypes on MPS side by side crash
    (pytorch#167541, #197836)."""
    return sys.platform == "darwin" and torch_version() < (2, 15)
