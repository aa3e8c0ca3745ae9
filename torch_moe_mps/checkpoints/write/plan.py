"""Plan of a conversion: the format of each weight, and sizes, from shapes alone."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from ..._text import aligned, in_unit
from ...models.basics.interface import codes_of
from ...models.basics.report import any_layer
from ...models.modules.linears import formats_in
from ...quantization import Format
from ..quantize.sizes import bytes_a_token
from ..quantize.target import quantizable
from ..quantize.tied import tied_layers
from ..quantize.weights import quantized_names
from ..quantizer import quantizer_for
from ..source import Source


class Weight(NamedTuple):
    """A weight, its format before and after ("bfloat16" if it is dense) and its bytes."""

    name: str
    stored: str
    before: int
    format: str
    after: int


class LoadPlan(NamedTuple):
    """Bytes of a checkpoint before and after conversion: in all, and read by a token."""

    weights: list[Weight]
    before: int
    after: int
    token_before: int
    token_after: int
    quantized: int
    dense: int

    def as_json(self, errors: list[list[Any]]) -> dict[str, Any]:
        """Everything, with the errors of `QuantizationReport.rows`."""
        result = {(name, parameter): error for name, parameter, error, *_ in errors}
        weights = [weight._asdict() for weight in self.weights]
        for weight in weights:
            owner, _, parameter = weight["name"].rpartition(".")
            error = result.get((owner, parameter), result.get((weight["name"], "weight")))
            weight |= {} if error is None else {"error": error}
        return self._asdict() | {"weights": weights}

    def table(self) -> str:
        """A line for each kind of weight; equal layers share it."""
        kinds: dict[tuple[str, str, str], list[Weight]] = defaultdict(list)
        for weight in self.weights:
            kinds[any_layer(weight.name), weight.stored, weight.format].append(weight)
        show = in_unit(self.before)
        rows = [("weight", "is", "becomes", "n", "before", "after")]
        for (name, stored, format), weights in kinds.items():
            before, after = sum(w.before for w in weights), sum(w.after for w in weights)
            rows.append((name, stored, format, str(len(weights)), show(before), show(after)))
        return "\n".join(aligned(rows, 3))


def planned(
    source: Source,
    model: PreTrainedModel,
    files: list[str],
    recipe: Mapping[str, Any] | None,
    sizes_of: Callable[[PreTrainedModel], Mapping[Tensor, int]] | None = None,
) -> LoadPlan:
    """Plan of quantising a model on the meta device, which then has the planned weights.

    Args:
        sizes_of: returns {tensor: bytes in the output} for the model, where they differ.

    Raises: ValueError for a recipe that does not fit.
    """
    count, tied = len(quantizable(model)), tied_layers(model)
    quantizer = quantizer_for(source, model, files, recipe)
    stored = {} if quantizer is None else quantizer.layout.stored_formats()
    before, token_before = _weights(model, stored, tied), bytes_a_token(model)
    if quantizer is not None:
        quantizer.place_empty(model, lambda name: True)
    quantized = {name: formats for name, m in model.named_modules() if (formats := formats_in(m))}
    formats = {
        f"{name}.{p}": format for name, of_module in quantized.items() for p, format in of_module.items()
    }
    sizes = {} if sizes_of is None else sizes_of(model)
    after = _weights(model, formats, tied, sizes)
    weights = [Weight(name.removesuffix(".weight"), *before[name], *after[name]) for name in before]
    total, new = (sum(size for _, size in sizes.values()) for sizes in (before, after))
    token = bytes_a_token(model, sizes)
    return LoadPlan(weights, total, new, token_before, token, len(quantized), count - len(quantized))


def _weights(
    model: PreTrainedModel,
    formats: Mapping[str, Format],
    tied: Collection[str],
    sizes: Mapping[Tensor, int] = MappingProxyType({}),
) -> dict[str, tuple[str, int]]:
    """{name of a dense parameter: (format it is stored in, bytes)}"""
    parts: dict[str, str] = {}
    for name in formats:
        owner, _, parameter = name.rpartition(".")
        parts |= {f"{owner}.{part}": name for part in quantized_names(parameter)}
    result: dict[str, tuple[str, int]] = {}
    modules = [(owner, module._parameters | codes_of(module)) for owner, module in model.named_modules()]
    seen: set[int] = set()
    for owner, part, tensor in (
        (owner, part, tensor) for owner, tensors in modules for part, tensor in tensors.items()
    ):
        if owner not in tied and tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            part = f"{owner}.{part}".lstrip(".")
            name = parts.get(part, part)
            format = str(formats.get(name, str(tensor.dtype).removeprefix("torch.")))
            result[name] = format, result.get(name, (format, 0))[1] + sizes.get(tensor, tensor.nbytes)
    return result
