"""The bytes of weights that a model reads for a token, and those of a quantised weight."""

from torch import Tensor, nn

from ...quantization import Format
from ..interface import experts_of

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk", "top_k")


def bytes_a_token(model: nn.Module) -> int:
    """Bytes of the parameters that decoding one token reads.

    A token reads the experts that it is routed to, one row of an embedding, and everything else; shared
    parameters once.
    """
    experts = experts_of(model)
    total = sum(map(_routed, experts.values()))
    seen = {id(p) for module in experts.values() for p in module.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if _is_embedding(module):
                total += parameter.nbytes // max(1, parameter.shape[0])
            elif id(parameter) not in seen:
                seen.add(id(parameter))
                total += parameter.nbytes
    return total


def quantized_bytes(weight: Tensor, format: Format) -> int:
    """The bytes of a dense weight once it is quantised: words, scales and biases."""
    scale = 2 * weight.element_size() if format.has_biases else 1
    return weight.numel() * format.bits // 8 + weight.numel() // format.group_size * scale


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or hasattr(module, "num_embeddings")


def _routed(experts: nn.Module) -> int:
    parameters = list(experts.parameters())
    count = next(p.shape[0] for p in parameters if p.dim() == 3)
    configured = (getattr(experts.config, name, None) for name in _TOP_K)
    top_k = next((k for k in configured if isinstance(k, int)), count)
    return sum(p.nbytes for p in parameters) * min(top_k, count) // count
