#!/usr/bin/env python
"""The host's time of one decode step: Python, PyTorch's dispatcher and this package's host code.

A model of tiny layers runs in the simulator with a device that computes nothing, once as it is and once
accelerated, in turns. Times are the processor's, so that a busy machine counts little. What MPS takes to
encode an operator of aten is missing, which favours the model's own code. The accelerated step is captured
after two of its kind; --no-capture leaves that out. --generate measures a token of a greedy `generate`.
--speculative measures a step of a batch that verifies three drafts, beside one of a token.
--tuned compares with the accelerated step where all that can be tuned is.
--modules measures, in place of a step, a call of each kind of module that runs something else, on a token.
--profile prints where the accelerated step spends its time, by layer of code.
"""

import argparse
import copy
import cProfile
import os
import pstats
import statistics
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
from torch_moe_mps.serving.speculative.drafter import Drafter
from torch_moe_mps.transformers.install import is_rewritten
from torch_moe_mps.transformers.upstream.calls import cache_argument

# Parts of a file's path -> the layer of code that it belongs to; the first that fits.
LAYERS = {
    "torch_moe_mps/transformers": "rewritten modules",
    "<torch_moe_mps": "rewritten forwards",
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


class Generation:
    """Tokens of a greedy `generate`: what many take beyond a few, for each."""

    def __init__(self, model):
        self.model, self.ids = model, torch.ones(1, 4, dtype=torch.int64, device="mps")

    def __call__(self, few: int = 4, many: int = 20) -> float:
        return (self.seconds(many) - self.seconds(few)) / (many - few)

    def seconds(self, tokens: int) -> float:
        started = time.process_time()
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        self.model.generate(self.ids, do_sample=False, **options)
        return time.process_time() - started


class Step:
    """One token after another through a model."""

    def __init__(self, model):
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device="mps")

    def __call__(self) -> float:
        started = time.process_time()
        self.model(self.token, **cache_argument(self.model, self.cache), use_cache=True)
        return time.process_time() - started


class Batched:
    """Steps of a batch, with drafts for each or without: what many take beyond a few, for each."""

    def __init__(self, model, speculative=None):
        self.model, self.speculative = model, speculative

    def __call__(self, few: int = 16, many: int = 80) -> float:
        (some, before), (all_of_them, steps) = self.seconds(few), self.seconds(many)
        return (all_of_them - some) / (steps - before)

    def seconds(self, tokens: int) -> tuple[float, int]:
        """Seconds of an answer of so many tokens, and its steps."""
        from support.speculative import Answered, settings

        started = time.process_time()
        ids, options = [torch.ones(4, dtype=torch.int64)], [settings(tokens)]
        found = Answered(self.model, ids, options, self.speculative, width=3)
        return time.process_time() - started, found.steps


class Same(Drafter):
    """Drafts that the token before comes again."""

    def draft(self, rows):
        return [row.tokens[-1:] * row.max_drafts for row in rows]


class Tuned:
    """A step whose launches have another number of simdgroups wherever one is offered."""

    def __init__(self, step: Step):
        ops = torch.ops.moe_mps
        ops._list_tunable(True)
        step()
        offered = ops._listed_tunable()
        ops._list_tunable(False)
        self.step, self.numbers = step, {name: numbers[-1] for name, numbers in offered.items() if numbers}

    def __call__(self) -> float:
        for name, number in self.numbers.items():
            torch.ops.moe_mps._tune(name, number)
        self.step()  # names are looked up once more
        seconds = self.step()
        for name in self.numbers:
            torch.ops.moe_mps._tune(name, 0)
        return seconds


def inputs_of(model, modules: dict[str, torch.nn.Module]) -> dict[str, tuple]:
    """{name: the inputs of a module in a step, where all are tensors}"""
    inputs: dict[str, tuple] = {}

    def note(name: str, args: tuple, named: dict) -> None:
        if args and not named and all(isinstance(each, torch.Tensor) for each in args):
            inputs[name] = args

    hooks = [
        module.register_forward_pre_hook(lambda _, *given, name=name: note(name, *given), with_kwargs=True)
        for name, module in modules.items()
    ]
    Step(model)()
    for hook in hooks:
        hook.remove()
    return inputs


def seconds_of(module, args: tuple, calls: int) -> float:
    started = time.process_time()
    for _ in range(calls):
        module(*args)
    return (time.process_time() - started) / calls


def bench_modules(model, accelerated, rounds: int, calls: int = 200) -> None:
    """Prints microseconds of a call, the best of some rounds in turns: of the first module of each class."""
    names = {type(module): name for name, module in reversed([*accelerated.named_modules()])}
    modules = {name: accelerated.get_submodule(name) for name in names.values()}
    modules = {name: module for name, module in modules.items() if is_rewritten(module)}
    for name, args in inputs_of(accelerated, modules).items():
        pair = model.get_submodule(name), modules[name]
        own, ours = (1e6 * min(times) for times in zip(
            *[[seconds_of(module, args, calls) for module in pair] for _ in range(rounds)], strict=True
        ))  # fmt: skip
        print(f"{ours:8.2f} us, own code {own:8.2f} us  {name} ({type(pair[0]).__name__})")


def profile(step: "Step | Generation", steps: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    times: dict[str, float] = {}
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():
        layer = next((title for part, title in LAYERS.items() if part in file), "built-in: " + name[:60])
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
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--speculative", action="store_true")
    parser.add_argument("--no-capture", action="store_true")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--modules", action="store_true")
    options = parser.parse_args()
    os.environ["MOE_MPS_CAPTURE"] = "0" if options.no_capture else "auto"
    install()
    torch.manual_seed(0)
    model = model_of(options.model, options.layers)
    accelerated = copy.deepcopy(model)
    warnings.simplefilter("ignore")
    torch_moe_mps.accelerate(accelerated, bits=options.bits or None, group_size=32 if options.bits else None)
    with torch.no_grad(), simulator.dropped(validate=False):
        measure = Generation if options.generate else Step
        pairs = (("own code", model), ("accelerated", accelerated))
        if options.modules:
            return bench_modules(*(each.to("mps") for _, each in pairs), options.steps)
        steps: dict[str, Step | Generation | Tuned | Batched]
        steps = {name: measure(each.to("mps")) for name, each in pairs}
        if options.speculative:
            steps = {"a token": Batched(accelerated), "three drafts": Batched(accelerated, Same())}
        if options.tuned:
            steps = {"accelerated": steps["accelerated"], "tuned": Tuned(Step(accelerated))}
        times = {
            name: [step() for _ in range(5)][:0] for name, step in steps.items()
        }  # the first are warm-up
        for _ in range(options.steps):
            for name, step in steps.items():
                times[name].append(step())
        for name, seconds in times.items():
            best, median = 1000 * min(seconds), 1000 * statistics.median(seconds)
            print(f"{name:12} {best:7.2f} ms best, {median:7.2f} ms median of {options.steps} steps")
        one, other = ("tuned", "accelerated") if options.tuned else ("accelerated", "own code")
        if options.speculative:
            one, other = "three drafts", "a token"
        ratio = statistics.median(times[one]) / statistics.median(times[other])
        what = "a token of generate" if options.generate else "a step" if options.speculative else "a token"
        print(f"{one} / {other}: {ratio:.3f} of {what} ({options.layers} layers of {options.model})")
        from torch_moe_mps.transformers.capture.classes import captures_of

        if captures := captures_of(accelerated):
            seconds = ", ".join(f"{program.seconds:.2f}" for program in captures.programs)
            print(f"{captures}; captured in {seconds or '-'} s")
        if options.profile:
            profile(steps["accelerated"], options.steps)


if __name__ == "__main__":
    main()
