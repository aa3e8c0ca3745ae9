"""Operators that compute what several calls do: each a formula, and what takes its place."""

import itertools

from ..fusion import Fusion

_EXPERTS = ("_moe_experts", "_moe_experts_quantized", "moe_weighted_reduce")
_LINEARS = ("linear_quantized", "_mlp_quantized")

# Terms that an operator adds are rounded once, with its result. Experts first: their operator can add a
# sum of experts and of an MLP.
add_in_operators = Fusion(
    "add_in_operators",
    *(
        (
            f"{name}(*A[T, H]) + sigmoid(LOGIT)[..., 1] * OUT[..., H]",
            f"{name}(*A, shared_out=OUT[T, H], shared_gate=LOGIT[T, 1], gate_is_logit=True)",
        )
        for name in _EXPERTS
    ),
    *((f"{name}(*A[S]) + R", f"{name}(*A, residual=R[S])") for name in _EXPERTS),
    *(
        (f"{name}(*A[S], residual=OUT[S]) + R", f"{name}(*A, residual=R[S], shared_out=OUT)")
        for name in _EXPERTS
    ),
    *((f"{name}(*A[S]) + R", f"{name}(*A, residual=R[S])") for name in _LINEARS),
)

add_norms = Fusion(
    "add_norms", ("R[S] + rms_norm(X, W, EPS, OFFSET)", "fused_norm_add(R, X[S], W, EPS, OFFSET)")
)
factor_in_norm = Fusion("factor_in_norm", ("rms_norm(*A) * FACTOR", "rms_norm(*A, factor=FACTOR)"))

norm_sums = Fusion(
    "norm_sums",
    (
        "rms_norm((T := R[S] + Y * FACTOR)[S], W[H,], EPS, OFFSET)",
        "fused_residual_norm(R, Y[S], W, EPS, norm_weight_offset=OFFSET, factor=FACTOR)",
    ),
    (
        "rms_norm((T := R[S] + Y[S])[S], W[H,], EPS, OFFSET)",
        "fused_residual_norm(R, Y, W, EPS, norm_weight_offset=OFFSET)",
    ),
    (
        "layer_norm((T := R[S] + Y[S])[S], W, B, EPS, OFFSET)",
        "fused_residual_layer_norm(R, Y, W, B, EPS, OFFSET)",
    ),
)
_UPDATED = "item(C, 1)[..., N, 1] * OUT[..., 1, H]"
streams_in_update = Fusion(
    "streams_in_update",
    (
        f"{_UPDATED} + bmm(transpose(item(C, 2), -1, -2)[B, N, N], STREAMS[B, N, H])",
        "_hyper_update(STREAMS[..., N, H], OUT[..., H], item(C, 1), item(C, 2))",
    ),
    (f"{_UPDATED} + STREAMS", "_hyper_update(STREAMS[..., N, H], OUT[..., H], item(C, 1))"),
)
_GATE = 'gate=GATE[{}], gate_activation="{}"'
_BACK = ("_heads_mm", "_heads_quantized")
# One number for a head may be a factor of what the head's matrix makes of latents: a product is linear.
gate_in_attention = Fusion(
    "gate_in_attention",
    *(
        row
        for name, attention in itertools.product(
            ("sigmoid", "softplus"), ("cached_attention", "_cached_attention")
        )
        for row in (
            (f"{name}(GATE)[G] * {attention}(*A[S])[G]", f"_cached_attention(*A, {_GATE.format('S', name)})"),
            (
                f"{name}(GATE)[..., 1] * {attention}(*A[S])[S]",
                f"_cached_attention(*A, {_GATE.format('..., 1', name)})",
            ),
            *(
                (
                    f"{name}(GATE)[..., 1] * {heads}({attention}(*A)[I], *M[S])[S]",
                    f"{heads}(_cached_attention(*A, {_GATE.format('..., 1', name)})[I], *M)",
                )
                for heads in _BACK
            ),
        )
    ),
    where=lambda M=None, **_: M is None or not M.arguments.get("transposed"),
)

gates_in_gated_delta_rule = Fusion(
    "gates_in_gated_delta_rule",
    (
        "_gated_delta_rule_(Q, K, V, neg(exp(A_LOG)) * softplus(A[..., H] + DT_BIAS[H,]), *O,"
        " beta=sigmoid(B))",
        '_gated_delta_rule_(Q, K, V, A, *O, beta=B, decay_form="softplus", beta_activation="sigmoid",'
        " A_log=A_LOG, dt_bias=DT_BIAS)",
    ),
)
# Rounds as models do, which compute in float32 and round to the dtype that X had.
input_in_convolution = Fusion(
    "input_in_convolution",
    ("causal_conv1d_update_(X, *A) + X", "causal_conv1d_update_(X, *A, add_input=True)"),
    ("_to_copy(causal_conv1d_update_(X, *A), dtype=D)", "causal_conv1d_update_(X, *A)"),
)
norm_in_gated_delta_rule = Fusion(
    "norm_in_gated_delta_rule",
    (
        "rms_norm_gated(_gated_delta_rule_(*A[S]), GATE, W, EPS, OFFSET, ACTIVATION)",
        "_gated_delta_rule_(*A, gate=GATE[S], gate_activation=ACTIVATION, norm_weight=W, norm_eps=EPS,"
        " norm_weight_offset=OFFSET)",
    ),
)
