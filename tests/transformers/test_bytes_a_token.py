"""How many bytes of weights a token reads: counted in the simulator, and as the report says it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import torch_moe_mps

# Qwen3-30B-A3B: of its experts those that a token is routed to, one of its layers, fewer rows of the head.
LAYERS, EXPERTS, TOP_K, VOCABULARY, ROWS = 48, 128, 8, 151936, 512
SHAPES = Qwen3MoeConfig(
    num_hidden_layers=1, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
    vocab_size=ROWS, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    num_experts=TOP_K, num_experts_per_tok=TOP_K,
)  # fmt: skip
MOST = 1.75e9


def weights_read(simulated, run) -> int:
    """Bytes that the package's dispatches read, each byte once."""
    with torch.no_grad(), simulated.counters() as dispatches:
        run()
    return sum(
        traffic.distinct_bytes_read for dispatch in dispatches for traffic in dispatch.buffers.values()
    )


@pytest.mark.sweep
def test_bytes_a_token_of_qwen3_30b(simulated):
    """The whole model's weights from one layer of its widths, without what stays outside of the operators."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES, dtype=torch.bfloat16).eval()
    report = torch_moe_mps.accelerate(model, bits=4)
    model.to("mps")
    token = torch.zeros(1, 1, dtype=torch.int64, device="mps")
    hidden = torch.zeros(1, 1, SHAPES.hidden_size, dtype=torch.bfloat16, device="mps")
    router = model.model.layers[0].mlp.gate.weight.nbytes  # by aten's matmul
    every = weights_read(simulated, lambda: model(token))
    head = weights_read(simulated, lambda: model.lm_head(hidden))
    assert every + router == pytest.approx(report.quantization.bytes_after, rel=0.01)
    layer = every - head + router * EXPERTS // TOP_K
    assert 1.7e9 < LAYERS * layer + head * VOCABULARY // ROWS <= MOST
