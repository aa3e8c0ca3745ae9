"""Reductions that nobody here wrote: MLX's, from its wheel's headers, against MLX's CPU results.

Its matrix products are in test_cuda.py and test_apple_results.py.
"""

import numpy as np
import pytest
from simulator.errors import SimulatorError
from simulator.mlx_kernels import KERNELS, changed_headers, include_folder, source
from simulator.shaderlib import ShaderLibrary, shader_library
from simulator.testing import SEEDS, linux_only

pytestmark = linux_only
SOFTMAX, LOGSUMEXP = ("softmax_single_row", "softmax.h"), ("logsumexp", "logsumexp.h")


@pytest.fixture(scope="module")
def mx():
    return pytest.importorskip("mlx.core", reason="MLX for Linux (pip install 'mlx[cpu]') gives the results")


def compiled(kernel: str, header: str, types: str, *first: object) -> ShaderLibrary:
    """The kernel, named "k"; its header may lie in a folder that comes first."""
    root = include_folder()
    text = source(("utils.h", header)) + f'instantiate_kernel("k", {kernel}, {types})\n'
    return shader_library(text, include=(*first, changed_headers(root), root))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rows", "columns"), [(3, 1000), (2, 31), (1, 4096)])
def test_softmax(mx, rows, columns, seed):
    x = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32) * 5
    out = np.full_like(x, np.nan)
    threads = -(-columns // 4 // 32) * 32
    library = compiled(*SOFTMAX, "float, float")
    library.launch("k", {0: x, 1: out, 2: np.int32(columns)}, (rows,), (max(threads, 32),), seed=seed)
    np.testing.assert_allclose(out, np.array(mx.softmax(mx.array(x), axis=-1)), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_logsumexp(mx, seed):
    x = np.random.default_rng(seed).normal(size=(4, 515)).astype(np.float16)
    out = np.full(4, np.nan, np.float16)
    compiled(*LOGSUMEXP, "half").launch("k", {0: x, 1: out, 2: np.int32(515)}, (4,), (160,), seed=seed)
    np.testing.assert_allclose(out, np.array(mx.logsumexp(mx.array(x), axis=-1)), rtol=1e-3)


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@pytest.mark.sweep  # a kernel is compiled for each barrier
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kernel", "header"), [SOFTMAX, LOGSUMEXP])
def test_every_barrier_of_theirs_is_missed(tmp_path, kernel, header, seed):
    """If any one of its barriers is removed, a correct kernel is found to race."""
    text = (include_folder() / KERNELS / header).read_text()
    start = text.index(f"[[kernel]] void {kernel}(")
    end = text.find("[[kernel]]", start + 10) % len(text)
    barriers = text[start:end].count(BARRIER)
    assert barriers >= 3
    (tmp_path / KERNELS).mkdir(parents=True)
    x, at = np.random.default_rng(seed).normal(size=(2, 512)).astype(np.float32), start
    for _ in range(barriers):
        at = text.index(BARRIER, at + 1)
        (tmp_path / KERNELS / header).write_text(text[:at] + text[at + len(BARRIER) :])
        library = compiled(kernel, header, "float", tmp_path)
        with pytest.raises(SimulatorError, match=r"race within a threadgroup|reads uninitialised"):
            library.launch("k", {0: x, 1: np.empty_like(x), 2: np.int32(512)}, (2,), (128,), seed=seed)
