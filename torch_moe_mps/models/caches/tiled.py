"""Layers of a cache that hold keys and values in tiles of 4 or 2 bits.

Tile n has the tokens from 128 n on. A token reads tile 0, whose first tokens most attention goes to, and its
own tile as they are, and all tiles between them quantised. So the results of a model do not depend on how its
tokens are cut into calls, and tokens can be taken back as long as their tile is still held as it is.

A layer holds both: `keys` and `values` are the first 128 tokens and the last ones, `key_tiles` and
`value_tiles` all tiles in front of the last token's. A tile is quantised by the first call that has tokens
behind it. When the dense tokens fill their buffer, those in front of the tile before the last token's go: so
a layer holds at most MOST_DENSE tokens as they are. A call of more tokens than SPARE has them all in a buffer
of its own until it is done.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._limits import KV_FORMATS
from ...ops.families.tiles import TILE, WORD_BYTES, TileFormat, elements_of_tiles
from . import growing
from .buffer import Buffer, buffer_of, columns_of, in_buffer_of, start_of
from .declared import TILES, Batched, DeclaredLayer, declaration_of
from .layers import Growing
from .tiled_states import TiledStates, can_be_tiled

SPARE = 2 * TILE  # dense tokens for which a new buffer has room
MOST_DENSE = 3 * TILE + SPARE


@functools.cache
def tiled_declaration(plain: type) -> DeclaredLayer | None:
    """The declaration of a layer of tiles that does what `plain` does."""
    base = declaration_of(plain)
    return None if base is None else base.with_more(TILES, batched=Batched.EACH)


class TiledLayer(Growing):
    """A layer that holds all tokens, most of them in tiles of 4 or 2 bits.

    Latents and what turns lie side by side, in one tensor of tiles, `key_tiles`, without factors.

    Attributes:
        keys, values: [B, Hk, R, D], the tokens that are held as they are.
        key_tiles, value_tiles: [B, Hk, N, words] int32, the first N tiles; None before there are any.
        left_out: the tokens from 128 on that are in tiles alone.
        dense_class: the class of a layer of states that no tiles can hold.
    """

    is_first = True
    has_tiles = True
    bits: Any
    dense_class: Any
    key_tiles: Any = None
    value_tiles: Any = None
    left_out: int = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._forget_tiles()

    def takes_bits(self, key_states: Tensor, value_states: Tensor) -> bool:
        return can_be_tiled(key_states, value_states, growing.are_latents(key_states, value_states))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and self.left_out:  # all that is computed from here on reads 16 bits
            self._open()
        return super().update(key_states, value_states, *args, **kwargs)

    def extend(self, key_states: Tensor, value_states: Tensor, takes_bits: bool) -> tuple[Tensor, Tensor]:
        if not takes_bits:
            self.__class__ = self.dense_class
            return self.update(key_states, value_states)
        tokens = key_states.shape[2]
        self.settle(tokens)
        spare, new = max(0, SPARE - tokens), (key_states, value_states)
        if growing.are_latents(*new):
            self.keys, self.values = growing.extended((self.keys, self.values), new, spare)
        else:
            (self.keys,) = growing.extended((self.keys,), (key_states,), spare)
            (self.values,) = growing.extended((self.values,), (value_states,), spare)
        self._seal((self.get_seq_length() - 1) // TILE)
        read = self._states()
        if tokens > SPARE:
            self._shorten(self._first_kept(), SPARE)
        return read

    def settle(self, tokens: int) -> None:
        """Quantises held tiles that the next tokens read so, and makes room for so many of them.

        A captured token is a program that does neither: it writes a token into spare capacity.
        """
        before = self.get_seq_length()
        if before == 0:
            return
        self._seal(before // TILE)
        if not self._has_room(tokens):
            self._shorten(self._first_kept(), max(tokens, SPARE))

    def is_settled(self, tokens: int) -> bool:
        """True if `settle` has nothing to do."""
        before = self.get_seq_length()
        return before == 0 or (before < (self._sealed() + 1) * TILE and self._has_room(tokens))

    def _has_room(self, tokens: int) -> bool:
        groups = [(self.keys, self.values)] if self._are_latents() else [(self.keys,), (self.values,)]
        buffers = [(buffer_of(states), states, beside) for states, *beside in groups]
        return all(b is not None and b.has_capacity(view, tokens, *beside) for b, view, beside in buffers)

    def _are_latents(self) -> bool:
        return growing.are_latents(self.keys, self.values)

    def _sealed(self) -> int:
        """N."""
        return 0 if self.key_tiles is None else self.key_tiles.shape[2]

    def _first_kept(self) -> int:
        """The first token behind tile 0 that stays as it is: of the tile before the last token's."""
        return max(TILE, ((self.get_seq_length() - 1) // TILE - 1) * TILE)

    def _parts(self) -> list[tuple[str, Tensor, TileFormat]]:
        """(attribute of its tiles, dense tokens, layout of its tiles) of what has tiles of its own."""
        layouts = _layouts(self.keys, self.values, self.bits)
        if len(layouts) == 2:
            return [("key_tiles", self.keys, layouts[0]), ("value_tiles", self.values, layouts[1])]
        together = growing.latents_together(self.keys, self.values)
        return [
            (
                "key_tiles",
                torch.cat((self.keys, self.values), -1) if together is None else together,
                layouts[0],
            )
        ]

    def _states(self) -> tuple[TiledStates, TiledStates]:
        """The keys and values of all tokens."""
        states = [
            TiledStates(whole, getattr(self, name), layout, self.left_out)
            for name, whole, layout in self._parts()
        ]
        if len(states) == 2:
            return states[0], states[1]
        first, second = self.keys.shape[3], self.values.shape[3]
        return states[0].columns(0, first), states[0].columns(first, second)

    def _seal(self, count: int) -> None:
        """Quantises tiles up to the one with this number."""
        sealed = self._sealed()
        if self.key_tiles is not None and count <= sealed:
            return
        for name, whole, layout in self._parts():
            tiles = _longer(getattr(self, name), count, whole, layout)
            if count > sealed:
                rows = whole[:, :, sealed * TILE - self.left_out : count * TILE - self.left_out]
                options = {"bits": layout.bits, "factors": layout.factors}
                torch.ops.moe_mps._seal_tiles_(rows, tiles, sealed, **options)
            setattr(self, name, tiles)

    def _shorten(self, first: int, spare: int) -> None:
        """Moves tile 0 and the tokens from `first` on to a buffer with room for so many more."""
        first = max(first, self.left_out + TILE)
        self._put_dense(
            [(whole[:, :, :TILE], whole[:, :, first - self.left_out :]) for _, whole, _ in self._parts()],
            spare,
        )
        self.left_out = first - TILE

    def _put_dense(self, parts: list[tuple[Tensor, Tensor]], spare: int) -> None:
        """Gives the layer other dense tokens: of each tensor some first and some last ones."""
        moved = []
        for head, tail in parts:
            tokens = head.shape[2] + tail.shape[2]
            buffer = Buffer.empty(head, tokens + spare, head.shape[3:])
            buffer.write(0, (head,))
            buffer.write(head.shape[2], (tail,))
            moved.append(buffer.view(0, tokens))
        if len(moved) == 1:
            moved = [*columns_of(moved[0], (self.keys.shape[3], self.values.shape[3]))]
        self.keys, self.values = moved

    def _open(self) -> None:
        """Holds all tokens as they are, or as their tiles have them."""
        with torch.no_grad():
            self.keys, self.values = (states.elements() for states in self._states())
        self.left_out = 0

    def get_seq_length(self) -> int:
        if not self.is_initialized or self.keys.numel() == 0:
            return 0
        return self.left_out + self.keys.shape[2]

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens.

        Where neither the new last tile is held as it is nor the cut is between two tiles, the tokens of this
        tile become what their codes stand for. `longest` tells where that does not happen.
        """
        if tokens_to_remove >= 0 or not self.is_initialized or self.left_out == 0:
            super().crop(tokens_to_remove)
            self._drop_tiles()
            return
        length = max(0, self.get_seq_length() + tokens_to_remove)
        own = length // TILE * TILE
        if length >= self.left_out + TILE or length <= TILE:
            rows = length - self.left_out if length > TILE else length
            self.keys, self.values = (
                in_buffer_of(states, states[:, :, :rows]) for states in (self.keys, self.values)
            )
            self.left_out = self.left_out if length > TILE else 0
        else:
            self._put_dense(
                [
                    (whole[:, :, :TILE], self._decoded(name, layout, length))
                    for name, whole, layout in self._parts()
                ],
                SPARE,
            )
            self.left_out = own - TILE
        self._drop_tiles()

    def _decoded(self, name: str, layout: TileFormat, length: int) -> Tensor:
        """The first tokens of the tile that has the last one of so many, as its codes have them."""
        own = length // TILE
        tiles = getattr(self, name)[:, :, own : own + 1]
        return elements_of_tiles(tiles, layout)[:, :, : length - own * TILE].to(layout.dtype)

    def _drop_tiles(self) -> None:
        """Drops tiles that are not full any more."""
        full = self.get_seq_length() // TILE
        if self._sealed() > full:
            for name, _, _ in self._parts():
                tiles = getattr(self, name)
                setattr(self, name, in_buffer_of(tiles, tiles[:, :, :full]))

    @property
    def step(self) -> int:
        return TILE

    def longest(self, tokens: int) -> int:
        dense = self.left_out == 0 or tokens <= TILE or tokens >= self.left_out + TILE
        return tokens if dense else tokens // TILE * TILE

    def cut(self, tokens: int) -> None:
        super().cut(tokens)
        if tokens > 0:
            self._seal(tokens // TILE)
            if (first := max(TILE, tokens // TILE * TILE)) > self.left_out + TILE:
                self._shorten(first, 0)

    def rates(self) -> tuple[int, int]:
        """(bytes that a token adds to the tiles, the most bytes of dense tokens), of all rows."""
        parts = [(whole.shape[:2].numel(), layout) for _, whole, layout in self._parts()]
        tiles = sum(heads * layout.words * WORD_BYTES // TILE for heads, layout in parts)
        dense = sum(heads * layout.width * layout.dtype.itemsize for heads, layout in parts)
        return tiles, dense * MOST_DENSE

    def reset(self) -> None:
        super().reset()
        self._forget_tiles()

    def _forget_tiles(self) -> None:
        self.key_tiles, self.value_tiles, self.left_out = None, None, 0

    def offload(self) -> None:
        super().offload()
        self._change_tiles(lambda tiles: tiles.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        self._change_tiles(lambda tiles: tiles.to(self.device, non_blocking=True))

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change_batch(change)
        self._change_tiles(lambda tiles: growing.with_spare(tiles, change))

    def _change_tiles(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("key_tiles", "value_tiles"):
            if (tiles := getattr(self, name)) is not None:
                setattr(self, name, change(tiles))


def _layouts(keys: Tensor, values: Tensor, bits: Any) -> list[TileFormat]:
    """The layouts of the tiles of keys and values; one for latents."""
    key_bits, value_bits = KV_FORMATS[bits]
    if growing.are_latents(keys, values):
        return [TileFormat(keys.shape[3] + values.shape[3], key_bits, keys.dtype, False)]
    return [
        TileFormat(keys.shape[3], key_bits, keys.dtype, False),
        TileFormat(values.shape[3], value_bits, values.dtype, True),
    ]


def tile_bytes(keys: Tensor, values: Tensor, bits: Any) -> int:
    """Bytes of a tile of all heads; 0 for keys and values that no tiles can hold."""
    if not can_be_tiled(keys, values, growing.are_latents(keys, values)):
        return 0
    words = sum(layout.words for layout in _layouts(keys, values, bits))
    return words * WORD_BYTES * keys.shape[0] * keys.shape[1]


def _longer(tiles: Any, count: int, like: Tensor, layout: TileFormat) -> Any:
    """A view of the tiles and of memory for those up to `count`."""
    held = 0 if tiles is None else tiles.shape[2]
    buffer = buffer_of(tiles)
    if buffer is not None and buffer.has_capacity(tiles, count - held):
        return buffer.view(start_of(tiles), count)
    capacity = count + growing.spare_for(count * TILE) // TILE
    buffer = Buffer(like.new_empty((*like.shape[:2], capacity, layout.words), dtype=torch.int32))
    if held:
        buffer.write(0, (tiles,))
    return buffer.view(0, count)
