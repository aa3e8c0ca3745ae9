"""What kernels compute in the MSL executor, with no finding at any schedule."""

import numpy as np
import pytest
from simulator.errors import ShaderError, SimulatorError
from simulator.shaderlib import shader_library
from simulator.testing import HEAD, SEEDS, finding, floats, linux_only

pytestmark = linux_only
SWEEP = pytest.mark.sweep


def test_positions_and_edge_threadgroups():
    names = ["thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid"]
    names += [
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threadgroups_per_grid",
        "threads_per_grid",
    ]
    scalars = ["thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup"]
    scalars += ["simdgroups_per_threadgroup", "threads_per_simdgroup", "quadgroup_index_in_threadgroup"]
    arguments = [f"uint3 v{i} [[{n}]]" for i, n in enumerate(names)] + [
        f"ushort s{i} [[{n}]]" for i, n in enumerate(scalars)
    ]
    body = "device uint* o = out + 32 * (v0.x + v6.x * (v0.y + v6.y * v0.z));"
    for i in range(len(names)):
        body += f"o[{3 * i}] = v{i}.x; o[{3 * i + 1}] = v{i}.y; o[{3 * i + 2}] = v{i}.z;"
    for i in range(len(scalars)):
        body += f"o[{3 * len(names) + i}] = s{i};"
    source = f"kernel void where(device uint* out [[buffer(0)]], {', '.join(arguments)}) {{ {body} }}"
    total, threads = (11, 5, 3), (4, 2, 2)
    grid = tuple(-(-t // n) for t, n in zip(total, threads, strict=True))
    out = np.zeros((total[2], total[1], total[0], 32), np.uint32)
    counters = shader_library(HEAD + source).launch(
        "where", {0: out}, grid, threads, total_threads=total, seed=1
    )
    assert counters.threads == 11 * 5 * 3 and counters.threadgroups == 3 * 3 * 2
    for z, y, x in np.ndindex(3, 5, 11):
        at, group = np.array([x, y, z]), np.array([x // 4, y // 2, z // 2])
        size = np.minimum(threads, np.array(total) - group * threads)
        inside = at - group * threads
        index = inside[0] + size[0] * (inside[1] + size[1] * inside[2])
        expected = [*at, *inside, *group, *size, *threads, *grid, *total]
        expected += [index, index % 32, index // 32, -(-size.prod() // 32), 32, index // 4]
        assert list(out[z, y, x, : len(expected)]) == expected


UNARY = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atanh": np.arctanh, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh,
    "cospi": lambda x: np.cos(np.pi * x),
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: 10.0**x, "fabs": np.abs, "abs": np.abs,
    "floor": np.floor,
    "fract": lambda x: x - np.floor(x), "log": np.log, "log2": np.log2, "log10": np.log10, "rint": np.rint,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), "rsqrt": lambda x: 1 / np.sqrt(x),
    "saturate": lambda x: np.clip(x, 0, 1), "sign": np.sign, "sin": np.sin, "sinh": np.sinh,
    "sinpi": lambda x: np.sin(np.pi * x), "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh,
    "tanpi": lambda x: np.tan(np.pi * x), "trunc": np.trunc,
}  # fmt: skip
BINARY = {
    "atan2": np.arctan2, "copysign": np.copysign, "fdim": lambda x, y: np.where(x > y, x - y, 0),
    "fmax": np.fmax,
    "fmin": np.fmin, "max": np.fmax, "min": np.fmin, "fmod": np.fmod, "pow": np.power, "powr": np.power,
    "step": lambda x, y: np.where(y < x, 0, 1), "divide": np.divide,
}  # fmt: skip
TERNARY = {
    "clamp": lambda x, y, z: np.fmin(np.fmax(x, y), z), "fma": lambda x, y, z: x * y + z,
    "mix": lambda x, y, z: x + (y - x) * z, "fmax3": lambda x, y, z: np.fmax(x, np.fmax(y, z)),
    "fmin3": lambda x, y, z: np.fmin(x, np.fmin(y, z)), "max3": lambda x, y, z: np.fmax(x, np.fmax(y, z)),
    "min3": lambda x, y, z: np.fmin(x, np.fmin(y, z)),
    "median3": lambda x, y, z: np.median([x, y, z], axis=0),
    "fmedian3": lambda x, y, z: np.median([x, y, z], axis=0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "kind", ["float4", "half3", *(pytest.param(k, marks=SWEEP) for k in ("float", "half"))]
)
def test_float_functions(kind):
    scalar, width = kind.rstrip("234"), int(kind[-1]) if kind[-1].isdigit() else 1
    dtype = {"float": np.float32, "half": np.float16}[scalar]
    calls = [f"{n}(x)" for n in UNARY] + [f"{n}(x, y)" for n in BINARY] + [f"{n}(x, y, z)" for n in TERNARY]
    values = np.array([0.25, -0.75, 1.5, 0.5, -2.5, 3.0, 1.0, 2.0, 0.125, -1.0, 0.9, 5.5], dtype)
    x, y, z = values, np.roll(values, 1), np.roll(values, 5)
    step = 4 if width > 1 else 1  # a vector of three occupies the room of four
    assert width != 3 or len(values) % 4 == 0
    body = "".join(f"out[{i} * count + i] = {call};" for i, call in enumerate(calls))
    arguments = ", ".join(f"device const {kind}* {n}s [[buffer({i})]]" for i, n in enumerate("xyz"))
    source = f"kernel void all_of_them({arguments}, device {kind}* out [[buffer(3)]], "
    source += "uint i [[thread_position_in_grid]], "
    source += f"uint count [[threads_per_grid]]) {{ {kind} x = xs[i], y = ys[i], z = zs[i]; {body} }}"
    out = np.zeros((len(calls), len(values)), dtype)
    threads = len(values) // step
    shader_library(HEAD + source).launch("all_of_them", {0: x, 1: y, 2: z, 3: out}, (1,), (threads,))
    x, y, z = (v.astype(np.float64) for v in (x, y, z))
    expected = [f(x) for f in UNARY.values()] + [f(x, y) for f in BINARY.values()]
    expected += [f(x, y, z) for f in TERNARY.values()]
    valid = np.arange(len(values)) % step < width
    for call, got, want in zip(calls, out, expected, strict=True):
        want = np.asarray(want).astype(dtype).astype(np.float64)
        if call.startswith("clamp"):
            valid_here = valid & (y <= z)
        elif call.startswith(("tanpi", "tan(")):
            valid_here = valid & (np.abs(want) < 1e3)
        elif call.startswith("powr"):
            valid_here = valid & (x >= 0)
        else:
            valid_here = valid
        tolerance = 2e-6 if dtype == np.float32 else 1.1e-3
        np.testing.assert_allclose(
            got.astype(np.float64)[valid_here],
            want[valid_here],
            rtol=tolerance,
            atol=tolerance / 4,
            err_msg=call,
        )


def test_nan_semantics():
    source = """
kernel void nans(device const float* x [[buffer(0)]], device float* out [[buffer(1)]]) {
  float n = x[0], one = x[1];
  out[0] = max(n, one); out[1] = min(one, n); out[2] = clamp(n, 2.0f, 3.0f); out[3] = fmax(n, n);
  out[4] = isnan(n);
  out[5] = isnan(one); out[6] = isinf(one / 0.0f); out[7] = isfinite(n); out[8] = n == n;
  out[9] = simd_max(n) != simd_max(n);
  out[10] = sign(n); out[11] = float(half(65520.0f)); out[12] = signbit(-0.0f);
  out[13] = any(isnan(float2(one, n)));
}
"""
    out = floats(14)
    shader_library(HEAD + source).launch("nans", {0: np.array([np.nan, 1], np.float32), 1: out}, (1,), (1,))
    expected = [1, 1, 2, np.nan, 1, 0, 1, 0, 0, 1, 0, np.inf, 1, 1]
    np.testing.assert_array_equal(out, np.array(expected, np.float32))


def wrap(value, dtype):
    return (
        np.array([int(value) & (2 ** (8 * dtype.itemsize) - 1)]).astype(f"u{dtype.itemsize}").view(dtype)[0]
    )


INTEGER = {
    "abs(x)": lambda x, y, z, b, lo, hi: abs(x),
    "min(x, y)": lambda x, y, z, b, lo, hi: min(x, y),
    "max(x, y)": lambda x, y, z, b, lo, hi: max(x, y),
    "min3(x, y, z)": lambda x, y, z, b, lo, hi: min(x, y, z),
    "max3(x, y, z)": lambda x, y, z, b, lo, hi: max(x, y, z),
    "median3(x, y, z)": lambda x, y, z, b, lo, hi: sorted((x, y, z))[1],
    "clamp(x, min(y, z), max(y, z))": lambda x, y, z, b, lo, hi: min(max(x, min(y, z)), max(y, z)),
    "popcount(x)": lambda x, y, z, b, lo, hi: bin(x & (2**b - 1)).count("1"),
    "ctz(x)": lambda x, y, z, b, lo, hi: b if x == 0 else ((x & -x).bit_length() - 1),
    "select(x, y, x < z)": lambda x, y, z, b, lo, hi: y if x < z else x,
}


@pytest.mark.parametrize(
    "kind",
    [
        *("char", "ushort", "int", "ulong"),
        *(pytest.param(k, marks=SWEEP) for k in ("uchar", "short", "uint", "long")),
    ],
)
def test_integer_functions(kind):
    unsigned = kind.startswith("u")
    dtype = np.dtype(
        {"char": "i1", "short": "i2", "int": "i4", "long": "i8"}[kind.lstrip("u")].replace(
            "i", "ui"[not unsigned]
        )
    )
    lo, hi, bits = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max), 8 * dtype.itemsize
    values = [0, 1, 2, 5, 100, hi, hi - 3, lo, lo + 1, 37, hi // 3]
    x, y, z = (np.roll(np.array(values, dtype), k) for k in (0, 2, 7))
    body = "".join(f"out[{i} * count + i] = T({call});" for i, call in enumerate(INTEGER))
    arguments = ", ".join(f"device const {kind}* {n}s [[buffer({i})]]" for i, n in enumerate("xyz"))
    source = f"typedef {kind} T; kernel void all_of_them({arguments}, device T* out [[buffer(3)]], "
    source += "uint i [[thread_position_in_grid]], uint count [[threads_per_grid]]) {"
    source += f"T x = xs[i], y = ys[i], z = zs[i]; {body} }}"
    out = np.zeros((len(INTEGER), len(values)), dtype)
    shader_library(HEAD + source).launch("all_of_them", {0: x, 1: y, 2: z, 3: out}, (1,), (len(values),))
    for (call, reference), got in zip(INTEGER.items(), out, strict=True):
        want = [wrap(reference(*map(int, v), bits, lo, hi), dtype) for v in zip(x, y, z, strict=True)]
        assert list(got) == want, call


@pytest.mark.parametrize(("kind", "name"), [("half", "float16"), ("bfloat", "bfloat16")])
def test_sixteen_bit_arithmetic_is_rounded_to_nearest_even(kind, name):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    source = f"""
kernel void convert(device const float* x [[buffer(0)]], device {kind}* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {{
  out[i] = {kind}(x[i]);
}}
kernel void arithmetic(device const {kind}* x [[buffer(0)]], device const {kind}* y [[buffer(1)]],
    device {kind}* out [[buffer(2)]],
                       uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {{
  out[i] = x[i] + y[i];
  out[n + i] = x[i] - y[i];
  out[2 * n + i] = x[i] * y[i];
  out[3 * n + i] = x[i] / y[i];
  out[4 * n + i] = x[i] * y[i] + x[i];
  vec<{kind}, 4> v = vec<{kind}, 4>(x[i], y[i], x[i], y[i]) * x[i];
  out[5 * n + i] = v.y;
}}
kernel void widen(device const {kind}* x [[buffer(0)]], device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {{
  out[i] = x[i];
}}
"""
    library = shader_library(HEAD + source)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = torch.zeros(2**16)
    library.launch("widen", {0: every, 1: wide}, (64,), (1024,))
    assert torch.equal(wide.nan_to_num(7.0), every.float().nan_to_num(7.0))

    # All values, the midpoints between neighbours, and the floats next to those.
    low = every.float()
    high = torch.roll(low, -1)
    middle = ((low.double() + high.double()) / 2).float()
    sides = [torch.nextafter(middle, torch.full_like(middle, s)) for s in (-np.inf, np.inf)]
    x = torch.cat([low, middle, *sides, torch.randn(2**16) * 10]).contiguous()
    out = torch.zeros(len(x), dtype=dtype)
    library.launch("convert", {0: x, 1: out}, (len(x) // 1024,), (1024,))
    normal = torch.where(x.abs() < 2.0**-126, torch.copysign(torch.zeros(1), x), x)  # no float32 subnormals
    assert torch.equal(out.float().nan_to_num(7.0), normal.to(dtype).float().nan_to_num(7.0))

    generator = torch.Generator().manual_seed(0)
    a, b = ((torch.randn(2**14, generator=generator) * 3).to(dtype) for _ in range(2))
    out = torch.zeros(6, len(a), dtype=dtype)
    library.launch("arithmetic", {0: a, 1: b, 2: out}, (16,), (1024,))
    product = a * b
    for got, want in zip(out, [a + b, a - b, product, a / b, product + a, b * a], strict=True):
        assert torch.equal(got, want)


# Statements, an expression, and what it is after them.
VECTORS = [
    ("float4 v = float4(1, 2, 3, 4); v.xw = v.wx;", "v.x", 4),
    ("", "v.w", 1),
    ("v.zyx += float3(10);", "v.x", 14),
    ("", "v.y", 12),
    ("", "v.z", 13),
    ("", "v.rgba.b", 13),
    ("", "v.xxyy.w", 12),
    ("v[1] = -1;", "v.y", -1),
    ("v.y *= 2;", "v[1]", -2),
    ("float4 w = float4(v.xy, float2(7, 8));", "w.z", 7),
    ("w = float4(5.0f, w.yzw);", "w.x", 5),
    ("int4 i = int4(float4(1.9f, -1.9f, 2.5f, 0));", "i.x", 1),
    ("", "i.y", -1),
    ("", "(i << 2).z", 8),
    ("uchar4 u = uchar4(300, 1, 2, 255); u += uchar4(1);", "u.x", 45),
    ("", "u.w", 0),
    ("bool4 b = v > w;", "any(b)", 1),
    ("", "all(b == b)", 1),
    ("", "dot(float3(1, 2, 3), float3(4, 5, 6))", 32),
    ("", "length(float2(3, 4))", 5),
    ("", "cross(float3(1, 0, 0), float3(0, 1, 0)).z", 1),
    ("", "normalize(float2(0, 9)).y", 1),
    ("", "select(float2(1, 2), float2(3, 4), bool2(false, true)).y", 4),
    ("", "(-v).x", -14),
    ("", "(2.0f * v / 4).x", 7),
    ("half4 h = half4(v);", "float(h.x + h.y)", 12),
    ("", "sizeof(float3)", 16),
    ("", "sizeof(packed_half3)", 6),
    ("", "as_type<float>(as_type<uint>(3.5f))", 3.5),
    ("", "as_type<uchar4>(0x01020304u).x", 4),
    ("", "as_type<half2>(uint(0x3c00)).x", 1),
    ("packed[1] = packed_float3(1, 2, 3); packed[0] = packed[1] * 2;", "float3(packed[0]).y", 4),
    ("four[1].zw = float2(1, 2); four[0] = four[1].wzyx;", "four[0].y", 1),
    ("three[0] = float3(packed[1]); three[1].y = 5;", "three[0].z", 3),
]


CONTRACTED = """
kernel void sums(device const float* a [[buffer(0)]], device float* out [[buffer(1)]]) {
  const float x = a[0], c = a[1];
  const float2 v(x, x), w(c, c);
  float sum = c;
  sum += x * x;
  float2 sums = w;
  sums += v * v;
  float2 rest = w;
  rest -= v * -v;
  const float product = x * x;
  const float2 products = v * v;
  out[0] = x * x + c;
  out[1] = sum;
  out[2] = (v * v + w).y;
  out[3] = (w + x * v).y;
  out[4] = (v * v + c).x;
  out[5] = (v * v - -w).x;
  out[6] = (w - v * -v).x;
  out[7] = sums.x;
  out[8] = rest.y;
  out[9] = product + c;
  out[10] = (products + w).x;
}
"""


def test_products_and_sums_of_an_expression_are_rounded_once():
    """A product that has a name is rounded: then nothing is left of these sums."""
    a = np.array([1 + 2.0**-12, -1 - 2.0**-11], np.float32)
    out = np.full(11, np.nan, np.float32)
    shader_library(HEAD + CONTRACTED).launch("sums", {0: a, 1: out}, (1,), (1,))
    assert out.tolist() == 9 * [2.0**-24] + 2 * [0.0]


def test_vectors_and_swizzles():
    body = "".join(f"{first} out[{n}] = {result};\n" for n, (first, result, _) in enumerate(VECTORS))
    source = "kernel void vectors(device float* out [[buffer(0)]], device float4* four [[buffer(1)]],"
    source += f"device packed_float3* packed [[buffer(2)]], device float3* three [[buffer(3)]]) {{ {body} }}"
    out, four, packed, three = floats(len(VECTORS)), floats(2, 4), floats(2, 3), floats(2, 4)
    shader_library(HEAD + source).launch("vectors", {0: out, 1: four, 2: packed, 3: three}, (1,), (1,))
    assert out.tolist() == [expected for *_, expected in VECTORS]
    np.testing.assert_array_equal(four, [[2, 1, 0, 0], [0, 0, 1, 2]])
    np.testing.assert_array_equal(packed, [[2, 4, 6], [1, 2, 3]])
    np.testing.assert_array_equal(three[:, :3], [[1, 2, 3], [0, 5, 0]])


def test_a_member_may_have_the_name_of_a_swizzle():
    source = "struct Ends { float ab[2], xy; }; kernel void k(device float* out [[buffer(0)]]) { Ends e; "
    source += "e.ab[1] = 3; e.xy = 4; float3 v = float3(1, 2, 5); out[0] = e.ab[1] + e.xy + (&v)->zx.x; }"
    out = floats(1)
    shader_library(HEAD + source).launch("k", {0: out}, (1,), (1,))
    assert out[0] == 12


@pytest.mark.parametrize(
    ("statement", "message"),
    [("v.yy = 1;", "a repeated component cannot be assigned to"), ("v.xz *= 2;", "no such component")],
)
def test_swizzles_that_a_vector_does_not_have(statement, message):
    with pytest.raises(ShaderError, match=message):
        shader_library(
            HEAD
            + "kernel void k(device float2* out [[buffer(0)]]) { float2 v = 0; "
            + statement
            + " out[0] = v; }"
        )


def test_atomics():
    source = """
kernel void atomics(device atomic_int* out [[buffer(0)]], device atomic_float* sum [[buffer(1)]],
                    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint count;
  if (t == 0) atomic_store_explicit(&count, 5u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, 2, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) atomic_fetch_add_explicit(&out[0], int(atomic_load_explicit(&count, memory_order_relaxed)),
      memory_order_relaxed);
  atomic_fetch_add_explicit(&out[1], -1, memory_order_relaxed);
  atomic_fetch_max_explicit(&out[2], int(i), memory_order_relaxed);
  atomic_fetch_min_explicit(&out[3], -int(i), memory_order_relaxed);
  atomic_fetch_or_explicit(&out[4], 1 << (i % 31), memory_order_relaxed);
  atomic_fetch_and_explicit(&out[5], ~(1 << (i % 31)), memory_order_relaxed);
  int expected = 0;
  if (atomic_compare_exchange_weak_explicit(&out[6], &expected, int(i) + 1, memory_order_relaxed,
      memory_order_relaxed))
    atomic_store_explicit(&out[7], 9, memory_order_relaxed);
  atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
}
"""
    for seed in SEEDS:
        out, total = np.array([0, 0, -9, 9, 0, -1, 0, 4], np.int32), floats(1)
        counters = shader_library(HEAD + source).launch("atomics", {0: out, 1: total}, (2,), (64,), seed=seed)
        assert list(out[:6]) == [2 * 133, -128, 127, -127, 2**31 - 1, -(2**31)]
        assert 1 <= out[6] <= 128 and out[7] == 9 and total[0] == 64
        assert counters.atomics == 128 * 8 + 2 * 3 + 1


def test_templates_constants_and_tables(tmp_path):
    (tmp_path / "scale.h").write_text("constant float table[3] = {1, 10, 100};\n")
    source = """
#include "scale.h"
#define INSTANCE(name, T, n) template [[host_name("scaled_" #name)]] [[kernel]] void scaled<T, n>(SCALED(T));
#define INDEX uint i [[thread_position_in_grid]]
#define SCALED(T) device T *out [[buffer(0)]], constant T &x [[buffer(BASE + 1)]], INDEX
#define BASE 1
constant bool twice [[function_constant(0)]];
constant float offset [[function_constant(1)]];
constant int missing [[function_constant(2)]];
constant float actual_offset = is_function_constant_defined(offset) ? offset : 0.25f;
constant int chosen = is_function_constant_defined(missing) ? missing : -1;
namespace detail {
template <typename T> struct Twice { static T of(T x) { return x * T(2); } };
}
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(N * 32)]] void scaled(SCALED(T)) {
  T v = x * T(table[i % N]) + T(actual_offset) + T(chosen + 1);
  if constexpr (N == 3) v += T(1000);
  out[i] = twice ? detail::Twice<T>::of(v) : v;
}
INSTANCE(f32, float, 3)
INSTANCE(f16, half, 2)
template [[host_name("scaled_declared")]] [[kernel]] decltype(scaled<int, 1>) scaled<int, 1>;
template [[host_name("scaled_keyword")]] kernel void scaled<int, 2>(SCALED(int));
[[host_name("renamed")]] [[kernel]] void plain(
    device const int* guard [[buffer(1), function_constant(twice)]], device int* out [[buffer(0)]]) {
  out[0] = twice ? guard[0] : 4;
}
"""
    library = shader_library(HEAD + source, {0: True, 1: 0.5}, include=(tmp_path,))
    assert sorted(library.kernel_names) == [
        "renamed",
        "scaled_declared",
        "scaled_f16",
        "scaled_f32",
        "scaled_keyword",
    ]
    out = floats(4)
    library.launch("scaled_f32", {0: out, 2: np.float32(2)}, (1,), (4,))
    assert list(out) == [2005, 2041, 2401, 2005]
    out = np.zeros(2, np.float16)
    library.launch("scaled_f16", {0: out, 2: np.float16(2)}, (1,), (2,))
    assert list(out) == [5, 41]
    for name, limit in [("scaled_declared", 32), ("scaled_keyword", 64), ("scaled_f32", 96)]:
        with pytest.raises(SimulatorError, match=f"the limit is {limit}"):
            library.launch(name, {0: floats(4096), 2: floats(1)}, (1,), (limit + 1,))
    out = np.zeros(1, np.int32)
    with pytest.raises(SimulatorError, match="buffer 1 'guard' is not bound"):
        library.launch("renamed", {0: out}, (1,), (1,))
    shader_library(HEAD + source, {0: False}, include=(tmp_path,)).launch("renamed", {0: out}, (1,), (1,))
    assert out[0] == 4


def test_several_threadgroup_variables_and_overloads():
    source = """
inline float first(const device float* p) { return p[0]; }
inline float first(const threadgroup float* p) { return p[0]; }
struct Pair { float a; uint b; };
kernel void many(device float* out [[buffer(0)]], threadgroup half* dynamic [[threadgroup(1)]],
    uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[32], b[2][32];
  threadgroup Pair pairs[32];
  threadgroup float total;
  threadgroup float4 wide[8];
  threadgroup float* pointer = &b[1][0];
  a[i] = i; b[0][i] = 2 * i; pointer[i] = 3 * i; pairs[i] = {float(i), i}; dynamic[i] = i;
  if (i < 8) wide[i] = float4(i);
  if (i == 0) total = 7;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint k = 31 - i;
  out[i] = a[k] + b[0][k] + b[1][k] + pairs[k].a + pairs[k].b + total + wide[k / 4].y + dynamic[k] +
      first(a) + first(out + 99);
}
"""
    for seed in SEEDS:
        out = floats(100)
        counters = shader_library(HEAD + source).launch("many", {0: out}, (1,), (32,), {1: 64}, seed=seed)
        assert list(out[:32]) == [9 * k + 7 + k // 4 for k in range(31, -1, -1)]
        assert counters.barriers == 1


def test_counters():
    source = """
kernel void copy(device const half4* x [[buffer(0)]], device half4* out [[buffer(1)]],
    constant uint& n [[buffer(2)]],
                 uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup half4 row[64];
  row[t] = x[i] + x[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_barrier(mem_flags::mem_none);
  if (i < n) out[i] = row[t ^ 1];
}
"""
    x, out = np.ones((128, 4), np.float16), np.zeros((128, 4), np.float16)
    counters = shader_library(HEAD + source).launch(
        "copy", {0: x, 1: out, 2: np.uint32(100)}, (2,), (64,), seed=2
    )
    assert (counters.threadgroups, counters.threads, counters.atomics) == (2, 128, 0)
    assert (counters.barriers, counters.simdgroup_barriers, counters.simd_operations) == (2, 4, 0)
    assert counters.threadgroup_accesses == 228
    read = {i: (traffic.bytes_read, traffic.distinct_bytes_read) for i, traffic in counters.buffers.items()}
    assert read == {0: (2048, 1024), 1: (0, 0), 2: (512, 4)}
    written = [(t.bytes_written, t.distinct_bytes_written) for t in counters.buffers.values()]
    assert written == [(0, 0), (800, 800), (0, 0)]


def test_many_barriers_do_not_exhaust_the_epochs():
    source = """
kernel void long_run(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float value[2];
  for (uint k = 0; k < 2200000; k++) {
    if (i == (k & 1)) value[0] = out[0] = k;
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  }
  out[1 + i] = value[0] + out[0] + %s;
}
"""
    out = floats(3)
    shader_library(HEAD + source % "0").launch("long_run", {0: out}, (1,), (2,))
    assert out[1] == out[2] == 2 * 2199999.0
    assert "race within" in finding(source % "out[2 - i]", "long_run", {0: out}, threads=(2,))


def test_literals_without_suffix_are_floats():
    source = "kernel void k(device float* x [[buffer(0)]]) { "
    source += "x[0] = x[0] * 0.1 + 1.0 / 3; half h = 0.1h; x[1] = h; }"
    x = np.array([3, 0], np.float32)
    shader_library(HEAD + source).launch("k", {0: x}, (1,), (1,))
    assert x[0] == np.float32(np.float32(3) * np.float32(0.1)) + np.float32(1) / np.float32(3)
    assert x[1] == np.float16(0.1)


def test_tensors_of_the_simulated_device(simulated):
    torch = pytest.importorskip("torch")
    source = "kernel void scale(device const bfloat* x [[buffer(0)]], device bfloat* out [[buffer(1)]], "
    source += "uint i [[thread_position_in_grid]]) { out[i] = x[i] * bfloat(2.0f); }"
    x = torch.arange(64, dtype=torch.bfloat16)
    out = torch.zeros(128, dtype=torch.bfloat16, device="mps")[32:96]
    simulated.shader_library(HEAD + source).launch("scale", {0: x.to("mps"), 1: out}, (1,), (64,))
    assert torch.equal(out.cpu(), x * 2)
