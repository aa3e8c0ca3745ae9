"""Values that context variables have inside of a block."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def having(variable: ContextVar[Any], value: Value) -> Iterator[Value]:
    """Inside the block, the variable has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
