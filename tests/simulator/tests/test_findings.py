"""Faults that the MSL executor must find: each in the smallest kernel that has it, with its message."""

import numpy as np
import pytest
from simulator.errors import ShaderError
from simulator.shaderlib import shader_library
from simulator.testing import ACROSS, HEAD, SEEDS, finding, floats, linux_only

pytestmark = linux_only

RACE_WITHIN = """
kernel void bad(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]],
                uint n [[threads_per_threadgroup]]) {
  threadgroup float row[64];
  row[i] = i;
  out[i] = row[(i + %s) %% n];
}
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("distance", [1, 32])
def test_race_within_a_threadgroup(seed, distance):
    message = finding(RACE_WITHIN % distance, seed=seed)
    assert (
        message.startswith("kernel 'bad', thread (") and "'row'" in message and "program_source:" in message
    )
    # Whichever thread runs first: an unordered neighbour, or nothing written yet.
    assert "race within a threadgroup" in message or "reads uninitialised" in message


def test_race_names_both_threads_and_the_line():
    message = finding(
        """
kernel void bad(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float total[1];
  total[0] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = total[0];
}
"""
    )
    assert message == (
        "kernel 'bad', thread (1, 0, 0) of threadgroup (0, 0, 0): race within a threadgroup: writes "
        "threadgroup memory 'total' at byte 0 of 4, which thread (0, 0, 0) wrote with no barrier between "
        "that orders it [program_source:6]"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_reused_memory_needs_a_barrier_before_it_is_overwritten(seed):
    """The fault of a fused routing kernel: slot 0 is read as the maximum while sums are already written."""
    message = finding(
        """
kernel void bad(device const float* logits [[buffer(0)]], device float* weights [[buffer(1)]],
                threadgroup float* shared [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]], uint group [[simdgroup_index_in_threadgroup]]) {
  float highest = simd_max(logits[i]);
  if (lane == 0) shared[group] = highest;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  highest = max(shared[0], shared[1]);
  float e = exp(logits[i] - highest);
  float sum = simd_sum(e);
  if (lane == 0) shared[group] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  weights[i] = e / (shared[0] + shared[1]);
}
""",
        buffers={0: floats(64), 1: floats(64)},
        threadgroup_bytes=[16],
        seed=seed,
    )
    assert "race within a threadgroup" in message and "'shared' at byte" in message


@pytest.mark.parametrize("seed", SEEDS)
def test_row_longer_than_its_threadgroup_memory(seed):
    """The fault of a residual norm: shared[i] for i < dim, where the host gives one float a thread."""
    message = finding(
        """
kernel void bad(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
    constant uint& dim [[buffer(2)]],
                threadgroup float* shared [[threadgroup(0)]], uint i [[thread_index_in_threadgroup]],
                uint size [[threads_per_threadgroup]]) {
  for (uint k = i; k < dim; k += size) shared[k] = x[k];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = i; k < dim; k += size) out[k] = shared[dim - 1 - k];
}
""",
        buffers={0: floats(100), 1: floats(100), 2: np.uint32(100)},
        threadgroup_bytes=[64 * 4],
        seed=seed,
    )
    assert (
        "writes 4 bytes out of bounds: threadgroup memory 'shared' at byte" in message and "of 256" in message
    )


def test_order_of_atomics_depends_on_the_schedule():
    """The fault of a bucketing kernel: places are handed out by an atomic counter, so that runs differ."""
    library = shader_library(
        HEAD
        + """
kernel void bucket(device atomic_uint* count [[buffer(0)]], device uint* pairs [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  pairs[atomic_fetch_add_explicit(count, 1, memory_order_relaxed)] = i;
}
"""
    )
    orders = set()
    for seed in SEEDS:
        pairs = np.zeros(128, np.uint32)
        library.launch("bucket", {0: np.zeros(1, np.uint32), 1: pairs}, (2,), (64,), seed=seed)
        assert sorted(pairs) == list(range(128))
        orders.add(tuple(pairs))
    assert len(orders) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "body",
    [
        "if (i == 0) out[0] = 1;",
        "if (i == 0 && group == 0) out[0] = 1; if (i == 1 && group == 3) out[5] = out[0];",
        "if (i == 0 && group == 3) out[0] = 1; if (i == 1 && group != 3) out[5 + group] = out[0];",
    ],
)
def test_race_between_threadgroups(body, seed):
    message = finding(ACROSS % body, grid=(4,), seed=seed)
    assert "race between threadgroups: " in message and "buffer 0 'out' at byte 0 of 16384" in message


def test_plain_read_of_another_threadgroups_atomic():
    message = finding(
        """
kernel void bad(device atomic_int* sum [[buffer(0)]], device int* out [[buffer(1)]],
                uint group [[threadgroup_position_in_grid]]) {
  if (group == 0) atomic_fetch_add_explicit(sum, 1, memory_order_relaxed);
  else out[group] = ((device int*)sum)[0];
}
""",
        buffers={0: np.zeros(1, np.int32), 1: np.zeros(4, np.int32)},
        grid=(4,),
        threads=(1,),
    )
    assert "race between threadgroups" in message and "atomic operation" in message


def test_barrier_of_the_wrong_memory():
    source = """
kernel void bad(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  out[i] = i;
  threadgroup_barrier(mem_flags::%s);
  out[64 + i] = out[63 - i];
}
"""
    assert "race within a threadgroup: reads buffer 0 'out'" in finding(source % "mem_threadgroup")
    shader_library(HEAD + source % "mem_device").launch("bad", {0: floats(128)}, (1,), (64,))


def test_simdgroup_barrier_orders_one_simdgroup():
    source = """
kernel void bad(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float row[64];
  row[i] = i;
  %s;
  out[i] = row[i ^ %d];
}
"""
    good = source % ("simdgroup_barrier(mem_flags::mem_threadgroup)", 1)
    for seed in SEEDS:
        out = floats(64)
        shader_library(HEAD + good).launch("bad", {0: out}, (1,), (64,), seed=seed)
        assert list(out) == [i ^ 1 for i in range(64)]
    message = finding(source % ("simdgroup_barrier(mem_flags::mem_threadgroup)", 32))
    assert "'row'" in message
    # A simdgroup operation is no barrier: the specification gives it no memory ordering.
    assert "race within a threadgroup" in finding(source % ("float s = simd_sum(row[i]); out[i] = s", 1))


@pytest.mark.parametrize(
    ("body", "verb"),
    [("out[0] = x[4 * i];", "reads"), ("out[i + 1] = x[0];", "writes"), ("out[0] = x[int(i) - 1];", "reads")],
)
def test_out_of_bounds_device_access_stops_before_it_happens(body, verb):
    source = "kernel void bad(device const float* x [[buffer(0)]], device float* out [[buffer(1)]], "
    source += "uint i [[thread_position_in_grid]]) { if (i == 0 || i == 3) { BODY } }".replace("BODY", body)
    message = finding(source, buffers={0: floats(8), 1: floats(4)}, threads=(4,))
    assert f"{verb} 4 bytes out of bounds: buffer" in message and "(the nearest buffer)" in message


def test_out_of_bounds_names_thread_and_offset():
    message = finding(
        "kernel void bad(device half* out [[buffer(2)]], uint i [[thread_position_in_grid]]) { out[i] = 1; }",
        buffers={2: np.zeros(33, np.float16)},
        grid=(3,),
        threads=(16,),
    )
    assert message == (
        "kernel 'bad', thread (1, 0, 0) of threadgroup (2, 0, 0): writes 2 bytes out of bounds: buffer 2 "
        "'out' at byte 66 of 66 (the nearest buffer) [program_source:3]"
    )


BESIDE = """
kernel void bad(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float before[64];
  threadgroup float row[64];
  threadgroup float behind[64];
  before[i] = behind[i] = 0;
  row[INDEX] = i;
  out[i] = before[i] + behind[i];
}
"""


@pytest.mark.parametrize("index", ["i + 1", "int(i) - 1"])
def test_out_of_bounds_threadgroup_memory(index):
    message = finding(BESIDE.replace("INDEX", index))
    assert "writes 4 bytes out of bounds: threadgroup memory '" in message


def test_uninitialised_threadgroup_memory():
    message = finding(
        """
kernel void bad(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float row[64];
  if (i != 7) row[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = row[i];
}
""",
        grid=(2,),
    )
    assert (
        "thread (7, 0, 0)" in message
        and "reads uninitialised threadgroup memory 'row' at byte 28 of 256" in message
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "body",
    [
        "if (i < 40) threadgroup_barrier(mem_flags::mem_none);",
        "if (i >= 32) return; threadgroup_barrier(mem_flags::mem_none);",
        "if (i == 3) return; threadgroup_barrier(mem_flags::mem_none);",
        "if (i < 32) { threadgroup_barrier(mem_flags::mem_none); }\n"
        "else { threadgroup_barrier(mem_flags::mem_none); }",
    ],
)
def test_divergent_barrier(body, seed):
    message = finding(ACROSS % body, seed=seed)
    assert "divergent threadgroup_barrier: thread" in message and "program_source:" in message


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "body",
    [
        "float s = i < 5 ? simd_sum(1.0f) : 0.0f; out[i] = s;",
        "if (i == 9) return; out[i] = simd_max(float(i));",
        "if (i & 1) { out[i] = simd_sum(1.0f); } else {\n out[i] = simd_sum(1.0f); }",
        "if (i & 1) { out[i] = simd_sum(1.0f); } else { simdgroup_barrier(mem_flags::mem_none); }",
        "out[i] = 0; for (uint k = 0; k < i; k++) out[i] += simd_shuffle_xor(1.0f, 1);",
    ],
)
def test_divergent_simdgroup_operation(body, seed):
    assert "divergent simdgroup operation: thread" in finding(ACROSS % body, seed=seed)


def test_broadcast_from_different_lanes():
    assert "different lanes to broadcast from" in finding(
        ACROSS % "out[i] = simd_broadcast(float(i), i / 2);"
    )


def test_whole_simdgroups_may_return_early():
    library = shader_library(HEAD + ACROSS % "if (i >= 32) return; out[i] = simd_sum(1.0f);")
    for seed in SEEDS:
        out = floats(64)
        library.launch("bad", {0: out}, (1,), (64,), seed=seed)
        assert list(out) == [32.0] * 32 + [0.0] * 32


def test_too_much_threadgroup_memory():
    source = "kernel void bad(device float* out [[buffer(0)]], threadgroup float* a [[threadgroup(0)]]) {"
    source += " threadgroup float b[4096]; b[0] = 1; a[0] = b[0]; out[0] = a[0]; }"
    buffers = {0: floats(1)}
    shader_library(HEAD + source).launch("bad", buffers, (1,), (1,), threadgroup_bytes=[16384])
    message = finding(source, buffers=buffers, threads=(1,), threadgroup_bytes=[16400])
    assert "threadgroup memory over 32 KiB: 'b' brings it to 32784 bytes" in message


@pytest.mark.parametrize(("attribute", "threads", "limit"), [("", (1025,), 1024), ("96", (10, 10), 96)])
def test_too_many_threads(attribute, threads, limit):
    if attribute:
        attribute = f"[[max_total_threads_per_threadgroup({attribute})]] "
    source = attribute + "kernel void bad(device float* out [[buffer(0)]]) { out[0] = 1; }"
    message = finding(source, threads=threads)
    assert f"too many threads in a threadgroup: {np.prod(threads)}, the limit is {limit}" in message


def test_unbound_buffer():
    source = "kernel void bad(device float* x [[buffer(0)]], device float* y [[buffer(3)]]) { x[0] = y[0]; }"
    assert finding(source) == "kernel 'bad': buffer 3 'y' is not bound"


def test_too_small_for_its_type():
    source = "struct Params { int a, b, c; };\nkernel void bad(device int* x [[buffer(0)]], "
    source += "constant Params& p [[buffer(1)]]) { x[0] = p.a; }"
    message = finding(source, buffers={0: np.zeros(1, np.int32), 1: np.zeros(2, np.int32)})
    assert message == "kernel 'bad': buffer 1 'p' has 8 bytes, but its type has 12"


def test_misaligned_vector():
    source = "kernel void bad(device float* x [[buffer(0)]]) { x[0] = (*(device float4*)(x + 1)).x + "
    source += "((device float4*)(x + 2))[0].w; *(device float2*)(x + 1) = float2(1); }"
    assert "misaligned" in finding(source, threads=(1,))


def test_atomics_out_of_bounds():
    source = "kernel void bad(device atomic_uint* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {"
    source += " atomic_fetch_add_explicit(x + i, 1, memory_order_relaxed); }"
    message = finding(source, buffers={0: np.zeros(8, np.uint32)}, threads=(9,))
    assert "writes 4 bytes out of bounds: buffer 0 'x' at byte 32 of 32" in message


def test_unset_function_constant():
    source = "constant bool flag [[function_constant(4)]];\n"
    source += "kernel void bad(device float* x [[buffer(0)]]) { if (flag) x[0] = 1; }"
    assert "reads the function constant 'flag', which was not set" in finding(source, threads=(1,))


def test_after_a_finding_the_next_dispatch_is_clean():
    finding(RACE_WITHIN % 1)
    out = floats(64)
    shader_library(HEAD + ACROSS % "out[i] = i;").launch("bad", {0: out}, (1,), (64,))
    assert list(out) == list(range(64))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "kernel void bad(device float* x [[buffer(0)]]) {\n  x[0] = y;\n}",
            "program_source:4:10: error: use of undeclared",
        ),
        ('#include "nowhere.h"\n', "program_source:3:10: fatal error: 'nowhere.h' file not found"),
        (
            "kernel void bad(float x [[colour(0)]]) {}",
            "error: kernel argument 'x' has no known attribute (found: colour)",
        ),
        ("kernel void bad(device float* x [[buffer(0)]]) { x[0] = 1; ", "error: '{' is not closed"),
    ],
)
def test_shader_that_does_not_compile(source, message):
    with pytest.raises(ShaderError) as error:
        shader_library(HEAD + source)
    assert message in str(error.value)


def test_waiting_for_another_threadgroup_is_an_error():
    body = (
        "if (group == 0) while (atomic_load_explicit((device atomic_int*)out, memory_order_relaxed) == 0) {} "
    )
    assert "spins on an atomic" in finding(ACROSS % body, grid=(2,), threads=(1,))


@pytest.mark.parametrize("read", ["x[i]", "x[63 - i]", "(i < 63 ? 0.0f : x[0])"])
def test_one_memory_by_two_arguments_of_which_one_writes_is_a_finding(read):
    """Metal's compiler takes it that arguments share no memory, and may move a load behind a store."""
    source = "kernel void bad(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], "
    source += f"uint i [[thread_position_in_grid]]) {{ y[i] = {read}; }}"
    x = np.arange(64, dtype=np.float32)
    message = finding(source, buffers={0: x, 1: x})
    assert "by two arguments" in message and "buffer 1 'y' at byte 0 is buffer 0 'x' at byte 0" in message
    shader_library(HEAD + source).launch("bad", {0: x, 1: floats(64)}, (1,), (64,))


def test_one_memory_by_two_arguments_is_none_where_no_byte_is_shared():
    """A stand-in for an argument that a kernel does not access, and halves of one buffer."""
    source = "kernel void bad(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], "
    source += "device float* z [[buffer(2)]], device const float* absent [[buffer(3)]], "
    source += "constant int& n [[buffer(4)]], uint i [[thread_position_in_grid]]) "
    source += "{ if (n > 64) y[i] = absent[i]; y[i] = 2.0f * x[i]; z[i + 32] = 3.0f; }"
    x, memory = np.arange(32, dtype=np.float32), np.full(96, 7, np.float32)
    buffers = {0: x, 1: memory, 2: memory, 3: memory, 4: np.int32(32)}
    shader_library(HEAD + source).launch("bad", buffers, (1,), (32,))
    assert memory.tolist() == [*range(0, 64, 2), *([3] * 32), *([7] * 32)]


@pytest.mark.parametrize("offset", [64, 1000, 100_000, -64, -5000])
def test_running_off_a_buffer_never_ends_in_another(offset):
    """Also for buffers that lie side by side, as the views of one allocation do here."""
    source = "kernel void bad(device const float* x [[buffer(0)]], device float* out [[buffer(1)]], "
    source += "constant int& offset [[buffer(2)]]) { out[0] = x[offset]; }"
    memory = floats(300_000)
    buffers = {0: memory[100_000:100_064], 1: memory[100_064:300_000], 2: np.int32(offset)}
    assert "reads 4 bytes out of bounds: buffer 0 'x' at byte" in finding(
        source, buffers=buffers, threads=(1,)
    )


def test_what_would_end_the_process():
    for body, message in [
        ("out[0] = 7 / int(out[i] * 0);", "divides an integer by zero [program_source:6]"),
        (
            "int big[100000]; for (uint k = 0; k < 100000; k++) big[(k * i) % 100000] = k; out[i] = big[i];",
            "crashes",
        ),
    ]:
        assert message in finding(ACROSS % body, threads=(2,))
    out = floats(1)
    shader_library(HEAD + ACROSS % "out[0] = 1;").launch("bad", {0: out}, (1,), (1,))
    assert out[0] == 1
