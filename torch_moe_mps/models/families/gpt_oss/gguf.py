"""Config and conversions of gpt-oss in GGUF files.

transformers' first loader fails at the scaling of the rotary embedding that every such file states, and
looks for experts and sinks under names that no file has.
"""

from typing import Any

from ...upstream.weights import (
    DENSE_DECODER_RENAMINGS,
    GGUF_CONFIG_MAPPING,
    Concatenate,
    Interleave,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

NAME = "gpt-oss"
_SCALING = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}


def config(metadata: dict[str, Any], tensor_names: tuple[str, ...]) -> dict[str, Any]:
    """Entries of transformers' config, from the metadata of a GGUF file."""
    named = GGUF_CONFIG_MAPPING["gpt_oss"].items()
    result = {name: metadata.get(f"{NAME}.{key}") for key, name in named if name not in (None, "rope_theta")}
    # Values that files do not state are those of all models of the family.
    rope = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "factor": 32.0}
    rope |= {"original_max_position_embeddings": 4096, "rope_theta": metadata[f"{NAME}.rope.freq_base"]}
    stated = {name: metadata.get(f"{NAME}.rope.scaling.{key}") for key, name in _SCALING.items()}
    ids = {"eos": "eos", "bos": "bos", "pad": "padding"}
    result |= {
        f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in ids.items()
    }
    result |= {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "head_dim": metadata.get(f"{NAME}.attention.key_length"),
        "intermediate_size": metadata.get(f"{NAME}.expert_feed_forward_length"),
        "sliding_window": metadata.get(f"{NAME}.attention.sliding_window"),
        "vocab_size": result["vocab_size"] or metadata.get("tokenizer.ggml.tokens"),
        "rope_parameters": rope | {name: value for name, value in stated.items() if value is not None},
        "tie_word_embeddings": "output.weight" not in tensor_names,
    }
    return {name: value for name, value in result.items() if value is not None}


def conversions(config: Any) -> list[WeightTransform]:
    """Gate and up projections of experts alternate in the model, whose matrices are transposed."""
    renamings = {
        r"^output_norm\.": "model.norm.",
        r"\.attn_norm\.": ".input_layernorm.",
        r"\.post_attention_norm\.": ".post_attention_layernorm.",
        r"\.attn_sinks\.weight": ".self_attn.sinks",
        r"\.ffn_gate_inp\.": ".mlp.router.",
        r"\.ffn_down_exps\.bias": ".mlp.experts.down_proj_bias",
    }
    both = [Concatenate(dim=1), Interleave(dim=1, inverse=True)]
    converters = [
        ("gate_up_proj", ("gate", "up"), "weight", [*both, Transpose(1, 2)]),
        ("gate_up_proj_bias", ("gate", "up"), "bias", both),
        ("down_proj", ("down",), "weight", [Transpose(1, 2)]),
    ]
    return [
        *DENSE_DECODER_RENAMINGS,
        *(WeightRenaming(*names) for names in renamings.items()),
        *(
            WeightConverter(
                [rf"\.ffn_{part}_exps\.{kind}" for part in parts],
                f".mlp.experts.{name}",
                operations=operations,
            )
            for name, parts, kind, operations in converters
        ),
    ]
