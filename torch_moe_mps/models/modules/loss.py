"""The loss of a call with labels, computed in chunks of tokens: no logits of all tokens are in memory.

The eager forward runs, from the head to the loss. The head gives logits that are made where something
reads them. If only the cross entropy reads them, they are made a chunk at a time, and once more in its
backward.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..basics.scoped import having
from ..basics.state import made_as, restore_class, subclass
from ..basics.tensors import ABOUT, Deferred

LARGEST = 1 << 24  # logits of a chunk: 64 MiB in float32
_CHUNKING = "chunking losses"  # the kind of the classes that `_chunking_class` makes
_LABELS = "labels"

# Functions of each element for itself, if their other arguments are numbers or dtypes.
_POINTWISE = {
    Tensor.float, Tensor.to, Tensor.tanh, torch.tanh, Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__,
    Tensor.div, torch.div, Tensor.__truediv__,
}  # fmt: skip
_CONSTANTS = (int, float, bool, torch.dtype)


class Head(NamedTuple):
    """Function of rows [..., H] that gives logits [..., V]: the forward of a head, and what follows it."""

    forward: Callable[[Tensor], Tensor]
    weights: tuple[Tensor, ...]
    autocast: tuple[str, torch.dtype] | None
    then: tuple[Callable[[Tensor], Tensor], ...] = ()

    def __call__(self, rows: Tensor) -> Tensor:
        around = nullcontext() if self.autocast is None else torch.autocast(*self.autocast)
        with around:
            out = self.forward(rows)
        for function in self.then:
            out = function(out)
        return out

    def versions(self) -> list[int]:
        """Numbers that change with the weights."""
        return [weight._version for weight in self.weights]


class Logits(Deferred):
    """Logits [..., V] of rows of hidden states. Whatever reads them gets them, made then.

    Attributes:
        rows: [..., H].
        head: makes logits of rows.
        versions: of the head's weights at the call.
        has_graph: whether gradients were on at the call. Logits of a call without them have none.
    """

    rows: Tensor
    head: Head
    versions: list[int]
    has_graph: bool
    _elements: dict[bool, Tensor]  # {whether gradients were on: the logits}

    @staticmethod
    def of(rows: Tensor, head: Head) -> "Logits":
        """One row tells the dtype, and how many logits the head gives."""
        with torch.no_grad():
            one = head(rows.reshape(-1, rows.shape[-1])[:1])
        shape = (*rows.shape[:-1], one.shape[-1])
        logits: Logits = Logits.made(
            shape, one.dtype, rows.device, rows=rows, head=head, versions=head.versions(),
            has_graph=torch.is_grad_enabled(), _elements={},
        )  # fmt: skip
        return logits

    def _with(self, shape: tuple[int, ...], dtype: torch.dtype, rows: Tensor, head: Head) -> "Logits":
        """Logits of the same call."""
        logits: Logits = Logits.made(
            shape, dtype, rows.device, rows=rows, head=head, versions=self.versions,
            has_graph=self.has_graph, _elements={},
        )  # fmt: skip
        return logits

    def elements(self) -> Tensor:
        """The logits, computed once.

        Raises: RuntimeError where the weights have changed since the call.
        """
        grad = self.has_graph and torch.is_grad_enabled()
        with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(grad):
            if grad not in self._elements:
                if self.head.versions() != self.versions:
                    raise RuntimeError(
                        "moe_mps: logits must be read before the head's weights change, got a read behind it"
                    )
                self._elements[grad] = self.head(self.rows)
            return self._elements[grad]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in ABOUT:
                return func(*args, **kwargs)
            first = args[0] if args else None
            known = first._known(func, args[1:], kwargs) if isinstance(first, Logits) else NotImplemented
            if known is not NotImplemented:
                return known
            args, kwargs = torch.utils._pytree.tree_map_only(
                Logits, lambda item: item.elements(), (args, kwargs)
            )
            return func(*args, **kwargs)

    def _known(self, func: Any, others: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of a function that needs no logits of all rows; NotImplemented if it needs them."""
        if self._elements:
            return NotImplemented
        if func is functional.cross_entropy:
            return self._cross_entropy(*others, **kwargs)
        if func in _POINTWISE and all(type(item) in _CONSTANTS for item in (*others, *kwargs.values())):
            return self._then(lambda x: func(x, *others, **kwargs))
        if func is Tensor.contiguous and not others and not kwargs:
            return self
        if func in (Tensor.view, Tensor.reshape):
            return self._viewed(*others, **kwargs)
        if func is Tensor.__getitem__:
            return self._chosen(*others)
        return NotImplemented

    def _then(self, function: Callable[[Tensor], Tensor]) -> "Logits":
        dtype = function(torch.empty(0, dtype=self.dtype)).dtype
        head = self.head._replace(then=(*self.head.then, function))
        return self._with(tuple(self.shape), dtype, self.rows, head)

    def _of_rows(self, rows: Tensor) -> "Logits":
        shape = (*rows.shape[:-1], self.shape[-1])
        return self._with(shape, self.dtype, rows, self.head)

    def _viewed(self, *shape: Any, **kwargs: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if kwargs or not all(type(size) is int for size in sizes) or sizes[-1] != self.shape[-1]:
            return NotImplemented
        return self._of_rows(self.rows.reshape(*sizes[:-1], self.rows.shape[-1]))

    def _chosen(self, index: Any) -> Any:
        """Slices of rows, such as [..., :-1, :]."""
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is Ellipsis or type(part) is slice for part in parts):
            return NotImplemented
        if (Ellipsis in parts or len(parts) == self.dim()) and parts[-1] not in (Ellipsis, slice(None)):
            return NotImplemented
        return self._of_rows(self.rows[index])

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        """`functional.cross_entropy` in chunks of logits; NotImplemented for other options."""
        is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
        if not is_plain or self.dim() != 2 or target.shape != self.shape[:1]:
            return NotImplemented
        how: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": "none" if reduction == "none" else "sum",
        }

        def part(rows: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(self.head(rows), target, **how)

        size = rows_of_chunk(self.shape[1])
        chunks = zip(self.rows.split(size), target.split(size), strict=True)
        if self.has_graph and torch.is_grad_enabled():
            parts = [
                checkpoint(part, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
            ]
        else:
            with torch.no_grad():
                parts = [part(*chunk) for chunk in chunks]
        if reduction == "none":
            return torch.cat(parts)
        total = torch.stack(parts).sum()
        return total if reduction == "sum" else total / (target != ignore_index).sum()


def rows_of_chunk(vocabulary: int) -> int:
    """Number of tokens in a chunk."""
    return max(1, LARGEST // vocabulary)


def chunk_losses(model: nn.Module) -> None:
    """Lets the models in a module compute the loss of calls with labels in chunks.

    Heads with modules of their own, as adapters have them, give their logits at once.
    """
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or made_as(type(module), _CHUNKING):
            continue
        cls: Any = type(module)
        has_labels = _LABELS in inspect.signature(cls.forward).parameters
        if has_labels and isinstance(module.get_output_embeddings(), nn.Module):
            module.__class__ = _chunking_class(cls)


def restore_losses(model: nn.Module) -> None:
    """Undoes `chunk_losses`. Beneath a class that somebody put on top, losses stay in chunks."""
    for module in model.modules():
        restore_class(module, _CHUNKING)


@functools.cache
def _chunking_class(original: type[nn.Module]) -> type[nn.Module]:
    eager_forward: Callable[..., Any] = original.forward
    place = list(inspect.signature(eager_forward).parameters).index(_LABELS) - 1

    @functools.wraps(eager_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get(_LABELS, args[place] if len(args) > place else None)
        if labels is None or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return original.forward(self, *args, **kwargs)
        with _deferring(self.get_output_embeddings()):
            return original.forward(self, *args, **kwargs)

    return subclass(original, _CHUNKING, _chunking_class, forward=forward)


class _Deferring:
    """The forward of a head in calls with labels: it gives Logits for more rows than a chunk has.

    Threads may run such calls at once: the head has one forward for all of them, and others are not deferred.
    """

    def __init__(self, head: Any) -> None:
        self.call, self.before = head.forward, head.__dict__.get("forward")
        self.weights, self.size = tuple(head.parameters()), rows_of_chunk(head.weight.shape[0])
        self.calls = 0

    def __call__(self, rows: Tensor) -> Tensor:
        if self not in _deferred.get() or rows.shape[:-1].numel() <= self.size:
            out: Tensor = self.call(rows)
            return out
        device = rows.device.type
        is_cast = torch.is_autocast_enabled(device)
        autocast = (device, torch.get_autocast_dtype(device)) if is_cast else None
        return Logits.of(rows, Head(self.call, self.weights, autocast))


_deferred: ContextVar[tuple[_Deferring, ...]] = ContextVar("moe_mps_deferred", default=())
_lock = threading.Lock()


@contextmanager
def _deferring(head: Any) -> Iterator[None]:
    """The head gives Logits for more rows than a chunk has."""
    if next(head.children(), None) is not None or not hasattr(head, "weight"):
        yield
        return
    attributes = head.__dict__
    with _lock:
        ours = attributes.get("forward")
        if not isinstance(ours, _Deferring):
            attributes["forward"] = ours = _Deferring(head)
        ours.calls += 1
    try:
        with having(_deferred, (*_deferred.get(), ours)):
            yield
    finally:
        with _lock:
            ours.calls -= 1
            if ours.calls == 0 and attributes.get("forward") is ours:
                del attributes["forward"]
                if ours.before is not None:
                    attributes["forward"] = ours.before
