"""Matrices as other libraries store them, read as formats of ours.

Integers stand for (q - zero) * scale, which is q * scale + bias with bias = -zero * scale: exact where zero
is a power of two, as without zero points, else rounded once to the scales' dtype. The packed codes of
compressed-tensors, and of GPTQ once transposed, are ours bit for bit, as floating-point codes are.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ...ops._checks import Check
from ...ops._formats import pack, unpack
from ...quantization import Format, QuantizedWeight
from ...quantization.formats import ErrorSums
from ..layouts.checking import check_tensor
from ..layouts.files import tensors_in
from ..quantize.weights import as_int32
from .schemes import Scheme

_CHECK = Check("load")
# Scales of activations, keys and values, which are not read.
UNREAD = r"((^|[._])(input|output|[kqv])_(global_)?|(^|[._])activation_)(scale|zero_point)$|\.qscale_act$"
_GROUPS = (128, 64, 32)
_FP8_GROUPS = (128, 32)
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of the codes in an int32, the lowest first
_LEAST, _MOST = 2.0**-127, 2.0**127  # ends of e8m0
_AT_ONCE = 1 << 18  # values whose magnitudes are added up at a time


class TensorFiles:
    """Tensors of files, read on demand.

    Args:
        names: tensors to include; None is all.
    """

    def __init__(self, files: list[str], names: re.Pattern[str] | None = None):
        self._files: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.beside: dict[str, list[str]] = {}  # {module: what follows its name}
        for file, name, dtype, shape in tensors_in(files):
            if names is not None and not names.search(name):
                continue
            self._files[name], self.dtypes[name], self.shapes[name] = file, dtype, shape
            module, _, part = name.rpartition(".")
            self.beside.setdefault(module, []).append(part)

    def label(self, name: str) -> str:
        """Name of a tensor in the files."""
        return name

    def stored(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype and shape of a tensor."""
        return self.dtypes[name], self.shapes[name]

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """The whole tensor, or one expert's part of it."""
        with safe_open(self._files[name], framework="pt") as tensors:
            return tensors.get_tensor(name) if expert is None else tensors.get_slice(name)[expert]


class Matrix(NamedTuple):
    """A matrix of a checkpoint, and how it becomes a quantised weight.

    Attributes:
        names: of its tensors.
        read: makes the weight of them, and adds what that changes to the sums.
        format: of the weight.
        again: where the format rests on the values of scales, the same matrix in the format for any.
    """

    names: tuple[str, ...]
    read: Callable[[list[Tensor], ErrorSums], QuantizedWeight]
    format: Format
    again: Callable[[], "Matrix"] | None = None

    def dense(self, tensors: list[Tensor]) -> Tensor:
        """Dequantised values of the tensors, in float32."""
        weight = self.read(tensors, ErrorSums())
        if weight.packed.dim() == 2:
            return weight.values(slice(None))
        return torch.stack([weight.values(expert) for expert in range(len(weight.packed))])


def alike(name: str, matrices: Sequence[Matrix]) -> list[Matrix]:
    """Matrices of one parameter, converted to one format.

    Raises: ValueError where there is none.
    """
    if len({str(matrix.format) for matrix in matrices}) > 1:
        matrices = [matrix if matrix.again is None else matrix.again() for matrix in matrices]
    formats = sorted({str(matrix.format) for matrix in matrices})
    if len(formats) > 1:
        _CHECK.fail(name, "made of matrices in one format", " and ".join(formats))
    return [*matrices]


class Stored:
    """A matrix of a module in some files, which has exactly the tensors that its scheme declares.

    Args:
        shape: [rows, columns] of the dense matrix.

    Raises: ValueError, before anything is read, for a tensor that is missing, of another dtype or shape, or
        one too many.
    """

    def __init__(self, files: TensorFiles, module: str, shape: tuple[int, int], scheme: Scheme):
        self.files, self.module = files, module
        self.scheme = scheme = scheme.beside({p: files.dtypes[self.name(p)] for p in files.beside[module]})
        self.rows, self.columns = self.shape = shape
        if self.columns % 32:
            _CHECK.fail(module, "of a multiple of 32 columns", self.columns)
        self.declared = declared = scheme.tensors(*shape)
        for part, (dtypes, shapes, needed) in declared.items():
            name = files.label(self.name(part))
            if part not in self:
                if needed:
                    _CHECK.fail(name, "in the checkpoint", "no such tensor")
                continue
            check_tensor(name, files.stored(self.name(part)), dtypes, shapes)
        for part in files.beside[module]:
            if part not in declared and part not in ("bias", "weight_bias") and not re.search(UNREAD, part):
                beside = " and ".join(name for name in declared if name in self)
                name = files.label(self.name(part))
                _CHECK.fail(name, f"absent beside {beside}", f"one of shape {files.shapes[self.name(part)]}")

    @property
    def names(self) -> set[str]:
        """Names of the matrix's tensors in the files."""
        return {self.name(part) for part in self.declared if part in self}

    def __contains__(self, part: str) -> bool:
        return self.name(part) in self.files.shapes

    def name(self, part: str) -> str:
        return f"{self.module}.{part}"

    def read(self, part: str) -> Tensor:
        return self.files.read(self.name(part))

    def matrix(self) -> Matrix:
        """The matrix as a format of ours; of scales, this reads what the format rests on.

        Raises: ValueError for zero points that the config says are none, and what no format holds.
        """
        layouts: dict[str, Callable[[], Matrix]] = {
            "packed": self._packed,
            "int8": self._int8,
            "gptq": self._gptq,
            "awq": self._awq,
            "mxfp4": self._mxfp4,
            "nvfp4": self._nvfp4,
            "fp8": self._fp8,
        }
        no_zeros = self.scheme.symmetric and "weight_zero_point" in self
        if no_zeros and bool(self.read("weight_zero_point").float().any()):
            name = self.files.label(self.name("weight_zero_point"))
            _CHECK.fail(name, "0 where symmetric is true", "others")
        return layouts[self.scheme.layout]()

    def _made(self, read: Callable[..., QuantizedWeight], format: Format) -> Matrix:
        """A Matrix; `read` takes the error sums and the declared tensors, but for the groups of columns."""

        def made(tensors: list[Tensor], errors: ErrorSums) -> QuantizedWeight:
            return read(errors, *tensors).map(lambda tensor: as_int32(tensor).contiguous())

        parts = (part for part, tensor in self.declared.items() if tensor.needed and part != "g_idx")
        return Matrix(tuple(map(self.name, parts)), made, format)

    def _group(self, sizes: Sequence[int]) -> int:
        """The first group size that divides the columns and the blocks of the scales."""
        size = min(self.scheme.block[1] or self.columns, self.columns)
        fits = [group for group in sizes if size % group == 0 and self.columns % group == 0]
        if not fits:
            _CHECK.fail(self.module, "in groups of a multiple of 32 columns", size)
        return fits[0]

    def _affine(self) -> Format:
        """Group-wise affine format whose groups divide the blocks of the scales."""
        return Format(self.scheme.bits, self._group(_GROUPS))

    def _spread(self, scales: Tensor, group_size: int) -> Tensor:
        """Scales [rows, columns / group_size], repeated from blocks to groups."""
        high, wide = self.scheme.block
        scales = scales.reshape(self.scheme.blocks(*self.shape))
        device = scales.device
        if high != 1:
            scales = scales[torch.arange(self.rows, device=device) // (high or self.rows)]
        if wide != group_size:
            columns = torch.arange(0, self.columns, group_size, device=device)
            scales = scales[:, columns // (wide or self.columns)]
        return scales

    def _packed(self) -> Matrix:
        """compressed-tensors: packed codes less half the range; zero points are packed along rows."""
        format, along = self._affine(), self.scheme.blocks(*self.shape)[0]

        def read(errors: ErrorSums, packed: Tensor, scales: Tensor, *zeros: Tensor) -> QuantizedWeight:
            zero: Tensor | float = 2.0 ** (format.bits - 1)
            if zeros:
                zero = unpack(zeros[0].T.contiguous(), format)[:, :along].T
            return self._with_zeros(errors, packed, scales, zero, format)

        return self._made(read, format)

    def _int8(self) -> Matrix:
        """compressed-tensors, and ModelOpt: int8."""
        format = self._affine()

        def read(errors: ErrorSums, codes: Tensor, scales: Tensor, *zeros: Tensor) -> QuantizedWeight:
            packed = (codes.contiguous().view(torch.uint8) ^ 0x80).view(torch.int32)
            zero = 128.0 + zeros[0].float() if zeros else 128.0
            return self._with_zeros(errors, packed, scales, zero, format)

        return self._made(read, format)

    def _gptq(self) -> Matrix:
        """GPTQ: codes packed along columns, which must be in the order of their groups."""
        format, half = self._affine(), 2 ** (self.scheme.bits - 1)
        size = self.scheme.block[1] or self.columns
        if "g_idx" in self and not torch.equal(self.read("g_idx").long(), torch.arange(self.columns) // size):
            name = self.files.label(self.name("g_idx"))
            _CHECK.fail(name, f"of {size} columns of each group, in their order", "others, as by desc_act")

        def zeros_of(packed: Tensor) -> Tensor:
            """Unpacked zero points. Raises: ValueError for others than the middle, where sym is true."""
            zeros = (unpack(packed.contiguous(), format).T + self.scheme.less) % 2**format.bits
            if self.scheme.symmetric and bool((zeros != half).any()):
                name = self.files.label(self.name("qzeros"))
                _CHECK.fail(name, f"of zero points {half} where sym is true", "others")
            return zeros

        def read(errors: ErrorSums, packed: Tensor, zeros: Tensor, scales: Tensor) -> QuantizedWeight:
            return self._with_zeros(errors, packed.T.contiguous(), scales.T, zeros_of(zeros), format)

        return self._made(read, format)

    def _awq(self) -> Matrix:
        """AutoAWQ's gemm: eight codes an int32 along rows, in AutoAWQ's order."""
        format = self._affine()

        def read(errors: ErrorSums, packed: Tensor, zeros: Tensor, scales: Tensor) -> QuantizedWeight:
            codes = pack(_awq_codes(packed).T.contiguous(), 4)
            return self._with_zeros(errors, codes, scales.T, _awq_codes(zeros).T, format)

        return self._made(read, format)

    def _with_zeros(
        self, errors: ErrorSums, packed: Tensor, scales: Tensor, zero: Tensor | float, format: Format
    ) -> QuantizedWeight:
        """Weight of (q - zero) * scale, with one scale and zero point a block."""
        scales = self._spread(scales, format.group_size)
        zero = self._spread(zero, format.group_size).float() if isinstance(zero, Tensor) else zero
        exact = -zero * scales.float()
        biases = exact.to(scales.dtype)
        weight = QuantizedWeight(packed, scales, biases, format)
        if not bool((lost := (biases.float() - exact).abs()).any()):
            return weight
        errors.difference += float(lost.sum()) * format.group_size
        for rows in torch.arange(self.rows).split(max(1, _AT_ONCE // self.columns)):
            errors.magnitude += float(weight.values(rows.to(packed.device)).abs().sum())
        return weight

    def _mxfp4(self) -> Matrix:
        format = Format(mode="mxfp4")

        def read(errors: ErrorSums, packed: Tensor, scales: Tensor) -> QuantizedWeight:
            packed = packed.contiguous().view(torch.int32)
            return QuantizedWeight(packed, scales.view(torch.uint8), None, format)

        return self._made(read, format)

    def _nvfp4(self) -> Matrix:
        """NVFP4 with a factor of the matrix, which divides the scales of compressed-tensors."""
        divides, format = self.scheme.codes == "weight_packed", Format.named("nvfp4_global")
        name = "weight_global_scale" if divides else "weight_scale_2"
        if not 2.0**-100 <= (value := float(self.read(name))) <= 2.0**100:  # beyond, values leave float32
            _CHECK.fail(self.files.label(self.name(name)), "between 2^-100 and 2^100", f"{value:g}")

        def read(errors: ErrorSums, packed: Tensor, scales: Tensor, factor: Tensor) -> QuantizedWeight:
            scales = self._finite("weight_scale", scales)
            factor = factor.float().reciprocal() if divides else factor.float()
            factors = factor.view(1, 1).expand(self.rows, 1).contiguous().view(torch.int32)
            return QuantizedWeight(packed.contiguous().view(torch.int32), scales, factors, format)

        return self._made(read, format)

    def _fp8(self, may_be_mx: bool = True) -> Matrix:
        """FP8 with a scale a block: mxfp8 where scales are powers of two, else with float32 scales."""
        part = self.scheme.scale
        if (wide := self.scheme.block[1] or self.columns) % 32 and wide < self.columns:
            _CHECK.fail(self.files.label(self.name(part)), "for blocks of a multiple of 32 columns", wide)
        stored = _floats(self.read(part))
        is_mx = may_be_mx and bool((stored.frexp().mantissa == 0.5).all())
        is_mx = is_mx and bool(((stored >= _LEAST) & (stored <= _MOST)).all())
        format = Format(mode="mxfp8") if is_mx else Format.named(f"fp8_{self._group(_FP8_GROUPS)}")

        def read(errors: ErrorSums, codes: Tensor, scales: Tensor) -> QuantizedWeight:
            scales = self._spread(_floats(scales), format.group_size).contiguous()
            scales = (scales.log2() + 127).to(torch.uint8) if is_mx else scales.view(torch.int32)
            return QuantizedWeight(self._finite("weight", codes).view(torch.int32), scales, None, format)

        return self._made(read, format)._replace(again=functools.partial(self._fp8, may_be_mx=False))

    def _finite(self, part: str, codes: Tensor) -> Tensor:
        """The bytes of e4m3 numbers. Raises: ValueError for NaN."""
        codes = codes.contiguous().view(torch.uint8)
        if bool(((codes & 0x7F) == 0x7F).any()):
            _CHECK.fail(self.files.label(self.name(part)), "finite", "NaN")
        return codes


class StackedExperts:
    """Experts whose matrices are stacked in one parameter.

    Args:
        parameter: "experts.gate_up_proj" of "experts.gate_up_proj_scale".
        shape: [experts, rows, columns] of the dense parameter.
        transposed: whether the tensors are [experts, columns, rows], as ModelOpt writes gpt-oss and Llama 4.

    Raises: ValueError as `Stored`.
    """

    def __init__(
        self,
        files: TensorFiles,
        parameter: str,
        shape: tuple[int, int, int],
        scheme: Scheme,
        transposed: bool,
    ):
        self.parameter = parameter
        self.sources = {
            f"{parameter}.weight{name.removeprefix(parameter).removeprefix('_weight')}": name
            for name in files.shapes
            if name == parameter or name.startswith(f"{parameter}_")
        }
        if transposed and f"{parameter}_packed" in files.shapes:
            expected = "of [experts, rows, columns], with scales along columns"
            _CHECK.fail(f"{parameter}_packed", expected, "experts that are transposed")
        self.experts = [_Expert(files, self.sources, (shape[0], e, transposed)) for e in range(shape[0])]
        self.each = [Stored(expert, parameter, shape[1:], scheme) for expert in self.experts]
        self.shape = shape

    @property
    def names(self) -> set[str]:
        return {self.sources[name] for name in self.each[0].names}

    def matrix(self) -> Matrix:
        """The stack of all experts' matrices, read expert by expert."""
        result = alike(self.parameter, [stored.matrix() for stored in self.each])
        names = tuple(self.sources[name] for name in result[0].names)

        def read(tensors: list[Tensor], errors: ErrorSums) -> QuantizedWeight:
            weights = [
                matrix.read([expert.part(tensor) for tensor in tensors], errors)
                for expert, matrix in zip(self.experts, result, strict=True)
            ]
            packed, scales, biases = ([*parts] for parts in zip(*weights, strict=True))
            added = None if biases[0] is None else torch.stack(biases)
            return QuantizedWeight(torch.stack(packed), torch.stack(scales), added, result[0].format)

        return Matrix(names, read, result[0].format)


class _Expert(TensorFiles):
    """Tensors of one expert of a stack, under a module's names; each expert has the shared ones.

    Args:
        sources: {name of a module's tensor: name of the stacked one}.
        place: the number of experts, which one this is, and whether its matrices are transposed.
    """

    def __init__(self, files: TensorFiles, sources: Mapping[str, str], place: tuple[int, int, bool]):
        self._all, self._sources = files, sources
        self._experts, self._expert, self._transposed = place
        empty = {name: torch.empty(files.shapes[stacked], device="meta") for name, stacked in sources.items()}
        self.shapes = {name: tuple(self.part(tensor).shape) for name, tensor in empty.items()}
        self.dtypes = {name: files.dtypes[stacked] for name, stacked in sources.items()}
        self.beside = {}
        for module, _, part in (name.rpartition(".") for name in sources):
            self.beside.setdefault(module, []).append(part)

    def label(self, name: str) -> str:
        return self._sources.get(name, name)

    def part(self, stacked: Tensor) -> Tensor:
        is_stacked = stacked.shape[:1] == (self._experts,)
        return self._as_rows(stacked[self._expert]) if is_stacked else stacked

    def read(self, name: str, expert: int | None = None) -> Tensor:
        stacked = self._sources[name]
        is_stacked = self._all.shapes[stacked][:1] == (self._experts,)
        return self._as_rows(self._all.read(stacked, self._expert if is_stacked else None))

    def _as_rows(self, tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous() if self._transposed and tensor.dim() == 2 else tensor


def _floats(scales: Tensor) -> Tensor:
    """Scales in float32; uint8 scales are exponents."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _awq_codes(packed: Tensor) -> Tensor:
    """int32 [n, rows / 8] -> uint8 [n, rows]."""
    places = [4 * _AWQ_COLUMNS.index(column) for column in range(8)]
    shifts = torch.tensor(places, dtype=torch.int32, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(-2)
