#!/usr/bin/env python
"""Prints peak memory and tokens of a model whose experts are four times the memory for them.

    python scripts/bench/bench_disk.py

The model has random weights in float32: 24 layers of 16 experts, 1.2 GB. It generates in two new processes,
with all experts in memory and with a quarter, and must give the same tokens.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time

import paths

if __name__ == "__main__":
    WORDS = paths.words(__doc__, "word of an inner process")

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from torch_moe_mps import from_pretrained
from torch_moe_mps.models.modules.experts_on_disk import expert_pools

LAYERS, EXPERTS, HIDDEN, TOKENS = 24, 16, 512, 8
BYTES = LAYERS * EXPERTS * 3 * HIDDEN * HIDDEN * 4


def write(folder: str) -> None:
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8, head_dim=64,
        num_key_value_heads=2, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=HIDDEN,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    from_pretrained(folder, experts_memory=BYTES // 4)  # writes the file of experts


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(folder: str, memory: int | None) -> None:
    before = peak()
    model = from_pretrained(folder, experts_memory=memory)
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False)
        began = time.perf_counter()
        out = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        seconds = time.perf_counter() - began
    pools = expert_pools(model)
    print(
        json.dumps(
            {
                "before": before,
                "peak": peak(),
                "tokens": out[0, 32:].tolist(),
                "rate": TOKENS / seconds,
                "counters": None if pools is None else f"experts on the disk: {pools.counters}",
            }
        )
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, folder, "write"], check=True, stderr=subprocess.DEVNULL)
        results = []
        for memory in ("", str(BYTES // 4)):
            command = [sys.executable, __file__, folder, "run", memory]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    before = results[0]["before"] / 1e9
    print(f"experts: {BYTES / 1e9:.2f} GB; a process before it loads a model: {before:.2f} GB")
    for name, result in zip(("all in memory", f"{BYTES / 4e9:.2f} GB"), results, strict=True):
        print(f"{name}: peak {result['peak'] / 1e9:.2f} GB, {result['rate']:.1f} tokens/s")
    print(results[1]["counters"])
    print("the tokens are the same" if results[0]["tokens"] == results[1]["tokens"] else "THE TOKENS DIFFER")


if __name__ == "__main__":
    match WORDS:
        case [folder, "write"]:
            write(folder)
        case [folder, "run", memory]:
            run(folder, int(memory) if memory else None)
        case _:
            main()
