"""Quantised weights, written and read, in the formats of _weight_formats.py; docs/weights.md compares them.

The scales of nvfp4 have no bits below 2^-9: groups whose largest magnitude is below 0.006 become zero.
Formats whose scales are integers are ggml's and searched (superblocks.py). All others are written bit for bit
as mlx.core.quantize does on a CPU, unless importance is given (ops/families/quantize.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._extension import host_library
from .._faults import synchronize
from .._weight_formats import BITS
from ..ops._checks import ACTIVATION_DTYPES, PACKED_DTYPES, Check
from ..ops._encoding import encode
from ..ops._formats import (
    Format,
    QuantizedWeight,
    aligned,
    decode,
    dequantize_values,
    pack,
    unpack,
)
from ..ops.families.quantize import CHUNK, _quantize_by_importance, chunks
from .superblocks import quantize_superblocks

SEARCHED = 1 << 22  # weights that are quantised by importance at a time: a GPU is full of them
# The same for modes whose scales are integers; on a CPU the cache of a core holds fewer.
IN_SUPERBLOCKS = 1 << 20


def requested_format(bits: int | None, group_size: int | None, mode: str | None) -> Format | None:
    """The format that optional arguments ask for, or None. Only mode "affine" needs bits.

    Raises: ValueError for a format that does not exist, and for a group_size or "affine" without bits.
    """
    if bits is not None or mode not in (None, "affine"):
        return Format(bits, group_size, "affine" if mode is None else mode)
    for argument, value in (("group_size", group_size), ("mode", mode)):
        if value is not None:
            known = ", ".join(map(str, BITS["affine"]))
            raise ValueError(f"moe_mps::quantize: {argument}={value!r} needs bits, one of {known}, got None")
    return None


@dataclass
class ErrorSums:
    """sum |weight - dequantised| and sum |weight| over quantised weights."""

    difference: float = 0.0
    magnitude: float = 0.0

    def add(self, groups: Tensor, values: Tensor) -> None:
        """float32 of one shape; `values` are overwritten."""
        self.add_sums(float(values.sub_(groups).abs_().sum()), float(groups.abs().sum()))

    def add_sums(self, difference: float, magnitude: float) -> None:
        self.difference += difference
        self.magnitude += magnitude

    @property
    def relative(self) -> float:
        """Relative error; 0 for weights that are all zero."""
        return self.difference / self.magnitude if self.magnitude > 0 else 0.0


def _check_weight(weight: Tensor, format: Format) -> None:
    check = Check("quantize")
    check.dtype("weight", weight, ACTIVATION_DTYPES)
    check.rank("weight", weight, (2, 3))
    if weight.is_meta:
        check.fail("weight", "a tensor with values", "one on meta")
    if weight.shape[-1] % format.multiple != 0:
        expected = f"of a last dimension that is a multiple of {format.multiple}"
        check.fail("weight", expected, tuple(weight.shape))


def check_finite(check: Check, argument: str, stack: Tensor) -> None:
    """Checks sums of magnitudes, which no range of values exceeds; takes 6 % of the time of quantising."""
    for index in chunks(stack, CHUNK):
        if not torch.isfinite(stack[index].abs().sum(dtype=torch.float32)):
            check.fail(argument, "finite", "NaN, inf or a range over that of float32")


def check_importance(check: Check, argument: str, importance: Tensor) -> None:
    if not bool((torch.isfinite(importance) & (importance >= 0)).all()):
        check.fail(argument, "finite and not negative", "NaN, inf or a negative number")


@torch.no_grad()
def quantize(
    weight: Tensor,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    *,
    importance: Tensor | None = None,
) -> QuantizedWeight:
    """Quantise a matrix, or each matrix of a stack, along the last dimension.

    Args:
        weight: [R, C] or [E, R, C], float32, float16 or bfloat16, any strides; C a multiple of group_size,
            or of 256 in modes whose scales are integers.
        bits, group_size, mode: see Format.
        importance: float32 [C], or [E, C] for a stack, in mode affine with 2 bits and more, and in modes
            whose scales are integers: the mean square of what each input is, or another number that is not
            negative; it counts as a thousandth of its group's mean at least, and no weight is further off
            than the largest magnitude of its group. Then sum importance * (weight - dequantised)^2 of no
            group is larger than by MLX's rule, which chooses without it. Modes whose scales are integers
            always search: None is the same importance for all.

    Returns: QuantizedWeight(packed, scales, zeros, format). In mode affine, scales and zeros have the dtype
        of `weight`. Memory other than the result stays under about 10 MiB, 25 MiB by importance, and
        100 MiB in modes whose scales are integers.

    Raises: ValueError for a shape, dtype or format that does not fit, for weights that are not finite, and
        for importance that is negative or not finite; torch.AcceleratorError if the GPU fails.
    """
    format = Format(bits, group_size, mode)
    _check_weight(weight, format)
    stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
    check = Check("quantize")
    check_finite(check, "weight", stack)
    if importance is not None:
        named = "[E, C]" if weight.dim() == 3 else "[C]"
        check.tensor(
            "importance", importance, (*weight.shape[:-2], weight.shape[-1]), named, (torch.float32,)
        )
        check_importance(check, "importance", importance)
        check_weighed(check, format)
        importance = importance.view(len(stack), -1)
    out = quantize_stack(stack, format, importance=importance)
    if weight.dim() == 2:
        return out.map(lambda tensor: tensor.squeeze(0))
    return out


def check_weighed(check: Check, format: Format, weight: str = "weight") -> None:
    """Raises: ValueError for a format whose scales no importance can choose."""
    if format.bits == 1 or format.scale_type:
        expected = "for affine formats of 2 bits and more, or ggml's"
        check.fail("importance", expected, f"{format} for {weight}")


def _device_for(stack: Tensor, format: Format, importance: Tensor | None) -> torch.device:
    """Device that quantises: a search runs on a GPU where there is one, also for weights on the CPU.

    MLX's rule has MLX's bits on a CPU alone, because GPUs divide differently; mps has no float8.
    """
    cpu, mps = torch.device("cpu"), torch.device("mps")
    if stack.device.type not in ("cpu", "mps"):
        return stack.device
    searches = format.integers is not None or (importance is not None and host_library())
    return mps if searches and torch.backends.mps.is_available() else cpu


def _at_once(format: Format, device: torch.device, by_importance: bool) -> int:
    """Number of weights quantised at a time."""
    if format.integers is not None:
        return CHUNK if device.type == "cpu" else IN_SUPERBLOCKS
    return SEARCHED if by_importance else CHUNK


def _by_rule(chunk: Tensor, format: Format, errors: ErrorSums | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed, scales and zeros by MLX's rule."""
    groups = chunk.float().unflatten(-1, (-1, format.group_size))
    codes, scales, zeros = encode(groups, chunk.dtype, format)
    if zeros is not None:
        scales, zeros = scales.to(chunk.dtype), zeros.to(chunk.dtype)
    if errors is not None:
        errors.add(groups, decode(codes, scales, zeros, format))
    return pack(codes.flatten(-2), format.bits), scales, zeros


def _by_search(
    chunk: Tensor, importance: Tensor | None, format: Format, errors: ErrorSums | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed, scales and zeros by importance [E, C]; None, the same for all, where scales are integers."""
    if format.integers is not None:
        weights = None if importance is None else importance[:, None]
        *tensors, sums = quantize_superblocks(chunk.float(), weights, format, format.integers)
    else:
        assert importance is not None  # formats without integers are searched by importance alone
        *tensors, sums = _quantize_by_importance(chunk, importance, format.name)
    if errors is not None:
        errors.add_sums(*sums.flatten(0, -2).sum(0).tolist())
    packed, scales, zeros = tensors
    return packed, scales, zeros


@torch.no_grad()
def quantize_stack(
    stack: Tensor, format: Format, errors: ErrorSums | None = None, importance: Tensor | None = None
) -> QuantizedWeight:
    """quantize for a checked [E, R, C] and [E, C]; adds its errors to `errors`."""
    out = QuantizedWeight.empty(stack.shape, stack.dtype, stack.device, format)
    if stack.numel() == 0:
        return out
    codes = out.packed.view(torch.int32)
    device = _device_for(stack, format, importance)
    if importance is not None:  # relative, so that float32 holds the sums
        importance = importance / importance.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        importance = importance.to(device)
    for index in chunks(stack, _at_once(format, device, importance is not None)):
        chunk = stack[index].to(device)
        if importance is None and format.integers is None:
            packed, scales, zeros = _by_rule(chunk, format, errors)
        else:
            chunk_importance = None if importance is None else importance[index[0]]
            packed, scales, zeros = _by_search(chunk, chunk_importance, format, errors)
        # torch copies from mps to no address on the CPU that is no multiple of 4, as that of scales may be.
        codes[index], out.scales[index] = packed, scales.to(stack.device)
        if out.zeros is not None and zeros is not None:
            out.zeros[index] = zeros.to(stack.device)
    synchronize(device)  # before wrong numbers are taken for those of the weight
    return out


@torch.no_grad()
def dequantize(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """Dense weights [..., R, C], rounded as by mlx.core.dequantize.

    Args:
        weight: as `quantize` returns it. Tensors from elsewhere become one by
            QuantizedWeight(packed, scales, zeros, Format.named("affine4_64")); int32 is accepted for uint32.
        dtype: of the result, one of floats; None means the dtype of `scales` in mode affine, and bfloat16 in
            the others.

    Raises: ValueError for an invalid shape or dtype, TypeError if `weight` is not a QuantizedWeight.
    """
    check = Check("dequantize")
    if not isinstance(weight, QuantizedWeight):
        got = type(weight).__name__
        raise TypeError(
            f"moe_mps::dequantize: weight must be a QuantizedWeight, as quantize returns it, got {got}"
        )
    packed, scales, zeros, format = weight.packed, weight.scales, weight.zeros, weight.format
    if not isinstance(format, Format):
        check.fail("format", "a Format", repr(format))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        check.fail("dtype", "a dtype of floats", repr(dtype))
    check.dtype("packed", packed, PACKED_DTYPES)
    format.check_columns(check, "C, the input dimension of packed,", format.columns(packed.shape[-1]))
    shape = (*packed.shape[:-1], format.columns(packed.shape[-1]))
    format.check_scales(check, "", scales, zeros, shape, "..., C")
    if not format.is_affine or zeros is None:
        return dequantize_values(packed, scales, zeros, format).to(dtype or torch.bfloat16)
    # In the dtype of the scales, rounded after the product and after the sum.
    q = unpack(packed, format).to(scales.dtype).unflatten(-1, (-1, format.group_size))
    values = (q * scales.unsqueeze(-1)).add_(zeros.unsqueeze(-1)).flatten(-2)
    return values.to(dtype or scales.dtype)


def repack_mxfp4_blocks(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """MXFP4 as gpt-oss checkpoints store it -> mode mxfp4, by reinterpreting the bytes.

    Args:
        blocks: uint8 [..., R, C / 32, 16], two values per byte, the first in the lower half.
        scales: uint8 [..., R, C / 32].

    Returns: QuantizedWeight(packed [..., R, C / 8] uint32, scales, None, format), on the memory of `blocks`
        if that is contiguous.

    Raises: ValueError for a shape or dtype that does not fit.
    """
    check = Check("repack_mxfp4_blocks")
    check.dtype("blocks", blocks, (torch.uint8,))
    check.dtype("scales", scales, (torch.uint8,))
    check.shape("blocks", blocks, (*scales.shape, 16), "[..., R, C / 32, 16]")
    packed = aligned(blocks).flatten(-2)
    return QuantizedWeight(packed.view(torch.int32).view(torch.uint32), scales, None, Format(mode="mxfp4"))
