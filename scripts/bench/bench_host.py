#!/usr/bin/env python
"""The host's time of one decode step: Python, PyTorch's dispatcher and this package's host code.

A model of tiny layers runs in the simulator with a device that computes nothing, once as it is and once
accelerated, in turns. Times are the processor's, so that a busy machine counts little. What MPS takes to
encode an operator of aten is missing, which favours the model's own code. The accelerated step is captured
after two of its kind; --no-capture leaves that out. --profile prints where
the accelerated step spends its time, by layer of code.
"""

import argparse
import copy
import cProfile
import os
import pstats
import statistics
import sys
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("METAL_SIMULATOR_OPTIMISE", "-O2")

import paths  # noqa: F401  (for simulator and support)
import simulator
import torch
from support.simulated import install
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3MoeConfig

import torch_moe_mps

# Packages -> the layer of code that their files are; the first whose folder has the file.
LAYERS = {
    "torch_moe_mps.models": "rewritten modules",
    "torch_moe_mps.transformers": "rewritten modules",
    "torch_moe_mps": "operators",
    "transformers": "transformers",
    "torch": "torch",
}


def tiny_model(layers: int):
    config = Qwen3MoeConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=64, moe_intermediate_size=64,
        vocab_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def model_of(architecture: str, layers: int):
    if architecture == "qwen3_moe":
        return tiny_model(layers)
    from support import tiny_models  # it asks torch for MPS

    with tiny_models.groups_of_32(), tiny_models.sizes(q_lora_rank=32, kv_lora_rank=32):
        model = tiny_models.tiny_model(architecture, torch.bfloat16, num_hidden_layers=layers)
    model.set_experts_implementation("eager")
    return model


class Step:
    """One token after another through a model."""

    def __init__(self, model):
        from torch_moe_mps.models.upstream.calls import cache_argument  # it asks torch for MPS

        self.model = model
        self.arguments = cache_argument(model, DynamicCache(config=model.config))
        self.token = torch.zeros(1, 1, dtype=torch.int64, device="mps")

    def __call__(self) -> float:
        started = time.process_time()
        self.model(self.token, **self.arguments, use_cache=True)
        return time.process_time() - started


def profile(step: Step, steps: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    folders = [(f"{sys.modules[name].__path__[0]}{os.sep}", title) for name, title in LAYERS.items()]
    times: dict[str, float] = {}
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():
        titles = (title for folder, title in folders if file.startswith(folder))
        layer = next(titles, "built-in: " + name[:60])
        times[layer] = times.get(layer, 0.0) + own
    print("own time of a step, profiled:")
    for layer, seconds in sorted(times.items(), key=lambda item: -item[1])[:16]:
        print(f"  {1000 * seconds / steps:7.2f} ms  {layer}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3_moe", help="an architecture of docs/models.md")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bits", type=int, default=4, help="0: dense weights")
    parser.add_argument("--no-capture", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    os.environ["MOE_MPS_CAPTURE"] = "0" if options.no_capture else "auto"
    install()
    torch.manual_seed(0)
    model = model_of(options.model, options.layers)
    accelerated = copy.deepcopy(model)
    warnings.simplefilter("ignore")
    torch_moe_mps.accelerate(accelerated, bits=options.bits or None, group_size=32 if options.bits else None)
    with torch.no_grad(), simulator.dropped(validate=False):
        steps = {"own code": Step(model.to("mps")), "accelerated": Step(accelerated.to("mps"))}
        times = {
            name: [step() for _ in range(5)][:0] for name, step in steps.items()
        }  # the first are warm-up
        for _ in range(options.steps):
            for name, step in steps.items():
                times[name].append(step())
        for name, seconds in times.items():
            best, median = 1000 * min(seconds), 1000 * statistics.median(seconds)
            print(f"{name:12} {best:7.2f} ms best, {median:7.2f} ms median of {options.steps} steps")
        own, ours = (statistics.median(seconds) for seconds in times.values())
        print(f"accelerated / own code: {ours / own:.3f} ({options.layers} layers of {options.model})")
        from torch_moe_mps.models.capture.classes import captures_of

        if captures := captures_of(accelerated):
            seconds = ", ".join(f"{program.seconds:.2f}" for program in captures.programs)
            print(f"{captures}; captured in {seconds or '-'} s")
        if options.profile:
            profile(steps["accelerated"], options.steps)


if __name__ == "__main__":
    main()
