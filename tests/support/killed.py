"""A process that is killed at one of its changes of files, simulated within this process."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    """Ends everything: from here on no file is changed."""


class Changes:
    """Counts the changes of files; from number `last` on each one fails.

    A file that is opened or saved then is left empty.
    """

    def __init__(self, last: float):
        self.count, self.last = 0, last

    def over(self) -> bool:
        self.count += 1
        return self.count >= self.last


@contextmanager
def killed_at(last: float, saving: Any) -> Iterator[Changes]:
    """Inside the block, the process is killed at this change of files. Yields: the changes so far.

    Args:
        saving: the module whose `save_file` writes tensors.
    """
    changes = Changes(last)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "chmod"):
            patch.setattr(os, name, _counted(getattr(os, name), changes))
        opened, save_file = io.open, saving.save_file

        def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            result = opened(file, mode, *args, **kwargs)
            if {*mode} & {*"wax"} and changes.over():
                result.close()
                raise Killed
            return result

        def save(tensors: Any, file: Path, **kwargs: Any) -> None:
            if changes.over():
                file.write_bytes(b"")
                raise Killed
            save_file(tensors, file, **kwargs)

        patch.setattr(io, "open", open_file)
        patch.setattr("builtins.open", open_file)
        patch.setattr(saving, "save_file", save)
        yield changes


def _counted(function: Any, changes: Changes) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if changes.over():
            raise Killed
        return function(*args, **kwargs)

    return counted
