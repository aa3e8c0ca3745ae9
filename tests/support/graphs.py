"""Small functions as recorded graphs, what passes leave of them, and what these compute."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, fx

from support.models import assert_close
from torch_moe_mps.transformers.graphs.passes import simplify
from torch_moe_mps.transformers.graphs.tracing import ITEM, TENSOR, Recorder, is_operator

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
