"""The MSL executor beside other threads of the process, and the cache between processes."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from simulator import build
from simulator.shaderlib import shader_library
from simulator.testing import ACROSS, HEAD, floats, linux_only

pytestmark = linux_only


def test_two_threads_compile_and_run_at_once():
    def work(k):
        library = shader_library(HEAD + ACROSS % f"out[i] = simd_sum(float(i)) + {k % 3};")
        out = floats(64)
        library.launch("bad", {0: out}, (1,), (64,), seed=k)
        return out[0] - k % 3

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(work, range(12))) == {496.0}


def test_threads_that_execute_nothing_are_not_judged():
    """Another thread asks a library for its kernels, in instrumented code, while a kernel runs."""
    source = (
        "kernel void long_run(device float* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]])"
    )
    source += " { for (int n = 0; n < 20000; n++) out[i] += %s; }"
    library, other = (shader_library(HEAD + source % step) for step in ("1", "2"))
    tables = ctypes.CDLL(str(other.path))
    done, asked = threading.Event(), 0

    def ask():
        nonlocal asked
        while not done.is_set():
            tables.msl_kernels(ctypes.byref(ctypes.c_int()))
            asked += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        overlaps = 0
        while overlaps < 20:
            assert thread.is_alive()
            out, before = floats(64), asked
            library.launch("long_run", {0: out}, (1,), (64,))
            assert set(out) == {20000}
            overlaps += asked > before
    finally:
        done.set()
        thread.join(timeout=300)
        assert not thread.is_alive()


def test_a_source_is_translated_by_one_process(monkeypatch, tmp_path):
    in_another_process = build.compile_flat.__wrapped__
    source = HEAD + ACROSS % "out[i] = simd_sum(float(i));"
    build.compile_shader(source)  # what every source needs is there
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path)
    path = in_another_process(source, ())
    monkeypatch.setattr(build, "preprocess", None)
    assert in_another_process(source, ()) == path
    with pytest.raises(TypeError):
        in_another_process(source + "// changed", ())
