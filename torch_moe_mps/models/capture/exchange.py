"""Exchange of a model's call with other processes, which a captured call does around its program."""

from typing import Any

from torch import nn

from ..basics.state import pipeline_of


class ExchangeError(RuntimeError):
    """Another process failed or differs: the call ends with it, captured or not."""


def exchange_of(model: nn.Module) -> Any:
    """The `pipeline.exchange.StageExchange` of a model that is spread over processes; None for any other."""
    running = pipeline_of(model)
    return None if running is None else running.exchange
