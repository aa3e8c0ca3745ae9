"""Lets a model's calls for a few new tokens run as one call of a program, from the third of their kind on."""

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from transformers import Cache

from ..._text import first_line
from ...ops.families.slots import using
from ..attention.attention import MOST_TOKENS
from ..basics.residency import follow_moved
from ..basics.unmodified import refused
from ..caches.cache import FOLLOWS
from ..caches.held import HeldEntries
from ..graphs.passes import simplify
from ..graphs.tracing import LeftAlone, NotCapturable, Recorder, is_operator, symbols_end
from ..upstream.calls import cache_among
from ..upstream.models import ModelOutput
from .arguments import padding_of
from .exchange import ExchangeError, exchange_of
from .fingerprint import Fingerprint
from .match import Match, Taken
from .policy import Kind, Policy
from .program import Integers, assemble
from .reading import Reading
from .recording import Recording
from .surroundings import forbidden
from .user_code import UserCode

_MAX_PROGRAMS = 8  # kept for each model
# Errors of a layer of a cache that holds something else than the recorded one.
_OF_OTHERS = (AttributeError, LookupError, TypeError, RuntimeError)
_TOO_FEW = "no kind of call for a few tokens was repeated three times"
# Errors of a recording where Python asks for a value that only the GPU knows.
_OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

Make = Callable[[list[Tensor], Any], Any]


class Capture(NamedTuple):
    """A captured kind of calls.

    `make` gives a call's result, from its tensors and its cache; `operators`: its calls, in order.
    A model's programs share a fingerprint.
    """

    fingerprint: Fingerprint
    match: Match
    integers: Callable[..., list[int] | None]
    run: Callable[..., list[Tensor]]
    make: Make
    handover: Any  # None without a pipeline
    operators: tuple[Any, ...]
    seconds: float


class Captures:
    """Captured programs of a model's calls, and the policy that adds to them.

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
        self.reason: str | None = _TOO_FEW
        self._anywhere, self._user_code, self._max_tokens = anywhere, user_code, max_tokens
        self._policy = Policy()
        self._reads_masks = False
        self._lock = threading.Lock()
        self._entering, self._inside = threading.Lock(), 0  # threads in a call

    def __reduce__(self) -> tuple[Any, ...]:
        return Captures, (self._anywhere, self._user_code, self._max_tokens)

    def __str__(self) -> str:
        if not self.programs:
            return f"tokens run module by module: {self.reason}"
        programs = f"one call ({', '.join(f'{len(p.operators)} operators' for p in self.programs)})"
        if self.reason is None:
            return f"a token is {programs}"
        return f"the last token ran module by module: {self.reason}; others are {programs}"

    def clear(self, reason: str = _TOO_FEW) -> None:
        """Forgets all programs, and with them the weights that they hold."""
        self.programs, self.reason = [], reason
        self._policy.forget()

    def call(self, model: nn.Module, own: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Result of `own`, the model's forward, for these arguments."""
        with self._entering:
            self._inside += 1
        try:
            return self._call(model, own, arguments)
        finally:
            with self._entering:
                self._inside -= 1

    def _call(self, model: nn.Module, own: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if not self._is_candidate(arguments):
            return own(model, **arguments)
        reason = forbidden() or _positions_by_hand(arguments)
        if reason is None:
            result = self._run(model, arguments)
            if result is not None:
                return result[0]
            if self._policy.rests():
                self.reason = self._policy.failure
            elif self._may_capture(model, own, arguments):
                result = self._run(model, arguments)
                if result is not None:
                    return result[0]
        else:
            self.reason = reason
        return own(model, **arguments)

    def _is_candidate(self, arguments: dict[str, Any]) -> bool:
        ids = arguments.get("input_ids")
        passed = arguments.get("inputs_embeds") if ids is None else ids
        return (
            type(passed) is Tensor
            and passed.dim() > 1
            and passed.shape[1] <= self._max_tokens
            and (self._anywhere or passed.is_mps)
        )

    def _run(self, model: nn.Module, arguments: dict[str, Any]) -> tuple[Any] | None:
        """A tuple of what a program returns; None if there is none for the call."""
        programs = self.programs  # another thread may change them
        if not programs:
            return None
        # copy.copy gives a second model the attributes of the first, and this object with them.
        if programs[0].fingerprint.model is not model:
            self.clear("the model is a copy of the one whose tokens were captured")
            return None
        if not programs[0].fingerprint.holds():
            self.clear("something about the model has changed since its tokens were captured")
            return None
        padding = functools.cache(lambda: padding_of(model, arguments))
        reasons: list[str] = []
        for program in programs:
            result = self._run_one(program, model, arguments, padding)
            if isinstance(result, tuple):
                if program is not programs[0]:
                    self.programs = [program, *(p for p in programs if p is not program)]
                self.reason = None
                return result
            reasons.append(result)
        self.reason = reasons[0]  # the program that ran last says why
        return None

    def _run_one(
        self, program: Capture, model: nn.Module, arguments: dict[str, Any], padding: Callable[[], Any]
    ) -> tuple[Any] | str:
        """A tuple of what a program returns, or why it is not for the call."""
        try:
            taken: Taken | str = program.match.take(arguments, padding)
        except _OF_OTHERS as error:
            taken = f"the cache holds something else ({type(error).__name__}: {first_line(error)})"
        if isinstance(taken, str):
            return taken
        integers = program.integers(*taken.symbols)
        if integers is None:
            return "the call has sizes for which the model runs other operators"
        exchange = exchange_of(model)
        arriving = [] if exchange is None else exchange.arriving(program.handover)
        if arriving is None:
            return "what arrives from another process is of another kind"
        results = program.run(taken.inputs + arriving, taken.views, taken.symbols, integers)
        if not results:
            return "a tensor has another shape, dtype, device or memory than in the captured call"
        program.match.give(taken, results, integers)
        made, sent = program.make(results, taken.cache)
        if exchange is not None:
            exchange.send(sent)
        return (made,)

    def _may_capture(self, model: nn.Module, own: Callable[..., Any], arguments: dict[str, Any]) -> bool:
        """Counts a call, and captures it if it is the third of its kind. Returns: whether it has."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread captures
        kind: Kind | None = None
        try:
            reading = Reading(arguments, None if self._reads_masks else padding_of(model, arguments))
            kind = self._policy.kind_to_capture(reading)
            if kind is None:
                return False
            with symbols_end():
                program = self._captured(model, own, reading, kind)
        except ExchangeError:
            raise
        except LeftAlone as alone:
            self.reason = str(alone)
            if kind is not None:
                kind.left_alone = self.reason
        except NotCapturable as unsupported:
            self._fail(str(unsupported))
        except _OF_VALUES as error:
            self._fail(f"it asks for values that only the GPU knows ({first_line(error)})")
        except UnsupportedOperatorException as error:
            self._fail(f"{error} has no meta function")
        except Exception as error:
            self._fail(f"{type(error).__name__}: {first_line(error)}", is_expected=False)
        else:
            self.programs = [program, *self._still_right(program.fingerprint)][:_MAX_PROGRAMS]
            self._policy.succeeded()
            follow_moved()  # passes have joined weights
            return True
        finally:
            self._lock.release()
        return False

    def _still_right(self, now: Fingerprint) -> list[Capture]:
        before = self.programs[0].fingerprint if self.programs else None
        if before is None or before.model is not now.model or not before.holds():
            return []
        return [program._replace(fingerprint=now) for program in self.programs]

    def _fail(self, reason: str, is_expected: bool = True) -> None:
        self.reason = reason
        self._policy.failed(reason, is_expected, bool(self.programs))

    @torch.inference_mode(False)  # in which torch refuses views of weights among fake tensors
    @torch.no_grad()
    def _captured(self, model: nn.Module, own: Callable[..., Any], reading: Reading, kind: Kind) -> Capture:
        started = time.perf_counter()
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise NotCapturable("Python runs without its global lock, with which a token compares the model")
        if not self._user_code and sys.getprofile() is not None:
            raise NotCapturable("a profiler hides whose code a token runs")
        user_code = UserCode()
        recorder = Recorder(None if self._user_code else user_code.look)
        symbol, values, least = kind.symbols(reading)
        symints = [recorder.symbol(*value) for value in zip(values, least, strict=True)]
        recording = Recording(reading, symbol, symints, recorder)
        exchange = exchange_of(model)
        # Now: the first copy of a cache notes something in its class.
        fingerprint = Fingerprint(model, exchange)
        sent, handover = None, None
        try:
            run = functools.partial(recorder.run, lambda: own(model, **recording.stand_ins))
            if exchange is None:
                output = run()
            else:
                output, sent, handover = exchange.record(run, recording.fixed_input)
        finally:
            changes = None if fingerprint.holds() else fingerprint.changed()
            if changes is not None:
                fingerprint.undo()
        user_code.require_none()
        if changes is not None:
            raise NotCapturable(f"a call changes {changes}")
        if recording.reads_mask:  # the mask is a tensor like any other, from here on
            self._reads_masks, reading.padding = True, None
            return self._captured(model, own, reading, kind)
        integers = Integers(recorder.env, list(recorder.symbols))
        tensors: list[Tensor] = []
        make = _maker((output, sent), tensors, recording.stand_in_of_cache)
        writes, of_cache = recording.written(integers.place_of, len(tensors))
        tensors = [*tensors, *of_cache]
        recorder.finish(tensors)
        with self._entering, recorder.env.comparing_symbols():
            simplify(recorder.graph, refused(), alone=self._inside == 1)
        weights = [*model.parameters(), *model.buffers()]
        program = assemble(recorder.graph, integers, recording, weights)
        evaluate = integers.function(least)
        fixes_rows = any(integers.is_fixed(symbol[p]) for p in reading.rows & symbol.keys())
        kind.note_program(integers.is_pinned, fixes_rows)
        seconds = time.perf_counter() - started
        operators = tuple(node.target for node in recorder.graph.nodes if is_operator(node))
        match = recording.match(writes)
        call = using(program.run) if torch.ops.moe_mps._expert_slots.default in operators else program.run
        return Capture(fingerprint, match, evaluate, call, make, handover, operators, seconds)


def _positions_by_hand(arguments: dict[str, Any]) -> str | None:
    """Why a call runs module by module whose layers count tokens, if its positions may be others.

    To compare them would wait for the GPU as long as a token takes. `generate` derives them from its cache.
    """
    if FOLLOWS.get() or arguments.get("position_ids") is None:
        return None
    layers = getattr(cache_among(arguments), "layers", ())
    counts = any(isinstance(layer, HeldEntries) for layer in layers)
    return "position_ids are compared with the cache, outside of generate()" if counts else None


def _maker(value: Any, tensors: list[Tensor], cache: Any) -> Make:
    """A function that makes what a call returns; adds the tensors that it needs to `tensors`."""
    if isinstance(value, Tensor):
        place = len(tensors)
        tensors.append(value)
        return lambda results, _: results[place]
    if value is not None and value is cache:
        return lambda _, arguments: arguments
    if isinstance(value, ModelOutput):
        cls, makers = type(value), {name: _maker(item, tensors, cache) for name, item in value.items()}
        return lambda results, given: cls(**{name: make(results, given) for name, make in makers.items()})
    if type(value) in (tuple, list):
        kind, items = type(value), [_maker(item, tensors, cache) for item in value]
        return lambda results, passed: kind([make(results, passed) for make in items])
    if value is None or isinstance(value, (bool, int, float, str)):
        return lambda *_: value
    if isinstance(value, Cache):
        raise LeftAlone("it makes a cache")
    raise NotCapturable(f"it returns a {type(value).__name__}")
