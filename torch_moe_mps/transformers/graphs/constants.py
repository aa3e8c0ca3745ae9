"""Elements of tensors that are known while a call is recorded: where constants fill them."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .nodes import arguments, aten, is_call, memory_of, written
from .tracing import Recorder

# {what fills a new tensor: the argument that is its number}
_FILLED: dict[Any, str] = {aten.full: "fill_value", aten.fill: "value", aten.constant_pad_nd: "value"}
_COPIES = (aten.copy_, torch.ops.prims.copy_to)


def numbers_of(tensor: Tensor) -> set[float] | None:
    """The numbers that elements of a recorded tensor may be; None where they are not known."""
    modes = _get_current_dispatch_mode_stack()
    recorder = next((mode for mode in modes if isinstance(mode, Recorder)), None)
    return None if recorder is None else _numbers(recorder.node_of(tensor))


def _numbers(value: fx.Node) -> set[float] | None:
    """Numbers of all copies into a value count, wherever they go and whenever that is."""
    memory = memory_of(value)
    name = _FILLED.get(getattr(memory.target, "overloadpacket", None))
    filled = None if name is None else arguments(memory)[name]
    writes = [call for call in memory.graph.nodes if any(memory_of(it) is memory for it in written(call))]
    if not isinstance(filled, (int, float)) or not all(is_call(call, *_COPIES) for call in writes):
        return None
    sources = [memory.args[0]] if is_call(memory, aten.constant_pad_nd) else []
    sources += [call.args[1] for call in writes]
    result: set[float] = {filled}
    for source in sources:
        is_own = isinstance(source, fx.Node) and memory_of(source) is memory
        numbers = result if is_own else _numbers(source)  # type: ignore[arg-type]  # copied numbers
        if numbers is None:
            return None
        result |= numbers
    return result
