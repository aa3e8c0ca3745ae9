"""Bounded caches that live as long as the process."""

from typing import Any


class Bounded(dict[Any, Any]):
    """A dictionary that forgets all it has before it has more than `most` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
