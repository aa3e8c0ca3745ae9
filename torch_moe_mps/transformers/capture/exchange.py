"""Exchange of a model's call with other processes, which a captured call does around its program."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from ..basics.state import pipeline_of


class ExchangeError(RuntimeError):
    """Another process failed or differs: the call ends with it, captured or not."""


class Exchange(Protocol):
    """Belongs to a model that is spread over processes, in whose modules it has hooks.

    While a call is recorded, these hooks exchange nothing.
    """

    def record(
        self, run: Callable[[], Any], as_input: Callable[[Tensor], Tensor]
    ) -> tuple[Any, list[Tensor | None], Any]:
        """Result of a call that is captured, the tensors it would have sent, and what calls like it share.

        `as_input` gives an input of the captured call that is like a tensor.
        """

    def arriving(self, handover: Any) -> list[Tensor] | None:
        """The tensors that arrive for a captured call; None where they are not of its kind, `handover`."""

    def send(self, results: list[Tensor | None]) -> None:
        """Sends what a captured call has computed for others."""


def exchange_of(model: nn.Module) -> Exchange | None:
    """The exchange of a model that is spread over processes; None for any other."""
    running = pipeline_of(model)
    return None if running is None else running.handing
