"""Random tensors and numbers for good calls of the operators, which end each family's file as tables."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._declared import DTYPES, tensors_in
from ._formats import Format

T, H, E, K, I = 3, 64, 8, 2, 32
FORMAT = Format(4, 32, "affine")
HEAD = (16, 8)  # elements of a head of queries and keys, and of values


def whole_groups(width: int) -> int:
    return -(-width // 32) * 32


class Sample:
    """Sizes, no two equal, and random tensors.

    Attributes:
        T, H, E, K, I: tokens, hidden units, experts, experts of a token, and rows of an expert.
        D, V: elements of a head of queries and keys, and of values.
        format: of quantised weights, whose columns are a multiple of its groups.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        format: Format = FORMAT,
        tokens: int = T,
        wider: int = 1,
        head: tuple[int, int] = HEAD,
        seed: int = 0,
    ):
        """`wider`: so many times as many columns."""
        self.device, self.dtype, self.format = device, dtype, format
        self.T, self.E, self.K, (self.D, self.V) = tokens, E, K, head
        columns = (format.multiple,) * 2 if format.multiple > 32 else (H, I)
        self.H, self.I = (wider * size for size in columns)
        self._generator = torch.Generator().manual_seed(seed)

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype or self.dtype).to(self.device)

    def of(self, line: str, **others: Any) -> dict[str, Any]:
        """Random tensors, in a line as an operator declares them, and other arguments.

        `s.of("q[2, T, 4, D] sinks[4]:float32", scale=0.5)`: sizes are numbers and attributes.
        """
        made = {
            name: self.values(*shape.result(vars(self)), dtype=DTYPES[kind][0] if kind else None)
            for name, (shape,), kind in tensors_in(line)
        }
        return made | others

    def integers(self, high: int, *shape: int, dtype: torch.dtype, low: int = 0) -> Tensor:
        whole = torch.randint(low, high, shape, generator=self._generator, dtype=torch.int64)
        return whole.to(dtype).to(self.device)

    def codes(self, *shape: int) -> Tensor:
        """Random packed codes, int32."""
        return self.integers(2**31, *shape, dtype=torch.int32, low=-(2**31))

    def quantized(
        self, prefix: str, rows: int, columns: int, experts: tuple[int, ...] = (E,)
    ) -> dict[str, Tensor | None]:
        """Weights of about 1."""
        counts = self.format.scales_of(columns)
        shape = (*experts, rows, self.format.packed_columns(columns))
        size = 2.0 ** (-6 - self.format.bits) if self.format.stream_bits else 0.25
        return {
            f"{prefix}packed": self.codes(*shape),
            f"{prefix}scales": self._scales(*experts, rows, counts[0]),
            f"{prefix}zeros": self._held(size, *experts, rows, counts[1]) if self.format.has_zeros else None,
        }

    def _held(self, size: float, *shape: int) -> Tensor:
        """Numbers of about a size as the format holds them: integers are the bits of halves or of floats."""
        numbers = self.values(*shape) * size
        if self.format.is_affine:
            return numbers
        if self.format.scale_type:
            return numbers.float().view(torch.int32)
        return numbers.half().view(torch.int16)

    def _scales(self, *groups: int) -> Tensor:
        if self.format.stream_bits:
            return self.integers(256, *groups, dtype=torch.uint8)
        if self.format.scale_type == "e4m3":
            return 40 + self.integers(16, *groups, dtype=torch.uint8)
        if self.format.scale_type == "e8m0":
            lowest = 118 if self.format.number_type == "e4m3" else 124
            return lowest + self.integers(3, *groups, dtype=torch.uint8)
        more = 1 if self.format.codebook is None else 4  # elements of points are larger than codes
        return self._held(2.0 ** (-more - self.format.bits), *groups)

    # Arguments that several families take.

    @property
    def topk_ids(self) -> Tensor:
        """[T, K]; one of them is no expert."""
        ids = torch.tensor([[0, 7], [3, E], [5, 3]], dtype=torch.int32, device=self.device)
        return ids.repeat(-(-self.T // 3), 1)[: self.T]

    @property
    def topk_weights(self) -> Tensor:
        return self.values(self.T, K, dtype=torch.float32).abs()

    @property
    def one_token(self) -> dict[str, Tensor]:
        ids = torch.tensor([[3, 0]], dtype=torch.int32, device=self.device)
        weights = self.values(1, K, dtype=torch.float32)
        return {"x": self.values(1, self.H), "topk_weights": weights, "topk_ids": ids}

    @property
    def routed(self) -> dict[str, Any]:
        """One token, whose experts its logits choose."""
        none = {"topk_weights": None, "topk_ids": None}
        return {"x": self.values(1, self.H), "logits": self.values(1, self.E), "top_k": K, **none}

    @property
    def shared(self) -> dict[str, Tensor]:
        """Arguments for an expert that all tokens share, and for the residual."""
        return self.of("shared_gate[T, 1] shared_out[T, H] residual[T, H]")

    @property
    def strided(self) -> Tensor:
        """[T, H], column after column."""
        return self.values(self.H, self.T).t()

    @property
    def norm(self) -> dict[str, Any]:
        """Arguments for the norm of an operator's input."""
        return {"norm_weight": self.values(self.H), "norm_weight_offset": 1.0}

    @property
    def q(self) -> Tensor:
        return self.values(2, self.T, 4, self.D)

    @property
    def k(self) -> Tensor:
        return self.values(2, self.T, 2, self.D)


Calls = dict[str, Callable[[Sample], dict[str, Any]]]  # a good one of each operator
Changes = dict[str, Callable[[Sample], list[dict[str, Any]]]]  # to it, which lead to other paths
