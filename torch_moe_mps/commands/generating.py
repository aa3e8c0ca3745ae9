"""generate() as chat and serve call it: it ends when it is told to."""

import threading
from typing import Any

from torch import Tensor
from transformers import StoppingCriteria

AT_ONCE = 2048  # tokens of a prompt


class Generating:
    """Stands for a model whose `generate` can be ended by another thread; all else is the model's."""

    def __init__(self, model: Any):
        self.model = model
        self._ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, **given: Any) -> Any:
        return self.model.generate(stopping_criteria=[_Ended(self._ended)], **given)

    def end(self) -> None:
        """What is generated ends with its next token, and all that is asked for later with its first."""
        self._ended.set()


class _Ended(StoppingCriteria):
    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.new_full((len(input_ids),), self.event.is_set()).bool()
