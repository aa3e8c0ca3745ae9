"""The strict check: what Apple's compiler would refuse is refused here."""

import pytest
from simulator import build
from simulator.language import strict, vocabulary
from simulator.testing import linux_only

pytestmark = linux_only

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ {} }}\n"


def problems(source):
    return "\n".join(strict.check(HEAD + source))


GOOD = """
struct alignas(8) Params { uint rows; float eps; };
enum class Kind : uint { none, some };
constant float table[4] = {1, 2, 3, 4};
constant bool flag [[function_constant(0)]];
constexpr constant uint kWidth = 4;
typedef vec<float, 4> wide;
template <typename T> struct Row {
  T v[kWidth];
  static constexpr constant int count = 4;
  T at(uint i) const { return v[i]; }
  void put(device T* out) const { for (uint i = 0; i < kWidth; i++) out[i] = at(i); }
};
template <typename T> Row<T> load(const device T* x) {
  Row<T> r;
  for (uint i = 0; i < kWidth; i++) r.v[i] = x[i];
  return r;
}
float sum(threadgroup const float* local, constant Params& params) {
  return local[0] + params.eps + table[params.rows % 4];
}
inline float twice(float x) { return 2 * x; }
inline half twice(half x) { return half(twice(float(x))); }
template <typename T>
[[kernel, max_total_threads_per_threadgroup(64)]] void good(
    const device T* x [[buffer(0)]], device T* out [[buffer(1)]], constant Params& arguments [[buffer(2)]],
    const device float* extra [[buffer(3), function_constant(flag)]],
    threadgroup float* dynamic [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[2][32], total;
  threadgroup atomic_uint counter;
  const Params params = arguments;
  Row<T> row = load(x);
  row.put(out);
  float4 v = float4(float2(row.v[0], row.v[1]), 1.0f, 2), w = wide(v.xyz, 1.0);
  half4 h = half4(v);
  v.xy = w.zw * 0.5f;
  shared[0][lane] = simd_sum(dot(v, w)) + twice(h.x) + twice(v.x);
  if (lane == 0) atomic_store_explicit(&counter, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  for (uint j = 0; j < 2; j++) {
    out[lane] += T(1);
    threadgroup_barrier(mem_flags::mem_device);
  }
  if (lane == 0) total = sum(shared[0], arguments) + sum(dynamic, arguments);
  simdgroup_float8x8 a, b;
  simdgroup_load(a, shared[1], 8);
  simdgroup_multiply_accumulate(b, a, a, b);
  thread auto& elements = b.thread_elements();
  float highest = max(float(row.v[2]), metal::precise::exp(elements[0]));
  if constexpr (is_same_v<T, half>) highest = clamp(highest, 0.0f, 1.0f);
  const device packed_float3* packed = reinterpret_cast<const device packed_float3*>(x);
  highest += (flag ? extra[0] : 0.0f) + float3(packed[0]).y + as_type<float>(uint(params.rows));
  out[group.x] = static_cast<T>(highest);
}
#define INSTANCE(name, type) template [[host_name("good_" #name)]] [[kernel]] decltype(good<type>) good<type>;
INSTANCE(f32, float)
INSTANCE(f16, half)
INSTANCE(bf16, bfloat)
"""


def test_good_shader_passes():
    assert problems(GOOD) == ""


REFUSED = [
    (KERNEL.format("float* p = x;"), "program_source:3: error: 'p' points to no address space: float *"),
    ("struct S { float* p; };\n", "'p' points to no address space"),
    (KERNEL.format("threadgroup float s[4]; device float* p = s;"),
     "cannot initialize a variable of type 'device float *' with an lvalue of type 'threadgroup"),
    ("struct S { float v; float get() const { return v; } };\nfloat f(device S& s) { return s.get(); }\n",
     "a member function of 'thread' is called on a device object"),
    ("int limit = 3;\n", "program-scope variable must reside in constant address space"),
    ("float f(float x) { auto g = [](float y) { return y; }; return g(x); }\n",
     "lambda expressions are not in Metal 3.1"),
    ("float f(float x) { return x > 0 ? f(x - 1) : x; }\n", "recursion: f calls itself"),
    ("float f(float x) { double y = x; return y; }\n", "'double': double does not exist in Metal"),
    ("float f() { threadgroup float s[4]; return s[0]; }\n",
     "threadgroup memory is declared outside of a kernel's first scope"),
    ("kernel void f(device float* x [[buffer(0)]], uint2 i [[thread_position_in_grid]],\n"
     "              uint n [[threads_per_grid]]) { x[i.x] = n; }\n", "are uint2 and uint in one kernel"),
    ("struct A { float v; };\nstruct B : A { float w; };\n", "derived classes are not in Metal"),
    ("alignas(8) constant constexpr uint k[] = {1, 2};\n", "'alignas' of a variable"),
    ("constant constexpr uint a[2] = {1, 2};\nconstant constexpr uint b[1] = {a[0] | a[1] << 16};\n",
     "program_source:4: error: a constant made of another's elements"),
    ("float apply(float (*f)(float)) { return f(1); }\n", "pointers to functions are not allowed"),
    ("struct P { int a, b; };\nint f(thread P& p) { auto [a, b] = p; return a + b; }\n",
     "decomposition declarations"),
    ("bfloat f(float x) { return x; }\n",
     "implicit conversion loses floating-point precision: 'float' to 'bfloat'"),
    ("long f(long x) { return simd_sum(x); }\n", "no matching function for call to 'simd_sum'"),
    ("[[warp_size(32)]] " + KERNEL.format("x[i] = 1;"), "the attribute 'warp_size' occurs in no Metal"),
    (KERNEL.format("x[i] = erf(x[i]);"), "use of undeclared identifier 'erf'"),
    ("[[max_total_threads_per_threadgroup(32)]] " + KERNEL.format("x[i] = 1;"), "(32) is miscompiled"),
    (KERNEL.format("for (uint j = 0; j < i; j++) x[j] += 1;"),
     "program_source:3: error: a loop reads and writes device memory again without a barrier"),
    ("kernel void k(device float* x [[buffer(0)]], threadgroup float* m [[threadgroup(0)]]) {\n"
     "  if (m[0] > 1) return;\n  x[0] = 1;\n}\n", "a return that depends on dynamic threadgroup memory"),
    (KERNEL.format("do { if (i > 1) ++x[i]; } while (x[i] < 4);"), "a loop reads and writes device memory"),
    ("template <int N> [[kernel, max_total_threads_per_threadgroup(N)]] void k(device float* x [[buffer(0)]])"
     "{ x[0] = N; }\ntemplate [[host_name(\"k\")]] [[kernel]] decltype(k<32>) k<32>;\n",
     "(32) is miscompiled"),
    ("float read(float* p) { return *p; }\n", "'p' points to no address space: float *"),
    ("float read(const float&);\n", "'read' has a pointer or reference without an address space"),
    ("template <typename T> T read(const T& p) { return p; }\nfloat f(float x) { return read(x); }\n",
     "'p' points to no address space"),
    ("float f(threadgroup float* p) { device float* q = p; return *q; }\n", "'device float *"),
    ("float f(device float* p) { thread float* q = p; return *q; }\n", "lvalue of type 'device float *"),
    ("float f(constant float* p) { device const float* q = p; return *q; }\n",
     "lvalue of type 'const constant float *"),
    ("void f(device const float* p) { device float* q = p; }\n", "cannot initialize a variable"),
    ("float f(float x) { static int k; k++; return x + k; }\n", "static local variable"),
    ("template <class T> T g(T x);\nfloat f(float x) { return g(x); }\n"
     "template <class T> T g(T x) { return x > 0 ? f(x - 1) : x; }\n", "recursion"),
    ("float f(float x) { if (x > 0) goto end; x = 1; end: return x; }\n", "'goto': goto is not allowed"),
    ("struct S { virtual float f() { return 1; } };\n",
     "'virtual': virtual functions do not exist in Metal"),
    ("float f(float x) { return std::max(x, 1.0f); }\n", "'std': the standard library is not available"),
    ("float f(float fragment) { return fragment; }\n", "'fragment': a keyword of Metal"),
    ("struct S { static float vertex(float x) { return x; } };\n", "'vertex': a keyword of Metal"),
    ("float f(float kernel) { return 2 * kernel; }\n", "'kernel': a keyword of Metal"),
    ("void f(thread simdgroup_matrix<float, 8, 8>& m, vec<float, 2> v) { m.thread_elements() = v; }\n",
     "from incompatible type"),
    ("struct S { uint v; };\nuint f(int x) { const S s = {x}; return s.v; }\n", "cannot be narrowed"),
    ("struct S { float v; };\nvoid f(thread S* s) { s[1] = {0.0f}; }\n", "braces are assigned"),
    (KERNEL.format("if (i > 0) { threadgroup float s[4]; x[i] = s[0]; }"),
     "threadgroup memory is declared outside of a kernel's first scope"),
    ("void f(thread simdgroup_matrix<int, 8, 8>& m) { m.thread_elements()[0] = 1; }\n",
     "no matrix of this type"),
    ("struct A { float v; };\ntemplate <class T> struct B;\ntemplate <> struct B<A> : A {};\n",
     "program_source:5: error: derived classes are not in Metal"),
    ("template <class C> class B : public C { device float* w; };\n", "derived classes are not in Metal"),
    ("constant constexpr uint a[2] = {1, 2};\nstruct S { static constant constexpr uint v = a[1]; };\n",
     "a constant made of another's elements"),
    ("float f(float x) { throw 1; }\n", "'throw': exceptions do not exist"),
    ("template <class... T> int f(T... t) { return (t + ...); }\n", "fold expression"),
    ("int f(int x) { if (int y = x; y > 0) return y; return 0; }\n", "if initialization statements"),
    ("bfloat f(bfloat x) { return exp(x); }\n", "to 'bfloat'"),
    ("bfloat f(half x) { bfloat y = x; return y; }\n", "bfloat"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    REFUSED,
)
def test_refused(source, message):
    assert message in problems(source)


SHARED = """
template <typename T> [[kernel]] void twice(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 2.0f * x[i];
}
"""
OF_A_TYPE = """
typedef {0} Element;
constant constexpr uint kWidth = {1};
template [[host_name("twice_{0}")]] [[kernel]] decltype(twice<Element>) twice<Element>;
"""


def test_sources_that_end_otherwise_are_checked_as_one():
    """What is wrong with one of them is found; others with the same code say nothing."""
    sources = [HEAD + SHARED + OF_A_TYPE.format(name, width) for width, name in enumerate(("float", "half"))]
    assert strict.check_together(sources) == []
    texts = [build.preprocess(source) for source in sources]
    (text,) = strict.joined(texts)
    assert text.count("2.0f") == 1 and "typedef half Element_1;" in text and "kWidth_0 = 0" in text
    assert len(strict.joined([*texts, texts[0].replace("2.0f", "3.0f")])) == 2
    twin = sources[1].replace("twice_half", "twice_of_another")  # one template, by two names
    assert strict.check_together([*sources, twin]) == []
    bad = HEAD + SHARED + OF_A_TYPE.format("bfloat", 8)
    for together in ([*sources, bad], [bad, *sources]):
        (problem,) = strict.check_together(together)
        assert "implicit conversion" in problem and [problem] == strict.check(bad)


def test_vocabulary_refuses_what_no_accepted_source_has(monkeypatch):
    known = vocabulary.library_words() | {"simd_sum_of_squares"}
    monkeypatch.setattr(vocabulary, "library_words", lambda: known)
    found = vocabulary.check_vocabulary("float f(float x) {\n return simd_sum_of_squares(x); }\n")
    assert found == [
        "program_source:2: error: 'simd_sum_of_squares' occurs in no Metal source known to compile"
    ]


def test_the_accepted_sources_are_there():
    """Both wheels' headers were read: what only one of them has is known."""
    assert {
        "affine_qmv_fast",
        "simdgroup_multiply_accumulate",
        "host_name",
        "c10",
        "threadgroup_prod",
    } <= vocabulary.accepted_words()


def test_metal_stdlib_declares_nothing_that_metal_has_not():
    words = vocabulary.library_words()
    assert {
        "exp",
        "simd_sum",
        "float4",
        "packed_half3",
        "INFINITY",
        "thread_elements",
        "atomic_uint",
    } <= words
    assert [w for w in sorted(words) if not vocabulary.is_known(w)] == []


def test_command_line(tmp_path, capsys):
    good, bad = tmp_path / "good.metal", tmp_path / "bad.metal"
    good.write_text(HEAD + KERNEL.format("x[i] = 1;"))
    bad.write_text(HEAD + "float f(float* p);\n")
    assert strict.main([str(good)]) == 0 and strict.main([str(good), str(bad)]) == 1
    assert f"{bad}: \n  {bad}:3: error: 'f' has a pointer" in capsys.readouterr().out
