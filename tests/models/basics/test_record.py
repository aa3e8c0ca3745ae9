"""A record has what a module's code read, and nothing of what ran by chance in the meantime."""

import contextlib
import functools
import gc
import importlib
import logging
import signal
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

from torch_moe_mps.models.basics.guards import are_unchanged
from torch_moe_mps.models.basics.record import Record, recording_code
from torch_moe_mps.models.modules.rules.rope import rotation_in_place

LOG = logging.getLogger("a model's file")
LATER = "imported_while_a_module_runs"
HELD = []
happened = 0


class Garbage:
    """Garbage that only the collector finds, and that may have a finalizer."""

    def __init__(self, finalizer=None):
        self.itself = self
        if finalizer is not None:
            self.finalizer = finalizer


class Finalized(Garbage):
    def __del__(self):
        self.finalizer()


class Doubling(nn.Module):
    """A module whose code also does what lets others' code run."""

    factor, other = 2.0, 3.0

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x):
        STEPS[self.step]()
        return self.factor * x


STEPS = {
    "collects": functools.partial(gc.collect, 0),
    "drops": HELD.clear,
    "logs": functools.partial(LOG.warning, "a line"),
    "warns": functools.partial(warnings.warn, "a line"),
    "is interrupted": functools.partial(signal.raise_signal, signal.SIGUSR1),
    "imports": functools.partial(importlib.import_module, LATER),
}


@contextlib.contextmanager
def finalizer(happens):
    Finalized(happens)
    yield


@contextlib.contextmanager
def last_name(happens):
    HELD.append(Finalized(happens))
    HELD[0].itself = None
    yield


@contextlib.contextmanager
def weak_reference(happens):
    garbage = Garbage()
    alive = weakref.ref(garbage, lambda _: happens())
    del garbage
    yield alive


@contextlib.contextmanager
def weak_finalizer(happens):
    weakref.finalize(Garbage(), happens)
    yield


@contextlib.contextmanager
def callback_of_collector(happens):
    def told(phase, info):
        happens()

    gc.callbacks.append(told)
    yield
    gc.callbacks.remove(told)


@contextlib.contextmanager
def handler_of_logs(happens):
    handler = logging.Handler()
    handler.emit = lambda record: happens()
    LOG.addHandler(handler)
    yield
    LOG.removeHandler(handler)


@contextlib.contextmanager
def shown_warning(happens):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_, **__: happens()
        yield


@contextlib.contextmanager
def handler_of_signals(happens):
    before = signal.signal(signal.SIGUSR1, lambda number, frame: happens())
    yield
    signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def first_import(happens):
    class Finder:
        """Lets the import system find a module whose file calls `happens`."""

        def find_spec(self, name, path, target=None):
            return importlib.machinery.ModuleSpec(name, self) if name == LATER else None

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            exec("happens()", {"__name__": LATER, "happens": happens})

    sys.meta_path.append(Finder())
    yield
    sys.meta_path.pop()
    del sys.modules[LATER]


CHANCES = {
    "finalizer": ("collects", finalizer),
    "last name": ("drops", last_name),
    "weak reference": ("collects", weak_reference),
    "weak finalizer": ("collects", weak_finalizer),
    "callback of the collector": ("collects", callback_of_collector),
    "handler of logs": ("logs", handler_of_logs),
    "warning": ("warns", shown_warning),
    "signal": ("is interrupted", handler_of_signals),
    "import": ("imports", first_import),
}


@pytest.mark.parametrize("chance", CHANCES)
def test_what_runs_by_chance_is_not_recorded(chance):
    global happened
    step, happening = CHANCES[chance]
    module, record, happened = Doubling(step), Record(), 0
    unseen = []  # a closure that nobody can find

    def happens():
        global happened
        happened += 1
        unseen.append(module.other)
        module.seen = happened

    with happening(happens):
        result = record.run(module, torch.ones(2))
    assert happened and torch.equal(result, torch.full((2,), 2.0))
    guards = record.guards_of(module)
    names = frozenset().union(*(part.names for part in guards.parts.values()))
    assert "factor" in names and not names & {"other", "seen"}
    happens()
    assert record.is_current() and are_unchanged(guards.kept())
    module.factor = 3.0
    assert not are_unchanged(guards.kept())


ticks = 0


def tick(phase, info):
    global ticks
    ticks += 1


def rotate(q, k, cos, sin):
    gc.collect(0)
    return modeling.apply_rotary_pos_emb(q, k, cos, sin)


def test_a_rotation_is_recognised_while_the_collector_reports():
    before = ticks
    gc.callbacks.append(tick)
    try:
        with recording_code() as record:
            found = rotation_in_place(rotate)
    finally:
        gc.callbacks.remove(tick)
    assert ticks > before and found is not None
    guards = record.guards_of().kept()
    tick("stop", {})
    assert are_unchanged(guards)
