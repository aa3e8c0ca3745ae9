"""Which of Metal 4's tensor operations torch's own kernels show, and which of ours are others.

Apple's header can be compiled on a Mac alone. In AIR its templates are functions that are named by the spaces
and types of their operands, and the macOS wheel of torch has the AIR of kernels that call them.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import macos
import torch
from simulator import build, metallib
from simulator.language import strict

LIBRARIES = ("affine4_64_f16", "affine4_64_bf16", "dense_f16", "dense_bf16")  # of tensor_units_*
# Kernels of each way of giving operands: in registers, in device memory, in threadgroup memory.
_KERNELS = r"^(scaled_mm|int_mm|grouped_mm|prefill_attention)_.*mpp"
_FUNCTION = re.compile(r"@__tensorops_impl_matmul2d_op_(\w+)\(")
_SPACES = {"__local": "tg", "__global_device": "dv"}
_ELEMENTS = {"half": "f16", "__bf16": "b16", "float": "f32"}
_TENSOR = re.compile(r"metal::tensor<(\w+) (\w+), metal::extents<int, (\d+), (\d+)>, metal::(\w+)>")
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
    kind: str

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
    space, element, columns, rows, kind = found.groups()
    return Tensor(_SPACES[space], _ELEMENTS[element], int(columns), int(rows), kind)


def ours(library: str) -> Calls:
    """The calls of one of LIBRARIES, by the strict check's front end."""
    text = build.preprocess(torch.ops.moe_mps._library_source(f"tensor_units_{library}"))
    tree = strict.syntax_tree(strict.StrictTranslator(text, {})).stdout
    products = {(_tensor(left), _tensor(right)) for left, right in _RUN.findall(tree)}
    return Calls(products, {_tensor(to) for to in _STORE.findall(tree)})


def wheel() -> Path:
    """The library with the kernels of the newest torch for macOS, downloaded once."""
    return macos.torch_wheel(macos.resolve(macos.SUPPORTED[-1])) / "lib/libtorch_cpu.dylib"


def compiled(library: Path) -> dict[str, str]:
    """{name: AIR} of torch's kernels that multiply on tensor units."""
    return metallib.assembly(metallib.kernels(library, _KERNELS))


def functions(air: dict[str, str]) -> Counter:
    """{function of the tensor operations: kernels that call it}"""
    return Counter(name for text in air.values() for name in set(_FUNCTION.findall(text)))


def table() -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| our library | function of AIR | kernels of torch that call it |"
    yield "| --- | --- | ---: |"
    known = functions(compiled(wheel()))
    for library in LIBRARIES:
        for name in sorted(ours(library).functions()):
            yield f"| tensor_units_{library} | {name} | {known[name] or 'none'} |"
