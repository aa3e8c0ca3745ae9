#!/usr/bin/env python
"""Several answers at once beside one: the host's time of a step, and tokens per second on a CPU.

The host's time is that of a model of tiny layers in the simulator, on a device that computes nothing: a step
of a batch of --rows answers, whose tokens are captured, beside one of a batch with a single answer, in turns.
Times are the processor's. --cpu takes ten layers as wide as those of SmolLM2-135M with random weights, or
--model, and generates --rows answers one after the other and together; each must be the same.
"""

import argparse
import os
import statistics
import time
import warnings
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("METAL_SIMULATOR_OPTIMISE", "-O2")

import paths  # noqa: F401  (for simulator and support)
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

import torch_moe_mps

if TYPE_CHECKING:
    from torch_moe_mps.serving.engine.engine import Engine


def answers(model, count: int) -> "Engine":
    """A batch of answers that do not end, behind their prompts."""
    from torch_moe_mps.serving.engine.engine import (
        Engine,  # they ask torch for MPS: the simulator comes first
    )
    from torch_moe_mps.serving.engine.job import Job

    batch = Engine(model, None, count)
    config = GenerationConfig(max_new_tokens=10**6, eos_token_id=None, pad_token_id=0)
    for number in range(count):
        ids = torch.arange(1, 5 + number)[None]
        batch.submit(Job({"input_ids": ids}, config, lambda token: False, lambda reason: None))
    while batch.waiting or len(batch.pool.batch.sequences) < count:
        batch.step()
    return batch


def host(rows: int, layers: int, steps: int) -> None:
    import simulator
    from bench_host import model_of
    from support.simulated import install

    install()
    torch.manual_seed(0)
    model = model_of("qwen3_moe", layers).to("mps")
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    with simulator.dropped(validate=False):
        batches = {1: answers(model, 1), rows: answers(model, rows)}
        times: dict[int, list[float]] = {count: [] for count in batches}
        for step in range(5 + steps):
            for count, batch in batches.items():
                started = time.process_time()
                batch.step()
                if step >= 5:  # the first are captured
                    times[count].append(1000 * (time.process_time() - started))
    for count, taken in times.items():
        print(
            f"{count:2} rows: {min(taken):6.2f} ms best, {statistics.median(taken):6.2f} ms median of {steps}"
        )
    ratio = statistics.median(times[rows]) / statistics.median(times[1])
    print(f"a step of {rows} rows / of one: {ratio:.2f} of the host's time ({layers} layers of qwen3_moe)")


def cpu(path: str | None, rows: int, tokens: int) -> None:
    torch.manual_seed(0)
    if path is None:
        config = LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=9,
            num_key_value_heads=3, vocab_size=8192,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch_moe_mps.accelerate(model)
    config = GenerationConfig(max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
    prompts = [torch.randint(5, 1000, (8 + 3 * number,)) for number in range(rows)]
    started = time.perf_counter()
    alone = [torch_moe_mps.generate_batch(model, [ids], config, progress=False)[0] for ids in prompts]
    middle = time.perf_counter()
    together = torch_moe_mps.generate_batch(model, prompts, config, progress=False)
    ended = time.perf_counter()
    same = sum(map(torch.equal, alone, together))
    one, several = (rows * tokens / seconds for seconds in (middle - started, ended - middle))
    print(
        f"one after the other: {one:.1f} tokens/s; {rows} together: {several:.1f}, {several / one:.2f} times"
    )
    print(f"{same} of {rows} answers are the same tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--model", help="a folder or a name, for --cpu")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.cpu:
        cpu(options.model, options.rows, options.tokens)
    else:
        host(options.rows, options.layers, options.steps)


if __name__ == "__main__":
    main()
