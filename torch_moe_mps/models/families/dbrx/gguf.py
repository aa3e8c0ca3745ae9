"""Config and conversions of DBRX in GGUF files, which transformers does not read."""

from typing import Any

from ...upstream.weights import Concatenate, WeightConverter, WeightRenaming, WeightTransform

NAME = "dbrx"
_RENAMINGS = {
    r"^token_embd\.": "transformer.wte.",
    r"^output_norm\.": "transformer.norm_f.",
    r"^output\.": "lm_head.",
    r"^blk\.": "transformer.blocks.",
    r"\.attn_norm\.": ".norm_attn_norm.norm_1.",
    r"\.attn_output_norm\.": ".norm_attn_norm.norm_2.",
    r"\.attn_qkv\.": ".norm_attn_norm.attn.Wqkv.",
    r"\.attn_output\.": ".norm_attn_norm.attn.out_proj.",
    r"\.ffn_gate_inp\.": ".ffn.router.layer.",
}


def config(metadata: dict[str, Any], tensor_names: tuple[str, ...]) -> dict[str, Any]:
    """Entries of transformers' config, from the metadata of a GGUF file."""
    stated = {key.removeprefix(f"{NAME}."): value for key, value in metadata.items()}
    theta = stated["rope.freq_base"]
    ids = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {
        "model_type": "dbrx",
        "architectures": ["DbrxForCausalLM"],
        "d_model": stated["embedding_length"],
        "n_heads": stated["attention.head_count"],
        "n_layers": stated["block_count"],
        "max_seq_len": stated["context_length"],
        "vocab_size": stated.get("vocab_size") or metadata.get("tokenizer.ggml.tokens"),
        "attn_config": {
            "kv_n_heads": stated["attention.head_count_kv"],
            "clip_qkv": stated["attention.clamp_kqv"],
            "rope_theta": theta,
        },
        "ffn_config": {
            "ffn_hidden_size": stated["feed_forward_length"],
            "moe_num_experts": stated["expert_count"],
            "moe_top_k": stated["expert_used_count"],
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **{name: value for name, value in ids.items() if value is not None},
    }


def conversions(config: Any) -> list[WeightTransform]:
    """To the stacks of packed experts, in the places of transformers' interface."""
    return [
        *(WeightRenaming(*names) for names in _RENAMINGS.items()),
        WeightConverter(
            [r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"],
            ".ffn.experts.gate_up_proj",
            operations=[Concatenate(dim=1)],
        ),
        WeightRenaming(r"\.ffn_down_exps\.weight", ".ffn.experts.down_proj"),
    ]
