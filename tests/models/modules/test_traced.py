"""Modules are recognised by what they compute, however it is written, and by nothing less."""

import contextlib
import copy
import functools
import itertools
import re
import types
import warnings

import pytest
import torch
from support import tiny_models
from support.models import assert_close, operators_of
from support.recognition import by_operators, forget, own_memory  # noqa: F401  # a fixture
from torch import nn
from torch.nn.modules import module as torch_module

import torch_moe_mps
from torch_moe_mps.models.basics.code import code_of
from torch_moe_mps.models.basics.scoped import Bounded
from torch_moe_mps.models.graphs.tracing import Recorder
from torch_moe_mps.models.modules.rules import norms
from torch_moe_mps.models.modules.traced import Input, remembered, trace
from torch_moe_mps.transformers.install import is_rewritten, restore_module, rewrite

WIDTH = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Norm(nn.Module):
    """As most models have it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.eps = 1e-2
        self.centred = False
        self.groups = None
        self.config = types.SimpleNamespace(scale=True, layers=[1, 2])

    def rms(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.weight * self.rms(x.float()).to(x.dtype)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(Norm):
    @decorated
    def forward(self, x):
        return (self.weight * self.rms(x.float())).type_as(x)


class Inherited(Norm):
    def forward(self, x):
        return super().forward(x)


class Conditional(Norm):
    def forward(self, x):
        y = self.rms(x.float()) if self.groups is None else x
        y = y * (1.0 + self.weight.float() if self.centred else self.weight.float())
        return y.type_as(x)


class ByConfig(Norm):
    def forward(self, x):
        y = self.rms(x.float())
        return (self.weight * y if self.config.scale else y).to(x.dtype)


class Divided(Norm):
    def forward(self, x):
        y = x / torch.sqrt((x.float() * x.float()).mean((-1,), keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class Widened(Norm):
    """As T5 has it: what is squared is float32, and what is multiplied is not."""

    def forward(self, x):
        x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype != torch.float32 else x)


class InPlace(Norm):
    def forward(self, x):
        y = x.float().square().mean(-1, keepdim=True)
        y += self.eps
        return (x * y.rsqrt_()).mul(self.weight).to(x.dtype)


class Property(Norm):
    @property
    def epsilon(self):
        return self.eps

    def forward(self, x):
        return x * torch.pow(x.square().mean(-1, keepdim=True) + self.epsilon, -0.5) * self.weight


class Grouped(Norm):
    def forward(self, x):
        y = self.rms(x.float().view(*x.shape[:-1], -1, 4)).flatten(-2)
        return (self.weight * y).to(x.dtype)


def without_source() -> Norm:
    scope: dict = {"Norm": Norm}
    text = "class Remote(Norm):\n  def forward(self, x):\n    return self.rms(x.float()).to(x.dtype)\n"
    exec(text, scope)
    return scope["Remote"]()


WAYS = [
    Norm,
    Decorated,
    Inherited,
    Conditional,
    ByConfig,
    Divided,
    Widened,
    Property,
    without_source,
    InPlace,
    Grouped,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_norms_however_they_are_written(way):
    generator = torch.Generator().manual_seed(0)
    for dtype, of_weight in itertools.product(DTYPES, (torch.float32, torch.bfloat16)):
        norm = way().eval().to(of_weight)
        x = torch.randn(2, 3, WIDTH, generator=generator).to(dtype)
        with torch.no_grad():
            expected = norm(x)
            assert [*map(str, rewrite(norm)[0])] == ["rms_norm"]
            # A weight of another dtype may give the result its own, which no operator does.
            ran = [{"rms_norm": 1}] + [{}] * (dtype != of_weight)
            assert operators_of(lambda: norm(x)) in ran  # noqa: B023
            found = norm(x)
            assert_close(norm(x=x), found, 0)
        assert found.dtype == expected.dtype
        assert_close(found, expected, 1e-5 if dtype == of_weight == torch.float32 else 2e-2)


def of(forward):
    return type("Near", (Norm,), {"forward": forward})


def doubled_if(condition, y):
    """No factor of 1 where the condition does not hold, which no formula has."""
    return 2 * y if condition else y


def sets(self, x):
    self.last = x
    return Norm.forward(self, x)


def writes(self, x):
    result = Norm.forward(self, x)
    x.zero_()
    return result


def grouped_by_one(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2)[..., None].mean(-1, keepdim=True)[..., 0] + self.eps))


def hides_a_size(self, x):
    with contextlib.suppress(Exception):
        return doubled_if(x.shape[0] == 5, Norm.forward(self, x))
    return Norm.forward(self, x)


def hides_errors(self, x):
    with contextlib.suppress(Exception):
        self.last = x
    return Norm.forward(self, x)


NEAR = {
    "another dimension": lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(0, True) + self.eps)),
    "sum": lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, True) + self.eps)),
    "eps outside": lambda self, x: self.weight * (x / (x.pow(2).mean(-1, True).sqrt() + self.eps)),
    "eps inside": lambda self, x: self.weight * (x * torch.rsqrt((x + self.eps).pow(2).mean(-1, True))),
    "bias": lambda self, x: Norm.forward(self, x) + self.weight,
    "weight - 1": lambda self, x: (self.weight - 1.0) * self.rms(x),
    "weight first": lambda self, x: self.rms(x * self.weight),
    "two inputs": lambda self, x, y=None: Norm.forward(self, x),
    "any inputs": lambda self, *inputs: Norm.forward(self, *inputs),
    "one token": lambda self, x: doubled_if(x.shape[0] == 1, Norm.forward(self, x)),
    "many tokens": lambda self, x: doubled_if(x.shape[-2] > 4096, Norm.forward(self, x)),
    "two tokens": lambda self, x: doubled_if(x.shape[-2] == 2, Norm.forward(self, x)),
    "9 to 15 tokens": lambda self, x: doubled_if(8 < x.size(-2) < 16, Norm.forward(self, x)),
    "three rows": lambda self, x: doubled_if(x.shape[:-1].numel() == 3, Norm.forward(self, x)),
    "over 80,000 rows": lambda self, x: doubled_if(x.numel() // WIDTH > 80_000, Norm.forward(self, x)),
    "a length": lambda self, x: doubled_if(len(x) == 5, Norm.forward(self, x)),
    "a table of lengths": lambda self, x: doubled_if({5: 1}.get(x.shape[0]), Norm.forward(self, x)),
    "a factor": lambda self, x: Norm.forward(self, x) * (x.shape[0] / 2),
    "hides a size": lambda self, x: hides_a_size(self, x),
    "rank": lambda self, x: doubled_if(x.dim() > 3, Norm.forward(self, x)),
    "one dtype": lambda self, x: Norm.forward(self, x) if x.dtype == DTYPES[2] else self.rms(x),
    "float32": lambda self, x: self.rms(x.float()),
    "integers": lambda self, x: self.weight * self.rms(x.int().float()).to(x.dtype),
    "three dimensions": lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(2, True) + self.eps)),
    "values": lambda self, x: Norm.forward(self, x) if x.max() > 0 else x,
    "a list": lambda self, x: Norm.forward(self, x) * len(self.config.layers),
    "all attributes": lambda self, x: doubled_if("flag" in self.__dict__, Norm.forward(self, x)),
    "random": lambda self, x: nn.functional.dropout(Norm.forward(self, x), 0.5, True),
    "sets": sets,
    "writes": writes,
    "grouped by one": grouped_by_one,
    "hides errors": hides_errors,
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_other_norms_run_their_own_code(name, capfd):
    norm, x = of(NEAR[name])().eval(), torch.randn(2, 3, WIDTH)
    before = {**vars(norm)}
    assert rewrite(norm)[0] == [] and not is_rewritten(norm)
    assert {**vars(norm)} == before
    with torch.no_grad():
        expected = NEAR[name](norm, x.clone())
        if name != "random":
            assert_close(norm(x.clone()), expected, 0)
    assert capfd.readouterr() == ("", "")


def test_modules_that_are_alike_are_told_apart():
    x = torch.randn(3, WIDTH)
    for centred, groups, scale in itertools.product((False, True), (None, 4), (True, False)):
        for cls, done in ((Conditional, groups is None), (ByConfig, True)):
            norm = cls().eval()
            norm.centred, norm.groups, norm.config.scale = centred, groups, scale
            with torch.no_grad():
                expected = norm(x)
                assert bool(rewrite(norm)[0]) == done
                assert operators_of(lambda norm=norm: norm(x)) == ({"rms_norm": 1} if done else {})
                assert_close(norm(x), expected, 1e-5)


@pytest.mark.parametrize("again", [False, True])
def test_what_a_norm_rests_on_changes(again):
    x = torch.randn(3, WIDTH)
    changes = (
        lambda norm: setattr(norm, "eps", 3.0),
        lambda norm: setattr(norm.config, "scale", False),
        lambda norm: setattr(norm, "config", types.SimpleNamespace(scale=False)),
    )
    for change in changes:
        norm, own = ByConfig().eval(), ByConfig().eval()
        rewrite(norm)
        with torch.no_grad():
            before = norm(x)
            assert operators_of(lambda norm=norm: norm(x)) == {"rms_norm": 1}
            change(norm), change(own)
            if again:
                rewrite(norm)
            assert operators_of(lambda norm=norm: norm(x)) == ({"rms_norm": 1} if again else {})
            assert_close(norm(x), own(x), 1e-5)
            assert not torch.allclose(norm(x), before, atol=1e-3)


FACTOR, TABLE = 1.0, {"factor": 1.0}


def helper(x):
    return x if FACTOR * TABLE["factor"] == 1.0 else x * FACTOR * TABLE["factor"]


class Helped(Norm):
    """Looks up a name of its file, which looks up others, a member and a property."""

    scale = 1.0

    @property
    def epsilon(self):
        return self.eps

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return helper(self.weight * (y * self.scale if self.scale != 1.0 else y))


class Inner(Helped):
    def forward(self, x):
        return helper(self.weight * self.rms(x))


PATCHES = {
    "a helper": lambda patch: patch.setitem(globals(), "helper", lambda x: 2 * x),
    "a global of a helper": lambda patch: patch.setitem(globals(), "FACTOR", 2.0),
    "a table of a helper": lambda patch: patch.setitem(TABLE, "factor", 2.0),
    "a property": lambda patch: patch.setattr(Helped, "epsilon", property(lambda self: 2.0)),
    "a member": lambda patch: patch.setattr(Helped, "scale", 2.0),
    "a base's method": lambda patch: patch.setattr(Norm, "rms", lambda self, x: 2 * x),
    "a method in front of a base's": lambda patch: patch.setattr(
        Inner, "rms", lambda self, x: 2 * x, raising=False
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_names_that_are_patched(name, monkeypatch):
    """The module's own code runs from then on, and the operator once they are as before."""
    cls = Inner if "base" in name else Helped
    norm, own, x = cls().eval(), cls().eval(), torch.randn(3, WIDTH)
    rewrite(norm)
    with torch.no_grad():
        before = by_operators(lambda: norm(x), "rms_norm")
        with monkeypatch.context() as patch:
            PATCHES[name](patch)
            assert operators_of(lambda: norm(x)) == {}
            assert_close(norm(x), own(x), 0)
            assert not torch.allclose(norm(x), before, atol=1e-3)
        assert_close(by_operators(lambda: norm(x), "rms_norm"), before, 0)


def test_a_patched_function_of_experts(monkeypatch):
    """`torch.nn.functional.silu`, which the class of the activation looks up."""
    model = tiny_models.tiny_model("qwen3_moe")
    torch_moe_mps.accelerate(model, capture=False)
    ids = torch.arange(5)[None] + 3
    with torch.no_grad():
        before = by_operators(lambda: model(ids).logits, "_moe_experts")
        with monkeypatch.context() as patch:
            patch.setattr(nn.functional, "silu", lambda x, inplace=False: torch.tanh(x))
            found = model(ids).logits
            assert_close(found, torch_moe_mps.restore(copy.deepcopy(model))(ids).logits, 1e-5)
        assert not torch.allclose(found, before, atol=1e-4)
        assert_close(by_operators(lambda: model(ids).logits, "_moe_experts"), before, 0)


@pytest.mark.parametrize("rank", [1, 5])
def test_ranks_that_no_trace_had(rank):
    doubled = lambda self, x: doubled_if(x.dim() in (1, 5), Norm.forward(self, x))  # noqa: E731
    norm, own = of(doubled)().eval(), of(doubled)().eval()
    rewrite(norm)
    x = torch.randn(*[2] * (rank - 1), WIDTH)
    with torch.no_grad():
        by_operators(lambda: norm(torch.randn(2, WIDTH)), "rms_norm")
        assert_close(norm(x), own(x), 0)


def test_a_width_that_no_weight_has():
    """A norm without weights is one for any width only if its code does not ask for it."""

    def forward(self, x):
        return doubled_if(x.shape[-1] == 40, self.rms(x))

    norm, plain = of(forward)().eval(), of(lambda self, x: self.rms(x))().eval()
    norm.weight = plain.weight = None
    assert rewrite(norm)[0] == []
    rewrite(plain)
    with torch.no_grad():
        by_operators(lambda: plain(torch.randn(2, WIDTH)), "rms_norm")


def test_a_weight_of_another_shape():
    """Eager code broadcasts it."""
    norm, own, x = Norm().eval(), Norm().eval(), torch.randn(2, 3, WIDTH)
    rewrite(norm)
    with torch.no_grad():
        by_operators(lambda: norm(x), "rms_norm")
    for each in (norm, own):
        each.weight = nn.Parameter(each.weight[None])
    with torch.no_grad():
        assert_close(norm(x), own(x), 0)


def test_a_trace_that_ran_out_of_memory_is_made_again(monkeypatch):
    class Another(Norm):
        def forward(self, x):
            return Norm.forward(self, x)

    def fails(self, call):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "run", fails)
        assert rewrite(Another().eval())[0] == []
    norm = Another().eval()
    rewrite(norm)
    with torch.no_grad():
        by_operators(lambda: norm(torch.randn(2, WIDTH)), "rms_norm")


@pytest.mark.usefixtures("own_memory")
def test_a_torch_with_other_traces_is_named_once(monkeypatch):
    def fails(self, call):
        raise TypeError("fake tensors are others")

    norms.warn_of_traces.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch_moe_mps.accelerate(nn.ModuleList([Norm()]).eval()).replaced
        torch_moe_mps.accelerate(
            nn.ModuleList([nn.Linear(2, 2)])
        )  # traces are as ever, and show nothing here
    norms.warn_of_traces.cache_clear()
    forget()
    monkeypatch.setattr(Recorder, "run", fails)
    said = f"traces of torch {re.escape(torch.__version__)} .* norms, MLPs, routers and rotary tables run"
    with pytest.warns(UserWarning, match=said) as seen:
        for _ in range(2):
            assert not torch_moe_mps.accelerate(nn.ModuleList([Norm()]).eval()).replaced
    assert len(seen) == 1
    norms.warn_of_traces.cache_clear()


class Ones(nn.Module):
    def forward(self, x):
        return torch.ones(3), x[:, 1:]


def test_what_operators_give_is_known_from_other_traces():
    """But not from those under another default dtype, nor for other sizes."""

    def results(rows, default):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            recorder = Recorder()
            x = recorder.input(torch.empty(0), (rows, 4), torch.float32)
            found = recorder.run(lambda: Ones()(x))
        finally:
            torch.set_default_dtype(before)
        return [(tuple(each.shape), each.dtype) for each in found]

    for _ in range(2):
        assert results(2, torch.float32) == [((3,), torch.float32), ((2, 3), torch.float32)]
        assert results(5, torch.float64) == [((3,), torch.float64), ((5, 3), torch.float32)]


def test_what_is_remembered_has_a_bound():
    held = Bounded(3)
    for number in range(7):
        held[number] = held[number] = str(number)
        assert held[number] == str(number) and len(held) <= 3
    assert held == {6: "6"}
    asked = []
    ask = remembered(lambda module: asked.append(module) or module.in_features)
    first, *others = [nn.Linear(width, 1) for width in range(1, 1026)]
    assert ask(first) == ask(first) == 1 and len(asked) == 1
    assert [ask(module) for module in others] == [*range(2, 1026)]
    assert ask(first) == 1 and len(asked) == 1026


class Lazy(dict):
    """Like transformers' CONFIG_MAPPING, which imports a module for each item that it returns."""

    def items(self):
        raise AssertionError("asked for all items")


LAZY = Lazy()


def test_a_mapping_in_a_file_is_not_asked_for_items_that_it_makes(monkeypatch):
    """What it holds, and which object it is, belong to the code of the file's functions."""
    before = code_of(halves)
    assert code_of(halves) == before
    with monkeypatch.context() as patch:
        patch.setitem(LAZY, "new", 1)
        assert code_of(halves) != before
    monkeypatch.setitem(globals(), "LAZY", Lazy())
    assert code_of(halves) != before


def test_a_trace_has_no_effects():
    """No hook runs, and modules are as before, whatever is switched on around."""
    calls: list = []
    norm = Norm().eval()
    norm.register_forward_hook(lambda *args: calls.append(1))
    handle = torch_module.register_module_forward_hook(lambda *args: calls.append(2))
    before = {**vars(norm)}
    with handle, torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        traced = trace(norm, Input((2, WIDTH)))
    assert traced is not None and not calls and {**vars(norm)} == before
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert names == [f"aten.{name}" for name in (
        "pow.Tensor_Scalar", "mean.dim", "add.Tensor", "rsqrt.default", "mul.Tensor", "mul.Tensor"
    )]  # fmt: skip


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        width = 3 * 32
        self.gate = nn.Linear(32, width)
        self.up = nn.Linear(32, width)
        self.both = nn.Linear(32, 2 * width)
        self.down = nn.Linear(width, 32)
        self.act = nn.SiLU()
        self.limit, self.alpha = 0.4, 1.5

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def accelerated_mlp(forward) -> tuple[Mlp, Mlp]:
    """An MLP with weights of 4 bits, and a dense one with the same weights."""
    torch.manual_seed(1)
    dense = type("AnMlp", (Mlp,), {"forward": forward})().eval()
    mlp = copy.deepcopy(dense)
    torch_moe_mps.accelerate(nn.ModuleDict({"mlp": mlp}), 4, 32)
    return mlp, tiny_models.dense_twin(dense, mlp)


def halves(self, x):
    gate, up = self.both(x).chunk(2, -1)
    return self.down(self.act(gate) * up)


def every_other(self, x):
    both = self.both(x)
    return self.down(self.act(both[..., ::2]) * both[..., 1::2])


def clamped(self, x, low=-1.0, limit=1.0, one=1):
    gate, up = self.gate(x), self.up(x).clamp(low * self.limit, limit * self.limit)
    gate = torch.clamp(gate, max=self.limit)
    return self.down((up + one) * (gate * torch.sigmoid(gate * self.alpha)))


def helped(self, x):
    def half(layer):
        return layer(x)

    return self.down(half(self.up) * self.act(half(self.gate)))


def swapped(self, x):
    gate, up = self.both(x).chunk(2, -1)
    return self.down(self.act(up) * gate)


MLPS = {
    "plain": Mlp.forward,
    "decorated": decorated(lambda self, x: self.down(self.act(self.gate(x)) * self.up(x))),
    "helped": helped,
    "exchanged": lambda self, x: self.down(self.act(self.up(x)) * self.gate(x)),
    "float32": lambda self, x: self.down((self.act(self.gate(x).float()) * self.up(x).float()).to(x.dtype)),
    "halves": halves,
    "every other": every_other,
    "clamped": lambda self, x: clamped(self, x),
    "without a gate": lambda self, x: self.down(nn.functional.relu(self.up(x)).square()),
}
NEAR_MLPS = {
    "another activation": lambda self, x: self.down(torch.tanh(self.gate(x)) * self.up(x)),
    "swapped halves": swapped,
    "a sum": lambda self, x: self.down(self.act(self.gate(x)) + self.up(x)),
    "one layer twice": lambda self, x: self.down(self.act(self.gate(x)) * self.gate(x)),
    "two activations": lambda self, x: self.down(self.act(self.gate(x)) * self.act(self.up(x))),
    "a scale": lambda self, x: self.down(self.act(self.gate(x)) * self.up(x)) * 2,
    "another input": lambda self, x: self.down(self.act(self.gate(x)) * self.up(x * 2)),
    "low": lambda self, x: clamped(self, x, low=-2.0),
    "no limit": lambda self, x: clamped(self, x, limit=torch.inf),
    "plus two": lambda self, x: clamped(self, x, one=2),
    "many tokens": lambda self, x: doubled_if(x.shape[0] > 999, Mlp.forward(self, x)),
    "9 to 15 tokens": lambda self, x: doubled_if(8 < x.shape[0] < 16, Mlp.forward(self, x)),
    "another dtype": lambda self, x: Mlp.forward(self, x.to(self.down.weight.dtype)),
    "rows of others": lambda self, x: self.down(self.act(self.gate(x)) * self.up(x).flip(0)),
    "two inputs": lambda self, x, scale=1: Mlp.forward(self, x) * scale,
}  # fmt: skip


@pytest.mark.parametrize("name", [*MLPS, *NEAR_MLPS])
def test_mlps(name, capfd):
    mlp, dense = accelerated_mlp((MLPS | NEAR_MLPS)[name])
    assert is_rewritten(mlp) == (name in MLPS) and "Error" not in capfd.readouterr().err
    for x in (torch.randn(5, 32), torch.randn(2, 3, 32), torch.randn(1, 32)):
        with torch.no_grad():
            expected = dense(x)
            ran = operators_of(lambda x=x, expected=expected: assert_close(mlp(x), expected, 1e-4))
        assert ran.get("_mlp_quantized", 0) == (name in MLPS)


def test_an_mlp_with_a_dense_layer():
    """It is told apart from one whose layers all are quantised."""
    for overrides in (None, {"mlp.down": False}):
        mlp = nn.ModuleDict({"mlp": Mlp().eval()})
        report = torch_moe_mps.accelerate(mlp, 4, 32, overrides=overrides)
        done = [str(done) for row in report.rows for done in row.done]
        assert ("mlp_quantized (silu)" in done) == (overrides is None)


def test_what_an_mlp_rests_on_changes():
    x = torch.randn(5, 32)
    calls: list = []
    for name, change in (
        ("plain", lambda mlp: setattr(mlp, "act", nn.GELU())),
        ("plain", lambda mlp: mlp.act.register_forward_hook(lambda *args: calls.append(1))),
        ("plain", lambda mlp: mlp.up.register_forward_hook(lambda *args: 2 * args[-1])),
        ("clamped", lambda mlp: setattr(mlp, "limit", 0.1)),
    ):
        mlp, own = accelerated_mlp(MLPS[name])
        with torch.no_grad():
            assert operators_of(lambda mlp=mlp: mlp(x)) == {"_mlp_quantized": 1}
            change(mlp), change(own)
            assert "_mlp_quantized" not in operators_of(lambda mlp=mlp: mlp(x))
            assert_close(mlp(x), own(x), 1e-4)
    assert calls


def test_restored_norms_are_as_before():
    norm = Decorated().eval()
    rewrite(norm)
    with torch.no_grad():
        by_operators(lambda: norm(torch.randn(2, WIDTH)), "rms_norm")
    restore_module(norm)
    assert type(norm) is Decorated and not is_rewritten(norm)
