"""Bytes of weights that a token reads, and of quantised weights."""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ....quantization import Format, QuantizedWeight
from ...basics.interface import experts_of, weights_in
from ...basics.report import QuantizationReport, QuantizedProjection
from .target import Target

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk", "top_k")


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
    seen = {id(p) for module in experts.values() for p in weights_in(module)}
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


def quantized_sizes(targets: Iterable[Target]) -> dict[Tensor, int]:
    """{parameter: bytes in its format} of dense modules that are to be quantised."""
    sizes: dict[Tensor, int] = {}
    for target in targets:
        own: Counter[Tensor] = Counter()
        for part, format in target.formats.items():
            # Up projections with a format of their own are dense in one parameter with their gates.
            name = part if part in target.parameters else target.parameters[0]
            own[getattr(target.module, name)] += quantized_bytes(
                target.rows_first(target.dense(part)), format
            )
        sizes |= own
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
    parameters = list(weights_in(experts))
    count = next(p.shape[0] for p in parameters if p.dim() == 3)
    return sum(sizes.get(p, p.nbytes) for p in parameters) * top_k(experts) // count


def top_k(experts: nn.Module) -> int:
    """Number of experts that a token is routed to."""
    count = next(p.shape[0] for p in weights_in(experts) if p.dim() == 3)
    configured = (getattr(experts.config, name, None) for name in _TOP_K)
    return min(next((k for k in configured if isinstance(k, int)), count), count)
