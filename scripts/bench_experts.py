"""The experts' Metal kernels on an NVIDIA GPU, beside MLX's and the source kernels, by one translation.

    python scripts/bench_experts.py --translator DIR --mlx DIR --sources DIR [--only int4,down,layer,...]
        [--shape EXPERTS,TOP_K,HIDDEN,INTERMEDIATE]

`--translator` holds msl_cuda.py, which runs a .metal file through NVRTC; `--mlx` is the `mlx` folder with
MLX's kernel headers (mlx/backend/metal/kernels inside the wheel), `--sources` the files with the source
kernels. Needs CuPy. The times are "MSL on this GPU", never "Metal on a Mac". Weights rotate so that the cache
does not serve them, and every kernel's result is compared with float64 in the same run: a wrong one makes the
script exit with 1.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SHADERS = Path(__file__).resolve().parent.parent / "torch_moe_mps" / "shaders"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
GROUP = 64


def geometry(name: str) -> int:
    """A constant of shaders/geometry.h."""
    text = (SHADERS / "geometry.h").read_text()
    return int(re.search(rf"^GEOMETRY {name} = (\d+);", text, re.M).group(1))


SINGLE_SIMDGROUPS, SINGLE_ROWS = geometry("kSingleSimdgroups"), geometry("kSingleRows")
# For 2 to 32 tokens: rows and simdgroups of the first kernel, then of the second.
FEW = 2 * (geometry("kFewRows"), geometry("kFewSimdgroups"))
MATRIX = (geometry("kMatrixRows"), geometry("kMatrixSimdgroups"))
MATRIX += (geometry("kMatrixDownRows"), geometry("kMatrixDownSimdgroups"))
PARTS_SIMDGROUPS = geometry("kPartsSimdgroups")
TILE_ROWS, TILE_COLUMNS = geometry("kTileRows"), geometry("kTileColumns")
COMBINE_THREADS = 256
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.2e-2}  # of the largest value
METAL_TYPE = {"f32": "float", "f16": "half", "bf16": "bfloat"}
MLX_TYPE = {"f16": "float16_t", "bf16": "bfloat16_t"}


class Device:
    """CuPy and the translator; compiles what is asked for, once."""

    def __init__(self, translator: str):
        sys.path.insert(0, translator)
        import cupy
        import msl_cuda

        self.cupy, self.msl, self.libraries = cupy, msl_cuda, {}

    def library(self, source: str, include_dir: Path, **options):
        key = (source, str(options))
        if key not in self.libraries:
            self.libraries[key] = self.msl.Library(source, include_dir=str(include_dir), **options)
        return self.libraries[key]

    def microseconds(self, launches: list, count: int) -> float:
        """Median time of one launch, the launches taken in turn inside a CUDA graph."""
        state = {"next": 0}

        def step():
            launches[state["next"] % len(launches)]()
            state["next"] += 1

        return self.msl.bench(step, n=count)

    def params(self, name: str, **values):
        return self.cupy.asarray(np.frombuffer(pack_struct(name, values), np.uint8))


def pack_struct(name: str, values: dict) -> bytes:
    """The bytes of a struct of params.h; members that are not named are zero."""
    text = (SHADERS / "params.h").read_text()
    body = re.search(rf"struct {name} \{{(.*?)\}};", text, re.S).group(1)
    packed = b""
    for kind, member in re.findall(r"^\s*(\w+) (\w+);", body, re.M):
        if kind in ("uint32_t", "float"):
            packed += (np.uint32 if kind == "uint32_t" else np.float32)(values.get(member, 0)).tobytes()
        else:
            packed += pack_struct(kind, values[member])
    return packed


# Data


def to_dtype(cp, values, dtype: str):
    """float32 -> the bits of `dtype`."""
    if dtype == "f32":
        return values
    if dtype == "f16":
        return values.astype(cp.float16)
    bits = values.view(cp.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(cp.uint16)


def to_float64(cp, values, dtype: str):
    if dtype == "bf16":
        return (values.astype(cp.uint32) << 16).view(cp.float32).astype(cp.float64)
    return values.astype(cp.float64)


class Weights:
    """[E, rows, inputs] in one format, with its float64 values expert by expert."""

    def __init__(self, cp, kind: str, dtype: str, rows: int, inputs: int, seed: int):
        self.cp, self.kind, self.dtype, self.rows, self.inputs = cp, kind, dtype, rows, inputs
        random = cp.random.RandomState(seed)
        if kind == "dense":
            self.packed = cp.empty((EXPERTS, rows, inputs), cp.float32 if dtype == "f32" else cp.uint16)
            for e in range(EXPERTS):
                values = random.standard_normal((rows, inputs), dtype=cp.float32) * 0.02
                self.packed[e] = to_dtype(cp, values, dtype).view(self.packed.dtype)
            self.scales = self.biases = self.packed
            return
        self.bits = {"affine4": 4, "affine8": 8, "mxfp4": 4}[kind]
        words = (EXPERTS, rows, inputs * self.bits // 32)
        halves = random.randint(0, 2**16, (2, *words), dtype=cp.int32).astype(cp.uint32)
        self.packed = halves[0] | (halves[1] << 16)
        if kind == "mxfp4":
            self.scales = random.randint(118, 123, (EXPERTS, rows, inputs // 32)).astype(cp.uint8)
            self.biases = self.scales
            return
        groups = (EXPERTS, rows, inputs // GROUP)
        scales = (random.random_sample(groups, dtype=cp.float32) + 0.5) * (0.1 / 2**self.bits)
        self.scales = to_dtype(cp, scales, dtype)
        self.biases = to_dtype(cp, -scales * 2 ** (self.bits - 1), dtype)

    def bytes_per_expert(self) -> int:
        arrays = {id(a): a for a in (self.packed, self.scales, self.biases)}.values()
        return sum(a.nbytes for a in arrays) // EXPERTS

    def float64(self, expert: int):
        cp = self.cp
        if self.kind == "dense":
            return to_float64(
                cp,
                self.packed[expert].view(cp.float16 if self.dtype == "f16" else self.packed.dtype),
                self.dtype,
            )
        per_word = 32 // self.bits
        shifts = cp.arange(per_word, dtype=cp.uint32) * self.bits
        q = (self.packed[expert][..., None] >> shifts) & (2**self.bits - 1)
        q = q.reshape(self.rows, self.inputs)
        if self.kind == "mxfp4":
            grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            values = cp.asarray(np.concatenate([grid, -grid]))[q]
            return values * cp.repeat(2.0 ** (self.scales[expert].astype(cp.float64) - 127), 32, axis=1)
        scales = cp.repeat(to_float64(cp, self.scales[expert], self.dtype), GROUP, axis=1)
        biases = cp.repeat(to_float64(cp, self.biases[expert], self.dtype), GROUP, axis=1)
        return q * scales + biases


def rotating_ids(cp, tokens: int, sets: int, seed: int) -> list:
    """Distinct experts for each token; for one token the sets together touch every expert in turn."""
    random = np.random.RandomState(seed)
    if tokens == 1:
        order = np.concatenate([random.permutation(EXPERTS) for _ in range(-(-sets * TOP_K // EXPERTS))])
        return [
            cp.asarray(order[i * TOP_K : (i + 1) * TOP_K].astype(np.int32).reshape(1, TOP_K))
            for i in range(sets)
        ]
    choose = [[random.choice(EXPERTS, TOP_K, replace=False) for _ in range(tokens)] for _ in range(sets)]
    return [cp.asarray(np.array(ids, np.int32)) for ids in choose]


def distinct(ids) -> int:
    return len(np.unique(ids.get()))


# Our kernels


class Ours:
    """The package's kernels for one weight format and dtype, launched as csrc/experts.mm launches them."""

    def __init__(self, device: Device, kind: str, dtype: str):
        self.device, self.dtype, self.kind = device, dtype, kind
        names = ["experts.metal"] if kind == "dense" else ["quantized.h", f"quantized_{kind}.metal"]
        text = "\n".join((SHADERS / name).read_text() for name in names)
        self.suffix = dtype if kind == "dense" else f"{kind}_{dtype}"
        self.matrix = kind.startswith("affine")
        lines = re.findall(r"^#include.*$", text, re.M)
        lines += instantiations(text, METAL_TYPE[dtype], self.suffix)
        lines += ['#include "expert_combine.h"']
        lines += instantiations((SHADERS / "combine.metal").read_text(), METAL_TYPE[dtype], dtype)
        self.library = device.library("\n".join(lines), SHADERS)

    def matmul(self, ids, weights: Weights, outputs: int, gated: bool, x_per_pair: bool):
        tokens, slots = ids.shape
        return {
            "tokens": tokens,
            "slots": slots,
            "pairs": tokens * slots,
            "experts": EXPERTS,
            "inputs": weights.inputs,
            "rows": weights.rows,
            "outputs": outputs,
            "vectorised": 1,
            "bits": weights.bits if self.matrix else 0,
            "group_shift": GROUP.bit_length() - 1,
            "x_per_pair": int(x_per_pair),
            "grid_is_experts": int(tokens * slots > EXPERTS),
            "row_layout": 1 if gated else 0,
            "activation": 1 if gated else 0,
        }

    def decode_buffers(self, x, weights: Weights, ids, out) -> dict:
        """What both dispatches of decode begin with: EXPERT_BUFFERS."""
        return dict(enumerate([x, weights.packed, weights.scales, weights.biases, ids, x, out]))

    def rows(self, x, weights: Weights, ids, out, order):
        """Gate, up and silu: decode's first dispatch."""
        outputs, pairs = weights.rows // 2, ids.size
        matmul = self.matmul(ids, weights, outputs, True, False)
        if ids.shape[0] == 1:
            name, simdgroups = "expert_rows_single", SINGLE_SIMDGROUPS
            grid, units = (-(-outputs // (SINGLE_SIMDGROUPS * SINGLE_ROWS // 2)), pairs, 1), {}
        else:
            name = "expert_rows_matrix" if self.matrix else "expert_rows_few"
            rows, simdgroups, _, _ = MATRIX if self.matrix else FEW
            grid, units = self.few_grid(-(-weights.rows // (simdgroups * rows)), min(pairs, EXPERTS))
        params = self.device.params("ExpertParams", **matmul, **units)
        buffers = {**self.decode_buffers(x, weights, ids, out), 7: params, 8: order}
        return self.launch(name, buffers, grid, simdgroups * 32)

    def few_grid(self, blocks: int, units: int) -> tuple[tuple, dict]:
        """The grid of expert_rows_few or expert_rows_matrix, and the params of the latter's UnitBlocks."""
        if not self.matrix:
            return (blocks, units + 1, 1), {}
        has_long = self.dtype != "f32" and units * blocks >= 2 * geometry("kLastBlocks")
        others = min(units, -(-geometry("kLastBlocks") // blocks)) if has_long else units
        last = -(-geometry("kHalvedBlocks") // blocks) + 1 if others < units else 0
        long, middle = units - others, others + 1 - last
        grid = (-(-blocks // 2), long + 2 * middle + 4 * last, 1)
        return grid, {"long_units": long, "middle_units": middle}

    def down(self, x, weights: Weights, ids, routing, out, order):
        """Down, the sum over the experts: decode's second dispatch."""
        matmul = self.matmul(ids, weights, weights.rows, False, True)
        params = self.device.params("ExpertDownParams", matmul=matmul, combine={})
        rest = {7: routing, 8: x, 9: x, 10: x, 11: params, 12: order}
        buffers = {**self.decode_buffers(x, weights, ids, out), **rest}
        if ids.shape[0] == 1:
            return self.launch(
                "expert_down_single",
                buffers,
                (-(-weights.rows // SINGLE_ROWS), 1, 1),
                min(TOP_K, SINGLE_SIMDGROUPS) * 32,
            )
        _, _, rows, simdgroups = MATRIX if self.matrix else FEW
        name = "expert_down_matrix" if self.matrix else "expert_down_few"
        if self.matrix and min(ids.size, EXPERTS) <= PARTS_SIMDGROUPS // 2:
            name, simdgroups = "expert_down_parts", PARTS_SIMDGROUPS
        grid = (-(-weights.rows // rows), 1, 1)
        return self.launch(name, buffers, grid, simdgroups * 32, [ids.size * (rows + 1) * 4])

    def gemm(self, x, weights: Weights, ids, tiles, out, gated: bool, x_per_pair: bool):
        outputs = weights.rows // 2 if gated else weights.rows
        params = self.device.params("ExpertParams", **self.matmul(ids, weights, outputs, gated, x_per_pair))
        order, _, tile_list = tiles
        buffers = {
            0: x,
            1: weights.packed,
            2: weights.scales,
            3: weights.biases,
            4: x,
            5: out,
            6: order,
            7: tile_list,
            8: params,
        }
        columns = TILE_COLUMNS // 2 if gated else TILE_COLUMNS
        return self.launch(
            "expert_gemm", buffers, (-(-outputs // columns), len(tile_list), 1), geometry("kGemmThreads")
        )

    def combine(self, slots, ids, routing, out):
        tokens, hidden = out.shape
        matmul = {
            "tokens": tokens,
            "slots": TOP_K,
            "pairs": tokens * TOP_K,
            "experts": EXPERTS,
            "outputs": hidden,
        }
        params = self.device.params("ExpertDownParams", matmul=matmul, combine={})
        buffers = {0: slots, 1: ids, 2: routing, 3: slots, 4: slots, 5: slots, 6: out, 7: params}
        grid = (-(-hidden // (COMBINE_THREADS * geometry("kCombineColumns"))), tokens, 1)
        threads = (COMBINE_THREADS, 1, 1)
        return lambda: self.library.launch(f"expert_combine_{self.dtype}", buffers, grid, threads)

    def launch(self, name, buffers, grid, threads, threadgroup_bytes=()):
        name = f"{name}_{self.suffix}"
        used = {int(index) for (kind, index), _ in self.library.sigs[name] if kind == "buffer"}
        buffers = {index: array for index, array in buffers.items() if index in used}
        return lambda: self.library.launch(name, buffers, grid, (threads, 1, 1), threadgroup_bytes)


def instantiations(text: str, metal_type: str, suffix: str) -> list[str]:
    """The lines of a .metal file that instantiate the kernels of one format and dtype."""
    macro = re.search(r"#define INSTANTIATE_KERNEL.*?[^\\]\n", (SHADERS / "common.h").read_text(), re.S)
    body = macro.group() + re.sub(r"^#include.*$", "", text, flags=re.M)
    expanded = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", "-"], input=body, capture_output=True, text=True, check=True
    ).stdout
    statements = [s.strip() + ";" for s in expanded.split(";") if s.strip()]
    joined = [re.sub(r'"\s+"', "", s) for s in statements]
    keep = [s for s in joined if s.startswith("typedef") and re.search(rf"\b\w+_{metal_type};$", s)]
    return keep + [s for s in joined if re.search(rf'host_name\("expert_[a-z]+(_[a-z]+)*_{suffix}"\)', s)]


def tile_list(cp, ids):
    """What moe_bucket gives: pairs ordered by expert, offsets, tiles (expert, first, count, 0)."""
    flat = ids.get().reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=EXPERTS))]).astype(np.int32)
    tiles = [
        (e, first, min(TILE_ROWS, offsets[e + 1] - first), 0)
        for e in range(EXPERTS)
        for first in range(offsets[e], offsets[e + 1], TILE_ROWS)
    ]
    return cp.asarray(order), cp.asarray(offsets), cp.asarray(np.array(tiles, np.int32))


# MLX's kernels


class Mlx:
    def __init__(self, device: Device, root: str):
        self.device, self.kernels = device, "mlx/backend/metal/kernels/"
        # A copy with the part of utils.h that these kernels use; the translator has no complex numbers.
        self.root = Path(tempfile.mkdtemp())
        shutil.copytree(Path(root) / "backend/metal/kernels", self.root / self.kernels)
        utils = self.root / self.kernels / "utils.h"
        sections = re.split(r"^/{40,}\n// (.*)\n/{40,}\n", utils.read_text(), flags=re.M)
        wanted = [
            text
            for title, text in zip(sections[1::2], sections[2::2], strict=True)
            if re.match("(Indexing|Row tile)", title)
        ]
        head = f'#pragma once\n#include "{self.kernels}bf16.h"\n#include "{self.kernels}defines.h"\n'
        head += "typedef half float16_t;\nstruct complex64_t { float real; float imag; };\n"
        utils.write_text(head + "".join(wanted))
        traits = self.root / self.kernels / "steel/utils/type_traits.h"  # CUDA pointers have no address space
        text = re.sub(
            r"template <typename T>\nstruct pointer_element<(device|threadgroup) T\*> \{.*?\};\n",
            "",
            traits.read_text(),
            flags=re.S,
        )
        traits.write_text(text)

    def include(self, *headers: str) -> str:
        return "\n".join(f'#include "{self.kernels}{header}"' for header in headers) + "\n"

    # MLX's fragments are filled by lane, in the layout of Apple's GPUs. Only a slow build keeps that layout
    # and computes the right thing: it is what `checked` launches; the times are of the fast one.
    def options(self, checked: bool) -> tuple:
        return ("-DMSL_TF32", "-DMSL_APPLE_LAYOUT") if checked else ("-DMSL_TF32",)

    def quantized(self, instance: str, name: str, checked: bool = False):
        source = self.include("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
        source += f'template [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
        constants = {200: True, 201: True, 202: True}
        return self.device.library(source, self.root, constants=constants, options=self.options(checked))

    def gather_qmv(self, x, weights: Weights, lhs, rhs, out):
        """out[p] = weights[rhs[p]] @ x[lhs[p]]."""
        cp = self.device.cupy
        instance = f"affine_gather_qmv_fast<{MLX_TYPE[weights.dtype]}, {GROUP}, {weights.bits}>"
        library = self.quantized(instance, "qmv")
        n, k = weights.rows, weights.inputs
        ints = lambda *v: cp.asarray(np.array(v, np.int32))  # noqa: E731
        longs = lambda *v: cp.asarray(np.array(v, np.int64))  # noqa: E731
        buffers = {
            0: weights.packed,
            1: weights.scales,
            2: weights.biases,
            3: x,
            4: lhs,
            5: rhs,
            6: out,
            7: ints(k),
            8: ints(n),
            9: ints(1),
            10: ints(len(x), 1, k),
            11: longs(k, k, 1),
            12: ints(1),
            13: ints(EXPERTS, n, k),
            14: longs(n * k * weights.bits // 32),
            15: longs(n * k // GROUP),
            16: longs(n * k // GROUP),
            17: ints(1),
            18: ints(lhs.size),
            19: longs(1),
            20: longs(1),
        }
        used = {int(index) for (kind, index), _ in library.sigs["qmv"] if kind == "buffer"}
        buffers = {index: array for index, array in buffers.items() if index in used}
        return lambda: library.launch("qmv", buffers, (1, n // 8, lhs.size), (32, 2, 1))

    def gather_qmm(self, x, weights: Weights, offsets, out, checked=False):
        """Rows of x ordered by expert, 16 x 32 x 32 tiles."""
        cp = self.device.cupy
        types = f"{MLX_TYPE[weights.dtype]}, {GROUP}, {weights.bits}"
        instance = f"affine_gather_qmm_rhs<{types}, 16, 32, 32, 1, 2, true>"
        library = self.quantized(instance, "qmm", checked)
        m, n, k = len(x), weights.rows, weights.inputs
        ints = lambda v: cp.asarray(np.array([v], np.int32))  # noqa: E731
        buffers = {
            0: x,
            1: weights.packed,
            2: weights.scales,
            3: weights.biases,
            4: offsets,
            5: out,
            6: ints(m),
            7: ints(n),
            8: ints(k),
            9: ints(EXPERTS),
        }
        grid = (n // 32, row_tiles(offsets, 16), 1)
        return lambda: library.launch("qmm", buffers, grid, (32, 2, 1))

    def gather_mm(self, x, weights: Weights, offsets, out, checked=False):
        """Rows of x ordered by expert, 16 x 64 x 16 tiles."""
        cp = self.device.cupy
        instance = f"gather_mm_rhs<{MLX_TYPE[weights.dtype]}, 16, 64, 16, 1, 2, false, true, float>"
        source = self.include("utils.h", "steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_gather.h")
        source += f'template [[host_name("gmm")]] [[kernel]] decltype({instance}) {instance};\n'
        constants = {10: False, 200: True, 201: True, 202: True}
        library = self.device.library(source, self.root, constants=constants, options=self.options(checked))
        m, n, k = len(x), weights.rows, weights.inputs
        params = (
            np.array([m, n, k, k, k, n, n // 64, 0], np.int32).tobytes()
            + np.array([0, n * k, 0], np.int64).tobytes()
        )
        params += np.array([0, k // 16, 1, 0], np.int32).tobytes()
        buffers = {
            0: x,
            1: weights.packed,
            2: offsets,
            3: out,
            4: cp.asarray(np.frombuffer(params, np.uint8)),
            5: cp.asarray(np.array([EXPERTS], np.int32)),
        }
        grid = (n // 64, row_tiles(offsets, 16), 1)
        return lambda: library.launch("gmm", buffers, grid, (32, 2, 1))


def row_tiles(offsets, rows: int) -> int:
    """Exactly the tiles there are; MLX itself launches the upper bound."""
    return int(np.sum(-(-np.diff(offsets.get()) // rows)))


# The source kernels


class Sources:
    """float32 kernels out of the files of `folder`."""

    def __init__(self, device: Device, folder: str):
        self.device = device
        self.texts = [path.read_text() for path in sorted(Path(folder).iterdir()) if path.is_file()]

    def kernel(self, name: str):
        text = next(t for t in self.texts if f"kernel void {name}" in t)
        start = text.index(f"kernel void {name}")
        end = self.device.msl.match(text, text.index("{", start) + 1, "{", "}")
        structs = "\n".join(re.findall(r"^struct \w+ \{.*?\};", text, re.S | re.M))
        constants = "\n".join(re.findall(r"^constant [^\n(]*;", text, re.M))
        return self.device.library(
            f"#include <metal_stdlib>\nusing namespace metal;\n{constants}\n{structs}\n{text[start:end]}",
            SHADERS,
        )

    def launch(self, name, buffers, grid, threads, threadgroup_bytes=()):
        library = self.kernel(name)
        return lambda: library.launch(name, buffers, grid, (threads, 1, 1), threadgroup_bytes)


# The table


class Table:
    def __init__(self):
        self.failed = False

    def row(self, what, tokens, name, microseconds, bytes_moved, error, tolerance, baseline=None):
        speed = bytes_moved / microseconds / 1e3
        ratio = "" if baseline is None else f"{baseline / microseconds:6.2f}x"
        wrong = error is not None and not error <= tolerance
        self.failed |= wrong
        checked = "not compared: its kernels stand above" if error is None else f"error {error:.1e}"
        print(
            f"{what:34} T {tokens:5} {name:28} {microseconds:9.1f} us "
            f"{bytes_moved / 1e6:8.1f} MB {speed:7.0f} GB/s "
            f"{ratio:>8} {checked}{' WRONG' if wrong else ''}",
            flush=True,
        )


def gate_up_reference(cp, x, weights: Weights, ids, pairs, activate: bool):
    """float64 rows of some pairs: silu(gate) * up, or the raw product."""
    rows = []
    for p in pairs:
        product = weights.float64(int(ids.reshape(-1)[p])) @ to_float64(cp, x[p // TOP_K], weights.dtype)
        gate, up = product[: weights.rows // 2], product[weights.rows // 2 :]
        rows.append(gate / (1 + cp.exp(-gate)) * up if activate else product)
    return cp.stack(rows)


def error(cp, got, reference) -> float:
    scale = float(cp.abs(reference).max())
    difference = float(cp.abs(got - reference).max())
    return difference / scale if difference == difference else float("inf")


def some_pairs(count: int) -> list[int]:
    return sorted({0, 1 % count, count // 3, count // 2, 2 * count // 3, count - 1})


def activations(cp, shape, dtype: str, seed: int):
    return to_dtype(cp, cp.random.RandomState(seed).standard_normal(shape, dtype=cp.float32), dtype)


def empty(cp, shape, dtype: str):
    """Filled with NaN, so that a value never written is seen."""
    if dtype == "bf16":
        return cp.full(shape, 0x7FC0, cp.uint16)
    return cp.full(shape, cp.nan, cp.float32 if dtype == "f32" else cp.float16)


def bench_decode(device, table, mlx, kind: str, dtype: str, tokens_list):
    cp = device.cupy
    ours, weights = Ours(device, kind, dtype), Weights(cp, kind, dtype, 2 * INTERMEDIATE, HIDDEN, 1)
    for tokens in tokens_list:
        id_sets = rotating_ids(cp, tokens, 16 if tokens < 8 else 4, tokens)
        x = activations(cp, (tokens, HIDDEN), dtype, 2)
        out, order = empty(cp, (tokens * TOP_K, INTERMEDIATE), dtype), cp.zeros((tokens * TOP_K, 4), cp.int32)
        moved = np.mean([distinct(ids) for ids in id_sets]) * weights.bytes_per_expert()
        count = 64 if tokens < 8 else 32
        base = None
        if mlx is not None and kind.startswith("affine"):
            lhs = cp.asarray(np.repeat(np.arange(tokens, dtype=np.uint32), TOP_K))
            theirs = empty(cp, (tokens * TOP_K, 2 * INTERMEDIATE), dtype)
            launches = [mlx.gather_qmv(x, weights, lhs, ids, theirs) for ids in id_sets]
            launches[0]()
            pairs = some_pairs(tokens * TOP_K)
            reference = gate_up_reference(cp, x, weights, id_sets[0], pairs, False)
            wrong = error(cp, to_float64(cp, theirs[pairs], dtype), reference)
            base = device.microseconds(launches, count)
            table.row(
                f"gate+up {kind} {dtype}", tokens, "MLX gather_qmv_fast", base, moved, wrong, TOLERANCE[dtype]
            )
        launches = [ours.rows(x, weights, ids, out, order) for ids in id_sets]
        launches[0]()
        pairs = some_pairs(tokens * TOP_K)
        wrong = error(
            cp, to_float64(cp, out[pairs], dtype), gate_up_reference(cp, x, weights, id_sets[0], pairs, True)
        )
        table.row(
            f"gate+up {kind} {dtype}",
            tokens,
            "ours, with activation",
            device.microseconds(launches, count),
            moved,
            wrong,
            TOLERANCE[dtype],
            base,
        )


def bench_down(device, table, mlx, sources, kind: str, dtype: str, tokens_list):
    cp = device.cupy
    ours, weights = Ours(device, kind, dtype), Weights(cp, kind, dtype, HIDDEN, INTERMEDIATE, 3)
    for tokens in tokens_list:
        id_sets = rotating_ids(cp, tokens, 16 if tokens < 8 else 4, tokens)
        pairs = tokens * TOP_K
        x = activations(cp, (pairs, INTERMEDIATE), dtype, 4)
        routing = cp.random.RandomState(5).random_sample((tokens, TOP_K), dtype=cp.float32)
        out = empty(cp, (tokens, HIDDEN), dtype)
        moved = np.mean([distinct(ids) for ids in id_sets]) * weights.bytes_per_expert()
        count = 64 if tokens < 8 else 32
        token = tokens - 1
        ids = id_sets[0].get()[token]
        reference = sum(
            float(routing[token, k])
            * (weights.float64(int(ids[k])) @ to_float64(cp, x[token * TOP_K + k], dtype))
            for k in range(TOP_K)
        )
        base = None
        if mlx is not None and kind.startswith("affine"):
            lhs = cp.arange(pairs, dtype=cp.uint32)
            slots = empty(cp, (pairs, HIDDEN), dtype)
            matmuls = [mlx.gather_qmv(x, weights, lhs, ids, slots) for ids in id_sets]
            matmuls[0]()
            theirs = (
                to_float64(cp, slots[token * TOP_K : (token + 1) * TOP_K], dtype) * routing[token][:, None]
            ).sum(0)
            wrong = error(cp, theirs, reference)
            total = source_weighted_sum(device, sources, cp.zeros((pairs, HIDDEN), cp.float32), routing)
            both = [lambda first=first, total=total: (first(), total()) for first in matmuls]
            base = device.microseconds(both, count)
            table.row(
                f"down+combine {kind} {dtype}",
                tokens,
                "MLX + source's sum",
                base,
                moved,
                wrong,
                TOLERANCE[dtype],
            )
        order = [pair_list(cp, ids) for ids in id_sets]
        launches = [ours.down(x, weights, ids, routing, out, order[i]) for i, ids in enumerate(id_sets)]
        launches[0]()
        wrong = error(cp, to_float64(cp, out[token], dtype), reference)
        table.row(
            f"down+combine {kind} {dtype}",
            tokens,
            "ours",
            device.microseconds(launches, count),
            moved,
            wrong,
            TOLERANCE[dtype],
            base,
        )


def pair_list(cp, ids):
    """What the first kernel for 2 to 32 tokens writes for the second."""
    flat = ids.get().reshape(-1)
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=EXPERTS)
    place = np.concatenate([np.arange(count) for count in counts])
    return cp.asarray(np.stack([order, flat[order], place, counts[flat[order]]], 1).astype(np.uint32))


def source_weighted_sum(device, sources, slots, routing):
    """The source's sum over the slots: its kernel serves one token, so a launch for each."""
    cp = device.cupy
    tokens, hidden = routing.shape[0], slots.shape[1]
    out = cp.zeros((tokens, hidden), cp.float32)
    params = cp.asarray(np.array([hidden, TOP_K], np.int32))
    launches = [
        sources.launch(
            "weighted_sum_stacked_f32",
            {0: slots[t * TOP_K :], 1: routing[t], 2: out[t], 3: params},
            (-(-hidden // 256), 1, 1),
            256,
        )
        for t in range(tokens)
    ]
    return lambda: [launch() for launch in launches]


def bench_layer(device, table, mlx, sources, kind: str, dtype: str):
    """One token from the router's logits to the sum: our three dispatches beside source and MLX kernels.

    The source kernels are float32 and MLX's are not: in their chain each kernel has inputs of its own, of the
    right size.
    """
    cp = device.cupy
    ours = Ours(device, kind, dtype)
    gate_up = Weights(cp, kind, dtype, 2 * INTERMEDIATE, HIDDEN, 1)
    down = Weights(cp, kind, dtype, HIDDEN, INTERMEDIATE, 3)
    x = activations(cp, (1, HIDDEN), dtype, 2)
    hidden, out = empty(cp, (TOP_K, INTERMEDIATE), dtype), empty(cp, (1, HIDDEN), dtype)
    slots = empty(cp, (TOP_K, HIDDEN), dtype)
    ids, routing = cp.zeros((1, TOP_K), cp.int32), cp.zeros((1, TOP_K), cp.float32)
    id_sets = rotating_ids(cp, 1, 16, 1)
    routers = device.library((SHADERS / "routing.metal").read_text(), SHADERS)
    router_params = device.params(
        "RouterParams",
        rows=1,
        experts=EXPERTS,
        top_k=TOP_K,
        vectorised=1,
        groups=1,
        top_groups=1,
        normalise=1,
        norm_min=2.0**-14,
        scaling_factor=1.0,
    )
    ours_steps, their_steps, all_logits = [], [], []
    for chosen in id_sets:
        logits = cp.random.RandomState(int(chosen[0, 0])).standard_normal((1, EXPERTS), dtype=cp.float32)
        logits[0, chosen[0]] += 20
        all_logits.append(logits)
        route = {0: logits, 1: logits, 2: logits, 3: routing, 4: ids, 5: router_params}
        steps = [
            lambda b=route: routers.launch("route_f32_4", b, (1, 1, 1), (32, 1, 1)),
            ours.rows(x, gate_up, ids, hidden, ids),
            ours.down(hidden, down, ids, routing, out, ids),
        ]
        ours_steps.append(lambda steps=steps: [step() for step in steps])
        if mlx is not None:
            wide = cp.zeros((TOP_K, max(HIDDEN, 2 * INTERMEDIATE)), cp.float32)
            source_params = cp.asarray(np.array([EXPERTS, TOP_K, 1], np.int32))
            silu_params = cp.asarray(np.array([INTERMEDIATE, TOP_K], np.int32))
            steps = [
                sources.launch(
                    "moe_router_topk_softmax_f32",
                    {
                        0: logits,
                        1: cp.zeros(TOP_K, cp.int32),
                        2: cp.zeros(TOP_K, cp.float32),
                        3: source_params,
                    },
                    (1, 1, 1),
                    32,
                    [4 * (EXPERTS + 2 * TOP_K + 1)],
                ),
                mlx.gather_qmv(
                    x,
                    gate_up,
                    cp.zeros(TOP_K, cp.uint32),
                    chosen,
                    empty(cp, (TOP_K, 2 * INTERMEDIATE), dtype),
                ),
                sources.launch(
                    "silu_mul_stacked_f32",
                    {0: wide, 1: wide, 2: cp.zeros_like(wide), 3: silu_params},
                    (-(-INTERMEDIATE // 256), TOP_K, 1),
                    256,
                ),
                mlx.gather_qmv(hidden, down, cp.arange(TOP_K, dtype=cp.uint32), chosen, slots),
                source_weighted_sum(device, sources, wide[:, :HIDDEN].copy(), routing),
            ]
            their_steps.append(lambda steps=steps: [step() for step in steps])
    ours_steps[0]()
    probabilities = cp.exp(all_logits[0][0].astype(cp.float64))
    chosen = [int(e) for e in ids[0]]
    total = sum(probabilities[e] for e in chosen)
    reference = 0
    for e in chosen:
        product = gate_up.float64(e) @ to_float64(cp, x[0], dtype)
        gate, up = product[:INTERMEDIATE], product[INTERMEDIATE:]
        reference = reference + probabilities[e] / total * (
            down.float64(e) @ (gate / (1 + cp.exp(-gate)) * up)
        )
    wrong = error(cp, to_float64(cp, out[0], dtype), reference)
    wrong = wrong if set(chosen) == set(id_sets[0].get()[0].tolist()) else float("inf")
    moved = TOP_K * (gate_up.bytes_per_expert() + down.bytes_per_expert())
    base = None
    if mlx is not None:
        base = device.microseconds(their_steps, 64)
        table.row(f"layer {kind} {dtype}", 1, "source and MLX kernels", base, moved, None, 0.0)
    table.row(
        f"layer {kind} {dtype}",
        1,
        "ours",
        device.microseconds(ours_steps, 64),
        moved,
        wrong,
        TOLERANCE[dtype],
        base,
    )


def bench_prefill(device, table, mlx, kind: str, dtype: str, tokens_list):
    cp = device.cupy
    ours = Ours(device, kind, dtype)
    weights = Weights(cp, kind, dtype, 2 * INTERMEDIATE, HIDDEN, 1)
    down = Weights(cp, kind, dtype, HIDDEN, INTERMEDIATE, 3)
    for tokens in tokens_list:
        ids = rotating_ids(cp, tokens, 1, tokens)[0]
        x = activations(cp, (tokens, HIDDEN), dtype, 2)
        tiles = tile_list(cp, ids)
        order = tiles[0].get()
        out = empty(cp, (tokens * TOP_K, INTERMEDIATE), dtype)
        moved = distinct(ids) * weights.bytes_per_expert()
        pairs = some_pairs(tokens * TOP_K)
        count = 8 if tokens < 1024 else 4
        base = None
        if mlx is not None:
            gathered = x[cp.asarray(order // TOP_K)]
            theirs = empty(cp, (tokens * TOP_K, 2 * INTERMEDIATE), dtype)
            # their offsets are the starts of the groups; the last group ends at M
            matmul = mlx.gather_mm if kind == "dense" else mlx.gather_qmm
            matmul(gathered, weights, tiles[1], theirs, checked=True)()
            launch = matmul(gathered, weights, tiles[1], cp.empty_like(theirs))
            reference = gate_up_reference(cp, x, weights, ids, [int(order[p]) for p in pairs], False)
            wrong = error(cp, to_float64(cp, theirs[pairs], dtype), reference)
            base = device.microseconds([launch], count)
            name = "MLX gather_mm_rhs" if kind == "dense" else "MLX gather_qmm_rhs"
            table.row(f"prefill gate+up {kind} {dtype}", tokens, name, base, moved, wrong, TOLERANCE[dtype])
        launch = ours.gemm(x, weights, ids, tiles, out, True, False)
        launch()
        wrong = error(
            cp, to_float64(cp, out[pairs], dtype), gate_up_reference(cp, x, weights, ids, pairs, True)
        )
        table.row(
            f"prefill gate+up {kind} {dtype}",
            tokens,
            "ours, gather + activation",
            device.microseconds([launch], count),
            moved,
            wrong,
            TOLERANCE[dtype],
            base,
        )

        slots, total = empty(cp, (tokens * TOP_K, HIDDEN), dtype), empty(cp, (tokens, HIDDEN), dtype)
        routing = cp.random.RandomState(5).random_sample((tokens, TOP_K), dtype=cp.float32)
        project, combine = (
            ours.gemm(out, down, ids, tiles, slots, False, True),
            ours.combine(slots, ids, routing, total),
        )
        project()
        combine()
        token = tokens - 1
        reference = sum(
            float(routing[token, k])
            * (down.float64(int(ids[token, k])) @ to_float64(cp, out[token * TOP_K + k], dtype))
            for k in range(TOP_K)
        )
        wrong = error(cp, to_float64(cp, total[token], dtype), reference)
        moved = distinct(ids) * down.bytes_per_expert()
        time = device.microseconds([lambda a=project, b=combine: (a(), b())], count)
        table.row(
            f"prefill down+combine {kind} {dtype}", tokens, "ours", time, moved, wrong, TOLERANCE[dtype]
        )


COPY = """#include <metal_stdlib>
using namespace metal;
kernel void copy(device const float4* source [[buffer(0)]], device float4* target [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  target[i] = source[i];
}
"""


def bench_copy(device, table):
    """The ceiling: bytes read and written by a copy that the cache does not serve."""
    cp = device.cupy
    source = cp.arange(2**28, dtype=cp.float32)
    target = cp.zeros_like(source)
    library = device.library(COPY, SHADERS)
    grid = (source.size // 4 // 256, 1, 1)
    launch = lambda: library.launch("copy", {0: source, 1: target}, grid, (256, 1, 1))  # noqa: E731
    time = device.microseconds([launch], 4)
    wrong = float(cp.abs(source - target).max())
    table.row("device-to-device copy", 0, "MSL", time, 2 * source.nbytes, wrong, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--translator", required=True)
    parser.add_argument(
        "--mlx",
        help="the folder `mlx/include/mlx` of an installed mlx wheel; without it our kernels run alone",
    )
    parser.add_argument("--sources", help="needed with --mlx for the down projection and the layer")
    parser.add_argument("--only", default="copy,int4,int8,mxfp4,dense,down,layer,prefill")
    parser.add_argument("--shape", default=f"{EXPERTS},{TOP_K},{HIDDEN},{INTERMEDIATE}")
    options = parser.parse_args()
    names = ("EXPERTS", "TOP_K", "HIDDEN", "INTERMEDIATE")
    globals().update(zip(names, map(int, options.shape.split(",")), strict=True))
    if options.mlx and not (Path(options.mlx) / "backend/metal/kernels").is_dir():
        parser.error(f"--mlx {options.mlx}: there is no backend/metal/kernels in it")
    device, table = Device(options.translator), Table()
    mlx = Mlx(device, options.mlx) if options.mlx else None
    sources = Sources(device, options.sources) if options.sources else None
    wanted = set(options.only.split(","))
    if "copy" in wanted:
        bench_copy(device, table)
    if "int4" in wanted:
        bench_decode(device, table, mlx, "affine4", "f16", (1, 4, 8, 16, 32))
    if "int8" in wanted:
        bench_decode(device, table, mlx, "affine8", "f16", (1, 8))
    if "mxfp4" in wanted:
        bench_decode(device, table, None, "mxfp4", "bf16", (1, 8, 32))
    if "dense" in wanted:
        bench_decode(device, table, None, "dense", "bf16", (1, 8, 32))
    if "down" in wanted:
        bench_down(device, table, mlx, sources, "affine4", "f16", (1, 8, 32))
    if "layer" in wanted:
        bench_layer(device, table, mlx, sources, "affine4", "f16")
    if "prefill" in wanted:
        bench_prefill(device, table, mlx, "dense", "bf16", (32, 64, 512, 2048))
        bench_prefill(device, table, mlx, "affine4", "bf16", (32, 64, 512, 2048))
    return int(table.failed)


if __name__ == "__main__":
    sys.exit(main())
