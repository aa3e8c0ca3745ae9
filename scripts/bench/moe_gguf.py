"""Writes a Mixture of Experts of Qwen3-MoE's classes as a GGUF file in bfloat16, for llama.cpp's tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ARCHITECTURE = "qwen3moe"
# Parameters of a layer and their names in the file; a matrix of gate and up is two tensors there.
IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
IN_FLOAT32 = ("norm", "gate_inp")


def write_gguf(folder: Path, file: Path) -> None:
    """The model and tokenizer of a folder of transformers, whose embedding is the head, too."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    _add_sizes(writer, config)
    _add_tokenizer(writer, folder)
    for name, value in _tensors(model.state_dict(), config.num_hidden_layers):
        values = value.contiguous().numpy()
        kind = gguf.GGMLQuantizationType.BF16
        if any(part in name for part in IN_FLOAT32):
            kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_tokenizer(writer: Any, folder: Path) -> None:
    """SmolLM2's, of bytes as in GPT-2."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)
    special = {token["content"] for token in stored["added_tokens"] if token["special"]}
    kinds = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([kinds[token not in special] for token in vocabulary])
    merges = stored["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


def _tensors(state: dict[str, torch.Tensor], layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "token_embd", state["model.embed_tokens.weight"]
    yield "output_norm", state["model.norm.weight"]
    for layer in range(layers):
        own, other = f"model.layers.{layer}", f"blk.{layer}"
        for name, in_file in IN_LAYERS.items():
            yield f"{other}.{in_file}", state[f"{own}.{name}.weight"]
        gate, up = state[f"{own}.mlp.experts.gate_up_proj"].chunk(2, 1)
        yield f"{other}.ffn_gate_exps", gate
        yield f"{other}.ffn_up_exps", up
        yield f"{other}.ffn_down_exps", state[f"{own}.mlp.experts.down_proj"]
