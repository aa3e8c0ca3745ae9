"""Argument checks: a failure is one line that names operator, argument, what was expected and what came."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# An argument `dtype` is a name: torch reads a number in its place unchecked, and 99 ends the process. float64
# is one of them beside a tensor that has it.
NAMED_DTYPES: dict[Any, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
ID_DTYPES: dict[Any, torch.dtype] = {"int32": torch.int32, "int64": torch.int64}
PACKED_DTYPES = (torch.uint32, torch.int32)
FLOAT32_MAX = torch.finfo(torch.float32).max
MAX_TOP_K = 64  # experts per token
MAX_EXPERTS = 1024
Options = TypeVar("Options", bound=tuple)


class Like(NamedTuple):
    """The shape and dtype of a tensor whose elements a backward does not need."""

    shape: torch.Size
    dtype: torch.dtype


def options_in(given: dict[str, Any], group: type[Options]) -> Options:
    """The arguments that a NamedTuple has as fields."""
    fields: tuple[str, ...] = vars(group)["_fields"]
    return group(*(given[name] for name in fields))


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as operators take it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def wide(x: Tensor) -> Tensor:
    """x in the dtype that a reference computes in: float32, or float64 if x has it."""
    return x if x.dtype == torch.float64 else x.float()


def wide_dtype(x: Tensor | Like) -> torch.dtype:
    """The dtype of wide(x)."""
    return torch.promote_types(x.dtype, torch.float32)


def widened(*tensors: Tensor) -> list[Tensor]:
    """Tensors in the dtype that a reference computes in with all of them."""
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return [tensor.double() if is_double else tensor.float() for tensor in tensors]


def is_of_shape(tensor: Tensor, sizes: Sequence[Any]) -> bool:
    """True if a tensor has these sizes. No two are compared if their numbers differ: sizes may be symbols."""
    return tensor.dim() == len(sizes) and all(
        own == size for own, size in zip(tensor.shape, sizes, strict=True)
    )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(map(dtype_name, dtypes))


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements fill their memory without gaps, in any order of dimensions."""
    step = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dimensions if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def _overlap(a: Tensor, b: Tensor) -> bool:
    """True if two dense tensors share memory.

    Only addresses within one storage are compared: on mps, addresses are those of buffer objects, which lie
    closer together than their buffers are long.
    """
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (first, end), (other_first, other_end) = (
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b)
    )
    return first < other_end and other_first < end


class Check:
    """The checks of one operator call. Symbolic sizes work and add their guards.

    Attributes:
        sizes: of the dimensions that the operator declares, by name.
    """

    def __init__(self, name: str):
        self.name = name
        self.sizes: dict[str, Any] = {}

    def dims(self, names: str) -> list[Any]:
        return [self.sizes[name] for name in names.split()]

    def fail(self, argument: str, expected: str, got: object) -> NoReturn:
        got = tuple(got.shape) if isinstance(got, Tensor) else got
        raise ValueError(f"moe_mps::{self.name}: {argument} must be {expected}, got {got}")

    def dtype(self, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
        if not isinstance(tensor, Tensor):
            self.fail(argument, "a tensor", None if tensor is None else type(tensor).__name__)
        if tensor.layout != torch.strided:
            self.fail(argument, "a dense tensor", str(tensor.layout).removeprefix("torch."))
        self.among_dtypes(argument, tensor.dtype, allowed)

    def among_dtypes(
        self, argument: str, dtype: torch.dtype, allowed: Sequence[torch.dtype] = ACTIVATION_DTYPES
    ) -> None:
        if dtype not in allowed:
            self.fail(argument, _names(allowed), _names([dtype]))

    def rank(self, argument: str, tensor: Tensor, ranks: Sequence[int]) -> None:
        if tensor.dim() not in ranks:
            expected = " or ".join(f"{rank}-D" for rank in ranks)
            self.fail(argument, expected, f"{tensor.dim()}-D of shape {tuple(tensor.shape)}")

    def shape(self, argument: str, tensor: Tensor, expected: Sequence, meaning: str) -> None:
        """`meaning` is the symbolic shape, such as "[T, K]"."""
        if not is_of_shape(tensor, expected):
            self.fail(argument, f"of shape {meaning} = {tuple(expected)}", tuple(tensor.shape))

    def tensor(
        self, argument: str, tensor: Tensor, expected: Sequence, meaning: str, dtypes: Sequence[torch.dtype]
    ) -> None:
        self.dtype(argument, tensor, dtypes)
        self.shape(argument, tensor, expected, meaning)

    def between(self, argument: str, value: int, low: int, high: int, meaning: str = "") -> None:
        if not low <= value <= high:
            self.fail(argument, f"between {low} and {high}{meaning}", value)

    def number(self, argument: str, value: float, low: float = -math.inf) -> None:
        """Checks that a number is infinite or in the range of float32, and at least `low`."""
        if not (abs(value) <= FLOAT32_MAX or abs(value) == math.inf):
            self.fail(argument, "a number in the range of float32", value)
        if value < low:
            self.fail(argument, f"at least {low}", value)

    def values(self, types: dict[str, str], given: dict[str, Any]) -> None:
        """Checks what every schema lets through: None for a tensor, and numbers that no float32 is near."""
        for argument, kind in types.items():
            value = given[argument]
            if value is None and kind == "Tensor":
                self.fail(argument, "a tensor", None)
            if value is not None and kind in ("float", "Optional[float]"):
                self.number(argument, value)

    def choice(self, argument: str, value: str, choices: Sequence[str]) -> None:
        if value not in choices:
            self.fail(argument, "one of " + ", ".join(choices), repr(value))

    def none(self, why: str, when: bool, **arguments: object) -> None:
        """Checks that arguments are not given, in a case that `why` names."""
        for argument, value in arguments.items():
            if when and value is not None:
                self.fail(argument, f"None {why}", value)

    def only(self, why: str, when: bool, **arguments: object) -> None:
        """Checks that arguments are given in that case, and in no other."""
        for argument, value in arguments.items():
            if (value is not None) != when:
                self.fail(argument, f"given {why}, and only then", value)

    def written(self, argument: str, tensor: Tensor) -> None:
        """Checks that outputs written in place are not expanded; empty tensors may be."""
        expanded = any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if expanded and tensor.numel() > 0:
            self.fail(argument, "free of expanded (stride-0) dimensions", f"strides {tensor.stride()}")

    def all_apart(self, written: Sequence[str], given: dict[str, Any]) -> None:
        """Checks that outputs written in place share no memory with other arguments. Real tensors only."""
        others = {argument: value for argument, value in given.items() if isinstance(value, Tensor)}
        for argument in written:
            if (own := others.pop(argument, None)) is None:
                continue
            for other, tensor in others.items():
                if tensor is own or (_is_dense(tensor) and _is_dense(own) and _overlap(own, tensor)):
                    self.fail(argument, f"free of overlap with {other}", "a view of the same memory")

    def same_device(self, **tensors: Tensor | None) -> None:
        """Checks that all given tensors are on the device of the first."""
        present = {argument: tensor for argument, tensor in tensors.items() if tensor is not None}
        first, reference = next(iter(present.items()))
        for argument, tensor in present.items():
            if tensor.device != reference.device:
                self.fail(argument, f"on the device of {first}, {reference.device}", tensor.device)
