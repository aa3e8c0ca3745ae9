"""Small functions as recorded graphs, what passes leave of them, and what these compute.

Functions of one token x and another one r are built of the layers at the end of this file.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

import torch_moe_mps.transformers  # noqa: F401  families put their passes into PASSES
from support.models import assert_close
from support.values import numbers as random
from torch_moe_mps.models.graphs import passes
from torch_moe_mps.models.graphs.fusion import Fusion
from torch_moe_mps.models.graphs.passes import simplify
from torch_moe_mps.models.graphs.tracing import ITEM, TENSOR, Recorder, is_operator
from torch_moe_mps.quantization import quantize

NO_CHAINS = frozenset({"_pointwise"})  # left to the operators of aten, which other patterns would have taken


def recorded(function: Callable, *inputs: Tensor) -> fx.Graph:
    """What a function does with inputs like these; other tensors that it reads are constants."""
    recorder = Recorder()
    fakes = [recorder.input(each, tuple(each.shape)) for each in inputs]
    with torch.no_grad():
        results = recorder.run(lambda: function(*fakes))
    recorder.finish(list(results) if isinstance(results, tuple) else [results])
    return recorder.graph


def computed(graph: fx.Graph, *inputs: Tensor) -> list[Tensor]:
    """What a graph returns. What its calls write into inputs and constants is written."""
    given, values = iter(inputs), {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = node.meta[TENSOR]
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    (results,) = graph.output_node().args
    return [values[each] for each in results]


def operators(graph: fx.Graph) -> Counter[str]:
    """Names of operators that are no views -> how often a graph calls them."""
    targets = [node.target for node in graph.nodes if node.target is not ITEM and is_operator(node)]
    return Counter(each.overloadpacket.__name__ for each in targets if not each.is_view)


def assert_computes(
    graph: fx.Graph, function: Callable, *inputs: Tensor, tolerance: float = 1e-6, strides: bool = False
) -> None:
    """A graph has the results of a function, perhaps with their strides, and writes the same into inputs."""
    own, held = [each.clone() for each in inputs], [each.clone() for each in inputs]
    torch.manual_seed(0)
    expected = function(*own)
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.manual_seed(0)
    for result, each in zip([*computed(graph, *held), *held], [*expected, *own], strict=True):
        assert result.stride() == each.stride() or not strides
        assert_close(result, each, tolerance)


def assert_left(
    left: dict[str, int], function: Callable, *inputs: Tensor, without=frozenset(), **options
) -> None:
    """The passes leave these operators of a function, which compute what it does."""
    graph = recorded(function, *inputs)
    simplify(graph, without)
    assert operators(graph) == left, graph
    assert_computes(graph, function, *inputs, **options)


def name_of(case: Any) -> str:
    """The name of a function or pass; a text is its own."""
    return case if isinstance(case, str) else case.__name__


def function_of(case: Callable | str, names: str = "x, r", **scope: Any) -> Callable:
    """A case that is a text, as a function of `names`. It sees the layers below, and `scope`."""
    return eval(f"lambda {names}: ({case})", globals() | scope) if isinstance(case, str) else case


def passes_of(module: str) -> list[Callable[[fx.Graph], None]]:
    """The passes of a module that are functions: those that are formulas have cases of their own."""
    functions = dict.fromkeys(each for each in passes.PASSES if not isinstance(each, Fusion))
    found = [each for each in functions if module in each.__module__.split(".")]
    assert found, module
    return found


def assert_needed(left_out: Callable, cases: Iterable[tuple[Callable, tuple, dict[str, int]]]) -> None:
    """Without a pass, the others leave other operators of one of some functions, or a graph that is none."""
    others = [each for each in passes.PASSES if each is not left_out]
    with mock.patch.object(passes, "PASSES", others):
        for function, inputs, left in cases:
            graph = recorded(function, *inputs)
            simplify(graph)
            try:
                graph.lint()
            except RuntimeError:  # something is read before it is there
                return
            if operators(graph) != left:
                return
    pytest.fail("all patterns are found without it")


ops = torch.ops.moe_mps
H, E, K, I = 64, 8, 2, 32  # widths, experts, experts of a token
FORMAT = "affine4_32"
QUANTIZED = quantize(random(H, H, seed=2) / 8, 4, 32)
MATRIX = QUANTIZED.packed, QUANTIZED.scales, QUANTIZED.zeros
NORM, OTHER_NORM, ROUTER, SCALES = random(H), random(H, seed=1), random(E, H) / 8, random(E)
WEIGHTS = random(E, 2 * I, H) / 8, random(E, H, I) / 8
GATE = random(1, H)


def linear(x: Tensor, **options) -> Tensor:
    return ops.linear_quantized(x, *MATRIX, format=FORMAT, **options)


PARAMETERS = [
    [torch.nn.Parameter(each, requires_grad=False) for each in (one.packed, one.scales, one.zeros)]
    for one in (quantize(random(rows, H), 4, 32) for rows in (H, 2 * H))
]
ROWS = [torch.nn.Parameter(random(rows, H) / 8, requires_grad=False) for rows in (E, 1, 514, 515)]


def projected(x: Tensor, number: int) -> Tensor:
    return ops.linear_quantized(x, *PARAMETERS[number], format=FORMAT)


def norm(x: Tensor, weight: Tensor | None = NORM) -> Tensor:
    return ops.rms_norm(x, weight, norm_eps=1e-6)


def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return ops._moe_experts(x, weights, ids, *WEIGHTS)


def routed(x: Tensor) -> Tensor:
    """Experts behind a router that casts its results."""
    logits = torch.nn.functional.linear(x, ROUTER)
    weights, ids = ops.moe_router(logits, K, scoring="softmax", norm_topk_prob=True)
    return experts(x, ids.long(), weights.half())


def changed(value: Tensor) -> Tensor:
    """In place, by an operator that stays one: its arguments differ in dtype."""
    return value.masked_fill_(value > value.mean(), 0)


LINEAR = {"linear_quantized": 1}
CHANGED = {"gt": 1, "mean": 1, "masked_fill_": 1}
TOKEN = random(1, 1, H), random(1, 1, H, seed=1)
