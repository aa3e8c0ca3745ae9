"""GGUF files of small models, written with the package `gguf`."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from support.gguf_blocks import random_blocks, type_of

LAYERS, HIDDEN, HEADS, KEY_HEADS, VOCABULARY, EXPERTS = 2, 256, 4, 2, 96, 4


def _writer(path: Path, architecture: str) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    return writer


def _add(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    seed = sum(map(ord, name))
    if kind == "f32":
        values = 1 + 0.1 * np.random.default_rng(seed).standard_normal(shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
        return
    scale = 0.0015 if kind.endswith(("_k", "_xs")) else 0.01
    blocks = random_blocks(kind, shape, seed, scale / (10 if kind in ("q6_k", "q8_0", "iq4_nl") else 1))
    writer.add_tensor(f"{name}.weight", blocks, raw_dtype=type_of(kind))


def write_file(
    path: Path, architecture: str = "llama", kinds=("q4_k", "q6_k", "q5_k"), tied=False, up=None
) -> Path:
    """A model whose matrices have three types, turn by turn; `up`: the type of up projections of experts."""
    writer = _writer(path, architecture)
    moe, first, second, third = architecture.endswith("moe"), *kinds
    if moe:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(HIDDEN)
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_value_length(HIDDEN // HEADS)
    _add(writer, "token_embd", (VOCABULARY, HIDDEN), third)
    _add(writer, "output_norm", (HIDDEN,), "f32")
    if not tied:
        _add(writer, "output", (VOCABULARY, HIDDEN), second)
    inner = 768 if moe else HIDDEN  # transformers takes it for the size of Qwen3-MoE's experts
    rows, columns = ((EXPERTS, *shape) if moe else shape for shape in ((inner, HIDDEN), (HIDDEN, inner)))
    suffix = "_exps" if moe else ""
    keys = KEY_HEADS * HIDDEN // HEADS
    for layer in range(LAYERS):
        matrices = {
            **{"attn_q": ((HIDDEN, HIDDEN), first), "attn_k": ((keys, HIDDEN), first)},
            **{"attn_v": ((keys, HIDDEN), second), "attn_output": ((HIDDEN, HIDDEN), third)},
            **{f"ffn_gate{suffix}": (rows, first), f"ffn_up{suffix}": (rows, up or first)},
            f"ffn_down{suffix}": (columns, second),
            **{"attn_norm": ((HIDDEN,), "f32"), "ffn_norm": ((HIDDEN,), "f32")},
        }
        if moe:
            matrices["ffn_gate_inp"] = (EXPERTS, HIDDEN), "f32"
            for norm in ("attn_q_norm", "attn_k_norm"):
                matrices[norm] = (HIDDEN // HEADS,), "f32"
        for name, (shape, kind) in matrices.items():
            _add(writer, f"blk.{layer}.{name}", shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
