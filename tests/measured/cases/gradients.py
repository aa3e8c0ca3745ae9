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
            return ops().expert_mm(t["x"], t["ids"], t["weight"], None, transposed=self.transposed)
        parts = [t.get(f"weight_{part}") for part in ("packed", "scales", "zeros")]
        operator = ops()._expert_qmm_transposed if self.transposed else ops().expert_qmm
        return operator(t["x"], t["ids"], *parts, format=FORMATS[self.format].name)

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
        return ops()._expert_outer(t["a"], t["b"], t["ids"], self.experts)

    def wrong(self, before, after):
        ids, a, b = (before[name] for name in ("ids", "a", "b"))
        out = torch.zeros(after["result0"].shape, dtype=torch.float64, device=a.device)
        for e in ids.unique().tolist():
            token, slot = (ids == e).nonzero(as_tuple=True)
            out[e] = a[token, slot].double().T @ b[token].double()
        return too_far(after["result0"], out, "f32")


@dataclass
class Adapter(Case):
    """The product with an adapter of each expert, in float32, and its gradients."""

    group: str
    dtype: str
    tokens: int
    experts: int
    top_k: int
    hidden: int
    rows: int
    rank: int
    gradient: bool

    @property
    def name(self) -> str:
        what = "_expert_lora_backward" if self.gradient else "expert_lora"
        return f"{what} {self.rows} x {self.hidden} rank {self.rank} {self.dtype} T {self.tokens}"

    def inputs(self, values):
        dtype, columns = DTYPES[self.dtype], self.rank * self.experts
        return {
            "y": values.normal(self.tokens, self.top_k, self.rows, dtype=dtype),
            "x": values.normal(self.tokens, self.hidden, dtype=dtype),
            "a": values.normal(columns, self.hidden, scale=self.hidden**-0.5),
            "b": values.normal(self.rows, columns),
            "ids": values.ids(self.tokens, self.top_k, self.experts),
        }

    def call(self, t):
        listed = ops().moe_bucket(t["ids"], num_experts=self.experts) if self.tokens > 1 else (None, None)
        factors = t["y"], t["x"], t["ids"], t["a"], t["b"]
        if self.gradient:
            return ops()._expert_lora_backward(*factors, *listed, self.experts, 0.5)
        pairs = dict(zip(("pair_order", "offsets"), listed, strict=True))
        return ops().expert_lora(*factors, num_experts=self.experts, scaling=0.5, **pairs)

    def expected(self, t) -> list[Tensor]:
        y, x, a, b = (t[name].double() for name in ("y", "x", "a", "b"))
        out, dx, da, db = y.clone(), torch.zeros_like(x), torch.zeros_like(a), torch.zeros_like(b)
        for e in t["ids"].unique().tolist():
            token, slot = (t["ids"] == e).nonzero(as_tuple=True)
            own, other = a[e * self.rank : (e + 1) * self.rank], b[:, e :: self.experts]
            gradient, inner = 0.5 * y[token, slot] @ other, x[token] @ own.T
            out[token, slot] += 0.5 * inner @ other.T
            dx.index_add_(0, token, gradient @ own)
            da[e * self.rank : (e + 1) * self.rank] = gradient.T @ x[token]
            db[:, e :: self.experts] = 0.5 * y[token, slot].T @ inner
        return [dx, da, db.T] if self.gradient else [out]

    def wrong(self, before, after):
        found = [after[f"result{i}"] for i in range(3 if self.gradient else 1)]
        dtypes = [self.dtype, "f32", "f32"]
        faults = map(too_far, found, self.expected(before), dtypes[: len(found)])
        return "; ".join(filter(None, faults))


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
    for tokens, gradient in ((1, False), (512, False), (512, True), (2048, True)):
        cases.append(Adapter("gradients", "bf16", tokens, experts, top_k, hidden, 2 * inner, 4, gradient))
    for format_ in ("mxfp8", "nvfp4"):
        sizes = (2048, experts, top_k, 2 * inner, hidden)
        cases += [Product("gradients", each, format_, "bf16", *sizes) for each in (False, True)]
    sizes = ((2 * inner, 4), (4, hidden))
    return cases + [Outer("gradients", "bf16", 2048, experts, top_k, *each) for each in sizes]


def sanitizer_gradients() -> list[Case]:
    cases: list[Case] = []
    for number, (format_, dtype) in enumerate(
        (
            ("int4", "bf16"),
            ("int3", "f16"),
            ("mxfp4", "bf16"),
            ("mxfp8", "f16"),
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
    for dtype in DTYPES:
        cases += [Adapter("sanitize", dtype, 40, 5, 2, 70, 37, 3, gradient) for gradient in (False, True)]
    return cases + [Outer("sanitize", dtype, 40, 5, 2, 37, 70) for dtype in DTYPES]
