"""Bytes of a model's weights, of the weights that a token reads, and of everything beside them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..._limits import LARGEST_CHUNK
from ...disk.file import uses_page_cache
from ...models.basics.interface import (
    count_of,
    experts_of,
    get_experts,
    weights_in,
    weights_of_experts,
)
from ...models.basics.report import QuantizationReport, QuantizedProjection
from ...quantization import Format, QuantizedWeight
from .target import Target
from .tied import tied_layers

_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k",
)
_TABLE = 1 / 16  # the share of memory from which on an embedding is better on the disk
_BESIDE = 10**9  # bytes of memory for all else than weights and activations, where they fill it


def bytes_a_token(model: nn.Module, sizes: Mapping[Tensor, int] = MappingProxyType({})) -> int:
    """Bytes of the parameters that decoding one token reads.

    A token reads the experts that it is routed to, one row of an embedding, and everything else of the
    language model, but no towers for images or sounds; shared parameters once.

    Args:
        sizes: {parameter: its bytes} where they are to differ, as `quantized_sizes` has them.
    """
    text = nn.ModuleList(_language_model(model))
    experts = experts_of(text)
    total = sum(_routed(module, sizes) for module in experts.values())
    seen = {id(p) for module in experts.values() for p in weights_of_experts(module)}
    for module in text.modules():
        for parameter in weights_in(module, recurse=False):
            nbytes = sizes.get(parameter, parameter.nbytes)
            if hasattr(module, "num_embeddings"):
                total += nbytes // max(1, parameter.shape[0])
            elif id(parameter) not in seen:
                seen.add(id(parameter))
                total += nbytes
    return total


def _language_model(model: Any) -> list[nn.Module]:
    """Decoder and output head of a transformers model; any other module itself."""
    if not hasattr(model, "get_decoder"):
        return [model]
    parts = (model.get_decoder(), model.get_output_embeddings())
    return [part for part in parts if part is not None]


def total_bytes(module: nn.Module, sizes: Mapping[Tensor, int] = MappingProxyType({})) -> int:
    """Bytes of all weights; `sizes` as for `bytes_a_token`."""
    return sum(sizes.get(weight, weight.nbytes) for weight in weights_in(module))


def bytes_of_experts(experts: nn.Module, sizes: Mapping[Tensor, int] = MappingProxyType({})) -> int:
    """Bytes of the weights of experts; `sizes` as for `bytes_a_token`."""
    return sum(sizes.get(weight, weight.nbytes) for weight in weights_of_experts(experts))


def quantized_sizes(targets: Iterable[Target]) -> dict[Tensor, int]:
    """{parameter: bytes in its format} of dense modules that are to be quantised."""
    sizes: dict[Tensor, int] = {}
    for target in targets:
        of_target: Counter[Tensor] = Counter()
        for part, format in target.formats.items():
            # Up projections with a format of their own are dense in one parameter with their gates.
            name = part if part in target.parameters else target.parameters[0]
            weights = target.tensors(name)
            of_target.update(dict.fromkeys(weights, 0))
            of_target[weights[0]] += quantized_bytes(target.rows_first(target.dense(part)), format)
        sizes |= of_target
    return sizes


def add_stored(
    report: QuantizationReport, target: Target, parameter: str, format: Format, error: float = 0.0
) -> None:
    """Adds a parameter that a checkpoint stores quantised to a report."""
    dense = target.rows_first(target.dense(parameter))
    entry = QuantizedProjection(parameter, error, dense.nbytes, quantized_bytes(dense, format), format)
    report.modules.setdefault(target.name, []).append(entry)


def quantized_bytes(weight: Tensor, format: Format) -> int:
    """Bytes of a weight in a format: packed codes, scales and biases."""
    return QuantizedWeight.empty(weight.shape, weight.dtype, torch.device("meta"), format).nbytes


def _routed(experts: nn.Module, sizes: Mapping[Tensor, int]) -> int:
    """Bytes of the experts that one token reads."""
    return bytes_of_experts(experts, sizes) * top_k(experts) // count_of(experts)


def share_of_token(experts: nn.Module) -> float:
    """Share of the experts of a module that a token is routed to."""
    return top_k(experts) / count_of(experts)


def top_k(experts: nn.Module) -> int:
    """Number of experts that a token is routed to."""
    count, config = count_of(experts), vars(experts).get("config")
    inside = [] if config is None else [each for each in vars(config).values() if hasattr(each, "to_dict")]
    configured = (getattr(each, name, None) for each in (config, *inside) for name in _TOP_K)
    return min(next((k for k in configured if isinstance(k, int)), count), count)


def prompt_bytes(model: Any, tokens: int) -> int:
    """Upper bound in bytes of one layer's activations for `tokens` tokens.

    It assumes that inputs and outputs of all matrices of a layer are alive at once. Experts have a row for
    each pair of a token and an expert; the router's logits and routing weights are float32.

    Raises: ValueError for a model without layers.
    """
    text, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    if count < 1:
        raise ValueError(f"the config's num_hidden_layers must be at least 1, got {count}")
    lists = [part for part in text.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    itemsize = next(model.parameters()).element_size()
    return tokens * max(map(_row, lists[0] if lists else [text])) * itemsize


def _row(layer: nn.Module) -> int:
    """Number of activation values that a layer computes per token."""
    experts = experts_of(nn.ModuleList([layer]))
    inside = {id(part) for module in experts.values() for part in module.modules()}
    row = sum(
        module.in_features + module.out_features
        for module in layer.modules()
        if isinstance(module, nn.Linear) and id(module) not in inside
    )
    for module in experts.values():
        row += top_k(module) * sum(_widths(module))
    return row


def _widths(module: nn.Module) -> Iterator[int]:
    """Rows and columns of the matrices of an expert."""
    experts = get_experts(module)
    return (size for projection in experts.projections for size in experts.shape(module, projection)[1:])


def large_tables(
    model: Any, limit: int, sizes: Mapping[Tensor, int] = MappingProxyType({})
) -> dict[str, int]:
    """{name: bytes} of embeddings that fill too much of some memory, and whose weights no other layer has."""
    shared = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    tied = tied_layers(model)
    tables = {
        name: total_bytes(module, sizes)
        for name, module in model.named_modules()
        if hasattr(module, "num_embeddings") and name not in {*tied, *tied.values()}
        if all(shared[id(p)] == 1 for p in module._parameters.values())
    }
    return {name: size for name, size in tables.items() if size > _TABLE * limit}


def room_for_experts(model: Any, weights: int, experts: int, tables: int, limit: int) -> int | None:
    """Bytes of a model's experts that some memory has room for; None if all weights fit.

    Args:
        weights, experts: bytes of all weights, and of the experts among them.
        tables: bytes of embeddings that are on the disk unless all fit, by `large_tables`.
        limit: bytes of memory for the model with all that it computes.
    """
    room = limit - prompt_bytes(model, LARGEST_CHUNK)
    return None if weights <= room else min(experts, room - (weights - tables - experts) - _BESIDE)


def memory_for_slots(experts: int, room: int, least: int) -> int:
    """Bytes of the slots that experts on the disk get in their room; the page cache has the rest of it.

    Reads lose more than further slots save once the page cache is short of memory. It gets half of the room,
    or half of the bytes of experts on the disk, if that is less. Where reads go past it, slots have all.

    Args:
        experts: bytes of all experts.
        room: by `room_for_experts`.
        least: bytes that a token's experts need.
    """
    if not uses_page_cache():
        return room
    return min(room, max(least, room // 2, 2 * room - experts))
