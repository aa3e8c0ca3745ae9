"""What a recording holds, and what it leaves as it was."""

import copy
import gc
import itertools
import weakref

import pytest
import sympy
import torch
from support.capturing import accelerated, answer, assert_equal, without_capture
from support.models import Conversation
from torch import nn
from torch.utils._sympy import functions

import torch_moe_mps
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.capture.program import postfix
from torch_moe_mps.models.graphs import tracing
from torch_moe_mps.models.graphs.tracing import NotCapturable, Recorder
from torch_moe_mps.ops.families.attention import bits_as_bool

pytestmark = pytest.mark.usefixtures("captured")


def test_symbols_end_with_their_recording(monkeypatch):
    """Of what is traced and captured, no ShapeEnv stays: a server would add one with each kind of call."""
    alive = weakref.WeakSet()

    class Symbols(tracing._Symbols):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(None)
            alive.add(self)

    made = []
    with torch.no_grad():
        answer(accelerated("llama", "cpu"), "cpu")  # torch keeps a fake tensor of a process's first trace
    monkeypatch.setattr(tracing, "_Symbols", Symbols)
    model = accelerated("llama", "cpu")
    with torch.no_grad():
        answer(model, "cpu")
    programs = len(captures_of(model).programs)
    gc.collect()
    assert 0 < programs <= len(made) and not alive
    torch_moe_mps.restore(model)
    assert not alive


class CompiledNorm(nn.RMSNorm):
    double = staticmethod(torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True))

    def forward(self, x):
        return self.double(super().forward(x))


@torch.no_grad()
def test_compiled_code_in_a_model_stays_compiled(same_bits):
    """With fullgraph=True, torch raises where it is not."""
    model = accelerated("qwen3_moe", "cpu")
    model.model.norm = CompiledNorm(64)
    torch_moe_mps.accelerate(model)  # which traces the norm
    own = without_capture(copy.deepcopy(model))
    mine, theirs = Conversation(model), Conversation(own)
    assert_equal(mine.tokens(5), theirs.tokens(5))
    assert captures_of(model).programs
    assert_equal(Conversation(model).tokens(1), Conversation(own).tokens(1))


@pytest.mark.parametrize("keys", [20, 70])
def test_words_of_bits_are_no_condition_of_a_recording(keys):
    """A mask of bits has a word for 32 keys, and whether it is the only one must not be asked."""
    recorder = Recorder()
    count = recorder.symbol(keys, 2)
    words = torch.zeros(1, 1, 1, -(-keys // 32), dtype=torch.int32)
    mask = recorder.input(words, (1, 1, 1, (count + 31) // 32))
    shown = recorder.run(lambda: bits_as_bool(mask, count))
    assert shown.shape[-1] == count and recorder.env.guards == []


@torch.no_grad()
def test_a_recording_that_changes_the_model_is_undone():
    model = accelerated("qwen3_moe", "cpu")
    module = model.model.layers[1].self_attn
    forward = type(module).forward

    class Remembers(type(module)):
        def forward(self, *args, **kwargs):
            self.last, weights = forward(self, *args, **kwargs)
            return self.last, weights

    module.__class__ = Remembers
    Conversation(model).tokens(4)
    assert type(module.last) is torch.Tensor
    assert "a call changes model.layers.1.self_attn.last" in str(captures_of(model))


A, B = sympy.symbols("a b", integer=True)
# Expressions of two symbols, and what Python computes with these numbers.
EXPRESSIONS = [
    (A + 2 * B - 3, lambda a, b: a + 2 * b - 3),
    (A**3 * B, lambda a, b: a**3 * b),
    (functions.FloorDiv(A - 50, B), lambda a, b: (a - 50) // b),
    (functions.PythonMod(A - 50, B), lambda a, b: (a - 50) % b),
    (functions.Mod(A, B), lambda a, b: a % b),
    (functions.Max(A - 5, 2 * B), lambda a, b: max(a - 5, 2 * b)),
    (functions.Min(A - 5, 2 * B), lambda a, b: min(a - 5, 2 * b)),
    (sympy.Eq(A, 2 * B + 1), lambda a, b: int(a == 2 * b + 1)),
    (sympy.Ne(A, 2 * B + 1), lambda a, b: int(a != 2 * b + 1)),
    (sympy.And(A > B, A < 3 * B), lambda a, b: int(b < a < 3 * b)),
    (sympy.Or(A >= 5 * B, A <= B), lambda a, b: int(a >= 5 * b or a <= b)),
    (sympy.Not(sympy.And(A > B, sympy.Eq(B, 3))), lambda a, b: int(not (a > b and b == 3))),
    (sympy.Integer(-7), lambda a, b: -7),
    (sympy.true, lambda a, b: 1),
]


def test_integers_of_a_call(simulated):
    """C++ computes with the numbers of a call as Python does."""
    program = torch.classes.moe_mps.Program()
    for symbol in range(2):
        program.add_symbol(-100)
        program.add_number(symbol)
    for expression, _ in EXPRESSIONS:
        program.add_integer(postfix(expression, [A, B]))
    program.finish(len(EXPRESSIONS), [])
    for numbers in itertools.product((-7, 1, 7, 31, 50, 103), (-4, 1, 3, 15)):
        results, integers = program.bind([], [], [*numbers], []).run([])
        assert results == [] and integers == [of(*numbers) for _, of in EXPRESSIONS], numbers
    with pytest.raises(RuntimeError, match="a divisor of a captured token must not be 0"):
        program.bind([], [], [1, 0], [])
    with pytest.raises(NotCapturable, match="it computes a size by IntTrueDiv"):
        postfix(functions.IntTrueDiv(A, B), [A, B])
