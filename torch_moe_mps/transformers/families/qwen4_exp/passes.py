"""Low-rank hyper-connections: a residual of streams, which a block reads as a mean and writes by gates."""

from ...graphs.fusion import Fusion
from ...graphs.nodes import tensor_of

# Of one token: the operator would read the weights for each.
streams_in_linears = Fusion(
    "streams_in_linears",
    (
        "mean((sigmoid(linear_quantized(*A)) * STREAMS)[..., N, H], [-2])",
        "linear_quantized(*A, streams=STREAMS[..., N, H])",
    ),
    where=lambda A, N, H, **_: tensor_of(A.call).numel() == N * H,
)
# A sum of streams, which hyper-connections of low rank add to.
gated_norm_sums = Fusion(
    "gated_norm_sums",
    (
        "rms_norm((T := R + Y[..., 1, H] * (F * sigmoid(GATE / D))[..., N, 1])[..., N, H], W, EPS, OFFSET)",
        "fused_residual_norm(R[..., N, H], Y[..., H], W, EPS, weight_offset=OFFSET, factor=F,"
        " gate=GATE[..., N], gate_factor=1 / D)",
    ),
)
