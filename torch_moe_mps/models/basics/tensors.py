"""Notes on tensors, values that are made once, tensors without memory of their own, and joined weights."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .scoped import Bounded
from .state import STATE

NO_END = torch.iinfo(torch.int32).max  # the end of a range of keys that ends with them
_constants = Bounded(64)


class Notes:
    """Knowledge of a tensor, kept in its attributes.

    Attributes:
        key_range: the range of keys that a mask of padding shows, in a tuple: int32 [B, 2], or None where no
            key is padding. Nobody reads such a mask's elements, for which the CPU would wait; in a captured
            call it has none.
        is_in_order: True for indices of keys that are all visible to their tokens.
        uncommitted: (inputs, counts) of a state: the inputs of the tokens behind it, and how many of these
            are accepted in each row. `caches.deferred_states` defines them.
        before: the state in front of tokens that are convolved. Eager code would join them with it.
        derived: {function: its result for this tensor}.
    """

    def __init__(self) -> None:
        self.key_range: tuple[Tensor | None] | None = None
        self.is_in_order = False
        self.uncommitted: tuple[Tensor, Tensor] | None = None
        self.before: Tensor | None = None
        self.derived: dict[Callable[..., Any], Any] = {}


_NOTHING = Notes()  # for tensors that have none


def notes_in(value: Any) -> Notes:
    """The notes on a tensor, to be read alone; empty ones for any other value."""
    return getattr(value, STATE, _NOTHING)


def notes_on(tensor: Tensor) -> Notes:
    """The notes on a tensor, made if it has none."""
    notes: Notes | None = getattr(tensor, STATE, None)
    if notes is None:
        notes = Notes()
        setattr(tensor, STATE, notes)
    return notes


def uncommitted_of(state: Tensor, tokens: int) -> dict[str, Any]:
    """The arguments of an operator for a state and so many tokens; none if its update is not deferred.

    One token is always accepted: it updates the state.
    """
    found = notes_in(state).uncommitted
    return {} if found is None else {"pending_": found[0], "counts": found[1], "keep": bool(tokens > 1)}


def derived(tensor: Tensor, make: Callable[[Tensor], Any]) -> Any:
    """Result of `make` for a tensor that all layers get, made once."""
    if torch.compiler.is_compiling():
        return make(tensor)
    known = notes_on(tensor).derived
    if make not in known:
        known[make] = make(tensor)
    return known[make]


def constant(key: Any, make: Callable[[], Tensor], count: int = 0) -> Tensor:
    """Result of `make`, held by its key as long as it has `count` rows or more.

    A fake tensor, made while a token is captured, is not held.
    """
    result: Tensor | None = _constants.get(key)
    if result is None or len(result) < count:
        result = make()
        if type(result) is Tensor:
            _constants[key] = result
    return result


# Questions about a tensor that its elements do not answer.
ABOUT = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__, Tensor.is_mps.__get__, Tensor.is_cuda.__get__, Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point, Tensor.__repr__,
}  # fmt: skip


class Deferred(Tensor):
    """A tensor without memory of its own. Whatever does not know its class gets its elements."""

    @classmethod
    def made(cls, shape: tuple[int, ...], dtype: torch.dtype, device: Any, **attributes: Any) -> Any:
        tensor: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        vars(tensor).update(attributes)
        return tensor

    def elements(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operator that needs no elements; NotImplemented if it needs them."""
        return NotImplemented

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch: not typed as a class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        known = cls.without_elements(func, args, kwargs)
        if known is not NotImplemented:
            return known
        args, kwargs = tree_map_only(Deferred, lambda item: item.elements(), (args, kwargs))
        return func(*args, **kwargs)


WEIGHTS = ("packed", "scales", "biases", "bias")  # tensors of a quantised linear layer


def may_join(parts: list[Tensor | None], rows: list[int]) -> bool:
    """True if weights of so many rows may lie in one memory: weights that already share one stay in it."""
    present = [part for part in parts if part is not None]
    alone = [part.untyped_storage().nbytes() == part.nbytes for part in present]
    alike = len({part.dtype for part in present}) < 2 and len({*map(id, present)}) == len(present)
    return alike and (all(alone) or _joined_before(parts, rows) is not None)


def _joined_before(parts: Sequence[Tensor | None], rows: list[int]) -> Tensor | None:
    """The rows of all parts where they lie in one memory, with zeros where there is none; None elsewhere."""
    places = [*itertools.accumulate(rows, initial=0)]
    present = [(place, part) for place, part in zip(places, parts, strict=False) if part is not None]
    place, first = present[0]
    width, memory = first.shape[1:].numel(), first.untyped_storage()
    start = first.storage_offset() - place * width
    if start < 0 or (start + places[-1] * width) * first.element_size() > memory.nbytes():
        return None
    for place, part in present:
        is_same = part.untyped_storage().data_ptr() == memory.data_ptr()
        if not is_same or part.storage_offset() != start + place * width:
            return None
    whole = first.detach().as_strided((places[-1], *first.shape[1:]), first.stride(), start)
    between = (whole[a:b] for part, a, b in zip(parts, places, places[1:], strict=False) if part is None)
    return None if any(bool(rest.any()) for rest in between) else whole


def joined_rows(parts: Sequence[Tensor | None], rows: list[int]) -> Tensor | None:
    """The rows of all parts, which become views of them; zeros for a bias that is not there.

    No weight is there twice. Rules join the layers of an MLP when a model is accelerated; a captured token
    asks for the layers that read one input. Whoever saves, moves or writes a parameter has a view.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if (whole := _joined_before(parts, rows)) is not None:
        return whole
    first, width = present[0], present[0].shape[1:]
    with torch.inference_mode(False), torch.no_grad():
        whole = first.new_zeros((sum(rows), *width))
        for part, view in zip(parts, whole.split(rows), strict=True):
            if part is not None:
                part.data = view.copy_(part)
    return whole
