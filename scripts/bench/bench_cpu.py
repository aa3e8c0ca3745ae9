#!/usr/bin/env python
"""This package's experts on the CPU beside transformers' eager, grouped_mm and batched_mm, in one run.

The four take turns within every repeat, so that what else the machine does hits all of them alike. batched_mm
copies the weights of every selected expert: it is left out where that takes more than 4 GiB.

With --modules ARCHITECTURE... instead: the CPU time of a call of each kind of replaced module of these small
models, by its operators and by its own code, for a token and for a prompt; the least of several turns.

With --attention instead: `cached_attention` beside torch's scaled_dot_product_attention of the same inputs.
"""

import argparse
import copy
import random
import statistics
import time

import paths  # noqa: F401  (for support)
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import torch_moe_mps
from torch_moe_mps.models.basics.unmodified import all_operators

SHAPES = ((32, 2048, 768, 8), (128, 1024, 512, 8))
PEERS = ("eager", "grouped_mm", "batched_mm")
COPY_LIMIT = 4  # GiB
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Largest difference from eager in float32, as a part of the largest output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def build(experts: int, hidden: int, intermediate: int, top_k: int, dtype: torch.dtype) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(
        num_experts=experts, hidden_size=hidden, moe_intermediate_size=intermediate, num_experts_per_tok=top_k
    )
    module = Qwen3MoeExperts(config)
    with torch.no_grad():
        module.gate_up_proj.normal_(std=hidden**-0.5)
        module.down_proj.normal_(std=intermediate**-0.5)
    return module.to(dtype).requires_grad_(False)


def candidates(module: Qwen3MoeExperts, x, ids, weights) -> dict:
    def ours():
        return torch.ops.moe_mps.moe_experts(x, weights, ids, module.gate_up_proj, module.down_proj)

    def peer(name):
        def run():
            module.config._experts_implementation = name
            return module(x, ids, weights)

        return run

    calls = {"ours": ours, **{name: peer(name) for name in PEERS}}
    copied = ids.numel() * module.gate_up_proj[0].nbytes / 2**30
    if copied > COPY_LIMIT:
        del calls["batched_mm"]
    return calls


def check(calls: dict, dtype: torch.dtype) -> None:
    expected = calls["eager"]().float()
    error = (calls["ours"]().float() - expected).abs().max() / expected.abs().max()
    if not error <= TOLERANCE[dtype]:
        raise SystemExit(f"the result differs from eager by {error:.2e} of its largest value in {dtype}")


def measure(calls: dict, seconds: float, least: int) -> dict[str, float]:
    """Milliseconds of each, the median of many, in turns of random order: what ran before matters."""
    names, times = list(calls), {name: [] for name in calls}
    deadline, turn = time.perf_counter() + seconds, 0
    while turn < least or time.perf_counter() < deadline:
        for name in random.sample(names, len(names)):
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
        if turn == 0 and times.get("batched_mm", [0])[0] > 5 * times.get("eager", [0])[0]:
            names.remove("batched_mm")  # One turn is enough to see that it is not the best.
        turn += 1
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def calls_of(model, names: set[str], tokens: int) -> dict[str, tuple]:
    """{name: what a module is called with for a prompt}"""
    calls: dict[str, tuple] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, *given, name=name: calls.update({name: given}), with_kwargs=True
        )
        for name, module in model.named_modules()
        if name in names
    ]
    model(torch.arange(tokens)[None] % 50, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def seconds_of_call(module, given: tuple, calls: int = 20) -> float:
    """CPU seconds."""
    args, named = given
    start = time.process_time()
    for _ in range(calls):
        module(*args, **named)
    return (time.process_time() - start) / calls


@torch.no_grad()
def compare_modules(architecture: str, turns: int = 9) -> None:
    from support.tiny_models import tiny_model

    own = tiny_model(architecture, torch.float32).eval()
    accelerated = copy.deepcopy(own)
    rows = torch_moe_mps.accelerate(accelerated, check=False).replaced
    kinds = {(row.cls, row.replaced_by): row.name for row in rows if row.kind != "experts"}
    for tokens in (1, 64):
        calls = calls_of(accelerated, {*kinds.values()}, tokens)
        for (cls, done), name in kinds.items():
            pair = [each.get_submodule(name) for each in (accelerated, own)]
            if name in calls:
                times = [[seconds_of_call(module, calls[name]) for module in pair] for _ in range(turns)]
                ours, owns = (1e6 * min(each) for each in zip(*times, strict=True))
                ratio = f"{ours:8.1f} us, own code {owns:8.1f} us, ratio {ours / owns:5.2f}"
                print(f"{architecture:12} T {tokens:2} {ratio}  {done} ({cls})", flush=True)


# Query heads, key heads, tokens, keys, width.
ATTENTIONS = ((32, 4, 1, 4096, 128), (32, 4, 512, 512, 128), (32, 4, 128, 2048, 128))


@torch.inference_mode()
def compare_attention(dtype: torch.dtype, seconds: float) -> None:
    for heads, key_heads, tokens, keys, width in ATTENTIONS:
        q = torch.randn(1, heads, tokens, width).to(dtype)
        k, v = (torch.randn(1, key_heads, keys, width).to(dtype) for _ in range(2))
        mask, scale = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens), width**-0.5
        calls = {
            "ours": lambda q=q, k=k, v=v, scale=scale: torch.ops.moe_mps.cached_attention(
                q, k, v, scale=scale
            ),
            "torch": lambda q=q, k=k, v=v, mask=mask, scale=scale: (
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
                ).transpose(1, 2)
            ),
        }
        difference = (calls["ours"]().float() - calls["torch"]().float()).abs().max()
        if not difference <= TOLERANCE[dtype]:
            raise SystemExit(f"the result differs from torch's by {difference:.2e} in {dtype}")
        times = measure(calls, seconds, least=5)
        print(
            f"{heads} heads, {key_heads} of keys, T {tokens}, S {keys}, {str(dtype).removeprefix('torch.')}: "
            f"ours {times['ours']:.2f} ms, torch {times['torch']:.2f} ms, "
            f"ratio {times['ours'] / times['torch']:.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=10.0, help="per row")
    parser.add_argument("--modules", nargs="+", metavar="ARCHITECTURE", help="compare modules instead")
    parser.add_argument("--attention", action="store_true", help="compare attention instead")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.attention:
        for name in options.dtype:
            compare_attention(DTYPES[name], options.seconds)
        return
    if options.modules is not None:
        with all_operators():
            for architecture in options.modules:
                compare_modules(architecture)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; median milliseconds")
    columns = ("ours", *PEERS)
    print(
        f"{'E, H, I, K':>20} {'dtype':>9} {'T':>4}"
        + "".join(f"{name:>12}" for name in columns)
        + "  ours/best"
    )
    worst = 0.0
    for shape in SHAPES:
        for dtype in (DTYPES[name] for name in options.dtype):
            module = build(*shape, dtype)
            for count in options.tokens:
                x = torch.randn(count, shape[1]).to(dtype)
                weights, ids = torch.randn(count, shape[0]).softmax(-1).topk(shape[3])
                weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
                with torch.inference_mode():
                    calls = candidates(module, x, ids, weights)
                    check(calls, dtype)
                    result = measure(calls, options.seconds, least=5)
                ratio = result["ours"] / min(result[name] for name in PEERS if name in result)
                worst = max(worst, ratio)
                cells = "".join(
                    f"{result[name]:12.2f}" if name in result else f"{'-':>12}" for name in columns
                )
                shown = str(dtype).removeprefix("torch.")
                print(
                    f"{', '.join(map(str, shape)):>20} {shown:>9} {count:>4}{cells}  {ratio:9.2f}", flush=True
                )
    print(f"worst ratio to the best of the three: {worst:.2f}")


if __name__ == "__main__":
    main()
