"""Small models with random weights as GGUF files, written as llama.cpp's converter publishes them.

Names and metadata are written by hand here, and share nothing with the reader under test.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, quantize
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from support import gguf_published
from support.gguf_blocks import SIZES, random_blocks, type_of, values_of
from support.gguf_published import Published, Tensors
from support.gguf_recent import RECENT
from support.gguf_rotated import ROTATED

VOCABULARY = 96
# {architecture of the file, and after a colon the case: what is published of it}
PUBLISHED = {**gguf_published.PUBLISHED, **ROTATED, **RECENT}
# Names that most architectures share: of a layer's parameters, and of those around.
USUAL = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
AROUND = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def small_config(architecture: str, hidden: int = 64) -> Any:
    """The config of a small model of an architecture."""
    published = PUBLISHED[architecture]
    usual = {
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": hidden,
            "num_hidden_layers": 2,
        },
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
    }
    text = AutoConfig.for_model(published.model_type, **{**usual, **published.config(hidden)})
    if published.around is None:
        return text
    kind, vision = published.around
    return AutoConfig.for_model(kind, text_config=text.to_dict(), vision_config=vision)


def small_model(architecture: str, hidden: int = 64) -> Any:
    """A model whose weights all matter: also norms, biases and the router's."""
    torch.manual_seed(0)
    config = small_config(architecture, hidden)
    of_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING  # transformers has Mistral 4 in the other table
    auto_class = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
    model = auto_class.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if not value.is_floating_point():
                continue
            if value.dim() > 1 and not name.endswith("A_log"):
                value.normal_(std=2 / value.shape[-1] ** 0.5)
            elif name.endswith("A_log"):
                value.uniform_(-1, 1)
            elif "norm" in name and "bias" not in name:
                value.add_(0.2 * torch.randn_like(value))
            else:
                value.normal_(std=0.2)
    return model


def write_model(
    path: Path,
    architecture: str,
    model: Any,
    kind: str = "f32",
    packed: bool = True,
    keys: Any = None,
    others: Any = None,
) -> Path:
    """The file of a model, whose matrices with whole blocks have a type: random blocks, if it is a K-quant.

    Args:
        packed: False for the values of the blocks, in float32.
        keys: metadata that replaces that of the model; None leaves a key out.
        others: {name: tensor} that the file has, too, or in place of the model's; None leaves one out.
    """
    published, config = PUBLISHED[architecture], model.config.get_text_config()
    file_architecture = architecture.partition(":")[0]
    writer = GGUFWriter(path, file_architecture)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {list: writer.add_array, str: writer.add_string}
    for key, value in {**_usual_keys(config), **published.keys(config), **(keys or {})}.items():
        if value is not None:
            name = key if key.startswith(("tokenizer.", "general.")) else f"{file_architecture}.{key}"
            kinds[type(value)](name, value)
    for name, value in (tensors_of(architecture, model) | (others or {})).items():
        if value is None:
            continue
        values = np.ascontiguousarray(value.float().numpy())
        if kind == "f32" or not _is_quantized(name, values, kind):
            writer.add_tensor(name, values)
            continue
        if kind in ("q8_0", "f16", "bf16"):
            blocks = quantize(values, type_of(kind))
        else:
            blocks = random_blocks(kind, values.shape, sum(map(ord, name)), 0.001 / values.shape[-1] ** 0.5)
        if packed:
            writer.add_tensor(name, blocks, raw_dtype=type_of(kind))
        else:
            found = values_of(blocks.reshape(-1, blocks.shape[-1]), kind)
            writer.add_tensor(name, found.reshape(values.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _is_quantized(name: str, values: np.ndarray, kind: str) -> bool:
    kept = ("ffn_gate_inp", "_norm", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_dt", "shortconv.conv", "exp_probs")
    return (
        values.ndim > 1 and values.shape[-1] % SIZES[kind][0] == 0 and not any(part in name for part in kept)
    )


def _usual_keys(config: Any) -> dict[str, Any]:
    tokens = [chr(33 + number) for number in range(VOCABULARY - 4)] + ["\u0120", "\u010a", "ab", "<end>"]
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        **{"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size},
        **{"block_count": config.num_hidden_layers, "attention.head_count": _heads(config)},
        **{"attention.head_count_kv": config.num_key_value_heads, "vocab_size": config.vocab_size},
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "rope.freq_base": rope.get("rope_theta"),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens},
        **{"tokenizer.ggml.token_type": [1] * (VOCABULARY - 1) + [3], "tokenizer.ggml.merges": ["a b"]},
        **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
        "tokenizer.ggml.padding_token_id": 0,
    }


def _heads(config: Any) -> int | None:
    """Their number; None where it differs from layer to layer."""
    return None if hasattr(config, "num_sliding_attention_heads") else config.num_attention_heads


def tensors_of(architecture: str, model: Any) -> Tensors:
    """{name in the file: value} of a model."""
    published, result = PUBLISHED[architecture], {}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for name, value in text_state(model).items():
        if name not in tied:
            of_text = name.replace("model.language_model.", "model.")
            result.update(_tensors(published, of_text, value.float(), model.config.get_text_config()))
    return result


def text_state(model: Any) -> Tensors:
    """The parameters of a language model, without those of a vision tower."""
    text = ("model.language_model.", "lm_head.")
    state, is_whole = model.state_dict(), model.config.get_text_config() is model.config
    return {name: value for name, value in state.items() if is_whole or name.startswith(text)}


def _tensors(published: Published, name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    match = re.match(r"(?:model\.layers|transformer\.blocks)\.(\d+)\.(.*)", name)
    block, place = (f"blk.{match[1]}.", match[2]) if match else ("", name)
    if (parts := published.split(place, value, config)) is not None:
        yield from ((f"{block}{part}", each.contiguous()) for part, each in parts.items())
        return
    if place.endswith("experts.gate_up_proj"):
        for part, each in zip(("gate", "up"), value.chunk(2, 1), strict=True):
            yield f"{block}ffn_{part}_exps.weight", each.contiguous()
        return
    table = {**(USUAL if match else AROUND), **published.names}
    if place in table:
        yield f"{block}{table[place]}", value
        return
    owner, _, kind = place.rpartition(".")
    yield f"{block}{table[owner]}.{kind}", value
