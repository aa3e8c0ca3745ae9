"""The cache of a batch (continuous batching): sequences are admitted and finish while the others go on.

Sequence b has the last `lengths[b]` tokens in front of a common end, and a range of keys hides the rest from
it. Its prompt is read in a cache of its own, which is then copied in: recurrent states are exact, and nothing
is padded. Buffers have spare rows, so that only the admitted sequence is copied; where one finishes, the last
one takes its place.

Sequences that lose different numbers of tokens keep a common end: the sequence that loses more moves.
Layers whose attention needs the order of tokens move all that they show; in others, as many of the first
tokens of a sequence go behind its last ones.

The layers stay what they are: a view of a buffer has tokens, which end at the common end; any other tensor is
a state of each sequence. Shapes: B sequences, S tokens.
"""

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary
from transformers import DynamicCache, PreTrainedModel

from ..upstream.models import chosen_together
from . import growing
from .buffer import Buffer, buffer_of, changed, column_of, columns_of, start_of
from .declared import Batched, declared, is_in_layers
from .deferred_states import AnyKind, DeferredLayer, can_defer, committed, deferred
from .layers import LayerBase
from .prompt_cache import gives_back
from .quantized_states import QuantizedStates
from .rows import RowPlaces, Uncommitted
from .separate import Separate, is_separate
from .state import LayerState, Name, copy_of_cache, copy_of_layer, parts

# {state: the tensor with spare rows whose first ones it is}
_SPARE_ROWS: Any = WeakIdKeyDictionary()
_OTHER = "its cache holds another kind of states than those of the others"
_LEAST_CONTEXT = 4096  # tokens for which masks have room, where a model does not say how many it takes


class NotBatchable(ValueError):
    """A sequence cannot be in a batch, and why."""


class _Shown(NamedTuple):
    """The tokens of a buffer that tensors of a layer show side by side.

    `columns`: name, first column and width of each.
    """

    buffer: Buffer
    start: int
    tokens: int
    columns: list[tuple[Name, int, int]]

    @property
    def end(self) -> int:
        return self.start + self.tokens

    @property
    def spare(self) -> int:
        return self.buffer.capacity - self.end


class _Held(NamedTuple):
    """Copies by which tokens are taken back from what holds all of them.

    `states`: of all sequences, by layer; `layers`: of each sequence, by layer.
    """

    states: Mapping[int, dict[Name, Tensor]] = MappingProxyType({})
    layers: Mapping[int, list[Any]] = MappingProxyType({})


class BatchedCache:
    """The cache of several sequences, and the arguments of the call for their next tokens.

    Attributes:
        cache: of all sequences; None without any.
        lengths: how many tokens each sequence has.
        are_states: layers have states of all tokens, as recurrent ones, whose update is not deferred.
    """

    are_states = False

    def __init__(self, model: PreTrainedModel, deferrable: Mapping[int, AnyKind] = {}):
        """`deferrable`: {number of a layer whose update may be deferred: the kind of its states}."""
        self.cache: DynamicCache | None = None
        self.lengths: list[int] = []
        self._device, self._moved = model.device, list[int]()
        self._order: list[deque[int]] = []  # tokens of each sequence, as they lie in layers of any order
        config = model.config.get_text_config(decoder=True)
        self._is_separate = functools.partial(is_separate, pools=max(chosen_together(config).values()) > 1)
        self._separate: dict[int, list[Any]] = {}  # {number of a layer: layers of the sequences}
        context = max(getattr(config, "max_position_embeddings", None) or 0, _LEAST_CONTEXT)
        self._places, self._has_keys = RowPlaces(self._device, context), False
        self._left = 0  # steps until a layer has no room for a token
        self._held = _Held()
        self._deferrable, self._uncommitted = deferrable, Uncommitted()

    @staticmethod
    def rows_of_buffer(rows: int) -> int:
        """The rows that a buffer for so many sequences has."""
        return batch_capacity(rows)

    @staticmethod
    def capacity(rows: int, tokens: int) -> int:
        """Number of tokens that fit in memory for so many sequences of at most so many tokens."""
        return batch_capacity(rows) * (tokens + growing.spare_for(tokens))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def end(self) -> int:
        """The common end: how many tokens the longest sequence has."""
        return max(self.lengths, default=0)

    def is_full(self, tokens: int = 1) -> bool:
        """True if so many tokens of each sequence move all to larger memory."""
        return self._left < tokens

    def memory(self) -> int:
        """Bytes of all sequences, without spare capacity."""
        layers = [] if self.cache is None else [self.cache.layers[n] for n in self._shared(self.cache.layers)]
        separate = chain.from_iterable(self._separate.values())
        return sum(LayerState(layer).memory() for layer in chain(layers, separate))

    def admit(self, cache: DynamicCache, tokens: int, moved: int = 0) -> None:
        """Admits a sequence as the last one, by copy; its own cache is unchanged.

        Args:
            cache: of the sequence alone, without padding.
            tokens: that it has, which caches without keys do not count.
            moved: how far positions are from the number of tokens, where images take fewer or more.

        Raises: NotBatchable, or whatever ends it midway; the batch is as it was then.
        """
        if not is_in_layers(cache):
            raise NotBatchable(f"its cache is a {type(cache).__name__}, or has layers that are not declared")
        separate = [number for number, layer in enumerate(cache.layers) if self._is_separate(layer)]
        _check(cache, tokens, separate)
        states = [] if self.cache is None else [LayerState(layer) for layer in self.cache.layers]
        count, values = len(self), [state.values() for state in states]
        try:
            self._admit(cache, tokens, moved, separate)
        except BaseException:
            for state, value in zip(states, values, strict=True):
                state.replace(value)
            self._cut(count)
            raise

    def _admit(self, cache: DynamicCache, length: int, moved: int, separate: list[int]) -> None:
        if self.cache is None:
            self._begin(cache, length, separate)
        else:
            self._append(self.cache.layers, cache.layers, max(self.end, length), separate)
        self.lengths.append(length)
        self._moved.append(moved)
        self._order.append(deque(range(length)))
        self._uncommitted.rows = [*self._uncommitted.rows, 0]
        self._changed()

    def _begin(self, cache: DynamicCache, length: int, separate: list[int]) -> None:
        """The cache of the first sequence, whose states defer their updates if all may."""
        layers = [
            _own(layer) if number in separate else _copied(layer, length)
            for number, layer in enumerate(cache.layers)
        ]
        self._separate = {number: [layers[number]] for number in separate}
        with_states = [number for number in self._shared(layers) if _states(layers[number])]
        is_cut = all(gives_back(layers[number]) for number in separate)
        if is_cut and all(number in self._deferrable and can_defer(layers[number]) for number in with_states):
            for number in with_states:
                layers[number] = deferred(layers[number], self._deferrable[number])
        self.cache = copy_of_cache(cache, layers)

    def _append(self, layers: list[Any], others: list[Any], end: int, separate: list[int]) -> None:
        """Appends the layers of a sequence to the batch, whose longest sequence then has `end` tokens."""
        if separate != [*self._separate]:
            raise NotBatchable(_OTHER)
        pairs = [(layers[number], others[number]) for number in self._shared(others)]
        for layer, one in pairs:
            _check_alike(layer, one)
        for layer, one in pairs:
            _admit(layer, one, end)
        for number, separate_layers in self._separate.items():
            separate_layers.append(_own(others[number]))

    def finish(self, row: int) -> None:
        """Removes a sequence: the last one takes its number and its place."""
        assert self.cache is not None
        last = len(self) - 1
        self._uncommitted.rows = [*self._uncommitted.rows]
        for of_rows in self._of_rows():
            of_rows[row] = of_rows[last]
        end = max(self.lengths[:last], default=0)
        for number in self._shared(self.cache.layers) if last else ():
            _finish(self.cache.layers[number], row, last, end)
        self._cut(last)

    def _of_rows(self) -> list[list[Any]]:
        """The lists with a value for each sequence."""
        return [self.lengths, self._moved, self._order, self._uncommitted.rows, *self._separate.values()]

    def _cut(self, count: int) -> None:
        """Forgets what the lists have of all sequences but the first ones."""
        self._uncommitted.rows = [*self._uncommitted.rows]
        for of_rows in self._of_rows():
            del of_rows[count:]
        if count:
            self._changed()
        else:
            self.cache, self._separate = None, {}

    def alone(self, row: int) -> DynamicCache:
        """A copy of one sequence: a cache of its own."""
        assert self.cache is not None
        order, places = [*self._order[row]], None
        if order != [*range(len(order))]:
            places = torch.tensor(order).argsort().to(self._device)
        layers = [
            _own(self._separate[number][row])
            if number in self._separate
            else _alone(layer, row, self.lengths[row], places)
            for number, layer in enumerate(self.cache.layers)
        ]
        layers = [
            committed(one, self._uncommitted.rows[row], self._deferrable[number])
            if isinstance(one, DeferredLayer)
            else one
            for number, one in enumerate(layers)
        ]
        return copy_of_cache(self.cache, layers)

    def arguments(self, tokens: int = 1) -> dict[str, Any]:
        """Arguments of the call for the next tokens of each sequence, beside tokens [B, T] and the cache."""
        self.reserve(tokens)
        self._uncommitted.update()
        if len(self) == 1 and self._separate and not self._moved[0]:
            return {"use_cache": True}  # a model that counts tokens by such a layer compares no positions
        mask = self._places.mask(self.end + tokens) if self._has_keys else None
        more = {} if mask is None else {"attention_mask": mask}
        return {"position_ids": self._places.positions(tokens), "use_cache": True, **more}

    def reserve(self, tokens: int) -> None:
        """Moves all to larger memory where a sequence has no spare capacity for so many tokens."""
        assert self.cache is not None
        if self.is_full(tokens):
            for number in self._shared(self.cache.layers):
                reserve(self.cache.layers[number], len(self), tokens)
            self._changed()

    def advance(self, tokens: int = 1) -> None:
        """Counts the tokens of each sequence that a call has added to the cache."""
        for order, length in zip(self._order, self.lengths, strict=True):
            order.extend(range(length, length + tokens))
        self.lengths = [length + tokens for length in self.lengths]
        self._places.advance(tokens)
        self._left -= tokens
        self._uncommitted.advance(tokens)

    def hold(self) -> None:
        """Copies states that hold all tokens, so that all tokens behind these can be taken back together.

        A copy reads and writes a state once, a small part of what a step reads; to compute the tokens again
        that are right in front of a wrong draft takes more.
        """
        assert self.cache is not None
        states = {
            number: {n: state.clone() for n, state in _states(self.cache.layers[number]).items()}
            for number in self._shared(self.cache.layers)
        }
        whole = {n: layers for n, layers in self._separate.items() if not gives_back(layers[0])}
        self._held = _Held(states, {number: [*map(_own, layers)] for number, layers in whole.items()})

    def take_back(self, tokens: Sequence[int]) -> None:
        """Undoes the last tokens of each sequence, for which there was capacity: the others are as they were.

        Sequences may lose different numbers of the last call's tokens. Where `are_states`, one
        loses all since `hold`, or none.
        """
        assert self.cache is not None
        end, least = self.end, min(tokens)
        for order, count in zip(self._order, tokens, strict=True):
            for _ in range(count):
                order.pop()
        self.lengths = [length - count for length, count in zip(self.lengths, tokens, strict=True)]
        self._left += least
        self._uncommitted.take_back(tokens)
        behind = {row: count - least for row, count in enumerate(tokens) if count > least}
        for number in self._shared(self.cache.layers):
            layer = self.cache.layers[number]
            take_back(layer, least, self.end, end - least - self.end)
            for row, count in behind.items():
                _move(layer, row, count, self.lengths[row])
        for number, layers in self._separate.items():
            for layer, count in zip(layers, tokens, strict=True):
                if count > 0 and number not in self._held.layers:
                    layer.crop(-count)
        for row, count in behind.items():
            self._order[row].rotate(-min(count, self.lengths[row]))
        if behind:
            self._places.place(self.lengths, self._moved, self.end + self._left)
        else:
            self._places.advance(-least)
        self._restore([row for row, count in enumerate(tokens) if count > 0])

    def _restore(self, rows: list[int]) -> None:
        """Gives sequences the states that are held; where all get them, the copies take their place."""
        assert self.cache is not None
        for number, layers in self._held.layers.items():
            for row in rows:
                self._separate[number][row] = layers[row]
            self._show_separate(number)
        for number, saved_states in self._held.states.items():
            layer = self.cache.layers[number]
            for name, state in _states(layer).items():
                if len(rows) == len(self):
                    _put_state(layer, name, saved_states[name], len(self))
                    continue
                for row in rows:
                    state[row].copy_(saved_states[name][row])
        self._held = _Held()

    def _shared(self, layers: Sequence[Any]) -> list[int]:
        """The numbers of layers that all sequences have together."""
        return [number for number in range(len(layers)) if number not in self._separate]

    def _show_separate(self, number: int) -> None:
        """Puts the sequences' own layers into the cache; a single one has its plain layer."""
        assert self.cache is not None
        layers = self._separate[number]
        self.cache.layers[number] = layers[0] if len(layers) == 1 else Separate(layers)

    def _changed(self) -> None:
        """Notes that there are other sequences, or that they lie in other memory."""
        assert self.cache is not None
        for number in self._separate:
            self._show_separate(number)
        shared = [self.cache.layers[number] for number in self._shared(self.cache.layers)]
        self._left = min(map(_spare, shared), default=growing.LEAST_SPARE)
        deferring = [layer for layer in self.cache.layers if isinstance(layer, DeferredLayer)]
        self._has_keys = bool(self._separate) or any(map(_shown, shared))
        is_cut = all(gives_back(layers[0]) for layers in self._separate.values())
        self.are_states = not is_cut or (not deferring and any(map(_states, shared)))
        self._uncommitted.tell(deferring, self._device)
        self._places.place(self.lengths, self._moved, self.end + self._left)


def why_not_cut(cache: DynamicCache) -> str | None:
    """Why no token can be taken back from a cache, for a person; None where one can."""
    kinds = (type(layer).__name__.removeprefix("Growing") for layer in cache.layers if _states(layer))
    kind = next(kinds, None)
    return None if kind is None else f"a {kind} has states that hold all tokens"


def take_back(layer: Any, tokens: int, end: int, first: int = 0) -> None:
    """Shows the tokens of a layer but for the last ones and some first ones.

    Args:
        end: how many tokens the longest sequence has then. The buffer of a window also has tokens before the
            shown ones, which the window has left.
    """
    for contents in _shown(layer):
        behind, shown = contents.end - tokens, layer.shown(end, contents.tokens - tokens - first)
        _show(layer, contents._replace(start=behind - shown, tokens=shown))
    _count(layer, end)


def _move(layer: Any, row: int, by: int, length: int) -> None:
    """Moves a sequence of so many tokens to the end of a layer, from an end so many tokens before."""
    for contents in _shown(layer):
        end = contents.end
        if layer.needs_order:
            count = min(contents.tokens, length)
            first = end - by - count
        else:
            count = min(by, length)
            first = end - by - length
        for part in parts(contents.buffer.tensor):
            moved = part[row, ..., first : first + count, :]
            if first + count > end - count:
                moved = moved.clone()
            part[row, ..., end - count : end, :] = moved


def reserve(layer: Any, rows: int, tokens: int) -> None:
    """Moves what has no spare capacity for so many tokens to a buffer that has some, and spare rows."""
    for contents in _shown(layer):
        if contents.spare >= tokens:
            continue
        spare, allocated = layer.spare_for(contents.tokens), len(parts(contents.buffer.rows)[0])
        larger = _larger(contents.buffer.tensor, max(rows, allocated), contents.tokens + spare)
        for row in range(rows):
            _write(larger, row, contents.tokens, contents, row)
        _put(layer, contents, larger, rows, 0, contents.tokens)


def _own(layer: Any) -> Any:
    """A copy of a sequence's own layer, which shares the buffers of tokens, read-only."""
    return copy_of_layer(layer, **tree_map(_own_tensor, LayerState(layer).values()))


def _own_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and buffer_of(value) is None else value


def _check(cache: Any, tokens: int, separate: Sequence[int]) -> None:
    """Raises: NotBatchable for a cache that cannot be batched: the reason is for a person."""
    if cache.offloading:
        raise NotBatchable("its cache is offloaded")
    for number, layer in enumerate(cache.layers):
        kind = type(layer).__name__.removeprefix("Growing")
        if number not in separate:
            _check_layer(layer, kind, tokens)
        elif not isinstance(layer, LayerBase):  # not accelerated: nothing runs once a sequence
            raise NotBatchable(f"a {kind} does not grow in place")


def _check_layer(layer: Any, kind: str, tokens: int) -> None:
    """Raises: NotBatchable for a layer whose sequences cannot share a common end."""
    if declared(layer).batched is Batched.NEVER:
        raise NotBatchable(f"a {kind} cannot be batched")
    if getattr(layer, "record_past", False):
        raise NotBatchable("its cache holds draft tokens")
    state = LayerState(layer)
    for name, tensor in state.tensors().items():
        batch, time, _ = state.axes(name)
        if buffer_of(tensor) is not None or tensor.numel() == 0:
            continue
        if batch is not None and tensor.shape[batch] != 1:
            raise NotBatchable(f"{name.key} of a {kind} is of {tensor.shape[batch]} sequences")
        if time is not None:
            raise NotBatchable(f"{name.key} of a {kind} does not grow in place")
    if (longest := max((contents.tokens for contents in _shown(layer)), default=0)) > tokens:
        raise NotBatchable(f"a {kind} holds {longest} tokens of a sequence of {tokens}")


def _check_alike(layer: Any, one: Any) -> None:
    buffers, other_buffers = (
        [([c[1:] for c in contents.columns], *_kind(contents.buffer.tensor)) for contents in _shown(item)]
        for item in (layer, one)
    )
    kind = layer.committed_class if isinstance(layer, DeferredLayer) else type(layer)
    if kind is not type(one) or buffers != other_buffers:
        raise NotBatchable(_OTHER)


def _kind(tensor: Any) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.shape[1:-2], tensor.shape[-1]


def _shown(layer: Any) -> list[_Shown]:
    """The buffers of a layer and their contents, without attributes derived from them."""
    by_id: dict[int, _Shown] = {}
    for name, tensor in LayerState(layer).tensors().items():
        buffer = buffer_of(tensor)
        if buffer is None or name.key in layer.declared.derived:
            continue
        view = tensor.packed if isinstance(tensor, QuantizedStates) else tensor
        column = column_of(view) * tensor.shape[-1] // max(1, view.shape[-1])
        contents = by_id.setdefault(id(buffer), _Shown(buffer, start_of(tensor), tensor.shape[-2], []))
        contents.columns.append((name, column, tensor.shape[-1]))
    return [*by_id.values()]


def _states(layer: Any) -> dict[Name, Tensor]:
    """State of a layer beside tokens, one for each sequence: [B, ...]."""
    tensors = LayerState(layer).tensors().items()
    return {name: tensor for name, tensor in tensors if tensor.dim() > 1 and buffer_of(tensor) is None}


def _put(layer: Any, contents: _Shown, with_spare: Any, rows: int, start: int, tokens: int) -> None:
    """Gives a layer the first rows of a tensor as the buffer of some of its tensors."""
    buffer = Buffer(changed(with_spare, lambda part: part[:rows]), rows=with_spare)
    _show(layer, contents._replace(buffer=buffer, start=start, tokens=tokens))


def _show(layer: Any, contents: _Shown) -> None:
    """Gives a layer the tokens of a buffer, up to the last written one."""
    whole = contents.buffer.view(contents.start, contents.tokens)
    for name, column, width in contents.columns:
        part = whole
        if width != whole.shape[-1]:
            _, part, _ = columns_of(whole, (column, width, whole.shape[-1] - column - width))
        LayerState(layer).put({name: part})


def batch_capacity(rows: int) -> int:
    """The rows that a new buffer has for so many: a power of two."""
    return 1 << (rows - 1).bit_length()


def _larger(like: Any, rows: int, tokens: int) -> Any:
    """A tensor of the dtype and widths of a buffer's, with so many rows and tokens.

    It is zero at first: a model's eager attention reads hidden tokens, too, with weight zero.
    """

    def larger(part: Tensor) -> Tensor:
        return part.new_zeros((rows, *part.shape[1:-2], tokens, part.shape[-1]))

    return changed(like, larger)


def _write(larger: Any, row: int, end: int, contents: _Shown, source: int = 0) -> None:
    """Writes a sequence's tokens to where they end with token `end` of a row, and zeros in front of them.

    A sequence that had this row may have left NaN, which a weight of zero does not hide.
    """
    for place, part in zip(parts(larger), parts(contents.buffer.tensor), strict=True):
        tokens = part[source, ..., contents.start : contents.end, :]
        place[row, ..., : end - contents.tokens, :] = 0
        place[row, ..., end - contents.tokens : end, :] = tokens


def _admit(layer: Any, one: Any, end: int) -> None:
    """Adds the sequence of layer `one` as the last row; the longest has `end` tokens then."""
    for contents, other in zip(_shown(layer), _shown(one), strict=True):
        like, with_spare, last = contents.buffer.tensor, contents.buffer.rows, contents.end
        rows, tokens = len(parts(like)[0]), max(contents.tokens, other.tokens)
        if len(parts(with_spare)[0]) == rows or last < tokens:
            with_spare = _larger(like, batch_capacity(rows + 1), tokens + layer.spare_for(tokens))
            last = tokens
            for row in range(rows):
                _write(with_spare, row, last, contents, row)
        _write(with_spare, rows, last, other)
        _put(layer, contents, with_spare, rows + 1, last - tokens, tokens)
    others = _states(one)
    for name, state in _states(layer).items():
        rows, with_spare = len(state), _SPARE_ROWS.get(state, state)
        if len(with_spare) == rows:
            with_spare = state.new_empty((batch_capacity(rows + 1), *state.shape[1:]))
            with_spare[:rows] = state
        if name in others:  # another's states have no uncommitted tokens behind them
            with_spare[rows] = others[name][0]
        _put_state(layer, name, with_spare, rows + 1)
    _count(layer, end)


def _finish(layer: Any, row: int, last: int, end: int) -> None:
    for contents in _shown(layer):
        if row != last:
            _write(contents.buffer.rows, row, contents.end, contents, last)
        tokens = min(contents.tokens, end)
        _put(layer, contents, contents.buffer.rows, last, contents.end - tokens, tokens)
    for name, state in _states(layer).items():
        with_spare = _SPARE_ROWS.get(state, state)
        if row != last:
            with_spare[row] = state[last]
        _put_state(layer, name, with_spare, last)
    _count(layer, end)


def _alone(layer: Any, row: int, length: int, places: Tensor | None) -> Any:
    """A copy of a layer with one sequence.

    Args:
        places: of its tokens in layers of any order; None where they lie in their order.
    """
    one = copy_of_layer(layer)
    for contents in _shown(layer):
        tokens = min(contents.tokens, length)
        copy = _larger(contents.buffer.tensor, 1, tokens + layer.spare_for(tokens))
        _write(copy, 0, tokens, contents._replace(start=contents.end - tokens, tokens=tokens), row)
        if places is not None and not layer.needs_order:
            for part in parts(copy):
                part[..., :tokens, :] = part[..., :tokens, :].index_select(-2, places)
        _put(one, contents, copy, 1, 0, tokens)
    for name, state in _states(layer).items():
        LayerState(one).put({name: state[row : row + 1].clone()})
    _count(one, length)
    return one


def _copied(layer: Any, tokens: int) -> Any:
    """A copy that shares the buffers of tokens, read-only; states are cloned."""
    copied = copy_of_layer(layer)
    LayerState(copied).put({name: state.clone() for name, state in _states(layer).items()})
    _count(copied, tokens)
    return copied


def _spare(layer: Any) -> int:
    """Number of tokens that a layer's buffers can take without growing."""
    return min((contents.spare for contents in _shown(layer)), default=growing.LEAST_SPARE)


def _put_state(layer: Any, name: Name, with_spare: Tensor, rows: int) -> None:
    state = with_spare[:rows]
    _SPARE_ROWS[state] = with_spare
    LayerState(layer).put({name: state})


def _count(layer: Any, tokens: int) -> None:
    if isinstance(layer, LayerBase):
        layer.note_batch(tokens)
