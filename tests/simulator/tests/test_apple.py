"""The cost model of Apple GPUs: counts against counts by hand, results of counted kernels against float64,
bounds by hand."""

import numpy as np
import pytest
from simulator import apple, shader_library
from simulator.apple.facts import COSTS, FACTS, GPUS, threads_for
from simulator.apple.recorder import zeros
from simulator.testing import HEAD, linux_only

pytestmark = linux_only
SWEEP = pytest.mark.sweep
M1, M2, M3 = GPUS["M1"], GPUS["M2"], GPUS["M3"]
POSITION = "uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]"


def counted(body: str, buffers: list, grid=1, threads=64, arguments="", limit=None, attribute="", total=None):
    """Measures a kernel `out[i] = ...` with `a`, `out` and further buffers; `body` is the text of its
    function."""
    source = f"""{HEAD}
    [[kernel]] {attribute} void k(device const float* a [[buffer(0)]], device float* out [[buffer(1)]],
                      {arguments}{POSITION}) {{ {body} }}"""
    recorder = apple.Recorder(limit=limit or apple.Limit())
    shader_library(source).launch(
        "k", dict(enumerate(buffers)), (grid,), (threads,), total_threads=total, run=recorder
    )
    return recorder.measurements[0]


def floats(count: int) -> np.ndarray:
    values = zeros(np.float32, count)
    values[:] = np.random.default_rng(count).standard_normal(count)
    return values


def empty(count: int) -> np.ndarray:
    return zeros(np.float32, count)


def classes(measurement, gpu=M1, *names):
    return tuple(measurement.classes(gpu)[name] for name in names)


class TestCounts:
    def test_straight_code(self):
        a, out = floats(256), empty(256)
        m = counted("out[i] = a[i] * a[i] + 1.5f;", [a, out], grid=4)
        np.testing.assert_allclose(out, a.astype(np.float64) ** 2 + 1.5, rtol=1e-6)
        # 8 simdgroups, each with one of everything.
        assert classes(m, M1, "fma", "fmul", "fadd", "devload", "devstore") == (8, 0, 0, 8, 8)
        assert m.traffic == apple.Traffic(l1=2048, threadgroup=0, lines=8)
        assert m.dram_bytes == 2048
        assert m.active_lanes == 1

    def test_a_loop_of_a_length_from_constant_memory(self):
        a, out = floats(64), empty(64)
        body = "float s = 0; for (uint j = 0; j < n; j++) s = fma(a[i], float(j), s); out[i] = s;"
        m = counted(body, [a, out, np.uint32(5)], arguments="constant uint& n [[buffer(2)]], ")
        np.testing.assert_allclose(out, a * 10, rtol=1e-5)
        assert classes(m, M1, "fma", "convert") == (2 * 5, 2 * 5)
        assert classes(m, M1, "devload") == (2,)  # n is not loaded

    def test_lanes_that_diverge(self):
        a, out = floats(64), empty(64)
        body = "float s = 1; for (uint j = 0; j < lane; j++) s = fma(s, a[j], 1.0f); out[i] = s;"
        m = counted(body, [a, out])
        # A simdgroup goes round for its last lane: 31 times, with 15.5 lanes on average.
        assert classes(m, M1, "fma") == (2 * 31,)
        assert 0.5 < m.active_lanes < 0.65

    def test_a_branch_that_no_lane_takes(self):
        m = counted("if (a[i] > 1e9f) out[i] = sqrt(a[i]);", [floats(64), empty(64)])
        assert classes(m, M1, "rsqrt", "devstore", "devload") == (0, 0, 2)

    def test_only_simdgroups_with_a_taker_run_a_branch(self):
        m = counted("if (i < 5) out[i] = sqrt(a[i]);", [floats(64), empty(64)])
        assert classes(m, M1, "rsqrt", "devstore", "devload") == (1, 1, 1)

    @pytest.mark.parametrize(
        "body, loads",
        [
            ("float4 v = ((device const float4*)a)[i]; out[i] = v.x + v.w;", 1),
            ("out[i] = a[8 * i] * a[8 * i + 7];", 2),
            ("half4 v = ((device const half4*)a)[i]; out[i] = v.x * v.y * v.z * v.w;", 1),
            (
                "device const uchar* b = (device const uchar*)a + 4 * i; out[i] = b[0] * b[1] * b[2] * b[3];",
                1,
            ),
            ("device const uchar* b = (device const uchar*)a + 8 * i; out[i] = b[0] * b[7];", 2),
        ],
    )
    def test_neighbours_are_one_load(self, body, loads):
        m = counted(body, [floats(1024), empty(64)])
        assert classes(m, M1, "devload") == (2 * loads,)

    def test_bytes_of_the_l1(self):
        for index, l1 in (("i", 128), ("32 * i", 32 * 32), ("2 * i", 256), ("0", 128)):
            m = counted(f"out[i] = a[{index}];", [floats(32 * 64), empty(64)])
            # Sectors of 32 bytes; one that many lanes read is delivered to each. And the stores.
            assert m.traffic.l1 == 2 * l1 + 256, index

    def test_threadgroup_memory(self):
        body = "threadgroup float t[64]; t[i] = a[i]; threadgroup_barrier(mem_flags::mem_threadgroup);"
        a, out = floats(64), empty(64)
        m = counted(body + "out[i] = t[63 - i];", [a, out])
        np.testing.assert_array_equal(out, a[::-1])
        assert classes(m, M1, "tgload", "tgstore", "barrier", "devload", "devstore") == (2, 2, 2, 2, 2)
        assert m.traffic.threadgroup == 2 * 256

    def test_simdgroup_functions(self):
        a, out = floats(64), empty(64)
        m = counted("out[i] = simd_sum(a[i]) + simd_shuffle_xor(a[i], 1);", [a, out])
        assert classes(m, M1, "simdsum", "shuffle", "anyshuffle") == (2, 2, 0)
        m = counted("out[i] = simd_shuffle(a[i], ushort(lane * 7 % 32));", [a, out])
        np.testing.assert_array_equal(out[:32], a[np.arange(32) * 7 % 32])
        assert classes(m, M2, "shuffle", "anyshuffle", "anyshuffle3") == (0, 2, 0)
        assert classes(m, M3, "shuffle", "anyshuffle", "anyshuffle3") == (0, 0, 2)

    @pytest.mark.parametrize(
        "type_, name",
        [("half", "mma16"), pytest.param("bfloat", "mma16", marks=SWEEP), ("float", "mma32")],
    )
    def test_matrix_products(self, type_, name):
        body = f"""
            simdgroup_matrix<{type_}, 8, 8> x, y; simdgroup_matrix<float, 8, 8> z(0);
            x.thread_elements()[0] = x.thread_elements()[1] = {type_}(a[lane]);
            y.thread_elements()[0] = y.thread_elements()[1] = {type_}(1);
            for (int k = 0; k < 3; k++) simdgroup_multiply_accumulate(z, x, y, z);
            out[2 * i] = z.thread_elements()[0]; out[2 * i + 1] = z.thread_elements()[1];"""
        m = counted(body, [floats(64), empty(128)])
        assert classes(m, M1, name) == (2 * 3,)

    def test_bfloat16_is_native_from_the_m3_on(self):
        body = "device bfloat* b = (device bfloat*)out; b[i] = bfloat(float(b[i]) * a[i]);"
        m = counted(body, [floats(64), empty(64)])
        assert classes(m, M1, "fmul", "bfwiden", "bfround") == (2, 2, 10)
        assert classes(m, M3, "fmul", "bfwiden", "bfround") == (2, 0, 0)
        assert m.slots(M1) > m.slots(M3)

    def test_halves_are_free_operands(self):
        body = "device half* h = (device half*)out; h[i] = half(float(h[i]) * a[i] + 1);"
        m = counted(body, [floats(64), empty(64)])
        assert classes(m, M1, "fma", "convert", "mov", "fadd") == (2, 0, 0, 0)

    def test_integers(self):
        body = "uint u = ((device const uint*)a)[i]; "
        for expression, name, count in (
            ("(u >> 3) & 7", "bfe", 1),
            ("u >> (u & 15)", "shiftvar", 1),
            ("u * (u + 3)", "imul", 1),
            ("(u ^ 5) | (u & 0x505)", "logic", 3),
            ("u << 7", "shift", 1),
            ("u + (u << 2)", "shift", 0),  # shifted in the add
            ("popcount(u)", "popcount", 1),
            ("u > 77 ? u : 3", "select", 1),
            ("u > 77 ? u : 3", "cmp", 0),
        ):
            m = counted(body + f"((device uint*)out)[i] = {expression};", [floats(64), empty(64)])
            assert classes(m, M1, name) == (2 * count,), (expression, name)

    def test_what_is_the_same_in_a_dispatch_is_computed_once(self):
        a, out = floats(64), empty(64)
        arguments = "constant uint& n [[buffer(2)]], "
        m = counted("out[i] = a[i] + float((n * 7 + 3) >> 2);", [a, out, np.uint32(9)], arguments=arguments)
        assert classes(m, M1, "imul", "shift", "convert", "fadd") == (0, 0, 0, 2)

    def test_a_threadgroup_that_is_cut_at_the_edge(self):
        m = counted("out[i] = a[i];", [floats(128), empty(128)], grid=2, total=(70,))
        assert classes(m, M1, "devload") == (3,)
        assert m.traffic.l1 == 9 * 32 + 70 * 4  # sectors that are read, floats that are written

    def test_results_and_counts_do_not_depend_on_where_a_buffer_lies(self):
        """The executor moves small buffers for the time of a dispatch."""
        for count in (64, 1 << 19):
            out = empty(count)
            m = counted("out[i] = a[i];", [np.ones(count, np.float32), out])
            assert classes(m, M1, "devload", "devstore", "tgload") == (2, 2, 0)
            assert out[:64].all()


class TestSampling:
    BODY = "float s = 0; for (uint j = 0; j < 40; j++) s += a[i] * float(j); out[i] = s;"

    def measured(self, limit):
        return counted(self.BODY, [floats(64000), empty(64000)], grid=1000, limit=limit)

    def test_traced_threadgroups_stand_for_all(self):
        whole, traced = self.measured(apple.Limit(groups=1000)), self.measured(apple.Limit(groups=7))
        assert traced.fraction == 1
        assert traced.classes(M1) == pytest.approx(whole.classes(M1))
        assert traced.traffic.l1 == pytest.approx(whole.traffic.l1)
        assert traced.dram_bytes == whole.dram_bytes

    def test_a_sample_is_scaled(self):
        whole, sample = (
            self.measured(apple.Limit(groups=1000)),
            self.measured(apple.Limit(groups=10, slots=0)),
        )
        assert sample.fraction == 10 / 1000
        assert sample.slots(M1) == pytest.approx(whole.slots(M1))
        assert sample.traffic.l1 == pytest.approx(whole.traffic.l1)
        assert sample.sampling_error == 0  # threadgroups are alike

    def test_the_error_of_a_sample(self):
        body = "float s = 0; for (uint j = 0; j < i / 64; j++) s += a[j]; out[i] = s;"
        buffers = [floats(64000), empty(64000)]
        whole = counted(body, buffers, grid=1000).slots(M1)
        sample = counted(body, buffers, grid=1000, limit=apple.Limit(groups=50, slots=0))
        assert 0 < sample.sampling_error < 0.15
        assert abs(sample.slots(M1) / whole - 1) < 2 * sample.sampling_error


class TestLists:
    """Kernels are not sampled if their integers may steer later kernels."""

    @pytest.mark.parametrize(
        "body, lists",
        [
            ("out[i] = a[i];", False),
            ("((device uint*)out)[i] = i;", True),
            ("((device uint4*)out)[i % 16] = uint4(i, lane, 1, 2);", True),
            ("((device uint*)out)[i] = ((device const uint*)a)[i];", True),
            ("((device uint*)out)[i] = as_type<uint>(half2(half(a[i]), half(a[i + 1])));", False),
            (
                "((device uint*)out)[i] = as_type<ushort>(half(a[i])) | as_type<ushort>(half(a[0])) << 16;",
                False,
            ),
            ("((device uint*)out)[i] = 0;", False),
            ("threadgroup uint t[64]; t[i] = i; out[i] = float(t[63 - i]);", False),
            ("atomic_fetch_add_explicit((device atomic_uint*)out, 1, memory_order_relaxed);", True),
        ],
    )
    def test_what_is_a_list(self, body, lists):
        m = counted(body, [floats(65), empty(64)])
        assert m.model.writes_lists is lists

    def test_they_are_run_whole(self):
        limit = apple.Limit(groups=4, slots=0)
        for body, fraction in (("((device uint*)out)[i] = i;", 1), ("out[i] = a[i];", 0.04)):
            assert counted(body, [floats(6400), empty(6400)], grid=100, limit=limit).fraction == fraction


def live(count: int, element: str = "float", value: str = "float") -> str:
    """A body in which so many values, read as `element`, are live at a barrier."""
    loads = "".join(f"{value} v{j} = {value}(from[i * {count} + {j} * 64]);" for j in range(count))
    stores = "".join(f"out[i * {count} + {j}] = v{j} * v{j};" for j in reversed(range(count)))
    source = f"device const {element}* from = (device const {element}*)a;"
    return f"{source} {loads} threadgroup_barrier(mem_flags::mem_device); {stores}"


class TestRegisters:
    @pytest.mark.parametrize("count", [*(pytest.param(n, marks=SWEEP) for n in (8, 24)), 60])
    def test_values_that_are_live_at_once(self, count):
        m = counted(live(count), [floats(8192), empty(4096)])
        assert count <= m.registers.registers <= count + 6

    @pytest.mark.parametrize(
        ("element", "value", "before_m3", "native"),
        [("half", "half", 16, 16), ("bfloat", "bfloat", 16, 16), ("bfloat", "float", 32, 16)],
    )
    def test_halves_take_half(self, element, value, before_m3, native):
        """A bfloat is read as a float from its own half where it is native; before the M3, floats of all of
        them are live behind the barrier."""
        m = counted(live(32, element, value), [floats(8192), empty(4096)])
        assert before_m3 <= m.registers.registers <= before_m3 + 6
        assert native <= m.model.registers(native=True).registers <= native + 6

    def test_pointers_into_threadgroup_memory_have_32_bits(self):
        """16 of them, to places that the thread finds once; what they point to is read behind a barrier."""
        places = "".join(
            f"threadgroup uint* p{j} = t + (i * {2 * j + 3} & 63); *p{j} = i;" for j in range(16)
        )
        barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
        stores = "".join(f"out[i * 16 + {j}] = float(*p{j});" for j in range(16))
        m = counted(f"threadgroup uint t[64]; {places} {barrier} {stores}", [floats(64), empty(2048)])
        assert m.registers.registers <= 24

    def test_the_address_of_a_threads_own_variable_is_a_constant(self):
        """A variable that stays in memory, written before other values are live and read behind them."""
        registers = []
        for before, behind in (("", ""), ("volatile float kept = a[i];", "out[i] = kept;")):
            m = counted(f"{before} {live(32)} {behind}", [floats(8192), empty(4096)])
            registers.append(m.registers.registers)
        assert registers[1] <= registers[0] + 1

    @pytest.mark.parametrize("variable", ["float v[4]", "float4 v"])
    def test_an_array_whose_elements_are_chosen_at_run_time_is_in_memory(self, variable):
        """And a vector, which Apple's compiler is known to index wrongly: no kernel of ours has one."""
        fill = f"{variable}; for (int j = 0; j < 4; ++j) v[j] = a[i + j];"
        for read, arrays in (("v[i & 3]", 1), ("v[1] + v[2]", 0), ("select(v[1], v[2], i > 3)", 0)):
            m = counted(f"{fill} out[i] = {read};", [floats(128), empty(64)])
            assert m.registers.arrays == arrays, read

    def test_the_table_of_threads(self):
        assert [threads_for(halves) for halves in (8, 104, 105, 208, 256, 257)] == [
            1024,
            1024,
            896,
            512,
            384,
            0,
        ]

    def test_without_running(self):
        head = "[[kernel]] void k(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]])"
        source = HEAD + head + " { a[i]++; }"
        assert 1 <= apple.registers(shader_library(source).path, "k").registers <= 8

    def test_a_bound_that_leaves_too_few(self):
        buffers = [floats(8192), empty(4096)]
        for bound, fits in ((1024, False), (640, True), (None, True)):
            attribute = f"[[max_total_threads_per_threadgroup({bound})]]" if bound else ""
            assert counted(live(60), buffers, attribute=attribute).fits is fits


class TestBounds:
    def test_a_copy_is_bound_by_memory(self):
        count = 1 << 20
        m = counted("out[i] = a[i];", [floats(count), empty(count)], grid=count // 256, threads=256)
        bounds = m.bounds(GPUS["M1 Max"])
        assert bounds.binding == "dram"
        assert bounds.dram == pytest.approx(8 * count / (409.6e3 * 0.80))
        # 64 bytes a cycle from each of 32 cores.
        assert bounds.l1 == pytest.approx(8 * count / (64 * 32 * 1296))
        assert bounds.issue == pytest.approx(m.slots(M1) / (4 * 32 * 1296))
        assert bounds.predicted_us == bounds.dram
        for gpu, rate in ((M1, 68.25e3 * 0.86), (GPUS["M4 Max"], 546e3 * 0.86), (GPUS["M5 Max"], 479e3)):
            assert m.bounds(gpu).dram == pytest.approx(8 * count / rate, rel=1e-3)

    def test_a_long_loop_is_bound_by_issue(self):
        body = "float s = a[i]; for (int j = 0; j < 1000; j++) s = fma(s, s, 1.0f); out[i] = s;"
        m = counted(body, [floats(4096), empty(4096)], grid=64)
        for gpu in (M1, GPUS["M4 Max"]):
            bounds = m.bounds(gpu)
            assert bounds.binding == "issue"
            # An fma and at most what a loop costs, unrolled or not.
            least = 128 * 1000 / 4 / gpu.core_cycles_per_us
            assert least < bounds.issue < 5 * least

    def test_more_cores_take_less_time(self):
        m = counted("out[i] = exp(a[i]);", [floats(4096), empty(4096)], grid=64)
        assert m.bounds(GPUS["M1"]).issue > 3.9 * m.bounds(GPUS["M1 Max"]).issue


class TestBanks:
    """Threadgroup memory in 32 banks of 4 bytes, by patterns whose conflicts are known."""

    def cycles(self, read: str, words: int = 1) -> float:
        """The cycles of a read by one simdgroup, behind stores without conflicts."""
        fill = "threadgroup float t[1056]; for (uint n = i; n < 1056; n += 32) t[n] = a[n];"
        body = f"{fill} threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = {read};"
        m = counted(body, [floats(1056), empty(32)], threads=32)
        stores = 1056 / 32
        cycles = m.traffic.bank_cycles - stores
        assert m.bank_conflicts == pytest.approx((stores + cycles) / (stores + words))
        return cycles

    @pytest.mark.parametrize(
        "stride, ways",
        [
            *((1, 1), (32, 32), (33, 1)),
            *(pytest.param(*case, marks=SWEEP) for case in ((2, 2), (3, 1), (8, 8), (16, 16))),
        ],
    )
    def test_strides(self, stride, ways):
        assert self.cycles(f"t[lane * {stride} + 3]") == ways

    def test_one_word_for_all_lanes_is_no_conflict(self):
        assert self.cycles("t[a[3] > 1e9f ? 7 : 5]") == 1

    def test_vectors_take_as_long_as_their_words(self):
        read = "dot(((threadgroup float4*)t)[lane], float4(1, 2, 3, 4))"
        assert self.cycles(read, words=4) == 4

    def test_conflicts_bind(self):
        """A store and a load of 32 cycles each, whose bytes alone would take 2."""
        cycles = {}
        for stride in (32, 33):
            store, load = f"t[lane * {stride}] = a[i];", f"out[i] = t[(31 - lane) * {stride}];"
            body = (
                f"threadgroup float t[1056]; {store} threadgroup_barrier(mem_flags::mem_threadgroup); {load}"
            )
            m = counted(body, [floats(32), empty(32)], threads=32)
            cycles[stride] = m.bounds(M1).threadgroup * M1.core_cycles_per_us
        assert cycles == {32: pytest.approx(2 * 32), 33: pytest.approx(2 * 2)}


class TestLinesAndOccupancy:
    @pytest.mark.parametrize("index, lines", [("i", 1), ("0", 1), ("i * 16", 16), ("i * 32", 32)])
    def test_lines_that_a_load_touches(self, index, lines):
        m = counted(f"out[i] = a[{index}];", [floats(1024), empty(32)], threads=32)
        assert m.traffic.lines == lines

    def test_many_registers_leave_few_simdgroups(self):
        """100 live values: 16 simdgroups of 24. Fewer than that issue less, or not."""
        m = counted(live(100), [floats(16384), empty(6400)])
        assert m.occupancy == m.allowed_threads // 32 / 24 < 0.7
        bounds = m.bounds(M1)
        assert m.range_us(M1) == (bounds.predicted_us, max(bounds.predicted_us, bounds.issue / m.occupancy))
        assert counted("out[i] = a[i];", [floats(64), empty(64)]).occupancy == 1


class TestFacts:
    def test_every_row_says_how_it_is_known(self):
        for fact in FACTS:
            assert fact.status in ("known", "inferred", "assumed"), fact
            assert fact.source and fact.chips, fact
        assert len({fact.name for fact in FACTS}) == len(FACTS)
        assert len(apple.table().splitlines()) == len(FACTS)

    def test_costs_are_in_the_table(self):
        text = apple.table()
        assert all(name in text for name in COSTS)
