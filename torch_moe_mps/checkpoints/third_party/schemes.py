"""The tensors of each matrix that the config of another library declares: their names, dtypes and shapes."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..._text import first_line
from ...ops._checks import Check

Stored = Mapping[str, Any]  # the quantisation in a config
_CHECK = Check("load")
_BITS = (2, 3, 4, 5, 6, 8)
_FLOATS = ("F16", "BF16", "F32")  # names that safetensors has
_EXPONENTS = ("U8", "F8_E8M0")
# Names of the scales beside FP8 codes: of most models, DeepSeek-V4's, and Mistral's.
_SCALES_OF_FP8 = ("weight_scale_inv", "scale", "qscale_weight")


class DeclaredTensor(NamedTuple):
    """A tensor that a matrix has: which dtypes and shapes it may have, and whether it must be there."""

    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    needed: bool = True


class Scheme(NamedTuple):
    """Storage of a matrix.

    Attributes:
        layout: a key of LAYOUTS.
        bits: of a code.
        block: the rows and columns that have one scale; None is all of them.
        symmetric: whether no zero points are stored, or in GPTQ all are half the range; None if that is
            not stated.
        codes, scale: the names of tensors.
        exponents: whether scales may be uint8, the exponents of powers of two; None if they must be.
        less: what zero points are stored less.
    """

    layout: str
    bits: int
    block: tuple[int | None, int | None]
    symmetric: bool | None = True
    codes: str = "weight"
    scale: str = "weight_scale"
    exponents: bool | None = False
    less: int = 0

    def beside(self, dtypes: Mapping[str, str]) -> "Scheme":
        """The scheme of a matrix, by the dtypes of the tensors that it has.

        FP8 checkpoints have several names for scales, and MXFP4 in int8 beside FP8 (experts of DeepSeek-V4).
        """
        if self.scale not in _SCALES_OF_FP8:
            return self
        scale = next((name for name in _SCALES_OF_FP8 if name in dtypes), self.scale)
        if dtypes.get(self.codes) == "I8":
            return Scheme("mxfp4", 4, (1, 32), scale=scale)
        return self._replace(scale=scale)

    def tensors(self, rows: int, columns: int) -> dict[str, DeclaredTensor]:
        """{what follows the name of the module: the tensor} of a matrix."""
        return LAYOUTS[self.layout](self, rows, columns)

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """The number of scales along rows and columns."""
        high, wide = self.block
        return -(-rows // (high or rows)), -(-columns // (wide or columns))

    def scales(self, rows: int, columns: int) -> DeclaredTensor:
        """The shapes and dtypes that scales may have for a matrix of this size."""
        along, across = self.blocks(rows, columns)
        shapes: list[tuple[int, ...]] = [(along, across)]
        if self.block == (None, None):
            shapes += [(), (1,)]
        elif self.block == (1, None):
            shapes += [(rows,)]
        elif self.block[0] != 1:
            shapes += [(along, 1, across, 1)]
        exponents = () if self.exponents is False else _EXPONENTS
        return DeclaredTensor((*(() if self.exponents is None else _FLOATS), *exponents), shapes)


def _packed(scheme: Scheme, rows: int, columns: int) -> dict[str, DeclaredTensor]:
    """compressed-tensors: a stream of bits in each row, and one of zero points in each column."""
    along, across = scheme.blocks(rows, columns)
    return {
        "weight_packed": DeclaredTensor(["I32"], [(rows, columns * scheme.bits // 32)]),
        "weight_scale": scheme.scales(rows, columns),
        "weight_zero_point": _no_zeros(scheme, rows, columns)
        if scheme.symmetric
        else DeclaredTensor(["I32"], [(-(-along * scheme.bits // 32), across)]),
        "weight_shape": DeclaredTensor(["I32", "I64"], [(2,)], needed=False),
    }


def _no_zeros(scheme: Scheme, rows: int, columns: int) -> DeclaredTensor:
    """Zero points that older versions write although all are 0."""
    shapes = scheme.scales(rows, columns).shapes
    return DeclaredTensor(["I8", "I32", "F8_E4M3", *_FLOATS], shapes, needed=False)


def _int8(scheme: Scheme, rows: int, columns: int) -> dict[str, DeclaredTensor]:
    scales, zeros = scheme.scales(rows, columns), _no_zeros(scheme, rows, columns)
    return {
        "weight": DeclaredTensor(["I8"], [(rows, columns)]),
        "weight_scale": scales,
        "weight_zero_point": zeros if scheme.symmetric else DeclaredTensor(["I8"], scales.shapes),
    }


def _fp8(scheme: Scheme, rows: int, columns: int) -> dict[str, DeclaredTensor]:
    return {
        "weight": DeclaredTensor(["F8_E4M3"], [(rows, columns)]),
        scheme.scale: scheme.scales(rows, columns),
        "weight_zero_point": _no_zeros(scheme, rows, columns),
    }


def _mxfp4(scheme: Scheme, rows: int, columns: int) -> dict[str, DeclaredTensor]:
    codes = DeclaredTensor(["I8" if scheme.scale in _SCALES_OF_FP8 else "U8"], [(rows, columns // 2)])
    return {scheme.codes: codes, scheme.scale: DeclaredTensor(_EXPONENTS, [(rows, columns // 32)])}


def _nvfp4(scheme: Scheme, rows: int, columns: int) -> dict[str, DeclaredTensor]:
    """A factor of the matrix divides compressed-tensors' scales, and multiplies ModelOpt's."""
    factor = DeclaredTensor(["F32"], [(), (1,)])
    return {
        scheme.codes: DeclaredTensor(["U8"], [(rows, columns // 2)]),
        "weight_scale": DeclaredTensor(["F8_E4M3"], [(rows, columns // 16)]),
        "weight_scale_2" if scheme.codes == "weight" else "weight_global_scale": factor,
    }


def _gptq(scheme: Scheme, rows: int, columns: int) -> dict[str, DeclaredTensor]:
    """A stream of bits in each column, and one of zero points for each group."""
    _, groups = scheme.blocks(rows, columns)
    return {
        "qweight": DeclaredTensor(["I32"], [(columns * scheme.bits // 32, rows)]),
        "qzeros": DeclaredTensor(["I32"], [(groups, rows * scheme.bits // 32)]),
        "scales": DeclaredTensor(_FLOATS, [(groups, rows)]),
        "g_idx": DeclaredTensor(["I32"], [(columns,)], needed=False),
    }


def _awq(scheme: Scheme, rows: int, columns: int) -> dict[str, DeclaredTensor]:
    _, groups = scheme.blocks(rows, columns)
    return {
        "qweight": DeclaredTensor(["I32"], [(columns, rows // 8)]),
        "qzeros": DeclaredTensor(["I32"], [(groups, rows // 8)]),
        "scales": DeclaredTensor(_FLOATS, [(groups, rows)]),
    }


LAYOUTS: dict[str, Callable[[Scheme, int, int], dict[str, DeclaredTensor]]] = {
    "packed": _packed,
    "int8": _int8,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "gptq": _gptq,
    "awq": _awq,
}


class Schemes:
    """The schemes in the quantisation of a config.

    Raises: ValueError for an unsupported scheme.
    """

    def __init__(self, stored: Stored):
        method = stored["quant_method"]
        try:
            _check_transforms(stored)
            self._named = [*_METHODS[method](stored)]
            for target, scheme in self._named:
                _exactness(target, "")
                hash(scheme)
        except (
            AttributeError,
            KeyError,
            TypeError,
            re.error,
        ) as error:  # a value of another kind
            _CHECK.fail("quantization_config", f"as {method} has it", first_line(error))

    def of(self, names: Sequence[str]) -> Scheme:
        """The scheme of a module, by its names in the checkpoint and in the model.

        The most exact target counts, and a single scheme applies to all: other libraries name the parts of
        a model otherwise.

        Raises: ValueError for a module that no target names, where there are several schemes.
        """
        schemes = {scheme for _, scheme in self._named}
        if len(schemes) == 1:
            return schemes.pop()
        result = [
            (_exactness(target, name), -place)
            for place, (target, _) in enumerate(self._named)
            for name in names
        ]
        exactness, place = max(result, default=(0, 0))
        if not exactness:
            _fail("targets", f"such that one is for {names[0]}", "none")
        return self._named[-place][1]


def _exactness(target: str, name: str) -> int:
    """Specificity with which a target matches a module; 0 is no match."""
    if target == name or name.startswith(f"{target}."):
        return 3
    if target.startswith("re:"):
        return 2 * (re.match(target.removeprefix("re:"), name) is not None)
    return int(target.isidentifier() and target[:1].isupper())  # a class: that of linear layers


def _check_transforms(stored: Stored) -> None:
    """Raises: ValueError for rotations of compressed-tensors that are not in the weights already."""
    groups = (stored.get("transform_config") or {}).get("config_groups") or {}
    places = {apply["location"] for group in groups.values() for apply in group.get("apply") or ()}
    if at_run_time := sorted(places - {"weight_input", "weight_output"}):
        expected = "of weights alone in the quantization_config"
        _CHECK.fail("transform_config", expected, " and ".join(at_run_time))


def _compressed_tensors(stored: Stored) -> Iterator[tuple[str, Scheme]]:
    """Yields (target, scheme) of each group of a config of compressed-tensors."""
    for group in (stored.get("config_groups") or {}).values():
        if (weights := group.get("weights")) is not None:
            named = group.get("format") or stored.get("format")
            scheme = _of_compressed_tensors(str(named), weights)
            yield from ((target, scheme) for target in group.get("targets") or ())


def _of_compressed_tensors(named: str, weights: Stored) -> Scheme:
    """The scheme of a format of compressed-tensors. Raises: ValueError for an unsupported format."""
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    block, symmetric = _block(weights), bool(weights.get("symmetric", True))
    if weights.get("actorder") in (True, "group", "dynamic"):
        _fail("actorder", "one that leaves groups of columns side by side", weights["actorder"])
    match named, kind, bits:
        case "pack-quantized", "int", _:
            return Scheme("packed", _one_of("num_bits", _BITS, bits), block, symmetric)
        case "int-quantized" | "naive-quantized", "int", 8:
            return Scheme("int8", 8, block, symmetric)
        case "float-quantized" | "naive-quantized", "float", 8 if symmetric:
            return Scheme("fp8", 8, block)
        case "mxfp8-quantized", "float", 8 if symmetric and block == (1, 32):
            return Scheme("fp8", 8, block, exponents=None)
        case "mxfp4-pack-quantized", "float", 4 if symmetric and block == (1, 32):
            return Scheme("mxfp4", 4, block, codes="weight_packed")
        case "nvfp4-pack-quantized", "float", 4 if symmetric and block == (1, 16):
            return Scheme("nvfp4", 4, block, codes="weight_packed")
    how = "symmetric" if symmetric else "with zero points"
    got = f"{named} of {kind} of {bits} bits, {how}, {weights.get('strategy')}, {weights.get('group_size')}"
    return _fail("format", "one that is known, with what it holds", got)


def _block(weights: Stored) -> tuple[int | None, int | None]:
    """(rows, columns) that share a scale, None for all of them. Raises: ValueError for another strategy."""
    size, structure = weights.get("group_size"), weights.get("block_structure")
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    match weights.get("strategy") or usual:
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group" | "tensor_group":
            return 1, _columns("group_size", size, 16)
        case "block":
            return _rows_and_columns("block_structure", structure)
        case other:
            return _fail("strategy", "tensor, channel, group, tensor_group or block", other)


def _rows_and_columns(key: str, block: Any) -> tuple[int, int]:
    match block:
        case [int(high), int(wide)] if high > 0:
            return high, _columns(key, wide)
    return _fail(key, "a number of rows and one of columns", block)


def _columns(key: str, columns: Any, multiple: int = 32) -> int:
    if type(columns) is not int or columns <= 0 or columns % multiple:
        _fail(key, f"of a multiple of {multiple} columns", columns)
    return columns


def _awq_of(stored: Stored) -> Iterator[tuple[str, Scheme]]:
    """AutoAWQ's gemm, and what runs the same codes."""
    _one_of("version", ("gemm", "exllama", "ipex"), str(stored.get("version") or "gemm").lower())
    yield "", Scheme("awq", _one_of("bits", (4,), stored.get("bits")), _group(stored), symmetric=False)


def _gptq_of(stored: Stored) -> Iterator[tuple[str, Scheme]]:
    """GPTQ's integers, by module where `dynamic` says so. Raises: ValueError for an unknown version."""
    stated = {key: stored[key] for key in ("checkpoint_format", "format") if stored.get(key)}
    for key, version in stated.items():
        _one_of(key, ("gptq", "gptq_v2"), str(version).lower())
    versions = {str(version).lower() for version in stated.values()}
    if len(versions) > 1:
        _fail("checkpoint_format", "the same as format", " and ".join(map(str, stated.values())))

    def scheme(entry: Stored) -> Scheme:
        bits = _one_of("bits", (2, 3, 4, 8), entry.get("bits"))
        less = 0 if versions == {"gptq_v2"} else 1
        return Scheme("gptq", bits, _group(entry), entry.get("sym"), less=less)

    for pattern, entry in (stored.get("dynamic") or {}).items():
        if not pattern.startswith("-"):  # its modules are dense
            yield f"re:{pattern.removeprefix('+:')}", scheme({**stored, **entry})
    yield "Linear", scheme(stored)


# {how AutoRound names a packing: the layout, and what zero points are stored less}
_PACKINGS = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq"), ("gptq", 1)),
    **dict.fromkeys(("auto_round:gptqmodel", "auto_round"), ("gptq", 0)),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), ("awq", 0)),
}


def _auto_round(stored: Stored) -> Iterator[tuple[str, Scheme]]:
    """AutoRound's integers, in the packing of GPTQ or AWQ; other data types are written in other layouts."""
    packing = stored.get("packing_format", "auto_round:gptq")
    layout, less = _PACKINGS[_one_of("packing_format", [*_PACKINGS], packing)]
    for key in ("rotation_config", "spinquant_config"):
        if stored.get(key):
            _fail(key, "absent", "rotations at run time")

    def scheme(entry: Stored) -> Scheme:
        _one_of("data_type", ("int",), entry.get("data_type", "int"))
        _one_of("act_bits", (None, 16, 32), entry.get("act_bits"))
        bits = _one_of("bits", (4,) if layout == "awq" else _BITS, entry.get("bits"))
        symmetric = entry.get("sym") if layout == "gptq" else False
        return Scheme(layout, bits, _group(entry), symmetric, less=less)

    for name, entry in (stored.get("extra_config") or {}).items():
        if entry.get("bits", 0) < 16:  # else its modules are dense
            is_name = re.fullmatch(r"[\w.-]+", name) is not None
            yield name if is_name else f"re:.*(?:{name})", scheme({**stored, **entry})
    yield "Linear", scheme(stored)


def _group(stored: Stored) -> tuple[int, int | None]:
    size = stored.get("group_size")
    return 1, None if size == -1 else _columns("group_size", size)


def _fp8_of(stored: Stored) -> Iterator[tuple[str, Scheme]]:
    """FP8 of DeepSeek and transformers."""
    _one_of("fmt", ("e4m3", "float8_e4m3fn"), str(stored.get("fmt") or "e4m3").lower())
    block: Any = stored.get("weight_block_size", (128, 128))
    block = (None, None) if block is None else _rows_and_columns("weight_block_size", block)
    exponents = stored.get("scale_fmt") == "ue8m0"
    yield "", Scheme("fp8", 8, block, scale="weight_scale_inv", exponents=exponents)


# {what ModelOpt calls a scheme: the scheme}; those of other factors, as of smoothing, are none of them.
_MODELOPT = {
    "FP8": Scheme("fp8", 8, (None, None)),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", 8, (1, None)),
    "FP8_PB_WO": Scheme("fp8", 8, (128, 128)),
    "MXFP8": Scheme("fp8", 8, (1, 32), exponents=None),
    **dict.fromkeys(("MXFP4", "W4A8_MXFP4_FP8"), Scheme("mxfp4", 4, (1, 32))),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"), Scheme("nvfp4", 4, (1, 16))),
}


def modelopt_beside(file: str) -> dict[str, Any]:
    """quantization_config from a hf_quant_config.json, all that older versions of ModelOpt write.

    Raises: ValueError for a file without one.
    """
    try:
        return {**json.loads(Path(file).read_text())["quantization"], "quant_method": "modelopt"}
    except (ValueError, KeyError, TypeError):
        return _CHECK.fail(Path(file).name, "as ModelOpt writes it", "one without a quantization in JSON")


def _modelopt(stored: Stored) -> Iterator[tuple[str, Scheme]]:
    """ModelOpt's algorithms, by layer where they are mixed. Raises: ValueError for another group size."""
    mixed = stored.get("quant_algo") == "MIXED_PRECISION"
    for target, entry in (stored.get("quantized_layers") or {}).items() if mixed else [("", stored)]:
        named = _one_of("quant_algo", [*_MODELOPT], str(entry.get("quant_algo")).upper())
        scheme = _MODELOPT[named]
        size = entry.get("group_size") or scheme.block[1]
        if scheme.block[0] == 1 and size != scheme.block[1]:
            _fail("group_size", f"{scheme.block[1]} for {named}", size)
        yield target, scheme


_METHODS: dict[str, Callable[[Stored], Iterator[tuple[str, Scheme]]]] = {
    "auto-round": _auto_round,
    "awq": _awq_of,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8_of,
    "gptq": _gptq_of,
    "modelopt": _modelopt,
}
METHODS = tuple(_METHODS)


def _one_of(key: str, known: Sequence[Any], value: Any) -> Any:
    if value not in known:
        _fail(key, " or ".join(map(str, known)), value)
    return value


def _fail(key: str, expected: str, got: object) -> NoReturn:
    _CHECK.fail(f"{key} of the quantization_config", expected, got)
