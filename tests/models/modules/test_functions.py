"""Functions that forwards call by name: operators run in their place, whatever the forward looks like."""

import copy
import functools
import gc
import inspect
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.models import assert_close, operators_of
from support.recognition import by_operators
from support.tiny_models import tiny_model
from torch import nn

import torch_moe_mps
from torch_moe_mps.models.trials import memory
from torch_moe_mps.transformers import install

RAN = {"causal_conv1d_update_": 1}


def conv_step(x, conv_state, weight, bias=None, activation=None):
    """A causal convolution of one token behind a state, which takes it."""
    window = torch.cat([conv_state, x], -1)
    conv_state.copy_(window[..., -conv_state.shape[-1] :])
    out = F.conv1d(window, weight.unsqueeze(1), bias, groups=weight.shape[0])[..., -x.shape[-1] :]
    return F.silu(out) if activation == "silu" else out


CONV_STEP = conv_step


def scaled(x):
    return 2.0 * x


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return scaled(forward(self, *args, **kwargs))

    return wrapper


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x, state):
        return scaled(conv_step(x, state, self.weight, activation="silu"))


class Decorated(Layer):
    @decorated
    @decorated
    def forward(self, x, state, *, bias=None):
        return conv_step(x, state, self.weight, bias)


class Keywords(Layer):
    """Names that the operator's call does not know go to the model's own function."""

    def forward(self, x, state):
        return conv_step(x=x, conv_state=state, weight=self.weight)


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 1, generator=generator), torch.randn(2, 3, 4, generator=generator)


def result(layer):
    x, state = inputs()
    with torch.no_grad():
        return layer(x, state), state


def accelerated(cls):
    layer = cls().eval()
    torch_moe_mps.accelerate(nn.ModuleList([layer]))
    return layer


def check(layer, expected, ran):
    found = []
    assert operators_of(lambda: found.extend(result(layer))) == ran
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("cls", "ran"),
    [
        (Layer, RAN),
        (Decorated, RAN),
        (Keywords, {}),
    ],
)
def test_forwards(cls, ran):
    expected = result(cls().eval())
    layer = accelerated(cls)
    check(layer, expected, ran)
    check(copy.deepcopy(layer), expected, ran)
    check(pickle.loads(pickle.dumps(layer)), expected, ran)
    check(cls().eval(), expected, {})  # one that is not accelerated
    torch_moe_mps.restore(layer)
    check(layer, expected, {})


def test_another_name_that_changes(monkeypatch):
    """The copy of the forward has the name as it was: eager code runs."""
    layer = accelerated(Layer)
    out, state = by_operators(lambda: result(layer), *RAN)
    monkeypatch.setitem(globals(), "scaled", lambda x: 6.0 * x)
    check(layer, (3.0 * out, state), {})


def test_a_function_that_is_patched(monkeypatch):
    """Any other one than the one that was recognised runs."""
    own, layer = inspect.unwrap(conv_step), accelerated(Decorated)
    expected = result(layer)
    monkeypatch.setitem(globals(), "conv_step", lambda *args: own(*args) + 1)
    out, state = expected
    check(layer, (out + 4.0, state), {})
    again = functools.wraps(own)(lambda *args, **named: own(*args, **named))
    monkeypatch.setitem(globals(), "conv_step", again)
    check(layer, expected, {})
    torch_moe_mps.accelerate(nn.ModuleList([layer]))  # it is one as well
    check(layer, expected, RAN)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


own_rotate_half = rotate_half


def turned(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x * cos + rotate_half(x) * sin


class Turns(nn.Module):
    def forward(self, x, cos, sin):
        return turned(x, cos, sin)


def turned_if(condition):
    """A module whose function of rotations is another one where the condition is met."""

    def of_size(x, cos, sin):
        return turned(x, cos, sin) * (2 if condition(x, cos) else 1)

    scope = {"of_size": of_size, "torch": torch}
    exec("def forward(self, x, cos, sin):\n    return of_size(x, cos, sin)", scope)
    return type("Turns", (nn.Module,), {"forward": scope["forward"]})


def tables(tokens=5, width=16):
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(*size, generator=generator) for size in ((2, 3, tokens, width), *[(2, tokens, width)] * 2)
    ]


def test_a_helper_of_a_function_that_is_patched(monkeypatch):
    layer = accelerated(Turns)
    before = by_operators(lambda: layer(*tables()), "rope_heads")
    assert_close(before, Turns()(*tables()), 1e-5)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "rotate_half", lambda x: x)
        assert operators_of(lambda: layer(*tables())) == {}
        assert_close(layer(*tables()), Turns()(*tables()), 0)
    assert_close(by_operators(lambda: layer(*tables()), "rope_heads"), before, 0)


@pytest.mark.parametrize("other", [lambda x: x, lambda x: 0.0 + own_rotate_half(x)], ids=["other", "equal"])
def test_a_helper_that_is_patched_while_layers_are_accelerated(monkeypatch, other):
    """What was found then, or not found, holds for no layer that is accelerated without the patch."""
    memory.forget()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "rotate_half", other)
        expected = Turns()(*tables())
        assert_close(accelerated(Turns)(*tables()), expected, 1e-5)
    layer = accelerated(Turns)
    assert_close(by_operators(lambda: layer(*tables()), "rope_heads"), Turns()(*tables()), 1e-5)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "rotate_half", other)
        assert_close(accelerated(Turns)(*tables()), expected, 1e-5)


collections = 0


def count_a_collection(phase, info):
    """As hypothesis does to tell the seconds of a test from those of the collector."""
    global collections
    collections += 1


def test_what_the_garbage_collector_runs_is_no_code_of_a_trial():
    memory.forget()
    thresholds = gc.get_threshold()
    gc.callbacks.append(count_a_collection)
    gc.set_threshold(1)
    try:
        layer = accelerated(Turns)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(count_a_collection)
    assert collections and gc.isenabled()
    assert_close(by_operators(lambda: layer(*tables()), "rope_heads"), Turns()(*tables()), 1e-5)
    count_a_collection("stop", {})
    assert_close(by_operators(lambda: layer(*tables()), "rope_heads"), Turns()(*tables()), 1e-5)


CONDITIONS = {
    "one token": lambda x, cos: x.shape[2] == 1,
    "64 tokens": lambda x, cos: x.shape[-2] > 64,
    "one sequence": lambda x, cos: x.size(0) == 1,
    "heads": lambda x, cos: x.shape[1] == 32,
    "width": lambda x, cos: x.shape[-1] >= 128,
    "width of tables": lambda x, cos: cos.shape[-1] == 64,
    "elements": lambda x, cos: x.numel() > 10_000,
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_functions_that_decide_by_a_size(name):
    layer = accelerated(turned_if(CONDITIONS[name]))
    assert operators_of(lambda: layer(*tables())) == {}


def test_a_function_that_decides_by_nothing_is_recognised():
    """So that the others above are left for what they decide by."""
    layer = accelerated(turned_if(lambda x, cos: False))
    assert_close(by_operators(lambda: layer(*tables()), "rope_heads"), Turns()(*tables()), 1e-5)


class Elsewhere(Layer):
    """Calls the function in another thread."""

    def forward(self, x, state):
        with ThreadPoolExecutor(1) as pool:
            call = functools.partial(conv_step, x, state, self.weight)
            return pool.submit(operators_of, call).result()


def test_a_function_is_as_before_outside_of_accelerated_forwards():
    """For other callers, other threads and pickle."""
    layer = accelerated(Layer)
    assert conv_step is CONV_STEP and pickle.loads(pickle.dumps(conv_step)) is conv_step
    x, state = inputs()
    by_operators(lambda: result(layer), *RAN)
    assert operators_of(lambda: conv_step(x, state, layer.weight)) == {}
    assert accelerated(Elsewhere)(x, state) == {}


def rotary_in_float64(q, k, cos, sin):
    """What a trial compares with float32."""
    return tuple(x.double() * cos.double().unsqueeze(1) for x in (q, k))


class Rotates(nn.Module):
    def forward(self, x, table):
        return rotary_in_float64(x, x, table, table)[0]


def test_a_function_that_gives_another_dtype():
    layer, x = Rotates().eval(), torch.randn(1, 2, 3, 8)
    expected = layer(x, x[:, 0])
    torch_moe_mps.accelerate(nn.ModuleList([layer]))
    found = layer(x, x[:, 0])
    assert found.dtype == torch.float64 and torch.equal(found, expected)


def test_a_function_whose_trial_fails_is_left_alone(monkeypatch):
    """As where an operator raises on a GPU: the report says why, and nothing else is lost."""

    def fails(function):
        raise RuntimeError("moe_mps::rope: no such kernel")

    monkeypatch.setattr(memory, "_known", {})
    monkeypatch.setattr(install, "FUNCTION_RULES", (fails,))
    layer = Layer().eval()
    assert install.rewrite(layer) == ([], "moe_mps::rope: no such kernel")


@pytest.mark.parametrize("cls", [Layer, Decorated])
def test_torch_compile(cls):
    """One graph, with the operator in it."""
    layer, targets = accelerated(cls), []
    expected = result(layer)

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(result(compiled), expected)
    assert sum("causal_conv1d_update_" in target for target in targets) == 1


def test_no_guard_rests_on_what_a_logger_remembers():
    """transformers' files have loggers, which remember the levels that they were asked for."""
    model = tiny_model("qwen3_next", torch.float32)
    torch_moe_mps.accelerate(model)
    (module,) = {each for each in model.modules() if hasattr(each, "conv1d") and each.layer_idx == 0}
    x = torch.randn(1, 3, model.config.hidden_size)

    def operators():
        with torch.no_grad():
            return operators_of(lambda: module(x))

    before = operators()
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("transformers"):
            logging.getLogger(name).isEnabledFor(7)
    assert operators() == before and before
