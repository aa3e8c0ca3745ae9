"""The cases of the backward of experts: transposed products, those that they belong to, outer products."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .experts import GGUF_SHAPE, SHAPE, SMALL_SHAPES, Case, distinct, ops
from .formats import DTYPES, GGUF, too_far, weight_bytes
from .formats import FORMATS as MLX_FORMATS

FORMATS = MLX_FORMATS | GGUF


@dataclass
class Product(Case):
    """A row for each pair times its expert's matrix [rows, columns], or times the transposed one."""

    group: str
    transposed: bool
    format: str
    dtype: str
    tokens: int
    experts: int
    top_k: int
    rows: int
    columns: int

    @property
    def operator(self) -> str:
        name = "expert_mm" if self.format == "dense" else "expert_qmm"
        return f"{name}{' transposed' if self.transposed else ''}"

    @property
    def name(self) -> str:
        return f"{self.operator} {self.rows} x {self.columns} {self.format} {self.dtype} T {self.tokens}"

    def weights(self, values):
        sizes = self.experts, self.rows, self.columns
        return FORMATS[self.format].make(values, "weight", *sizes, DTYPES[self.dtype])

    def inputs(self, values):
        width = self.rows if self.transposed else self.columns
        return {
            "x": values.normal(self.tokens, self.top_k, width, dtype=DTYPES[self.dtype]),
            "ids": values.ids(self.tokens, self.top_k, self.experts),
        }

    def call(self, t):
        if self.format == "dense":
            return ops().expert_mm(t["x"], t["weight"], t["ids"], None, self.transposed)
        parts = [t.get(f"weight_{part}") for part in ("packed", "scales", "biases")]
        operator = ops().expert_qmm_transposed if self.transposed else ops().expert_qmm
        return operator(t["x"], *parts, t["ids"], FORMATS[self.format].name)

    def wrong(self, before, after):
        return too_far(after["result0"].flatten(0, 1), self.expected(before), self.dtype)

    def expected(self, t) -> Tensor:
        """[pairs, width of the result]."""
        x, ids = t["x"].flatten(0, 1).double(), t["ids"].flatten()
        width = self.columns if self.transposed else self.rows
        out = torch.zeros(len(ids), width, dtype=torch.float64, device=x.device)
        for e in ids.unique().tolist():
            matrix = FORMATS[self.format].matrix(t, "weight", e)
            pairs = (ids == e).nonzero()[:, 0]
            out[pairs] = x[pairs] @ (matrix if self.transposed else matrix.T)
        return out

    def bytes_moved(self, t, part=""):
        return distinct(t["ids"]) * weight_bytes(t, "weight") + 2 * t["x"].nbytes


@dataclass
class Outer(Case):
    """For each expert, the sum over its pairs of a row on the left times one on the right."""

    group: str
    dtype: str
    tokens: int
    experts: int
    top_k: int
    left: int
    right: int

    @property
    def name(self) -> str:
        return f"expert_outer {self.left} x {self.right} {self.dtype} T {self.tokens}"

    def inputs(self, values):
        dtype = DTYPES[self.dtype]
        return {
            "a": values.normal(self.tokens, self.top_k, self.left, dtype=dtype),
            "b": values.normal(self.tokens, self.right, dtype=dtype),
            "ids": values.ids(self.tokens, self.top_k, self.experts),
        }

    def call(self, t):
        return ops().expert_outer(t["a"], t["b"], t["ids"], self.experts)

    def wrong(self, before, after):
        ids, a, b = (before[name] for name in ("ids", "a", "b"))
        out = torch.zeros(after["result0"].shape, dtype=torch.float64, device=a.device)
        for e in ids.unique().tolist():
            token, slot = (ids == e).nonzero(as_tuple=True)
            out[e] = a[token, slot].double().T @ b[token].double()
        return too_far(after["result0"], out, "f32")


def gradient_cases(shape: tuple[int, ...] = SHAPE) -> list[Case]:
    """The two matrices of a layer, forward and backward, and the factors of a LoRA of rank 4."""
    experts, top_k, hidden, inner = shape
    cases: list[Case] = []
    for format_, dtype in (("int4", "bf16"), ("mxfp4", "bf16"), ("q4_k", "f16"), ("dense", "bf16")):
        for rows, columns in ((2 * inner, hidden), (hidden, inner)):
            cases += [
                Product("gradients", transposed, format_, dtype, tokens, experts, top_k, rows, columns)
                for tokens in (512, 2048)
                for transposed in (False, True)
            ]
    sizes = ((2 * inner, 4), (4, hidden))
    return cases + [Outer("gradients", "bf16", 2048, experts, top_k, *each) for each in sizes]


def sanitizer_gradients() -> list[Case]:
    cases: list[Case] = []
    for number, (format_, dtype) in enumerate(
        (
            ("int4", "bf16"),
            ("int3", "f16"),
            ("mxfp4", "bf16"),
            ("nvfp4", "f32"),
            ("dense", "f32"),
            ("dense", "f16"),
        )
    ):
        experts, top_k, hidden, inner = SMALL_SHAPES[number % 2]
        sizes = (experts, top_k, inner, hidden)
        cases += [Product("sanitize", True, format_, dtype, tokens, *sizes) for tokens in (3, 40)]
    experts, top_k, hidden, inner = GGUF_SHAPE
    cases += [Product("sanitize", True, each, "f16", 40, experts, top_k, inner, hidden) for each in GGUF]
    return cases + [Outer("sanitize", dtype, 40, 5, 2, 37, 70) for dtype in DTYPES]
