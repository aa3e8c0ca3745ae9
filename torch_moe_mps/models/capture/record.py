"""Records calls of a model as programs."""

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._limits import MOST_TOKENS
from ...ops.families.slots import with_slots_locked
from ..attention.causal_mask import padding_of
from ..basics.residency import follow_moved
from ..basics.unmodified import REFUSED
from ..graphs.passes import simplify
from ..graphs.tracing import NotCapturable, Recorder, is_operator
from .exchange import exchange_of
from .fingerprint import Fingerprint
from .first_call import FirstCall, is_wanted
from .match import MASK, Bound, Make, Match, maker
from .policy import TOO_FEW, Kind, Policy
from .program import CallIntegers, assemble
from .reading import Reading
from .stand_ins import StandIns
from .user_code import UserCode

_MAX_PROGRAMS = 8  # kept for each model
_OPERATOR_OF_SLOTS = torch.ops.moe_mps._expert_slots.default


class Capture(NamedTuple):
    """A captured kind of calls. A model's programs share a fingerprint.

    Attributes:
        run: gives the results and the integers of a bound call, from what arrives for it.
        make: gives a call's result.
        exchange: with other processes, and what calls of this kind share there; None without a pipeline.
        operators: the calls of the program, in order.
        first: the comparison of its first call with the model; None without the self-check, and where other
            processes take part.
        seconds: that the recording took.
    """

    fingerprint: Fingerprint
    match: Match
    run: Callable[[Bound, list[Tensor]], tuple[list[Tensor], list[int]]]
    make: Make
    exchange: Any
    handover: Any
    operators: tuple[Any, ...]
    first: FirstCall | None
    seconds: float


class Programs:
    """Captured programs of a model's calls, and the recording of new ones.

    Attributes:
        programs: most recently used first.
        reason: why the last call of few tokens ran module by module; None if it was one call.
    """

    def __init__(
        self, anywhere: bool = False, user_code: bool = False, max_tokens: int = MOST_TOKENS
    ) -> None:
        """
        Args:
            anywhere: capture on any device, not on mps alone.
            user_code: capture calls that run code of the user, too.
            max_tokens: of each row of a captured call.
        """
        self.programs: list[Capture] = []
        self.reason: str | None = TOO_FEW
        self._anywhere, self._user_code, self._max_tokens = anywhere, user_code, max_tokens
        self._policy = Policy()
        self._entering, self._inside = threading.Lock(), 0  # threads in a call

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._anywhere, self._user_code, self._max_tokens)

    def __str__(self) -> str:
        if not self.programs:
            return f"tokens run module by module: {self.reason}"
        programs = f"one call ({', '.join(f'{len(p.operators)} operators' for p in self.programs)})"
        if self.reason is None:
            return f"a token is {programs}"
        return f"the last token ran module by module: {self.reason}; others are {programs}"

    def clear(self, reason: str = TOO_FEW) -> None:
        """Forgets all programs, and with them the weights that they hold."""
        self.programs, self.reason = [], reason
        self._policy.forget()

    def give_up(self, reason: str) -> None:
        """Forgets all programs, warns, and captures nothing more."""
        self.clear(self._policy.refuse(reason))

    def add(self, model: nn.Module, forward: Callable[..., Any], arguments: dict[str, Any]) -> bool:
        """Counts a call, and records it if it is the third of its kind. Returns: whether it has."""

        def read(reads_masks: bool) -> Reading:
            return Reading(arguments, None if reads_masks else padding_of(arguments.get(MASK), model))

        def capture(reading: Reading, kind: Kind) -> None:
            program = self._record(model, forward, reading, kind)
            self.programs = [program, *self._still_right(program.fingerprint)][:_MAX_PROGRAMS]
            follow_moved()  # passes have joined weights

        outcome = self._policy.offer(read, capture, bool(self.programs))
        if isinstance(outcome, str):
            self.reason = outcome
        return outcome is True

    def _record(self, model: nn.Module, forward: Callable[..., Any], reading: Reading, kind: Kind) -> Capture:
        return record(model, forward, reading, kind, self._user_code, self._quiet)

    @contextmanager
    def _quiet(self) -> Iterator[bool]:
        """No thread begins a call inside the block. Yields: whether this one alone is in a call."""
        with self._entering:
            yield self._inside == 1

    def _still_right(self, now: Fingerprint) -> list[Capture]:
        """The programs, unless the model has changed since they were recorded."""
        before = self.programs[0].fingerprint if self.programs else None
        if before is None or before.model is not now.model or not before.holds():
            return []
        return [program._replace(fingerprint=now) for program in self.programs]


@torch.inference_mode(False)  # in which torch refuses views of weights among fake tensors
@torch.no_grad()
def record(
    model: nn.Module,
    forward: Callable[..., Any],
    reading: Reading,
    kind: Kind,
    user_code: bool,
    quiet: Callable[[], AbstractContextManager[bool]],
) -> Capture:
    """The program of a call of `forward`.

    Args:
        user_code: code of the user may run, too.
        quiet: a block in which no thread begins a call; True if no other one is in a call.

    Raises: NotCapturable, or what the recorded code raises.
    """
    started = time.perf_counter()
    _require_lock_and_no_profiler(user_code)
    looks = UserCode()
    recorder = Recorder(None if user_code else looks.look)
    symbol, values, least = kind.symbols(reading)
    symints = [recorder.symbol(*value) for value in zip(values, least, strict=True)]
    stand_ins = StandIns(reading, symbol, symints, recorder)
    exchange = exchange_of(model)
    # Now: the first copy of a cache notes something in its class.
    fingerprint = Fingerprint(model, exchange)
    run = functools.partial(recorder.run, lambda: forward(model, **stand_ins.arguments))
    sent, handover = None, None
    try:
        if exchange is None:
            output = run()
        else:
            output, sent, handover = exchange.record(run, stand_ins.add_arriving)
    finally:
        changes = None if fingerprint.holds() else fingerprint.changed()
        if changes is not None:
            fingerprint.undo()
    looks.require_none()
    if changes is not None:
        raise NotCapturable(f"a call changes {changes}")
    if stand_ins.reads_mask:
        reading.read_mask()
        return record(model, forward, reading, kind, user_code, quiet)
    integers = CallIntegers(recorder.env, list(recorder.symbols))
    tensors: list[Tensor] = []
    make = maker((output, sent), tensors, stand_ins.cache)
    writes, of_cache = stand_ins.written(integers.place_of, len(tensors))
    recorder.finish([*tensors, *of_cache])
    with quiet() as is_alone, recorder.env.comparing_symbols():
        simplify(recorder.graph, frozenset(REFUSED), alone=is_alone)
    weights = [*model.parameters(), *model.buffers()]
    program = assemble(recorder.graph, integers, stand_ins, least, weights)
    fixes_rows = any(integers.is_fixed(symbol[p]) for p in reading.rows & symbol.keys())
    kind.note_program(integers.is_pinned, fixes_rows)
    operators = tuple(node.target for node in recorder.graph.nodes if is_operator(node))
    return Capture(
        fingerprint=fingerprint,
        match=stand_ins.match(program, writes),
        run=with_slots_locked(Bound.run) if _OPERATOR_OF_SLOTS in operators else Bound.run,
        make=make,
        exchange=exchange,
        handover=handover,
        operators=operators,
        first=FirstCall(recorder.graph) if exchange is None and is_wanted() else None,
        seconds=time.perf_counter() - started,
    )


def _require_lock_and_no_profiler(user_code: bool) -> None:
    """Raises: NotCapturable where a recording cannot know what a token rests on."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise NotCapturable("Python runs without its global lock, with which a token compares the model")
    if not user_code and sys.getprofile() is not None:
        raise NotCapturable("a profiler hides whose code a token runs")
