"""What simdgroups compute in the MSL executor: reductions, shuffles, matrices."""

import numpy as np
import pytest
from simulator.shaderlib import shader_library
from simulator.testing import ACROSS, HEAD, SEEDS, floats, linux_only

pytestmark = linux_only

LANES = np.arange(32)


SIMD = {
    "simd_sum(x)": lambda x: np.full(32, x.sum()),
    "simd_product(x % 3 + 1)": lambda x: np.full(32, (x % 3 + 1).prod()),
    "simd_min(x)": lambda x: np.full(32, x.min()),
    "simd_max(x)": lambda x: np.full(32, x.max()),
    "simd_and(x | 5)": lambda x: np.full(32, np.bitwise_and.reduce(x | 5)),
    "simd_or(x)": lambda x: np.full(32, np.bitwise_or.reduce(x)),
    "simd_xor(x)": lambda x: np.full(32, np.bitwise_xor.reduce(x)),
    "simd_prefix_inclusive_sum(x)": lambda x: x.cumsum(),
    "simd_prefix_exclusive_sum(x)": lambda x: x.cumsum() - x,
    "simd_prefix_inclusive_product(x % 2 + 1)": lambda x: (x % 2 + 1).cumprod(),
    "simd_prefix_exclusive_product(x % 2 + 1)": lambda x: (x % 2 + 1).cumprod() // (x % 2 + 1),
    "simd_shuffle(x, (lane * 7) % 32)": lambda x: x[LANES * 7 % 32],
    "simd_shuffle_up(x, 3)": lambda x: np.where(LANES < 3, x, np.roll(x, 3)),
    "simd_shuffle_down(x, 3)": lambda x: np.where(LANES >= 29, x, np.roll(x, -3)),
    "simd_shuffle_xor(x, 5)": lambda x: x[LANES ^ 5],
    "simd_shuffle_rotate_up(x, 9)": lambda x: np.roll(x, 9),
    "simd_shuffle_rotate_down(x, 9)": lambda x: np.roll(x, -9),
    "simd_shuffle_and_fill_up(x, lane + 100, 2)": lambda x: np.where(
        LANES < 2, (LANES - 2) % 32 + 100, np.roll(x, 2)
    ),
    "simd_shuffle_and_fill_down(x, lane + 100, 2, 8)": lambda x: np.where(
        LANES % 8 < 6, np.roll(x, -2), LANES // 8 * 8 + (LANES + 2) % 8 + 100
    ),
    "simd_broadcast(x, 17)": lambda x: np.full(32, x[17]),
    "simd_broadcast_first(x)": lambda x: np.full(32, x[0]),
    "simd_any(x == 31)": lambda x: np.full(32, (x == 31).any()),
    "simd_all(x < 64)": lambda x: np.full(32, (x < 64).all()),
    "uint(ulong(simd_vote::vote_t(simd_ballot(x & 1))))": lambda x: np.full(32, ((x & 1) << LANES).sum()),
    "simd_is_first()": lambda x: LANES == 0,
    "simd_sum(uint2(x, 1)).y": lambda x: np.full(32, 32),
    "quad_sum(x)": lambda x: x.reshape(8, 4).sum(1).repeat(4),
    "quad_max(x)": lambda x: x.reshape(8, 4).max(1).repeat(4),
    "quad_broadcast(x, 2)": lambda x: x.reshape(8, 4)[:, 2].repeat(4),
    "quad_shuffle_xor(x, 1)": lambda x: x[LANES ^ 1],
    "quad_shuffle_up(x, 1)": lambda x: np.where(LANES % 4 < 1, x, np.roll(x, 1)),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_simdgroup_functions(seed):
    source = "kernel void lanes(device const uint* xs [[buffer(0)]], device uint* out [[buffer(1)]], "
    source += "uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) { uint x = xs[i];"
    source += "".join(f"out[{96 * k} + i] = uint({call});" for k, call in enumerate(SIMD)) + "}"
    x = np.random.default_rng(seed).integers(0, 64, 96).astype(np.uint32)
    out = np.zeros((len(SIMD), 3, 32), np.uint32)
    counters = shader_library(HEAD + source).launch("lanes", {0: x, 1: out}, (1,), (96,), seed=seed)
    assert counters.simd_operations == 3 * (len(SIMD) - 1)  # simd_is_first waits for nobody
    for (call, reference), got in zip(SIMD.items(), out, strict=True):
        for group in range(3):
            want = reference(x[32 * group : 32 * group + 32].astype(np.int64)).astype(np.int64) & 0xFFFFFFFF
            assert list(got[group]) == list(want), call


def test_reduction_over_a_part_of_a_simdgroup():
    library = shader_library(HEAD + ACROSS % "out[i] = simd_sum(1.0f) + 100 * simd_max(i);")
    out = floats(45)
    library.launch("bad", {0: out}, (1,), (45,))
    assert list(out) == [3132.0] * 32 + [4413.0] * 13


@pytest.mark.parametrize("kind", ["float", "half", "bfloat"])
def test_simdgroup_matrix(kind):
    """Products, transposed and offset loads, and each lane's two elements where Apple's GPUs have them."""
    torch = pytest.importorskip("torch")
    dtype = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}[kind]
    source = f"""
kernel void product(device const {kind}* a [[buffer(0)]], device const {kind}* b [[buffer(1)]],
    device float* d [[buffer(2)]],
                    device {kind}* layout [[buffer(3)]], device {kind}* copy [[buffer(4)]],
                        ushort lane [[thread_index_in_simdgroup]]) {{
  simdgroup_matrix<{kind}, 8, 8> ma, mb, unit(1);
  simdgroup_load(ma, a, 16, ulong2(3, 2));
  simdgroup_load(mb, b, 8, 0, true);
  simdgroup_float8x8 md = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
  simdgroup_multiply_accumulate(md, ma, mb, md);
  simdgroup_store(md, d, 8);
  for (ushort e = 0; e < 2; e++) layout[2 * lane + e] = ma.thread_elements()[e];
  for (ushort e = 0; e < 2; e++) ma.thread_elements()[e] *= {kind}(2);
  simdgroup_multiply(mb, ma, unit);
  simdgroup_store(mb, copy, 8, 0, true);
}}
"""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(12, 16, generator=generator).to(dtype),
        torch.randn(8, 8, generator=generator).to(dtype),
    )
    d, layout, copy = torch.zeros(8, 8), torch.zeros(32, 2, dtype=dtype), torch.zeros(8, 8, dtype=dtype)
    library = shader_library(HEAD + source)
    counters = library.launch("product", {0: a, 1: b, 2: d, 3: layout, 4: copy}, (1,), (32,))
    tile = a[2:10, 3:11]
    torch.testing.assert_close(d, tile.float() @ b.float().T + 0.5, rtol=1e-6, atol=1e-6)
    assert torch.equal(copy, (tile * 2).T)
    for lane in range(32):
        row, column = (lane // 4 & 4) + lane // 2 % 4, (lane // 4 & 2) * 2 + lane % 2 * 2
        assert torch.equal(layout[lane], tile[row, column : column + 2])
    assert counters.buffers[0].bytes_read == 64 * a.itemsize and counters.simd_operations == 2
