"""Passes that are formulas: cases made from each formula, as it is and with one thing changed."""

import ast
import operator
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.graphs import assert_computes, operators, recorded
from torch import Tensor

from torch_moe_mps.models.graphs.fusion import Fusion
from torch_moe_mps.models.graphs.passes import PASSES
from torch_moe_mps.models.graphs.passes.attention import turn_in_attention
from torch_moe_mps.models.graphs.passes.simplify import drop_unused
from torch_moe_mps.models.graphs.patterns import called, parsed
from torch_moe_mps.ops import _checks
from torch_moe_mps.ops._sample import Sample
from torch_moe_mps.ops._samples import sample_arguments

ours, aten = torch.ops.moe_mps, torch.ops.aten
SIGNS = {ast.Add: operator.add, ast.Mult: operator.mul}
VIEWS = ("item", "transpose")  # launch nothing
NORM = {"W": (64,), "EPS": 1e-6, "OFFSET": 1.0}


class Wide(tuple):
    """The shape of a tensor in 16 bits that is cast to float32."""


def attention(formula: str) -> dict:
    matrix = Sample("cpu", torch.float32).quantized("", 16, 32, (4,)) | {"format": "affine4_32"}
    weight = matrix if "_heads_quantized" in formula else {"weight": (4, 16, 32)}
    gate = (2, 3, 4, 32) if "[G]" in formula else (2, 3, 4)
    return {"GATE": gate, "...": (2, 3, 4), "M": weight | {"transposed": False, "appended": None}}


# What names of the formulas stand for: shapes, numbers, arguments that differ from those of a good call. The
# arguments that no line has are those of a good call.
HEADS = {"A": (2, 3, 4), "B": (2, 3, 4), "A_LOG": (4,), "DT_BIAS": (4,)}
STREAMS = {"OUT": (3, 1, 64), "STREAMS": (3, 4, 64), "...": (3,), "N": 4, "H": 64}
SAMPLES: dict[str, dict | Callable[[str], dict]] = {
    "add_in_operators": lambda f: {"R": (3, 32 if "linear" in f else 64), "LOGIT": (3, 1), "OUT": (3, 64)},
    "weights_on_inputs": {
        "X": (1, 64),
        "W": (1, 1),
        "O": {"dtype": torch.float32},
        "IDS": torch.tensor([[3]]),
    },
    "add_norms": NORM | {"R": (1, 1, 64), "X": (1, 64)},
    "scale_norm_sums": NORM | {"R": (3, 64), "X": (3, 64), "SCALAR": (1,)},
    "factor_in_norm": {"FACTOR": 0.5},
    "norm_sums": NORM | {"R": (3, 64), "Y": (3, 64), "FACTOR": 0.22, "B": (64,)},
    "streams_in_update": STREAMS | {"C": {"block_out": None, "post": None, "comb": None}},
    "mean_in_elements": {},
    "gate_in_attention": attention,
    "gates_in_gated_delta_rule": HEADS
    | {"O": {"decay_form": "log", "A_log": None, "dt_bias": None, "beta_activation": "none"}},
    "norm_in_gated_delta_rule": NORM | {"GATE": (2, 3, 4, 32), "W": (32,), "ACTIVATION": "sigmoid"},
    "input_in_convolution": lambda f: {"X": Wide((2, 3, 6)), "D": torch.bfloat16} if "dtype" in f else {},
}
CHANGES = (
    *(Tensor.double, Tensor.bfloat16),
    *(lambda x: x[..., :1], lambda x: x[:1], lambda x: x[None]),
    lambda x: x.t().contiguous().t() if x.dim() == 2 else x.transpose(-1, 0).contiguous().transpose(-1, 0),
)
# test_attention.py has cases of that one, which asks where a cache ends.
FUSIONS = {
    each.__name__: each for each in PASSES if isinstance(each, Fusion) and each is not turn_in_attention
}
ROWS = [(name, number) for name, each in FUSIONS.items() for number in range(len(each.rows))]
each_row = pytest.mark.parametrize(("name", "number"), ROWS)


class Row:
    """A row, and its formula as a function of tensors.

    Attributes:
        tensors: {(name, argument of the call that it stands for): value}, and `wide`: which are cast first.
        calls: of the formula, in their order; `place` is the one where the operator comes.
        reads: for each call the tensors that it reads.
    """

    def __init__(self, name: str, number: int, dtype=torch.float32, wide: bool = False):
        self.formula, self.new = FUSIONS[name].rows[number]
        self.alone = Fusion("alone", (self.formula, self.new), where=FUSIONS[name].where)
        made = SAMPLES[name]
        self._names = dict(made(self.formula) if callable(made) else made)
        self._sample, self._dtype = Sample("cpu", dtype), dtype
        self.tensors: dict[tuple[str, str], Tensor] = {}
        self.wide: set[tuple[str, str]] = set()
        for key, value in list(self._names.items()):
            if isinstance(value, tuple | Tensor) and key != "...":
                self._put((key, ""), value)
                if isinstance(value, Wide) or (wide and isinstance(value, tuple)):
                    self.wide.add((key, ""))
        if "C" in self._names:
            self._good_call("_hyper_connection", "C")
        for key in self.wide:
            self.tensors[key] = self.tensors[key].bfloat16()
        self.calls: list[ast.expr] = []
        self.reads: list[list[tuple[str, str]]] = []
        self._add(parsed(self.formula))
        shared = [each for each in ast.walk(parsed(self.formula)) if isinstance(each, ast.NamedExpr)]
        self.place = self.calls.index(shared[0].value) if shared else len(self.calls) - 1

    def _arguments_of(self, name: str) -> dict:
        return sample_arguments(name, "cpu", self._dtype, head=(16, 32))

    def _put(self, key: tuple[str, str], value) -> None:
        if isinstance(value, tuple):
            value = self._sample.values(*value)
        if isinstance(value, Tensor):
            self.tensors[key] = value

    def _good_call(self, name: str, key: str) -> dict:
        """The arguments of a call, by name."""
        own = self._names.get(key)
        given = self._arguments_of(name) | (own if isinstance(own, dict) else {})
        for argument, value in given.items():
            self._put((key, argument), value)
        self._names[key] = {
            each: (key, each) if (key, each) in self.tensors else v for each, v in given.items()
        }
        return given

    def _add(self, form: ast.expr) -> None:
        """Notes the calls of a formula, and makes what they read."""
        for each in ast.iter_child_nodes(form):
            self._add(each)
        if not isinstance(form, ast.BinOp | ast.Call):
            return
        reads, schema = [], None
        if hasattr(ours, called(form)):
            schema = getattr(ours, called(form)).default._schema
            given = self._arguments_of(called(form))
        for position, each in enumerate(form.args if isinstance(form, ast.Call) else [form.left, form.right]):
            leaf = each.value if isinstance(each, ast.Subscript | ast.Starred) else each
            leaf = leaf.value if isinstance(leaf, ast.Subscript) else leaf
            if isinstance(each, ast.Starred) and schema is None:
                continue
            if isinstance(each, ast.Starred):
                named = [*schema.arguments][:position] + list(form.keywords)
                self._good_call(called(form), leaf.id)
                for other in named:
                    argument = other.name if hasattr(other, "name") else other.arg
                    self._names[leaf.id].pop(argument, None)
                    self.tensors.pop((leaf.id, argument), None)
                reads += [key for key in self._names[leaf.id].values() if key in self.tensors]
            elif isinstance(leaf, ast.Name):
                if leaf.id not in self._names:
                    self._names[leaf.id] = given[schema.arguments[position].name]
                    self._put((leaf.id, ""), self._names[leaf.id])
                reads += [(leaf.id, "")] if (leaf.id, "") in self.tensors else []
        for each in form.keywords if isinstance(form, ast.Call) else []:
            leaf = each.value.value if isinstance(each.value, ast.Subscript) else each.value
            reads += [(leaf.id, "")] if isinstance(leaf, ast.Name) and (leaf.id, "") in self.tensors else []
        self.calls.append(form)
        self.reads.append(reads)

    def function(self, after: int = -1, write=None, read=None, factor=1, cast=False) -> Callable:
        """Of `tensors`; behind a call it may write into one, read one or the result, or scale that."""

        def run(*given):
            values = dict(zip(self.tensors, given, strict=True))
            values |= {key: values[key].float() for key in self.wide}
            if write is not None:
                values[write] = values[write].clone()
            others: list[Tensor] = []

            def step(form, result):
                if after == self.calls.index(form):
                    if write is not None:
                        values[write][..., :1].mul_(2)
                    if read is not None:
                        others.append((result if read == "result" else values[read]) * 2)
                    result = result * factor if factor != 1 else result
                return result

            if "C" in self._names:
                values["C", ""] = ours._hyper_connection(**self._arguments("C", values))
            result = self._run(parsed(self.formula), values, step)
            return (result.bfloat16() if cast else result, *others)

        return run

    def _arguments(self, name: str, values: dict) -> dict:
        return {n: values.get(v, v) if isinstance(v, tuple) else v for n, v in self._names[name].items()}

    def _run(self, form: ast.expr, values: dict, step: Callable):
        def run(each):
            return self._run(each, values, step)

        if isinstance(form, ast.Name):
            return values.get((form.id, ""), self._names.get(form.id))
        if isinstance(form, ast.NamedExpr):
            return run(form.value)
        if isinstance(form, ast.Subscript):
            value, sizes = run(form.value), getattr(form.slice, "elts", [])
            names = [ast.unparse(size) for size in sizes]
            if isinstance(form.value, ast.Name) or not names or not {*names} - {"1"} <= self._names.keys():
                return value
            shape = [[1] if each == "1" else self._names[each] for each in names]
            return value.view(
                [n for each in shape for n in (each if isinstance(each, tuple | list) else [each])]
            )
        if isinstance(form, ast.BinOp):
            return step(form, SIGNS[type(form.op)](run(form.left), run(form.right)))
        if not isinstance(form, ast.Call):
            return ast.literal_eval(form)
        name = called(form)
        args = [run(each) for each in form.args if not isinstance(each, ast.Starred)]
        if name == "item":
            return step(form, args[0][args[1]])
        named = {each.arg: run(each.value) for each in form.keywords}
        for each in form.args[len(args) :]:
            star = each.value.value if isinstance(each.value, ast.Subscript) else each.value
            named |= self._arguments(star.id, values)
        if not hasattr(ours, name):
            return step(form, getattr(aten, name)(*args, **named))
        operator = getattr(ours, name)
        names = [argument.name for argument in operator.default._schema.arguments]
        return step(form, operator(**dict(zip(names, args, strict=False)), **named))

    @property
    def after(self) -> Counter:
        """The operators that are left of the formula."""
        forms = [each for each in ast.walk(parsed(self.new)) if isinstance(each, ast.Call)]
        left = Counter(called(each) for each in forms if called(each) != "item")
        return left + Counter({"_hyper_connection": 1} if "C" in self._names else {})

    def check(self, fusion: Fusion, function: Callable, tolerance: float = 1e-5) -> tuple[Counter, Counter]:
        """Compares what a graph computes behind a pass. Returns: the operators before and behind it."""
        given = [*self.tensors.values()]
        graph = recorded(function, *given)
        drop_unused(graph)
        before = operators(graph)
        fusion(graph)
        drop_unused(graph)
        graph.lint()
        assert_computes(graph, function, *given, tolerance=tolerance, strides=True)
        return before, operators(graph)


def casts_apart(left: Counter) -> Counter:
    return Counter({name: count for name, count in left.items() if name != "_to_copy"})


@each_row
def test_a_formula_is_its_operator(name, number):
    row = Row(name, number)
    for fusion in (row.alone, FUSIONS[name]):
        before, left = row.check(fusion, row.function(), 1e-2 if row.wide else 1e-5)
        assert casts_apart(left) == row.after and before.total() > left.total()


@each_row
def test_in_16_bits(name, number):
    """Also where the formula computes in float32, and is cast."""
    if name != "streams_in_update":  # models compute it in float32
        row = Row(name, number, torch.bfloat16)
        assert casts_apart(row.check(row.alone, row.function(), 0.05)[1]) == row.after
    row = Row(name, number, wide=True)
    cast = called(parsed(row.formula)) != "_to_copy"
    assert casts_apart(row.check(row.alone, row.function(cast=cast), 0.05)[1]) == row.after


@each_row
def test_values_that_else_are_read(name, number):
    """What the operator would not give stays, and so does what writes a state that is read in between."""
    row = Row(name, number)
    tolerance = 1e-2 if row.wide else 1e-5
    for call, form in enumerate(row.calls[:-1]):
        before, left = row.check(row.alone, row.function(call, read="result"), tolerance)
        is_given = call == row.place or called(form) in VIEWS
        assert casts_apart(left) == row.after + Counter(mul=1) if is_given else left == before
        for state in (key for reads in row.reads for key in reads if key[1].endswith("_")):
            (written,) = (n for n, reads in enumerate(row.reads) if state in reads)
            before, left = row.check(row.alone, row.function(call, read=state), tolerance)
            is_late = written <= call < row.place
            assert left == before if is_late else casts_apart(left) == row.after + Counter(mul=1)


@each_row
def test_tensors_that_change_in_between(name, number):
    row = Row(name, number)
    for call in range(len(row.calls) - 1):
        for key in row.tensors:
            calls = [n for n, reads in enumerate(row.reads) if key in reads]
            if not calls:  # of what the formula begins with
                continue
            before, left = row.check(row.alone, row.function(call, write=key), 1e-2 if row.wide else 1e-5)
            differs = any(min(each, row.place) <= call < max(each, row.place) for each in calls)
            expected = before if differs else row.after + Counter(clone=1, mul_=1)
            assert casts_apart(left) == casts_apart(expected), (call, key)


def test_equal_layers_are_checked_once(monkeypatch):
    """Of a model with many layers, an operator's checks see one call of each kind."""
    weight, checks = torch.rand(64), []
    check = _checks.Check.dtype
    monkeypatch.setattr(_checks.Check, "dtype", lambda *given: checks.append(given[1]) or check(*given))

    def function(x):
        for _ in range(8):
            x = x + ours.rms_norm(x, weight, norm_eps=1e-6)
        return x

    graph = recorded(function, torch.rand(1, 64))
    checks.clear()
    FUSIONS["add_norms"](graph)
    drop_unused(graph)
    assert operators(graph) == {"fused_norm_add": 8} and checks.count("residual") == 1


@each_row
def test_another_formula(name, number):
    """With a factor behind each of its calls: whatever the pass does, the results stay as they were."""
    row = Row(name, number)
    for call in range(len(row.calls) - 1):
        row.check(FUSIONS[name], row.function(call, factor=3), 1e-2 if row.wide else 1e-5)


@each_row
def test_other_dtypes_and_shapes(name, number):
    """Whatever the pass does, the results stay as they were."""
    tried = 0
    for key in [key for key in Row(name, number).tensors if not key[1]]:
        for change in CHANGES:
            row = Row(name, number)
            row.tensors[key] = change(row.tensors[key])
            try:
                row.function()(*[each.clone() for each in row.tensors.values()])
            except (ValueError, RuntimeError):  # no such call
                continue
            row.check(FUSIONS[name], row.function(), 0.05)
            tried += 1
    assert tried or name in ("factor_in_norm", "mean_in_elements", "input_in_convolution")
