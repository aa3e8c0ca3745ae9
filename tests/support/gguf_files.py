"""GGUF files of small models, written with the package `gguf`."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GgufConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as first
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

from support.gguf_blocks import random_blocks, type_of, values_of
from torch_moe_mps.checkpoints.source import Source

LAYERS, HIDDEN, HEADS, KEY_HEADS, VOCABULARY, EXPERTS = 2, 256, 4, 2, 96, 4
WIDTH = HIDDEN // HEADS
NUMBERS = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}
Matrices = dict[str, tuple[tuple[int, ...], str]]  # {name in the file: shape and type}


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_file(
    path: Path,
    architecture: str = "llama",
    kinds=("q4_k", "q6_k", "q5_k"),
    tied=False,
    up=None,
    tokenizer=False,
    split=0,
    split_text="qwen2",
) -> Path:
    """A model whose matrices have three types, turn by turn.

    Args:
        up: the type of up projections of experts.
        split: number of tensors in each part but the first and the last; 0 for one file.
        split_text: name of the tokenizer's way to do it.
    """
    keys, matrices = _ARCHITECTURES.get(architecture, _usual)(architecture, *kinds, up or kinds[0])
    if tied:
        del matrices["output.weight"]
    if tokenizer:
        letters = [chr(n) for n in range(33, 125)] + [
            "\u0120",
            "\u010a",
            "ab",
            "<end>",
        ]  # of bytes, as in GPT-2
        keys |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": split_text,
            "tokenizer.ggml.tokens": letters,
        }
        keys |= {"tokenizer.ggml.token_type": [1] * 95 + [3], "tokenizer.ggml.merges": ["a b"]}
        keys |= {"tokenizer.ggml.eos_token_id": 95, "tokenizer.chat_template": TEMPLATE}
    return write(path, architecture, keys, matrices, split)


def write(path: Path, architecture: str, keys: dict[str, object], matrices: Matrices, split: int = 0) -> Path:
    """A file with random tensors, or the first of its parts; keys of the architecture are without its name.

    A type behind "=" stands for the values of its blocks, in float32. The first of several parts has no
    tensors.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=split, small_first_shard=split > 0)
    for key, value in keys.items():
        name = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        kinds = {
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
            str: writer.add_string,
        }
        kinds[type(value)](name, value)
    for name, (shape, kind) in matrices.items():
        _add(writer, name, shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split:
        return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))[0]
    for name, (_, kind) in matrices.items():
        if kind == "q2_0":
            _turn_into_q2_0(path, name)
    return path


def _turn_into_q2_0(path: Path, name: str) -> None:
    """Gives a tensor that was written as q1_0, whose blocks have as many bytes, the type that the package
    gguf does not know."""
    data = bytearray(path.read_bytes())
    begin = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dims, columns) = struct.unpack_from("<IQ", data, begin)
    struct.pack_into("<Q", data, begin + 4, columns // 2)
    struct.pack_into("<I", data, begin + 4 + 8 * dims, 42)
    path.write_bytes(data)


def _add(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    seed = sum(map(ord, name))
    if kind == "f32":
        values = 1 + 0.1 * np.random.default_rng(seed).standard_normal(shape)
        writer.add_tensor(name, (-values if name.endswith("ssm_a") else values).astype(np.float32))
        return
    if kind in NUMBERS:
        writer.add_tensor(name, np.ones(shape, NUMBERS[kind]))
        return
    plain = kind.removeprefix("=")
    scale = 0.0015 if plain.endswith(("_k", "_xs")) else 0.01
    blocks = random_blocks(plain, shape, seed, scale / (10 if plain in ("q6_k", "q8_0", "iq4_nl") else 1))
    if plain != kind:
        values = values_of(blocks.reshape(-1, blocks.shape[-1]), plain)
        writer.add_tensor(name, values.reshape(shape))
        return
    writer.add_tensor(name, blocks, raw_dtype=type_of("q1_0" if kind == "q2_0" else kind))


def _around(first: str, second: str, third: str) -> tuple[dict[str, object], Matrices]:
    """What all architectures have."""
    keys = {
        **{"context_length": 512, "embedding_length": HIDDEN, "block_count": LAYERS},
        **{"feed_forward_length": HIDDEN, "attention.head_count": HEADS, "rope.freq_base": 10000.0},
        **{"attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count_kv": KEY_HEADS},
    }
    matrices = {
        "token_embd.weight": ((VOCABULARY, HIDDEN), third),
        "output.weight": ((VOCABULARY, HIDDEN), second),
        "output_norm.weight": ((HIDDEN,), "f32"),
    }
    return keys, matrices


def _attention(layer: int, first: str, second: str, third: str, queries: int, norms: bool) -> Matrices:
    keys = KEY_HEADS * WIDTH
    found: Matrices = {
        **{"attn_q": ((queries, HIDDEN), first), "attn_k": ((keys, HIDDEN), first)},
        **{"attn_v": ((keys, HIDDEN), second), "attn_output": ((HIDDEN, HEADS * WIDTH), third)},
    }
    if norms:
        found |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), ((WIDTH,), "f32"))
    return {f"blk.{layer}.{name}.weight": each for name, each in found.items()}


def _feed_forward(layer: int, inner: int, experts: bool, first: str, second: str, up: str) -> Matrices:
    suffix = "_exps" if experts else ""
    rows, columns = ((EXPERTS, *shape) if experts else shape for shape in ((inner, HIDDEN), (HIDDEN, inner)))
    found: Matrices = {
        **{f"ffn_gate{suffix}": (rows, first), f"ffn_up{suffix}": (rows, up)},
        f"ffn_down{suffix}": (columns, second),
    }
    if experts:
        found["ffn_gate_inp"] = (EXPERTS, HIDDEN), "f32"
    return {f"blk.{layer}.{name}.weight": each for name, each in found.items()}


def _norms(layer: int, second: str) -> Matrices:
    return {f"blk.{layer}.{norm}.weight": ((HIDDEN,), "f32") for norm in ("attn_norm", second)}


def _usual(architecture: str, first: str, second: str, third: str, up: str):
    """Llama, Qwen2, Qwen3-MoE."""
    keys, matrices = _around(first, second, third)
    moe = architecture.endswith("moe")
    keys["vocab_size"] = VOCABULARY
    if moe:
        keys |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": HIDDEN}
        keys |= {"attention.key_length": WIDTH, "attention.value_length": WIDTH}
    for layer in range(LAYERS):
        matrices |= _attention(layer, first, second, third, HIDDEN, moe)
        if architecture == "qwen2":
            biased = [f"blk.{layer}.attn_{name}" for name in "qkv"]
            matrices |= {f"{name}.bias": (matrices[f"{name}.weight"][0][:1], "f32") for name in biased}
        matrices |= _feed_forward(layer, HIDDEN, moe, first, second, up)
        matrices |= _norms(layer, "ffn_norm")
    return keys, matrices


def _tokens(keys: dict[str, object]) -> None:
    """transformers' second loader takes the number of tokens for the size of the vocabulary."""
    keys["tokenizer.ggml.tokens"] = [f"t{n}" for n in range(VOCABULARY)]


def _qwen35(architecture: str, first: str, second: str, third: str, up: str):
    """Qwen3.5: a layer of linear attention whose heads are tiled, and one of full attention."""
    keys, matrices = _around(first, second, third)
    _tokens(keys)
    key_heads, heads, width, value_width = 2, 4, 32, 128
    total = 2 * key_heads * width + heads * value_width
    keys |= {
        **{"attention.key_length": WIDTH, "full_attention_interval": 2, "rope.dimension_count": WIDTH // 4},
        **{"ssm.time_step_rank": heads, "ssm.conv_kernel": 4, "ssm.state_size": width},
        **{"ssm.group_count": key_heads, "ssm.inner_size": heads * value_width},
        "rope.dimension_sections": [3, 3, 2, 0],
    }
    linear: Matrices = {
        **{"attn_qkv.weight": ((total, HIDDEN), first), "ssm_conv1d.weight": ((total, 4), "f32")},
        "attn_gate.weight": ((heads * value_width, HIDDEN), first),
        **{f"ssm_{name}.weight": ((heads, HIDDEN), second) for name in ("alpha", "beta")},
        "ssm_out.weight": ((HIDDEN, heads * value_width), third),
        **{"ssm_norm.weight": ((value_width,), "f32"), "ssm_a": ((heads,), "f32")},
        "ssm_dt.bias": ((heads,), "f32"),
    }
    moe = architecture.endswith("moe")
    if moe:
        keys |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": HIDDEN}
        keys["expert_shared_feed_forward_length"] = HIDDEN
    matrices |= {f"blk.0.{name}": each for name, each in linear.items()}
    matrices |= _attention(1, first, second, third, 2 * HEADS * WIDTH, True)
    for layer in range(LAYERS):
        matrices |= _feed_forward(layer, HIDDEN, moe, first, second, up)
        if moe:
            shared = _feed_forward(layer, HIDDEN, False, first, second, first)
            matrices |= {name.replace(".weight", "_shexp.weight"): each for name, each in shared.items()}
            matrices[f"blk.{layer}.ffn_gate_inp_shexp.weight"] = (HIDDEN,), "f32"
        matrices |= _norms(layer, "post_attention_norm")
    return keys, matrices


def _lfm2(architecture: str, first: str, second: str, third: str, up: str):
    """LFM2: a short convolution, and a layer of attention."""
    keys, matrices = _around(first, second, third)
    _tokens(keys)
    matrices["token_embd_norm.weight"] = matrices.pop("output_norm.weight")
    keys |= {"attention.head_count_kv": [0, KEY_HEADS], "shortconv.l_cache": 3}
    matrices |= {
        "blk.0.shortconv.in_proj.weight": ((3 * HIDDEN, HIDDEN), first),
        "blk.0.shortconv.out_proj.weight": ((HIDDEN, HIDDEN), second),
        "blk.0.shortconv.conv.weight": ((HIDDEN, 3), "f32"),
    }
    matrices |= _attention(1, first, second, third, HIDDEN, True)
    for layer in range(LAYERS):
        matrices |= _feed_forward(layer, HIDDEN, False, first, second, up)
        matrices |= _norms(layer, "ffn_norm")
    return keys, matrices


def _gpt_oss(architecture: str, first: str, second: str, third: str, up: str):
    """As llama.cpp writes them: sinks and experts have suffixes, and biases."""
    keys, matrices = _around(first, second, third)
    _tokens(keys)
    keys |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": HIDDEN}
    keys |= {"attention.key_length": WIDTH, "attention.value_length": WIDTH, "attention.sliding_window": 4}
    keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.freq_base": 150000.0}
    keys["rope.scaling.original_context_length"] = 64
    for layer in range(LAYERS):
        matrices |= _attention(layer, third, third, third, HIDDEN, False)
        matrices |= _feed_forward(layer, HIDDEN, True, first, second, up)
        matrices[f"blk.{layer}.attn_sinks.weight"] = (HEADS,), "f32"
        matrices |= _norms(layer, "post_attention_norm")
    biased = ("attn_q", "attn_k", "attn_v", "attn_output", "_exps", "ffn_gate_inp")
    for name, (shape, _) in list(matrices.items()):
        if name.removesuffix(".weight").endswith(biased):
            matrices[name.replace(".weight", ".bias")] = shape[:-1], "f32"
    return keys, matrices


def _dbrx(architecture: str, first: str, second: str, third: str, up: str):
    """As llama.cpp writes them: queries, keys and values are one matrix."""
    keys, matrices = _around(first, second, third)
    _tokens(keys)
    keys |= {"expert_count": EXPERTS, "expert_used_count": 2, "attention.clamp_kqv": 1.5}
    keys["rope.freq_base"] = 500000.0
    for layer in range(LAYERS):
        rows = HIDDEN + 2 * KEY_HEADS * WIDTH
        matrices |= {f"blk.{layer}.attn_qkv.weight": ((rows, HIDDEN), first)}
        matrices |= {f"blk.{layer}.attn_output.weight": ((HIDDEN, HIDDEN), third)}
        matrices |= _feed_forward(layer, HIDDEN, True, first, second, up)
        matrices |= _norms(layer, "attn_output_norm")
    return keys, matrices


_ARCHITECTURES = {"qwen35": _qwen35, "qwen35moe": _qwen35, "lfm2": _lfm2, "gpt-oss": _gpt_oss, "dbrx": _dbrx}


# Architectures of transformers' first loader: their names in files, where those differ.
FIRST_LOADER = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "falcon", "bloom", "stablelm", "gpt2"), None),
    **dict.fromkeys(("starcoder2", "mamba", "nemotron", "gemma2", "gemma3", "gemma4"), None),
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "minimax_m2": "minimax-m2"},
    **{"mistral": "llama", "t5": None, "umt5": "t5"},
}
_SMALL = {
    **{"max_position_embeddings": 128, "n_ctx": 128, "num_hidden_layers": 2, "n_layer": 2, "hidden_size": 64},
    **{"intermediate_size": 128, "n_embd": 64, "num_attention_heads": 2, "n_head": 2, "vocab_size": 96},
    **{"num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32, "rotary_dim": 32, "num_experts": 4},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "conv_kernel": 4},
    **{"state_size": 8, "time_step_rank": 32, "rope_theta": 10000.0, "scoring_func": 2},
    **{"d_model": 64, "d_ff": 128, "d_kv": 32, "num_layers": 2, "num_heads": 2, "n_positions": 128},
    **{"relative_attention_num_buckets": 8, "decoder_start_token_id": 0},
    **dict.fromkeys(
        ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"), 1e-5
    ),
}
_SQUEEZED = {".ssm_conv1d.weight": 1, ".shortconv.conv.weight": 1, ".ffn_gate_inp_shexp.weight": 0}
_TRANSPOSED = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")  # of GPT-2


def class_of(architecture: str) -> Any:
    return AutoModelForSeq2SeqLM if "t5" in architecture else AutoModelForCausalLM


def of_architecture(architecture: str, kind: str) -> tuple[str, dict[str, object], Matrices, Any]:
    """What a file of a small model has, by transformers' own table of names, and the model without memory."""
    stored = FIRST_LOADER[architecture] or architecture
    named = GGUF_CONFIG_MAPPING[architecture]
    keys = {key: _SMALL[name] for key, name in named.items() if name in _SMALL}
    keys |= {"vocab_size": VOCABULARY, "general.name": architecture}
    given = {name: _SMALL[name] for name in named.values() if name in _SMALL and name != "scoring_func"}
    kind_of_model = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}.get(architecture, architecture)
    given |= GGUF_CONFIG_DEFAULTS_MAPPING.get(architecture, {})
    if "t5" in architecture:  # transformers reads no other
        given |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    if "vocab_size" in given:  # some take the config's default
        given["vocab_size"] = VOCABULARY
    config = AutoConfig.for_model(kind_of_model, **given)
    with torch.device("meta"):
        model = class_of(architecture).from_config(config)
    processor = first.TENSOR_PROCESSORS.get(stored, first.TensorProcessor)(config=config.to_dict())
    matrices: Matrices = {}
    for name, parameter in first.get_gguf_hf_weights_map(model, processor, stored).items():
        shape = tuple(model.state_dict()[parameter].shape)
        for end, dimension in _SQUEEZED.items():
            if name.endswith(end):
                shape = shape[:dimension] + shape[dimension + 1 :]
        if parameter.endswith("gate_up_proj") and name.endswith(("ffn_gate_exps", "ffn_up_exps")):
            shape = shape[0], shape[1] // 2, shape[2]
        if len(shape) == 3 and not name.endswith(".weight"):
            name = f"{name}.weight"
        if architecture == "gpt2" and name.endswith(_TRANSPOSED):
            shape = shape[::-1]
        is_matrix = len(shape) > 1 and shape[-1] % 32 == 0 and "norm" not in name
        matrices[name] = shape, kind if is_matrix else "f32"
    return stored, keys, matrices, model


def dense(path: Path, cls=AutoModelForCausalLM) -> PreTrainedModel:
    """The model with a file's values in float32: of the right config by transformers' own loader."""
    options = {
        "config": Source(str(path), {}, cls).config,
        "quantization_config": GgufConfig(dequantize=True),
    }
    return cls.from_pretrained(path.parent, gguf_file=path.name, device_map="cpu", **options)
