"""Values of context variables inside of a block, and caches of a bounded size."""

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


class Bounded(dict[Any, Any]):
    """A dictionary that forgets all it has before it has more than `max_entries`."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.max_entries and key not in self:
            self.clear()
        super().__setitem__(key, value)
