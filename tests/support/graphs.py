"""Small functions as recorded graphs, and what these compute."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, fx

from torch_moe_mps.transformers.graphs.tracing import ITEM, TENSOR, Recorder, is_operator


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
