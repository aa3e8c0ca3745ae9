"""Layers by the names under which transformers' kernel mapping asks for them, with the signatures of the code
that they replace. Inference only.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .dispatch import CONSTANTS, dtype_code, launch, rows_contiguous, start_aligned, strides, struct

_SIMD = CONSTANTS["kSimdWidth"]


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _convolved(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Causal convolution of x [B, C, T] behind `state` [B, C, L], which is moved on in place."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"moe_mps: activation must be silu, swish or None, got {activation}")
    rows, weight, width = x.transpose(1, 2), weight.contiguous(), weight.shape[-1]
    output, held = rows.new_empty(rows.shape), state.contiguous()
    each = max(CONSTANTS["kConvTokens"], width)
    batch, tokens, channels = rows.shape
    params = struct("ConvParams")(
        x=strides(rows), channels=channels, tokens=tokens, length=state.shape[-1], width=width,
        thread_results=each, silu=activation is not None, state_dtype=dtype_code(state), has_weight=True,
        weight_dtype=dtype_code(weight), has_bias=bias is not None, bias_dtype=dtype_code(bias),
    )  # fmt: skip
    tensors = [rows, held, weight, output if bias is None else bias.contiguous(), *[output] * 3]
    threads = CONSTANTS["kConvThreads"]
    groups = [_blocks(channels, threads), _blocks(tokens, each), batch]
    launch("linear_attention", "causal_conv1d_update", tensors, params, groups, threads)
    if held is not state:
        state.copy_(held)
    return output.transpose(1, 2)


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
    dtype, (batch, tokens, key_heads, width) = query.dtype, key.shape
    heads, value_width = value.shape[2:]
    if width > 256:
        raise ValueError(f"moe_mps: key must be of at most 256 a head, got {width}")
    query, key, value = (rows_contiguous(x.to(dtype)) for x in (query, key, value))
    g = rows_contiguous(g) if g.dim() == 4 else g
    state = query.new_zeros(batch, heads, width, value_width, dtype=torch.float32)
    if initial_state is not None:
        state.copy_(initial_state)
    output = value.new_empty(value.shape)
    params = struct("LinearAttentionParams")(
        q=strides(query), k=strides(key), v=strides(value), g=strides(g), beta=strides(beta),
        state_batch_stride=state.stride(0), state_head_stride=state.stride(1),
        state_row_stride=state.stride(2), state_column_stride=state.stride(3),
        tokens=tokens, key_heads=key_heads, heads=heads, key_width=width, value_width=value_width,
        decay=CONSTANTS["DECAY_LOG"], g_dtype=dtype_code(g), has_beta=1, beta_dtype=dtype_code(beta),
        has_l2norm=l2norm, l2norm_eps=1e-6, scale=width**-0.5, beta_min=float("-inf"),
    )  # fmt: skip
    rows = next(size for size in (64, 128, 256) if width <= size)
    simdgroups = _blocks(value_width, _SIMD * CONSTANTS["kScanRows"] // rows * CONSTANTS["kScanColumns"])
    own = min(simdgroups, CONSTANTS["kSliceSimdgroups"])
    absent = [output] * 3
    tensors = [query, key, value, g, beta, *absent, state, output, *absent, output]
    kernel = f"{'channel' if g.dim() == 4 else 'delta'}_scan{rows}"
    launch(
        "linear_attention", kernel, tensors, params, [_blocks(simdgroups, own), batch * heads, 1], own * _SIMD
    )
    return output, state if output_final_state else None


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


class RMSNormGated(nn.Module):
    """Of the module's own weight, variance_epsilon and activation, which is silu or sigmoid."""

    has_backward = False
    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        width = hidden_states.shape[-1]
        x, weight = hidden_states.contiguous().view(-1, width), self.weight.contiguous()
        gate, output = gate.to(x.dtype).contiguous().view(-1, width), torch.empty_like(x)
        simdgroups = min(_blocks(width, 4 * _SIMD), CONSTANTS["kNormThreads"] // _SIMD)
        params = struct("NormParams")(
            input_stride=width, rows=len(x), width=width, simdgroups_per_row=simdgroups, has_weight=1,
            vectorised=width % 4 == 0 and start_aligned(x, gate, weight), weight_dtype=dtype_code(weight),
            groups=1, gate_is_sigmoid=self.activation == "sigmoid", eps=self.variance_epsilon,
            factor=1.0,
        )  # fmt: skip
        tensors = [gate, x, weight, output, output, output]
        launch("norms_gated", "rms_norm_gated", tensors, params, [len(x), 1, 1], simdgroups * _SIMD)
        return output.view(hidden_states.shape)


class apply_rotary_transformers(nn.Module):
    """q and k [B, H, T, D] turned by cos and sin [B or 1, T, R], of which R <= D elements turn, in halves."""

    has_backward = False

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        dims = _, tokens_dim, heads_dim = (0, 2, 1) if unsqueeze_dim == 1 else (0, 1, 2)
        q, k, cos, sin = (rows_contiguous(x) for x in (q, k, cos, sin))
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
        parts = [
            struct("RopeHeads")(
                strides(x, dims), strides(y, dims), heads=x.shape[heads_dim],
                width=x.shape[-1], rotary=cos.shape[-1],
            )
            for x, y in zip((q, k), results, strict=True)
        ]  # fmt: skip
        tokens = q.shape[tokens_dim]
        rows = q.shape[0] * tokens * sum(part.heads for part in parts)
        params = struct("RopeParams")(
            q=parts[0], k=parts[1], table_batch_stride=0 if len(cos) == 1 else cos.stride(0),
            table_token_stride=cos.stride(1), rows=rows, tokens=tokens, pairs=CONSTANTS["PAIRS_HALF"],
            table_dtype=dtype_code(cos),
            vectorised=all(x.shape[-1] % 8 == 0 for x in (q, k, cos)) and start_aligned(q, k, cos, sin),
        )  # fmt: skip
        first, second = results
        tensors = [q, k, q, cos, sin, first, first, first, first, second, first]
        heads = CONSTANTS["kRopeHeads"]
        launch("rope", "rope", tensors, params, [_blocks(rows, heads), 1, 1], heads * _SIMD)
        return first, second
