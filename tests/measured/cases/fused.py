"""The cases of kernels that also norm their input, add a residual, order their outputs or apply a gate."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from support import oracles, oracles_operators, oracles_sequence
from support.oracles import exact
from torch import Tensor

from .experts import LINEARS, SHAPE, SMALL_SHAPES, Case, Experts, Linear, ops
from .formats import DTYPES
from .layer import EPS, TOLERANCE, differs, differs_by


def norm_of(values, width: int, dtype: str) -> Tensor:
    return values.normal(width, dtype=DTYPES[dtype], scale=0.1, offset=1.0)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), EPS)


class FusedExperts(Experts):
    """Behind a norm, with a residual."""

    def inputs(self, values):
        residual = values.normal(self.tokens, self.hidden, dtype=DTYPES[self.dtype])
        norm = norm_of(values, self.hidden, self.dtype)
        return {**super().inputs(values), "norm": norm, "residual": residual}

    def called(self, t):
        return super().called(t, norm_weight=t["norm"], norm_eps=EPS, residual=t["residual"])

    def expected(self, t):
        return super().expected(t | {"x": normed(t["x"], t["norm"])}) + t["residual"].double()


class FusedLinear(Linear):
    """Behind a norm, with a residual, its outputs in another order."""

    def inputs(self, values):
        return {
            **super().inputs(values),
            "norm": norm_of(values, self.inputs_, self.dtype),
            "residual": values.normal(self.tokens, self.outputs, dtype=DTYPES[self.dtype]),
            "order": values.ids(1, self.outputs, self.outputs),
        }

    def call(self, t):
        options = {"norm_weight": t["norm"], "norm_eps": EPS, "residual": t["residual"]}
        return super().call(t, **options, order=t["order"].flatten())

    def expected(self, t):
        out = super().expected(t | {"x": normed(t["x"], t["norm"])})
        return out[:, t["order"].flatten().argsort()] + t["residual"].double()


class ActivatedLinear(Linear):
    """silu of a quarter of all outputs but the last four."""

    @property
    def name(self):
        return f"{super().name} silu"

    @property
    def activated(self) -> int:
        return self.outputs - 4

    def call(self, t):
        return super().call(t, activation="silu", activated=self.activated, factor=0.25)

    def expected(self, t):
        out = super().expected(t)
        out[:, : self.activated] = torch.nn.functional.silu(0.25 * out[:, : self.activated])
        return out


class GatedStreams(Linear):
    """The mean of four streams, whose gates are the outputs."""

    @property
    def name(self):
        return f"{super().name} streams"

    def inputs(self, values):
        shape = self.tokens, 4, self.outputs // 4
        return {**super().inputs(values), "streams": values.normal(*shape, dtype=DTYPES[self.dtype])}

    def call(self, t):
        return super().call(t, streams=t["streams"])

    def expected(self, t):
        gates = super().expected(t).unflatten(-1, (4, -1)).sigmoid()
        return (gates * t["streams"].double()).mean(-2)


@dataclass
class Streams(Case):
    """An operator on four streams of a residual."""

    group: str
    tokens: int
    hidden: int
    dtype: str

    @property
    def name(self):
        return f"{self.group} {self.operator} 4 of {self.hidden} T {self.tokens} {self.dtype}"

    def random(self, values, *shape: int) -> Tensor:
        return values.normal(self.tokens, *shape, dtype=DTYPES[self.dtype])


class GatedResidual(Streams):
    """fused_residual_norm of what a gate adds to four streams."""

    operator: ClassVar[str] = "fused_residual_norm"

    def inputs(self, values):
        weight = values.normal(4, self.hidden, scale=0.1, offset=1.0)
        return {
            **{"residual": self.random(values, 4, self.hidden), "input": self.random(values, self.hidden)},
            **{"weight": weight, "gate": self.random(values, 9)},
        }

    def call(self, t):
        return ops().fused_residual_norm(**self._called(t))

    def _called(self, t):
        return t | {"gate": t["gate"][:, 5:], "eps": EPS, "factor": 2.0, "gate_factor": 0.25}

    def wrong(self, before, after):
        right = oracles_operators.expected("fused_residual_norm", self._called(before))
        said = (differs(after[f"result{i}"], each.value) for i, each in enumerate(right))
        return next((each for each in said if each), "")


@dataclass
class Logits(Case):
    """router_logits behind a norm."""

    operator: ClassVar[str] = "router_logits"
    group: str
    rows: int
    experts: int
    width: int
    dtype: str

    def inputs(self, values):
        return {
            "hidden": values.normal(self.rows, self.width, dtype=DTYPES[self.dtype]),
            "router": values.normal(self.experts, self.width, dtype=DTYPES[self.dtype], scale=0.05),
            "norm": norm_of(values, self.width, self.dtype),
        }

    def call(self, t):
        return ops().router_logits(t["hidden"], t["router"], norm_weight=t["norm"], norm_eps=EPS)

    def wrong(self, before, after):
        return differs(after["result0"], oracles.gate_logits(*(exact(t) for t in before.values()), EPS))


@dataclass
class HashLogits(Case):
    """moe_hash_router behind a norm."""

    operator: ClassVar[str] = "moe_hash_router"
    group: str
    rows: int
    experts: int
    width: int
    dtype: str

    TOP_K: ClassVar[int] = 6

    def inputs(self, values):
        return {
            "hidden": values.normal(self.rows, self.width, dtype=DTYPES[self.dtype]),
            "router": values.normal(self.experts, self.width, dtype=DTYPES[self.dtype], scale=0.05),
            "norm": norm_of(values, self.width, self.dtype),
            "table": values.integers(50, self.TOP_K, dtype=torch.int64, low=0, high=self.experts),
            "tokens": values.integers(self.rows, dtype=torch.int64, low=0, high=50),
        }

    def call(self, t):
        rows = t["hidden"], t["router"], t["table"], t["tokens"]
        options = {
            "scoring": "sqrtsoftplus",
            "norm_topk_prob": True,
            "norm_weight": t["norm"],
            "norm_eps": EPS,
        }
        return ops().moe_hash_router(*rows, **options)

    def wrong(self, before, after):
        logits = oracles.gate_logits(*(exact(before[name]) for name in ("hidden", "router", "norm")), EPS)
        ids = before["table"][before["tokens"]].cpu().numpy()
        scores = oracles.SCORES["sqrtsoftplus"](np.take_along_axis(logits, ids, -1))
        if not np.array_equal(after["result1"].cpu().numpy(), ids):
            return "ids differ"
        return differs(after["result0"], scores / scores.sum(-1, keepdims=True))


RULE = {"l2norm_eps": EPS, "decay": "softplus", "beta_activation": "sigmoid"}


@dataclass
class Delta(Case):
    """linear_attention_ by the delta rule with its norm, heads of one width."""

    mutated: ClassVar[tuple[str, ...]] = ("state",)
    group: str
    tokens: int
    key_heads: int
    heads: int
    width: int
    dtype: str

    @property
    def name(self):
        heads = f"{self.key_heads}/{self.heads} of {self.width}"
        return f"{self.group} linear_attention_ {heads} T {self.tokens} {self.dtype}"

    def inputs(self, values):
        def of_heads(heads: int, *width: int) -> Tensor:
            return values.normal(1, self.tokens, heads, *width, dtype=DTYPES[self.dtype])

        return {
            "q": of_heads(self.key_heads, self.width),
            "k": of_heads(self.key_heads, self.width),
            "v": of_heads(self.heads, self.width),
            "g": of_heads(self.heads),
            "beta": of_heads(self.heads),
            "state": values.normal(1, self.heads, self.width, self.width),
            "A_log": values.normal(self.heads),
            "gate": of_heads(self.heads, self.width),
            "norm_weight": norm_of(values, self.width, self.dtype),
        }

    def call(self, t):
        names = ("q", "k", "v", "g", "state")
        options = {name: value for name, value in t.items() if name not in names}
        return ops().linear_attention_(
            *(t[name] for name in names), self.width**-0.5, **RULE, **options, norm_eps=EPS
        )

    def wrong(self, before, after):
        absent = dict.fromkeys(("dt_bias", "beta_min", "skip", "lower_bound"))
        options = {"delta": True, "scale": self.width**-0.5, "state_": before["state"]}
        value, state = oracles_sequence.recurrence(SimpleNamespace(**absent, **before, **RULE, **options))
        gate, norm = before["gate"], before["norm_weight"]
        value = oracles.round_to(value, DTYPES[self.dtype])
        scale = 1 / np.sqrt((value * value).mean(-1, keepdims=True) + EPS)
        gate = exact(gate)
        expected = value * scale * exact(norm) * gate * oracles.sigmoid(gate)
        return differs(after["result0"], expected) or differs(after["state"], state)

    def bytes_moved(self, t, part=""):
        return super().bytes_moved(t) + t["state"].nbytes + t["v"].nbytes


@dataclass
class SelectiveScan(Case):
    """selective_scan_ with 16 states a channel, a skip and a gate."""

    mutated: ClassVar[tuple[str, ...]] = ("state_",)
    group: str
    tokens: int
    channels: int
    dtype: str

    @property
    def name(self):
        return f"{self.group} selective_scan_ {self.channels} T {self.tokens} {self.dtype}"

    def inputs(self, values):
        def rows(width: int) -> Tensor:
            return values.normal(1, self.tokens, width, dtype=DTYPES[self.dtype])

        return {
            **{"x": rows(self.channels), "step": rows(self.channels), "B": rows(16), "C": rows(16)},
            **{"state_": values.normal(1, self.channels, 16), "A_log": values.normal(self.channels, 16)},
            **{"gate": rows(self.channels), "dt_bias": values.normal(self.channels)},
            "skip": values.normal(self.channels),
        }

    def call(self, t):
        return ops().selective_scan_(**t)

    def wrong(self, before, after):
        result, state, *_ = oracles_sequence.selective_scan(SimpleNamespace(**before))
        return differs(after["result0"], result) or differs(after["state_"], state)

    def bytes_moved(self, t, part=""):
        return super().bytes_moved(t) + t["state_"].nbytes + t["x"].nbytes


class Hyper(Streams):
    """hyper_connection of four streams after a block."""

    operator: ClassVar[str] = "hyper_connection"

    def inputs(self, values):
        fn = values.normal(24, 4 * self.hidden, scale=(4 * self.hidden) ** -0.5)
        gates = {"post": values.normal(self.tokens, 4), "comb": values.normal(self.tokens, 4, 4, scale=0.5)}
        sizes = {"fn": fn, "base": values.normal(24), "scale": values.normal(3)}
        streams, out = (self.random(values, *shape, self.hidden) for shape in ((4,), ()))
        return {"streams": streams, **sizes, "out": out, **gates}

    def call(self, t):
        return ops().hyper_connection(**t)

    def wrong(self, before, after):
        right = oracles_operators.expected("hyper_connection", before)
        found = [(after[f"result{i}"], each.value) for i, each in enumerate(right)]
        # A stream that is rounded to its other neighbour changes the sums, which are float32.
        least = 0.0 if self.dtype == "f32" else 2e-5
        pairs = ((value, each, max(TOLERANCE[value.dtype], least)) for value, each in found)
        return next((said for pair in pairs if (said := differs_by(*pair))), "")


@dataclass
class Pointwise(Case):
    """A gate, as a formula of elements."""

    group: str
    tokens: int
    width: int
    dtype: str

    @property
    def name(self):
        return f"{self.group} pointwise {self.width} T {self.tokens} {self.dtype}"

    @property
    def formula(self) -> str:
        return f"sigmoid b {self.dtype}; mul a %0 {self.dtype}; add %1 0.5 f32"

    def inputs(self, values):
        x = values.normal(1, self.tokens, self.width, dtype=DTYPES[self.dtype])
        return {"a": x, "b": values.normal(self.width)}

    def call(self, t):
        return ops().pointwise(t["a"], self.formula, DTYPES[self.dtype], t["b"])

    def wrong(self, before, after):
        given = {"formula": self.formula, "dtype": DTYPES[self.dtype]}
        (right,) = oracles_operators.expected("pointwise", dict(before) | given)
        return differs(after["result0"], right.value)

    def bytes_moved(self, t, part=""):
        return 2 * t["a"].nbytes


@dataclass
class PoolWindow(Case):
    """pool_window_ in front of a window's end, or of a prompt."""

    mutated: ClassVar[tuple[str, ...]] = ("state_", "entries_")
    group: str
    tokens: int
    width: int
    rate: int
    overlap: int
    dtype: str

    @property
    def name(self):
        kind = f"{self.overlap} x {self.rate} tokens of {self.width}"
        return f"{self.group} pool_window_ {kind} T {self.tokens} {self.dtype}"

    @property
    def position(self) -> int:
        return 3 * self.rate - 1

    def inputs(self, values):
        def random(*shape: int) -> Tensor:
            return values.normal(1, *shape, dtype=DTYPES[self.dtype])

        columns, rows = self.overlap * self.width, self.overlap * self.rate
        entries = (self.position + self.tokens) // self.rate
        return {
            **{name: random(self.tokens, columns) for name in ("kv", "gate")},
            "position_bias": values.normal(self.rate, columns),
            "state_": random(rows, 2, columns),
            "entries_": random(entries, self.width),
            "norm_weight": norm_of(values, self.width, "f32"),
            "inv_freq": values.uniform(self.width // 8, low=1e-4, high=1.0),
        }

    def call(self, t):
        return ops().pool_window_(**t, position=self.position)

    def wrong(self, before, after):
        given = {name: before[name] for name in before} | {"position": self.position}
        state, entries = oracles_operators.expected("pool_window_", given)
        return differs(after["state_"], state.value) or differs(after["entries_"], entries.value)

    def bytes_moved(self, t, part=""):
        return 2 * (t["kv"].nbytes + t["gate"].nbytes) + t["entries_"].nbytes


@dataclass
class Tailed(Case):
    """attention to a window of 128 tokens and to keys that stand for four each."""

    group: str
    tokens: int
    heads: int
    width: int
    entries: int
    selected: int  # 0: all
    dtype: str

    @property
    def name(self):
        kind = f"{self.heads} of {self.width}, {self.selected} of {self.entries}"
        return f"{self.group} tailed attention {kind} T {self.tokens} {self.dtype}"

    def inputs(self, values):
        def random(*shape: int) -> Tensor:
            return values.normal(1, *shape, self.width, dtype=DTYPES[self.dtype])

        tensors = {"q": random(self.heads, self.tokens), "k": random(1, 127 + self.tokens)}
        tensors["k_tail"] = random(1, self.entries)
        if self.selected:
            shape = 1, 1, self.tokens, self.selected
            tensors["indices"] = values.integers(*shape, dtype=torch.int32, low=-1, high=self.entries - 1)
        return tensors

    def call(self, t):
        return ops().attention(**self._arguments(t))

    def _arguments(self, t):
        both = {"v": t["k"], "v_tail": t["k_tail"], "scale": self.width**-0.5, "window": 128}
        return dict(t) | both | {"tail_rate": 4, "position": 4 * self.entries - self.tokens}

    def wrong(self, before, after):
        (right,) = oracles_operators.expected("attention", self._arguments(before))
        return differs(after["result0"], right.value)

    def bytes_moved(self, t, part=""):
        return 2 * t["q"].nbytes + sum(t[name].nbytes for name in ("k", "k_tail"))


@dataclass
class RopeCache(Case):
    """rope_cache_ with norms of q and k."""

    mutated: ClassVar[tuple[str, ...]] = ("keys", "values")
    group: str
    tokens: int
    heads: int
    key_heads: int
    width: int
    keys: int
    dtype: str

    @property
    def name(self):
        sizes = f"{self.heads}/{self.key_heads} of {self.width}"
        return f"{self.group} rope_cache_ {sizes} T {self.tokens} S {self.keys} {self.dtype}"

    def inputs(self, values):
        def random(*shape: int) -> Tensor:
            return values.normal(1, *shape, dtype=DTYPES[self.dtype])

        sizes = {"q": self.heads, "k": self.key_heads, "v": self.key_heads}
        return {
            **{name: random(self.tokens, heads, self.width) for name, heads in sizes.items()},
            **{name: random(self.key_heads, self.keys, self.width) for name in self.mutated},
            **{name: random(self.tokens, self.width) for name in ("cos", "sin")},
            **{name: norm_of(values, self.width, self.dtype) for name in ("q_norm", "k_norm")},
        }

    def call(self, t):
        return ops().rope_cache_(*t.values(), EPS)

    def wrong(self, before, after):
        def rotated(name: str) -> np.ndarray:
            tables, options = (before["cos"], before["sin"]), ("half", self.width, False, EPS, 0.0)
            return oracles_sequence.rotated(before[name], *tables, before[f"{name}_norm"], *options)[0]

        wrong = differs(after["result0"], rotated("q"))
        kept = self.keys - self.tokens
        for name, new in (("keys", rotated("k")), ("values", exact(before["v"]).transpose(0, 2, 1, 3))):
            if not torch.equal(after[name][:, :, :kept], before[name][:, :, :kept]):
                return f"{name}: other places are written"
            wrong = wrong or differs(after[name][:, :, kept:], new)
        return wrong

    def bytes_moved(self, t, part=""):
        return 2 * sum(t[name].nbytes for name in "qkv")


@dataclass
class IndexKeys(Case):
    """index_keys_ with queries."""

    mutated: ClassVar[tuple[str, ...]] = ("keys",)
    group: str
    tokens: int
    heads: int
    width: int
    keys: int
    dtype: str

    @property
    def name(self):
        sizes = f"{self.heads} of {self.width}"
        return f"{self.group} index_keys_ {sizes} T {self.tokens} S {self.keys} {self.dtype}"

    def inputs(self, values):
        dtype, rows = DTYPES[self.dtype], (1, self.tokens)
        return {
            "k": values.normal(*rows, self.width, dtype=dtype, offset=1.0),
            "keys": values.normal(1, self.keys, self.width, dtype=dtype),
            **{name: norm_of(values, self.width, self.dtype) for name in ("weight", "bias")},
            **{name: values.normal(*rows, self.width // 2, dtype=dtype) for name in ("cos", "sin")},
            "q": values.normal(*rows, self.heads, self.width, dtype=dtype),
        }

    def call(self, t):
        norm, rotation = (t["weight"], t["bias"], EPS), (t["cos"], t["sin"], t["q"])
        return ops().index_keys_(t["k"], t["keys"], *norm, *rotation)

    def wrong(self, before, after):
        tables, options = (before["cos"], before["sin"]), ("half", self.width // 2, False, EPS, 0.0)
        norm = (before["weight"].double(), before["bias"].double(), EPS)
        k = torch.nn.functional.layer_norm(before["k"].double(), (self.width,), *norm).unsqueeze(2)
        k, q = (oracles_sequence.rotated(x, *tables, None, *options)[0] for x in (k, before["q"]))
        kept = self.keys - self.tokens
        if not torch.equal(after["keys"][:, :kept], before["keys"][:, :kept]):
            return "keys: other places are written"
        return differs(after["result0"], q) or differs(after["keys"][:, kept:], k[:, 0])

    def bytes_moved(self, t, part=""):
        return 2 * (t["k"].nbytes + t["q"].nbytes)


@dataclass
class IndexTopk(Case):
    """index_topk; scores are whole numbers, so that what is chosen is known."""

    group: str
    reduce: str
    tokens: int
    heads: int
    width: int
    rows: int
    block: int
    top_k: int
    as_bits: bool
    dtype: str

    @property
    def name(self):
        sizes = f"{self.heads} of {self.width}, {self.top_k} of {self.rows} rows, blocks of {self.block}"
        bits = " as bits" if self.as_bits else ""
        return f"{self.group} index_topk {self.reduce} {sizes} T {self.tokens}{bits} {self.dtype}"

    def inputs(self, values):
        sizes = {"q": (1, self.tokens, self.heads, self.width), "k": (1, self.rows, self.width)}
        return {
            n: values.normal(*size, dtype=torch.float32).round().to(DTYPES[self.dtype])
            for n, size in sizes.items()
        }

    def options(self):
        is_pooled = self.reduce == "heads" and self.block > 1
        keys = self.rows * self.block + self.block - 1 if is_pooled else 0
        tail = int(is_pooled or self.reduce == "keys")
        return {
            "reduce": self.reduce,
            "block": self.block,
            "tail": tail,
            "keys": keys,
            "as_bits": self.as_bits,
        }

    def call(self, t):
        return ops().index_topk(t["q"], t["k"], None, self.top_k, 0.5, **self.options())

    def wrong(self, before, after):
        given = {"q": before["q"].cpu(), "k": before["k"].cpu(), "weights": None, "top_k": self.top_k}
        others = {"scale": 0.5, "key_range": None}
        (right,) = oracles_operators.index_topk(SimpleNamespace(**given, **others, **self.options()))
        found = after["result0"].cpu().numpy()
        return "" if (found == right.value).all() else f"{(found != right.value).sum()} places differ"

    def bytes_moved(self, t, part=""):
        return t["k"].nbytes


def fused_cases(shape: tuple[int, ...] = SHAPE) -> list[Case]:
    formats = (("int4", "f16"), ("int8", "f16"), ("mxfp4", "bf16"), ("dense", "bf16"))
    cases: list[Case] = [FusedExperts("fused", *f, 1, *shape) for f in formats]
    cases += [FusedLinear("fused", "int4", "f16", t, *sizes) for sizes in LINEARS for t in (1, 8)]
    cases += [
        ActivatedLinear("fused", "int4", "f16", 1, 2048, 260),
        GatedStreams("fused", "int4", "f16", 1, 256, 8192),
    ]
    cases += [GatedResidual("fused", t, 2048, "bf16") for t in (1, 8)]
    cases += [Logits("fused", t, experts, 2048, "bf16") for experts in (128, 512) for t in (1, 32)]
    cases += [HashLogits("fused", t, 256, 4096, "bf16") for t in (1, 2048)]
    cases += [RopeCache("fused", t, 32, 4, 128, 4096, "bf16") for t in (1, 8)]
    cases += [IndexKeys("fused", t, 64, 128, 4096, "bf16") for t in (1, 8)]
    cases += [IndexTopk("fused", "heads", 1, 64, 128, rows, 1, 2048, False, "bf16") for rows in (4096, 32768)]
    cases += [IndexTopk("fused", "keys", t, 4, 128, 32768, 128, 16, t > 1, "bf16") for t in (1, 64)]
    cases += [SelectiveScan("fused", t, 8192, "bf16") for t in (1, 1024)]
    cases += [Hyper("fused", t, 4096, "bf16") for t in (1, 8, 1024)]
    cases += [PoolWindow("fused", t, 512, *kind, "bf16") for t in (1, 1024) for kind in ((4, 2), (128, 1))]
    cases += [Pointwise("fused", t, 4096, "bf16") for t in (1, 8)]
    cases += [Tailed("fused", 1, 64, 512, 8192, selected, "bf16") for selected in (0, 512)]
    return cases + [Delta("fused", t, 16, 32, 128, "bf16") for t in (1, 8, 1024)]


def sanitizer_fused() -> list[Case]:
    """Small cases of every kernel."""
    cases: list[Case] = []
    for format_, dtype in (("int4", "f16"), ("mxfp4", "bf16"), ("dense", "f32")):
        cases += [
            FusedExperts("sanitize", format_, dtype, t, *shape) for shape in SMALL_SHAPES for t in (1, 3)
        ]
    cases += [FusedLinear("sanitize", "int8", "f16", t, 320, 45) for t in (1, 3, 17, 40)]
    cases += [ActivatedLinear("sanitize", "int8", "f16", t, 320, 45) for t in (1, 3, 17, 40)]
    cases += [GatedStreams("sanitize", "int8", "f16", t, 320, 180) for t in (1, 3)]
    cases += [GatedResidual("sanitize", t, width, "f16") for t in (1, 3) for width in (70, 4100)]
    cases += [Logits("sanitize", t, 45, 130, "f16") for t in (1, 3, 20)]
    cases += [HashLogits("sanitize", t, 45, 130, "f16") for t in (1, 3)]
    cases += [RopeCache("sanitize", t, 3, 1, width, 9, "f16") for t in (1, 3) for width in (6, 64)]
    cases += [IndexKeys("sanitize", t, 3, width, 9, "f16") for t in (1, 3) for width in (12, 64)]
    for reduce, block, bits in (
        ("heads", 1, False),
        ("heads", 4, True),
        ("keys", 32, False),
        ("keys", 5, True),
    ):
        cases += [IndexTopk("sanitize", reduce, t, 5, 30, 150, block, 3, bits, "f16") for t in (1, 3)]
    cases += [SelectiveScan("sanitize", t, 70, "bf16") for t in (1, 33)]
    cases += [Hyper("sanitize", t, width, "f16") for t in (1, 3) for width in (132, 1028)]
    cases += [PoolWindow("sanitize", t, 70, *kind, "f16") for t in (1, 21) for kind in ((4, 2), (40, 1))]
    cases += [Pointwise("sanitize", t, width, "f16") for t in (1, 3) for width in (5, 130)]
    cases += [Tailed("sanitize", t, 9, 64, 40, selected, "f16") for t in (1, 3) for selected in (0, 5)]
    return cases + [Delta("sanitize", t, 1, 2, width, "bf16") for t in (1, 3) for width in (40, 100)]
