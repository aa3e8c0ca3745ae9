"""What each kernel of the package costs on Apple GPUs, by the model: a change of cost shows in review.

The texts are of bfloat16. After an intended change: EXPECTTEST_ACCEPT=1 and this file's tests.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

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

UNDECLARED_THREADS = 384  # what Apple's compiler may go down to where a kernel declares no bound

# Kernels that need more registers than the M1 has for their bound, and spill there, by reason. {} is a dtype.
TOO_MANY_REGISTERS = {
    "their bounds and what they hold at once were chosen on another GPU": """
        expert_rows_matrix_affine4_{} expert_rows_matrix_affine4_groups32_{}
        expert_rows_matrix_affine8_{} expert_rows_matrix_affine8_groups32_{}
        expert_down_matrix_affine4_{} expert_down_matrix_affine4_groups32_{}
        expert_down_matrix_affine8_{} expert_down_matrix_affine8_groups32_{}
        expert_down_parts_affine4_{} expert_down_parts_affine4_groups32_{}
        expert_down_parts_affine8_{} expert_down_parts_affine8_groups32_{}
        expert_down_single_affine4_{} expert_down_single_affine8_{} expert_down_single_mxfp4_{}
        expert_rows_few_{} expert_down_few_{} expert_rows_few_mxfp4_{} expert_down_few_mxfp4_{}
    """,
    "a bound of 1024 leaves 52 registers, one of 512 leaves 104": """
        gate_{}_1 gate_{}_4 gate_{}_16 bucket_pairs_i64
        norm_add_bf16 norm_add_f32 residual_norm_{} weighted_sum_norm_f32
    """,
    "a lane holds 32 experts' scores, more than it has registers for": "route_{}_32",
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
    *_, last = dense(dtype)  # of many tokens: their sum is a dispatch of its own
    label, call, _, elements = last
    yield label, call, {}, elements


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
    x, weights, ids = (
        on_device(tokens, HIDDEN, dtype=dtype),
        on_device(tokens, slots),
        ids_of(tokens, slots, experts),
    )
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


GROUPS = {
    "norms": norms,
    "combine": combine,
    "routing": routing,
    "dense": dense,
    "int4": functools.partial(quantised, bits=4, mode="affine", groups=(64, 32)),
    "int8": functools.partial(quantised, bits=8, mode="affine", groups=(64, 32)),
    "mxfp4": functools.partial(quantised, bits=4, mode="mxfp4", groups=(32,)),
}


# Costs -------------------------------------------------------------------------------------------------


class Costs(NamedTuple):
    text: str  # a line for each dispatch, and for each kernel of the same libraries that no call dispatches
    kernels: set[str]  # of the libraries
    unfit: set[str]  # those that need more registers than the M1 has for their bound


def is_of(kernel: str, dtype: str) -> bool:
    """Whether a kernel is for this dtype, or for all."""
    return dtype in kernel.split("_") or not set(DTYPES) & set(kernel.split("_"))


def register_text(name: str, library: Path, launched: object) -> str:
    found, bound = apple.registers(library, name), kernels_of(library)[name].max_threads
    return (
        f"{found.registers:g} registers, {launched}/{bound or '-'}/{apple.threads_for(found.halves)} threads"
    )


def fits(name: str, library: Path) -> bool:
    bound = kernels_of(library)[name].max_threads or UNDECLARED_THREADS
    return apple.threads_for(apple.registers(library, name).halves) >= bound


def dispatch_line(m: apple.Measurement, elements: int) -> str:
    unit = "a MAC" if m.work else "an element"
    m.work = m.work or apple.Work("", elements)
    slots = f"{m.slots_per_mac(M1):.2f} {m.slots_per_mac(M3):.2f} slots {unit}"
    return f"  {m.kernel}: {slots}, {register_text(m.kernel, m.library, m.threads)}"


@functools.cache
def costs(group: str, dtype: str) -> Costs:
    """Of a group's own libraries: that of its first dispatch, and those of products."""
    torch.manual_seed(0)
    found, seen, own = [], set(), set()
    for label, call, work, elements in GROUPS[group](DTYPES[dtype]):
        found.append(label)
        measurements = apple.measure(call, work)
        own |= {m.library for m in measurements if m.work or not own}
        found += [dispatch_line(m, elements) for m in measurements if m.library in own]
        seen |= {m.kernel for m in measurements}
    kernels = sorted((name, path) for path in own for name in kernels_of(path) if is_of(name, dtype))
    rest = [f"  {name}: {register_text(name, path, '-')}" for name, path in kernels if name not in seen]
    lines = found + ["not dispatched here"] * bool(rest) + rest
    unfit = {name for name, path in kernels if not fits(name, path)}
    return Costs("\n".join(lines) + "\n", {name for name, _ in kernels}, unfit)


def known(dtype: str) -> set[str]:
    names = (name.format(dtype) for names in TOO_MANY_REGISTERS.values() for name in names.split())
    return {name for name in names if is_of(name, dtype)}


@pytest.mark.parametrize("group", GROUPS)
def test_registers_fit_the_bound(simulated, group):
    """Of those known not to, none fits by now."""
    found = costs(group, "bf16")
    assert found.unfit - known("bf16") == set(), "these need more registers than their bound leaves on the M1"
    assert (found.kernels & known("bf16")) - found.unfit == set(), "these fit: take them off the list"


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("group", GROUPS)
def test_registers_fit_the_bound_of_other_dtypes(simulated, group, dtype):
    found = costs(group, dtype)
    assert found.unfit - known(dtype) == set()
    assert (found.kernels & known(dtype)) - found.unfit == set()


@pytest.mark.usefixtures("simulated")
class TestCosts(expecttest.TestCase):
    """Issue slots of a lane on the M1 and M2, and from the M3 on, where bfloat16 is native; 32-bit registers;
    threads of a threadgroup as launched, as declared, and as the M1's registers allow (0: it spills)."""

    def test_norms(self):
        self.assertExpectedInline(
            costs("norms", "bf16").text,
            """\
fused_norm_add
  norm_add_bf16: 42.50 35.50 slots an element, 54 registers, 512/1024/896 threads
fused_residual_norm
  residual_norm_bf16: 50.75 38.75 slots an element, 53 registers, 512/1024/896 threads
""",
        )

    def test_combine(self):
        self.assertExpectedInline(
            costs("combine", "bf16").text,
            """\
silu_mul_stacked
  silu_mul_stacked_bf16: 20.75 14.75 slots an element, 13 registers, 128/-/1024 threads
weighted_sum_stacked
  weighted_sum_bf16: 26.44 9.94 slots an element, 62 registers, 32/-/832 threads
weighted_sum_residual_norm_stacked_
  weighted_sum_norm_bf16: 34.56 16.31 slots an element, 81.5 registers, 512/512/576 threads
transposed, 64 tokens, 4 of 32
  expert_combine_bf16: 40.50 32.50 slots an element, 19 registers, 256/-/1024 threads
""",
        )

    def test_routing(self):
        self.assertExpectedInline(
            costs("routing", "bf16").text,
            """\
moe_router_topk_softmax of 64
  route_bf16_2: 125.25 124.25 slots an element, 23.5 registers, 32/-/1024 threads
moe_router_topk_softmax of 128
  route_bf16_4: 87.41 86.41 slots an element, 36.5 registers, 32/-/1024 threads
moe_router_topk_softmax of 256
  route_bf16_8: 69.14 68.14 slots an element, 62.5 registers, 32/-/832 threads
moe_router_topk_softmax of 512
  route_bf16_16: 59.42 58.42 slots an element, 114.5 registers, 32/-/448 threads
moe_router_topk_softmax of 1024
  route_bf16_32: 53.66 52.66 slots an element, 218.5 registers, 32/-/0 threads
moe_gate of 1
  gate_bf16_1: 9.03 8.03 slots a MAC, 148 registers, 1024/1024/0 threads
moe_gate of 65
  gate_bf16_4: 3.56 3.30 slots a MAC, 148 registers, 512/512/0 threads
moe_gate of 1024
  gate_bf16_16: 2.88 2.82 slots a MAC, 148 registers, 512/512/0 threads
moe_bucket torch.int32
  bucket_pairs_i32: 190.50 161.50 slots an element, 36 registers, 128/1024/1024 threads
moe_compute_ids_tpe torch.int32
  ids_by_expert_i32: 3365.25 3365.25 slots an element, 13 registers, 256/1024/1024 threads
moe_bucket torch.int64
  bucket_pairs_i64: 188.50 159.50 slots an element, 59 registers, 128/1024/832 threads
moe_compute_ids_tpe torch.int64
  ids_by_expert_i64: 3300.25 3300.25 slots an element, 14 registers, 256/1024/1024 threads
""",
        )

    def test_dense(self):
        self.assertExpectedInline(
            costs("dense", "bf16").text,
            """\
dense, 1 tokens, 4 of 32
  expert_rows_single_bf16: 5.39 4.08 slots a MAC, 45 registers, 256/-/1024 threads
  expert_down_single_bf16: 6.79 5.51 slots a MAC, 56.5 registers, 128/512/832 threads
dense, 8 tokens, 4 of 32
  expert_rows_few_bf16: 6.04 5.05 slots a MAC, 131.5 registers, 256/512/0 threads
  expert_down_few_bf16: 6.48 5.57 slots a MAC, 124 registers, 256/512/384 threads
dense, 64 tokens, 4 of 32
  expert_gemm_bf16: 2.68 2.68 slots a MAC, 82 registers, 128/128/576 threads
  expert_gemm_bf16: 2.83 2.82 slots a MAC, 82 registers, 128/128/576 threads
transposed, 1 tokens, 4 of 32
  expert_columns_single_bf16: 14.57 12.57 slots a MAC, 46.5 registers, 512/512/1024 threads
  expert_down_columns_single_bf16: 14.83 12.83 slots a MAC, 34 registers, 512/512/1024 threads
transposed, 64 tokens, 4 of 32
  expert_gemm_transposed_bf16: 3.51 3.51 slots a MAC, 106 registers, 128/128/448 threads
  expert_gemm_transposed_bf16: 3.70 3.69 slots a MAC, 106 registers, 128/128/448 threads
""",
        )

    def test_int4(self):
        self.assertExpectedInline(
            costs("int4", "bf16").text,
            """\
affine 4 bits in 64, 1 tokens, 4 of 32
  expert_rows_single_affine4_bf16: 9.08 8.39 slots a MAC, 71.5 registers, 256/-/704 threads
  expert_down_single_affine4_bf16: 17.16 15.88 slots a MAC, 82 registers, 128/1024/576 threads
affine 4 bits in 64, 3 tokens, 2 of 4
  expert_rows_matrix_affine4_bf16: 7.91 7.09 slots a MAC, 201 registers, 128/512/0 threads
  expert_down_parts_affine4_bf16: 19.79 17.04 slots a MAC, 142 registers, 512/512/0 threads
affine 4 bits in 64, 8 tokens, 4 of 32
  expert_rows_matrix_affine4_bf16: 10.66 10.00 slots a MAC, 201 registers, 128/512/0 threads
  expert_down_matrix_affine4_bf16: 14.76 12.78 slots a MAC, 182 registers, 384/384/0 threads
affine 4 bits in 64, 64 tokens, 4 of 32
  expert_gemm_affine4_bf16: 3.47 2.95 slots a MAC, 79 registers, 128/128/640 threads
  expert_gemm_affine4_bf16: 3.62 3.09 slots a MAC, 79 registers, 128/128/640 threads
affine 4 bits in 32, 3 tokens, 2 of 4
  expert_rows_matrix_affine4_groups32_bf16: 9.10 6.76 slots a MAC, 240 registers, 128/512/0 threads
  expert_down_parts_affine4_groups32_bf16: 23.22 18.35 slots a MAC, 158 registers, 512/512/0 threads
affine 4 bits in 32, 8 tokens, 4 of 32
  expert_rows_matrix_affine4_groups32_bf16: 9.00 7.74 slots a MAC, 240 registers, 128/512/0 threads
  expert_down_matrix_affine4_groups32_bf16: 16.54 13.43 slots a MAC, 212 registers, 384/384/0 threads
""",
        )

    def test_int8(self):
        self.assertExpectedInline(
            costs("int8", "bf16").text,
            """\
affine 8 bits in 64, 1 tokens, 4 of 32
  expert_rows_single_affine8_bf16: 6.41 5.97 slots a MAC, 61.5 registers, 256/-/832 threads
  expert_down_single_affine8_bf16: 11.82 11.04 slots a MAC, 72 registers, 128/1024/704 threads
affine 8 bits in 64, 3 tokens, 2 of 4
  expert_rows_matrix_affine8_bf16: 8.94 7.06 slots a MAC, 184.5 registers, 128/512/0 threads
  expert_down_parts_affine8_bf16: 19.24 17.40 slots a MAC, 122.5 registers, 512/512/384 threads
affine 8 bits in 64, 8 tokens, 4 of 32
  expert_rows_matrix_affine8_bf16: 11.04 8.28 slots a MAC, 184.5 registers, 128/512/0 threads
  expert_down_matrix_affine8_bf16: 16.60 13.97 slots a MAC, 161.5 registers, 384/384/0 threads
affine 8 bits in 64, 64 tokens, 4 of 32
  expert_gemm_affine8_bf16: 3.49 2.97 slots a MAC, 81 registers, 128/128/576 threads
  expert_gemm_affine8_bf16: 3.64 3.11 slots a MAC, 81 registers, 128/128/576 threads
affine 8 bits in 32, 3 tokens, 2 of 4
  expert_rows_matrix_affine8_groups32_bf16: 8.47 7.03 slots a MAC, 211 registers, 128/512/0 threads
  expert_down_parts_affine8_groups32_bf16: 21.72 18.05 slots a MAC, 132 registers, 512/512/0 threads
affine 8 bits in 32, 8 tokens, 4 of 32
  expert_rows_matrix_affine8_groups32_bf16: 9.27 8.22 slots a MAC, 211 registers, 128/512/0 threads
  expert_down_matrix_affine8_groups32_bf16: 17.54 14.24 slots a MAC, 172 registers, 384/384/0 threads
""",
        )

    def test_mxfp4(self):
        self.assertExpectedInline(
            costs("mxfp4", "bf16").text,
            """\
mxfp4 4 bits in 32, 1 tokens, 4 of 32
  expert_rows_single_mxfp4_bf16: 12.30 11.73 slots a MAC, 65 registers, 256/-/768 threads
  expert_down_single_mxfp4_bf16: 23.60 22.57 slots a MAC, 76.5 registers, 128/1024/640 threads
mxfp4 4 bits in 32, 3 tokens, 2 of 4
  expert_rows_few_mxfp4_bf16: 9.71 9.19 slots a MAC, 149 registers, 256/512/0 threads
  expert_down_few_mxfp4_bf16: 20.03 19.10 slots a MAC, 141.5 registers, 256/512/0 threads
mxfp4 4 bits in 32, 8 tokens, 4 of 32
  expert_rows_few_mxfp4_bf16: 11.35 10.88 slots a MAC, 149 registers, 256/512/0 threads
  expert_down_few_mxfp4_bf16: 19.63 18.88 slots a MAC, 141.5 registers, 256/512/0 threads
mxfp4 4 bits in 32, 64 tokens, 4 of 32
  expert_gemm_mxfp4_bf16: 3.84 3.34 slots a MAC, 76.5 registers, 128/128/640 threads
  expert_gemm_mxfp4_bf16: 3.99 3.47 slots a MAC, 76.5 registers, 128/128/640 threads
""",
        )
