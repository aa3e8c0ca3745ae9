"""The cases of kernels that also norm their input, add a residual, order their outputs or apply a gate."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops.families.gated_delta_rule import pending_width
from torch_moe_mps.ops.families.quantized import MATRICES
from torch_moe_mps.ops.families.selective_scan import selective_pending_shape

from .experts import LINEARS, SHAPE, SMALL_SHAPES, Case, Experts, Linear, ops
from .formats import DTYPES, FORMATS
from .operators import EPS, OperatorCase


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


class ChosenExperts(Experts):
    """Behind a norm; the first product chooses the experts."""

    how = "chosen"

    @property
    def name(self):
        return f"{super().name} {self.how} of {self.experts}"

    def inputs(self, values):
        dtype = DTYPES[self.dtype]
        return {
            "x": values.normal(self.tokens, self.hidden, dtype=dtype),
            "logits": values.normal(self.tokens, self.experts, dtype=dtype, scale=2.0),
            "norm": norm_of(values, self.hidden, self.dtype),
        }

    def called(self, t, **others):
        others |= {"top_k": self.top_k, "scoring": "softmax", "norm_topk_prob": True}
        others |= {"norm_weight": t["norm"], "norm_eps": EPS, "logits": t["logits"], "sum_eps": 0.0}
        return super().called(t | {"ids": None, "weights": None}, **others)

    def chosen(self, t):
        """Ties go to the lower id."""
        values, order = t["logits"].double().sort(stable=True, dim=-1, descending=True)
        weights, ids = values[:, : self.top_k].softmax(-1), order[:, : self.top_k]
        return t | {"weights": weights, "ids": ids}

    def expected(self, t):
        return super().expected(self.chosen(t) | {"x": normed(t["x"], t["norm"])})

    def bytes_moved(self, t, part=""):
        return super().bytes_moved(self.chosen(t), part)


class RoutedExperts(ChosenExperts):
    """The same with a launch that chooses."""

    how = "behind a router"

    def called(self, t):
        weights, ids = ops().moe_router(
            t["logits"], self.top_k, scoring="softmax", norm_topk_prob=True, sum_eps=0.0
        )
        t = t | {"ids": ids, "weights": weights}
        return Experts.called(self, t, norm_weight=t["norm"], norm_eps=EPS)


class SharedExperts(ChosenExperts):
    """And a shared expert."""

    how = "with a shared expert, chosen"

    def weights(self, values):
        shared = Experts.weights(dataclasses.replace(self, experts=1), values)
        return super().weights(values) | {f"shared_{name}": each for name, each in shared.items()}

    def stack(self, t):
        """The shared expert, by the names of the others."""
        return {name: t.get(f"shared_{name}") for name in MATRICES}

    def called(self, t, **others):
        shared = {f"shared_{n}": each if each is None else each[0] for n, each in self.stack(t).items()}
        return super().called(t, **shared, **others)

    def expected(self, t):
        of_all = {"ids": torch.zeros_like(t["x"][:, :1], dtype=torch.int32), "weights": torch.ones(1, 1)}
        shared = t | self.stack(t) | {name: each.to(t["x"].device) for name, each in of_all.items()}
        return super().expected(t) + Experts.expected(self, shared | {"x": normed(t["x"], t["norm"])})


class ApartExperts(SharedExperts):
    """The same with two launches for the shared expert."""

    how = "with a shared expert apart, chosen"

    def called(self, t):
        shared = {name: each if each is None else each[0] for name, each in self.stack(t).items()}
        norm = {"norm_weight": t["norm"], "norm_eps": EPS}
        out = ops()._mlp_quantized(t["x"], **shared, format=FORMATS[self.format].name, **norm)
        return ChosenExperts.called(self, t, shared_out=out)


# Of Qwen3-30B-A3B, gpt-oss, Mixtral, DeepSeek-V3 and Qwen3-Next.
CHOSEN = (
    ("int4", "bf16", 1, *SHAPE),
    ("mxfp4", "bf16", 1, 32, 4, 2880, 2880),
    ("int4", "bf16", 1, 8, 2, 4096, 14336),
    ("int4", "bf16", 1, 256, 8, 7168, 2048),
    ("int4", "bf16", 1, 512, 10, 2048, 512),
)


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


class WideNorm:
    """Weights of the norm in float32."""

    @property
    def name(self):
        return f"{super().name} float32 norm"

    def inputs(self, values):
        given = super().inputs(values)
        return given | {"norm": given["norm"].float()}


class WideLinear(WideNorm, FusedLinear):
    pass


class WideExperts(WideNorm, SharedExperts):
    pass


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


class Hyper(OperatorCase, fields="group tokens width dtype"):
    """Four streams after a block."""

    operator = "_hyper_connection"
    tensors = (
        "streams[tokens, 4, width] block_out[tokens, width] post[tokens, 4]:f32 comb[tokens, 4, 4]:f32"
        " base[24]:f32 fn_scale[3]:f32"
    )
    # A stream that is rounded to its other neighbour changes the sums, which are float32.
    slack = 2e-5

    @property
    def name(self):
        return f"{super().name} of four streams"

    @property
    def scales(self):
        return {"fn": (4 * self.width) ** -0.5, "comb": 0.5}


class Logits(OperatorCase, fields="group rows experts width dtype"):
    """Behind a norm."""

    operator = "router_logits"
    tensors = "x[rows, width] weight[experts, width] norm_weight[width]"
    scales: ClassVar[dict] = {"weight": 0.05}
    options: ClassVar[dict] = {"norm_eps": EPS, "factor": 0.5}


class Delta(OperatorCase, fields="group tokens key_heads heads width dtype"):
    """The delta rule with its norm, heads of one width."""

    operator = "_gated_delta_rule_"
    tensors = (
        "q[1, tokens, key_heads, width] v[1, tokens, heads, width] g[1, tokens, heads] beta[1, tokens, heads]"
        " A_log[heads]:f32 gate[1, tokens, heads, width] norm_weight[width]"
    )
    is_wide: ClassVar[bool] = False  # a decay for each channel of the keys

    @property
    def options(self):
        rule = {"l2norm_eps": EPS, "decay_form": "softplus", "beta_activation": "sigmoid"}
        return rule | {"scale": self.width**-0.5, "norm_eps": EPS}


class Drafted:
    """Behind 3 of 8 tokens that are pending; the tokens of the call are pending then."""

    @property
    def name(self):
        return f"{super().name} drafted"

    def others(self, values):
        return {"counts": values.integers(1, 1, dtype=torch.int32, low=3, high=4)}

    @property
    def options(self):
        return super().options | {"keep": True}


class DraftedDelta(Drafted, Delta):
    tensors = f"{Delta.tensors} pending_[1, heads, 8, inputs]:f32"
    scales: ClassVar[dict] = {"pending_": 0.1}

    @property
    def sizes(self):
        return vars(self) | {"inputs": pending_width(self.width, self.width, self.is_wide)}


class DraftedScan(Drafted, OperatorCase, fields="group tokens key_heads heads states width dtype"):
    """Mamba-2."""

    operator = "_gated_delta_rule_"
    tensors = (
        "q[1, tokens, key_heads, states] v[1, tokens, heads, width] beta[1, tokens, heads] A_log[heads]:f32"
        " dt_bias[heads]:f32 skip[heads]:f32 pending_[1, heads, 8, inputs]:f32"
    )
    scales: ClassVar[dict] = DraftedDelta.scales
    options: ClassVar[dict] = {
        "g": None,
        "scale": 1.0,
        "decay_form": "times_beta",
        "beta_activation": "softplus",
        "keep": True,
    }

    @property
    def name(self):
        return f"{super().name}, {self.states} states"

    @property
    def sizes(self):
        return vars(self) | {"inputs": pending_width(self.states, self.width)}


class DraftedChannels(DraftedDelta):
    """The same with a decay for each channel of the keys: Kimi's."""

    tensors = DraftedDelta.tensors.replace("g[1, tokens, heads]", "g[1, tokens, heads, width]")
    is_wide: ClassVar[bool] = True

    @property
    def name(self):
        return f"{super().name} channels"


class SelectiveScan(OperatorCase, fields="group tokens channels dtype"):
    """With 16 states a channel, a skip and a gate."""

    operator = "selective_scan_"
    tensors = (
        "x[1, tokens, channels] B[1, tokens, 16] gate[1, tokens, channels]"
        " dt_bias[channels]:f32 skip[channels]:f32"
    )


class DraftedSelective(Drafted, SelectiveScan):
    tensors = f"{SelectiveScan.tensors} pending_[1, groups, 8, inputs]:f32"
    scales: ClassVar[dict] = DraftedDelta.scales

    @property
    def sizes(self):
        groups, inputs = selective_pending_shape(self.channels, 16)
        return vars(self) | {"groups": groups, "inputs": inputs}


class DraftedConvolution(Drafted, OperatorCase, fields="group tokens channels dtype"):
    """Four taps."""

    operator = "causal_conv1d_update_"
    tensors = (
        "x[1, tokens, channels] conv_state_[1, channels, 4] weight[channels, 4] pending_[1, channels, 8]"
    )


class Pointwise(OperatorCase, fields="group tokens width dtype"):
    """A gate."""

    operator = "_pointwise"
    tensors = "a[1, tokens, width] b[width]:f32"

    @property
    def options(self):
        formula = f"sigmoid b {self.dtype}; mul a %0 {self.dtype}; add %1 0.5 f32"
        return {"formula": formula, "dtype": dtype_name(DTYPES[self.dtype])}


class Quantise(OperatorCase, fields="group tokens width to dtype"):
    """By importance; tokens are rows."""

    operator = "_quantize_by_importance"
    tensors = "weight[1, tokens, width]"

    @property
    def name(self):
        return f"{super().name} {self.to}"

    def others(self, values):
        return {"importance": values.uniform(1, self.width, low=0.0, high=4.0)}

    @property
    def options(self):
        return {"format": self.to}


class PoolWindow(OperatorCase, fields="group tokens width rate overlap dtype"):
    """In front of a window's end, or of a prompt."""

    operator = "_pool_window_"
    tensors = (
        "kv[1, tokens, overlap*width] position_bias[rate, overlap*width]:f32"
        " state_[1, overlap*rate, 2, overlap*width] entries_[1, entries, width]"
    )

    @property
    def position(self) -> int:
        return 3 * self.rate - 1

    @property
    def sizes(self):
        return vars(self) | {"entries": (self.position + self.tokens) // self.rate}

    def others(self, values):
        return {"inv_freq": values.uniform(self.width // 8, low=1e-4, high=1.0)}

    @property
    def options(self):
        return {"position": self.position}

    def bytes_moved(self, t, part=""):
        return 2 * (t["kv"].nbytes + t["gate"].nbytes) + t["entries_"].nbytes


class Tailed(OperatorCase, fields="group tokens heads width entries top_k dtype"):
    """To a window of 128 tokens and to keys that stand for four each: to all, or to `top_k` of them."""

    operator = "_cached_attention"

    @property
    def name(self):
        return f"tailed {super().name}"

    def inputs(self, values):
        shapes = {"q": (self.heads, self.tokens), "k": (1, 127 + self.tokens)}
        shapes["k_tail"] = 1, self.entries
        dtype, selected = DTYPES[self.dtype], (1, 1, self.tokens, self.top_k)
        tensors = {name: values.normal(1, *shape, self.width, dtype=dtype) for name, shape in shapes.items()}
        if self.top_k:
            tensors["indices"] = values.integers(*selected, dtype=torch.int32, low=-1, high=self.entries - 1)
        return tensors

    def given(self, t):
        both = {"v": t["k"], "v_tail": t["k_tail"], "scale": self.width**-0.5, "window": 128}
        return t | both | {"tail_rate": 4, "position": 4 * self.entries - self.tokens}


class RopeCache(OperatorCase, fields="group tokens heads key_heads width keys dtype"):
    """With norms of q and k."""

    operator = "_rope_cache_"
    tensors = (
        "q[1, tokens, heads, width] k[1, tokens, key_heads, width] v[1, tokens, key_heads, width]"
        " keys_[1, key_heads, keys, width] values_[1, key_heads, keys, width]"
        " cos[1, tokens, width] sin[1, tokens, width] q_norm_weight[width] k_norm_weight[width]"
    )
    options: ClassVar[dict] = {"norm_eps": EPS}

    def bytes_moved(self, t, part=""):
        return 2 * sum(t[name].nbytes for name in "qkv")


class RopeAttention(RopeCache):
    """And attention to the cache, in one launch."""

    operator = "_rope_attention_"
    slack = 2e-5  # of turned queries, whose errors scores multiply

    @property
    def options(self):
        return {"norm_eps": EPS, "scale": self.width**-0.5}

    def bytes_moved(self, t, part=""):
        return t["keys_"].nbytes + t["values_"].nbytes


class RopeThenAttention(RopeAttention):
    """In one launch after the other."""

    @property
    def name(self):
        return f"{super().name} in two launches"

    def call(self, t):
        given = self.given(t)
        turned = ops()._rope_cache_(**{name: value for name, value in given.items() if name != "scale"})
        return ops().cached_attention(turned, t["keys_"], t["values_"], scale=given["scale"])


# Heads, heads of keys, width and keys: Qwen3-30B-A3B, gpt-oss, GLM-4.5, Qwen3-Next.
TURNED = (
    *((32, 4, 128, 200), (32, 4, 128, 4096), (32, 4, 128, 32768)),
    *((64, 8, 64, 200), (64, 8, 64, 4096), (96, 8, 128, 4096), (16, 2, 256, 4096)),
)


class IndexKeys(OperatorCase, fields="group tokens heads width keys dtype"):
    """With queries, and no values."""

    operator = "_rope_cache_"
    mutated = ("keys_",)
    tensors = (
        "q[1, tokens, heads, width] keys_[1, 1, keys, width]"
        " cos[1, tokens, half] sin[1, tokens, half] k_norm_weight[width] k_bias[width]"
    )
    options: ClassVar[dict] = {"v": None, "values_": None, "norm_eps": EPS}

    @property
    def sizes(self):
        return vars(self) | {"half": self.width // 2}

    def others(self, values):
        return {"k": values.normal(1, self.tokens, 1, self.width, dtype=DTYPES[self.dtype], offset=1.0)}

    def bytes_moved(self, t, part=""):
        return 2 * (t["k"].nbytes + t["q"].nbytes)


class IndexTopk(OperatorCase, fields="group reduce tokens heads width keys block top_k as_bits dtype"):
    """Scores are whole numbers, so that what is chosen is known. `keys`: rows of k."""

    operator = "_index_topk"

    @property
    def name(self):
        return f"{super().name} of {self.reduce}{' as bits' * self.as_bits}"

    def inputs(self, values):
        sizes = {"q": (1, self.tokens, self.heads, self.width), "k": (1, self.keys, self.width)}
        dtype = DTYPES[self.dtype]
        return {name: values.normal(*size).round().to(dtype) for name, size in sizes.items()}

    def given(self, t):
        is_pooled = self.reduce == "heads" and self.block > 1
        return {
            **{**t, "weights": None, "top_k": self.top_k, "scale": 0.5},
            **{"reduce": self.reduce, "block": self.block, "as_bits": self.as_bits},
            "tail": int(is_pooled or self.reduce == "keys"),
            "keys": self.keys * self.block + self.block - 1 if is_pooled else 0,
        }

    def bytes_moved(self, t, part=""):
        return t["k"].nbytes


class Sample(OperatorCase, fields="group tokens vocabulary top_k top_p dtype"):
    """A token of each row."""

    operator = "_sample_with_flags"
    tensors = "logits[tokens, vocabulary]"
    scales: ClassVar[dict] = {"logits": 3.0}

    @property
    def name(self):
        return f"{super().name}, top-k {self.top_k}, top-p {self.top_p}"

    def others(self, values):
        return {"draws": values.uniform(self.tokens, self.vocabulary, low=0.01)}

    @property
    def options(self):
        return {"temperature": 0.7, "top_k": self.top_k, "top_p": self.top_p, "min_p": 0.01}

    def bytes_moved(self, t, part=""):
        return t["logits"].nbytes


def fused_cases(shape: tuple[int, ...] = SHAPE) -> list[Case]:
    formats = (("int4", "f16"), ("int8", "f16"), ("mxfp4", "bf16"), ("dense", "bf16"))
    cases: list[Case] = [FusedExperts("fused", *f, 1, *shape) for f in formats]
    cases += [family("fused", *sizes) for sizes in CHOSEN for family in (ChosenExperts, RoutedExperts)]
    apart = (SharedExperts, ApartExperts)
    cases += [family("fused", *sizes) for sizes in CHOSEN[-2:] for family in apart]
    cases += [FusedLinear("fused", "int4", "f16", t, *sizes) for sizes in LINEARS for t in (1, 8)]
    cases += [WideLinear("fused", "int4", "f16", 1, *sizes) for sizes in LINEARS]
    cases.append(WideExperts("fused", *CHOSEN[-1]))
    cases.append(ActivatedLinear("fused", "int4", "f16", 1, 2048, 260))
    cases += [Logits("fused", t, experts, 2048, "bf16") for experts in (128, 512) for t in (1, 32)]
    cases += [RopeCache("fused", t, 32, 4, 128, 4096, "bf16") for t in (1, 8)]
    both = (RopeAttention, RopeThenAttention)
    cases += [family("fused", 1, *sizes, "bf16") for sizes in TURNED for family in both]
    cases += [IndexKeys("fused", t, 64, 128, 4096, "bf16") for t in (1, 8)]
    cases += [IndexTopk("fused", "heads", 1, 64, 128, rows, 1, 2048, False, "bf16") for rows in (4096, 32768)]
    cases += [IndexTopk("fused", "keys", t, 4, 128, 32768, 128, 16, t > 1, "bf16") for t in (1, 64)]
    cases += [Sample("fused", 1, 151_936, *kept, "bf16") for kept in ((20, 0.8), (0, 0.9), (0, 1.0))]
    cases += [SelectiveScan("fused", t, 8192, "bf16") for t in (1, 1024)]
    cases += [Hyper("fused", t, 4096, "bf16") for t in (1, 8, 1024)]
    cases += [PoolWindow("fused", t, 512, *kind, "bf16") for t in (1, 1024) for kind in ((4, 2), (128, 1))]
    cases += [Pointwise("fused", t, 4096, "bf16") for t in (1, 8)]
    cases += [Quantise("fused", 4096, 4096, to, "bf16") for to in ("affine4_64", "affine8_64")]
    cases += [Tailed("fused", 1, 64, 512, 8192, selected, "bf16") for selected in (0, 512)]
    cases += [DraftedDelta("fused", t, 16, 32, 128, "bf16") for t in (2, 4)]
    cases += [DraftedChannels("fused", t, 32, 32, 128, "bf16") for t in (2, 4)]
    cases += [DraftedScan("fused", t, 8, 64, 128, 64, "bf16") for t in (2, 4)]
    behind = (DraftedSelective, DraftedConvolution)
    cases += [family("fused", t, 4096, "bf16") for family in behind for t in (1, 4)]
    return cases + [Delta("fused", t, 16, 32, 128, "bf16") for t in (1, 8, 1024)]


def chosen_variants(shape: tuple[int, ...] = SHAPE) -> list[Case]:
    """As experts.variant_cases."""
    return [ChosenExperts("variants", "int4", "f16", 1, *shape, variants=varied) for varied in (False, True)]


def sanitizer_fused() -> list[Case]:
    """Small cases of every kernel."""
    cases: list[Case] = []
    for format_, dtype in (("int4", "f16"), ("mxfp4", "bf16"), ("dense", "f32")):
        cases += [
            FusedExperts("sanitize", format_, dtype, t, *shape) for shape in SMALL_SHAPES for t in (1, 3)
        ]
    for shape in ((16, 4, 256, 192), (300, 2, 128, 64)):
        for f in (("int4", "f16"), ("mxfp4", "bf16")):
            families = (ChosenExperts, SharedExperts, WideExperts)
            cases += [family("sanitize", *f, 1, *shape) for family in families]
            cases += [family("sanitize", *f, 1, *shape, variants=True) for family in families]
    cases += [FusedLinear("sanitize", "int8", "f16", t, 320, 45) for t in (1, 3, 17, 40)]
    cases.append(FusedLinear("sanitize", "int8", "f16", 1, 2752, 45))  # simdgroups share the inputs
    cases += [WideLinear("sanitize", "int8", "f16", 1, width, 45) for width in (320, 2752)]
    cases += [ActivatedLinear("sanitize", "int8", "f16", t, 320, 45) for t in (1, 3, 17, 40)]
    cases += [Logits("sanitize", t, 45, 130, "f16") for t in (1, 3, 20)]
    cases += [RopeCache("sanitize", t, 3, 1, width, 9, "f16") for t in (1, 3) for width in (6, 64)]
    cases += [Sample("sanitize", t, 700, *kept, "f16") for t in (1, 3) for kept in ((20, 0.8), (0, 0.9))]
    for sizes in ((8, 2, 64, 9), (9, 1, 128, 300), (4, 2, 256, 40), (2, 1, 512, 9), (9, 1, 64, 300)):
        cases += [RopeAttention("sanitize", 1, *sizes, dtype) for dtype in ("f16", "f32")]
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
    cases.append(Quantise("sanitize", 7, 384, "affine3_128", "f16"))
    cases += [Tailed("sanitize", t, 9, 64, 40, selected, "f16") for t in (1, 3) for selected in (0, 5)]
    for family in (Delta, DraftedDelta, DraftedChannels):
        cases += [family("sanitize", t, 1, 2, width, "bf16") for t in (1, 3) for width in (40, 100)]
    cases += [DraftedScan("sanitize", t, 1, 2, states, 36, "bf16") for t in (1, 3) for states in (40, 100)]
    behind = (DraftedSelective, DraftedConvolution)
    return cases + [family("sanitize", t, 200, "bf16") for family in behind for t in (1, 3)]
