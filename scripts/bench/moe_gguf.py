#!/usr/bin/env python
"""Prints how fast a core converts blocks of a GGUF file as it reads experts.

    python scripts/bench/moe_gguf.py

Each type has experts of 4 MB in a file that is in the page cache, read by one thread: with the conversion to
the layout of the operators, and without. GB are those of the file. Elsewhere than on a Mac the host code is
that of the simulator, compiled with -O2.
"""

import paths

if __name__ == "__main__":
    paths.words(__doc__)

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from support.gguf_blocks import SIZES, random_blocks
from support.gguf_models import USUAL
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from torch_moe_mps._text import aligned
from torch_moe_mps.disk import pool
from torch_moe_mps.disk.file import Layer
from torch_moe_mps.disk.stored import BlockExperts, FileBlocks
from torch_moe_mps.quantization.gguf import format_of_blocks, from_blocks

ARCHITECTURE = "qwen3moe"
EXPERTS, COLUMNS, BYTES, TIMES = 16, 4096, 4 << 20, 3
IN_FLOAT32 = ("norm", "gate_inp")


def write_gguf(folder: Path, file: Path) -> None:
    """Writes the model and tokenizer of a folder of transformers, whose embedding is the head, too.

    It has Qwen3-MoE's classes, is in bfloat16, and is for llama.cpp's tools.
    """
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
        for name, in_file in USUAL.items():
            if (value := state.get(f"{own}.{name}.weight")) is not None:
                yield f"{other}.{in_file}", value
        gate, up = state[f"{own}.mlp.experts.gate_up_proj"].chunk(2, 1)
        yield f"{other}.ffn_gate_exps", gate
        yield f"{other}.ffn_up_exps", up
        yield f"{other}.ffn_down_exps", state[f"{own}.mlp.experts.down_proj"]


def experts_of(kind: str, file: Path) -> BlockExperts:
    """Experts of a matrix in blocks of one type, and their file."""
    sample = torch.from_numpy(random_blocks(kind, (16, COLUMNS)))
    rows = BYTES // sample[0].numel() // 16 * 16
    blocks = sample.repeat(rows // 16, 1)
    with file.open("wb") as written:
        for _ in range(EXPERTS):
            written.write(blocks.numpy())
    tensors = [tensor for tensor in from_blocks(sample, kind) if tensor is not None]
    names = tuple(f"tensor{number}" for number in range(len(tensors)))
    place = 0, blocks.numel(), rows, COLUMNS // SIZES[kind][0]
    shapes = {
        name: (str(tensor.dtype).removeprefix("torch."), (rows, *tensor.shape[1:]))
        for name, tensor in zip(names, tensors, strict=True)
    }
    layer = Layer("experts", EXPERTS, shapes)
    return BlockExperts(file, kind, [layer], [[FileBlocks(kind, str(file), *place, names)]])


def seconds(work: Any) -> float:
    """The least time of several, of the processor, so that a busy machine counts little."""
    times = []
    for _ in range(TIMES):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def rate(kind: str, folder: Path) -> list[str]:
    """The type, and GB/s: read alone, read and converted, and converted alone."""
    file = folder / kind
    experts = experts_of(kind, file)
    size, memory = os.path.getsize(file), bytearray(pool.CONVERTED)
    (opened,) = experts.opened.values()

    def read() -> None:
        for place in range(0, size, len(memory)):
            os.preadv(opened, [memory], place)

    pools = pool.Pools(experts, 2, torch.device("cpu"))
    alone, both = seconds(read), seconds(lambda: pools.staging.read(0))
    file.unlink()
    return [kind, *(f"{size / 1e9 / each:.1f}" for each in (alone, both, both - alone))]


def main() -> None:
    if sys.platform != "darwin":
        os.environ.setdefault("METAL_SIMULATOR_OPTIMISE", "-O2")
        from support.simulated import install

        install()
    pool.DEPTH = 1  # thread
    kinds = [kind for kind in SIZES if format_of_blocks(kind) is not None]
    with tempfile.TemporaryDirectory() as folder:
        rows = [rate(kind, Path(folder)) for kind in kinds]
    heads = [["type", "read, GB/s", "read and converted, GB/s", "converted, GB/s"]]
    print("\n".join(aligned(heads + rows, 1)))


if __name__ == "__main__":
    main()
