"""Bad arguments: one line that names operator, argument, what was expected and what came."""

import expecttest
import pytest
import torch
import torch._dynamo.testing
from support.operators import wrapped
from torch import Tensor

from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._samples import E, H, I, K, T, packet, sample_arguments

# What is tested here does not depend on the order of threads.
pytestmark = pytest.mark.one_schedule


def bad_arguments(device: str) -> list[tuple[str, dict]]:
    """(operator, what is wrong with its arguments), each with its own message."""

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    half, integer, short = torch.float16, torch.int32, torch.int16  # MPS has no float64
    norm = [
        {"residual": zeros(T, H, dtype=short)},
        {"residual": zeros()},
        {"input": zeros(T, H, dtype=half)},
        {"input": zeros(T + 1, H)},
        {"input": zeros(H)},
        {"weight": zeros(H, dtype=integer)},
        {"weight": zeros(H - 1)},
        {"weight": zeros(1, H)},
    ]
    scalar = [{"scalar": zeros(2)}, {"scalar": zeros(1, 1)}, {"scalar": zeros(1, dtype=short)}]
    logits = [
        {"logits": zeros(T, E, dtype=integer)},
        {"logits": zeros(1, T, E)},
        {"logits": zeros(T, 0)},
        {"logits": zeros(T, 1025)},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": E + 1},
        {"logits": zeros(T, 128), "top_k": 65},
    ]
    scale = [{"per_expert_scale": zeros(E + 1)}, {"per_expert_scale": zeros(E, dtype=integer)}]
    router = [
        {"scoring": "tanh"},
        {"bias": zeros(E, 1)},
        {"bias": zeros(E, dtype=short)},
        {"num_groups": 0},
        {"num_groups": 3},
        {"num_groups": E, "group_score": "top2_sum"},
        {"group_score": "sum"},
        {"num_groups": 4, "top_groups": 5},
        {"num_groups": 4, "top_groups": 0},
        {"num_groups": 4, "top_groups": 1, "top_k": 3},
        *scale,
    ]
    gate = [
        {"hidden": zeros(T, H, dtype=short)},
        {"hidden": zeros(H)},
        {"router_weight": zeros(E, H, dtype=integer)},
        {"router_weight": zeros(E * H)},
        {"router_weight": zeros(E, H + 1)},
        {"norm_weight": zeros(H + 1)},
        {"norm_weight": zeros(H, dtype=short)},
        *scale,
        {"router_weight": zeros(1025, H), "per_expert_scale": zeros(1025)},
        {"top_k": 0},
        {"top_k": E + 1},
    ]
    ids = [
        {"ids": zeros(T, K)},
        {"ids": zeros(T, K, dtype=short)},
        {"ids": zeros(T * K, dtype=integer)},
        {"num_experts": 0},
        {"num_experts": 1025},
    ]
    slots = [
        {"slots": zeros(T, K, H, dtype=short)},
        {"slots": zeros(H)},
        {"slots": zeros(T, 0, H), "weights": zeros(T, 0)},
        {"weights": zeros(T, K + 1)},
        {"weights": zeros(T, K, dtype=integer)},
    ]
    residual = [
        {"residual_": zeros(T, H, dtype=half)},
        {"residual_": zeros(T, H + 1)},
        {"residual_": zeros(1, H).expand(T, H)},
    ]
    tail = [
        {"shared_out": zeros(T, H + 1)},
        {"shared_out": zeros(T, H, dtype=half)},
        {"shared_gate": zeros(T)},
        {"shared_out": zeros(T, H), "shared_gate": zeros(T, 2)},
        {"shared_out": zeros(T, H), "shared_gate": zeros(T + 1)},
        {"shared_out": zeros(T, H), "shared_gate": zeros(T, dtype=integer)},
        {"residual": zeros(T + 1, H)},
        {"residual": zeros(1, H, T)},
        {"residual": zeros(T, H, dtype=half)},
        {"shared_out": zeros(T, H), "gate_is_logit": True},
    ]
    pairs = [
        {"ids": zeros(T, K)},
        {"ids": zeros(T * K, dtype=integer)},
        {"ids": zeros(T - 1, K, dtype=integer)},
        {"ids": zeros(T, 0, dtype=integer)},
        {"ids": zeros(T, 65, dtype=integer)},
    ]
    around = [
        {"gate_up_bias": zeros(E, I)},
        {"down_bias": zeros(E, I)},
        {"activation": "swish"},
        {"activation": "silu_clamped"},
    ]
    packed = [
        {"packed": zeros(E, I, 8)},
        {"packed": zeros(E, I, 9, dtype=integer)},
        {"scales": zeros(E, I, 1)},
        {"scales": zeros(E, I, 2, dtype=torch.uint8)},
        {"biases": None},
        {"biases": zeros(E, I, 1)},
    ]
    mxfp4 = {"mode": "mxfp4", "biases": None, "scales": zeros(E, I, 2, dtype=torch.uint8)}
    scales = zeros(2, 2, 9, 1)
    eight_bits = {
        **{"q": zeros(2, 4, T, 32), "k_scales": scales, "k_biases": scales},
        **{"v": zeros(2, 2, 9, 8, dtype=integer), "v_scales": scales, "v_biases": scales},
    }
    table = {
        "expert_mm": [
            {"x": zeros(T, H, dtype=integer)},
            {"x": zeros(H)},
            {"x": zeros(T, 1, H)},
            {"weight": zeros(E, I, H, dtype=half)},
            {"weight": zeros(E, I)},
            {"weight": zeros(E, I, H - 1)},
            {"transposed": True},
            *pairs,
            {"bias": zeros(E, H)},
            {"bias": zeros(E, I, dtype=integer)},
        ],
        "moe_experts": [
            {"x": zeros(T, K, H)},
            {"gate_up": zeros(E, 2 * I + 1, H)},
            {"gate_up": zeros(E, 2 * I, H, dtype=half)},
            {"gate_up": zeros(E, 2 * I, H + 1), "gated": False},
            {"down": zeros(E, H, I - 1)},
            {"down": zeros(E + 1, H, I)},
            {"gate_up": zeros(E, H, 2 * I), "transposed": True},
            {"weights": zeros(T, K + 1)},
            {"weights": zeros(T, K, dtype=integer)},
            *around,
            {"activation": "swiglu_oai", "gated": False},
            {"activation": "silu_clamped", "limit": -1.0},
            {"activation": "swiglu_oai", "limit": float("nan")},
            {"limit": 7.0},
            {"alpha": 1.0},
            {"activation": "swiglu_oai", "alpha": float("inf")},
            {"interleaved": True, "gated": False},
            *tail,
        ],
        "expert_qmm": [
            {"x": zeros(T, 33)},
            {"packed": zeros(E * I, 8, dtype=integer)},
            *packed,
            {"biases": zeros(E, I, 2, dtype=half)},
            {"bits": 7},
            {"group_size": 16},
            {"mode": "int4"},
            mxfp4 | {"biases": zeros(E, I, 2)},
            mxfp4 | {"scales": zeros(E, I, 2)},
            mxfp4 | {"bits": 8},
            mxfp4 | {"group_size": 64},
            mxfp4 | {"mode": "mxfp8"},
            mxfp4 | {"mode": "nvfp4"},
            {"bias": zeros(E, I + 1)},
            pairs[2],
        ],
        "moe_experts_quantized": [
            {"group_size": 64},
            {"gated": False},
            {"gate_up_packed": zeros(E, 63, 8, dtype=integer)},
            {"gate_up_scales": zeros(E, 2 * I, 1)},
            {"down_packed": zeros(E, H, 8, dtype=integer)},
            {"down_biases": None},
            {"down_bits": 6},
            {"down_group_size": 16},
            {"down_mode": "mxfp4"},
            {"down_mode": "mxfp8", "down_bits": 4},
            {"down_mode": "int4"},
            *around,
            tail[2],
        ],
        "linear_quantized": [
            {"x": zeros(T, H, dtype=integer)},
            {"x": zeros()},
            {"x": zeros(T, 33)},
            {"packed": zeros(1, I, 8, dtype=integer)},
            *[{name: None if part is None else part[0] for name, part in case.items()} for case in packed],
            {"bits": 6},
            {"mode": "nvfp4"},
            {"bias": zeros(I + 1)},
            {"bias": zeros(I, dtype=integer)},
            {"order": zeros(I)},
            {"order": zeros(I + 1, dtype=integer)},
        ],
        "mlp_quantized": [
            {"x": zeros(T, I)},
            {"gate_up_packed": zeros(63, 8, dtype=integer)},
            {"gated": False},
            {"down_scales": zeros(H, 2)},
            {"down_bits": 3},
            {"down_mode": "mxfp4"},
            {"gate_up_bias": zeros(I)},
            {"down_bias": zeros(I)},
            {"activation": "tanh"},
            {"residual": zeros(H)},
            {"residual": zeros(T, H, dtype=half)},
        ],
        "embedding_quantized": [
            {"ids": zeros(T)},
            {"packed": zeros(8, dtype=integer)},
            {"scales": zeros(E - 1, 2)},
            {"group_size": 128},
            {"dtype": torch.int32},
        ],
        "rms_norm": [
            {"input": zeros(T, H, dtype=short)},
            {"input": zeros()},
            {"weight": zeros(H - 1)},
            {"weight": zeros(H, dtype=integer)},
            {"weight": None, "weight_offset": 1.0},
        ],
        "rope": [
            {"pairs": "quarters"},
            {"q": zeros(2, T, 16)},
            {"q": zeros(2, T, 4, 15)},
            {"q": zeros(2, T, 4, 14)},
            {"q": zeros(2, T, 0, 16)},
            {"q": zeros(2, T, 4, 16, dtype=integer)},
            {"k": zeros(2, T, 2, 16, dtype=half)},
            {"k": zeros(2, T + 1, 2, 16)},
            {"k": None},
            {"cos": zeros(3, T, 16)},
            {"cos": zeros(1, T, 12), "rotary_dim": 16},
            {"cos": zeros(T, 16)},
            {"rotary_dim": 7},
            {"sin": zeros(1, T, 8)},
            {"sin": zeros(1, T, 16, dtype=half)},
            {"q_weight": zeros(8)},
            {"k_weight": zeros(16, dtype=short)},
        ],
        "rope_cache_": [
            {"pairs": "quarters"},
            {"k": zeros(2, T + 1, 2, 16)},
            {"v": zeros(2, T, 2, 7)},
            {"v": zeros(2, T, 2, 8, dtype=half)},
            {"keys_": zeros(2, T, 2, 16)},
            {"keys_": zeros(2, 2, T, 16, dtype=half)},
            {"keys_": zeros(2, 2, T - 1, 16)},
            {"v_weight": zeros(8)},
            {"norm_v": True, "v_weight": zeros(16)},
            {"values_": zeros(2, 1, T, 8).expand(2, 2, T, 8)},
            {"cos": zeros(3, T, 16)},
        ],
        "rms_norm_gated": [
            {"input": zeros(T, H, dtype=short)},
            {"input": zeros()},
            {"gate": zeros(T, H, dtype=half)},
            {"gate": zeros(T, H - 1)},
            {"weight": zeros(H - 1)},
            {"weight": zeros(H, dtype=integer)},
        ],
        "rope_tables": [
            {"layout": "thirds"},
            {"position_ids": zeros(2, T)},
            {"position_ids": zeros(T, dtype=integer)},
            {"inv_freq": zeros(8, dtype=half)},
            {"inv_freq": zeros(1, 8)},
            {"dtype": torch.float64},
            {"scaling": float("nan")},
        ],
        "causal_conv1d_update_": [
            {"activation": "tanh"},
            {"x": zeros(2, 6, T, dtype=short)},
            {"x": zeros(6, T)},
            {"weight": zeros(6, 1, 4)},
            {"weight": zeros(5, 4)},
            {"weight": zeros(6, 4, dtype=integer)},
            {"conv_state_": zeros(2, 6, 5, dtype=integer)},
            {"conv_state_": zeros(6, 5)},
            {"conv_state_": zeros(2, 7, 5)},
            {"conv_state_": zeros(2, 6, 2)},
            {"conv_state_": zeros(1, 6, 5).expand(2, -1, -1)},
            {"bias": zeros(5)},
            {"bias": zeros(6, dtype=integer)},
        ],
        "gated_delta_rule_": [
            {"q": zeros(2, T, 32)},
            {"q": zeros(2, T, 2, 16, dtype=short)},
            {"q": zeros(2, T, 2, 257), "k": zeros(2, T, 2, 257)},
            {"k": zeros(2, T, 2, 16, dtype=half)},
            {"k": zeros(2, T, 1, 16)},
            {"v": zeros(2, T, 32)},
            {"v": zeros(2, T, 4, 8, dtype=half)},
            {"v": zeros(2, T + 1, 4, 8)},
            {"v": zeros(2, T, 5, 8)},
            {"g": zeros(2, T, 2)},
            {"g": zeros(2, T, 4, dtype=integer)},
            {"beta": zeros(2, T)},
            {"state_": zeros(2, 4, 16, 8, dtype=half)},
            {"state_": zeros(2, 4, 8, 16)},
            {"state_": zeros(1, 4, 16, 8).expand(2, -1, -1, -1)},
            {"A_log": None},
            {"A_log": zeros(2)},
            {"dt_bias": zeros(4, dtype=integer)},
            {"l2norm_eps": float("nan")},
            {"gate": zeros(2, T, 4, 8)},
            {"gate": zeros(2, T, 4, 9), "norm_weight": zeros(8)},
            {"gate": zeros(2, T, 4, 8, dtype=half), "norm_weight": zeros(8)},
            {"gate": zeros(2, T, 4, 8), "norm_weight": zeros(9)},
        ],
        "router_logits": [
            {"x": zeros(T, H, dtype=short)},
            {"x": zeros(H)},
            {"weight": zeros(E, H + 1)},
            {"weight": zeros(E * H)},
            {"weight": zeros(E, H, dtype=integer)},
            {"bias": zeros(E + 1)},
            {"bias": zeros(E, dtype=short)},
            {"norm_weight": zeros(H + 1)},
            {"dtype": torch.int32},
        ],
        "attention": [
            {"q": zeros(2, 4, 16)},
            {"q": zeros(2, 4, T, 16, dtype=short)},
            {"q": zeros(2, 4, T, 577)},
            {"q": zeros(2, 3, T, 16)},
            {"k": zeros(2, 2, 9, 16, dtype=half)},
            {"k": zeros(2, 2, 9, 8)},
            {"k": zeros(2, 0, 9, 16)},
            {"v": zeros(2, 2, 8, 8)},
            {"v": zeros(2, 2, 9, 513)},
            {"sinks": zeros(2)},
            {"sinks": zeros(4, dtype=integer)},
            {"mask": zeros(2, 4, T, 9)},
            {"mask": zeros(2, 1, T, 9, dtype=integer)},
            {"mask": zeros(1, 1, T, 9), "window": 4},
            {"mask": zeros(1, 1, T, 9), "key_range": zeros(2, 2, dtype=integer)},
            {"key_range": zeros(2, dtype=integer)},
            {"key_range": zeros(2, 2, dtype=torch.int64)},
            {"window": 0},
            {"softcap": 0.0},
            {"scale": float("nan")},
            {**eight_bits},
            {**eight_bits, "k": zeros(2, 2, 9, 8, dtype=integer), "v_biases": None},
            {**eight_bits, "k": zeros(2, 2, 9, 4, dtype=integer)},
            {**eight_bits, "k": zeros(2, 2, 9, 8, dtype=integer), "k_scales": zeros(2, 2, 9, 2)},
            {**eight_bits, "k": zeros(2, 2, 9, 8, dtype=integer), "v_biases": zeros(2, 2, 9, 1, dtype=half)},
        ],
        "write_cache_quantized_": [
            {"states": zeros(2, 2, T, 64, dtype=short)},
            {"states": zeros(2, T, 64)},
            {"states": zeros(2, 2, T, 32)},
            {"states": zeros(2, 3, T, 64)},
            {"packed_": zeros(2, 2, T + 5, 16)},
            {"packed_": zeros(2, 2, 1, 16, dtype=integer).expand(2, 2, T + 5, 16)},
            {"scales_": zeros(2, 2, T + 5, 4)},
            {"scales_": zeros(2, 2, T + 5, 2, dtype=half)},
            {"biases_": zeros(2, 2, T + 5, 1)},
            {"start": 6},
            {"start": -1},
            {"position": zeros(1, dtype=integer)},
            {"position": zeros(2, dtype=torch.int64)},
        ],
        "fused_norm_add": [*norm, {"weight": None}, {"eps": float("nan")}, {"weight_offset": 1e39}],
        "fused_norm_add_scalar": [norm[3], *scalar, {"scalar": None}],
        "fused_residual_norm": [norm[0]],
        "fused_residual_norm_scalar": [norm[6], scalar[0]],
        "moe_router": [
            *logits,
            *router,
            {"norm_eps": -5.0},
            {"norm_min": float("nan")},
            {"masked_score": 1e39},
        ],
        "moe_router_topk_softmax": logits,
        "fused_moe_routing": [*logits, *scale, {"per_expert_scale": None}],
        "moe_gate": [*gate, {"hidden": None}],
        "moe_bucket": ids,
        "moe_compute_ids_tpe": [*ids, {"gate_up_rows": 0}, {"down_rows": -1}],
        "silu_mul_stacked": [
            {"gate": zeros(T, I, dtype=integer)},
            {"gate": zeros()},
            {"up": zeros(T, I, dtype=half)},
            {"up": zeros(I)},
        ],
        "weighted_sum_stacked": slots,
        "weighted_sum_residual_stacked_": [slots[3], *residual, {"residual_": None}],
        "weighted_sum_residual_norm_stacked_": [
            residual[0],
            {"norm_weight": zeros(H, dtype=short)},
            {"norm_weight": zeros(1)},
        ],
        "moe_weighted_reduce": [
            {"weights": zeros(T, K, dtype=integer)},
            {"weights": zeros(T * K)},
            {"weights": zeros(T, 0)},
            {"expert_out": zeros(T, K, H, dtype=short)},
            {"expert_out": zeros(T * K * H)},
            {"expert_out": zeros(T, K + 1, H)},
            {"expert_out": zeros(T, H)},
            *tail,
        ],
    }
    return [(name, changes) for name, cases in table.items() for changes in cases]


def error_messages(device: str) -> list[str]:
    messages = []
    for name, changes in bad_arguments(device):
        arguments = {**sample_arguments(device, torch.float32)[name], **changes}
        with pytest.raises(ValueError) as error:
            packet(name)(**arguments)
        messages.append(str(error.value))
    return messages


class TestErrorMessages(expecttest.TestCase):
    def test_all(self):
        messages = error_messages("cpu")
        self.assertExpectedInline(
            "\n".join(wrapped(message) for message in messages),
            """\
moe_mps::expert_mm: x must be float32 or float16 or bfloat16, got int32
moe_mps::expert_mm: x must be 2-D or 3-D, got 1-D of shape (64,)
moe_mps::expert_mm: x must be of shape [T, K, H] = (3, 2, 64), got (3, 1, 64)
moe_mps::expert_mm: weight must be float32, got float16
moe_mps::expert_mm: weight must be 3-D, got 2-D of shape (8, 32)
moe_mps::expert_mm: weight must be of shape [E, N, H] with H = 64 as in x, got (8, 32, 63)
moe_mps::expert_mm: weight must be of shape [E, H, N] with H = 64 as in x, got (8, 32, 64)
moe_mps::expert_mm: ids must be int32 or int64, got float32
moe_mps::expert_mm: ids must be 2-D, got 1-D of shape (6,)
moe_mps::expert_mm: ids must be of shape [T, K] with T = 3 as in x, got (2, 2)
moe_mps::expert_mm: K, the columns of ids, must be between 1 and 64, got 0
moe_mps::expert_mm: K, the columns of ids, must be between 1 and 64, got 65
moe_mps::expert_mm: bias must be of shape [E, N] = (8, 32), got (8, 64)
moe_mps::expert_mm: bias must be float32 or float16 or bfloat16, got int32
moe_mps::moe_experts: x must be 2-D, got 3-D of shape (3, 2, 64)
moe_mps::moe_experts: gate_up must be of shape [E, 2I, H] with H = 64 as in x, got (8, 65, 64)
moe_mps::moe_experts: gate_up must be float32, got float16
moe_mps::moe_experts: gate_up must be of shape [E, I, H] with H = 64 as in x, got (8, 64, 65)
moe_mps::moe_experts: down must be of shape [E, H, I] = (8, 64, 32), got (8, 64, 31)
moe_mps::moe_experts: down must be of shape [E, H, I] = (8, 64, 32), got (9, 64, 32)
moe_mps::moe_experts: down must be of shape [E, I, H] = (8, 32, 64), got (8, 64, 32)
moe_mps::moe_experts: weights must be of shape [T, K] = (3, 2), got (3, 3)
moe_mps::moe_experts: weights must be float32 or float16 or bfloat16, got int32
moe_mps::moe_experts: gate_up_bias must be of shape [E, 2I] = (8, 64), got (8, 32)
moe_mps::moe_experts: down_bias must be of shape [E, H] = (8, 64), got (8, 32)
moe_mps::moe_experts: activation must be one of silu, gelu, gelu_tanh, relu, relu2, swiglu_oai,
    silu_clamped, got 'swish'
moe_mps::moe_experts: limit must be a number for activation silu_clamped, got None
moe_mps::moe_experts: gated must be True for activation swiglu_oai, got False
moe_mps::moe_experts: limit must be at least 0.0, got -1.0
moe_mps::moe_experts: limit must be a number in the range of float32, got nan
moe_mps::moe_experts: limit must be None for activation silu, got 7.0
moe_mps::moe_experts: alpha must be None for activation silu, got 1.0
moe_mps::moe_experts: alpha must be a finite number, got inf
moe_mps::moe_experts: interleaved must be False when gated is False, got True
moe_mps::moe_experts: shared_out must be of shape [T, H] = (3, 64), got (3, 65)
moe_mps::moe_experts: shared_out must be float32, got float16
moe_mps::moe_experts: shared_out must be given when shared_gate is, got None
moe_mps::moe_experts: shared_gate must be of shape [T, 1] = (3, 1), got (3, 2)
moe_mps::moe_experts: shared_gate must be of shape [T] = (3,), got (4,)
moe_mps::moe_experts: shared_gate must be float32 or float16 or bfloat16, got int32
moe_mps::moe_experts: residual must be T = 3 rows of H = 64 elements, got (4, 64)
moe_mps::moe_experts: residual must be T = 3 rows of H = 64 elements, got (1, 64, 3)
moe_mps::moe_experts: residual must be float32, got float16
moe_mps::moe_experts: gate_is_logit must be False without shared_gate, got True
moe_mps::expert_qmm: H, the input dimension of packed, must be a multiple of 32, got 33
moe_mps::expert_qmm: packed must be 3-D, got 2-D of shape (256, 8)
moe_mps::expert_qmm: packed must be uint32 or int32, got float32
moe_mps::expert_qmm: packed must be of shape [E, N, H * 4 / 32] = (8, 32, 8), got (8, 32, 9)
moe_mps::expert_qmm: scales must be of shape [E, N, H / 32] = (8, 32, 2), got (8, 32, 1)
moe_mps::expert_qmm: scales must be float32 or float16 or bfloat16, got uint8
moe_mps::expert_qmm: biases must be a tensor for mode affine, got None
moe_mps::expert_qmm: biases must be of shape [E, N, H / 32] = (8, 32, 2), got (8, 32, 1)
moe_mps::expert_qmm: biases must be float32, got float16
moe_mps::expert_qmm: bits must be 2 or 3 or 4 or 5 or 6 or 8 for mode affine, got 7
moe_mps::expert_qmm: group_size must be 32 or 64 or 128 for mode affine, got 16
moe_mps::expert_qmm: mode must be one of affine, mxfp4, mxfp8, nvfp4, got 'int4'
moe_mps::expert_qmm: biases must be None for mode mxfp4, got a tensor of shape (8, 32, 2)
moe_mps::expert_qmm: scales must be uint8, got float32
moe_mps::expert_qmm: bits must be 4 for mode mxfp4, got 8
moe_mps::expert_qmm: group_size must be 32 for mode mxfp4, got 64
moe_mps::expert_qmm: bits must be 8 for mode mxfp8, got 4
moe_mps::expert_qmm: group_size must be 16 for mode nvfp4, got 32
moe_mps::expert_qmm: bias must be of shape [E, N] = (8, 32), got (8, 33)
moe_mps::expert_qmm: ids must be of shape [T, K] with T = 3 as in x, got (2, 2)
moe_mps::moe_experts_quantized: gate_up_scales must be of shape [E, 2I, H / 64] = (8, 64, 1), got (8, 64, 2)
moe_mps::moe_experts_quantized: down_packed must be of shape [E, H, I * 4 / 32] = (8, 64, 8), got (8, 64, 4)
moe_mps::moe_experts_quantized: gate_up_packed must be of an even number of rows 2I, got (8, 63, 8)
moe_mps::moe_experts_quantized: gate_up_scales must be of shape [E, 2I, H / 32] = (8, 64, 2), got (8, 64, 1)
moe_mps::moe_experts_quantized: down_packed must be of shape [E, H, I * 4 / 32] = (8, 64, 4), got (8, 64, 8)
moe_mps::moe_experts_quantized: down_biases must be a tensor for mode affine, got None
moe_mps::moe_experts_quantized: down_packed must be of shape [E, H, I * 6 / 32] = (8, 64, 6), got (8, 64, 4)
moe_mps::moe_experts_quantized: down_group_size must be 32 or 64 or 128 for mode affine, got 16
moe_mps::moe_experts_quantized: down_biases must be None for mode mxfp4, got a tensor of shape (8, 64, 1)
moe_mps::moe_experts_quantized: down_bits must be 8 for mode mxfp8, got 4
moe_mps::moe_experts_quantized: down_mode must be one of affine, mxfp4, mxfp8, nvfp4, got 'int4'
moe_mps::moe_experts_quantized: gate_up_bias must be of shape [E, 2I] = (8, 64), got (8, 32)
moe_mps::moe_experts_quantized: down_bias must be of shape [E, H] = (8, 64), got (8, 32)
moe_mps::moe_experts_quantized: activation must be one of silu, gelu, gelu_tanh, relu, relu2, swiglu_oai,
    silu_clamped, got 'swish'
moe_mps::moe_experts_quantized: limit must be a number for activation silu_clamped, got None
moe_mps::moe_experts_quantized: shared_out must be given when shared_gate is, got None
moe_mps::linear_quantized: x must be float32 or float16 or bfloat16, got int32
moe_mps::linear_quantized: x must be at least 1-D, got 0-D of shape ()
moe_mps::linear_quantized: C, the input dimension of packed, must be a multiple of 32, got 33
moe_mps::linear_quantized: packed must be 2-D, got 3-D of shape (1, 32, 8)
moe_mps::linear_quantized: packed must be uint32 or int32, got float32
moe_mps::linear_quantized: packed must be of shape [N, C * 4 / 32] = (32, 8), got (32, 9)
moe_mps::linear_quantized: scales must be of shape [N, C / 32] = (32, 2), got (32, 1)
moe_mps::linear_quantized: scales must be float32 or float16 or bfloat16, got uint8
moe_mps::linear_quantized: biases must be a tensor for mode affine, got None
moe_mps::linear_quantized: biases must be of shape [N, C / 32] = (32, 2), got (32, 1)
moe_mps::linear_quantized: packed must be of shape [N, C * 6 / 32] = (32, 12), got (32, 8)
moe_mps::linear_quantized: group_size must be 16 for mode nvfp4, got 32
moe_mps::linear_quantized: bias must be of shape [N] = (32,), got (33,)
moe_mps::linear_quantized: bias must be float32 or float16 or bfloat16, got int32
moe_mps::linear_quantized: order must be int32, got float32
moe_mps::linear_quantized: order must be of shape [N] = (32,), got (33,)
moe_mps::mlp_quantized: gate_up_packed must be of shape [2I, H * 4 / 32] = (64, 4), got (64, 8)
moe_mps::mlp_quantized: gate_up_packed must be of an even number of rows 2I, got (63, 8)
moe_mps::mlp_quantized: down_packed must be of shape [H, I * 4 / 32] = (64, 8), got (64, 4)
moe_mps::mlp_quantized: down_scales must be of shape [H, I / 32] = (64, 1), got (64, 2)
moe_mps::mlp_quantized: down_packed must be of shape [H, I * 3 / 32] = (64, 3), got (64, 4)
moe_mps::mlp_quantized: down_biases must be None for mode mxfp4, got a tensor of shape (64, 1)
moe_mps::mlp_quantized: gate_up_bias must be of shape [2I] = (64,), got (32,)
moe_mps::mlp_quantized: down_bias must be of shape [H] = (64,), got (32,)
moe_mps::mlp_quantized: activation must be one of silu, gelu, gelu_tanh, relu, relu2, swiglu_oai,
    silu_clamped, got 'tanh'
moe_mps::mlp_quantized: residual must be of shape [..., H] = (3, 64), got (64,)
moe_mps::mlp_quantized: residual must be float32, got float16
moe_mps::embedding_quantized: ids must be int32 or int64, got float32
moe_mps::embedding_quantized: packed must be 2-D, got 1-D of shape (8,)
moe_mps::embedding_quantized: scales must be of shape [V, C / 32] = (8, 2), got (7, 2)
moe_mps::embedding_quantized: C, the input dimension of packed, must be a multiple of 128, got 64
moe_mps::embedding_quantized: dtype must be float32 or float16 or bfloat16, got int32
moe_mps::rms_norm: input must be float32 or float16 or bfloat16, got int16
moe_mps::rms_norm: input must be at least 1-D, got 0-D of shape ()
moe_mps::rms_norm: weight must be of shape [H] = (64,), got (63,)
moe_mps::rms_norm: weight must be float32 or float16 or bfloat16, got int32
moe_mps::rms_norm: weight_offset must be 0.0 without a weight, got 1.0
moe_mps::rope: pairs must be one of half, interleaved, interleaved_to_half, got 'quarters'
moe_mps::rope: q must be 4-D, got 3-D of shape (2, 3, 16)
moe_mps::rope: q must be of heads of an even number of elements, 16 or more, got shape (2, 3, 4, 15)
moe_mps::rope: q must be of heads of an even number of elements, 16 or more, got shape (2, 3, 4, 14)
moe_mps::rope: q must be of at least one head, got shape (2, 3, 0, 16)
moe_mps::rope: q must be float32 or float16 or bfloat16, got int32
moe_mps::rope: k must be float32, got float16
moe_mps::rope: k must be of shape [B, T, Hk, Dk] = (2, 3, 2, 16), got (2, 4, 2, 16)
moe_mps::rope: k_weight must be None without k, got shape (16,)
moe_mps::rope: cos must be of shape [B or 1, T, R or R / 2], with B, T, R = (2, 3, 16), got (3, 3, 16)
moe_mps::rope: cos must be of shape [B or 1, T, R or R / 2], with B, T, R = (2, 3, 16), got (1, 3, 12)
moe_mps::rope: cos must be 3-D, got 2-D of shape (3, 16)
moe_mps::rope: rotary_dim must be an even number of at least 2, got 7
moe_mps::rope: sin must be of shape cos's = (1, 3, 16), got (1, 3, 8)
moe_mps::rope: sin must be float32, got float16
moe_mps::rope: q_weight must be of shape [Dq] = (16,), got (8,)
moe_mps::rope: k_weight must be float32 or float16 or bfloat16, got int16
moe_mps::rope_cache_: pairs must be one of half, interleaved, interleaved_to_half, got 'quarters'
moe_mps::rope_cache_: k must be of shape [B, T, Hk, Dk] = (2, 3, 2, 16), got (2, 4, 2, 16)
moe_mps::rope_cache_: v must be of heads of an even number of elements, 2 or more, got shape (2, 3, 2, 7)
moe_mps::rope_cache_: v must be float32, got float16
moe_mps::rope_cache_: keys_ must be of shape [B, Hk, S, Dk] = (2, 2, 2, 16), got (2, 3, 2, 16)
moe_mps::rope_cache_: keys_ must be float32, got float16
moe_mps::rope_cache_: keys_ must be of 3 tokens or more, as many as k has, got (2, 2, 2, 16)
moe_mps::rope_cache_: v_weight must be None without norm_v, got shape (8,)
moe_mps::rope_cache_: v_weight must be of shape [Dv] = (8,), got (16,)
moe_mps::rope_cache_: values_ must be free of expanded (stride-0) dimensions, got strides (24, 0, 8, 1)
moe_mps::rope_cache_: cos must be of shape [B or 1, T, R or R / 2], with B, T, R = (2, 3, 16), got (3, 3,
    16)
moe_mps::rms_norm_gated: input must be float32 or float16 or bfloat16, got int16
moe_mps::rms_norm_gated: input must be at least 1-D, got 0-D of shape ()
moe_mps::rms_norm_gated: gate must be float32, got float16
moe_mps::rms_norm_gated: gate must be of shape [..., H] of input = (3, 64), got (3, 63)
moe_mps::rms_norm_gated: weight must be of shape [H] = (64,), got (63,)
moe_mps::rms_norm_gated: weight must be float32 or float16 or bfloat16, got int32
moe_mps::rope_tables: layout must be one of pairs, halves, interleaved, got 'thirds'
moe_mps::rope_tables: position_ids must be int32 or int64, got float32
moe_mps::rope_tables: position_ids must be 2-D, got 1-D of shape (3,)
moe_mps::rope_tables: inv_freq must be float32, got float16
moe_mps::rope_tables: inv_freq must be 1-D, got 2-D of shape (1, 8)
moe_mps::rope_tables: dtype must be float32 or float16 or bfloat16, got float64
moe_mps::rope_tables: scaling must be a number in the range of float32, got nan
moe_mps::causal_conv1d_update_: activation must be one of none, silu, got 'tanh'
moe_mps::causal_conv1d_update_: x must be float32 or float16 or bfloat16, got int16
moe_mps::causal_conv1d_update_: x must be 3-D, got 2-D of shape (6, 3)
moe_mps::causal_conv1d_update_: weight must be 2-D, got 3-D of shape (6, 1, 4)
moe_mps::causal_conv1d_update_: weight must be of shape [C, W] = (6, 4), got (5, 4)
moe_mps::causal_conv1d_update_: weight must be float32 or float16 or bfloat16, got int32
moe_mps::causal_conv1d_update_: conv_state_ must be float32 or float16 or bfloat16, got int32
moe_mps::causal_conv1d_update_: conv_state_ must be 3-D, got 2-D of shape (6, 5)
moe_mps::causal_conv1d_update_: conv_state_ must be of shape [B, C, S] = (2, 6, 5), got (2, 7, 5)
moe_mps::causal_conv1d_update_: conv_state_ must be of W - 1 = 3 positions or more, got 2
moe_mps::causal_conv1d_update_: conv_state_ must be free of expanded (stride-0) dimensions, got strides (0,
    5, 1)
moe_mps::causal_conv1d_update_: bias must be of shape [C] = (6,), got (5,)
moe_mps::causal_conv1d_update_: bias must be float32 or float16 or bfloat16, got int32
moe_mps::gated_delta_rule_: q must be 4-D, got 3-D of shape (2, 3, 32)
moe_mps::gated_delta_rule_: q must be float32 or float16 or bfloat16, got int16
moe_mps::gated_delta_rule_: q must be between 1 and 256 elements a head, got 257
moe_mps::gated_delta_rule_: k must be float32, got float16
moe_mps::gated_delta_rule_: k must be of shape [B, T, Hk, Dk] of q = (2, 3, 2, 16), got (2, 3, 1, 16)
moe_mps::gated_delta_rule_: v must be 4-D, got 3-D of shape (2, 3, 32)
moe_mps::gated_delta_rule_: v must be float32, got float16
moe_mps::gated_delta_rule_: v must be of shape [B, T, Hv, Dv] = (2, 3, 4, 8), got (2, 4, 4, 8)
moe_mps::gated_delta_rule_: v must be of a multiple of q's 2 heads, got 5 heads
moe_mps::gated_delta_rule_: g must be of shape [B, T, Hv] = (2, 3, 4), got (2, 3, 2)
moe_mps::gated_delta_rule_: g must be float32 or float16 or bfloat16, got int32
moe_mps::gated_delta_rule_: beta must be of shape [B, T, Hv] = (2, 3, 4), got (2, 3)
moe_mps::gated_delta_rule_: state_ must be float32, got float16
moe_mps::gated_delta_rule_: state_ must be of shape [B, Hv, Dk, Dv] = (2, 4, 16, 8), got (2, 4, 8, 16)
moe_mps::gated_delta_rule_: state_ must be free of expanded (stride-0) dimensions, got strides (0, 128, 8,
    1)
moe_mps::gated_delta_rule_: dt_bias must be None without A_log, got shape (4,)
moe_mps::gated_delta_rule_: A_log must be of shape [Hv] = (4,), got (2,)
moe_mps::gated_delta_rule_: dt_bias must be float32 or float16 or bfloat16, got int32
moe_mps::gated_delta_rule_: l2norm_eps must be a number in the range of float32, got nan
moe_mps::gated_delta_rule_: gate must be given with norm_weight, and only then, got one of the two
moe_mps::gated_delta_rule_: gate must be of shape [B, T, Hv, Dv] of v = (2, 3, 4, 8), got (2, 3, 4, 9)
moe_mps::gated_delta_rule_: gate must be float32, got float16
moe_mps::gated_delta_rule_: norm_weight must be of shape [Dv] = (8,), got (9,)
moe_mps::router_logits: x must be float32 or float16 or bfloat16, got int16
moe_mps::router_logits: x must be 2-D, got 1-D of shape (64,)
moe_mps::router_logits: weight must be of shape [E, H] = (8, 64), got (8, 65)
moe_mps::router_logits: weight must be 2-D, got 1-D of shape (512,)
moe_mps::router_logits: weight must be float32 or float16 or bfloat16, got int32
moe_mps::router_logits: bias must be of shape [E] = (8,), got (9,)
moe_mps::router_logits: bias must be float32 or float16 or bfloat16, got int16
moe_mps::router_logits: norm_weight must be of shape [columns of x] = (64,), got (65,)
moe_mps::router_logits: dtype must be float32 or float16 or bfloat16, got int32
moe_mps::attention: q must be 4-D, got 3-D of shape (2, 4, 16)
moe_mps::attention: q must be float32 or float16 or bfloat16, got int16
moe_mps::attention: q's head dimension must be between 1 and 576, got 577
moe_mps::attention: k must be of a number of heads that divides Hq = 3, got (2, 2, 9, 16)
moe_mps::attention: k must be float32, got float16
moe_mps::attention: k must be of shape [B, Hk, S, D] = (2, 2, 9, 16), got (2, 2, 9, 8)
moe_mps::attention: k must be of a number of heads that divides Hq = 4, got (2, 0, 9, 16)
moe_mps::attention: v must be of shape [B, Hk, S, Dv] = (2, 2, 9, 8), got (2, 2, 8, 8)
moe_mps::attention: v's head dimension must be between 1 and 512, got 513
moe_mps::attention: sinks must be of shape [Hq] = (4,), got (2,)
moe_mps::attention: sinks must be float32 or float16 or bfloat16, got int32
moe_mps::attention: mask must be of shape [B or 1, 1, T, S], with B, 1, T, S = (2, 1, 3, 9), got (2, 4, 3,
    9)
moe_mps::attention: mask must be bool or float32 or float16 or bfloat16, got int32
moe_mps::attention: window must be None beside a mask, which holds it, got 4
moe_mps::attention: key_range must be None beside a mask, which holds it, got (2, 2)
moe_mps::attention: key_range must be of shape [B, 2] = (2, 2), got (2,)
moe_mps::attention: key_range must be int32, got int64
moe_mps::attention: window must be at least 1, got 0
moe_mps::attention: softcap must be above 0 and finite, got 0.0
moe_mps::attention: scale must be a number in the range of float32, got nan
moe_mps::attention: k must be uint32 or int32, got float32
moe_mps::attention: v_biases must be a tensor beside quantised v, got None
moe_mps::attention: k_scales must be of a last dimension of 16 / 32 or 64 or 128, got (2, 2, 9, 1)
moe_mps::attention: k_scales must be of a last dimension of 32 / 32 or 64 or 128, got (2, 2, 9, 2)
moe_mps::attention: v_biases must be float32, got float16
moe_mps::write_cache_quantized_: states must be float32 or float16 or bfloat16, got int16
moe_mps::write_cache_quantized_: states must be 4-D, got 3-D of shape (2, 3, 64)
moe_mps::write_cache_quantized_: states must be of shape [B, Hk, T, D] = (2, 2, 3, 64), got (2, 2, 3, 32)
moe_mps::write_cache_quantized_: packed_ must be of shape [B, Hk, N, D / 4] = (2, 3, 8, 16), got (2, 2, 8,
    16)
moe_mps::write_cache_quantized_: packed_ must be uint32 or int32, got float32
moe_mps::write_cache_quantized_: packed_ must be free of expanded (stride-0) dimensions, got strides (32,
    16, 0, 1)
moe_mps::write_cache_quantized_: scales_ must be of a last dimension of 64 / 32 or 64 or 128, got (2, 2, 8,
    4)
moe_mps::write_cache_quantized_: scales_ must be float32, got float16
moe_mps::write_cache_quantized_: biases_ must be of shape of scales_ = (2, 2, 8, 2), got (2, 2, 8, 1)
moe_mps::write_cache_quantized_: start must be between 0 and 5, got 6
moe_mps::write_cache_quantized_: start must be between 0 and 5, got -1
moe_mps::write_cache_quantized_: position must be int64, got int32
moe_mps::write_cache_quantized_: position must be one number, got a tensor of shape (2,)
moe_mps::fused_norm_add: residual must be float32 or float16 or bfloat16, got int16
moe_mps::fused_norm_add: residual must be at least 1-D, got 0-D of shape ()
moe_mps::fused_norm_add: input must be float32, got float16
moe_mps::fused_norm_add: input must be of shape [..., H] of residual = (3, 64), got (4, 64)
moe_mps::fused_norm_add: input must be of shape [..., H] of residual = (3, 64), got (64,)
moe_mps::fused_norm_add: weight must be float32 or float16 or bfloat16, got int32
moe_mps::fused_norm_add: weight must be of shape [H] = (64,), got (63,)
moe_mps::fused_norm_add: weight must be of shape [H] = (64,), got (1, 64)
moe_mps::fused_norm_add: weight must be a tensor, got None
moe_mps::fused_norm_add: eps must be a number in the range of float32, got nan
moe_mps::fused_norm_add: weight_offset must be a number in the range of float32, got 1e+39
moe_mps::fused_norm_add_scalar: input must be of shape [..., H] of residual = (3, 64), got (4, 64)
moe_mps::fused_norm_add_scalar: scalar must be of 1 or H = 64 elements, got shape (2,)
moe_mps::fused_norm_add_scalar: scalar must be of 1 or H = 64 elements, got shape (1, 1)
moe_mps::fused_norm_add_scalar: scalar must be float32 or float16 or bfloat16, got int16
moe_mps::fused_norm_add_scalar: scalar must be a tensor, got None
moe_mps::fused_residual_norm: residual must be float32 or float16 or bfloat16, got int16
moe_mps::fused_residual_norm_scalar: weight must be of shape [H] = (64,), got (63,)
moe_mps::fused_residual_norm_scalar: scalar must be of 1 or H = 64 elements, got shape (2,)
moe_mps::moe_router: logits must be float32 or float16 or bfloat16, got int32
moe_mps::moe_router: logits must be 2-D, got 3-D of shape (1, 3, 8)
moe_mps::moe_router: logits must be [T, E] with E between 1 and 1024, got E = 0
moe_mps::moe_router: logits must be [T, E] with E between 1 and 1024, got E = 1025
moe_mps::moe_router: top_k must be between 1 and 8, the smaller of E and 64, got 0
moe_mps::moe_router: top_k must be between 1 and 8, the smaller of E and 64, got -1
moe_mps::moe_router: top_k must be between 1 and 8, the smaller of E and 64, got 9
moe_mps::moe_router: top_k must be between 1 and 64, the smaller of E and 64, got 65
moe_mps::moe_router: scoring must be one of softmax, sigmoid, sqrtsoftplus, softmax_after_topk, got 'tanh'
moe_mps::moe_router: bias must be of shape [E] = (8,), got (8, 1)
moe_mps::moe_router: bias must be float32 or float16 or bfloat16, got int16
moe_mps::moe_router: num_groups must be between 1 and 8, got 0
moe_mps::moe_router: num_groups must be a divisor of the 8 experts, got 3
moe_mps::moe_router: num_groups must be at most 4, for 2 experts a group with top2_sum, got 8
moe_mps::moe_router: group_score must be one of top2_sum, max, got 'sum'
moe_mps::moe_router: top_groups must be between 1 and 4, got 5
moe_mps::moe_router: top_groups must be between 1 and 4, got 0
moe_mps::moe_router: top_k must be at most 2, the experts in top_groups groups, got 3
moe_mps::moe_router: per_expert_scale must be of shape [E] = (8,), got (9,)
moe_mps::moe_router: per_expert_scale must be float32 or float16 or bfloat16, got int32
moe_mps::moe_router: norm_eps must be at least 0.0, got -5.0
moe_mps::moe_router: norm_min must be a number in the range of float32, got nan
moe_mps::moe_router: masked_score must be a number in the range of float32, got 1e+39
moe_mps::moe_router_topk_softmax: logits must be float32 or float16 or bfloat16, got int32
moe_mps::moe_router_topk_softmax: logits must be 2-D, got 3-D of shape (1, 3, 8)
moe_mps::moe_router_topk_softmax: logits must be [T, E] with E between 1 and 1024, got E = 0
moe_mps::moe_router_topk_softmax: logits must be [T, E] with E between 1 and 1024, got E = 1025
moe_mps::moe_router_topk_softmax: top_k must be between 1 and 8, the smaller of E and 64, got 0
moe_mps::moe_router_topk_softmax: top_k must be between 1 and 8, the smaller of E and 64, got -1
moe_mps::moe_router_topk_softmax: top_k must be between 1 and 8, the smaller of E and 64, got 9
moe_mps::moe_router_topk_softmax: top_k must be between 1 and 64, the smaller of E and 64, got 65
moe_mps::fused_moe_routing: logits must be float32 or float16 or bfloat16, got int32
moe_mps::fused_moe_routing: logits must be 1-D or 2-D, got 3-D of shape (1, 3, 8)
moe_mps::fused_moe_routing: logits must be [T, E] with E between 1 and 1024, got E = 0
moe_mps::fused_moe_routing: logits must be [T, E] with E between 1 and 1024, got E = 1025
moe_mps::fused_moe_routing: top_k must be between 1 and 8, the smaller of E and 64, got 0
moe_mps::fused_moe_routing: top_k must be between 1 and 8, the smaller of E and 64, got -1
moe_mps::fused_moe_routing: top_k must be between 1 and 8, the smaller of E and 64, got 9
moe_mps::fused_moe_routing: top_k must be between 1 and 64, the smaller of E and 64, got 65
moe_mps::fused_moe_routing: per_expert_scale must be of shape [E] = (8,), got (9,)
moe_mps::fused_moe_routing: per_expert_scale must be float32 or float16 or bfloat16, got int32
moe_mps::fused_moe_routing: per_expert_scale must be a tensor, got None
moe_mps::moe_gate: hidden must be float32 or float16 or bfloat16, got int16
moe_mps::moe_gate: hidden must be 2-D, got 1-D of shape (64,)
moe_mps::moe_gate: router_weight must be float32 or float16 or bfloat16, got int32
moe_mps::moe_gate: router_weight must be 2-D, got 1-D of shape (512,)
moe_mps::moe_gate: router_weight must be of shape [E, H] = (8, 64), got (8, 65)
moe_mps::moe_gate: norm_weight must be of shape [H] = (64,), got (65,)
moe_mps::moe_gate: norm_weight must be float32 or float16 or bfloat16, got int16
moe_mps::moe_gate: per_expert_scale must be of shape [E] = (8,), got (9,)
moe_mps::moe_gate: per_expert_scale must be float32 or float16 or bfloat16, got int32
moe_mps::moe_gate: router_weight must be [E, H] with E between 1 and 1024, got E = 1025
moe_mps::moe_gate: top_k must be between 1 and 8, the smaller of E and 64, got 0
moe_mps::moe_gate: top_k must be between 1 and 8, the smaller of E and 64, got 9
moe_mps::moe_gate: hidden must be a tensor, got None
moe_mps::moe_bucket: ids must be int32 or int64, got float32
moe_mps::moe_bucket: ids must be int32 or int64, got int16
moe_mps::moe_bucket: ids must be 2-D, got 1-D of shape (6,)
moe_mps::moe_bucket: num_experts must be between 1 and 1024, got 0
moe_mps::moe_bucket: num_experts must be between 1 and 1024, got 1025
moe_mps::moe_compute_ids_tpe: ids must be int32 or int64, got float32
moe_mps::moe_compute_ids_tpe: ids must be int32 or int64, got int16
moe_mps::moe_compute_ids_tpe: ids must be 2-D, got 1-D of shape (6,)
moe_mps::moe_compute_ids_tpe: num_experts must be between 1 and 1024, got 0
moe_mps::moe_compute_ids_tpe: num_experts must be between 1 and 1024, got 1025
moe_mps::moe_compute_ids_tpe: gate_up_rows must be between 1 and 2147483647, got 0
moe_mps::moe_compute_ids_tpe: down_rows must be between 1 and 2147483647, got -1
moe_mps::silu_mul_stacked: gate must be float32 or float16 or bfloat16, got int32
moe_mps::silu_mul_stacked: gate must be at least 1-D, got 0-D of shape ()
moe_mps::silu_mul_stacked: up must be float32, got float16
moe_mps::silu_mul_stacked: up must be of shape [..., I] of gate = (3, 32), got (32,)
moe_mps::weighted_sum_stacked: slots must be float32 or float16 or bfloat16, got int16
moe_mps::weighted_sum_stacked: slots must be at least 2-D, got 1-D of shape (64,)
moe_mps::weighted_sum_stacked: slots must be [..., S, H] with S at least 1, got (3, 0, 64)
moe_mps::weighted_sum_stacked: weights must be of shape [..., S] of slots = (3, 2), got (3, 3)
moe_mps::weighted_sum_stacked: weights must be float32 or float16 or bfloat16, got int32
moe_mps::weighted_sum_residual_stacked_: weights must be of shape [..., S] of slots = (3, 2), got (3, 3)
moe_mps::weighted_sum_residual_stacked_: residual_ must be float32, got float16
moe_mps::weighted_sum_residual_stacked_: residual_ must be of shape [..., H] of slots = (3, 64), got (3, 65)
moe_mps::weighted_sum_residual_stacked_: residual_ must be free of expanded (stride-0) dimensions, got
    strides (0, 1)
moe_mps::weighted_sum_residual_stacked_: residual_ must be a tensor, got None
moe_mps::weighted_sum_residual_norm_stacked_: residual_ must be float32, got float16
moe_mps::weighted_sum_residual_norm_stacked_: norm_weight must be float32 or float16 or bfloat16, got int16
moe_mps::weighted_sum_residual_norm_stacked_: norm_weight must be of shape [H] = (64,), got (1,)
moe_mps::moe_weighted_reduce: weights must be float32 or float16 or bfloat16, got int32
moe_mps::moe_weighted_reduce: weights must be 2-D, got 1-D of shape (6,)
moe_mps::moe_weighted_reduce: weights must be [T, K] with K at least 1, got (3, 0)
moe_mps::moe_weighted_reduce: expert_out must be float32 or float16 or bfloat16, got int16
moe_mps::moe_weighted_reduce: expert_out must be 2-D or 3-D, got 1-D of shape (384,)
moe_mps::moe_weighted_reduce: expert_out must be of shape [T, K, H] = (3, 2, 64), got (3, 3, 64)
moe_mps::moe_weighted_reduce: expert_out must be of shape [T * K, H] = (6, 64), got (3, 64)
moe_mps::moe_weighted_reduce: shared_out must be of shape [T, H] = (3, 64), got (3, 65)
moe_mps::moe_weighted_reduce: shared_out must be float32, got float16
moe_mps::moe_weighted_reduce: shared_out must be given when shared_gate is, got None
moe_mps::moe_weighted_reduce: shared_gate must be of shape [T, 1] = (3, 1), got (3, 2)
moe_mps::moe_weighted_reduce: shared_gate must be of shape [T] = (3,), got (4,)
moe_mps::moe_weighted_reduce: shared_gate must be float32 or float16 or bfloat16, got int32
moe_mps::moe_weighted_reduce: residual must be T = 3 rows of H = 64 elements, got (4, 64)
moe_mps::moe_weighted_reduce: residual must be T = 3 rows of H = 64 elements, got (1, 64, 3)
moe_mps::moe_weighted_reduce: residual must be float32, got float16
moe_mps::moe_weighted_reduce: gate_is_logit must be False without shared_gate, got True""",
        )


def test_sparse_tensors():
    gate = torch.ones(2, 3)
    message = "moe_mps::silu_mul_stacked: gate must be a dense tensor, got sparse_coo"
    with pytest.raises(ValueError, match=message):
        packet("silu_mul_stacked")(gate.to_sparse(), gate)


def test_errors_read_the_same_everywhere(device):
    """On the device and on meta: one line that begins with the operator and names the argument."""
    messages = error_messages(device)
    assert messages == error_messages("meta")
    for (name, _), message in zip(bad_arguments("meta"), messages, strict=True):
        assert message.startswith(f"moe_mps::{name}: ") and " must be " in message and ", got " in message
        assert "\n" not in message


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_of_two_devices(name):
    """Each tensor argument but the first on meta beside a first one on the CPU."""
    arguments = sample_arguments("cpu", torch.float32)[name]
    tensors = [argument for argument, value in arguments.items() if isinstance(value, Tensor)]
    for argument in tensors[1:]:
        mixed = {**arguments, argument: arguments[argument].to("meta")}
        with pytest.raises(
            ValueError, match=rf"^moe_mps::{name}: {argument} must be on the device of .*, got meta$"
        ):
            packet(name)(**mixed)
