"""Branches that kernels take: each condition's two outcomes, over instances of templates and dispatches."""

import numpy as np
from simulator import shader_library
from simulator.coverage import Coverage

SOURCE = """#include <metal_stdlib>
using namespace metal;
template <bool kWide>
inline float of(float x, uint limit) {
  if (kWide && x > 9.0f) return 0.0f;
  return limit > 2 ? x : -x;
}
kernel void branches(device float* x [[buffer(0)]], constant uint& limit [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
  if (i < limit || x[i] == 100.0f) {
    x[i] = of<false>(x[i], limit);
  }
  for (uint j = 0; j < limit; ++j) x[i] += 1.0f;
}
"""


def outcomes(coverage: Coverage, folder) -> dict[tuple[int, int], tuple[int, int]]:
    """{(line, number of the condition): how often it was true, and false}"""
    counts = coverage.outcomes(folder)
    return {
        (each.line, each.number): (counts[each], counts[each._replace(taken=False)])
        for each in counts
        if each.taken
    }


def test_outcomes_of_conditions(tmp_path):
    coverage, library = Coverage(), shader_library(SOURCE)
    x = np.arange(4, dtype=np.float32)

    def run(limit: int) -> None:
        library.launch("branches", {0: x, 1: np.uint32(limit)}, grid=(1,), threads=(4,), run=coverage)

    run(2)
    assert x.tolist() == [2, 1, 4, 5]  # the results are the kernel's
    first = {(10, 0): (2, 2), (10, 1): (0, 2), (6, 0): (0, 2), (13, 0): (8, 4)}
    assert outcomes(coverage, tmp_path) == first
    run(3)
    both = {(10, 0): (5, 3), (10, 1): (0, 3), (6, 0): (3, 2), (13, 0): (20, 8)}
    assert outcomes(coverage, tmp_path) == both
