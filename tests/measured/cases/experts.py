"""The cases of the experts and of single matrices: inputs, operator, float64 reference."""

from dataclasses import asdict, dataclass
from itertools import cycle, product
from typing import ClassVar

import torch
from torch import Tensor

from .formats import DTYPES, GGUF, too_far, weight_bytes
from .formats import FORMATS as MLX_FORMATS

FORMATS = MLX_FORMATS | GGUF
FAMILIES: dict[str, type] = {}
# Of the fields that are sizes, in the names of cases.
LETTERS = {
    **{"tokens": "T", "rows": "T", "experts": "E", "slots": "K", "top_k": "K", "width": "H"},
    **{"heads": "Hq", "key_heads": "Hk", "keys": "S", "block": "block", "channels": "I", "entries": "N"},
    **{"rate": "rate", "overlap": "overlap"},
}


class Case:
    """One operator on one shape. Subclasses are dataclasses; their fields define the case completely.

    `weights` and `inputs` make tensors by name from values.Values or values.Shapes; input sets share weights
    that are larger than the cache. `call` is the operator on them.
    """

    group: str
    operator: str
    dtype: str
    mutated: ClassVar[tuple[str, ...]] = ()  # inputs that the operator changes
    has_float_matrices: ClassVar[bool] = False  # of numbers that a kernel computes, which 16 bits do not hold
    parts: ClassVar[
        dict[str, str]
    ] = {}  # two parts that are timed alone too, and how the weights of each begin

    def __init_subclass__(cls):
        FAMILIES[cls.__name__] = cls

    @property
    def name(self) -> str:
        """The operator, its sizes and its dtype; each shape of an operator has another name."""
        sizes = [f"{LETTERS[field]} {size}" for field, size in asdict(self).items() if field in LETTERS]
        return " ".join([self.operator, *sizes, self.dtype])

    def weights(self, values) -> dict[str, Tensor]:
        return {}

    def inputs(self, values) -> dict[str, Tensor]:
        raise NotImplementedError

    def call(self, t: dict[str, Tensor]):
        raise NotImplementedError

    def wrong(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
        """Empty, or what is wrong. `after` has the results, and the inputs as they are then."""
        raise NotImplementedError

    def bytes_moved(self, t: dict[str, Tensor], part: str = "") -> int:
        """What the case, or a part of it, must read and write once: its inputs, if the rest is small."""
        return sum(tensor.nbytes for tensor in t.values())

    def arguments(self) -> dict:
        return asdict(self)


def family_name(case: Case) -> str:
    return type(case).__name__


def make_case(family: str, arguments: dict) -> Case:
    return FAMILIES[family](**arguments)


def ops():
    return torch.ops.moe_mps


def distinct(ids: Tensor) -> int:
    return len(ids.unique())


@dataclass
class Experts(Case):
    """The experts of a layer, silu and a sum by weights: x [T, H] -> [T, H]."""

    parts: ClassVar[dict[str, str]] = {"gate+up": "gate_up", "down": "down"}
    group: str
    format: str
    dtype: str
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tensor_units: bool = False
    variants: bool = False  # the kernels that the tuner may take, where there are some

    @property
    def name(self) -> str:
        units = " on tensor units" if self.tensor_units else " by variants" if self.variants else ""
        return f"{self.group} {self.format} {self.dtype} T {self.tokens}{units}"

    def weights(self, values):
        make, dtype = FORMATS[self.format].make, DTYPES[self.dtype]
        return {
            **make(values, "gate_up", self.experts, 2 * self.intermediate, self.hidden, dtype),
            **make(values, "down", self.experts, self.hidden, self.intermediate, dtype),
        }

    def inputs(self, values):
        return {
            "x": values.normal(self.tokens, self.hidden, dtype=DTYPES[self.dtype]),
            "ids": values.ids(self.tokens, self.top_k, self.experts),
            "weights": values.uniform(self.tokens, self.top_k),
        }

    def call(self, t):
        ops()._set_tensor_units("1" if self.tensor_units else "0")
        ops()._take_variants(self.variants)
        try:
            return self.called(t)
        finally:
            ops()._take_variants(False)
            ops()._set_tensor_units("auto")

    def called(self, t, **others):
        if self.format == "dense":
            return ops()._moe_experts(t["x"], t["weights"], t["ids"], t["gate_up"], t["down"], **others)
        matrices = [
            t.get(f"{name}_{part}") for name in ("gate_up", "down") for part in ("packed", "scales", "zeros")
        ]
        name = FORMATS[self.format].name
        return ops()._moe_experts_quantized(t["x"], t["weights"], t["ids"], *matrices, format=name, **others)

    def wrong(self, before, after):
        return too_far(after["result0"], self.expected(before), self.dtype)

    def expected(self, t) -> Tensor:
        matrix = FORMATS[self.format].matrix
        out = torch.zeros(t["x"].shape, dtype=torch.float64, device=t["x"].device)
        for e in t["ids"].unique().tolist():
            token, slot = (t["ids"] == e).nonzero(as_tuple=True)
            gate, up = (t["x"][token].double() @ matrix(t, "gate_up", e).T).chunk(2, -1)
            y = (torch.nn.functional.silu(gate) * up) @ matrix(t, "down", e).T
            out.index_add_(0, token, y * t["weights"][token, slot, None].double())
        return out

    def bytes_moved(self, t, part=""):
        names = [self.parts[part]] if part else self.parts.values()
        return distinct(t["ids"]) * sum(weight_bytes(t, name) for name in names)


@dataclass
class Linear(Case):
    """One matrix for all tokens: x [T, C] -> [T, N]. Dense weights are the only expert of a single slot."""

    group: str
    format: str
    dtype: str
    tokens: int
    inputs_: int
    outputs: int

    @property
    def name(self) -> str:
        return f"{self.group} {self.inputs_} -> {self.outputs} {self.format} {self.dtype} T {self.tokens}"

    def weights(self, values):
        make = FORMATS[self.format].make
        return make(values, "weight", 1, self.outputs, self.inputs_, DTYPES[self.dtype])

    def inputs(self, values):
        return {
            "x": values.normal(self.tokens, self.inputs_, dtype=DTYPES[self.dtype]),
            "ids": values.ids(self.tokens, 1, 1),
        }

    def call(self, t, **others):
        if self.format == "dense":
            return ops().expert_mm(t["x"], t["ids"], t["weight"])
        parts = (t.get(f"weight_{part}") for part in ("packed", "scales", "zeros"))
        matrix = (None if part is None else part[0] for part in parts)
        return ops().linear_quantized(t["x"], *matrix, format=FORMATS[self.format].name, **others)

    def wrong(self, before, after):
        return too_far(after["result0"].reshape(self.tokens, -1), self.expected(before), self.dtype)

    def expected(self, t) -> Tensor:
        return t["x"].double() @ FORMATS[self.format].matrix(t, "weight", 0).T

    def bytes_moved(self, t, part=""):
        return weight_bytes(t, "weight") + t["x"].nbytes + self.tokens * self.outputs * t["x"].itemsize


# What is run unless other shapes are asked for.
SHAPE = (128, 8, 2048, 768)  # Qwen3-30B-A3B: experts, of them a token, hidden, intermediate
LINEARS = ((2048, 6144), (4096, 4096))
# Results and paths that the timed cases leave out: every dtype, widths that end inside a tile, few experts.
SANITIZED = ("int4", "int8", "mxfp4", "dense")
SMALL_SHAPES = ((16, 4, 256, 192), (5, 2, 320, 64))
GGUF_SHAPE = (5, 2, 512, 256)  # whole blocks
OTHERS = ("nvfp4_global", "fp8_32", "fp8_128")


def expert_cases(shape: tuple[int, ...] = SHAPE) -> list[Case]:
    formats = (("int4", "f16"), ("int8", "f16"), ("mxfp4", "bf16"), ("dense", "bf16"))
    cases = [Experts("experts", *f, tokens, *shape) for f in formats for tokens in (1, 4, 8, 16, 32)]
    formats = (("int4", "bf16"), ("int8", "bf16"), ("mxfp4", "bf16"), ("dense", "bf16"))
    return cases + [Experts("prefill", *f, tokens, *shape) for f in formats for tokens in (64, 512, 2048)]


# One token, and prompts.
VARIED = (("int4", "f16", 1), ("mxfp4", "bf16", 1), ("int4", "f16", 512), ("int4", "bf16", 2048))


def variant_cases(shape: tuple[int, ...] = SHAPE) -> list[Case]:
    """Planned kernels and, behind them, those that the tuner compares with them."""
    return [Experts("variants", *of, *shape, variants=varied) for of in VARIED for varied in (False, True)]


class LinearOnUnits(Linear):
    """The same on tensor units, in the tiles of a GPU that it fills."""

    @property
    def name(self) -> str:
        return f"{super().name} on tensor units"

    def call(self, t, **others):
        ops()._set_tensor_units("1")
        ops()._plan_for(1)
        try:
            return super().call(t, **others)
        finally:
            ops()._plan_for(0)
            ops()._set_tensor_units("auto")


def linear_cases() -> list[Case]:
    tokens = (1, 2, 4, 8, 16, 32, 64, 512)
    return [Linear("linear", "int4", "f16", n, *shape) for shape in LINEARS for n in tokens]


def gguf_cases(shape: tuple[int, ...] = SHAPE) -> list[Case]:
    """Beside the affine formats with as many bits."""
    formats = ("int4", "q4_k", "int6", "q6_k")
    cases = [Experts("gguf", f, "f16", tokens, *shape) for tokens in (1, 16, 512) for f in formats]
    return cases + [Linear("gguf", f, "f16", n, *LINEARS[-1]) for n in (1, 8, 64) for f in formats]


def other_cases(shape: tuple[int, ...] = SHAPE) -> list[Case]:
    """Formats of other quantisers, beside MLX's with as many bits."""
    formats = ("nvfp4", *OTHERS, "mxfp8")
    cases = [Experts("others", f, "bf16", tokens, *shape) for tokens in (1, 16, 512) for f in formats]
    return cases + [Linear("others", f, "bf16", n, *LINEARS[-1]) for n in (1, 8, 64) for f in formats]


def sanitizer_blocks() -> list[Case]:
    """Each format of other quantisers and of GGUF."""
    cases = []
    for format_, dtype in zip((*OTHERS, *GGUF), cycle(("f16", "bf16")), strict=False):
        cases += [Experts("sanitize", format_, dtype, tokens, *GGUF_SHAPE) for tokens in (1, 3, 40)]
        cases += [Experts("sanitize", format_, dtype, 70, *GGUF_SHAPE, tensor_units=True)]
        cases += [Linear("sanitize", format_, dtype, tokens, 256, 37) for tokens in (1, 3, 40)]
    return cases


def sanitizer_cases() -> list[Case]:
    """Kernels of several dtypes are instances of one template: each case has the next of them."""
    dtypes, small = cycle(DTYPES), cycle(("f16", "bf16", "bf16"))
    kinds = list(product(SMALL_SHAPES, SANITIZED))
    cases: list[Case] = []
    for shape, format_ in kinds:
        cases += [Experts("sanitize", format_, next(dtypes), tokens, *shape) for tokens in (1, 3, 17, 40)]
        cases += [  # tiles of 32 pairs, and of 64
            Experts("sanitize", format_, next(small), tokens, *shape, tensor_units=True)
            for tokens in (70, 290)
        ]
        if format_ != "dense":
            cases += [
                Experts("sanitize", format_, next(dtypes), tokens, *shape, variants=True)
                for tokens in (1, 40)
            ]
    quantised = [format_ for format_ in SANITIZED if format_ != "dense"]
    shapes = ((40, 256, 130), (100, 128, 70))  # tiles of 32 tokens, and of 64
    return cases + [LinearOnUnits("sanitize", f, next(small), *shape) for f in quantised for shape in shapes]
