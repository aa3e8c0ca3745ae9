"""Matrices as other libraries store them, read as formats of ours.

Integers stand for (q - zero) * scale, which is q * scale + bias with bias = -zero * scale: exact where zero
is a power of two, as it is without zero points, else rounded once to the dtype of the scales. The words of
compressed-tensors, and those of GPTQ once transposed, are ours bit for bit. Floating-point codes keep their
bits where the scales of a format hold what multiplies them; where they do not, the values are quantised
again.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor

from ....ops._checks import Check
from ....ops._formats import e4m3, pack, unpack
from ....quantization import Format, QuantizedWeight
from ....quantization.formats import ErrorSums, quantize_stack
from ..files import tensors_in
from ..weights import words

_CHECK = Check("load")
METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt")
# The tensors of a matrix, by what follows the module's name; those that no reader takes are of activations.
CODES = ("weight_packed", "qweight", "weight")
# What follows the name of a parameter of stacked experts; the longer first.
STACKED = ("_weight_scale", "_scale_inv", "_scale")
_GROUPS = (128, 64, 32)
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the codes in a word, the lowest first
_LEAST, _MOST = 2.0**-127, 2.0**127  # of e8m0
_AT_ONCE = 1 << 18  # values whose magnitudes are added up at a time


class Files:
    """The tensors in some files, which are read when they are asked for."""

    def __init__(self, files: list[str]):
        self._files: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for file, name, dtype, shape in tensors_in(files):
            self._files[name], self.dtypes[name], self.shapes[name] = file, dtype, shape

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """The whole tensor, or one expert's part of it."""
        with safe_open(self._files[name], framework="pt") as tensors:
            return tensors.get_tensor(name) if expert is None else tensors.get_slice(name)[expert]


class Matrix(NamedTuple):
    """A matrix of a checkpoint.

    Attributes:
        names: of its tensors.
        read: makes the weight of them, and adds what that changes to the sums.
        format: of the weight.
        order: int32, the order of its inputs that the weight takes, or None.
        again: where the format rests on the values of scales, the same matrix in the format for any.
        values: float32 [rows, columns], where the format holds others.
    """

    names: tuple[str, ...]
    read: Callable[[list[Tensor], ErrorSums], QuantizedWeight]
    format: Format
    order: Tensor | None = None
    again: Callable[[], "Matrix"] | None = None
    values: Callable[[list[Tensor]], Tensor] | None = None

    def dense(self, tensors: list[Tensor]) -> Tensor:
        """The values that the tensors stand for."""
        if self.values is not None:
            return self.values(tensors)
        return self.read(tensors, ErrorSums()).values(slice(None))


def alike(name: str, matrices: Sequence[Matrix]) -> list[Matrix]:
    """The matrices that one parameter is made of, in one format.

    Raises: ValueError where there is none.
    """
    if len({str(matrix.format) for matrix in matrices}) > 1:
        matrices = [matrix if matrix.again is None else matrix.again() for matrix in matrices]
    formats = sorted({str(matrix.format) for matrix in matrices})
    if len(formats) > 1:
        _CHECK.fail(name, "made of matrices in one format", " and ".join(formats))
    return [*matrices]


def matrix_of(
    files: Files, module: str, shape: tuple[int, int], stored: Mapping[str, object]
) -> Matrix | None:
    """How the matrix of a module is stored; None for a dense one.

    Args:
        shape: [rows, columns] of the dense matrix.
        stored: the quantisation in the config.

    Raises: ValueError for a layout that no format holds.
    """
    reader = _Reader(files, module, shape, stored)
    if "qweight" in reader:
        return reader.awq() if stored.get("quant_method") == "awq" else reader.gptq()
    if "weight_packed" in reader and reader.dtype("weight_packed") == "I32":
        return reader.packed_integers()
    if "weight_packed" in reader:
        return reader.fp4("weight_packed", "weight_global_scale", divides=True)
    match reader.dtype("weight"):
        case "U8":
            return reader.fp4("weight", "weight_scale_2", divides=False)
        case "I8" | "F8_E4M3" as dtype:
            reader.check_shape("weight", shape)
            return reader.integers() if dtype == "I8" else reader.fp8()
    return None


def stack_of(
    files: Files, parameter: str, shape: tuple[int, int, int], stored: Mapping[str, object], turned: bool
) -> Matrix | None:
    """As `matrix_of`, of experts whose matrices are stacked in one parameter; None for dense ones.

    Args:
        parameter: "experts.gate_up_proj" of "experts.gate_up_proj_scale".
        shape: [experts, rows, columns] of the dense parameter.
        turned: whether the tensors are [experts, columns, rows], as ModelOpt writes gpt-oss and Llama 4.
    """
    own = {
        f"{parameter}.weight{name.removeprefix(parameter).removeprefix('_weight')}": name
        for name in files.shapes
        if name == parameter or name.startswith(f"{parameter}_")
    }
    if turned and f"{parameter}_packed" in files.shapes:
        expected = "of [experts, rows, columns], with scales along columns"
        _CHECK.fail(f"{parameter}_packed", expected, "experts that are turned")
    each = [_Expert(files, own, (shape[0], e, turned)) for e in range(shape[0])]
    matrices = [matrix_of(expert, parameter, shape[1:], stored) for expert in each]
    found = [matrix for matrix in matrices if matrix is not None]
    if not found:
        return None
    found = alike(parameter, found)
    names = tuple(own[name] for name in found[0].names)

    def read(tensors: list[Tensor], errors: ErrorSums) -> QuantizedWeight:
        weights = [
            matrix.read([expert.part(tensor) for tensor in tensors], errors)
            for expert, matrix in zip(each, found, strict=True)
        ]
        packed, scales, biases = ([*parts] for parts in zip(*weights, strict=True))
        added = None if biases[0] is None else torch.stack(biases)
        return QuantizedWeight(torch.stack(packed), torch.stack(scales), added, found[0].format)

    def values(tensors: list[Tensor]) -> Tensor:
        pairs = zip(each, found, strict=True)
        return torch.stack([matrix.dense([*map(expert.part, tensors)]) for expert, matrix in pairs])

    return Matrix(names, read, found[0].format, values=values)


class _Expert(Files):
    """The tensors of one expert, as if its matrix were a module's; what is for all experts is each one's.

    Args:
        own: {name of a module's tensor: that of the stacked one}.
        place: the number of experts, which one this is, and whether its matrices are turned.
    """

    def __init__(self, files: Files, own: Mapping[str, str], place: tuple[int, int, bool]):
        self._all, self._own = files, own
        self._experts, self._expert, self._turned = place
        empty = {name: torch.empty(files.shapes[stacked], device="meta") for name, stacked in own.items()}
        self.shapes = {name: tuple(self.part(tensor).shape) for name, tensor in empty.items()}
        self.dtypes = {name: files.dtypes[stacked] for name, stacked in own.items()}

    def part(self, stacked: Tensor) -> Tensor:
        is_own = stacked.shape[:1] == (self._experts,)
        return self._as_rows(stacked[self._expert]) if is_own else stacked

    def read(self, name: str, expert: int | None = None) -> Tensor:
        stacked = self._own[name]
        is_own = self._all.shapes[stacked][:1] == (self._experts,)
        return self._as_rows(self._all.read(stacked, self._expert if is_own else None))

    def _as_rows(self, tensor: Tensor) -> Tensor:
        return tensor.mT.contiguous() if self._turned and tensor.dim() == 2 else tensor


class _Reader:
    def __init__(self, files: Files, module: str, shape: tuple[int, int], stored: Mapping[str, object]):
        self.files, self.module, self.stored = files, module, stored
        self.rows, self.columns = shape

    def __contains__(self, part: str) -> bool:
        return self.name(part) in self.files.shapes

    def name(self, part: str) -> str:
        return f"{self.module}.{part}"

    def dtype(self, part: str) -> str | None:
        return self.files.dtypes.get(self.name(part))

    def shape(self, part: str) -> tuple[int, ...]:
        if part not in self:
            _CHECK.fail(self.name(part), "in the checkpoint", "no such tensor")
        return self.files.shapes[self.name(part)]

    def layout(self, key: str, *known: str) -> str:
        """What the config calls the order of codes, the first where it says nothing."""
        found = str(self.stored.get(key) or self.stored.get("checkpoint_format") or known[0]).lower()
        if found not in known:
            _CHECK.fail(f"{key} of the quantization_config", " or ".join(known), found)
        return found

    def check_shape(self, part: str, expected: tuple[int, int]) -> None:
        if self.shape(part) != expected:
            self.fail(part, f"of shape {expected}", self.shape(part))

    def fail(self, part: str, expected: str, got: object) -> NoReturn:
        _CHECK.fail(self.name(part), expected, got)

    def matrix(
        self,
        parts: tuple[str, ...],
        read: Callable[..., QuantizedWeight],
        format: Format,
        order: Tensor | None = None,
    ) -> Matrix:
        """`read` takes the sums and the tensors of `parts`."""

        def made(tensors: list[Tensor], errors: ErrorSums) -> QuantizedWeight:
            return read(errors, *tensors).map(lambda tensor: words(tensor).contiguous())

        return Matrix(tuple(map(self.name, parts)), made, format, order)

    def group(self, part: str, groups: int) -> int:
        """The group size: that of the scales, or where they are for more the largest that divides it."""
        size = self.columns // max(1, groups)
        fits = [each for each in _GROUPS if size % each == 0]
        if size * groups != self.columns or not fits:
            self.fail(part, "of groups of a multiple of 32 columns", f"{groups} for {self.columns} columns")
        return fits[0]

    def affine(self, part: str, bits: float, scales: str, groups: int) -> Format:
        if bits not in (2, 3, 4, 5, 6, 8):
            self.fail(part, "of 2, 3, 4, 5, 6 or 8 bits", f"{bits:g} bits in {self.columns} columns")
        return Format(int(bits), self.group(scales, groups))

    def packed_integers(self) -> Matrix:
        """compressed-tensors: words with an offset of half the range; zero points lie in words of rows."""
        bits = self.shape("weight_packed")[-1] * 32 / self.columns
        groups = self.shape("weight_scale")[-1]
        format = self.affine("weight_packed", bits, "weight_scale", groups)
        if "weight_g_idx" in self:
            self.fail("weight_g_idx", "absent: groups of columns lie side by side", "an order of columns")
        has_zeros = "weight_zero_point" in self

        def read(errors: ErrorSums, packed: Tensor, scales: Tensor, *zeros: Tensor) -> QuantizedWeight:
            zero: Tensor | float = 2.0 ** (format.bits - 1)
            if zeros:
                zero = unpack(zeros[0].T.contiguous(), format)[:, : self.rows].T
            return self.with_zeros(errors, packed, scales, zero, format)

        parts = ("weight_packed", "weight_scale", *(["weight_zero_point"] if has_zeros else []))
        return self.matrix(parts, read, format)

    def integers(self) -> Matrix:
        """compressed-tensors: int8, with a scale for each row or for all."""
        scales = self.shape("weight_scale")
        groups = scales[-1] if len(scales) == 2 else 1
        format = self.affine("weight", 8, "weight_scale", groups)
        has_zeros = "weight_zero_point" in self

        def read(errors: ErrorSums, codes: Tensor, scales: Tensor, *zeros: Tensor) -> QuantizedWeight:
            packed = (codes.contiguous().view(torch.uint8) ^ 0x80).view(torch.int32)
            zero = 128.0 + self.per_row(zeros[0]).float() if zeros else 128.0
            return self.with_zeros(errors, packed, self.per_row(scales), zero, format)

        parts = ("weight", "weight_scale", *(["weight_zero_point"] if has_zeros else []))
        return self.matrix(parts, read, format)

    def per_row(self, scales: Tensor) -> Tensor:
        """[rows, groups], of what is for groups, for rows or for all."""
        return scales.reshape(-1, max(1, scales.shape[-1] if scales.dim() == 2 else 1)).expand(self.rows, -1)

    def gptq(self) -> Matrix:
        """Words of columns, and zero points less one; an order of columns becomes one of the inputs."""
        layout = self.layout("checkpoint_format", "gptq", "gptq_v2")
        bits = self.shape("qweight")[0] * 32 / self.columns
        groups = self.shape("scales")[0]
        format = self.affine("qweight", bits, "scales", groups)
        self.check_shape("qweight", (self.columns * format.bits // 32, self.rows))
        added = 0 if layout == "gptq_v2" else 1
        order = self.order(groups) if "g_idx" in self else None

        def zeros_of(packed: Tensor) -> Tensor:
            return (unpack(packed.contiguous(), format)[:, : self.rows].T + added) % 2**format.bits

        def read(errors: ErrorSums, packed: Tensor, zeros: Tensor, scales: Tensor) -> QuantizedWeight:
            packed = packed.T.contiguous()
            if order is not None:
                codes = unpack(packed, format).to(torch.uint8)
                packed = pack(codes[:, order.to(packed.device)], format.bits)
            return self.with_zeros(errors, packed, scales.T, zeros_of(zeros), format)

        return self.matrix(("qweight", "qzeros", "scales"), read, format, order)

    def order(self, groups: int) -> Tensor | None:
        """The columns by their groups, if they are not so already."""
        group_of = self.files.read(self.name("g_idx")).long()
        order = group_of.argsort(stable=True)
        size = self.columns // groups
        if not torch.equal(group_of[order], torch.arange(self.columns) // size):
            self.fail("g_idx", f"{size} columns of each of {groups} groups", "others")
        return None if bool((order == torch.arange(self.columns)).all()) else order.int()

    def awq(self) -> Matrix:
        """AutoAWQ's gemm: words of rows, eight of which lie in an order of their own."""
        self.layout("version", "gemm", "exllama", "ipex")  # which run the same codes
        self.check_shape("qweight", (self.columns, self.rows // 8))
        format = self.affine("qweight", 4, "scales", self.shape("scales")[0])

        def read(errors: ErrorSums, packed: Tensor, zeros: Tensor, scales: Tensor) -> QuantizedWeight:
            codes = pack(_awq_codes(packed).T.contiguous(), 4)
            return self.with_zeros(errors, codes, scales.T, _awq_codes(zeros).T.float(), format)

        return self.matrix(("qweight", "qzeros", "scales"), read, format)

    def with_zeros(
        self, errors: ErrorSums, packed: Tensor, scales: Tensor, zero: Tensor | float, format: Format
    ) -> QuantizedWeight:
        """Of (q - zero) * scale; scales and zeros [rows, groups], which may be fewer than the format's."""
        exact = -zero * scales.float()
        times = format.groups(self.columns) // scales.shape[-1]
        biases = exact.to(scales.dtype)
        many, offsets = (tensor.repeat_interleave(times, -1) for tensor in (scales, biases))
        weight = QuantizedWeight(packed, many, offsets, format)
        if not bool((lost := (biases.float() - exact).abs()).any()):
            return weight
        errors.difference += float(lost.sum()) * times * format.group_size
        for rows in torch.arange(self.rows).split(max(1, _AT_ONCE // self.columns)):
            errors.magnitude += float(weight.values(rows.to(packed.device)).abs().sum())
        return weight

    def fp4(self, codes: str, factor: str, divides: bool, may_keep: bool = True) -> Matrix:
        """MXFP4, or NVFP4 whose scales a factor of the matrix multiplies or divides."""
        scales = self.shape("weight_scale")[-1]
        self.check_shape(codes, (self.rows, self.columns // 2))
        if self.dtype("weight_scale") == "U8" and scales * 32 == self.columns:
            format = Format(mode="mxfp4")
            return self.matrix(
                (codes, "weight_scale"),
                lambda _, packed, scales: QuantizedWeight(packed.view(torch.int32), scales, None, format),
                format,
            )
        if self.dtype("weight_scale") != "F8_E4M3" or scales * 16 != self.columns:
            self.fail("weight_scale", "of MXFP4 or NVFP4", f"{scales} of {self.dtype('weight_scale')}")

        def wanted(scales: Tensor, *factors: Tensor) -> Tensor:
            multiplied = scales.float()
            for each in factors:
                multiplied = multiplied / each.float() if divides else multiplied * each.float()
            return multiplied

        parts = ("weight_scale", *([factor] if factor in self else []))
        found = wanted(*(self.files.read(self.name(part)) for part in parts))
        exact = may_keep and bool((found.to(torch.float8_e4m3fn).float() == found).all())
        nvfp4 = Format(mode="nvfp4")
        format = nvfp4 if exact else Format(6, self.group("weight_scale", self.columns // 32))

        def values(tensors: list[Tensor]) -> Tensor:
            codes = unpack(tensors[0].contiguous().view(torch.int32), nvfp4)
            return (codes.unflatten(-1, (-1, 16)) * wanted(*tensors[1:]).unsqueeze(-1)).flatten(-2)

        def read(errors: ErrorSums, packed: Tensor, *others: Tensor) -> QuantizedWeight:
            if not exact:
                return _again(values([packed, *others]), format, errors)
            scales = wanted(*others).to(torch.float8_e4m3fn).view(torch.uint8)
            return QuantizedWeight(packed.contiguous().view(torch.int32), scales, None, nvfp4)

        made = self.matrix((codes, *parts), read, format)
        again = functools.partial(self.fp4, codes, factor, divides, may_keep=False)
        return made._replace(again=again, values=values)

    def fp8(self, may_keep: bool = True) -> Matrix:
        """Codes with a scale for all, for each row or for each block; by powers of two they are mxfp8."""
        part = next((each for each in ("weight_scale", "weight_scale_inv") if each in self), None)
        if part is None:
            self.fail("weight_scale", "in the checkpoint", "no such tensor")
        found = self.for_groups(self.files.read(self.name(part)), part)
        exact = may_keep and bool((found.frexp().mantissa == 0.5).all())
        exact = exact and bool(((found >= _LEAST) & (found <= _MOST)).all())
        format = Format(mode="mxfp8") if exact else self.affine("weight", 8, part, self.columns // 32)

        def octets(codes: Tensor) -> Tensor:
            codes = codes.contiguous().view(torch.uint8)
            if bool(((codes & 0x7F) == 0x7F).any()):
                self.fail("weight", "finite", "NaN")
            return codes

        def values(tensors: list[Tensor]) -> Tensor:
            groups = e4m3(octets(tensors[0])).unflatten(-1, (-1, 32))
            return (groups * self.for_groups(tensors[1], part).unsqueeze(-1)).flatten(-2)

        def read(errors: ErrorSums, codes: Tensor, scale: Tensor) -> QuantizedWeight:
            if not exact:
                return _again(values([codes, scale]), format, errors)
            exponents = (self.for_groups(scale, part).log2() + 127).to(torch.uint8)
            return QuantizedWeight(octets(codes).view(torch.int32), exponents, None, format)

        made = self.matrix(("weight", part), read, format)
        return made._replace(again=lambda: self.fp8(may_keep=False), values=values)

    def for_groups(self, scales: Tensor, part: str) -> Tensor:
        """One for each 32 columns, in float32, whatever block they are for; octets are exponents (MXFP8)."""
        scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(self.rows, self.columns // 32)
        if scales.dim() == 1:
            scales = scales.unsqueeze(1)
        high, wide = -(-self.rows // scales.shape[0]), -(-self.columns // scales.shape[1])
        if scales.shape[1] > 1:  # blocks at the edge may be smaller: their size is a power of two
            wide = 1 << (wide - 1).bit_length()
        if scales.shape[0] not in (1, self.rows):
            high = 1 << (high - 1).bit_length()
        if wide % 32 and scales.shape[1] > 1:
            self.fail(part, "for blocks of a multiple of 32 columns", f"{wide} columns")
        rows = scales.repeat_interleave(high, 0)[: self.rows]
        return rows.repeat_interleave(max(1, wide // 32), 1)[:, : self.columns // 32]


def _again(values: Tensor, format: Format, errors: ErrorSums) -> QuantizedWeight:
    """Quantises values in float32, by way of bfloat16, which has their range."""
    return quantize_stack(values.bfloat16().unsqueeze(0), format, errors).map(lambda tensor: tensor[0])


def _awq_codes(packed: Tensor) -> Tensor:
    """int32 [n, rows / 8] -> uint8 [n, rows]."""
    places = [4 * _AWQ_COLUMNS.index(column) for column in range(8)]
    shifts = torch.tensor(places, dtype=torch.int32, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(-2)
