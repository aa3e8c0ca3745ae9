"""A disk that is full."""

import contextlib
import resource
import sys
from collections.abc import Iterator


def fill(limit: int) -> None:
    """No file of this process grows over `limit` bytes until it ends.

    Python, which would keep half of a module's bytecode, writes none.
    """
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def files_of(limit: int) -> Iterator[None]:
    """No file grows over `limit` bytes inside the block."""
    before, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    fill(limit)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_none
