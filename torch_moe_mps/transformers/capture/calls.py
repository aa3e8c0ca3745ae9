"""Lets a model's calls for a few new tokens run as one call of a program, from the third of their kind on."""

import functools
import inspect
import os
import platform
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from transformers import Cache, GenerationMixin, PreTrainedModel

from ..._extension import host_library
from ..._faults import synchronized
from ..._text import first_line
from ...ops._decoded import checked_at_once
from ..attention.attention import MOST_TOKENS
from ..attention.causal_mask import follow_mask
from ..basics.bounded import Bounded
from ..basics.classes import restore_class, subclass
from ..basics.residency import follow_moved
from ..basics.scoped import having
from ..basics.self_check_state import is_on_mps, refused
from ..basics.state import state_in, state_of
from ..basics.wide_logits import wide_logits
from ..caches.cache import FOLLOWS, takes_states
from ..caches.held import HeldEntries
from ..graphs.passes import simplify
from ..graphs.tracing import NotCapturable, Recorder, is_operator, symbols_end
from ..modules.sampling import OPERATOR, current, sampling
from ..upstream.calls import cache_among
from ..upstream.models import ModelOutput
from .arguments import MASK, padding_of, whole
from .candidates import CANDIDATES, DRAFTING, are_by_layers
from .exchange import ExchangeError, exchange_of
from .fingerprint import Fingerprint, note_change
from .match import Match, Taken
from .own_code import OwnCode
from .program import Integers, assemble
from .reading import BeginsCache, Reading
from .recording import Recording
from .surroundings import forbidden
from .trial import unnoticed_change

SWITCH = "MOE_MPS_CAPTURE"
_MARK = "_moe_mps_captures"  # in a class that `_capturing_class` made: the one in whose place it is
_CALLS_BEFORE = 2  # the third call of a kind is captured
_MOST_PROGRAMS = 8  # kept for each model
_MOST_CAPTURES = 16  # for each kind of calls: the guards of some never hold for long
_MOST_PINNED = 4
_MOST_KINDS = 64
_LONGEST_REST = 4096  # calls after which a capture that failed is tried again
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
    handover: Any  # made by an Exchange, or None
    operators: tuple[Any, ...]
    seconds: float


class _Kind:
    """Calls that differ in numbers and tensors alone."""

    def __init__(self) -> None:
        self.calls = 0  # since the last capture
        self.captures = 0
        self.pinned = 0  # captures that hold for one value of a number
        self.fixes_rows = False  # the model runs other operators for each number of rows
        self.begins_cache: str | None = None  # why these calls are left alone
        self.numbers: list[int] = []
        self.varied: dict[int, int] = {}  # {position of a number that changes: its value before}


class Captures:
    """Counts of a model's calls, and programs of those that repeat.

    Attributes:
        programs: the one that ran last is the first.
        reason: why the last call of few tokens ran module by module; None if it was one call.
    """

    def __init__(self, anywhere: bool = False, own_code: bool = False, most: int = MOST_TOKENS) -> None:
        """`anywhere`: on any device, not on mps alone; `own_code`: a user's own code, too; `most`: tokens."""
        self.programs: list[Capture] = []
        self.reason: str | None = _TOO_FEW
        self._anywhere, self._own_code, self._most = anywhere, own_code, most
        self._failure: str | None = None  # why the last capture failed
        self._kinds = Bounded(_MOST_KINDS)
        self._rest, self._rests = 0, 0
        self._reads_masks = False
        self._lock = threading.Lock()
        self._entering, self._inside = threading.Lock(), 0  # threads in a call
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Captures, (self._anywhere, self._own_code, self._most)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Captures":
        return Captures(self._anywhere, self._own_code, self._most)

    def __str__(self) -> str:
        if not self.programs:
            return f"tokens run module by module: {self.reason}"
        programs = f"one call ({', '.join(f'{len(p.operators)} operators' for p in self.programs)})"
        if self.reason is None:
            return f"a token is {programs}"
        return f"the last token ran module by module: {self.reason}; others are {programs}"

    def clear(self, reason: str = _TOO_FEW) -> None:
        """Forgets all programs, and with them the weights that they hold."""
        self.programs, self._kinds, self.reason = [], Bounded(_MOST_KINDS), reason

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
            with checked_at_once(model):
                return own(model, **arguments)
        reason = forbidden() or _positions_by_hand(arguments)
        if reason is None:
            result = self._run(model, arguments)
            if result is not None:
                return result[0]
            if self._rest > 0:
                self._rest -= 1
                self.reason = self._failure
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
            and passed.shape[1] <= self._most
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
        kind: _Kind | None = None
        try:
            reading = Reading(arguments, None if self._reads_masks else padding_of(model, arguments))
            kind = self._kind_to_capture(reading)
            if kind is None:
                return False
            with symbols_end():
                program = self._captured(model, own, reading, kind)
        except ExchangeError:
            raise
        except BeginsCache as begins:  # costs the calls behind it nothing
            self.reason = str(begins)
            if kind is not None:
                kind.begins_cache = self.reason
        except NotCapturable as unsupported:
            self._fail(str(unsupported))
        except _OF_VALUES as error:
            self._fail(f"it asks for values that only the GPU knows ({first_line(error)})")
        except UnsupportedOperatorException as error:
            self._fail(f"{error} has no meta function")
        except Exception as error:
            self._fail(f"{type(error).__name__}: {first_line(error)}", is_expected=False)
        else:
            self.programs = [program, *self._still_right(program.fingerprint)][:_MOST_PROGRAMS]
            self._rests, self._failure = 0, None
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
        """Notes why a token is not captured, and says so once: if it happens again, or is not expected."""
        self.reason = self._failure = reason
        self._rests += 1
        self._rest = min(4**self._rests, _LONGEST_REST)
        if not self._has_warned and not (is_expected and (self.programs or self._rests < 2)):
            self._has_warned = True
            warnings.warn(
                f"torch_moe_mps: a token could not be captured and runs module by module: {reason}",
                stacklevel=6,
            )

    def _kind_to_capture(self, reading: Reading) -> _Kind | None:
        """The kind of a call, if this is the one to capture."""
        kind: _Kind | None = self._kinds.get(reading.key)
        if kind is None:
            kind = self._kinds[reading.key] = _Kind()
        for position, (before, now) in enumerate(zip(kind.numbers, reading.numbers, strict=False)):
            if before != now:
                kind.varied[position] = before
        kind.numbers = reading.numbers
        if kind.begins_cache is not None:
            raise BeginsCache(kind.begins_cache)
        kind.calls += 1
        if kind.calls <= _CALLS_BEFORE:
            return None
        if kind.captures >= _MOST_CAPTURES:
            raise NotCapturable(f"calls of one kind were captured {_MOST_CAPTURES} times, and differ again")
        kind.calls, kind.captures = 0, kind.captures + 1
        return kind

    @torch.inference_mode(False)  # in which torch refuses views of weights among fake tensors
    @torch.no_grad()
    def _captured(self, model: nn.Module, own: Callable[..., Any], reading: Reading, kind: _Kind) -> Capture:
        started = time.perf_counter()
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise NotCapturable("Python runs without its global lock, with which a token compares the model")
        if (unnoticed := unnoticed_change()) is not None:
            python = platform.python_version()
            raise NotCapturable(f"with Python {python} a captured token would not notice that {unnoticed}")
        if not self._own_code and sys.getprofile() is not None:
            raise NotCapturable("a profiler hides whose code a token runs")
        own_code = OwnCode()
        recorder = Recorder(None if self._own_code else own_code.look)
        symbol, values, least = _symbols(reading, kind)
        symints = [recorder.symbol(*value) for value in zip(values, least, strict=True)]
        recording = Recording(reading, symbol, symints, recorder)
        exchange = exchange_of(model)
        # Now: the first copy of a cache notes something in its class.
        fingerprint = Fingerprint(model, exchange)
        sent, handover = None, None
        try:
            run = functools.partial(recorder.run, lambda: own(model, **whole(recording.stand_ins)))
            if exchange is None:
                output = run()
            else:
                output, sent, handover = exchange.record(run, recording.fixed_input)
        finally:
            changes = None if fingerprint.holds() else fingerprint.changed()
            if changes is not None:
                fingerprint.undo()
        own_code.require_none()
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
        kind.fixes_rows |= any(integers.is_fixed(symbol[p]) for p in reading.rows & symbol.keys())
        kind.pinned += integers.is_pinned  # once a window is full, it is so for all tokens
        if kind.pinned > _MOST_PINNED:
            raise NotCapturable("it rests on one length of the context")
        seconds = time.perf_counter() - started
        operators = tuple(node.target for node in recorder.graph.nodes if is_operator(node))
        match = recording.match(writes)
        return Capture(fingerprint, match, evaluate, program.run, make, handover, operators, seconds)


def _positions_by_hand(arguments: dict[str, Any]) -> str | None:
    """Why a call runs module by module whose layers count tokens, if its positions may be others.

    The GPU has them, so to compare them takes as long as a token. Those of `generate` follow from its cache.
    """
    if FOLLOWS.get() or arguments.get("position_ids") is None:
        return None
    layers = getattr(cache_among(arguments), "layers", ())
    counts = any(isinstance(layer, HeldEntries) for layer in layers)
    return "position_ids are compared with the cache, outside of generate()" if counts else None


def _symbols(reading: Reading, kind: _Kind) -> tuple[dict[int, int], list[int], list[int]]:
    """{position of a number: its symbol}, what the symbols are now, and what they are at least.

    Numbers that were equal in both of two calls share a symbol, if both are sizes, places in memories or
    neither. A size below 2 is never one: calls of one kind have the same sizes of 0 and 1. The rows of a
    batch may be others in the next call, before they ever were.
    """
    rows = set() if kind.fixes_rows else reading.rows
    assumed = rows if rows.isdisjoint(kind.varied) else set()
    assumed |= reading.starts if rows else set()  # they move on when a row leaves that was the longest
    changing = {position: reading.numbers[position] for position in reading.growing | assumed} | kind.varied
    groups: dict[tuple[int, int, bool, bool, bool], int] = {}
    symbol: dict[int, int] = {}
    for position, before in sorted(changing.items()):
        now = reading.numbers[position]
        is_size, is_row = position in reading.sizes, position in reading.rows
        if (is_size and now < 2) or (is_row and kind.fixes_rows):
            continue
        group = before, now, is_row, position in reading.starts, is_size
        symbol[position] = groups.setdefault(group, len(groups))
    return symbol, [now for _, now, *_ in groups], [2 if is_size else 0 for *_, is_size in groups]


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
        raise BeginsCache("it makes a cache")
    raise NotCapturable(f"it returns a {type(value).__name__}")


def wanted_capture(capture: bool | None) -> bool | None:
    """Whether tokens are captured: True always, False never; for None as MOE_MPS_CAPTURE says."""
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("0", "1", "auto"):
        raise ValueError(f"torch_moe_mps: {SWITCH} must be 0, 1 or auto, got {switch!r}")
    if capture is not None and type(capture) is not bool:
        raise ValueError(f"moe_mps::accelerate: capture must be True, False or None, got {capture!r}")
    return {"0": False, "1": True}.get(switch) if capture is None else capture


def capture_calls(model: nn.Module, wanted: bool | None, most: int = MOST_TOKENS) -> None:
    """Lets the models of transformers in a module capture their calls, as `wanted_capture` says.

    Args:
        most: tokens of each row of a call.
    """
    note_change()
    for module in _models(model):
        may_be = wanted is not False and host_library() is not None
        state_of(module).captures = Captures(bool(wanted), bool(wanted), most) if may_be else None
        DRAFTING.pop(module, None)
        if not hasattr(type(module), _MARK):
            cls: Any = type(module)
            module.__class__ = _capturing_class(cls)


def restore_calls(model: nn.Module) -> None:
    """Undoes `capture_calls`. Beneath a class that somebody put on top, a model's own code runs."""
    note_change()
    for module in model.modules():
        if captures_in(module) is not None:
            state_of(module).captures = None
        DRAFTING.pop(module, None)
        restore_class(module, _MARK)


def captures_in(model: nn.Module) -> Captures | None:
    """The captures of a model itself, None where its calls are not captured."""
    found: Captures | None = state_in(model).captures
    return found


def captures_of(model: nn.Module) -> Captures | None:
    """Captures of the first model in a module that captures its calls."""
    return next(filter(None, map(captures_in, model.modules())), None)


def tokens_of(model: nn.Module) -> Callable[[], str | None]:
    """A function that says how the tokens of a model run, as long as the model is there."""
    captures = captures_of(model)
    known = (lambda: None) if captures is None else weakref.ref(captures)

    def says() -> str | None:
        result = known()
        return None if result is None else str(result)

    return says


def never_captured(model: nn.Module, wanted: bool | None) -> str | None:
    """Reason why decode steps are not captured on this device and with these options, or None."""
    may_be = wanted is not False and host_library() is not None and (bool(wanted) or is_on_mps(model))
    says_tokens = any(isinstance(m, PreTrainedModel) and m.can_generate() for m in model.modules())
    if captures_of(model) is not None or not may_be or not says_tokens:
        return None
    return "tokens run module by module: its forward has no argument for a cache"


def operators_of_calls(model: nn.Module) -> set[str]:
    """Operators that `generate` of a model runs beside the model."""
    return {OPERATOR} if any(_samples(type(module)) for module in model.modules()) else set()


def _samples(cls: type[nn.Module]) -> bool:
    """True for a class whose `generate` samples by the operator."""
    own = getattr(getattr(cls, _MARK, cls), "_sample", None)
    return getattr(cls, "_sample", None) is not own


def _models(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost models of transformers that take a cache, or states in its place."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and isinstance(module, PreTrainedModel) and takes_states(module):
            inside.update(module.modules())
            yield module


@functools.cache
def _capturing_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a model's class that captures calls, and whose `generate` gives no tokens out that the
    GPU failed at, and reads MTP layers once; everything else stays."""
    own: Callable[..., Any] = original.forward
    parameters = inspect.signature(own).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if original.forward is not own:  # somebody has patched the class
            return original.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        captures = captures_in(self)
        if captures is None or len(args) > len(names):
            with checked_at_once(self):
                return own(self, *args, **kwargs)
        if args:
            arguments = dict(zip(names, args, strict=False))
            if not arguments.keys().isdisjoint(kwargs):
                return own(self, *args, **kwargs)  # it raises the error
            kwargs |= arguments
        return captures.call(self, own, kwargs)

    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if (captures := captures_in(self)) is not None:
            captures.clear()  # they hold the weights that go
        return original._apply(self, *args, **kwargs)

    members = {"forward": forward, "_apply": apply, **_of_generate(original)}
    return subclass(original, _MARK, _capturing_class, **members)


def _of_generate(original: Any) -> dict[str, Any]:
    """Members of a model's class by which `generate` gives no tokens out that the GPU failed at, samples by
    the operator, and reads MTP layers once."""
    members: dict[str, Any] = {}
    if hasattr(original, "generate"):

        @functools.wraps(original.generate)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            follows = kwargs.get("position_ids") is None
            is_own = kwargs.get("custom_generate") is None  # else who knows what reads logits
            with (
                having(FOLLOWS, follows),
                wide_logits() if is_own else nullcontext(),
                synchronized(self.device),
            ):
                return original.generate(self, *args, **kwargs)

        members["generate"] = generate
    if getattr(original, "_sample", None) is GenerationMixin._sample:

        def update(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            before = (args[0] if args else kwargs["model_kwargs"]).get(MASK)
            passed = original._update_model_kwargs_for_generation(self, outputs, *args, **kwargs)
            follow_mask(before, passed.get(MASK), self)
            if (steps := current()) is not None:
                steps.take(outputs)
            return passed

        def sample(
            self: Any, ids: Tensor, *, logits_processor: Any, generation_config: Any, **kwargs: Any
        ) -> Any:
            with sampling(logits_processor, generation_config, ids.device, self) as stands:
                how = {"logits_processor": stands, "generation_config": generation_config}
                return original._sample(self, ids, **how, **kwargs)

        members |= {"_sample": sample, "_update_model_kwargs_for_generation": update}
    own_candidates = getattr(original, "_get_candidate_generator", None)
    if own_candidates is GenerationMixin._get_candidate_generator:

        def candidates(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
            if are_by_layers(generation_config):
                return CANDIDATES[0](self, generation_config, kwargs["logits_processor"])
            return own_candidates(self, generation_config, *args, **kwargs)

        members["_get_candidate_generator"] = candidates
    return members
