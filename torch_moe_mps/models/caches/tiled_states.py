"""Keys or values of a cache of tiles of 4 or 2 bits, read by the operator `_tiled_attention`."""

from typing import Any

import torch
from torch import Tensor

from ...ops._checks import ACTIVATION_DTYPES
from ...ops.families.attention import MAX_HEAD, MAX_VALUE_HEAD
from ...ops.families.tiles import TILE, WIDTH, TileFormat, elements_of_tiles
from ..basics.tensors import Deferred
from .quantized_states import PLAIN

_ATEN = torch.ops.aten
_OF_EVERYTHING = (_ATEN.detach.default, _ATEN.alias.default)


def can_be_tiled(keys: Tensor, values: Tensor, together: bool) -> bool:
    """True if attention to tiles takes keys and values. `together`, as latents, they share tiles."""
    if not all(type(x) in PLAIN and x.dim() == 4 and x.dtype in ACTIVATION_DTYPES for x in (keys, values)):
        return False
    key_width, value_width = keys.shape[3], values.shape[3]
    if together:
        key_width, value_width = key_width + value_width, key_width
    fits = key_width <= MAX_HEAD and value_width <= MAX_VALUE_HEAD
    return fits and all(width > 0 and width % WIDTH == 0 for width in (key_width, value_width))


class TiledStates(Deferred):
    """[B, Hk, S, D], of which the tokens from 128 on up to the last token's tile are quantised for it.

    Its elements are what the last token reads. A token in front of it reads its own tile as it is, too, which
    only `_tiled_attention` does.

    Attributes:
        dense: [B, Hk, R, W], the tokens that are held as they are: all but `left_out` from 128 on.
        tiles: [B, Hk, N, words], as `_seal_tiles_` writes them, of the W columns.
        tile: its layout.
        left_out: S - R, whole tiles.
        first: the first of its D columns.
    """

    dense: Tensor
    tiles: Tensor
    tile: TileFormat  # type: ignore[assignment]  # torch has a method of this name
    left_out: int
    first: int

    @staticmethod
    def __new__(
        cls,
        dense: Tensor,
        tiles: Tensor,
        tile: TileFormat,
        left_out: int,
        columns: tuple[int, int] | None = None,
    ) -> "TiledStates":
        """`columns`: the first one and their number; all without it."""
        *rows, tokens, width = dense.shape
        first, width = columns or (0, width)
        shape = (*rows, left_out + tokens, width)
        attributes = {"dense": dense, "tiles": tiles, "tile": tile, "left_out": left_out, "first": first}
        return cls.made(shape, dense.dtype, dense.device, **attributes)

    @property
    def is_whole(self) -> bool:
        """True if it has all columns of its tiles."""
        return self.shape[3] == self.tile.width

    def columns(self, first: int, width: int) -> "TiledStates":
        """Some of all columns of the tiles."""
        return TiledStates(self.dense, self.tiles, self.tile, self.left_out, (first, width))

    def elements(self) -> Tensor:
        own = max(0, self.shape[2] - 1) // TILE  # the last token's tile
        states = self.dense
        if own > 1:
            between = elements_of_tiles(self.tiles[:, :, 1:own], self.tile).to(states.dtype)
            parts = (states[:, :, :TILE], between, states[:, :, own * TILE - self.left_out :])
            states = torch.cat(parts, 2)
        return states[..., self.first : self.first + self.shape[3]]

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0] if func in _OF_EVERYTHING else NotImplemented
