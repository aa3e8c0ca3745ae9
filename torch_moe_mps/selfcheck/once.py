"""Comparison, before its first use, of whatever has not passed on this machine yet."""

import contextlib
import functools
import math
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from ..ops import _registry
from . import tuner
from .calls import Call, Subject, calls, calls_at_size, has_calls_at_size, subjects_of
from .compare import Finding, OutOfTime, compare, in_words
from .journal import noted
from .machine import COMMAND, late_before, passed_before, remember, where

SECONDS = 3.0  # for the check in accelerate(), without compiling; what is left is checked the next time


class CallsToCheck(NamedTuple):
    """Calls that have a verdict together.

    Attributes:
        subject: what fails with them: an operator, or a library.
        label: under which they are remembered.
        calls: makes an iterator that is closed after the last call.
        kind: the label of all that is refused together in this process, once one fails.
    """

    subject: str
    label: str
    calls: Callable[[], Iterator[Call]]
    kind: str


_KNOWN: dict[str, Finding] = {}  # failures in this process, by the kind of their checks
_SETTLED: set[Subject] = set()  # subjects that a first call need not ask for again
_seconds_left = SECONDS  # for first calls
_comparing = threading.local()
_lock = threading.RLock()


def checks_of(subjects: Iterable[Subject]) -> list[CallsToCheck]:
    """Their plain calls, and behind all of these the calls at real sizes."""
    every = [*subjects]
    plain = [(subject, str(subject), calls) for subject in every]
    at_size = [(item, f"{item} at size", calls_at_size) for item in every if has_calls_at_size(item)]
    return [
        CallsToCheck(subject.operator, label, functools.partial(make_calls, subject), subject.without_head())
        for subject, label, make_calls in plain + at_size
    ]


def forget() -> None:
    """Clears the operators that are known to fail."""
    _KNOWN.clear()


def time_allowed() -> float:
    return SECONDS


def first_failures(
    checks: Iterable[CallsToCheck], seconds: float | None = None
) -> tuple[dict[str, Finding], set[str]]:
    """Makes the checks that have not passed on this machine, for `seconds` or SECONDS.

    Passed calls are remembered. Returns: {subject: its fault}, and the subjects that ran out of time.
    """
    passed, waiting = passed_before(), late_before()
    before = set(passed), set(waiting)
    result: dict[str, Finding] = {}
    late = set()
    end = time.monotonic() + (time_allowed() if seconds is None else seconds)
    for check in checks:
        if check.subject in result or (check.label in passed and check.kind not in _KNOWN):
            continue
        try:
            finding = _KNOWN.get(check.kind) or first_fault(check, end, passed)
        except OutOfTime:
            late.add(check.subject)
            waiting.add(check.label)
            continue
        if finding is not None:
            result[check.subject] = _KNOWN[check.kind] = finding
    waiting -= passed
    if (passed, waiting) != before:
        remember(passed, waiting)
    return result, late - result.keys()


def first_fault(check: CallsToCheck, end: float = math.inf, passed: set[str] | None = None) -> Finding | None:
    """The fault of the first call that fails. Adds passed calls to `passed`, and skips those in it.

    Raises: OutOfTime where the clock time.monotonic is past `end`.
    """
    done = set() if passed is None else passed
    steps = set()
    with _unwatched(), contextlib.closing(check.calls()) as call_iterator:  # type: ignore[type-var]
        for number, call in enumerate(call_iterator):
            step = f"{check.label} #{number}"
            steps.add(step)
            if step in done:
                continue
            with noted(f"calling {step}: {call.operator} of {in_words(call)}"):
                fault = compare(call, end)
            if fault:
                return fault
            done.add(step)
    done -= steps
    done.add(check.label)
    return None


# --- first calls


def watch(wanted: bool, seconds: float = SECONDS) -> None:
    """Sets whether each first call on the GPU, of any model in this process, waits for its comparison.

    `seconds`: for all such comparisons; then a warning names the operators not compared.
    """
    global _seconds_left
    _seconds_left = seconds
    _SETTLED.clear()
    if wanted:
        torch.ops.moe_mps._forget_signatures()  # nobody watched them
    _registry.before_first_call = _before_first_call if wanted else None


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    _comparing.now = True
    try:
        yield
    finally:
        _comparing.now = False
        torch.ops.moe_mps._forget_signatures()  # a model may make the same calls


def _before_first_call(name: str, arguments: Mapping[str, Any]) -> None:
    """The host calls it, through the operator's meta function, for each signature that it has not seen."""
    if getattr(_comparing, "now", False) or not _is_on_gpu(arguments):
        return
    with _lock:
        _compare_first(name, [subject for subject in subjects_of(name, arguments) if subject not in _SETTLED])
        _comparing.now = True
        try:
            tuner.tune(name, arguments)
        finally:
            _comparing.now = False


def _compare_first(name: str, wanted: Collection[Subject]) -> None:
    """Compares subjects with the CPU within the time that is left. Raises: RuntimeError if one differs."""
    global _seconds_left
    if wanted:
        started = time.monotonic()
        result, late = first_failures(checks_of(wanted), _seconds_left)
        _seconds_left -= time.monotonic() - started
        for finding in result.values():
            raise RuntimeError(
                f"moe_mps::{name}: must agree with the CPU, got on this machine ({where()}): {finding}; "
                f"accelerate() leaves it out from now on. `{COMMAND}` writes a report for an issue; "
                "check=False uses it all the same"
            )
        _SETTLED.update(wanted)
        if late:
            warnings.warn(
                f"torch_moe_mps: there was no time to compare {', '.join(map(str, wanted))} with the CPU on "
                f"this machine ({where()}): used all the same, and compared the next time",
                stacklevel=2,
            )


def _is_on_gpu(arguments: Mapping[str, Any]) -> bool:
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    return tensors[0].device.type == "mps" and not isinstance(tensors[0], FakeTensor)
