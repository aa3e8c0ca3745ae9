"""Replays a model's calls for a few new tokens as one call of a program, from the third of their kind on."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..._text import first_line
from ..attention.causal_mask import padding_of
from .match import MASK
from .record import Capture, Programs
from .surroundings import forbidden, positions_by_hand

# Errors of a layer of a cache that holds something else than the recorded one.
_OF_OTHERS = (AttributeError, LookupError, TypeError, RuntimeError)


class Captures(Programs):
    """Programs of a model's calls, which run in place of its forward."""

    def call(self, model: nn.Module, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Result of `forward`, the model's, for these arguments."""
        with self._entering:
            self._inside += 1
        try:
            return self._call(model, forward, arguments)
        finally:
            with self._entering:
                self._inside -= 1

    def _call(self, model: nn.Module, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if not self._is_candidate(arguments):
            return forward(model, **arguments)
        reason = forbidden() or positions_by_hand(arguments)
        if reason is None:
            result = self._replayed(model, arguments)
            if result is None and self.add(model, forward, arguments):
                result = self._replayed(model, arguments)
            if result is not None:
                return result[0]
        else:
            self.reason = reason
        return forward(model, **arguments)

    def _is_candidate(self, arguments: dict[str, Any]) -> bool:
        ids = arguments.get("input_ids")
        passed = arguments.get("inputs_embeds") if ids is None else ids
        return (
            type(passed) is Tensor
            and passed.dim() > 1
            and passed.shape[1] <= self._max_tokens
            and (self._anywhere or passed.is_mps)
        )

    def _replayed(self, model: nn.Module, arguments: dict[str, Any]) -> tuple[Any] | None:
        """A tuple of what a program returns; None if there is none for the call."""
        programs = self.programs  # another thread may change them
        if not programs:
            return None
        fingerprint = programs[0].fingerprint
        # copy.copy gives a second model the attributes of the first, and this object with them.
        if fingerprint.model is not model:
            self.clear("the model is a copy of the one whose tokens were captured")
            return None
        if not fingerprint.holds():
            self.clear(f"{fingerprint.changed()} has changed since tokens were captured")
            return None
        padding = functools.cache(lambda: padding_of(arguments.get(MASK), model))
        reasons: list[str] = []
        for program in programs:
            result = _run(program, arguments, padding)
            if isinstance(result, tuple):
                if program is not programs[0]:
                    self.programs = [program, *(p for p in programs if p is not program)]
                self.reason = None
                return result
            reasons.append(result)
        self.reason = reasons[0]  # the program that ran last says why
        return None


def _run(program: Capture, arguments: dict[str, Any], padding: Callable[[], Any]) -> tuple[Any] | str:
    """A tuple of what a program returns, or why it is not for the call."""
    try:
        bound = program.match.bind(arguments, padding)
    except _OF_OTHERS as error:
        return f"the cache holds something else ({type(error).__name__}: {first_line(error)})"
    if isinstance(bound, str):
        return bound
    exchange = program.exchange
    arriving = [] if exchange is None else exchange.arriving(program.handover)
    results, integers = ([], []) if arriving is None else program.run(bound, arriving)
    if not results:
        return "what arrives from another process is of another kind"
    program.match.write_back(bound, results, integers)
    result, sent = program.make(results, bound.cache)
    if exchange is not None:
        exchange.send(sent)
    return (result,)
