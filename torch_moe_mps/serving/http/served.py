"""The served model, shared by all protocols."""

import functools
import logging
import threading
import time
from typing import Any

from ..engine.loop import EngineThread
from .media.decoding import Limits, limits_of
from .request import Request
from .structured import Grammars
from .template import READERS, ChatTemplate

log = logging.getLogger(__name__)
_MOST_LINES, _LONGEST_LINE = 1000, 200


class Served:
    """A model with its processor and device thread.

    Args:
        name: for clients.
        processor: a tokenizer, or a processor that contains one.
        context: context length, LONGEST for unlimited.
        generator: device thread that runs all jobs.
    """

    def __init__(self, name: str, model: Any, processor: Any, context: int, generator: EngineThread):
        self.name, self.model, self.context, self.generator = name, model, context, generator
        self.template = ChatTemplate(processor, name)
        self.grammars, self.created = Grammars(), int(time.time())
        self.say_once = _Lines().say_once

    @functools.cached_property
    def limits(self) -> Limits:
        """Limits of a request's images and audio."""
        memory = self.generator.memory
        return limits_of(self.template.processor, None if memory is None else memory.free)

    @property
    def reads_media(self) -> bool:
        """True if messages may contain images or audio."""
        return any(map(self.template.reads, READERS))

    def warning(self, request: Request) -> dict[str, str]:
        """Response field that warns that tools are left out, or their calls not parsed."""
        warning = self.template.tools_warning if request.tools else None
        return {} if warning is None else {"warning": warning}


class _Lines:
    """Log lines that are written once."""

    def __init__(self) -> None:
        self._lock, self._said = threading.Lock(), dict[str, None]()

    def say_once(self, line: str) -> None:
        """Logs a line unless it is among the recently logged ones; clients influence its text."""
        line = line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."
        with self._lock:
            if line not in self._said:
                self._said[line] = None
                log.info(line)
            if len(self._said) > _MOST_LINES:
                del self._said[next(iter(self._said))]
