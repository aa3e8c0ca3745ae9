"""A disk that is full."""

import contextlib
import resource
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def files_of(limit: int) -> Iterator[None]:
    """No file grows over `limit` bytes. Python, which would keep half of a module's bytecode, writes none."""
    before, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_none
