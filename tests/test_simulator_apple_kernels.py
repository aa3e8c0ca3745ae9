"""What each kernel of the package costs on Apple GPUs, by the model: a change of cost shows in review.

The texts are of bfloat16. After an intended change: EXPECTTEST_ACCEPT=1 and this file's tests.
"""

import functools
from collections.abc import Callable, Iterator

import expecttest
import pytest
import torch
from msl_probes import linux_only
from simulator import apple
from simulator.shaderlib import kernels_of

pytestmark = linux_only
M1, M3 = apple.GPUS["M1"], apple.GPUS["M3"]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
HIDDEN, INTERMEDIATE = 512, 256

# Kernels that need more registers than the M1 has for their bound: they spill there.
TOO_MANY_REGISTERS = {
    "bounds were chosen for another GPU": [],
}

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
    yield "fused_norm_add", lambda: ops.fused_norm_add(x, y, weight, 1e-6), {}, x.numel()
    yield "fused_residual_norm", lambda: ops.fused_residual_norm(x, y, weight, 1e-6), {}, x.numel()


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
    x, weights, ids = on_device(tokens, HIDDEN, dtype=dtype), on_device(tokens, slots), ids_of(tokens, slots, experts)
    pairs = tokens * slots
    work = {
        gate_up[0]: apple.Work("gate+up", pairs * 2 * INTERMEDIATE * HIDDEN),
        down[0]: apple.Work("down", pairs * HIDDEN * INTERMEDIATE),
    }
    operator = torch.ops.moe_mps.moe_experts_quantized if format_ else torch.ops.moe_mps.moe_experts
    call = functools.partial(operator, x, *gate_up, *down, ids, weights, *format_, **options)
    return f"{label}, {tokens} tokens, {slots} of {experts}", call, work, tokens * HIDDEN


def dense(dtype: torch.dtype) -> Iterator[Call]:
    def rows_first(experts: int, rows: int, inputs: int) -> tuple:
        return (on_device(experts, rows, inputs, dtype=dtype),)

    def columns_first(experts: int, rows: int, inputs: int) -> tuple:
        return (on_device(experts, inputs, rows, dtype=dtype),)

    for tokens in (1, 8, 64):
        yield layer("dense", tokens, 32, 4, dtype, rows_first)
    for tokens in (1, 64):
        yield layer("transposed", tokens, 32, 4, dtype, columns_first, transposed=True)


def quantised(dtype: torch.dtype, bits: int, mode: str, groups: tuple[int, ...]) -> Iterator[Call]:
    def stack(experts: int, rows: int, inputs: int, group: int) -> tuple:
        words = torch.randint(-(2**31), 2**31, (experts, rows, inputs * bits // 32), dtype=torch.int64)
        shape = (experts, rows, inputs // group)
        if mode == "mxfp4":
            return words.int().to("mps"), torch.full(shape, 120, dtype=torch.uint8).to("mps"), None
        return words.int().to("mps"), on_device(*shape, dtype=dtype), on_device(*shape, dtype=dtype)

    for group in groups:
        matrices = functools.partial(stack, group=group)
        for tokens, experts, slots in ((1, 32, 4), (3, 4, 2), (8, 32, 4), (64, 32, 4)):
            if group == groups[0] or 1 < tokens < 64:
                label = f"{mode} {bits} bits in {group}"
                yield layer(label, tokens, experts, slots, dtype, matrices, bits, group, mode)


LIBRARIES = {
    "norms": norms,
    "combine": combine,
    "routing": routing,
    "dense": dense,
    "int4": functools.partial(quantised, bits=4, mode="affine", groups=(64, 32)),
    "int8": functools.partial(quantised, bits=8, mode="affine", groups=(64, 32)),
    "mxfp4": functools.partial(quantised, bits=4, mode="mxfp4", groups=(32,)),
}


# Lines -------------------------------------------------------------------------------------------------


def is_of(kernel: str, dtype: str) -> bool:
    """Whether a kernel is for this dtype, or for all."""
    return dtype in kernel.split("_") or not set(DTYPES) & set(kernel.split("_"))


def register_text(name: str, path) -> str:
    registers, declared = apple.registers(path, name), kernels_of(path)[name].max_threads
    allowed = apple.threads_for(registers.halves)
    return f"{registers.registers:g} registers, bound {declared or 'none'}, M1 allows {allowed or 'none'}"


def lines(calls: Iterator[Call], dtype: str) -> list[str]:
    """A line for each dispatch, and for each kernel of the same libraries that no call dispatched."""
    found, seen, paths = [], set(), set()
    for label, call, work, elements in calls:
        found.append(label)
        for m in apple.measure(call, work):
            m.work, unit = (m.work, "MAC") if m.work else (apple.Work("", elements), "element")
            slots = f"{m.slots_per_mac(M1):.2f} {m.slots_per_mac(M3):.2f} slots a {unit}"
            found.append(f"  {m.kernel}: {slots}, {m.threads} threads, {register_text(m.kernel, m.library)}")
            seen.add(m.kernel)
            paths.add(m.library)
    others = {(name, path) for path in paths for name in kernels_of(path) if is_of(name, dtype)}
    rest = sorted((name, path) for name, path in others if name not in seen)
    return found + ["in other calls"] * bool(rest) + [f"  {n}: {register_text(n, p)}" for n, p in rest]


@functools.cache
def text_of(library: str, dtype: str) -> str:
    torch.manual_seed(0)
    return "\n".join(lines(LIBRARIES[library](DTYPES[dtype]), dtype)) + "\n"


@pytest.mark.usefixtures("simulated")
class TestCosts(expecttest.TestCase):
    """On the M1 and M2, and from the M3 on, where bfloat16 is native."""

    def test_norms(self):
        self.assertExpectedInline(text_of("norms", "bf16"), """""")

    def test_combine(self):
        self.assertExpectedInline(text_of("combine", "bf16"), """""")

    def test_routing(self):
        self.assertExpectedInline(text_of("routing", "bf16"), """""")

    def test_dense(self):
        self.assertExpectedInline(text_of("dense", "bf16"), """""")

    def test_int4(self):
        self.assertExpectedInline(text_of("int4", "bf16"), """""")

    def test_int8(self):
        self.assertExpectedInline(text_of("int8", "bf16"), """""")

    def test_mxfp4(self):
        self.assertExpectedInline(text_of("mxfp4", "bf16"), """""")
