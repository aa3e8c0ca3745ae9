"""Exchange of a model's call with other processes, which a captured call does around its program."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

_EXCHANGE = "_moe_mps_exchange"  # the attribute of a model that has one


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
    # Each captured token asks, and getattr of a missing attribute is slow on modules.
    found: Exchange | None = vars(model).get(_EXCHANGE)
    return found


def exchange_by(model: nn.Module, exchange: Exchange) -> None:
    """The model's captured calls exchange by this from now on."""
    vars(model)[_EXCHANGE] = exchange
