"""Predicted peak of memory of a training step, and the number of trained parameters, from shapes alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..transformers.basics.interface import experts_of, is_experts, projections
from ..transformers.checkpoints.quantize.sizes import top_k
from ..transformers.modules.loss import LARGEST

_ADAPTER = 16  # bytes a parameter: itself, its gradient and Adam's two moments, in float32
_SCORES = 12  # bytes a pair of tokens in a head: scores, probabilities and their gradients
_ROWS = 12  # hidden states that norms, residual sums and their gradients take for a token


@dataclass
class Ranks:
    """LoRA ranks of linear layers and of experts, 0 for none.

    Attributes:
        targets: names of the linear layers that get one, or the ends of names; None for all but the head.
    """

    linear: int
    experts: int
    targets: list[str] | None = None


@dataclass
class Peak:
    """Peak bytes of a training step, by purpose."""

    weights: int
    adapter: int
    checkpoints: int
    layer: int
    attention: int
    loss: int

    @property
    def total(self) -> int:
        return self.weights + self.adapter + self.checkpoints + self.layer + self.attention + self.loss


def targets_in(model: Any, targets: list[str] | None) -> dict[str, nn.Linear]:
    """{name: layer} of the linear layers of a dense model that get LoRA.

    Raises: ValueError for a target that is no linear layer.
    """
    head = model.get_output_embeddings()
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module is not head
    }
    if targets is None:
        return linears
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linears):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise ValueError(f"--targets must be linear layers, of which there are {known}, got {target!r}")
    ends = tuple(f".{target}" for target in targets)
    return {name: linear for name, linear in linears.items() if f".{name}".endswith(ends)}


def short_names(model: Any, targets: Mapping[str, nn.Linear]) -> list[str]:
    """Names for LoraConfig.target_modules: the last part, or the whole name where that part is ambiguous."""
    ends = {name: name.rpartition(".")[2] for name in targets}
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in targets}
    return list(dict.fromkeys(name if end in others else end for name, end in ends.items()))


def parameters_of(model: Any, ranks: Ranks) -> int:
    """The number of LoRA parameters on a dense model, usually on the meta device."""
    linears = targets_in(model, ranks.targets).values()
    total = sum(ranks.linear * (linear.in_features + linear.out_features) for linear in linears)
    for experts in experts_of(model).values() if ranks.experts else ():
        for projection in projections(experts):
            count, *matrix = getattr(experts, projection).shape
            total += ranks.experts * count * sum(matrix)
    return total


def peak_of(model: Any, weights: int, ranks: Ranks, rows: int, length: int, size: int) -> Peak:
    """Peak of a step with gradient checkpointing: checkpoints, one layer with gradients, a chunk of logits.

    Args:
        model: the dense model, most often on the meta device.
        weights: bytes of the weights in their formats.
        rows, length: of a batch.
        size: bytes of a number of the hidden states.
    """
    config = model.config.get_text_config()
    tokens, width = rows * length, config.hidden_size
    layers = config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", 0)
    inner = max(map(_numbers_a_token, _layers(model)), default=0) + _ROWS * width
    chunk = min(LARGEST, tokens * config.vocab_size)
    return Peak(
        weights,
        _ADAPTER * parameters_of(model, ranks),
        layers * tokens * width * size,
        tokens * inner * size,
        _SCORES * heads * rows * length**2,  # torch's backward of attention has them on mps
        4 * 4 * chunk,  # logits, their logarithms and gradients, in float32 and in the dtype of the model
    )


def _layers(model: Any) -> Iterator[nn.Module]:
    """The layers of the decoder: the modules of its longest list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    yield from max(lists, key=len, default=())


def _numbers_a_token(layer: nn.Module) -> int:
    """The number of inputs and outputs of a layer's matrices for one token."""
    total = 0
    inside: set[nn.Module] = set()
    for module in layer.modules():
        if module in inside:
            continue
        if is_experts(module):
            inside.update(module.modules())
            for projection in projections(module):
                total += top_k(module) * sum(getattr(module, projection).shape[1:])
        elif isinstance(module, nn.Linear):
            total += module.in_features + module.out_features
    return total
