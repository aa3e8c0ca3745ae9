#!/usr/bin/env python
"""Prints how long a GGUF file takes to load, and the peak of memory, with all experts and with half of them.

    python scripts/bench/bench_gguf.py

The file has random Q4_K blocks of a Qwen3-MoE: 24 layers of 64 experts, 2 GB. A new process loads it with all
experts in memory, and another one with room for half of them, which tokens fill. Each loads a small model
first, so that imports do not count. On Linux the memory is that of the process alone, sampled every 5 ms,
without pages of the file. On macOS it is the largest resident set, which counts them.
"""

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import paths

if __name__ == "__main__":
    WORDS = paths.words(__doc__, "word of an inner process")

from support.gguf_blocks import SIZES
from support.gguf_files import Matrices, write, write_file

from torch_moe_mps import from_pretrained
from torch_moe_mps._text import aligned
from torch_moe_mps.models.modules.experts_on_disk import expert_pools

KIND, (VALUES, BYTES) = "q4_k", SIZES["q4_k"]  # of a block
LAYERS, EXPERTS, HIDDEN, INNER, HEADS, VOCABULARY = 24, 64, 1024, 768, 16, 4096


def matrices_of(layers: int, experts: int) -> Matrices:
    """{name: shape and type} of the tensors of a file."""
    result: Matrices = {
        **{"token_embd.weight": ((VOCABULARY, HIDDEN), KIND), "output.weight": ((VOCABULARY, HIDDEN), KIND)},
        "output_norm.weight": ((HIDDEN,), "f32"),
    }
    of_layer: Matrices = {
        **{f"attn_{name}": ((HIDDEN, HIDDEN), KIND) for name in ("q", "k", "v", "output")},
        **{f"attn_{name}_norm": ((HIDDEN // HEADS,), "f32") for name in ("q", "k")},
        **{f"{name}_norm": ((HIDDEN,), "f32") for name in ("attn", "ffn")},
        "ffn_gate_inp": ((experts, HIDDEN), "f32"),
        **{f"ffn_{name}_exps": ((experts, INNER, HIDDEN), KIND) for name in ("gate", "up")},
        "ffn_down_exps": ((experts, HIDDEN, INNER), KIND),
    }
    for layer in range(layers):
        result |= {f"blk.{layer}.{name}.weight": each for name, each in of_layer.items()}
    return result


def bytes_of_experts(layers: int, experts: int) -> int:
    """Bytes of all experts in a file."""
    shapes = (shape for name, (shape, _) in matrices_of(layers, experts).items() if "_exps" in name)
    return sum(map(math.prod, shapes)) // VALUES * BYTES


def write_random(path: Path, layers: int = LAYERS, experts: int = EXPERTS) -> None:
    """Writes the file."""
    keys: dict[str, object] = {
        **{"context_length": 512, "embedding_length": HIDDEN, "block_count": layers},
        **{"feed_forward_length": INNER, "expert_feed_forward_length": INNER, "vocab_size": VOCABULARY},
        **{"expert_count": experts, "expert_used_count": 4},
        **{"attention.head_count": HEADS, "attention.head_count_kv": HEADS},
        **{"attention.key_length": HIDDEN // HEADS, "attention.value_length": HIDDEN // HEADS},
        **{"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6},
    }
    write(path, "qwen3moe", keys, matrices_of(layers, experts))


def memory() -> int:
    """Bytes of memory that belong to this process; on macOS the most so far, with pages of files."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def loaded(path: Path, of_experts: int | None) -> dict[str, object]:
    """Seconds of loading a file, the peak above the memory before, and whether experts are on the disk.

    Args:
        of_experts: bytes of memory for the experts; None for all of them.
    """
    before = most = memory()
    ended = threading.Event()

    def sample() -> None:
        nonlocal most
        while not ended.wait(0.005):
            most = max(most, memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    began = time.perf_counter()
    model = from_pretrained(str(path), device_map="cpu", check=False, experts_memory=of_experts)
    seconds = time.perf_counter() - began
    ended.set()
    thread.join()
    peak = max(most, memory()) - before
    return {"seconds": seconds, "peak": peak, "on_disk": expert_pools(model) is not None}


def table(results: list[dict], size: int, half: int) -> list[str]:
    """Lines of the results with all experts, and with half of them."""
    heads = ["experts in memory", "load, s", "peak, GB"]
    rows = [
        [name, f"{each['seconds']:.1f}", f"{each['peak'] / 1e9:.2f}"]
        for name, each in zip(("all", f"room for {half / 1e9:.2f} GB"), results, strict=True)
    ]
    return [f"file: {size / 1e9:.2f} GB", *aligned([heads, *rows], 1)]


def main() -> None:
    half = bytes_of_experts(LAYERS, EXPERTS) // 2
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        subprocess.run([sys.executable, __file__, folder, "write"], check=True)
        for of_experts in ("", str(half)):
            command = [sys.executable, __file__, folder, "run", of_experts]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
        assert [each["on_disk"] for each in results] == [False, True]
        print("\n".join(table(results, os.path.getsize(path), half)))


if __name__ == "__main__":
    match WORDS:
        case [folder, "write"]:
            write_random(Path(folder, "model.gguf"))
        case [folder, "run", of_experts]:
            loaded(write_file(Path(folder, "small.gguf"), "qwen3moe"), None)
            print(json.dumps(loaded(Path(folder, "model.gguf"), int(of_experts) if of_experts else None)))
        case _:
            main()
