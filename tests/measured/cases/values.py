"""Makes inputs: random values on a GPU, or memory without contents for a recording."""

import torch
from torch import Tensor


class Values:
    """Random tensors; `number`, the index of the input set, seeds them."""

    def __init__(self, device: str, seed: int, number: int = 0):
        self.device, self.seed, self.number = device, seed, number
        self.generator = torch.Generator(device).manual_seed(seed * 1009 + number)

    def normal(self, *shape: int, dtype=torch.float32, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        values = torch.randn(shape, device=self.device, generator=self.generator)
        return values.mul_(scale).add_(offset).to(dtype)

    def uniform(self, *shape: int, dtype=torch.float32, low: float = 0.0, high: float = 1.0) -> Tensor:
        values = torch.rand(shape, device=self.device, generator=self.generator)
        return values.mul_(high - low).add_(low).to(dtype)

    def integers(self, *shape: int, dtype, low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator, dtype=dtype)

    def ids(self, tokens: int, top_k: int, experts: int, dtype=torch.int32) -> Tensor:
        """Distinct experts for each token. One token's take turns: its sets touch every expert."""
        if tokens > 1:
            order = torch.rand(tokens, experts, device=self.device, generator=self.generator)
            return order.topk(top_k).indices.to(dtype)
        generator = torch.Generator().manual_seed(self.seed)
        first = self.number * top_k
        rounds = -(-(first + top_k) // experts)
        order = torch.cat([torch.randperm(experts, generator=generator) for _ in range(rounds)])
        chosen = order[first : first + top_k]
        if len(chosen.unique()) < top_k:  # it lies across two rounds
            chosen = torch.randperm(experts, generator=generator)[:top_k]
        return chosen[None].to(self.device, dtype)

    def skewed_ids(self, tokens: int, top_k: int, experts: int, dtype=torch.int32) -> Tensor:
        """Distinct experts for each token, later ones more often, and two sentinels."""
        liking = torch.linspace(1.0, 1.5, experts, device=self.device)
        scores = torch.rand(tokens, experts, device=self.device, generator=self.generator) * liking
        ids = scores.topk(top_k).indices.to(dtype)
        ids[:: max(2, tokens // 2), 0] = -1
        return ids


class Shapes:
    """The same methods, for tensors whose contents do not matter."""

    def __init__(self, device: str):
        self.device = device

    def normal(self, *shape: int, dtype=torch.float32, **_) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    uniform = integers = normal

    def ids(self, tokens: int, top_k: int, experts: int, dtype=torch.int32) -> Tensor:
        return torch.empty(tokens, top_k, dtype=dtype, device=self.device)

    skewed_ids = ids
