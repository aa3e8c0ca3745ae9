"""What `fit` prints, as tables; the model of its tests, and the context that a memory holds."""

import re

# Qwen3-30B-A3B with an eighth of its layers and twice the experts, where their numbers say nothing.
QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}


def table(output: str, first: str) -> dict[str, list[str]]:
    """{first cell: the others} of the rows below the head that begins with `first`."""
    lines = output.split(f"\n{first} ")[1].split("\n\n")[0].splitlines()[1:]
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line) for line in lines)}


def context(space: int, token: int) -> int:
    """The most tokens of so many bytes that fit, with room for a sixteenth more of them, or for 256."""
    tokens = space // token
    most = (16 * tokens + 15) // 17  # with room for a sixteenth
    return next(n for n in range(most, -1, -1) if n + max(256, n // 16) <= tokens)


# Bytes of a layer for the 2,048 tokens of a prompt that are read at once: the inputs and outputs of q, k, v,
# o, and of the experts for 8 slots.
PROMPT = 2048 * 2 * (2 * (2048 + 4096) + 2 * (2048 + 512) + 8 * (2048 + 2 * 768 + 768 + 2048))
