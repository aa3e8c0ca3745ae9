"""Quantised expert weights: the formats of `torch.ops.moe_mps.expert_qmm`, and models quantised in place.

    format                      value                      bits per weight   mean error, normal weights
    affine, 8 bits, group 64    q * scale + bias           8.5                0.7 %
    affine, 4 bits, group 32    q * scale + bias           5                  8.5 %
    affine, 4 bits, group 64    q * scale + bias           4.5                9.7 %
    affine, 4 bits, group 128   q * scale + bias           4.25              10.7 %
    mxfp4                       e2m1(q) * 2^(scale - 127)  4.25              11.3 %

(q is unsigned; scales and biases in 16 bit; rounding to bfloat16 alone is 0.14 %.)
Both are written bit for bit as mlx.core.quantize writes them on a CPU: groups of consecutive values along the
last dimension, 32 / bits values per uint32, the first value in the lowest bits.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .ops._checks import ACTIVATION_DTYPES, Check
from .ops.quantized import check_format, dequantize_values, e8m0, unpack

# Values quantised at a time: enough to amortise the calls, with float32 temporaries of about 100 MiB.
CHUNK = 1 << 22
# mlx.core.quantize keeps scales of (nearly) constant groups away from zero with this.
SMALLEST_SCALE = 1e-7
# Halfway between neighbouring e2m1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. A tie goes to the smaller one.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E2M1_LARGEST = 6.0
INTERFACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # of transformers' experts


@dataclass(frozen=True)
class QuantizationFormat:
    """How weights are quantised: 4 or 8 bits, groups of 32, 64 or 128, mode "affine"; or 4, 32, "mxfp4".

    A group_size of None becomes 64 in mode "affine" and 32 in "mxfp4".
    """

    bits: int = 4
    group_size: int | None = None
    mode: str = "affine"

    def __post_init__(self):
        if self.group_size is None:
            object.__setattr__(self, "group_size", 32 if self.mode == "mxfp4" else 64)
        check_format(Check("quantize"), self.bits, self.group_size, self.mode)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "mxfp4" if self.mode == "mxfp4" else f"int{self.bits} group {self.group_size}"


def requested_format(bits: int | None, group_size: int | None, mode: str | None) -> QuantizationFormat | None:
    """The format that optional arguments ask for; None for none. Only mode "mxfp4" knows its bits.

    Raises: ValueError for a format that does not exist, and for a group_size or a mode without bits.
    """
    if bits is None and mode == "mxfp4":
        bits = 4
    if bits is not None:
        return QuantizationFormat(bits, group_size, "affine" if mode is None else mode)
    for argument, value in (("group_size", group_size), ("mode", mode)):
        if value is not None:
            raise ValueError(f"moe_mps::quantize: {argument}={value!r} needs bits, 4 or 8, got None")
    return None


class QuantizedWeight(NamedTuple):
    """packed [..., R, C * bits / 32] uint32; scales, biases [..., R, C / group_size]; no biases in mxfp4."""

    packed: Tensor
    scales: Tensor
    biases: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)


def _check_weight(weight: Tensor, format: QuantizationFormat) -> None:
    check = Check("quantize")
    check.dtype("weight", weight, ACTIVATION_DTYPES)
    check.rank("weight", weight, (2, 3))
    if weight.shape[-1] % format.group_size != 0:
        expected = f"of a last dimension that is a multiple of {format.group_size}"
        check.fail("weight", expected, tuple(weight.shape))


def _check_finite(check: Check, argument: str, stack: Tensor) -> None:
    """By the sum of magnitudes: no range in it is larger, and it takes 6 % of the time of quantising."""
    for index in _chunks(stack):
        if not torch.isfinite(stack[index].abs().sum(dtype=torch.float32)):
            check.fail(argument, "finite", "NaN, inf or a range over that of float32")


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device, format: QuantizationFormat) -> QuantizedWeight:
    *rows, columns = shape
    packed = torch.empty(*rows, columns * format.bits // 32, dtype=torch.uint32, device=device)
    groups = (*rows, columns // format.group_size)
    if format.mode == "mxfp4":
        return QuantizedWeight(packed, torch.empty(groups, dtype=torch.uint8, device=device), None)
    return QuantizedWeight(packed, *(torch.empty(groups, dtype=dtype, device=device) for _ in range(2)))


def _chunks(weight: Tensor) -> Iterator[tuple[int, slice]]:
    """Indices (matrix, rows) of pieces of about CHUNK values; a piece is a view, whatever the strides."""
    matrices, rows, columns = weight.shape
    step = max(1, CHUNK // max(1, columns))
    for matrix in range(matrices):
        for first in range(0, rows, step):
            yield matrix, slice(first, min(first + step, rows))


def _at_hand(piece: Tensor) -> Tensor:
    """On the CPU if it is on MPS: the bits must not depend on how a GPU divides."""
    return piece.cpu() if piece.device.type == "mps" else piece


def _quantize_affine(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [..., group_size] -> q uint8, scale, bias; in float32, in the order of operations of MLX.

    The end of the range with the larger magnitude becomes the bias, and the scale is adjusted so that zero is
    hit exactly: weights that are zero stay zero.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = 2**bits - 1
    low_is_edge = low.abs() > high.abs()
    scale = ((high - low) / largest).clamp(min=SMALLEST_SCALE)
    scale = torch.where(low_is_edge, scale, -scale)
    edge = torch.where(low_is_edge, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps == 0, scale, edge / steps)
    bias = torch.where(steps == 0, 0.0, edge)
    q = (groups - bias).div_(scale).round_().clamp_(0, largest).to(torch.uint8)
    return q, scale.squeeze(-1), bias.squeeze(-1)


def _quantize_mxfp4(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """float32 [..., 32] -> e2m1 codes uint8, e8m0 scales uint8.

    The scale is the smallest power of two at which the largest magnitude fits, so that nothing saturates. It
    stays at 2^-127 below that; mlx.core.quantize wraps around to 2^128 for such groups.
    """
    # MLX divides in the dtype of the weight, which decides when the magnitude is between two powers.
    fit = (groups.abs().amax(-1).to(dtype) / E2M1_LARGEST).float().view(torch.int32)
    field, fraction = fit >> 23, fit & ((1 << 23) - 1)
    scales = torch.where(field == 0, fraction > 1 << 22, field + (fraction > 0))
    scales = torch.where(fit == 0, 127, scales)
    scaled = groups * e8m0(254 - scales).unsqueeze(-1)
    magnitudes, code = scaled.abs(), torch.zeros_like(groups, dtype=torch.uint8)
    for midpoint in E2M1_MIDPOINTS:  # 4 times faster than torch.bucketize
        code += magnitudes > midpoint
    code += ((scaled < 0) & (code > 0)).to(torch.uint8) << 3
    return code, scales.to(torch.uint8)


def _pack(q: Tensor, bits: int) -> Tensor:
    """uint8 [..., C] -> int32 [..., C * bits / 32], the first value in the lowest bits."""
    if bits == 4:
        q = q[..., 0::2] | (q[..., 1::2] << 4)
    return q.contiguous().view(torch.int32)


@torch.no_grad()
def quantize(
    weight: Tensor, bits: int = 4, group_size: int | None = None, mode: str = "affine"
) -> QuantizedWeight:
    """Quantise a matrix, or a stack of matrices one after the other, along the last dimension.

    Args:
        weight: [R, C] or [E, R, C], float32, float16 or bfloat16, any strides; C a multiple of group_size.
        bits, group_size, mode: see QuantizationFormat.

    Returns: QuantizedWeight(packed, scales, biases). In mode affine, scales and biases have the dtype of
        `weight`. The memory beside the result stays under about 100 MiB.

    Raises: ValueError for a shape, dtype or format that does not fit, and for weights that are not finite.
    """
    format = QuantizationFormat(bits, group_size, mode)
    _check_weight(weight, format)
    stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
    _check_finite(Check("quantize"), "weight", stack)
    out = _quantize_stack(stack, format)
    if weight.dim() == 2:
        return QuantizedWeight(*(None if tensor is None else tensor.squeeze(0) for tensor in out))
    return out


@torch.no_grad()
def _quantize_stack(stack: Tensor, format: QuantizationFormat) -> QuantizedWeight:
    """quantize for [E, R, C] that was checked."""
    out = _empty(stack.shape, stack.dtype, stack.device, format)
    words = out.packed.view(torch.int32)
    for index in _chunks(stack):
        groups = _at_hand(stack[index]).float().unflatten(-1, (-1, format.group_size))
        if format.mode == "mxfp4":
            q, scales = _quantize_mxfp4(groups, stack.dtype)
        else:
            q, scales, biases = _quantize_affine(groups, format.bits)
            out.biases[index] = biases.to(stack.dtype)
        out.scales[index] = scales.to(out.scales.dtype)
        words[index] = _pack(q.flatten(-2), format.bits)
    return out


@torch.no_grad()
def dequantize(
    packed: Tensor,
    scales: Tensor,
    biases: Tensor | None,
    bits: int = 4,
    group_size: int | None = None,
    mode: str = "affine",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The dense weights [..., R, C], rounded as mlx.core.dequantize rounds them.

    Args:
        packed, scales, biases: as quantize returns them; int32 is accepted for uint32.
        bits, group_size, mode: see QuantizationFormat.
        dtype: of the result; None means that of `scales`, and bfloat16 in mode mxfp4.

    Raises: ValueError for a shape, dtype or format that does not fit.
    """
    format = QuantizationFormat(bits, group_size, mode)
    check = Check("dequantize")
    check.dtype("packed", packed, (torch.uint32, torch.int32))
    group_size, columns = format.group_size, packed.shape[-1] * 32 // bits
    check.shape("scales", scales, (*packed.shape[:-1], columns // group_size), "[..., C / group_size]")
    if format.mode == "mxfp4":
        check.dtype("scales", scales, (torch.uint8,))
        if biases is not None:
            check.fail("biases", "None for mode mxfp4", f"a tensor of shape {tuple(biases.shape)}")
        values = dequantize_values(packed, scales, None, bits, group_size, mode)
        return values.to(dtype or torch.bfloat16)
    check.dtype("scales", scales, ACTIVATION_DTYPES)
    if biases is None:
        check.fail("biases", "a tensor for mode affine", None)
    check.dtype("biases", biases, (scales.dtype,))
    check.shape("biases", biases, scales.shape, "[..., C / group_size]")
    # In the dtype of the scales, rounded after the product and after the sum.
    q = unpack(packed, bits, mode).to(scales.dtype).unflatten(-1, (-1, group_size))
    values = (q * scales.unsqueeze(-1)).add_(biases.unsqueeze(-1)).flatten(-2)
    return values.to(dtype or scales.dtype)


def repack_mxfp4_blocks(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """MXFP4 as gpt-oss checkpoints store it -> mode mxfp4, by reinterpreting the bytes.

    Args:
        blocks: uint8 [..., R, C / 32, 16], two values per byte, the first in the lower half.
        scales: uint8 [..., R, C / 32].

    Returns: QuantizedWeight(packed [..., R, C / 8] uint32, scales, None), on the memory of `blocks` if that
        is contiguous.

    Raises: ValueError for a shape or dtype that does not fit.
    """
    check = Check("repack_mxfp4_blocks")
    check.dtype("blocks", blocks, (torch.uint8,))
    check.dtype("scales", scales, (torch.uint8,))
    check.shape("blocks", blocks, (*scales.shape, 16), "[..., R, C / 32, 16]")
    packed = blocks.contiguous().flatten(-2)
    if packed.storage_offset() % 4 != 0:
        packed = packed.clone()
    return QuantizedWeight(packed.view(torch.int32).view(torch.uint32), scales, None)


@torch.no_grad()
def relative_error(weight: Tensor, quantized: QuantizedWeight, format: QuantizationFormat) -> float:
    """mean |weight - dequantised| / mean |weight| of a stack [E, R, C]; 0 for weights that are all zero."""
    difference = magnitude = 0.0
    for index in _chunks(weight):
        parts = [None if tensor is None else _at_hand(tensor[index]) for tensor in quantized]
        dense = _at_hand(weight[index]).float()
        difference += float((dense - dequantize_values(*parts, **format.to_dict())).abs().sum())
        magnitude += float(dense.abs().sum())
    return difference / magnitude if magnitude > 0 else 0.0


def is_experts(module: object) -> bool:
    """Whether a module has the experts interface of transformers' `use_experts_implementation`."""
    if not all(isinstance(getattr(module, flag, None), bool) for flag in INTERFACE):
        return False
    tensors = [getattr(module, projection, None) for projection in projections(module)]
    dense = all(isinstance(tensor, Tensor) and tensor.dim() == 3 for tensor in tensors)
    return dense or is_quantized(module)


def is_quantized(experts: nn.Module) -> bool:
    """Whether quantize_module, or the loading of a checkpoint, gave the module a format."""
    return getattr(experts, "quantization", None) is not None


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """{name: module} of all experts of a model, in its order."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def projections(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _rows_first(module: nn.Module, projection: str) -> Tensor:
    """The view [E, output, input] of a dense parameter."""
    weight = getattr(module, projection).detach()
    return weight.mT if module.is_transposed else weight


def check_module(name: str, module: nn.Module, format: QuantizationFormat) -> None:
    """Raise the one-line error for a module that cannot be quantised, before anything is changed."""
    check = Check("quantize_experts")
    for projection in projections(module):
        weight = _rows_first(module, projection)
        argument = f"{name}.{projection}"
        if hasattr(weight, "placements"):  # a DTensor
            check.fail(argument, "a plain tensor, without expert parallelism", type(weight).__name__)
        if weight.is_meta:
            check.fail(argument, "loaded and not offloaded", "a tensor on the meta device")
        if weight.shape[-1] % format.group_size != 0:
            expected = f"of an input dimension that is a multiple of group_size {format.group_size}"
            check.fail(argument, expected, weight.shape[-1])
        _check_finite(check, argument, weight)


def _check_adapters(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """An adapter of PEFT computes with the dense parameters that quantising removes."""
    names = {id(module): name for name, module in modules.items()}
    for adapter in model.modules():
        if hasattr(adapter, "get_base_layer") and id(adapter.get_base_layer()) in names:
            name = names[id(adapter.get_base_layer())]
            raise ValueError(
                f"moe_mps::quantize_experts: a PEFT adapter is on {name}; merge_and_unload() it first"
            )


def _check_one_method(model: nn.Module) -> None:
    for module in model.modules():
        stored = getattr(getattr(module, "config", None), "quantization_config", None)
        get = stored.get if isinstance(stored, Mapping) else partial(getattr, stored)
        method = get("quant_method", None)
        if method not in (None, "moe_mps"):
            raise ValueError(
                "moe_mps::quantize_experts: the model is already quantised with "
                f"{getattr(method, 'value', method)}: a checkpoint holds one method; use bits=None"
            )


def _replace(module: nn.Module, projection: str, quantized: QuantizedWeight) -> None:
    delattr(module, projection)
    # int32 where quantize gives uint32: torch 2.13 cannot unpickle uint32, and lacks operations for it.
    quantized = quantized._replace(packed=quantized.packed.view(torch.int32))
    for suffix, tensor in zip(QuantizedWeight._fields, quantized, strict=True):
        if tensor is not None:
            module.register_parameter(f"{projection}_{suffix}", nn.Parameter(tensor, requires_grad=False))


def empty_quantized_module(module: nn.Module, format: QuantizationFormat) -> None:
    """Replace the dense parameters by uninitialised quantised ones on their devices, to load a checkpoint."""
    for projection in projections(module):
        weight = _rows_first(module, projection)
        _replace(module, projection, _empty(weight.shape, weight.dtype, weight.device, format))
    module.quantization = format


def quantize_module(module: nn.Module, format: QuantizationFormat) -> list["QuantizedProjection"]:
    """Replace `<projection>` by `<projection>_packed` (int32), `_scales` and, in mode affine, `_biases`.

    The module is one that passed check_module. Nothing is replaced before everything is computed: a failure,
    for want of memory, leaves a module that works. Sets `module.quantization`.
    """
    done, replacements = [], {}
    for projection in projections(module):
        weight = _rows_first(module, projection)
        quantized = replacements[projection] = _quantize_stack(weight, format)
        error = relative_error(weight, quantized, format)
        done.append(QuantizedProjection(projection, error, weight.nbytes, quantized.nbytes))
    for projection, quantized in replacements.items():
        _replace(module, projection, quantized)
    module.quantization = format
    return done


class QuantizedProjection(NamedTuple):
    """What became of one parameter; `error` is mean |dense - quantised| / mean |dense|."""

    projection: str
    error: float
    dense_bytes: int
    quantized_bytes: int


@dataclass
class QuantizationReport:
    """What quantize_experts did; prints as a table."""

    format: QuantizationFormat
    modules: dict[str, list[QuantizedProjection]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def dense_bytes(self) -> int:
        return sum(entry.dense_bytes for entries in self.modules.values() for entry in entries)

    @property
    def quantized_bytes(self) -> int:
        return sum(entry.quantized_bytes for entries in self.modules.values() for entry in entries)

    def __str__(self) -> str:
        """Equal layers are on one line, with the mean and the largest of their errors."""
        reasons = Counter((_any_layer(name), why) for name, why in self.skipped.items())
        lines = [f"{name} ({n}): left as it is, {why}" for (name, why), n in reasons.items()]
        if self.modules:
            return "\n".join(self._table() + lines)
        return "\n".join(lines) or (
            "No experts with transformers' experts interface found; nothing is quantised."
        )

    def _table(self) -> list[str]:
        groups: dict[str, list[QuantizedProjection]] = {}
        for name, entries in self.modules.items():
            for entry in entries:
                groups.setdefault(_any_layer(f"{name}.{entry.projection}"), []).append(entry)
        rows = [("parameter", "n", "mean error", "largest", "before", "after")]
        rows += [(name, str(len(entries)), *_summary(entries)) for name, entries in groups.items()]
        everything = [entry for entries in groups.values() for entry in entries]
        rows.append((f"all, {self.format}", str(len(everything)), *_summary(everything)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]


def _any_layer(name: str) -> str:
    """Numbers in the name of a module replaced by *."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _summary(entries: list[QuantizedProjection]) -> tuple[str, str, str, str]:
    errors = [entry.error for entry in entries]
    sizes = (sum(e.dense_bytes for e in entries), sum(e.quantized_bytes for e in entries))
    return (f"{sum(errors) / len(errors):.4f}", f"{max(errors):.4f}", *map(_mib, sizes))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _release_cache(module: nn.Module) -> None:
    """Give freed weights back to the system: PyTorch's MPS allocator keeps them for buffers of that size."""
    if any(parameter.device.type == "mps" for parameter in module.parameters()):
        torch.mps.empty_cache()


def _with_progress(items: Collection, enabled: bool) -> Iterable:
    """A progress bar where tqdm is installed, as it is with transformers."""
    if not enabled:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc="Quantising experts", unit="layer")


def quantize_experts(
    model: nn.Module,
    bits: int = 4,
    group_size: int | None = None,
    mode: str = "affine",
    *,
    modules: Mapping[str, nn.Module] | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Quantise the experts of a transformers model in place, layer by layer.

    The dense weights of a layer are freed before the next one is quantised, so the peak is the dense model
    plus one quantised layer. All checks come first: on their errors the model is unchanged.

    The modules run as experts implementation "moe_mps" from then on, for inference only. save_pretrained of
    `model`, and of the models of transformers within, keeps them quantised.

    Args:
        model: any module; experts are recognised by the interface of transformers' experts implementations.
        bits, group_size, mode: see QuantizationFormat.
        modules: the experts modules to quantise, by name; None means all of the model.
        progress: show a bar where tqdm is installed.

    Returns: a report with the relative error of each parameter, and what was left dense.

    Raises: ValueError for a format or a shape that does not fit; for weights that are not finite, offloaded,
        distributed or under an adapter of PEFT; and for a model with another quantisation method.
    """
    # Not at the top: that module knows transformers, this one is needed without it.
    from .transformers.experts import pin_implementation, unsupported

    format = QuantizationFormat(bits, group_size, mode)
    report = QuantizationReport(format)
    if modules is None:
        modules = experts_of(model)
    dense = {}
    for name, module in modules.items():
        reason = f"already {module.quantization}" if is_quantized(module) else unsupported(module)
        if reason is not None:
            report.skipped[name] = reason
        else:
            check_module(name, module, format)
            dense[name] = module
    if dense:
        _check_adapters(model, dense)
        _check_one_method(model)
    try:
        for name in _with_progress(dense, progress):
            report.modules[name] = quantize_module(dense[name], format)
            _release_cache(dense[name])
            pin_implementation(dense[name])
    finally:  # a model that was interrupted works, and can be saved
        keep_when_saving(model)
    return report


def keep_when_saving(model: nn.Module) -> None:
    """Lets the models of transformers in `model` save what is quantised, and load it again."""
    modules = list(model.modules())
    if any(map(is_quantized, modules)) and any(hasattr(module, "save_pretrained") for module in modules):
        from .transformers.saving import mark_quantized

        mark_quantized(model)
