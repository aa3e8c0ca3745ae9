"""What each kernel of the package costs on Apple GPUs, by the model: a change of cost shows in review.

The texts are of bfloat16, in tests/pinned/costs.txt (support/pinned.py).
"""

import functools
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from measured.apple import cases
from simulator import apple
from simulator.build import compile_shader
from simulator.shaderlib import kernels_of
from simulator.testing import linux_only
from support.ops.tiles import TILE, words_of
from support.oracles_experts import SEARCHED, numbers_of
from support.pinned import assert_pinned, pinned
from support.quantized_layers import GGUF_FORMATS, OTHERS, place, random_quantized
from support.sweep import in_sweep

from torch_moe_mps._extension import setting
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops._formats import FORMATS as FORMATS_BY_NAME
from torch_moe_mps.selfcheck.libraries import PARTS

pytestmark = linux_only
M1, M3 = apple.GPUS["M1"], apple.GPUS["M3"]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
HIDDEN, INTERMEDIATE = 512, 256

LIMIT = apple.Limit(groups=32, slots=5e6)  # a sample of large dispatches
UNDECLARED_THREADS = 384  # what Apple's compiler may go down to where a kernel declares no bound

Call = tuple[str, Callable[[], object], dict[torch.Tensor, apple.Work], int]  # label, call, work, elements


def on_device(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to("mps")


def ids_of(tokens: int, slots: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    chosen = [torch.randperm(experts, generator=generator)[:slots] for _ in range(tokens)]
    return torch.stack(chosen).int().to("mps")


# Calls: each kernel of a library is dispatched by one of them ------------------------------------------


def norms(dtype: torch.dtype) -> Iterator[Call]:
    x, y, weight = (on_device(*shape, dtype=dtype) for shape in ((8, 2048), (8, 2048), (2048,)))
    ops = torch.ops.moe_mps
    yield "rms_norm", lambda: ops.rms_norm(x, weight, norm_eps=1e-6), {}, x.numel()
    yield "layer_norm", lambda: ops.layer_norm(x, weight, weight, norm_eps=1e-6), {}, x.numel()
    yield "rms_norm_gated", lambda: ops.rms_norm_gated(x, y, weight, norm_eps=1e-6), {}, x.numel()
    yield "fused_norm_add", lambda: ops.fused_norm_add(x, y, weight, norm_eps=1e-6), {}, x.numel()
    yield "fused_residual_norm", lambda: ops.fused_residual_norm(x, y, weight, norm_eps=1e-6), {}, x.numel()
    shifted = functools.partial(ops.fused_residual_layer_norm, x, y, weight, weight, norm_eps=1e-6)
    yield "fused_residual_layer_norm", shifted, {}, x.numel()


def rope(dtype: torch.dtype) -> Iterator[Call]:
    q, k = on_device(1, 8, 16, 128, dtype=dtype), on_device(1, 8, 4, 128, dtype=dtype)
    table, weight = on_device(1, 8, 128, dtype=dtype), on_device(128, dtype=dtype)
    elements = q.numel() + k.numel()
    for label, weights in (("rope", ()), ("rope with QK-norm", (weight, weight))):
        yield label, functools.partial(torch.ops.moe_mps.rope, q, k, table, table, *weights), {}, elements
    keys = k[:, :, :1], None, on_device(1, 1, 20, 128, dtype=dtype), None, table, table
    norm = {"k_norm_weight": weight, "k_bias": weight}
    yield (
        "_rope_cache_",
        functools.partial(torch.ops.moe_mps._rope_cache_, q, *keys, **norm),
        {},
        elements - 24 * 128,
    )


# Heads, heads of keys, tokens, keys, width of keys and of values, bits
DENSE_DECODE = [
    (8, 1, 1, 1024, 64, 64, 16),
    (8, 1, 1, 1024, 128, 128, 16),
    (4, 1, 1, 1024, 256, 256, 16),
    (16, 1, 1, 1024, 512, 512, 16),
    (2, 2, 1, 1024, 192, 128, 16),
    (16, 1, 1, 1024, 576, 512, 16),
]
DECODE_IN_8_BITS = [
    (8, 1, 1, 1024, 64, 64, 8),
    (8, 1, 1, 1024, 128, 128, 8),
    (4, 1, 1, 1024, 256, 256, 8),
    (2, 2, 1, 1024, 192, 128, 8),
]


def attention_of(dtype, heads, key_heads, tokens, keys, width, value_width, bits) -> Call:
    q, groups = on_device(1, heads, tokens, width, dtype=dtype), {}
    k, v = (on_device(1, key_heads, keys, w, dtype=dtype) for w in (width, value_width))
    macs = heads * tokens * keys * (width + value_width)
    if bits == 8:
        k, v = (
            torch.zeros(1, key_heads, keys, w // 4, dtype=torch.int32).to("mps") for w in (width, value_width)
        )
        for name, w in (("k", width), ("v", value_width)):
            groups |= {
                f"{name}_{part}": on_device(1, key_heads, keys, w // 64, dtype=dtype)
                for part in ("scales", "zeros")
            }
    call = functools.partial(torch.ops.moe_mps.cached_attention, q, k, v, scale=0.1, **groups)
    label = f"attention of {heads} heads on {key_heads}, {tokens} tokens, {keys} keys of {width}, {bits} bits"
    return label, call, {k: apple.Work("attention", macs)}, q.numel()


def attention(dtype: torch.dtype) -> Iterator[Call]:
    for shape in (
        *DENSE_DECODE,
        *DECODE_IN_8_BITS,
        (8, 1, 8, 64, 64, 64, 16),
        (8, 1, 8, 64, 128, 128, 16),
        (8, 1, 8, 64, 256, 256, 16),
    ):
        yield attention_of(dtype, *shape)
    yield from cache(dtype)


def selected(dtype: torch.dtype) -> Iterator[Call]:
    for shape in ((16, 1, 1, 256, 576, 512, 16), (16, 1, 1, 256, 128, 128, 16), (8, 1, 1, 256, 128, 128, 8)):
        label, call, work, elements = attention_of(dtype, *shape)
        indices = torch.arange(256, dtype=torch.int32).view(1, 1, 1, 256).to("mps")
        yield f"selected, {label}", functools.partial(call, indices=indices), work, elements


def tailed(dtype: torch.dtype) -> Iterator[Call]:
    """Over a window of 128 keys and as many of a tail."""
    label, call, work, elements = attention_of(dtype, 16, 1, 1, 128, 512, 512, 16)
    q, k, v = call.args
    call = functools.partial(torch.ops.moe_mps._cached_attention, q, k, v, scale=call.keywords["scale"])
    options = {"k_tail": k.clone(), "v_tail": v.clone(), "tail_rate": 4, "position": 600}
    work = {key: apple.Work("attention", 2 * each.macs) for key, each in work.items()}
    yield f"_cached_attention, tailed, {label}", functools.partial(call, **options), work, elements


def cache(dtype: torch.dtype) -> Iterator[Call]:
    for width in (64, 128):
        states = on_device(1, 8, 4, width, dtype=dtype)
        packed = torch.zeros(1, 8, 16, width // 4, dtype=torch.int32).to("mps")
        groups = [on_device(1, 8, 16, 1, dtype=dtype) for _ in range(2)]
        call = functools.partial(torch.ops.moe_mps._write_cache_quantized_, states, packed, *groups, 5)
        yield f"_write_cache_quantized_ of {width}", call, {}, states.numel()


# Heads, heads of keys, tokens, keys, width of keys and of values, bits of keys and of values
DECODE_IN_TILES = [
    (8, 1, 1, 1024, 64, 64, 4, 4),
    (8, 1, 1, 1024, 128, 128, 4, 4),
    (8, 1, 1, 1024, 128, 128, 4, 2),
    (4, 1, 1, 1024, 256, 256, 4, 4),
    (16, 1, 1, 1024, 576, 512, 4, 4),
]


def tiled_of(dtype, heads, key_heads, tokens, keys, width, value_width, k_bits, v_bits) -> Call:
    """Keys of whole tiles, of which the first and the last are dense."""
    q, groups = on_device(1, heads, tokens, width, dtype=dtype), {"k_bits": k_bits, "v_bits": v_bits}
    for name, w, bits, factors in (("k", width, k_bits, False), ("v", value_width, v_bits, True)):
        groups[f"{name}_dense"] = on_device(1, key_heads, 2 * TILE, w, dtype=dtype)
        words = words_of(w, bits, dtype, factors)
        groups[f"{name}_tiles"] = torch.zeros(1, key_heads, keys // TILE, words, dtype=torch.int32).to("mps")
    call = functools.partial(
        torch.ops.moe_mps._tiled_attention, q, **groups, position=keys - tokens, scale=0.1
    )
    label = f"tiled attention of {heads} heads on {key_heads}, {tokens} tokens, {keys} keys of {width}"
    work = apple.Work("attention", heads * tokens * keys * (width + value_width))
    return f"{label}, {k_bits} and {v_bits} bits", call, {groups["k_tiles"]: work}, q.numel()


def tiled(dtype: torch.dtype) -> Iterator[Call]:
    for shape in (
        *DECODE_IN_TILES,
        (8, 1, 8, 512, 64, 64, 4, 4),
        (8, 1, 8, 512, 128, 128, 4, 4),
        (8, 1, 8, 512, 128, 128, 4, 2),
        (8, 1, 8, 512, 256, 256, 4, 4),
    ):
        yield tiled_of(dtype, *shape)
    for bits, factors in ((4, False), (2, True)):
        states = on_device(1, 2, TILE, 128, dtype=dtype)
        tiles = torch.zeros(1, 2, 2, words_of(128, bits, dtype, factors), dtype=torch.int32).to("mps")
        call = functools.partial(torch.ops.moe_mps._seal_tiles_, states, tiles, 1, bits=bits, factors=factors)
        yield f"_seal_tiles_ of {bits} bits", call, {}, states.numel()


def index(dtype: torch.dtype) -> Iterator[Call]:
    q, k = on_device(1, 1, 32, 128, dtype=dtype), on_device(1, 512, 128, dtype=dtype)
    call = functools.partial(torch.ops.moe_mps._index_topk, q, k, on_device(1, 1, 32), 64, 0.1)
    yield "index_topk", call, {k: apple.Work("scores", 512 * 32 * 128)}, 512
    q, k = on_device(1, 1, 4, 128, dtype=dtype), on_device(1, 2048, 128, dtype=dtype)
    call = functools.partial(torch.ops.moe_mps._index_topk, q, k, None, 4, 0.1, reduce="keys", block=128)
    yield "index_topk of blocks", call, {k: apple.Work("scores", 2048 * 4 * 128)}, 16


def sampling(dtype: torch.dtype) -> Iterator[Call]:
    """A token of a vocabulary as large as Qwen3's; the same where nothing limits what is drawn from."""
    torch.manual_seed(0)
    logits, draws = 3 * on_device(1, 151_936, dtype=dtype), on_device(1, 151_936).abs()
    both = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    for label, how in {"top-k and top-p": both, "top-p": {"top_p": 0.9}, "all": {}}.items():
        call = functools.partial(torch.ops.moe_mps._sample_with_flags, logits, draws, **how)
        yield f"_sample_with_flags of {label}", call, {}, logits.numel()


def adapters(dtype: torch.dtype) -> Iterator[Call]:
    ops, experts, slots, hidden, rows, rank = torch.ops.moe_mps, 32, 4, 512, 384, 4
    one = on_device(1, rows, dtype=dtype), on_device(1, hidden, dtype=dtype)
    linear = on_device(16, hidden), on_device(rows, 16)
    yield (
        "linear_lora of rank 16",
        functools.partial(ops.linear_lora, *one, *linear),
        {},
        16 * (hidden + rows),
    )
    for tokens in (1, 128):
        ids = ids_of(tokens, slots, experts)
        around = on_device(tokens, slots, rows, dtype=dtype), on_device(tokens, hidden, dtype=dtype)
        factors = on_device(rank * experts, hidden), on_device(rows, rank * experts)
        pairs = ops.moe_bucket(ids, num_experts=experts)
        work = tokens * slots * rank * (hidden + rows)
        listed = dict(zip(("pair_order", "offsets"), pairs, strict=True)) if tokens > 1 else {}
        call = functools.partial(ops.expert_lora, *around, ids, *factors, num_experts=experts, **listed)
        yield f"expert_lora of {tokens} tokens", call, {}, work
    call = functools.partial(ops._expert_lora_backward, *around, ids, *factors, *pairs, experts)
    yield "expert_lora_backward of 128 tokens", call, {}, 3 * work


def pooling(dtype: torch.dtype) -> Iterator[Call]:
    """A token that completes a window of DeepSeek-V4: of overlapping ones, of few channels, of 128 tokens."""
    for width, rate, overlap in ((512, 4, 2), (128, 4, 2), (512, 128, 1)):
        columns = overlap * width
        kv, gate = (on_device(1, 1, columns, dtype=dtype) for _ in range(2))
        bias, state = on_device(rate, columns), on_device(1, rate * overlap, 2, columns, dtype=dtype)
        entries, rest = on_device(1, 16, width, dtype=dtype), (on_device(width), on_device(32))
        arguments = kv, gate, bias, state, entries, 4 * rate - 1, *rest
        call = functools.partial(torch.ops.moe_mps._pool_window_, *arguments)
        yield f"_pool_window_ of {rate} tokens of {columns}", call, {}, rate * columns


def quantising(dtype: torch.dtype) -> Iterator[Call]:
    weight, importance = on_device(1, 8, 1024, dtype=dtype), on_device(1, 1024).square()
    for name in ("affine4_64", "affine8_32"):
        call = functools.partial(torch.ops.moe_mps._quantize_by_importance, weight, importance, name)
        yield f"_quantize_by_importance to {name}", call, {}, weight.numel()


def causal_conv1d(dtype: torch.dtype) -> Iterator[Call]:
    state = on_device(1, 8192, 4, dtype=dtype)
    for tokens in (1, 16):
        x = on_device(1, tokens, 8192, dtype=dtype)
        call = functools.partial(
            torch.ops.moe_mps.causal_conv1d_update_, x, state, on_device(8192, 4, dtype=dtype)
        )
        yield f"causal_conv1d_update_ of {tokens}", call, {}, x.numel()


def gated_delta_rule(dtype: torch.dtype) -> Iterator[Call]:
    """An element is one of the state, for one token."""
    run, state, per_head = torch.ops.moe_mps._gated_delta_rule_, on_device(1, 2, 128, 128), on_device(2)
    norm = {"gate_activation": "sigmoid", "norm_weight": on_device(128, dtype=dtype)}
    rule = {"l2norm_eps": 1e-6, "A_log": per_head, "decay_form": "softplus", "beta_activation": "sigmoid"}
    mamba = {"A_log": per_head, "decay_form": "times_beta", "beta_activation": "softplus"}
    for tokens in (1, 48):
        q, v, beta = (on_device(1, tokens, *shape, dtype=dtype) for shape in ((1, 128), (2, 128), (2,)))
        g = on_device(1, tokens, 2, 128, dtype=dtype)
        for name, decay, options in (
            ("the delta rule", beta, rule),
            ("the delta rule with its norm", beta, rule | norm | {"gate": v}),
            ("a decay a channel", g, rule),
            ("Mamba-2", None, mamba),
        ):
            options = {"beta": beta} | options
            call = functools.partial(run, q, q, v, decay, state, scale=0.1, **options)
            yield f"_gated_delta_rule_ of {tokens}, {name}", call, {}, state.numel() * tokens


def selective_scan(dtype: torch.dtype) -> Iterator[Call]:
    """An element is one of the state, for one token."""
    state, a_log = on_device(1, 256, 16), on_device(256, 16)
    for tokens in (1, 48):
        x, b = on_device(1, tokens, 256, dtype=dtype), on_device(1, tokens, 16, dtype=dtype)
        call = functools.partial(torch.ops.moe_mps.selective_scan_, x, x, b, b, state, a_log, gate=x)
        yield f"selective_scan_ of {tokens}", call, {}, state.numel() * tokens


def hyper_connection(dtype: torch.dtype) -> Iterator[Call]:
    fn, base, scale = on_device(24, 4 * 2048), on_device(24), on_device(3)
    for tokens in (1, 16):
        streams, out = on_device(tokens, 4, 2048, dtype=dtype), on_device(tokens, 2048, dtype=dtype)
        given = {"block_out": out, "post": on_device(tokens, 4), "comb": on_device(tokens, 4, 4)}
        call = functools.partial(torch.ops.moe_mps._hyper_connection, streams, fn, base, scale, **given)
        work = {fn: apple.Work("products", tokens * fn.numel())}
        yield f"hyper_connection of {tokens}", call, work, out.numel()
    call = functools.partial(torch.ops.moe_mps._hyper_update, streams, *given.values())
    yield "_hyper_update", call, {}, streams.numel()


def pointwise(dtype: torch.dtype) -> Iterator[Call]:
    x, gate = on_device(8, 2048, dtype=dtype), on_device(2048, dtype=dtype)
    formula = "sigmoid b bf16; mul a %0 bf16"
    yield (
        "pointwise",
        functools.partial(torch.ops.moe_mps._pointwise, x, formula, dtype_name(dtype), gate),
        {},
        x.numel(),
    )


def turned(dtype: torch.dtype) -> Iterator[Call]:
    """One token whose queries and keys are normed and turned."""
    for heads, key_heads, width in ((32, 4, 128), (64, 8, 64), (96, 8, 128)):
        for keys in (200, 1024):
            q, k, v = (on_device(1, 1, n, width, dtype=dtype) for n in (heads, key_heads, key_heads))
            held = [on_device(1, key_heads, keys, width, dtype=dtype) for _ in range(2)]
            cos, sin, norm = (on_device(*s, dtype=dtype) for s in ((1, 1, width), (1, 1, width), (width,)))
            operator = torch.ops.moe_mps._rope_attention_
            call = functools.partial(operator, q, k, v, *held, cos, sin, width**-0.5, norm, norm)
            work = {held[0]: apple.Work("attention", 2 * heads * keys * width)}
            yield f"{heads} / {key_heads} heads of {width}, {keys} keys", call, work, 0


def combine(dtype: torch.dtype) -> Iterator[Call]:
    slots, weights = on_device(8, 4, 2048, dtype=dtype), on_device(8, 4, dtype=dtype)
    x, norm = on_device(8, 2048, dtype=dtype), on_device(2048, dtype=dtype)
    ops, n = torch.ops.moe_mps, slots.numel()
    yield "silu_mul_stacked", lambda: ops.silu_mul_stacked(slots, slots), {}, n
    yield "weighted_sum_stacked", lambda: ops.weighted_sum_stacked(slots, weights), {}, n
    call = lambda: ops.weighted_sum_residual_norm_stacked_(x, slots, weights, norm, norm_eps=1e-6)  # noqa: E731
    yield "weighted_sum_residual_norm_stacked_", call, {}, n


def routing(dtype: torch.dtype) -> Iterator[Call]:
    ops = torch.ops.moe_mps
    for experts in (64, 128, 256, 512, 1024):
        logits = on_device(8, experts, dtype=dtype)
        label = f"moe_router_topk_softmax of {experts}"
        call = functools.partial(ops.moe_router_topk_softmax, logits, 4, norm_topk_prob=True)
        yield label, call, {}, logits.numel()
    router, norm, scale = (on_device(*shape, dtype=dtype) for shape in ((64, HIDDEN), (HIDDEN,), (64,)))
    for tokens in (1, 32):
        hidden = on_device(tokens, HIDDEN, dtype=dtype)
        work = {router: apple.Work("router", tokens * router.numel())}
        call = functools.partial(ops.router_logits, hidden, router)
        yield f"router_logits of {tokens}", call, work, 0
        call = functools.partial(ops.router_logits, hidden, router, norm_weight=norm)
        yield f"router_logits of {tokens}, normed", call, work, 0
    for tokens in (1, 65, 1024):
        hidden = on_device(tokens, HIDDEN, dtype=dtype)
        work = {router: apple.Work("router", tokens * router.numel())}
        options = {"norm_eps": 1e-6, "renormalize_after_scale": True}
        call = functools.partial(ops.moe_gate, hidden, router, norm, scale, 4, **options)
        yield f"moe_gate of {tokens}", call, work, 0
    for kind in (torch.int32, torch.int64):
        ids = ids_of(64, 4, 32).to(kind)
        yield f"moe_bucket {kind}", functools.partial(ops.moe_bucket, ids, num_experts=32), {}, ids.numel()
        call = functools.partial(
            ops.moe_compute_ids_tpe, ids, num_experts=32, gate_up_rows=128, down_rows=128
        )
        yield f"moe_compute_ids_tpe {kind}", call, {}, ids.numel()


def layer(label: str, tokens: int, experts: int, slots: int, dtype, matrices, **options) -> Call:
    """One call of an operator for experts; `matrices` gives a stack's tensors from rows and inputs."""
    gate_up, down = matrices(experts, 2 * INTERMEDIATE, HIDDEN), matrices(experts, HIDDEN, INTERMEDIATE)
    x, weights, ids = (
        on_device(tokens, HIDDEN, dtype=dtype),
        on_device(tokens, slots),
        ids_of(tokens, slots, experts),
    )
    if "logits" in options:
        weights = ids = None
    pairs = tokens * slots
    work = {
        gate_up[0]: apple.Work("gate+up", pairs * 2 * INTERMEDIATE * HIDDEN),
        down[0]: apple.Work("down", pairs * HIDDEN * INTERMEDIATE),
    }
    name = "_moe_experts_quantized" if "format" in options else "_moe_experts"
    operator = getattr(torch.ops.moe_mps, name)
    call = functools.partial(operator, x, weights, ids, *gate_up, *down, **options)
    return f"{label}, {tokens} tokens, {slots} of {experts}", call, work, tokens * HIDDEN


def rows_first(dtype: torch.dtype, experts: int, rows: int, inputs: int) -> tuple:
    return (on_device(experts, rows, inputs, dtype=dtype),)


def dense(dtype: torch.dtype) -> Iterator[Call]:
    matrices = functools.partial(rows_first, dtype)
    for tokens in (1, 8, 64, 256):
        yield layer("dense", tokens, 32, 4, dtype, matrices)
    norm = on_device(HIDDEN, dtype=dtype)
    yield layer("dense, normed", 1, 32, 4, dtype, matrices, norm_weight=norm)
    yield from of_heads(dtype, torch.ops.moe_mps._heads_mm, matrices(4, 192, 512))


def of_heads(dtype: torch.dtype, operator: Callable, matrices: tuple, *format_) -> Iterator[Call]:
    """Queries of latents and values of them, for matrices of 4 heads, [4, 192, 512]."""
    for tokens in (1, 2):
        work = {matrices[0]: apple.Work("heads", tokens * 4 * 192 * 512)}
        for label, width in (("queries of latents", 192), ("values of latents", 512)):
            into = width == 192
            x = on_device(1, tokens, 4, width, dtype=dtype if into else torch.float32)
            options = {"dtype": dtype_name(dtype)} if format_ and not into else {}
            call = functools.partial(operator, x, *matrices, *format_, transposed=into, **options)
            yield f"{label}, {tokens} tokens", call, work, x.numel()


def quantised(dtype: torch.dtype, name: str) -> Iterator[Call]:
    bits, group, mode = numbers_of(name)

    def stack(experts: int, rows: int, inputs: int) -> tuple:
        if name in (*OTHERS, *GGUF_FORMATS):
            return tuple(place(random_quantized(experts, rows, inputs, name, dtype, 0), "mps"))
        words = torch.randint(-(2**31), 2**31, (experts, rows, inputs * bits // 32), dtype=torch.int64)
        shape = (experts, rows, inputs // group)
        if mode != "affine":
            return words.int().to("mps"), torch.full(shape, 120, dtype=torch.uint8).to("mps"), None
        return words.int().to("mps"), on_device(*shape, dtype=dtype), on_device(*shape, dtype=dtype)

    for tokens, experts, slots in ((1, 32, 4), (3, 4, 2), (8, 32, 4), (64, 32, 4), (256, 32, 4)):
        yield layer(name, tokens, experts, slots, dtype, stack, format=name)
    norm = on_device(HIDDEN, dtype=dtype)
    yield layer(f"{name}, normed", 1, 32, 4, dtype, stack, format=name, norm_weight=norm)
    routed = {"norm_weight": norm, "logits": on_device(1, 32, dtype=dtype), "top_k": 4}
    yield layer(f"{name}, normed, chosen", 1, 32, 4, dtype, stack, format=name, **routed)
    yield from of_heads(dtype, torch.ops.moe_mps._heads_quantized, stack(4, 192, 512), name)


def variants(dtype: torch.dtype) -> Iterator[Call]:
    """Of the calls of a format, with the kernels that the tuner may take, those that have some."""
    with setting("_take_variants", True, False):
        for call in quantised(dtype, "affine4_64"):
            if re.search(r", (1|256) tokens, . of", call[0]):
                yield call


WIDTHS = (64, 128, 256, 512)
OTHER_ROUTERS = ("routing_logits_{}", "bucket_i32", "bucket_i64")


def of_widths(name: str, caches: tuple[str, ...] = ("", "affine8_"), widths=WIDTHS) -> list[str]:
    return [f"{name}_{width}_{cache}{{}}" for cache in caches for width in widths]


def of_format(name: str) -> list[str]:
    return [f"quantized_{part}{name}_{{}}" for part in PARTS]


# Calls, and the libraries whose kernels they dispatch; {} is a dtype.
GROUPS = {
    "norms": (norms, [f"norms_{part}{{}}" for part in ("", "residual_", "gated_", "layer_")]),
    "rope": (rope, ["rope_{}", "rope_centred_{}"]),
    "attention": (attention, [*of_widths("attention"), "attention_merge_{}", "write_cache_{}"]),
    "selected": (selected, of_widths("attention_selected")),
    "tailed": (tailed, of_widths("attention_tailed", ("",), (512,))),
    "turned": (turned, of_widths("attention_turned", ("",))),
    "tiles": (
        tiled,
        ["tiles_seal_{}", *of_widths("tiles", ("k4v4_", "k4v2_"))],
    ),
    "index": (index, ["index_{}"]),
    "pooling": (pooling, ["pooling_{}"]),
    "sampling": (sampling, ["sampling_{}"]),
    "quantize": (quantising, ["quantize_{}"]),
    "causal_conv1d": (causal_conv1d, ["causal_conv1d_{}"]),
    "gated_delta_rule": (gated_delta_rule, ["gated_delta_rule_{}"]),
    "selective_scan": (selective_scan, ["selective_scan_{}"]),
    "hyper_connection": (hyper_connection, ["hyper_connection_{}"]),
    "combine": (combine, ["combine_{}"]),
    "pointwise": (pointwise, ["pointwise_{}"]),
    "routing": (routing, [*(f"routing_{width}_{{}}" for width in (2, 4, 8, 16, 32)), *OTHER_ROUTERS]),
    "lora": (adapters, ["lora_{}"]),
    "dense": (dense, ["experts_{}"]),
    "int4": (functools.partial(quantised, name="affine4_64"), of_format("affine4_64")),
    "int8": (functools.partial(quantised, name="affine8_64"), of_format("affine8_64")),
    "mxfp4": (functools.partial(quantised, name="mxfp4"), of_format("mxfp4")),
    "variants": (variants, ["quantized_variants_affine4_64_{}"]),
    "int1": (functools.partial(quantised, name="affine1_64"), of_format("affine1_64")),
}
# Types of GGUF that this package writes, too.
GROUPS |= {name: (functools.partial(quantised, name=name), of_format(name)) for name in sorted(SEARCHED)}
# What the names of libraries start with; together they are all of them.
KINDS = [
    "norms",
    "rope",
    "attention",
    "write_cache",
    "tiles",
    "index",
    "pooling",
    "quantize_",
    "causal_conv1d",
    "gated_delta_rule",
    "selective_scan",
    "lora",
    "hyper_connection",
    "combine",
]
KINDS += ["pointwise", "routing", "sampling", "bucket", "experts"]
KINDS += [
    f"quantized_{part}{name}"
    for part in (*PARTS, "variants_")
    for name in (
        *(f"affine{bits}" for bits in (1, 2, 3, 4, 5, 6, 8)),
        "mxfp4",
        "mxfp8",
        "nvfp4",
        *OTHERS,
        *GGUF_FORMATS,
    )
]


# Costs -------------------------------------------------------------------------------------------------


@functools.cache
def library(name: str) -> Path:
    """The compiled shader that the host makes of a library's source."""
    return compile_shader(torch.ops.moe_mps._library_source(name))


def libraries(kind: str, dtype: str) -> list[str]:
    """The libraries of a kind that are for this dtype, or for any."""
    names = [name for name in torch.ops.moe_mps._libraries() if name.startswith(kind)]
    return [name for name in names if name.endswith(f"_{dtype}") or not name.endswith(tuple(DTYPES))]


def is_of_another_group(name: str) -> bool:
    """Of a format in groups of 32 or 128, which takes the registers of that in 64, as int4 does below."""
    return re.search(r"\d_(32|128)_", name) is not None


def fitting_registers(name: str, path: Path):
    """Those of a kernel: no more than the M1 has for its bound, or it would spill there, and all variables in
    them."""
    found, bound = apple.registers(path, name), kernels_of(path)[name].max_threads
    fits = apple.threads_for(found.halves) >= (bound or UNDECLARED_THREADS)
    assert fits, f"{name}: {found.registers:g} registers"
    assert found.arrays == 0, f"{name}: {found.arrays} arrays are indexed at run time, and so in memory"
    return found


def on_both(name: str, path: Path) -> str:
    """Registers on the M1 and M2 and, behind a slash, from the M3 on where these differ."""
    first, later = fitting_registers(name, path), apple.registers(path, name, native=True)
    return "/".join(f"{n:g}" for n in dict.fromkeys((first.registers, later.registers)))


def register_text(name: str, path: Path, launched: object) -> str:
    found, bound = fitting_registers(name, path), kernels_of(path)[name].max_threads
    threads = apple.threads_for(found.halves)
    return f"{on_both(name, path)} registers, {launched}/{bound or '-'}/{threads} threads"


def dispatch_line(m: apple.Measurement, elements: int) -> str:
    unit = "a MAC" if m.work else "an element"
    m.work = m.work or apple.Work("", elements)
    slots = f"{m.slots_per_mac(M1):.2f} {m.slots_per_mac(M3):.2f} slots {unit}"
    return f"  {m.kernel}: {slots}, {register_text(m.kernel, m.library, m.threads)}"


def costs(group: str) -> str:
    """A line for each dispatch of the group's libraries, and for each of their kernels without one."""
    torch.manual_seed(0)
    calls, names = GROUPS[group]
    own = {library(name.format("bf16")) for name in names}
    lines, seen = [], set()
    for label, call, work, elements in calls(torch.bfloat16):
        lines.append(label)
        measurements = [m for m in apple.measure(call, work, LIMIT) if m.library in own]
        lines += [dispatch_line(m, elements) for m in measurements]
        seen |= {m.kernel for m in measurements}
    others = sorted((name, path) for path in own for name in kernels_of(path) if name not in seen)
    lines += ["not dispatched here"] * bool(others)
    lines += [f"  {name}: {register_text(name, path, '-')}" for name, path in others]
    return "\n".join(lines) + "\n"


def registers_of_formats(*starts: str) -> str:
    """Each quantised format that starts so: the registers of its kernels, in the order of the library, on the
    M1 and M2 and from the M3 on."""
    lines = []
    for format in FORMATS_BY_NAME:
        if not format.startswith(starts) or (
            not format.startswith("affine4_") and is_of_another_group(f"_{format}_")
        ):
            continue
        end, texts = f"_{format}_bf16", []
        left_out = "^(expert|matmul_rows|matmul)_|_rows$"
        for path in (library(name.format("bf16")) for name in of_format(format)):
            kernels = {re.sub(left_out, "", k.removesuffix(end)): k for k in kernels_of(path)}
            texts += [f"{k} {on_both(whole, path)}" for k, whole in kernels.items()]
        text = f"{format}: {' '.join(texts)}"
        lines.append(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


# Of the formats one of each way of storing: in float32 their kernels have at most 7 registers more than in
# bfloat16, by what the activations take.
IN_FLOAT32 = re.compile("(?!quantized)|.*_(affine4|mxfp4|q4_k|iq4_xs)$")


@pytest.mark.sweep  # compiles most libraries
@pytest.mark.parametrize("kind", [*filter(IN_FLOAT32.match, KINDS)])
def test_registers_fit_the_bound(simulated, kind):
    """In float32. Those of bfloat16 are pinned below; float16 needs no more than it."""
    names = [name for name in libraries(kind, "f32") if not is_of_another_group(name)]
    assert names
    for path in map(library, names):
        for name in kernels_of(path):
            fitting_registers(name, path)


def test_every_library_is_of_a_kind(simulated):
    names = torch.ops.moe_mps._libraries()
    assert sorted(names) == sorted({n for kind in KINDS for dtype in DTYPES for n in libraries(kind, dtype)})


LAUNCH_US = 5.0  # the least that a dependent launch costs on a Mac


@pytest.mark.parametrize("calls", in_sweep([norms, rope], [rope]))
def test_norms_and_rope_cost_less_than_their_launch(simulated, calls):
    """An eighth of eight tokens, on one core: its instructions, after what they need was read."""
    for label, call, work, _ in calls(torch.bfloat16):
        for measured in apple.measure(call, work):
            for gpu in cases.DEFAULT_GPUS:
                bounds = measured.bounds(gpu)
                one_token = (bounds.issue * gpu.cores + bounds.dram) / 8
                assert one_token < LAUNCH_US / 2, (label, gpu.name, bounds)


@pytest.mark.parametrize(
    "shape",
    in_sweep([*DENSE_DECODE, *DECODE_IN_8_BITS], (DECODE_IN_8_BITS[1],)),
)
def test_attention_of_one_token_waits_for_memory(simulated, shape):
    """Reading each key and value once takes the longest; in 8 bits instructions may, by the factor below."""
    _, call, work, _ = attention_of(torch.bfloat16, *shape)
    measured, *_ = apple.measure(call, work)
    in_8_bits = {"M1": 1.0, "M1 Max": 1.1, "M4 Max": 1.0}
    for name, factor in in_8_bits.items():
        bounds = measured.bounds(apple.GPUS[name])
        most = factor if shape in DECODE_IN_8_BITS else 1.0
        assert max(bounds.issue, bounds.l1, bounds.threadgroup) < most * bounds.dram, (name, bounds)


@pytest.mark.slow("32,768 keys")
@pytest.mark.parametrize("key_heads", [8, 4])
def test_a_token_of_a_cache_in_tiles(simulated, key_heads):
    """No slower than one in 8 bits, and at least 1.5 times as fast as one in 16."""
    shape, limit = (32, key_heads, 1, 32768, 128, 128), apple.Limit(groups=2, slots=1e6)
    made = [attention_of(torch.bfloat16, *shape, bits) for bits in (16, 8)]
    made += [tiled_of(torch.bfloat16, *shape, 4, v_bits) for v_bits in (4, 2)]
    found = [apple.measure(call, work, limit) for _, call, work, _ in made]
    for gpu in cases.DEFAULT_GPUS:
        of_16, of_8, *of_tiles = (sum(m.bounds(gpu).predicted_us for m in each) for each in found)
        assert max(of_tiles) < of_8 and max(of_tiles) < of_16 / 1.5, gpu.name


# The group that always runs; the others do in the sweep.
ALWAYS = ("rope",)
FORMATS = {"mlx": ("affine", "mx", "nv"), "gguf_blocks": ("q",), "gguf_codebooks": ("iq", "tq")}


@pytest.mark.pinned
@pytest.mark.parametrize("group", in_sweep(GROUPS, ALWAYS))
def test_costs(simulated, group):
    """Issue slots of a lane on the M1 and M2, and from the M3 on, where bfloat16 is native; 32-bit registers
    on both; threads of a threadgroup as launched, as declared, and as the M1's registers allow (0: it
    spills)."""
    assert_pinned("costs", group, costs(group))


def test_every_group_is_pinned():
    assert pinned("costs").keys() == GROUPS.keys()


@pytest.mark.sweep  # compiles the libraries of all formats
@pytest.mark.pinned
@pytest.mark.parametrize("formats", FORMATS)
def test_registers_of_formats(simulated, formats):
    assert_pinned("registers", formats, registers_of_formats(*FORMATS[formats]))
