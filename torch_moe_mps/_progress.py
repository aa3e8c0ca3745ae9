"""Progress display: a bar on a terminal or in a notebook, elsewhere a line at start and end."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from ._environment import shows_progress

Item = TypeVar("Item")


class Progress:
    """Context with a progress bar; `update()` counts one unit of work.

    Without tqdm, lines take the place of the bar. `TQDM_DISABLE=1` shows neither.

    Args:
        what: label, such as "Converting".
        total: number of units.
        unit: name of a unit, in the singular.
        begun: units done before.
        wanted: False shows nothing.
    """

    def __init__(self, what: str, total: int, unit: str, begun: int = 0, wanted: bool = True):
        self.what, self.total, self.unit, self.done = what, total, unit, begun
        self.units = f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"
        self._wanted = wanted and total > begun and shows_progress()
        self._bar: Any = None
        self._started = 0.0

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        if self._wanted and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            try:
                from tqdm.auto import tqdm
            except ImportError:  # an installation without extras
                pass
            else:
                self._bar = tqdm(total=self.total, initial=self.done, desc=self.what, unit=self.unit)
        if self._bar is None:
            self._say(f"{self.what}: {self.done} of {self.total} {self.units}")
        return self

    def update(self) -> None:
        self.done += 1
        if self._bar is not None:
            self._bar.update()

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            seconds = time.monotonic() - self._started
            self._say(f"{self.what}: {self.done} of {self.total} {self.units} after {seconds:.1f} s")

    def _say(self, line: str) -> None:
        if self._wanted:
            print(line, file=sys.stderr, flush=True)


def with_progress(
    items: Sequence[Item], what: str, unit: str, begun: int = 0, wanted: bool = True
) -> Iterator[Item]:
    """Yields the remaining items with a progress bar. Other arguments as for `Progress`."""
    with Progress(what, begun + len(items), unit, begun, wanted) as shown:
        for item in items:
            yield item
            shown.update()
