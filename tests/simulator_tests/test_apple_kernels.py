"""What each kernel of the package costs on Apple GPUs, by the model: a change of cost shows in review.

The texts are of bfloat16. After an intended change:

    EXPECTTEST_ACCEPT=1 scripts/test tests/simulator_tests/test_apple_kernels.py -k TestCosts
"""

import functools
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import expecttest
import pytest
import torch
from measured.apple import cases
from simulator import apple
from simulator.build import compile_shader
from simulator.shaderlib import kernels_of
from simulator.testing import linux_only
from support.oracles_experts import numbers_of
from support.quantized_layers import GGUF_FORMATS, place, random_quantized

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
    yield "rms_norm", lambda: ops.rms_norm(x, weight, 1e-6), {}, x.numel()
    yield "layer_norm", lambda: ops.layer_norm(x, weight, weight, 1e-6), {}, x.numel()
    yield "rms_norm_gated", lambda: ops.rms_norm_gated(x, y, weight, 1e-6), {}, x.numel()
    yield "fused_norm_add", lambda: ops.fused_norm_add(x, y, weight, 1e-6), {}, x.numel()
    yield "fused_residual_norm", lambda: ops.fused_residual_norm(x, y, weight, 1e-6), {}, x.numel()


def rope(dtype: torch.dtype) -> Iterator[Call]:
    q, k = on_device(1, 8, 16, 128, dtype=dtype), on_device(1, 8, 4, 128, dtype=dtype)
    table, weight = on_device(1, 8, 128, dtype=dtype), on_device(128, dtype=dtype)
    elements = q.numel() + k.numel()
    for label, weights in (("rope", ()), ("rope with QK-norm", (weight, weight))):
        yield label, functools.partial(torch.ops.moe_mps.rope, q, k, table, table, *weights), {}, elements
    keys = k[:, :, :1], None, on_device(1, 1, 20, 128, dtype=dtype), None, table, table
    norm = {"k_weight": weight, "k_bias": weight}
    yield (
        "rope_cache_",
        functools.partial(torch.ops.moe_mps.rope_cache_, q, *keys, **norm),
        {},
        elements - 24 * 128,
    )
    ids, inv_freq = torch.arange(8).view(1, 8).to("mps"), on_device(64)
    call = functools.partial(torch.ops.moe_mps.rope_tables, ids, inv_freq, 1.0, dtype)
    yield "rope_tables", call, {}, table.numel()


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
                for part in ("scales", "biases")
            }
    call = functools.partial(torch.ops.moe_mps.attention, q, k, v, 0.1, **groups)
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
    """Blocks of 8 and of 16 queries over a window of 128 keys and as many of a tail."""
    for width, value_width in ((512, 512), (128, 128)):
        label, call, work, elements = attention_of(dtype, 16, 1, 1, 128, width, value_width, 16)
        _, k, v, _ = call.args
        options = {"k_tail": k.clone(), "v_tail": v.clone(), "tail_rate": 4, "position": 600}
        work = {key: apple.Work("attention", 2 * each.macs) for key, each in work.items()}
        yield f"tailed, {label}", functools.partial(call, **options), work, elements


def relative(dtype: torch.dtype) -> Iterator[Call]:
    """Of one token, and of more than a block of queries; over the last keys and over all."""
    for tokens, extent, width, bits in ((1, 1024, 128, 16), (8, 64, 64, 16), (1, 512, 128, 8)):
        label, call, work, elements = attention_of(dtype, 8, 1, tokens, 1024, width, width, bits)
        bias = on_device(1, tokens, 8, extent, dtype=dtype)
        yield f"relative to {extent}, {label}", functools.partial(call, relative=bias), work, elements


def cache(dtype: torch.dtype) -> Iterator[Call]:
    for width in (64, 128):
        states = on_device(1, 8, 4, width, dtype=dtype)
        packed = torch.zeros(1, 8, 16, width // 4, dtype=torch.int32).to("mps")
        groups = [on_device(1, 8, 16, 1, dtype=dtype) for _ in range(2)]
        call = functools.partial(torch.ops.moe_mps.write_cache_quantized_, states, packed, *groups, 5)
        yield f"write_cache_quantized_ of {width}", call, {}, states.numel()


def index(dtype: torch.dtype) -> Iterator[Call]:
    q, k = on_device(1, 1, 32, 128, dtype=dtype), on_device(1, 512, 128, dtype=dtype)
    call = functools.partial(torch.ops.moe_mps.index_topk, q, k, on_device(1, 1, 32), 64, 0.1)
    yield "index_topk", call, {k: apple.Work("scores", 512 * 32 * 128)}, 512
    q, k = on_device(1, 1, 4, 128, dtype=dtype), on_device(1, 2048, 128, dtype=dtype)
    call = functools.partial(torch.ops.moe_mps.index_topk, q, k, None, 4, 0.1, reduce="keys", block=128)
    yield "index_topk of blocks", call, {k: apple.Work("scores", 2048 * 4 * 128)}, 16


def sampling(dtype: torch.dtype) -> Iterator[Call]:
    """A token of a vocabulary as large as Qwen3's; the same where nothing limits what is drawn from."""
    torch.manual_seed(0)
    logits, draws = 3 * on_device(1, 151_936, dtype=dtype), on_device(1, 151_936).abs()
    invalid = torch.zeros(1, dtype=torch.int32, device="mps")
    for label, how in {"top-k and top-p": (0.7, 20, 0.8), "top-p": (1.0, 0, 0.9), "all": ()}.items():
        call = functools.partial(torch.ops.moe_mps.sample_, logits, draws, invalid, *how)
        yield f"sample_ of {label}", call, {}, logits.numel()


def pooling(dtype: torch.dtype) -> Iterator[Call]:
    """A token that completes a window of DeepSeek-V4: of overlapping ones, of few channels, of 128 tokens."""
    for width, rate, overlap in ((512, 4, 2), (128, 4, 2), (512, 128, 1)):
        columns = overlap * width
        kv, gate = (on_device(1, 1, columns, dtype=dtype) for _ in range(2))
        bias, state = on_device(rate, columns), on_device(1, rate * overlap, 2, columns, dtype=dtype)
        entries, rest = on_device(1, 16, width, dtype=dtype), (on_device(width), on_device(32))
        arguments = kv, gate, bias, state, entries, 4 * rate - 1, *rest
        call = functools.partial(torch.ops.moe_mps.pool_window_, *arguments)
        yield f"pool_window_ of {rate} tokens of {columns}", call, {}, rate * columns


def linear_attention(dtype: torch.dtype) -> Iterator[Call]:
    """An element is one of the state, for one token."""
    state = on_device(1, 8192, 4, dtype=dtype)
    for tokens in (1, 16):
        x = on_device(1, tokens, 8192, dtype=dtype)
        call = functools.partial(
            torch.ops.moe_mps.causal_conv1d_update_, x, state, on_device(8192, 4, dtype=dtype)
        )
        yield f"causal_conv1d_update_ of {tokens}", call, {}, x.numel()
    run, state, per_head = torch.ops.moe_mps.linear_attention_, on_device(1, 2, 128, 128), on_device(2)
    norm = {"gate_activation": "sigmoid", "norm_weight": on_device(128, dtype=dtype)}
    rule = {"l2norm_eps": 1e-6, "A_log": per_head, "decay": "softplus", "beta_activation": "sigmoid"}
    mamba = {"delta": False, "A_log": per_head, "decay": "times_beta", "beta_activation": "softplus"}
    for tokens in (1, 48):
        q, v, beta = (on_device(1, tokens, *shape, dtype=dtype) for shape in ((1, 128), (2, 128), (2,)))
        g = on_device(1, tokens, 2, 128, dtype=dtype)
        for name, decay, options in (
            ("the delta rule", beta, rule),
            ("the delta rule with its norm", beta, rule | norm | {"gate": v}),
            ("a decay a channel", g, rule),
            ("Mamba-2", None, mamba),
            ("lightning attention", -per_head.abs(), {"delta": False, "beta": None}),
        ):
            options = {"beta": beta} | options
            call = functools.partial(run, q, q, v, decay, state, 0.1, **options)
            yield f"linear_attention_ of {tokens}, {name}", call, {}, state.numel() * tokens
    state, a_log = on_device(1, 256, 16), on_device(256, 16)
    for tokens in (1, 48):
        x, b = on_device(1, tokens, 256, dtype=dtype), on_device(1, tokens, 16, dtype=dtype)
        call = functools.partial(torch.ops.moe_mps.selective_scan_, x, x, b, b, state, a_log, gate=x)
        yield f"selective_scan_ of {tokens}", call, {}, state.numel() * tokens


def hyper_connection(dtype: torch.dtype) -> Iterator[Call]:
    fn, base, scale = on_device(24, 4 * 2048), on_device(24), on_device(3)
    for tokens in (1, 16):
        streams, out = on_device(tokens, 4, 2048, dtype=dtype), on_device(tokens, 2048, dtype=dtype)
        given = {"out": out, "post": on_device(tokens, 4), "comb": on_device(tokens, 4, 4)}
        call = functools.partial(torch.ops.moe_mps.hyper_connection, streams, fn, base, scale, **given)
        work = {fn: apple.Work("products", tokens * fn.numel())}
        yield f"hyper_connection of {tokens}", call, work, out.numel()
    call = functools.partial(torch.ops.moe_mps.hyper_update, streams, *given.values())
    yield "hyper_update", call, {}, streams.numel()


def pointwise(dtype: torch.dtype) -> Iterator[Call]:
    x, gate = on_device(8, 2048, dtype=dtype), on_device(2048, dtype=dtype)
    formula = "sigmoid b bf16; mul a %0 bf16"
    yield "pointwise", functools.partial(torch.ops.moe_mps.pointwise, x, formula, dtype, gate), {}, x.numel()


def turned(dtype: torch.dtype) -> Iterator[Call]:
    """One token whose queries and keys are normed and turned."""
    for heads, key_heads, width in ((32, 4, 128), (64, 8, 64), (96, 8, 128)):
        for keys in (200, 1024):
            q, k, v = (on_device(1, 1, n, width, dtype=dtype) for n in (heads, key_heads, key_heads))
            held = [on_device(1, key_heads, keys, width, dtype=dtype) for _ in range(2)]
            cos, sin, norm = (on_device(*s, dtype=dtype) for s in ((1, 1, width), (1, 1, width), (width,)))
            operator = torch.ops.moe_mps.rope_attention_
            call = functools.partial(operator, q, k, v, *held, cos, sin, width**-0.5, norm, norm)
            work = {held[0]: apple.Work("attention", 2 * heads * keys * width)}
            yield f"{heads} / {key_heads} heads of {width}, {keys} keys", call, work, 0


def combine(dtype: torch.dtype) -> Iterator[Call]:
    slots, weights = on_device(8, 4, 2048, dtype=dtype), on_device(8, 4, dtype=dtype)
    x, norm = on_device(8, 2048, dtype=dtype), on_device(2048, dtype=dtype)
    ops, n = torch.ops.moe_mps, slots.numel()
    yield "silu_mul_stacked", lambda: ops.silu_mul_stacked(slots, slots), {}, n
    yield "weighted_sum_stacked", lambda: ops.weighted_sum_stacked(slots, weights), {}, n
    call = lambda: ops.weighted_sum_residual_norm_stacked_(x, slots, weights, norm, 1e-6)  # noqa: E731
    yield "weighted_sum_residual_norm_stacked_", call, {}, n


def routing(dtype: torch.dtype) -> Iterator[Call]:
    ops = torch.ops.moe_mps
    for experts in (64, 128, 256, 512, 1024):
        logits = on_device(8, experts, dtype=dtype)
        label = f"moe_router_topk_softmax of {experts}"
        yield label, functools.partial(ops.moe_router_topk_softmax, logits, 4, True), {}, logits.numel()
    router, norm, scale = (on_device(*shape, dtype=dtype) for shape in ((64, HIDDEN), (HIDDEN,), (64,)))
    for tokens in (1, 32):
        hidden = on_device(tokens, HIDDEN, dtype=dtype)
        work = {router: apple.Work("router", tokens * router.numel())}
        call = functools.partial(ops.router_logits, hidden, router)
        yield f"router_logits of {tokens}", call, work, 0
        call = functools.partial(ops.router_logits, hidden, router, norm_weight=norm)
        yield f"router_logits of {tokens}, normed", call, work, 0
    table, options = torch.zeros(9, 6, dtype=torch.int64, device="mps"), {"scoring": "sqrtsoftplus"}
    chosen = functools.partial(ops.moe_hash_router, hidden[:1], router, table, table[0, :1], norm_weight=norm)
    work = {router: apple.Work("router", 6 * HIDDEN)}
    yield "moe_hash_router", functools.partial(chosen, norm_topk_prob=True, **options), work, 0
    for tokens in (1, 65, 1024):
        hidden = on_device(tokens, HIDDEN, dtype=dtype)
        work = {router: apple.Work("router", tokens * router.numel())}
        call = functools.partial(ops.moe_gate, hidden, router, norm, scale, 4, 1e-6)
        yield f"moe_gate of {tokens}", call, work, 0
    for kind in (torch.int32, torch.int64):
        ids = ids_of(64, 4, 32).to(kind)
        yield f"moe_bucket {kind}", functools.partial(ops.moe_bucket, ids, 32), {}, ids.numel()
        call = functools.partial(ops.moe_compute_ids_tpe, ids, 32, 128, 128)
        yield f"moe_compute_ids_tpe {kind}", call, {}, ids.numel()


def layer(label: str, tokens: int, experts: int, slots: int, dtype, matrices, *format_, **options) -> Call:
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
    operator = torch.ops.moe_mps.moe_experts_quantized if format_ else torch.ops.moe_mps.moe_experts
    call = functools.partial(operator, x, *gate_up, *down, ids, weights, *format_, **options)
    return f"{label}, {tokens} tokens, {slots} of {experts}", call, work, tokens * HIDDEN


def rows_first(dtype: torch.dtype, experts: int, rows: int, inputs: int) -> tuple:
    return (on_device(experts, rows, inputs, dtype=dtype),)


def dense(dtype: torch.dtype) -> Iterator[Call]:
    matrices = functools.partial(rows_first, dtype)
    for tokens in (1, 8, 64, 256):
        yield layer("dense", tokens, 32, 4, dtype, matrices)
    norm = on_device(HIDDEN, dtype=dtype)
    yield layer("dense, normed", 1, 32, 4, dtype, matrices, norm_weight=norm)
    yield from of_heads(dtype, torch.ops.moe_mps.heads_mm, matrices(4, 192, 512))


def of_heads(dtype: torch.dtype, operator: Callable, matrices: tuple, *format_) -> Iterator[Call]:
    """Queries of latents and values of them, for matrices of 4 heads, [4, 192, 512]."""
    for tokens in (1, 2):
        work = {matrices[0]: apple.Work("heads", tokens * 4 * 192 * 512)}
        for label, width in (("queries of latents", 192), ("values of latents", 512)):
            into = width == 192
            x = on_device(1, tokens, 4, width, dtype=dtype if into else torch.float32)
            options = {"dtype": dtype} if format_ and not into else {}
            call = functools.partial(operator, x, *matrices, *format_, transposed=into, **options)
            yield f"{label}, {tokens} tokens", call, work, x.numel()


def quantised(dtype: torch.dtype, name: str) -> Iterator[Call]:
    bits, group, mode = numbers_of(name)

    def stack(experts: int, rows: int, inputs: int) -> tuple:
        if name in GGUF_FORMATS:
            return tuple(place(random_quantized(experts, rows, inputs, name, dtype, 0), "mps"))
        words = torch.randint(-(2**31), 2**31, (experts, rows, inputs * bits // 32), dtype=torch.int64)
        shape = (experts, rows, inputs // group)
        if mode != "affine":
            return words.int().to("mps"), torch.full(shape, 120, dtype=torch.uint8).to("mps"), None
        return words.int().to("mps"), on_device(*shape, dtype=dtype), on_device(*shape, dtype=dtype)

    for tokens, experts, slots in ((1, 32, 4), (3, 4, 2), (8, 32, 4), (64, 32, 4), (256, 32, 4)):
        yield layer(name, tokens, experts, slots, dtype, stack, name)
    norm = on_device(HIDDEN, dtype=dtype)
    yield layer(f"{name}, normed", 1, 32, 4, dtype, stack, name, norm_weight=norm)
    routed = {"norm_weight": norm, "logits": on_device(1, 32, dtype=dtype), "top_k": 4}
    yield layer(f"{name}, normed, chosen", 1, 32, 4, dtype, stack, name, **routed)
    yield from of_heads(dtype, torch.ops.moe_mps.heads_quantized, stack(4, 192, 512), name)


# Calls, and the libraries whose kernels they dispatch; {} is a dtype.
GROUPS = {
    "norms": (norms, ["norms_{}"]),
    "rope": (rope, ["rope_{}"]),
    "attention": (attention, ["attention_{}", "attention_affine8_{}"]),
    "selected": (selected, ["attention_selected_{}", "attention_selected_affine8_{}"]),
    "tailed": (tailed, ["attention_tailed_{}"]),
    "turned": (turned, ["attention_turned_{}"]),
    "relative": (relative, ["attention_relative_{}", "attention_relative_affine8_{}"]),
    "index": (index, ["index_{}"]),
    "pooling": (pooling, ["pooling_{}"]),
    "sampling": (sampling, ["sampling_{}"]),
    "linear_attention": (linear_attention, ["linear_attention_{}"]),
    "hyper_connection": (hyper_connection, ["hyper_connection_{}"]),
    "combine": (combine, ["combine_{}"]),
    "pointwise": (pointwise, ["pointwise_{}"]),
    "routing": (routing, ["routing_{}", "hash_router_{}", "bucket_i32", "bucket_i64"]),
    "dense": (dense, ["experts_{}"]),
    "int4": (functools.partial(quantised, name="affine4_64"), ["quantized_affine4_64_{}"]),
    "int8": (functools.partial(quantised, name="affine8_64"), ["quantized_affine8_64_{}"]),
    "mxfp4": (functools.partial(quantised, name="mxfp4"), ["quantized_mxfp4_{}"]),
}
# What the names of libraries start with; together they are all of them.
KINDS = [
    "norms",
    "rope",
    "attention",
    "index",
    "pooling",
    "linear_attention",
    "hyper_connection",
    "combine",
    "pointwise",
    "routing",
    "hash_router",
    "sampling",
]
KINDS += ["bucket", "experts"]
KINDS += [f"quantized_affine{bits}" for bits in (2, 3, 4, 5, 6, 8)]
KINDS += [f"quantized_{name}" for name in ("mxfp4", "mxfp8", "nvfp4", *GGUF_FORMATS)]


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
    return re.search("_(32|128)_", name) is not None


def fitting_registers(name: str, path: Path):
    """Those of a kernel: no more than the M1 has for its bound, or it would spill there."""
    found, bound = apple.registers(path, name), kernels_of(path)[name].max_threads
    fits = apple.threads_for(found.halves) >= (bound or UNDECLARED_THREADS)
    assert fits, f"{name}: {found.registers:g} registers"
    return found


def register_text(name: str, path: Path, launched: object) -> str:
    found, bound = fitting_registers(name, path), kernels_of(path)[name].max_threads
    return (
        f"{found.registers:g} registers, {launched}/{bound or '-'}/{apple.threads_for(found.halves)} threads"
    )


def dispatch_line(m: apple.Measurement, elements: int) -> str:
    unit = "a MAC" if m.work else "an element"
    m.work = m.work or apple.Work("", elements)
    slots = f"{m.slots_per_mac(M1):.2f} {m.slots_per_mac(M3):.2f} slots {unit}"
    return f"  {m.kernel}: {slots}, {register_text(m.kernel, m.library, m.threads)}"


def costs(group: str, dtype: str) -> str:
    """A line for each dispatch of the group's libraries, and for each of their kernels without one."""
    torch.manual_seed(0)
    calls, names = GROUPS[group]
    own = {library(name.format(dtype)) for name in names}
    lines, seen = [], set()
    for label, call, work, elements in calls(DTYPES[dtype]):
        lines.append(label)
        measurements = [m for m in apple.measure(call, work, LIMIT) if m.library in own]
        lines += [dispatch_line(m, elements) for m in measurements]
        seen |= {m.kernel for m in measurements}
    others = sorted((name, path) for path in own for name in kernels_of(path) if name not in seen)
    lines += ["not dispatched here"] * bool(others)
    lines += [f"  {name}: {register_text(name, path, '-')}" for name, path in others]
    return "\n".join(lines) + "\n"


def registers_of_formats(dtype: str, *starts: str) -> str:
    """Each quantised format that starts so: the registers of its kernels, in the order of the library."""
    lines = []
    for name in libraries("quantized", dtype):
        if not name.startswith(tuple(f"quantized_{start}" for start in starts)):
            continue
        if not name.startswith("quantized_affine4_") and is_of_another_group(name):
            continue
        path, end = library(name), len(name) - len("quantized")
        left_out = "^(expert|matmul_rows|matmul)_|_rows$"
        kernels = {re.sub(left_out, "", kernel[:-end]): kernel for kernel in kernels_of(path)}
        text = " ".join(f"{k} {fitting_registers(whole, path).registers:g}" for k, whole in kernels.items())
        text = f"{name.removeprefix('quantized_').removesuffix(f'_{dtype}')}: {text}"
        lines.append(textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


# Of the formats one of each way of storing: in float32 their kernels have at most 7 registers more than in
# bfloat16, by what the activations take.
IN_FLOAT32 = ("quantized_affine4", "quantized_mxfp4", "quantized_q4_k", "quantized_iq4_xs")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [k for k in KINDS if k in IN_FLOAT32 or not k.startswith("quantized")])
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


@pytest.mark.parametrize("calls", [norms, rope])
def test_norms_and_rope_cost_less_than_their_launch(simulated, calls):
    """An eighth of eight tokens, on one core: its instructions, after what they need was read."""
    for label, call, work, _ in calls(torch.bfloat16):
        for measured in apple.measure(call, work):
            for gpu in cases.DEFAULT_GPUS:
                bounds = measured.bounds(gpu)
                one_token = (bounds.issue * gpu.cores + bounds.dram) / 8
                assert one_token < LAUNCH_US / 2, (label, gpu.name, bounds)


@pytest.mark.parametrize("shape", [*DENSE_DECODE, *DECODE_IN_8_BITS])
def test_attention_of_one_token_waits_for_memory(simulated, shape):
    """Reading each key and value once takes the longest; in 8 bits instructions may, by the factor below."""
    _, call, work, _ = attention_of(torch.bfloat16, *shape)
    measured, *_ = apple.measure(call, work)
    in_8_bits = {"M1": 1.0, "M1 Max": 1.1, "M4 Max": 1.0}
    for name, factor in in_8_bits.items():
        bounds = measured.bounds(apple.GPUS[name])
        most = factor if shape in DECODE_IN_8_BITS else 1.0
        assert max(bounds.issue, bounds.l1, bounds.threadgroup) < most * bounds.dram, (name, bounds)


@pytest.mark.usefixtures("simulated")
class TestCosts(expecttest.TestCase):
    """Issue slots of a lane on the M1 and M2, and from the M3 on, where bfloat16 is native; 32-bit registers;
    threads of a threadgroup as launched, as declared, and as the M1's registers allow (0: it spills)."""

    def test_norms(self):
        self.assertExpectedInline(
            costs("norms", "bf16"),
            """\
rms_norm
  rms_norm_bf16: 40.75 34.75 slots an element, 45 registers, 512/512/1024 threads
layer_norm
  layer_norm_bf16: 59.75 52.75 slots an element, 45.5 registers, 512/512/1024 threads
rms_norm_gated
  rms_norm_gated_bf16: 51.75 44.75 slots an element, 62 registers, 512/512/832 threads
fused_norm_add
  norm_add_bf16: 43.00 36.00 slots an element, 54 registers, 512/512/896 threads
fused_residual_norm
  residual_norm_bf16: 52.25 40.25 slots an element, 67.5 registers, 512/512/768 threads
""",
        )

    def test_rope(self):
        self.assertExpectedInline(
            costs("rope", "bf16"),
            """\
rope
  rope_bf16: 68.00 58.00 slots an element, 60 registers, 128/128/832 threads
rope with QK-norm
  rope_bf16: 87.75 77.75 slots an element, 60 registers, 128/128/832 threads
rope_cache_
  rope_centred_bf16: 70.10 60.10 slots an element, 61 registers, 128/128/832 threads
rope_tables
  rope_tables_bf16: 39.50 35.50 slots an element, 9.5 registers, 64/64/1024 threads
""",
        )

    @pytest.mark.sweep
    def test_selected(self):
        self.assertExpectedInline(
            costs("selected", "bf16"),
            """\
selected, attention of 16 heads on 1, 1 tokens, 256 keys of 576, 16 bits
  attention_selected8_512_bf16: 1.77 1.77 slots a MAC, 92.5 registers, 256/256/512 threads
selected, attention of 16 heads on 1, 1 tokens, 256 keys of 128, 16 bits
  attention_selected16_128_bf16: 1.91 1.90 slots a MAC, 102.5 registers, 128/128/512 threads
selected, attention of 8 heads on 1, 1 tokens, 256 keys of 128, 8 bits
  attention_selected8_128_affine8_bf16: 2.49 2.45 slots a MAC, 102.5 registers, 128/128/512 threads
not dispatched here
  attention_selected16_128_affine8_bf16: 100.5 registers, -/128/512 threads
  attention_selected16_256_affine8_bf16: 100.5 registers, -/256/512 threads
  attention_selected16_256_bf16: 102.5 registers, -/256/512 threads
  attention_selected16_64_affine8_bf16: 106.5 registers, -/128/448 threads
  attention_selected16_64_bf16: 108.5 registers, -/128/448 threads
  attention_selected8_128_bf16: 98.5 registers, -/128/512 threads
  attention_selected8_256_affine8_bf16: 96.5 registers, -/128/512 threads
  attention_selected8_256_bf16: 92.5 registers, -/128/512 threads
  attention_selected8_512_affine8_bf16: 96.5 registers, -/256/512 threads
  attention_selected8_64_affine8_bf16: 94 registers, -/128/512 threads
  attention_selected8_64_bf16: 90 registers, -/128/576 threads
""",
        )

    def test_pooling(self):
        self.assertExpectedInline(
            costs("pooling", "bf16"),
            """\
pool_window_ of 4 tokens of 1024
  pool_windows_bf16: 65.96 62.46 slots an element, 54 registers, 256/768/896 threads
pool_window_ of 4 tokens of 256
  pool_windows_bf16: 66.41 62.91 slots an element, 54 registers, 64/768/896 threads
pool_window_ of 128 tokens of 512
  pool_windows_bf16: 32.13 29.10 slots an element, 54 registers, 768/768/896 threads
""",
        )

    @pytest.mark.sweep
    def test_tailed(self):
        self.assertExpectedInline(
            costs("tailed", "bf16"),
            """\
tailed, attention of 16 heads on 1, 1 tokens, 128 keys of 512, 16 bits
  attention_tailed8_512_bf16: 1.84 1.84 slots a MAC, 104.5 registers, 256/256/448 threads
tailed, attention of 16 heads on 1, 1 tokens, 128 keys of 128, 16 bits
  attention_tailed16_128_bf16: 1.98 1.97 slots a MAC, 114.5 registers, 128/128/448 threads
not dispatched here
  attention_tailed16_256_bf16: 114.5 registers, -/256/448 threads
  attention_tailed16_64_bf16: 120.5 registers, -/128/384 threads
  attention_tailed8_128_bf16: 110.5 registers, -/128/448 threads
  attention_tailed8_256_bf16: 104.5 registers, -/128/448 threads
  attention_tailed8_64_bf16: 104 registers, -/128/512 threads
""",
        )

    @pytest.mark.sweep
    def test_turned(self):
        self.assertExpectedInline(
            costs("turned", "bf16"),
            """\
32 / 4 heads of 128, 200 keys
  attention_turned8_128_bf16: 2.18 2.13 slots a MAC, 105.5 registers, 128/128/448 threads
32 / 4 heads of 128, 1024 keys
  attention_turned8_128_bf16: 2.73 2.64 slots a MAC, 105.5 registers, 128/128/448 threads
64 / 8 heads of 64, 200 keys
  attention_turned8_64_bf16: 2.67 2.59 slots a MAC, 101 registers, 128/128/512 threads
64 / 8 heads of 64, 1024 keys
  attention_turned8_64_bf16: 2.79 2.69 slots a MAC, 101 registers, 128/128/512 threads
96 / 8 heads of 128, 200 keys
  attention_turned16_128_bf16: 2.57 2.52 slots a MAC, 115.5 registers, 128/128/448 threads
96 / 8 heads of 128, 1024 keys
  attention_turned16_128_bf16: 2.58 2.53 slots a MAC, 115.5 registers, 128/128/448 threads
not dispatched here
  attention_turned16_256_bf16: 115.5 registers, -/256/448 threads
  attention_turned16_64_bf16: 121.5 registers, -/128/384 threads
  attention_turned8_256_bf16: 99.5 registers, -/128/512 threads
  attention_turned8_512_bf16: 99.5 registers, -/256/512 threads
""",
        )

    def test_relative(self):
        self.assertExpectedInline(
            costs("relative", "bf16"),
            """\
relative to 1024, attention of 8 heads on 1, 1 tokens, 1024 keys of 128, 16 bits
  attention_relative8_128_bf16: 2.15 2.14 slots a MAC, 104.5 registers, 128/128/448 threads
relative to 64, attention of 8 heads on 1, 8 tokens, 1024 keys of 64, 16 bits
  attention_relative16_64_bf16: 2.32 2.31 slots a MAC, 119.5 registers, 128/128/384 threads
relative to 512, attention of 8 heads on 1, 1 tokens, 1024 keys of 128, 8 bits
  attention_relative8_128_affine8_bf16: 2.37 2.33 slots a MAC, 115.5 registers, 128/128/448 threads
not dispatched here
  attention_relative16_128_affine8_bf16: 118.5 registers, -/128/384 threads
  attention_relative16_128_bf16: 113.5 registers, -/128/448 threads
  attention_relative16_256_affine8_bf16: 118.5 registers, -/256/384 threads
  attention_relative16_256_bf16: 113.5 registers, -/256/448 threads
  attention_relative16_64_affine8_bf16: 124.5 registers, -/128/384 threads
  attention_relative8_256_affine8_bf16: 109.5 registers, -/128/448 threads
  attention_relative8_256_bf16: 98.5 registers, -/128/512 threads
  attention_relative8_512_affine8_bf16: 109.5 registers, -/256/448 threads
  attention_relative8_512_bf16: 98.5 registers, -/256/512 threads
  attention_relative8_64_affine8_bf16: 115 registers, -/128/448 threads
  attention_relative8_64_bf16: 101 registers, -/128/512 threads
""",
        )

    def test_attention(self):
        self.assertExpectedInline(
            costs("attention", "bf16"),
            """\
attention of 8 heads on 1, 1 tokens, 1024 keys of 64, 16 bits
  attention8_64_bf16: 2.40 2.40 slots a MAC, 101 registers, 128/128/512 threads
  attention_merge_bf16: 707.00 703.00 slots an element, 45 registers, 256/256/1024 threads
attention of 8 heads on 1, 1 tokens, 1024 keys of 128, 16 bits
  attention8_128_bf16: 2.05 2.04 slots a MAC, 105.5 registers, 128/128/448 threads
  attention_merge_bf16: 383.00 379.00 slots an element, 45 registers, 256/256/1024 threads
attention of 4 heads on 1, 1 tokens, 1024 keys of 256, 16 bits
  attention8_256_bf16: 3.62 3.60 slots a MAC, 99.5 registers, 128/128/512 threads
  attention_merge_bf16: 383.00 379.00 slots an element, 45 registers, 256/256/1024 threads
attention of 16 heads on 1, 1 tokens, 1024 keys of 512, 16 bits
  attention16_512_bf16: 1.50 1.47 slots a MAC, 126.5 registers, 256/256/384 threads
  attention_merge_bf16: 323.00 319.00 slots an element, 45 registers, 256/256/1024 threads
attention of 2 heads on 2, 1 tokens, 1024 keys of 192, 16 bits
  attention8_128_bf16: 15.47 15.40 slots a MAC, 105.5 registers, 128/128/448 threads
  attention_merge_bf16: 255.33 252.67 slots an element, 45 registers, 256/256/1024 threads
attention of 16 heads on 1, 1 tokens, 1024 keys of 576, 16 bits
  attention16_512_bf16: 1.50 1.47 slots a MAC, 126.5 registers, 256/256/384 threads
  attention_merge_bf16: 287.11 283.56 slots an element, 45 registers, 256/256/1024 threads
attention of 8 heads on 1, 1 tokens, 1024 keys of 64, 8 bits
  attention8_64_affine8_bf16: 2.72 2.68 slots a MAC, 115 registers, 128/128/448 threads
  attention_merge_affine8_bf16: 707.00 703.00 slots an element, 45 registers, 256/256/1024 threads
attention of 8 heads on 1, 1 tokens, 1024 keys of 128, 8 bits
  attention8_128_affine8_bf16: 2.30 2.26 slots a MAC, 116.5 registers, 128/128/384 threads
  attention_merge_affine8_bf16: 383.00 379.00 slots an element, 45 registers, 256/256/1024 threads
attention of 4 heads on 1, 1 tokens, 1024 keys of 256, 8 bits
  attention8_256_affine8_bf16: 4.07 4.00 slots a MAC, 110.5 registers, 128/128/448 threads
  attention_merge_affine8_bf16: 383.00 379.00 slots an element, 45 registers, 256/256/1024 threads
attention of 2 heads on 2, 1 tokens, 1024 keys of 192, 8 bits
  attention8_128_affine8_bf16: 17.43 17.11 slots a MAC, 116.5 registers, 128/128/384 threads
  attention_merge_affine8_bf16: 255.33 252.67 slots an element, 45 registers, 256/256/1024 threads
attention of 8 heads on 1, 8 tokens, 64 keys of 64, 16 bits
  attention16_64_bf16: 2.40 2.36 slots a MAC, 121.5 registers, 128/128/384 threads
attention of 8 heads on 1, 8 tokens, 64 keys of 128, 16 bits
  attention16_128_bf16: 2.05 2.01 slots a MAC, 115.5 registers, 128/128/448 threads
attention of 8 heads on 1, 8 tokens, 64 keys of 256, 16 bits
  attention16_256_bf16: 2.06 2.02 slots a MAC, 115.5 registers, 256/256/448 threads
write_cache_quantized_ of 64
  write_cache_quantized_affine8_bf16: 57.50 54.25 slots an element, 14.5 registers, 128/128/1024 threads
write_cache_quantized_ of 128
  write_cache_quantized_affine8_bf16: 60.00 56.75 slots an element, 14.5 registers, 128/128/1024 threads
not dispatched here
  attention16_128_affine8_bf16: 120.5 registers, -/128/384 threads
  attention16_256_affine8_bf16: 120.5 registers, -/256/384 threads
  attention16_64_affine8_bf16: 126.5 registers, -/128/384 threads
  attention8_512_affine8_bf16: 110.5 registers, -/256/448 threads
  attention8_512_bf16: 99.5 registers, -/256/512 threads
  attention_merge_gated_affine8_bf16: 45 registers, -/256/1024 threads
  attention_merge_gated_bf16: 45 registers, -/256/1024 threads
""",
        )

    def test_sampling(self):
        self.assertExpectedInline(
            costs("sampling", "bf16"),
            """\
sample_ of top-k and top-p
  sample_rows_bf16: 17.06 16.02 slots an element, 31.5 registers, 1024/1024/1024 threads
sample_ of top-p
  sample_rows_bf16: 129.25 123.25 slots an element, 31.5 registers, 1024/1024/1024 threads
sample_ of all
  sample_rows_bf16: 44.43 42.43 slots an element, 31.5 registers, 1024/1024/1024 threads
""",
        )

    def test_index(self):
        self.assertExpectedInline(
            costs("index", "bf16"),
            """\
index_topk
  index_scores_bf16: 1.66 1.59 slots a MAC, 65 registers, 64/64/768 threads
  index_select_bf16: 887.31 887.31 slots an element, 25.5 registers, 1024/1024/1024 threads
index_topk of blocks
  index_block_scores_bf16: 2.46 2.20 slots a MAC, 33.5 registers, 64/64/1024 threads
  index_select_bf16: 109456.00 109456.00 slots an element, 25.5 registers, 1024/1024/1024 threads
""",
        )

    @pytest.mark.sweep
    def test_linear_attention(self):
        self.assertExpectedInline(
            costs("linear_attention", "bf16"),
            """\
causal_conv1d_update_ of 1
  causal_conv1d_update_bf16: 255.00 233.00 slots an element, 21 registers, 64/64/1024 threads
causal_conv1d_update_ of 16
  causal_conv1d_update_bf16: 121.12 112.25 slots an element, 21 registers, 64/64/1024 threads
linear_attention_ of 1, the delta rule
  delta_scan128_bf16: 25.39 24.26 slots an element, 97 registers, 256/512/512 threads
linear_attention_ of 1, the delta rule with its norm
  delta_scan128_bf16: 25.54 24.38 slots an element, 97 registers, 512/512/512 threads
linear_attention_ of 1, a decay a channel
  channel_scan128_bf16: 25.89 24.77 slots an element, 99.5 registers, 256/512/512 threads
linear_attention_ of 1, Mamba-2
  plain_scan128_bf16: 23.51 22.39 slots an element, 96 registers, 256/512/512 threads
linear_attention_ of 1, lightning attention
  plain_scan128_bf16: 23.21 22.09 slots an element, 96 registers, 256/512/512 threads
linear_attention_ of 48, the delta rule
  delta_scan128_bf16: 7.50 7.26 slots an element, 97 registers, 256/512/512 threads
linear_attention_ of 48, the delta rule with its norm
  delta_scan128_bf16: 7.50 7.26 slots an element, 97 registers, 256/512/512 threads
linear_attention_ of 48, a decay a channel
  channel_scan128_bf16: 8.07 7.83 slots an element, 99.5 registers, 256/512/512 threads
linear_attention_ of 48, Mamba-2
  plain_scan128_bf16: 5.69 5.45 slots an element, 96 registers, 256/512/512 threads
linear_attention_ of 48, lightning attention
  plain_scan128_bf16: 5.57 5.34 slots an element, 96 registers, 256/512/512 threads
selective_scan_ of 1
  selective_scan_bf16: 27.19 26.73 slots an element, 100.5 registers, 128/128/512 threads
selective_scan_ of 48
  selective_scan_bf16: 9.27 8.82 slots an element, 100.5 registers, 128/128/512 threads
not dispatched here
  channel_scan256_bf16: 99.5 registers, -/512/512 threads
  channel_scan64_bf16: 99.5 registers, -/512/512 threads
  delta_scan256_bf16: 97 registers, -/512/512 threads
  delta_scan64_bf16: 97 registers, -/512/512 threads
  plain_scan256_bf16: 96 registers, -/512/512 threads
  plain_scan64_bf16: 96 registers, -/512/512 threads
""",
        )

    def test_hyper_connection(self):
        self.assertExpectedInline(
            costs("hyper_connection", "bf16"),
            """\
hyper_connection of 1
  hyper_products_bf16: 10.04 9.78 slots a MAC, 61.5 registers, 256/-/832 threads
  hyper_mix_bf16: 66.58 58.58 slots an element, 23 registers, 256/-/1024 threads
hyper_connection of 16
  hyper_products_of_tokens_bf16: 5.73 5.47 slots a MAC, 66 registers, 256/-/768 threads
  hyper_mix_bf16: 66.58 58.58 slots an element, 23 registers, 256/-/1024 threads
hyper_update
  hyper_update_bf16: 23.12 17.88 slots an element, 49 registers, 256/-/1024 threads
""",
        )

    def test_pointwise(self):
        self.assertExpectedInline(
            costs("pointwise", "bf16"),
            """\
pointwise
  pointwise_bf16: 227.00 213.00 slots an element, 18 registers, 64/-/1024 threads
""",
        )

    @pytest.mark.sweep
    def test_combine(self):
        self.assertExpectedInline(
            costs("combine", "bf16"),
            """\
silu_mul_stacked
  silu_mul_stacked_bf16: 21.75 15.75 slots an element, 14 registers, 128/-/1024 threads
weighted_sum_stacked
  weighted_sum_bf16: 16.94 7.69 slots an element, 48 registers, 32/-/1024 threads
weighted_sum_residual_norm_stacked_
  weighted_sum_norm_bf16: 29.95 15.33 slots an element, 70.5 registers, 384/384/704 threads
""",
        )

    @pytest.mark.sweep
    def test_routing(self):
        self.assertExpectedInline(
            costs("routing", "bf16"),
            """\
moe_router_topk_softmax of 64
  route2_bf16: 128.25 127.25 slots an element, 24.5 registers, 32/-/1024 threads
moe_router_topk_softmax of 128
  route4_bf16: 89.91 88.91 slots an element, 32.5 registers, 32/-/1024 threads
moe_router_topk_softmax of 256
  route8_bf16: 70.92 69.92 slots an element, 40 registers, 32/-/1024 threads
moe_router_topk_softmax of 512
  route16_bf16: 61.42 60.42 slots an element, 64 registers, 32/-/832 threads
moe_router_topk_softmax of 1024
  route32_bf16: 71.05 70.05 slots an element, 112 registers, 32/-/448 threads
router_logits of 1
  logits_few_bf16: 11.50 10.50 slots a MAC, 46.5 registers, 128/-/1024 threads
router_logits of 1, normed
  normed_logits_few_bf16: 16.69 15.69 slots a MAC, 72.5 registers, 128/-/640 threads
router_logits of 32
  logits_many_bf16: 3.91 3.66 slots a MAC, 91 registers, 128/-/576 threads
router_logits of 32, normed
  normed_logits_many_bf16: 5.77 5.52 slots a MAC, 109 registers, 128/-/448 threads
moe_hash_router
  normed_hash_route_bf16: 18.71 17.71 slots a MAC, 74.5 registers, 128/-/640 threads
moe_gate of 1
  normed_logits_few_bf16: 16.69 15.69 slots a MAC, 72.5 registers, 128/-/640 threads
moe_gate of 65
  normed_logits_many_bf16: 5.97 5.71 slots a MAC, 109 registers, 128/-/448 threads
moe_gate of 1024
  normed_logits_many_bf16: 5.77 5.52 slots a MAC, 109 registers, 128/-/448 threads
moe_bucket torch.int32
  bucket_pairs_i32: 190.50 161.50 slots an element, 36 registers, 128/1024/1024 threads
moe_compute_ids_tpe torch.int32
  ids_by_expert_i32: 3361.62 3361.62 slots an element, 13 registers, 256/1024/1024 threads
moe_bucket torch.int64
  bucket_pairs_i64: 170.50 141.50 slots an element, 37 registers, 128/1024/1024 threads
moe_compute_ids_tpe torch.int64
  ids_by_expert_i64: 3296.62 3296.62 slots an element, 14 registers, 256/1024/1024 threads
not dispatched here
  hash_route_bf16: 52 registers, -/-/1024 threads
""",
        )

    @pytest.mark.sweep
    def test_dense(self):
        self.assertExpectedInline(
            costs("dense", "bf16"),
            """\
dense, 1 tokens, 4 of 32
  matmul_rows_bf16: 4.59 3.05 slots a MAC, 53 registers, 64/384/896 threads
  expert_down_bf16: 5.21 3.69 slots a MAC, 61.5 registers, 128/384/832 threads
dense, 8 tokens, 4 of 32
  matmul_rows_few_bf16: 3.51 2.46 slots a MAC, 105 registers, 128/256/448 threads
  expert_down_few_bf16: 5.19 3.90 slots a MAC, 100.5 registers, 256/256/512 threads
dense, 64 tokens, 4 of 32
  gemm8_bf16: 2.04 1.85 slots a MAC, 70 registers, 128/384/704 threads
  gemm8_bf16: 2.19 1.99 slots a MAC, 70 registers, 128/384/704 threads
  expert_combine_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
dense, 256 tokens, 4 of 32
  gemm32_bf16: 1.41 1.35 slots a MAC, 96.5 registers, 128/384/512 threads
  gemm32_bf16: 1.53 1.46 slots a MAC, 96.5 registers, 128/384/512 threads
  expert_combine_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
dense, normed, 1 tokens, 4 of 32
  matmul_rows_normed_bf16: 7.02 4.98 slots a MAC, 63 registers, 64/384/832 threads
  expert_down_bf16: 5.21 3.69 slots a MAC, 61.5 registers, 128/384/832 threads
queries of latents, 1 tokens
  heads_columns_bf16: 5.32 4.24 slots a MAC, 58 registers, 256/384/832 threads
values of latents, 1 tokens
  heads_rows_bf16: 4.40 3.37 slots a MAC, 58.5 registers, 64/384/832 threads
queries of latents, 2 tokens
  heads_columns_few_bf16: 4.18 3.60 slots a MAC, 77.5 registers, 256/384/640 threads
values of latents, 2 tokens
  heads_rows_few_bf16: 3.25 2.73 slots a MAC, 86 registers, 64/384/576 threads
not dispatched here
  matmul_rows_few_split_bf16: 116 registers, -/256/448 threads
""",
        )

    def test_int4(self):
        self.assertExpectedInline(
            costs("int4", "bf16"),
            """\
affine4_64, 1 tokens, 4 of 32
  matmul_rows_affine4_64_bf16: 4.98 4.38 slots a MAC, 42.5 registers, 64/384/1024 threads
  expert_down_affine4_64_bf16: 5.72 5.14 slots a MAC, 51 registers, 128/384/1024 threads
affine4_64, 3 tokens, 2 of 4
  matmul_rows_few_split_affine4_64_bf16: 5.37 5.07 slots a MAC, 100 registers, 128/256/512 threads
  expert_down_few_affine4_64_bf16: 5.98 5.43 slots a MAC, 86.5 registers, 256/256/576 threads
affine4_64, 8 tokens, 4 of 32
  matmul_rows_few_affine4_64_bf16: 3.80 3.49 slots a MAC, 89 registers, 128/256/576 threads
  expert_down_few_affine4_64_bf16: 5.60 5.05 slots a MAC, 86.5 registers, 256/256/576 threads
affine4_64, 64 tokens, 4 of 32
  gemm8_affine4_64_bf16: 2.33 2.29 slots a MAC, 68.5 registers, 128/384/704 threads
  gemm8_affine4_64_bf16: 2.48 2.43 slots a MAC, 68.5 registers, 128/384/704 threads
  expert_combine_affine4_64_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
affine4_64, 256 tokens, 4 of 32
  gemm32_affine4_64_bf16: 1.48 1.46 slots a MAC, 94 registers, 128/384/512 threads
  gemm32_affine4_64_bf16: 1.60 1.57 slots a MAC, 94 registers, 128/384/512 threads
  expert_combine_affine4_64_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
affine4_64, normed, 1 tokens, 4 of 32
  matmul_rows_normed_affine4_64_bf16: 7.23 6.14 slots a MAC, 44.5 registers, 64/384/1024 threads
  expert_down_affine4_64_bf16: 5.72 5.14 slots a MAC, 51 registers, 128/384/1024 threads
affine4_64, normed, chosen, 1 tokens, 4 of 32
  matmul_rows_chosen8_affine4_64_bf16: 9.88 8.72 slots a MAC, 44.5 registers, 64/384/1024 threads
  expert_down_affine4_64_bf16: 5.72 5.14 slots a MAC, 51 registers, 128/384/1024 threads
queries of latents, 1 tokens
  heads_columns_affine4_64_bf16: 6.77 6.56 slots a MAC, 45.5 registers, 256/384/1024 threads
values of latents, 1 tokens
  heads_rows_affine4_64_bf16: 4.82 4.73 slots a MAC, 43.5 registers, 64/384/1024 threads
queries of latents, 2 tokens
  heads_columns_few_affine4_64_bf16: 4.91 4.76 slots a MAC, 65 registers, 256/384/768 threads
values of latents, 2 tokens
  heads_rows_few_affine4_64_bf16: 3.63 3.59 slots a MAC, 68 registers, 64/384/768 threads
not dispatched here
  embedding_rows_affine4_64_bf16: 35 registers, -/-/1024 threads
  gemm16_split_affine4_64_bf16: 91 registers, -/384/576 threads
  gemm32_split_affine4_64_bf16: 127 registers, -/384/384 threads
  matmul_rows_chosen16_affine4_64_bf16: 65 registers, -/384/768 threads
""",
        )

    @pytest.mark.sweep
    def test_int8(self):
        self.assertExpectedInline(
            costs("int8", "bf16"),
            """\
affine8_64, 1 tokens, 4 of 32
  matmul_rows_affine8_64_bf16: 5.26 4.66 slots a MAC, 48.5 registers, 64/384/1024 threads
  expert_down_affine8_64_bf16: 6.00 5.43 slots a MAC, 57 registers, 128/384/832 threads
affine8_64, 3 tokens, 2 of 4
  matmul_rows_few_split_affine8_64_bf16: 5.56 5.26 slots a MAC, 110.5 registers, 128/256/448 threads
  expert_down_few_affine8_64_bf16: 6.16 5.61 slots a MAC, 91 registers, 256/256/576 threads
affine8_64, 8 tokens, 4 of 32
  matmul_rows_few_affine8_64_bf16: 4.03 3.72 slots a MAC, 99.5 registers, 128/256/512 threads
  expert_down_few_affine8_64_bf16: 5.82 5.27 slots a MAC, 91 registers, 256/256/576 threads
affine8_64, 64 tokens, 4 of 32
  gemm8_affine8_64_bf16: 2.36 2.33 slots a MAC, 72.5 registers, 128/384/640 threads
  gemm8_affine8_64_bf16: 2.52 2.47 slots a MAC, 72.5 registers, 128/384/640 threads
  expert_combine_affine8_64_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
affine8_64, 256 tokens, 4 of 32
  gemm32_affine8_64_bf16: 1.49 1.47 slots a MAC, 98 registers, 128/384/512 threads
  gemm32_affine8_64_bf16: 1.61 1.58 slots a MAC, 98 registers, 128/384/512 threads
  expert_combine_affine8_64_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
affine8_64, normed, 1 tokens, 4 of 32
  matmul_rows_normed_affine8_64_bf16: 7.52 6.42 slots a MAC, 50.5 registers, 64/384/1024 threads
  expert_down_affine8_64_bf16: 6.00 5.43 slots a MAC, 57 registers, 128/384/832 threads
affine8_64, normed, chosen, 1 tokens, 4 of 32
  matmul_rows_chosen8_affine8_64_bf16: 9.91 8.75 slots a MAC, 50.5 registers, 64/384/1024 threads
  expert_down_affine8_64_bf16: 6.00 5.43 slots a MAC, 57 registers, 128/384/832 threads
queries of latents, 1 tokens
  heads_columns_affine8_64_bf16: 6.96 6.75 slots a MAC, 46.5 registers, 256/384/1024 threads
values of latents, 1 tokens
  heads_rows_affine8_64_bf16: 5.10 5.01 slots a MAC, 49.5 registers, 64/384/1024 threads
queries of latents, 2 tokens
  heads_columns_few_affine8_64_bf16: 5.00 4.85 slots a MAC, 66 registers, 256/384/768 threads
values of latents, 2 tokens
  heads_rows_few_affine8_64_bf16: 3.76 3.71 slots a MAC, 72.5 registers, 64/384/640 threads
not dispatched here
  embedding_rows_affine8_64_bf16: 43 registers, -/-/1024 threads
  gemm16_split_affine8_64_bf16: 99 registers, -/384/512 threads
  gemm32_split_affine8_64_bf16: 116 registers, -/384/448 threads
  matmul_rows_chosen16_affine8_64_bf16: 65 registers, -/384/768 threads
""",
        )

    @pytest.mark.sweep
    def test_mxfp4(self):
        self.assertExpectedInline(
            costs("mxfp4", "bf16"),
            """\
mxfp4, 1 tokens, 4 of 32
  matmul_rows_mxfp4_bf16: 6.12 5.59 slots a MAC, 38 registers, 64/384/1024 threads
  expert_down_mxfp4_bf16: 6.80 6.29 slots a MAC, 46.5 registers, 128/384/1024 threads
mxfp4, 3 tokens, 2 of 4
  matmul_rows_few_split_mxfp4_bf16: 6.19 5.93 slots a MAC, 94 registers, 128/256/512 threads
  expert_down_few_mxfp4_bf16: 6.53 6.02 slots a MAC, 80.5 registers, 256/256/576 threads
mxfp4, 8 tokens, 4 of 32
  matmul_rows_few_mxfp4_bf16: 4.84 4.58 slots a MAC, 83 registers, 128/256/576 threads
  expert_down_few_mxfp4_bf16: 6.34 5.84 slots a MAC, 80.5 registers, 256/256/576 threads
mxfp4, 64 tokens, 4 of 32
  gemm8_mxfp4_bf16: 2.63 2.61 slots a MAC, 68.5 registers, 128/384/704 threads
  gemm8_mxfp4_bf16: 2.78 2.75 slots a MAC, 68.5 registers, 128/384/704 threads
  expert_combine_mxfp4_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
mxfp4, 256 tokens, 4 of 32
  gemm32_mxfp4_bf16: 1.55 1.54 slots a MAC, 94 registers, 128/384/512 threads
  gemm32_mxfp4_bf16: 1.67 1.65 slots a MAC, 94 registers, 128/384/512 threads
  expert_combine_mxfp4_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
mxfp4, normed, 1 tokens, 4 of 32
  matmul_rows_normed_mxfp4_bf16: 8.38 7.34 slots a MAC, 40.5 registers, 64/384/1024 threads
  expert_down_mxfp4_bf16: 6.80 6.29 slots a MAC, 46.5 registers, 128/384/1024 threads
mxfp4, normed, chosen, 1 tokens, 4 of 32
  matmul_rows_chosen8_mxfp4_bf16: 10.94 9.85 slots a MAC, 41 registers, 64/384/1024 threads
  expert_down_mxfp4_bf16: 6.80 6.29 slots a MAC, 46.5 registers, 128/384/1024 threads
queries of latents, 1 tokens
  heads_columns_mxfp4_bf16: 8.42 8.33 slots a MAC, 44 registers, 256/384/1024 threads
values of latents, 1 tokens
  heads_rows_mxfp4_bf16: 5.96 5.93 slots a MAC, 39 registers, 64/384/1024 threads
queries of latents, 2 tokens
  heads_columns_few_mxfp4_bf16: 5.73 5.65 slots a MAC, 63.5 registers, 256/384/832 threads
values of latents, 2 tokens
  heads_rows_few_mxfp4_bf16: 3.90 3.88 slots a MAC, 62 registers, 64/384/832 threads
not dispatched here
  embedding_rows_mxfp4_bf16: 35 registers, -/-/1024 threads
  gemm16_split_mxfp4_bf16: 85 registers, -/384/576 threads
  gemm32_split_mxfp4_bf16: 121 registers, -/384/384 threads
  matmul_rows_chosen16_mxfp4_bf16: 65 registers, -/384/768 threads
""",
        )

    @pytest.mark.sweep
    def test_registers_of_formats_of_mlx(self):
        self.assertExpectedInline(
            registers_of_formats("bf16", "affine", "mx", "nv"),
            """\
mxfp4: rows 38 normed 40.5 few 83 few_split 94 down 46.5 down_few 80.5 combine 19 gemm8 68.5 gemm32
  94 chosen8 41 chosen16 65 gemm16_split 85 gemm32_split 121 embedding 35 heads 39 heads_rows_few 62
  heads_columns 44 heads_columns_few 63.5
mxfp8: rows 45 normed 47.5 few 95 few_split 106 down 53.5 down_few 86.5 combine 19 gemm8 68.5 gemm32
  94 chosen8 47.5 chosen16 65 gemm16_split 97 gemm32_split 114 embedding 43 heads 46 heads_rows_few
  68 heads_columns 44 heads_columns_few 63.5
nvfp4: rows 33.5 normed 35.5 few 72.5 few_split 83.5 down 42 down_few 75 combine 19 gemm8 64.5
  gemm32 90 chosen8 41 chosen16 65 gemm16_split 73 gemm32_split 109 embedding 35 heads 34.5
  heads_rows_few 56.5 heads_columns 43 heads_columns_few 62.5
affine4_64: rows 42.5 normed 44.5 few 89 few_split 100 down 51 down_few 86.5 combine 19 gemm8 68.5
  gemm32 94 chosen8 44.5 chosen16 65 gemm16_split 91 gemm32_split 127 embedding 35 heads 43.5
  heads_rows_few 68 heads_columns 45.5 heads_columns_few 65
affine4_32: rows 42.5 normed 44.5 few 89 few_split 100 down 51 down_few 86.5 combine 19 gemm8 68.5
  gemm32 94 chosen8 44.5 chosen16 65 gemm16_split 91 gemm32_split 127 embedding 35 heads 43.5
  heads_rows_few 68 heads_columns 45.5 heads_columns_few 65
affine4_128: rows 42.5 normed 44.5 few 89 few_split 100 down 51 down_few 86.5 combine 19 gemm8 68.5
  gemm32 94 chosen8 44.5 chosen16 65 gemm16_split 91 gemm32_split 127 embedding 35 heads 43.5
  heads_rows_few 68 heads_columns 45.5 heads_columns_few 65
affine2_64: rows 50.5 few 100.5 few_split 111.5 down 59 down_few 102 combine 19 gemm8 68.5 gemm32 94
  chosen8 50.5 chosen16 65 gemm16_split 99 gemm32_split 116 embedding 35 heads 51.5 heads_rows_few
  83.5 heads_columns 45.5 heads_columns_few 65
affine3_64: rows 42 normed 44.5 few 89 few_split 100 down 50.5 down_few 86.5 combine 19 gemm8 72
  gemm32 102 chosen8 44.5 chosen16 65 gemm16_split 83 gemm32_split 119 embedding 51 heads 43
  heads_rows_few 68 heads_columns 62.5 heads_columns_few 97
affine5_64: rows 44.5 normed 46.5 few 93 few_split 104 down 53 down_few 88.5 combine 19 gemm8 80
  gemm32 110 chosen8 46.5 chosen16 65 gemm16_split 91 gemm32_split 127 embedding 51 heads 45.5
  heads_rows_few 70 heads_columns 64.5 heads_columns_few 99
affine6_64: rows 46.5 normed 48.5 few 96.5 few_split 107.5 down 55 down_few 90 combine 19 gemm8 72.5
  gemm32 98 chosen8 48.5 chosen16 65 gemm16_split 95 gemm32_split 112 embedding 43 heads 47.5
  heads_rows_few 71.5 heads_columns 46.5 heads_columns_few 66
affine8_64: rows 48.5 normed 50.5 few 99.5 few_split 110.5 down 57 down_few 91 combine 19 gemm8 72.5
  gemm32 98 chosen8 50.5 chosen16 65 gemm16_split 99 gemm32_split 116 embedding 43 heads 49.5
  heads_rows_few 72.5 heads_columns 46.5 heads_columns_few 66
""",
        )

    @pytest.mark.sweep
    def test_registers_of_blocks_of_gguf(self):
        self.assertExpectedInline(
            registers_of_formats("bf16", "q"),
            """\
q4_0: rows 39.5 normed 41.5 few 85 few_split 96 down 48 down_few 83.5 combine 19 gemm8 64.5 gemm32
  90 chosen8 41.5 chosen16 65 gemm16_split 87 gemm32_split 123 embedding 35 heads 40.5
  heads_rows_few 65 heads_columns 43 heads_columns_few 62.5
q4_1: rows 42.5 normed 44.5 few 89 few_split 100 down 51 down_few 86.5 combine 19 gemm8 66.5 gemm32
  92 chosen8 44.5 chosen16 65 gemm16_split 87 gemm32_split 123 embedding 35 heads 43.5
  heads_rows_few 68 heads_columns 45 heads_columns_few 64.5
q5_0: rows 41.5 normed 43.5 few 89 few_split 100 down 50 down_few 85.5 combine 19 gemm8 76 gemm32
  106 chosen8 43.5 chosen16 65 gemm16_split 89 gemm32_split 125 embedding 51 heads 42.5
  heads_rows_few 67 heads_columns 62 heads_columns_few 96.5
q5_1: rows 44.5 normed 46.5 few 93 few_split 104 down 53 down_few 88.5 combine 19 gemm8 78 gemm32
  108 chosen8 46.5 chosen16 65 gemm16_split 89 gemm32_split 125 embedding 51 heads 45.5
  heads_rows_few 70 heads_columns 64 heads_columns_few 98.5
q8_0: rows 45.5 normed 47.5 few 95.5 few_split 106.5 down 54 down_few 88 combine 19 gemm8 68.5
  gemm32 94 chosen8 47.5 chosen16 65 gemm16_split 97 gemm32_split 114 embedding 43 heads 46.5
  heads_rows_few 69.5 heads_columns 44 heads_columns_few 63.5
q2_k: rows 57.5 few 112.5 few_split 123.5 down 66 down_few 108 combine 19 gemm8 72.5 gemm32 98
  chosen8 57.5 chosen16 65 gemm16_split 111 gemm32_split 128 embedding 36 heads 58.5 heads_rows_few
  89.5 heads_columns 45.5 heads_columns_few 65
q3_k: rows 45 normed 47.5 few 94 few_split 104 down 53.5 down_few 89.5 combine 19 gemm8 81 gemm32
  111 chosen8 47.5 chosen16 65 gemm16_split 92 gemm32_split 109 embedding 53 heads 46 heads_rows_few
  71 heads_columns 64.5 heads_columns_few 99
q4_k: rows 47.5 normed 49.5 few 98 few_split 108 down 56 down_few 91.5 combine 19 gemm8 72.5 gemm32
  98 chosen8 49.5 chosen16 65 gemm16_split 96 gemm32_split 113 embedding 37 heads 48.5
  heads_rows_few 73 heads_columns 46.5 heads_columns_few 66
q5_k: rows 49.5 normed 51.5 few 102 few_split 112 down 58 down_few 93.5 combine 19 gemm8 85 gemm32
  115 chosen8 51.5 chosen16 65 gemm16_split 96 gemm32_split 113 embedding 53 heads 50.5
  heads_rows_few 75 heads_columns 65.5 heads_columns_few 100
q6_k: rows 48.5 normed 50.5 few 100.5 few_split 111.5 down 57 down_few 92 combine 19 gemm8 77.5
  gemm32 103 chosen8 50.5 chosen16 65 gemm16_split 103 gemm32_split 120 embedding 44 heads 49.5
  heads_rows_few 73.5 heads_columns 48.5 heads_columns_few 68
""",
        )

    @pytest.mark.sweep
    def test_registers_of_points_and_levels_of_gguf(self):
        self.assertExpectedInline(
            registers_of_formats("bf16", "iq", "tq"),
            """\
iq4_nl: rows 42.5 normed 43.5 few 91.5 few_split 102.5 down 51 down_few 80 combine 19 gemm8 65.5
  gemm32 91 chosen8 43.5 chosen16 65 gemm16_split 85.5 gemm32_split 113.5 embedding 43 heads 43.5
  heads_rows_few 61.5 heads_columns 45.5 heads_columns_few 65
iq4_xs: rows 49.5 normed 50.5 few 101.5 few_split 110.5 down 58 down_few 87 combine 19 gemm8 73.5
  gemm32 99 chosen8 50.5 chosen16 65 gemm16_split 93.5 gemm32_split 121.5 embedding 45 heads 50.5
  heads_rows_few 68.5 heads_columns 50 heads_columns_few 68.5
tq2_0: rows 47.5 few 96.5 few_split 107.5 down 56 down_few 99 combine 19 gemm8 64.5 gemm32 90
  chosen8 47.5 chosen16 65 gemm16_split 93 gemm32_split 110 embedding 35 heads 48.5 heads_rows_few
  80.5 heads_columns 43 heads_columns_few 62.5
iq1_s: rows 40 few 84 few_split 95 down 48.5 down_few 82.5 combine 19 gemm8 71 gemm32 101 chosen8 41
  chosen16 65 gemm16_split 82 gemm32_split 118 embedding 75 heads 41 heads_rows_few 64 heads_columns
  61.5 heads_columns_few 96
iq1_m: rows 45.5 few 90.5 few_split 99.5 down 54 down_few 88 combine 19 gemm8 87 gemm32 117 chosen8
  45.5 chosen16 65 gemm16_split 97 gemm32_split 114 embedding 76 heads 46.5 heads_rows_few 69.5
  heads_columns 68 heads_columns_few 102.5
iq2_xxs: rows 46 few 96 few_split 107 down 54.5 down_few 88.5 combine 19 gemm8 71 gemm32 101 chosen8
  46 chosen16 65 gemm16_split 83 gemm32_split 119 embedding 75 heads 47 heads_rows_few 70
  heads_columns 60.5 heads_columns_few 95
iq2_xs: rows 51 few 104 few_split 115 down 59.5 down_few 93.5 combine 19 gemm8 95 gemm32 125 chosen8
  51 chosen16 65 gemm16_split 105 gemm32_split 122 embedding 76 heads 52 heads_rows_few 75
  heads_columns 68 heads_columns_few 102.5
iq2_s: rows 44 few 91 few_split 102 down 52.5 down_few 86.5 combine 19 gemm8 91 gemm32 121 chosen8
  44 chosen16 65 gemm16_split 101 gemm32_split 118 embedding 76 heads 45 heads_rows_few 68
  heads_columns 66 heads_columns_few 100.5
iq3_xxs: rows 55 normed 56 few 114 few_split 125 down 63.5 down_few 96.5 combine 19 gemm8 79 gemm32
  109 chosen8 56 chosen16 65 gemm16_split 95 gemm32_split 112 embedding 75 heads 56 heads_rows_few
  78 heads_columns 64.5 heads_columns_few 99
iq3_s: rows 50 normed 51.5 few 102 few_split 112 down 58.5 down_few 91.5 combine 19 gemm8 84 gemm32
  114 chosen8 51.5 chosen16 65 gemm16_split 100 gemm32_split 117 embedding 77 heads 51
  heads_rows_few 73 heads_columns 65.5 heads_columns_few 100
""",
        )
