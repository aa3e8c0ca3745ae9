"""Precedents of Metal 4's tensor operations, with the spaces and types of operands that ours have.

Apple's header can be compiled on a Mac alone. In AIR its templates are functions that are named by the spaces
and types of their operands. The macOS wheels of torch and of MLX have the AIR of kernels that call them;
llama.cpp's source is compiled where it starts.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import macos
import torch
from simulator import build, metallib
from simulator.language import strict

LIBRARIES = ("affine4_64_f16", "affine4_64_bf16", "dense_f16", "dense_bf16")  # of tensor_units_*
# {function that our kernels call: where it is called, and the first kernel of that name}
PRECEDENTS = {
    "run_cooperative_tg_f16_tg_f16_f32": ("torch", "scaled_mm_mpp_bfloat"),
    "run_cooperative_tg_b16_tg_b16_f32": ("llama.cpp", "kernel_mul_mm_id_bf16_f32"),
    "cooperative_tensor_store_tg_f32": ("MLX", "steel_gemm_thin_nax_nn_bfloat16_um2_un2_sm1_sn1_ks4"),
}
LLAMA_CPP = "llama.cpp at 000cfab8, ggml/src/ggml-metal/kernels/mul_mm.metal"  # same scope and descriptor
# Kernels of each way of giving operands: in registers, in device memory, in threadgroup memory.
_KERNELS = r"^(scaled_mm|int_mm|grouped_mm|prefill_attention)_.*mpp|^steel_gemm_thin_nax_n"
_FUNCTION = re.compile(r"@__tensorops_impl_matmul2d_op_(\w+)\(")
_SPACES = {"__local": "tg", "__global_device": "dv"}
_ELEMENTS = {"half": "f16", "__bf16": "b16", "float": "f32"}
_TENSOR = re.compile(r"metal::tensor<(\w+) (\w+), metal::extents<int, (\d+), (\d+)>, metal::tensor_inline>")
_RUN = re.compile(
    r"\bused run 'void \(__private (metal::tensor<.*), __private (metal::tensor<.*), __private "
)
_STORE = re.compile(r"\bused store 'void \(const __private (metal::tensor<.*>)\)")


class Tensor(NamedTuple):
    """A matrix that a kernel gives to an operation. Sizes begin with the innermost one."""

    space: str
    element: str
    columns: int
    rows: int

    def __str__(self) -> str:
        return f"{self.space}_{self.element}"


class Calls(NamedTuple):
    """Products and stores of a library: pairs of operands, and what sums are stored to."""

    products: set[tuple[Tensor, Tensor]]
    stores: set[Tensor]

    def functions(self) -> set[str]:
        """The functions of AIR that Apple's header calls for them."""
        products = {f"run_cooperative_{left}_{right}_f32" for left, right in self.products}
        return products | {f"cooperative_tensor_store_{to}" for to in self.stores}


def _tensor(text: str) -> Tensor:
    found = _TENSOR.match(text)
    assert found, text
    space, element, columns, rows = found.groups()
    return Tensor(_SPACES[space], _ELEMENTS[element], int(columns), int(rows))


def ours(library: str) -> Calls:
    """The calls of one of LIBRARIES, by the strict check's front end."""
    text = build.preprocess(torch.ops.moe_mps._library_source(f"tensor_units_{library}"))
    tree = strict.syntax_tree(strict.StrictTranslator(text, {})).stdout
    products = {(_tensor(left), _tensor(right)) for left, right in _RUN.findall(tree)}
    return Calls(products, {_tensor(to) for to in _STORE.findall(tree)})


def torchs() -> Path:
    """The library with the kernels of the newest torch for macOS, downloaded once."""
    return macos.torch_wheel(macos.resolve(macos.SUPPORTED[-1])) / "lib/libtorch_cpu.dylib"


def mlxs() -> Path:
    """MLX's kernels for the macOS that has tensor units, downloaded once."""
    folder = macos.unpacked(macos.METAL_CPP, r"mlx/lib/mlx\.metallib$", "-macos26", macos=(26, 0))
    return folder / "mlx/lib/mlx.metallib"


def compiled(library: Path) -> dict[str, str]:
    """{name: AIR} of the kernels that show how operands are given."""
    return metallib.assembly(metallib.kernels(library, _KERNELS))


def functions(air: dict[str, str]) -> dict[str, list[str]]:
    """{function of the tensor operations: kernels that call it}"""
    found: dict[str, list[str]] = {}
    for kernel, text in sorted(air.items()):
        for name in set(_FUNCTION.findall(text)):
            found.setdefault(name, []).append(kernel)
    return found


def table() -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| our library | function of AIR | kernels of torch, of MLX | else |"
    yield "| --- | --- | ---: | --- |"
    known = [functions(compiled(library)) for library in (torchs(), mlxs())]
    for library in LIBRARIES:
        for name in sorted(ours(library).functions()):
            numbers = [len(of.get(name, ())) for of in known]
            where, kernel = PRECEDENTS.get(name, ("none", ""))
            otherwise = "" if any(numbers) else f"{LLAMA_CPP}: {kernel}" if kernel else where
            yield f"| tensor_units_{library} | {name} | {numbers[0]}, {numbers[1]} | {otherwise} |"
