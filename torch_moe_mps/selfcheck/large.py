"""Calls of the sizes of real models, which `torch-moe-mps check --large` compares.

The plain calls are small, because the references on the CPU are slow: kernels see few rows, few keys and
offsets of few bits there. These take a Mac one to two minutes, and less than MEMORY.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..ops._formats import Format
from ..ops._sample import Sample
from .calls import Call

MEMORY = 3e9  # bytes
CHUNK = 512  # tokens of a prompt's second chunk
# Keys in front of them, and how many of 32 heads' scores the reference holds: it has five copies.
CONTEXT, LONG_CONTEXT = 4096, 32768
SCORES = 32 * CHUNK * CONTEXT


class Model(NamedTuple):
    """Sizes of a model. `experts` is 1 where it has none; `window` is in keys, of half of the layers."""

    name: str
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    key_heads: int
    width: int
    experts: int = 1
    top_k: int = 1
    window: int | None = None
    has_sinks: bool = False


MODELS = (
    Model("Qwen3-30B-A3B", 2048, 768, 151936, 32, 4, 128, experts=128, top_k=8),
    Model("Llama-3.1-8B", 4096, 14336, 128256, 32, 8, 128),
    Model("gpt-oss-20b", 2880, 2880, 201088, 64, 8, 64, experts=32, top_k=4, window=128, has_sinks=True),
)


def calls(dtype: torch.dtype, format: Format, smaller: int = 1) -> Iterator[tuple[str, Call]]:
    """(description, call); `smaller` divides the rows, tokens and keys."""
    for model in MODELS:
        for what, operator, arguments in _of(model, Sample("cpu", dtype, format, seed=4), smaller):
            has_format = "format" in arguments
            yield f"{model.name}, {what}", Call(operator, dtype, arguments, str(format) if has_format else "")


def _of(model: Model, s: Sample, smaller: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(label, operator, arguments) of calls with the sizes of a model, divided by `smaller`."""
    hidden = -(-model.hidden // smaller // s.format.multiple) * s.format.multiple
    inner = -(-model.intermediate // smaller // s.format.multiple) * s.format.multiple
    chunk, rows = CHUNK // smaller, model.vocabulary // smaller

    def values(*shape: int) -> torch.Tensor:
        return s.values(*shape) * hidden**-0.5

    head = {**s.quantized("", rows, hidden, ()), "bias": None, "format": s.format.name}
    for tokens in (1, 3):
        yield f"output head, {_tokens(tokens)}", "linear_quantized", {"x": values(tokens, hidden), **head}
    del head
    stack = () if model.experts == 1 else (model.experts,)
    weights = s.quantized("gate_up_", 2 * inner, hidden, stack) | s.quantized("down_", hidden, inner, stack)
    for tokens in (1, chunk):
        mlp = {"x": values(tokens, hidden), **weights, "format": s.format.name}
        if not stack:
            yield f"MLP, {_tokens(tokens)}", "_mlp_quantized", mlp
            continue
        logits = s.values(tokens, model.experts)
        chosen = logits.float().topk(model.top_k)
        routed = {"topk_weights": chosen.values.softmax(-1), "topk_ids": chosen.indices.int()}
        yield f"experts, {_tokens(tokens)}", "_moe_experts_quantized", mlp | routed
        router = {"logits": logits, "top_k": model.top_k, "norm_topk_prob": True, "scoring": "softmax"}
        yield f"router, {_tokens(tokens)}", "moe_router", router
    del weights, mlp
    normed = {"x": s.values(chunk, model.hidden), "norm_weight": s.values(model.hidden), "norm_eps": 1e-6}
    yield f"norm, {_tokens(chunk)}", "rms_norm", normed
    for before in (CONTEXT, LONG_CONTEXT):
        for tokens in (1, max(2, SCORES // (before * model.heads * smaller))):
            yield from _attended(model, s, before // smaller, tokens)


def _attended(model: Model, s: Sample, before: int, tokens: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The last tokens of a prompt, `before` already in the cache."""
    cache = f"[1, {model.key_heads}, {before + tokens}, {model.width}]"
    heads = s.of(f"q[1, {model.heads}, {tokens}, {model.width}] k{cache} v{cache}")
    heads["sinks"] = s.values(model.heads) if model.has_sinks else None
    for window in dict.fromkeys((None, model.window)):
        where = f"{before + tokens} keys" if window is None else f"{window} of {before + tokens} keys"
        called = {**heads, "scale": model.width**-0.5, "window": window}
        yield f"attention of {_tokens(tokens)} to {where}", "cached_attention", called


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
