"""A block with experts that no model of transformers has, but that follows its interface."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from support import tiny_models


class Config:
    _experts_implementation = "eager"


@use_experts_implementation
class FutureExperts(nn.Module):
    """Follows the interface, with an activation that no operator knows."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.empty(4, 2 * 12, 16))
        self.down_proj = nn.Parameter(torch.empty(4, 16, 12))

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.cos(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for token, (ids, weights) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                hidden = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
                result[token] += weight * F.linear(hidden, self.down_proj[expert])
        return result


class FutureRouter(nn.Module):
    """Not one of moe_router's formulas: the weights are squared."""

    def __init__(self):
        super().__init__()
        self.top_k = 2
        self.weight = nn.Parameter(torch.empty(4, 16))

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        values, ids = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, values.square(), ids


class FutureBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = FutureRouter()
        self.experts = FutureExperts(Config())

    def forward(self, hidden_states):
        _, weights, ids = self.router(hidden_states)
        return self.experts(hidden_states, ids, weights)


def random_block(cls: type[FutureBlock]) -> tuple[FutureBlock, torch.Tensor]:
    """A block with random parameters, and an input for it."""
    block = cls().eval()
    tiny_models.randomise(block, 0)
    return block, torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
