"""What a prompt takes beside weights and cache."""

from typing import Any

from torch import nn

from ..transformers.checkpoints.sizes import top_k
from ..transformers.interface import experts_of


def prompt_bytes(model: Any, tokens: int) -> int:
    """Bytes of the activations of a layer for so many tokens, at most.

    They are counted as if the inputs and outputs of all matrices of a layer lived at the same time. Those of
    experts have a row for each pair of token and slot; the router's logits and routing weights are float32.
    """
    text, count = model.get_decoder(), model.config.get_text_config().num_hidden_layers
    lists = [part for part in text.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    itemsize = next(model.parameters()).element_size()
    return tokens * max(map(_row, lists[0] if lists else [text])) * itemsize


def _row(layer: nn.Module) -> int:
    """The numbers that a layer computes for a token."""
    experts = experts_of(nn.ModuleList([layer]))
    inside = {id(part) for module in experts.values() for part in module.modules()}
    row = sum(
        module.in_features + module.out_features
        for module in layer.modules()
        if isinstance(module, nn.Linear) and id(module) not in inside
    )
    for module in experts.values():
        matrices = [parameter for parameter in module.parameters() if parameter.dim() == 3]
        row += top_k(module) * sum(sum(parameter.shape[1:]) for parameter in matrices)
    return row
