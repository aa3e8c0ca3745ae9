"""mpp::tensor_ops: right programs are right in every layout, and each kind of mistake is found."""

import numpy as np
import pytest
import torch
from simulator.errors import ShaderError, SimulatorError
from simulator.language import strict
from simulator.shaderlib import shader_library
from simulator.testing import SEEDS, linux_only

pytestmark = linux_only
HEAD = """
#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""
# Rows of x [16, 64] times rows of w [64, 64], staged half by half. `fault` chooses a mistake.
PRODUCT = """
enum { none, no_fill, layout, no_barrier_before, no_barrier_after, wrong_barrier, missing_simdgroup,
       missing_lanes, invalid_index, past_the_end, different_operands, wide_stride, wide_operand,
       out_of_memory, places };
kernel void product(device const half* x [[buffer(0)]], device const half* w [[buffer(1)]],
                    device float* out [[buffer(2)]], constant uint& fault [[buffer(3)]],
                    uint i [[thread_index_in_threadgroup]]) {
  threadgroup half rows[16 * 32];
  threadgroup half weights[64 * 32];
  threadgroup float result[16 * 64];
  constexpr auto d = matmul2d_descriptor(16, 64, 32, false, true, false,
                                         matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<d, execution_simdgroups<4>> op;
  typedef dextents<int32_t, 2> Size;
  typedef tensor<threadgroup half, Size, tensor_inline> Operand;
  Operand left(rows, Size(32, 16)), right(weights, Size(32, 64));
  auto sums = op.get_destination_cooperative_tensor<Operand, Operand, float>();
  for (ushort e = 0; e < sums.get_capacity(); e++)
    if (fault != no_fill && sums.is_valid_element(e)) sums[e] = 0.0f;
  if (fault == different_operands) left.msl_data += i % 2;
  if (fault == wide_stride) left.msl_strides[0] = 2;
  if (fault == wide_operand) right.msl_sizes[0] = 40;
  if (fault == out_of_memory) left.msl_data += 16;
  for (int part = 0; part < 2; part++) {
    if (fault != no_barrier_before) threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = i; j < 16 * 32; j += 128) rows[j] = x[j / 32 * 64 + part * 32 + j % 32];
    for (uint j = i; j < 64 * 32; j += 128) weights[j] = w[j / 32 * 64 + part * 32 + j % 32];
    if (fault == wrong_barrier) simdgroup_barrier(mem_flags::mem_threadgroup);
    else if (fault != no_barrier_after) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!(fault == missing_simdgroup && i >= 96) && !(fault == missing_lanes && i % 32 == 31))
      op.run(left, right, sums);
  }
  if (fault == places) {
    for (ushort e = 0; e < 8; e++) out[e * 128 + i] = sums[e];
  } else if (fault == layout) {  // as if threads had neighbouring elements in order
    for (ushort e = 0; e < 8; e++) out[i * 8 + e] = sums[e];
  } else if (fault == invalid_index) {
    for (ushort e = 0; e < sums.get_capacity(); e++) {
      const auto at = sums.get_multidimensional_index(e);
      out[at[1] * 64 + at[0]] = sums[e];
    }
  } else if (fault == past_the_end) {
    out[i] = sums[sums.get_capacity()];
  } else {
    auto to = tensor<threadgroup float, Size, tensor_inline>(result, Size(64, 16));
    sums.store(to);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = i; j < 16 * 64; j += 128) out[j] = result[j];
  }
}
"""


def launch(source: str, name: str, shape: tuple, threads: int, seed: int = 0, fault: int = 0):
    """What a kernel writes, and what is right."""
    (m, n, k), random = shape, np.random.default_rng(7)
    x, w = (random.standard_normal(s).astype(np.float16) for s in ((m, k), (n, k)))
    out = np.full((m, n), np.nan, np.float32)
    buffers = {0: x, 1: w, 2: out, 3: np.uint32(fault)}
    shader_library(HEAD + source).launch(name, buffers, (1,), (threads,), seed=seed)
    return out, x.astype(np.float64) @ w.astype(np.float64).T


def product(fault: str = "none", seed: int = 0, threads: int = 128):
    faults = PRODUCT.split("{")[1].split("}")[0].replace("\n", " ").split(",")
    return launch(PRODUCT, "product", (16, 64, 64), threads, seed, [f.strip() for f in faults].index(fault))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_program_is_right_in_every_layout(seed):
    np.testing.assert_allclose(*product(seed=seed), atol=1e-4)


def test_a_program_that_relies_on_a_layout_is_wrong():
    for seed in SEEDS:
        out, expected = product("layout", seed)
        assert not np.allclose(out, expected, atol=1e-1)


def test_the_layout_changes_with_the_schedule():
    first, again, other = (product("places", seed)[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other, equal_nan=True)


def test_a_destination_that_is_not_filled_is_nan():
    assert np.isnan(product("no_fill")[0]).all()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "no_barrier_after",
            r"reads .*'(rows|weights)'.* which thread .* wrote with no barrier.*matmul2d::run",
        ),
        ("wrong_barrier", r"reads .*'(rows|weights)'.* which thread .* wrote with no barrier"),
        ("no_barrier_before", r"writes .*'(rows|weights)'.* which several threads read with no barrier"),
        ("missing_simdgroup", r"divergent operation of the threadgroup.* waits at matmul2d::run"),
        ("missing_lanes", r"divergent operation of the threadgroup"),
        ("invalid_index", "get_multidimensional_index of an element that is not valid"),
        ("past_the_end", "a cooperative tensor is read past its capacity"),
        ("different_operands", r"the threads pass different tensors to run\(\)"),
        ("wide_stride", "the innermost stride of a tensor must be 1"),
        ("wide_operand", r"an operand of run\(\) has more columns than the product has K"),
        ("out_of_memory", "'rows'"),
    ],
)
def test_mistakes_are_found(fault, message):
    for seed in SEEDS[:2]:
        with pytest.raises(SimulatorError, match=message):
            product(fault, seed)


@pytest.mark.parametrize(
    ("threads", "message"),
    [
        (64, "an operation of 4 simdgroups, the threadgroup has 64 threads"),
        (256, "this thread is outside of the operation's scope"),
    ],
)
def test_a_wrong_scope_is_found(threads, message):
    with pytest.raises(SimulatorError, match=message):
        product(threads=threads)


WAYS = """
typedef tensor<device const half, dextents<int, 2>, tensor_inline> Operand;
typedef tensor<device float, dextents<int, 2>, tensor_inline> Result;
#define ARGUMENTS device const half* x [[buffer(0)]], device const half* w [[buffer(1)]], \
    device float* out [[buffer(2)]], constant uint& fault [[buffer(3)]]
#define OPERANDS Operand left(x, dextents<int, 2>(48, 16)), right(w, dextents<int, 2>(48, 32)); \
    Result to(out, dextents<int, 2>(32, 16))

// K from the operands, the product in memory.
kernel void in_memory(ARGUMENTS) {
  OPERANDS;
  matmul2d<matmul2d_descriptor(16, 32, -1, false, true), execution_simdgroup> op;
  op.run(left, right, to);
}
// Operands in registers: filled by their indices, and loaded.
kernel void in_registers(ARGUMENTS) {
  OPERANDS;
  constexpr auto d = matmul2d_descriptor(16, 32, 16, false, true, false,
                                         matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<d, execution_simdgroup> op;
  typedef decltype(op.get_left_input_cooperative_tensor<half, half, float>()) Left;
  typedef decltype(op.get_right_input_cooperative_tensor<half, half, float>()) Right;
  Left a = op.get_left_input_cooperative_tensor<half, half, float>();
  Right b = op.get_right_input_cooperative_tensor<half, half, float>();
  auto c = op.get_destination_cooperative_tensor<Left, Right, float>();
  for (ushort e = 0; e < c.get_capacity(); e++) c[e] = 0.0f;
  for (int k = 0; k < 48; k += 16) {
    for (ushort e = 0; e < a.get_capacity(); e++) {
      if (!a.is_valid_element(e)) continue;
      const auto at = a.get_multidimensional_index(e);
      a[e] = x[at[1] * 48 + k + at[0]];
    }
    b.load(right.slice(k, 0));
    op.run(a, b, c);
  }
  c.store(to);
}
// A thread for itself, and slices.
kernel void one_thread(ARGUMENTS, uint lane [[thread_index_in_simdgroup]]) {
  if (lane != 5) return;
  OPERANDS;
  matmul2d<matmul2d_descriptor(4, 32, 48, false, true), execution_thread> op;
  for (int row = 0; row < 16; row += 4) {
    auto part = left.slice<48, 4>(0, row);
    auto result = to.slice(0, row);
    op.run(part, right, result);
  }
}
// Beyond the extents zeros are read and nothing is written.
kernel void edges(ARGUMENTS) {
  OPERANDS;
  matmul2d<matmul2d_descriptor(16, 64, 64, false, true), execution_simdgroup> op;
  op.run(left, right, to);
}
"""


@pytest.mark.parametrize("name", ("in_memory", "in_registers", "one_thread", "edges"))
def test_other_ways_to_multiply(name):
    for seed in SEEDS[:2]:
        np.testing.assert_allclose(*launch(WAYS, name, (16, 32, 48), 32, seed), atol=1e-4)


def test_transposed_operands():
    """x [K, M] and w [K, N], in bfloat16."""
    source = """
kernel void transposed(device const bfloat* x, device const bfloat* w, device float* out) {
  typedef tensor<device const bfloat, dextents<int, 2>, tensor_inline> Operand;
  matmul2d<matmul2d_descriptor(16, 32, 48, true, false), execution_simdgroup> op;
  Operand left(x, dextents<int, 2>(16, 48)), right(w, dextents<int, 2>(32, 48));
  tensor<device float, dextents<int, 2>, tensor_inline> to(out, dextents<int, 2>(32, 16));
  op.run(left, right, to);
}"""
    x, w = (torch.randn(48, n).bfloat16() for n in (16, 32))
    out = np.full((16, 32), np.nan, np.float32)
    buffers = {0: x.view(torch.int16), 1: w.view(torch.int16), 2: out}
    shader_library(HEAD + source).launch("transposed", buffers, (1,), (32,), seed=1)
    np.testing.assert_allclose(out, (x.double().T @ w.double()).numpy(), atol=1e-4)


REFUSED = """
typedef tensor<device half, dextents<int, 2>, tensor_inline> Operand;
typedef tensor<device float, dextents<int, 2>, tensor_inline> Other;
void f(Operand left, Operand right) {
  matmul2d<matmul2d_descriptor(8, 8, 16), execution_simdgroup> rows;
  matmul2d<matmul2d_descriptor(16, 16, 8), execution_simdgroup> depth;
  matmul2d<matmul2d_descriptor(16, 16, 16), execution_simdgroups<2>> wide;
  wide.get_left_input_cooperative_tensor<half, half, float>();
  matmul2d<matmul2d_descriptor(16, 32, 48, false, true), execution_simdgroup> op;
  auto sums = op.get_destination_cooperative_tensor<Other, Operand, float>();
  op.run(left, right, sums);
}
"""
MESSAGES = (
    "M or N must be a multiple of 16",
    "K must be dynamic or a multiple of 16",
    "input cooperative tensors require a single simdgroup",
    "operands must have the types that the destination was made for",
)


def test_what_the_header_refuses():
    with pytest.raises(ShaderError) as error:
        shader_library(HEAD + REFUSED)
    assert [message for message in MESSAGES if message not in str(error.value)] == []


def test_the_strict_check():
    """It takes what is right at language 4.0, and refuses what the header does. Others know no tensors."""
    assert strict.check(HEAD + PRODUCT) == [] and strict.check(HEAD + WAYS) == []
    found = "\n".join(strict.check(HEAD + REFUSED))
    assert [message for message in MESSAGES if message not in found] == []
    missing = HEAD.replace("#include <Metal", "//") + "void f(dextents<int, 2> e) { (void)e; }\n"
    assert "dextents" in "\n".join(strict.check(missing))
    unnamed = PRODUCT.replace("<Operand, Operand, float>", "<decltype(left), decltype(right), float>")
    assert "operands must be named types" in "\n".join(strict.check(HEAD + unnamed))
    wrong_space = (
        "void f(threadgroup half* m) { tensor<device half, dextents<int, 2>, tensor_inline> t(m, {}); }\n"
    )
    assert "tensor" in "\n".join(strict.check(HEAD + wrong_space))
