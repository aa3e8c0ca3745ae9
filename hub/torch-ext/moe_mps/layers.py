# SPDX-License-Identifier: BSD-3-Clause
"""Layers by the names under which transformers' kernel mapping asks for them. Inference only.

A layer's forward has the signature of the forward that it replaces, and reads that module's own attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import operators as ops

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check(is_right: bool, name: str, expected: str, got: object) -> None:
    if not is_right:
        raise ValueError(f"moe_mps: {name} must be {expected}, got {got}")


class RMSNorm(nn.Module):
    has_backward = False
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, norm_eps=self.variance_epsilon)


class RMSNormZeroCentered(nn.Module):
    """The weight is stored minus 1."""

    has_backward = False
    can_torch_compile = True
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, norm_eps=self.eps, norm_weight_offset=1.0)


class RMSNormGated(nn.Module):
    """Of the module's own weight, variance_epsilon and activation, which is silu or sigmoid."""

    has_backward = False
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        activation = "sigmoid" if getattr(self, "activation", "silu") == "sigmoid" else "silu"
        x, gate = hidden_states, gate.to(hidden_states.dtype)
        return ops.rms_norm_gated(
            x,
            gate,
            self.weight,
            norm_eps=self.variance_epsilon,
            norm_weight_offset=0.0,
            activation=activation,
        )


class SoftmaxTopKRouter(nn.Module):
    """Of Qwen3.5, and with a bias for the choice of Laguna, whose scores are sigmoids."""

    has_backward = False
    can_torch_compile = True
    weight: Tensor
    top_k: int
    hidden_dim: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, self.hidden_dim)
        bias = getattr(self, "e_score_correction_bias", None)
        logits = nn.functional.linear(x, self.weight)
        softcap = getattr(self, "router_logit_softcapping", 0.0)
        if bias is not None:
            logits = logits.float()
            if softcap > 0.0:
                logits = torch.tanh(logits / softcap) * softcap
        scoring = "softmax" if bias is None else "sigmoid"
        options = {"scoring": scoring, "correction_bias": bias, "norm_topk_prob": True, "sum_eps": 0.0}
        weights, ids = ops.moe_router(logits, self.top_k, **options)
        return logits, weights.to(x.dtype), ids.long()


class MegaBlocksMoeMLP(nn.Module):
    """Router and experts of gpt-oss, with dense weights."""

    has_backward = False
    router: nn.Module
    experts: nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        router, experts = self.router, self.experts
        gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
        is_dense = gate_up is not None and down is not None and gate_up.dtype in _DTYPES
        _check(is_dense, "experts", "dense", type(experts).__name__)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _check(gate_up.shape[1] == x.shape[-1], "hidden_states", f"of width {gate_up.shape[1]}", x.shape[-1])
        width = gate_up.shape[2] // 2
        _check(
            tuple(down.shape[1:]) == (width, x.shape[-1]), "down_proj", f"of {width} rows", tuple(down.shape)
        )
        logits = nn.functional.linear(x, router.weight, router.bias)
        options = {"scoring": "softmax_after_topk", "norm_topk_prob": False}
        weights, ids = ops.moe_router(logits, router.top_k, **options)
        # Two products, which read [E, H, N] where it lies: moe_experts would copy both stacks in each call.
        rows = ops.expert_mm(x, ids, gate_up, None, transposed=True) + experts.gate_up_proj_bias[ids.long()]
        options = {"alpha": float(experts.alpha), "limit": float(experts.limit), "interleaved": True}
        rows = ops.expert_activation(rows, activation="swiglu_oai", **options)
        rows = ops.expert_mm(rows, ids, down, None, transposed=True) + experts.down_proj_bias[ids.long()]
        out = ops.moe_weighted_reduce(rows, weights)
        return out.view(hidden_states.shape), weights.to(x.dtype)


class apply_rotary_transformers(nn.Module):
    """q and k [B, H, T, D], turned in halves by cos and sin [B or 1, T, D], or [B or 1, T, D / 2]."""

    has_backward = False

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        batch, width = q.shape[0], q.shape[-1]
        is_right = cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[-1] in (width, width // 2)
        expected = f"of shape [B or 1, T, D or D / 2], with B, D = {(batch, width)}"
        _check(is_right, "cos", expected, tuple(cos.shape))
        turned = ops.rope(q, k, cos, sin, rotary_dim=width)
        return turned if unsqueeze_dim == 1 else tuple(x.transpose(1, 2) for x in turned)


def _convolved(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Causal convolution of x [B, C, T] behind `state` [B, C, L], which is moved on in place."""
    _check(activation in (None, "silu", "swish"), "activation", "silu, swish or None", activation)
    least = weight.shape[-1] - 1
    _check(state.shape[-1] >= least, "conv_state", f"of {least} positions or more", state.shape[-1])
    name = "none" if activation is None else "silu"
    out = ops.causal_conv1d_update_(x.transpose(1, 2), state, weight, bias, activation=name)
    return out.transpose(1, 2)


class causal_conv1d_fn(nn.Module):
    has_backward = False

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        batch, channels, _ = hidden_states.shape
        state = hidden_states.new_zeros(batch, channels, weight.shape[-1] - 1)
        return _convolved(hidden_states, state, weight, bias, activation)


class causal_conv1d_update(nn.Module):
    has_backward = False

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return _convolved(hidden_states, conv_state, weight, bias, activation)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    l2norm: bool,
) -> tuple[Tensor, Tensor | None]:
    """q, k [B, T, Hk, Dk], v [B, T, H, Dv], beta [B, T, H], g [B, T, H] or of channels [B, T, H, Dk]."""
    dtype, (batch, _, _, width) = query.dtype, key.shape
    heads, value_width = value.shape[2:]
    _check(heads % key.shape[2] == 0, "value", f"of a multiple of the key's {key.shape[2]} heads", heads)
    state = query.new_zeros(batch, heads, width, value_width, dtype=torch.float32)
    if initial_state is not None:
        state.copy_(initial_state)
    out = ops.gated_delta_rule_(
        *(query, key.to(dtype), value.to(dtype), g, state),
        scale=width**-0.5,
        beta=beta,
        l2norm_eps=1e-6 if l2norm else None,
    )
    return out, state if output_final_state else None


class chunk_gated_delta_rule(nn.Module):
    has_backward = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return _delta_rule(
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel
        )


class fused_recurrent_gated_delta_rule(nn.Module):
    has_backward = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return _delta_rule(
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel
        )


# A decay for each channel of the keys: Kimi Delta Attention.
class chunk_kda(chunk_gated_delta_rule):
    pass


class fused_recurrent_kda(fused_recurrent_gated_delta_rule):
    pass
