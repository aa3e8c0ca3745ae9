"""`torch-moe-mps check --first`: what a Mac that has never run this package can say in two minutes.

It compiles and compares only what a prompt and a token of Qwen3-30B-A3B run in bfloat16 and affine4_64, by a
tiny model with the same kinds of layers, which then decodes tokens with capture and without. The last line of
its output is for an issue or a chat.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._faults import synchronize
from .._progress import Progress
from ..ops._formats import Format
from ..selfcheck.calls import Subject, subjects
from ..selfcheck.compare import LARGEST, TOLERANCE, Finding
from ..selfcheck.libraries import compile_side_by_side

FORMAT, DTYPE = Format.named("affine4_64"), torch.bfloat16
TOKENS = 16
_PROMPT = 24  # tokens: more than the kernels of a few take
_TIMED = 8  # the last tokens, which nothing is compiled or captured for
_HEAD = 128
# Kinds of layers of Qwen3-30B-A3B: its heads, its experts and their number for a token, small otherwise.
_SIZES = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": _HEAD},
    **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "eos_token_id": None},
}

Compare = Callable[[list[Subject], list[Finding]], None]


def check_first(report: dict[str, Any], findings: list[Finding], compare_all: Compare) -> None:
    """Compiles, compares, and decodes 16 tokens twice. Adds its failures to `findings`.

    Args:
        compare_all: compares subjects with the CPU, and adds findings. It may raise an error that ends all.
    """
    from ..models.programs import captures_of
    from ..transformers import accelerate, restore
    from ..transformers.compiling import libraries_of
    from ..transformers.self_check import passes

    started, first = time.perf_counter(), report.setdefault("first", {})
    model = _model()
    done = accelerate(
        model, **FORMAT.to_dict(), linear_bits=FORMAT.bits, embedding_bits=FORMAT.bits, check=False
    )
    expected, tokens, _ = decode(model)
    model.to("mps")
    operators = done.operators() | {operator for operator in passes().values() if operator is not None}
    names = [name for name in libraries_of(model, done.operators()) if "variants" not in name]
    with Progress("Compiling", len(names), "library") as bar:
        findings += compile_side_by_side(names, lambda name: bar.update())
    first |= {"libraries": len(names), "seconds_compiling": round(time.perf_counter() - started, 1)}
    if findings:
        return  # without them no model runs
    work = subjects(
        operators, [DTYPE], [FORMAT], {operator: [(_HEAD, _HEAD)] for operator in operators}, [()]
    )
    compare_all(work, findings)
    first["operators"] = len(work)
    first["largest_error"] = max(LARGEST.items(), key=lambda item: item[1], default=("none", 0.0))
    for name, capture in (("module by module", False), ("captured", True)):
        accelerate(restore(model), check=False, capture=capture)
        logits, _, rate = decode(model, tokens)
        first[name] = round(rate, 1)
        error = largest_error(logits, expected)
        if not error <= 2 * TOLERANCE[DTYPE]:
            findings.append(Finding(f"a tiny model, {name},", "differs", error=error))
        captures = captures_of(model)
        if capture and (captures is None or captures.reason is not None):
            findings.append(Finding("a token", "was not captured", message=str(captures)))
    first["seconds"] = round(time.perf_counter() - started, 1)


def _model() -> Any:
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SIZES))
    return model.to(DTYPE).eval()


@torch.no_grad()
def decode(model: Any, tokens: list[int] | None = None) -> tuple[list[Tensor], list[int], float]:
    """The logits of a prompt and of TOKENS tokens after it, the tokens, and tokens/s of the last ones.

    Args:
        tokens: to feed; the likeliest ones unless given.
    """
    from ..models.programs import cache_argument, empty_cache

    device, cache = model.device, empty_cache(model)
    ids, fed, logits = torch.arange(1, 1 + _PROMPT, device=device)[None], list[int](), list[Tensor]()
    begun = 0.0
    for step in range(TOKENS + 1):
        if step == TOKENS + 1 - _TIMED:
            synchronize(device)
            begun = time.perf_counter()
        found = model(ids, **cache_argument(model, cache), use_cache=True).logits[0, -1]
        logits.append(found)
        token = int(found.argmax()) if tokens is None else tokens[step]
        fed.append(token)
        ids = torch.tensor([[token]], device=device)
    synchronize(device)
    rate = _TIMED / (time.perf_counter() - begun)
    return [each.float().cpu() for each in logits], fed, rate


def largest_error(logits: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest difference of logits over all steps, relative to the length of the expected ones."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(logits, expected, strict=True))


def line(about: dict[str, str], report: dict[str, Any], findings: list[Finding]) -> str:
    """The line to paste: the machine and its results so far."""
    first = report.get("first", {})
    parts = [
        f"check --first of torch_moe_mps {about['torch_moe_mps']}",
        "all right" if not findings else f"{len(findings)} failures, first: {findings[0]}",
        f"{about['gpu']}, macOS {about['macos'] or 'none'}, torch {about['torch']}",
    ]
    if "libraries" in first:
        parts.append(f"{first['libraries']} libraries in {first['seconds_compiling']} s")
    if "largest_error" in first:
        name, error = first["largest_error"]
        parts.append(f"{first['operators']} operators, largest error {error:.1e} ({name})")
    if "captured" in first:
        parts.append(f"{first['captured']} tokens/s captured, {first['module by module']} module by module")
    if "seconds" in first:
        parts.append(f"{first['seconds']:.0f} s")
    return " | ".join(parts)
