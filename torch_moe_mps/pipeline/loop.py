"""Finds how a model runs its layers, by calls of its code on the meta device.

A process runs the model with stand-ins for the layers of others, and one stand-in gives what the layer in its
place returned elsewhere. That is right if a layer reads, of what layers compute, only what the layer just
before it returned; everything else, such as masks and position embeddings, must be the same in every process.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache

from .._text import first_line
from ..checkpoints.absent import around_text
from ..checkpoints.quantize.sizes import total_bytes
from ..models.programs import cache_among, cache_argument, call_on_shapes

_Source = tuple[int, bool]  # the number of a layer, and whether it returned a tensor or kept it
_EMBEDDED = -1, True


class CannotBeCut(ValueError):
    """Why the layers of a model cannot be spread over processes."""


@dataclass
class Loop:
    """Form of the loop in which a model runs its layers.

    Attributes:
        base: the name of the module that embeds ids and runs the layers.
        layers: the name of the list of layers.
        results: length of a layer's result tuple, hidden states first; None for a plain tensor.
        uses_embeddings: True if other code than the first layer may read the embedded ids.
        convolving: indices of the layers with convolution states in the cache.
    """

    base: str
    layers: str
    results: int | None
    uses_embeddings: bool
    convolving: set[int]


class _DoesNotRun(CannotBeCut):
    """The code of a model raises an error on the meta device."""


def find_loop(model: Any) -> Loop:
    """Calls a copy of the model without weights: for a prompt of ids, then for the embedding of a token.

    Raises: CannotBeCut with the reason.
    """
    name, layers = _layers_of(model)
    base: Any = copy.deepcopy(model.get_submodule(name)).to("meta").eval()
    calls = _Calls(base, base.get_submodule(layers))
    ids = torch.zeros(1, 5, dtype=torch.long, device="meta")
    cache = calls.run(input_ids=ids)
    states = [getattr(item, "is_conv_states_initialized", {}) for item in getattr(cache, "layers", ())]
    convolving = {number for number, item in enumerate(states) if any(item.values())}
    with torch.no_grad(), calls:
        embedded = base.get_input_embeddings()(ids[:, :1])
    try:
        calls.run(inputs_embeds=embedded, **cache_argument(base, cache))
    except _DoesNotRun:
        calls.uses_embeddings |= calls.layer is None  # layers may need the ids
    path = f"{name}.{layers}".lstrip(".")
    return Loop(name, path, calls.results, calls.uses_embeddings, convolving)


def _layers_of(model: Any) -> tuple[str, str]:
    """The name of the module of a model that runs the layers, and there the name of their list."""
    try:
        head = model.get_output_embeddings()
        _, name = around_text(model)
    except (NotImplementedError, AttributeError):
        head = None
    if head is None or not model.can_generate():
        raise CannotBeCut(f"{type(model).__name__} has no output head for tokens")
    base = model.get_submodule(name)
    lists = {n: child for n, child in base.named_children() if isinstance(child, nn.ModuleList)}
    if not lists:
        raise CannotBeCut(f"{type(base).__name__} has no list of layers")
    layers = max(lists, key=lambda n: total_bytes(lists[n]))
    for index, layer in enumerate(lists[layers]):
        for module in layer.modules():
            if getattr(module, "layer_idx", index) not in (index, None):
                raise CannotBeCut(f"the layers of {type(model).__name__} are not numbered as in the model")
    return name, layers


class _Calls(TorchDispatchMode):
    """Calls of a model that follow each tensor back to layers and to the embedding.

    Attributes:
        layer: the number of the layer that runs, or that failed; else None.
        results, uses_embeddings: of the loop.
    """

    def __init__(self, model: Any, layers: nn.ModuleList):
        super().__init__()
        self.model, self.count = model, len(layers)
        self.layer: int | None = None
        self.results: int | None = None
        self.uses_embeddings = False
        self._begun = 0  # how many layers
        self._sources: dict[int, set[_Source]] = {}  # by storage
        self._alive: list[Tensor] = []
        embedding = model.get_input_embeddings()
        for weight in (*embedding.parameters(), *embedding.buffers()):
            self._add(weight, {_EMBEDDED})
        for number, layer in enumerate(layers):
            for tensor in (*layer.parameters(), *layer.buffers()):
                self._add(tensor, {(number, False)})
            layer.register_forward_pre_hook(functools.partial(self._enter, number))
            layer.register_forward_hook(functools.partial(self._leave, number))

    def run(self, **inputs: Any) -> Any:
        """The cache that a call leaves."""
        self._begun = 0
        try:
            with self:
                output = call_on_shapes(self.model, **inputs)
        except CannotBeCut:
            raise
        except Exception as error:  # it is not ours: any error may come of it
            line = first_line(error)
            raise _DoesNotRun(f"{type(self.model).__name__} does not run on shapes alone: {line}") from error
        self._check_order(self.count)
        leaves = pytree.tree_leaves(output, is_leaf=lambda value: isinstance(value, Cache))
        self._read(self.count, self._sources_of(leaves))
        return cache_among(output)

    def _enter(self, number: int, layer: nn.Module, args: tuple) -> None:
        self._check_order(number)
        self._begun += 1
        self.layer = number

    def _check_order(self, begun: int) -> None:
        if self._begun != begun:
            self._refuse("does not call each layer once, in their order")

    def _leave(self, number: int, layer: nn.Module, args: tuple, output: Any) -> Any:
        """New tensors of the layer's shapes in place of its output; notes the form of that output."""
        results = output if isinstance(output, tuple) else (output,)
        if not all(result is None or isinstance(result, Tensor) for result in results):
            kinds = ", ".join(type(result).__name__ for result in results)
            self._refuse(f"has layers that do not return tensors, but {kinds}")
        self.results = len(output) if isinstance(output, tuple) else None
        self.layer = None
        replacements = tuple(None if result is None else torch.empty_like(result) for result in results)
        for item in replacements:
            if item is not None:
                self._add(item, {(number, True)})
        return replacements[0] if self.results is None else replacements

    def _read(self, reader: int, sources: set[_Source]) -> None:
        """Notes what a layer reads. The reader behind the last one is what the model returns."""
        if reader > 0 and _EMBEDDED in sources:
            self.uses_embeddings = True
        reader_sources = {(reader, True), (reader, False)}
        for layer, is_returned in sorted(sources - reader_sources - {_EMBEDDED, (reader - 1, True)}):
            if reader == self.count:
                self._refuse(f"returns what follows from layer {layer}")
            verb = "returned" if is_returned else "kept"
            self._refuse(f"has a layer {reader} that reads what layer {layer} has {verb}")

    def _refuse(self, why: str) -> NoReturn:
        raise CannotBeCut(f"{type(self.model).__name__} {why}")

    def _sources_of(self, values: list[Any]) -> set[_Source]:
        known = (self._sources.get(_storage(value), set()) for value in values if isinstance(value, Tensor))
        return set().union(*known)

    def _add(self, tensor: Tensor, sources: set[_Source]) -> None:
        self._alive.append(tensor)  # so that no other storage has its address
        self._sources.setdefault(_storage(tensor), set()).update(sources)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = set() if _reads_shapes_only(func) else self._sources_of(arguments)
        if self.layer is not None and sources:  # else it is made of nothing but numbers, as masks are
            self._read(self.layer, sources)
            sources = {(self.layer, False)}
        before = {*map(_storage, arguments)}
        for leaf in pytree.tree_leaves(result):
            # A view is followed as what it shows.
            if isinstance(leaf, Tensor) and (func._schema.is_mutable or _storage(leaf) not in before):
                self._add(leaf, sources)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _reads_shapes_only(func: Any) -> bool:
    """True if an operator makes a tensor like another one."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")
