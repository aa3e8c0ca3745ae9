"""Replays a model's calls for a few new tokens as one call of a program, from the third of their kind on."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..._faults import fault_behind, is_out_of_memory
from ..._text import first_line
from ..attention.causal_mask import padding_of
from .match import MASK, Bound, settle_caches
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
            settle_caches(arguments)
            result = self._replayed(model, forward, arguments)
            if result is None and self.add(model, forward, arguments):
                result = self._replayed(model, forward, arguments)
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

    def _replayed(
        self, model: nn.Module, forward: Callable[..., Any], arguments: dict[str, Any]
    ) -> tuple[Any] | None:
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
            result = self._run(program, model, forward, arguments, padding)
            if isinstance(result, tuple):
                if program is not programs[0] and self.programs is programs:
                    self.programs = [program, *(p for p in programs if p is not program)]
                return result
            reasons.append(result)
        self.reason = reasons[0]  # the program that ran last says why
        return None

    def _run(
        self,
        program: Capture,
        model: nn.Module,
        forward: Callable[..., Any],
        arguments: dict[str, Any],
        padding: Callable[[], Any],
    ) -> tuple[Any] | str:
        """A tuple of what a program returns, or why it is not for the call.

        Where the program is wrong, or raises before it has written, the call runs module by module.
        """
        is_first = program.first is not None and not program.first.has_passed
        bound = _bound(program, arguments, padding, is_first)
        if isinstance(bound, str):
            return bound
        try:
            result = _made(program, bound) if is_first else _written(program, bound)
        except Exception as error:
            return self._without(program, bound, error, is_first, lambda: forward(model, **arguments))
        if program.first is not None and is_first and not isinstance(result, str):
            expected = forward(model, **arguments)
            if (differs := program.first.compare(result[0], expected)) is not None:
                self.give_up(differs)
                return (expected,)
            result = (expected,)
        if not isinstance(result, str):
            self.reason = None
        return result

    def _without(
        self, program: Capture, bound: Bound, error: Exception, on_copies: bool, call: Callable[[], Any]
    ) -> tuple[Any]:
        """The result of `call`, module by module, after the program has raised an error.

        Raises: the error of a device, of other processes or of a program that has written; any of `call`.
        """
        if program.exchange is not None or is_out_of_memory(error):
            raise error
        if (fault := fault_behind(error)) is not None:
            raise fault
        if bound.call.has_written() and not on_copies:
            raise error
        result = call()
        self.give_up(f"{type(error).__name__}: {first_line(error)}")
        return (result,)


def _bound(
    program: Capture, arguments: dict[str, Any], padding: Callable[[], Any], on_copies: bool
) -> Bound | str:
    """A call that is bound to a program, or why the program is not for it."""
    try:
        return program.match.bind(arguments, padding, on_copies)
    except _OF_OTHERS as error:
        return f"the cache holds something else ({type(error).__name__}: {first_line(error)})"


def _made(program: Capture, bound: Bound) -> tuple[Any]:
    """A tuple of what a program returns; its results for the cache are dropped."""
    return (program.make(program.run(bound, [])[0], bound.cache)[0],)


def _written(program: Capture, bound: Bound) -> tuple[Any] | str:
    """A tuple of what a program returns once the cache has its results; or why it is not for the call."""
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
