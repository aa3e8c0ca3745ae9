"""Routing, combining and a norm beside the same in PyTorch: `kernels benchmark PATH`."""

import torch
from kernels.benchmark import Benchmark


class Routing(Benchmark):
    seed = 0

    def setup_token(self):
        self.logits = torch.randn(1, 128, device=self.device)

    def setup_prompt(self):
        self.logits = torch.randn(512, 128, device=self.device)

    def benchmark_token(self):
        self.out, _ = self.kernel.moe_router_topk_softmax(self.logits, 8, norm_topk_prob=True)

    def verify_token(self):
        weights, _ = self.logits.softmax(-1).topk(8)
        return weights / weights.sum(-1, keepdim=True)

    benchmark_prompt, verify_prompt = benchmark_token, verify_token


class Combining(Benchmark):
    """Of 8 experts and the residual, in a layer of 2,048 columns."""

    seed = 0

    def _filled(self, tokens):
        options = {"device": self.device, "dtype": torch.float16}
        self.expert_out = torch.randn(tokens, 8, 2048, **options)
        self.weights = torch.rand(tokens, 8, device=self.device) / 8
        self.residual = torch.randn(tokens, 2048, **options)

    def setup_token(self):
        self._filled(1)

    def setup_prompt(self):
        self._filled(512)

    def benchmark_token(self):
        self.out = self.kernel.moe_weighted_reduce(self.expert_out, self.weights, residual=self.residual)

    def verify_token(self):
        total = (self.expert_out.float() * self.weights.unsqueeze(-1)).sum(1)
        return (total + self.residual.float()).to(self.residual.dtype)

    benchmark_prompt, verify_prompt = benchmark_token, verify_token


class ResidualNorm(Benchmark):
    seed = 0

    def setup(self):
        options = {"device": self.device, "dtype": torch.float16}
        self.residual, self.x = (torch.randn(512, 2048, **options) for _ in range(2))
        self.weight = torch.rand(2048, **options)

    def benchmark_rows(self):
        self.out, _ = self.kernel.fused_residual_norm(self.residual, self.x, self.weight, norm_eps=1e-6)

    def verify_rows(self):
        return torch.nn.functional.rms_norm(self.residual + self.x, (2048,), self.weight, 1e-6)
