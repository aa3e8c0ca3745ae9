"""Random arguments of every operator, from its own domain: sizes, dtypes, options.

The function that has an operator's name gives valid ones, on the CPU. What it leaves out is drawn as the
operator declares it: tensors, none where they are optional, names, flags and the numbers of NUMBERS.
"""

import functools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from support.expert_layers import ACTIVATIONS, random_options
from support.oracles_experts import group_of
from support.quantized_layers import ALL_FORMATS, EVERY_FORMAT, random_quantized
from support.values import DTYPES
from torch_moe_mps.ops._registry import DECLARED
from torch_moe_mps.ops._samples import packet
from torch_moe_mps.ops.pointwise import BINARY, OPERATIONS

IDS = (torch.int32, torch.int64)
WIDTHS = (1, 7, 31, 32, 33, 64, 100, 128, 260, 1030, 0)
COUNTS = (1, 2, 3, 5, 9, 33, 0)
# What numbers are in any operator that has an argument of this name.
NUMBERS = {
    **dict.fromkeys(("eps", "norm_eps"), (1e-6, 1e-5, 0.01)),
    **dict.fromkeys(("weight_offset", "norm_offset"), (0.0, 1.0)),
    "factor": (1.0, 0.22, -3.5),
}
# Operators whose options depend on each other: their functions give all that is no required tensor.
WHOLE = ("moe_experts", "moe_experts_quantized", "attention", "linear_attention_", "pointwise")
OUTSIDE = {torch.int32: (-1, 2**31 - 1, -(2**31)), torch.int64: (-1, 2**32, 2**40 + 1, -(2**63))}


below = functools.cache(lambda count: st.integers(0, count - 1))  # kept: it is dear to make


class Draws:
    """What hypothesis chooses. Elements of tensors come from a seed: there is nothing for it to find in
    them."""

    def __init__(self, draw):
        self.draw = draw
        self.seed = draw(st.integers(0, 2**16))
        self.generator = torch.Generator().manual_seed(self.seed)

    def one(self, *choices):
        return choices[self.draw(below(len(choices)))]

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def maybe(self, make: Callable[[], Any]) -> Any:
        return make() if self.flag() else None

    def dtype(self) -> torch.dtype:
        return self.one(*DTYPES)

    def width(self) -> int:
        return self.one(*WIDTHS)

    def count(self) -> int:
        return self.one(*COUNTS)

    def leading(self) -> tuple[int, ...]:
        return self.one((3,), (), (1,), (0,), (2, 3), (2, 0), (33,), (65,), (2, 1, 4))

    def values(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype())

    def ids(self, *shape: int, experts: int) -> Tensor:
        dtype = self.one(*IDS)
        ids = torch.randint(max(1, experts), shape, generator=self.generator)
        for value in self.one((), (experts,), OUTSIDE[dtype]):
            ids[torch.rand(shape, generator=self.generator) < 0.1] = value
        return ids.to(dtype)

    def number(self, name: str) -> float:
        return self.one(*NUMBERS[name])


def arguments_of(name: str, d: Draws) -> dict[str, Any]:
    return completed(name, d, globals()[name](d))


def completed(name: str, d: Draws, given: dict[str, Any]) -> dict[str, Any]:
    declared = DECLARED[name]
    left = [each for each in packet(name).default._schema.arguments if each.name not in given]
    tensors = [each.name for each in left if not each.has_default_value()]
    for each in left if name not in WHOLE else ():
        if each.name == "dtype":
            given["dtype"] = d.one(None, *DTYPES)
        elif str(each.type) == "bool":
            given[each.name] = d.flag()
        elif each.name in NUMBERS:
            given[each.name] = d.number(each.name)
        elif str(each.type) == "str":
            given[each.name] = d.one(*declared.allowed[each.name])
        elif str(each.type) == "Optional[Tensor]" and d.flag():
            tensors = [*dict.fromkeys([*tensors, each.name])]
        elif str(each.type) == "Optional[Tensor]":
            given[each.name] = None

    def make(_: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return d.values(*shape, dtype=dtype)

    return declared.completed(given, tensors, make, {})


# Norms


def rows(d: Draws) -> Tensor:
    return d.values(*d.leading(), d.width(), scale=d.one(1.0, 1e-3, 30.0))


def normed(d: Draws, *weights: int) -> dict[str, Any]:
    """With weights of the last dimensions, as many as one of `weights`, or without."""
    x = rows(d)
    sizes = [x.shape[-count:] for count in weights if count <= x.dim()]
    without = {"weight": None, "weight_offset": 0.0}
    return {"input": x, **(without if d.flag() else {"weight": d.values(*d.one(*sizes))})}


def rms_norm(d):
    return normed(d, 1, 2)


def layer_norm(d):
    return normed(d, 1)


def rms_norm_gated(d):
    x = rows(d)
    width = x.shape[-1]
    groups = [n for n in (1, width // 2, width) if n and width % n == 0]
    return {"input": x, "group": d.one(None, *groups)}


def fused_norm_add(d):
    return {"residual": rows(d)}


def fused_norm_add_scalar(d):
    residual = rows(d)
    return {"residual": residual, "scalar": d.values(*d.one((1,), residual.shape[-1:], ()))}


fused_residual_norm, fused_residual_norm_scalar = fused_norm_add, fused_norm_add_scalar


def fused_residual_layer_norm(d):
    residual = rows(d)
    without = {"weight": None, "weight_offset": 0.0}
    return {"residual": residual, **(without if d.flag() else {"weight": d.values(residual.shape[-1])})}


# Combine


def silu_mul_stacked(d):
    return {"gate": d.values(*d.leading(), d.width(), scale=d.one(1.0, 8.0))}


def expert_activation(d):
    options, width = {"alpha": None, "limit": None, **d.one(*ACTIVATIONS)}, d.width()
    options["gated"] = options["activation"] in ("swiglu_oai", "silu_clamped") or d.flag()
    options["interleaved"] = options["gated"] and d.flag()
    return {"rows": d.values(*d.leading(), 2 * width if options["gated"] else width), **options}


def expert_activation_backward(d):
    given = expert_activation(d)
    rows = given["rows"]
    width = rows.shape[-1] // 2 if given["gated"] else rows.shape[-1]
    return {"dy": d.values(*rows.shape[:-1], width, dtype=rows.dtype), **given}


def moe_weighted_reduce_backward(d):
    given = moe_weighted_reduce(d)
    slots, weights = given["expert_out"], given["weights"]
    return {"expert_out": slots, "weights": weights}


def weighted_sum_stacked(d):
    return {"slots": d.values(*d.leading(), d.one(1, 2, 3, 8, 11), d.width())}


weighted_sum_residual_stacked_ = weighted_sum_residual_norm_stacked_ = weighted_sum_stacked


def moe_weighted_reduce(d):
    tokens, top_k, width, dtype = d.count(), d.one(1, 2, 8, 10), d.width(), d.dtype()
    shape = (tokens, top_k, width) if d.flag() else (tokens * top_k, width)
    shared_out = d.maybe(lambda: d.values(tokens, width, dtype=dtype))
    shared_gate = None if shared_out is None else d.maybe(lambda: d.values(*d.one((tokens,), (tokens, 1))))
    return {
        "weights": d.values(tokens, top_k),
        "expert_out": d.values(*shape, dtype=dtype),
        "shared_gate": shared_gate,
        "shared_out": shared_out,
        "residual": d.maybe(lambda: d.values(tokens, width, dtype=dtype)),
        "gate_is_logit": shared_gate is not None and d.flag(),
    }


# Routing


def logits(d: Draws, *shape: int, special: bool) -> Tensor:
    values = d.values(*shape, scale=d.one(1.0, 8.0))
    if special and d.flag():
        for value in (math.nan, math.inf, -math.inf):
            values[torch.rand(shape, generator=d.generator) < 0.05] = value
    return values


def experts_and_top_k(d: Draws) -> tuple[int, int]:
    experts = d.one(8, 1, 2, 7, 33, 64, 128, 300, 1024)
    return experts, d.one(*(k for k in (1, 2, 8, 11, 64) if k <= experts))


def moe_router(d, sizes: tuple[int, int] | None = None, tokens: int | None = None):
    experts, top_k = sizes or experts_and_top_k(d)
    num_groups = d.one(1, 1, *(g for g in (2, 4, 8) if experts % g == 0 and experts // g >= 2))
    least = -(-top_k // (experts // num_groups))
    top_groups = d.draw(st.integers(least, num_groups))
    bias = d.maybe(lambda: d.values(experts, scale=0.1))
    masked_score = d.one(None, None, 0.0)
    plain = num_groups == 1 and bias is None and masked_score is None
    return {
        "logits": logits(d, d.count() if tokens is None else tokens, experts, special=plain),
        "top_k": top_k,
        "bias": bias,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "masked_score": masked_score,
        "norm_eps": d.one(1e-20, 1e-6, 0.0),
        "norm_min": d.one(0.0, 1e-3),
        "scaling_factor": d.one(1.0, 2.5),
    }


def moe_router_topk_softmax(d):
    experts, top_k = experts_and_top_k(d)
    return {"logits": logits(d, d.count(), experts, special=True), "top_k": top_k}


def fused_moe_routing(d):
    experts, top_k = experts_and_top_k(d)
    return {"logits": logits(d, *d.one((d.count(),), ()), experts, special=True), "top_k": top_k}


def moe_hash_router(d):
    tokens, width, experts = d.count(), d.width(), d.one(8, 1, 33)
    rows, top_k = d.one(1, 7, 40), d.one(2, 1, 33, 64)
    low, high = d.one((0, 1), (-2, 3))  # ids beyond the experts, and tokens beyond the table
    ids = torch.randint(low, experts + high, (rows, top_k), generator=d.generator)
    chosen = torch.randint(low, rows + high, (tokens,), generator=d.generator)
    return {
        "x": d.values(tokens, width),
        "weight": d.values(experts, width),
        "table": ids.to(d.one(torch.int32, torch.int64)),
        "tokens": chosen.to(d.one(torch.int32, torch.int64)),
        "sum_eps": d.one(1e-20, 0.0, 0.5),
        "scaling_factor": d.one(1.0, 2.5),
    }


def router_logits(d):
    tokens, width, experts = d.count(), d.width(), d.one(8, 1, 5, 33, 64, 0)
    return {"x": d.values(tokens, width), "weight": d.values(experts, width)}


def moe_gate(d):
    (experts, top_k), width = experts_and_top_k(d), d.width()
    return {
        "hidden": d.values(d.count(), width),
        "router_weight": d.values(experts, width, scale=max(1, width) ** -0.5),
        "top_k": top_k,
    }


def moe_bucket(d):
    experts = d.one(8, 1, 33, 1024)
    return {"ids": d.ids(d.count(), d.one(1, 2, 8, 0), experts=experts), "num_experts": experts}


def moe_compute_ids_tpe(d):
    rows = {name: d.one(1, 64, 65, 2**31 - 1) for name in ("gate_up_rows", "down_rows")}
    return {**moe_bucket(d), **rows}


# Experts


def norm_of_input(d: Draws, width: int) -> dict[str, Any]:
    numbers = {name: d.number(name) for name in ("norm_eps", "norm_offset")}
    return {"norm_weight": d.maybe(lambda: d.values(width)), **numbers}


def layer_of_experts(d: Draws, sizes: tuple[int, ...]) -> tuple[tuple, dict[str, Any], dict[str, Any]]:
    """(T, K, E, H, I), the arguments around the weights, and options."""
    tokens, slots = d.one(1, 2, 3, 5, 9, 33, 40, 70, 0), d.one(1, 2, 3, 8)
    shape = (tokens, slots, d.one(4, 1, 7, 17), d.one(*sizes), d.one(*sizes))
    dtype = d.dtype()
    around = {
        "x": d.values(tokens, shape[3], dtype=dtype),
        "ids": d.ids(tokens, slots, experts=shape[2]),
        "weights": d.values(tokens, slots),
    }
    return shape, around, random_options(Random(d.seed), shape, dtype, d.seed)


def heads(d, columns) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """(heads, rows, columns) of the matrices, and everything else."""
    heads, rows, transposed = d.one(2, 1, 5), d.width(), d.flag()
    leading, dtype = (d.one(1, 2), d.one(1, 2, 5, 0), heads), d.dtype()
    tail = d.maybe(lambda: d.values(*leading, d.one(1, 6, 64, 0), dtype=dtype)) if transposed else None
    x = d.values(*leading, rows if transposed else columns, dtype=dtype)
    return (heads, rows, columns), {"x": x, "transposed": transposed, "tail": tail}


def heads_mm(d):
    shape, around = heads(d, d.width())
    x = around["x"]
    dtype = x.dtype if around["transposed"] or x.dtype != torch.float32 else d.dtype()
    return {**around, "weight": d.values(*shape, dtype=dtype, scale=shape[2] ** -0.5 if shape[2] else 1.0)}


def heads_quantized(d):
    form = d.one(*EVERY_FORMAT)
    (heads_, rows, columns), around = heads(d, d.one(*columns_of(form)))
    dtype = None if around["transposed"] else d.maybe(d.dtype)
    return {**around, "format": form, **weight(d, "", heads_, rows, columns, form), "dtype": dtype}


def expert_mm(d):
    (tokens, slots, experts, hidden, rows), around, _ = layer_of_experts(d, (32, 7, 64, 100, 65, 200))
    dtype, transposed = around["x"].dtype, d.flag()
    matrix = (hidden, rows) if transposed else (rows, hidden)
    return {
        "x": d.values(tokens, slots, hidden, dtype=dtype) if d.flag() else around["x"],
        "weight": d.values(experts, *matrix, dtype=dtype, scale=hidden**-0.5),
        "ids": around["ids"],
        "bias": d.maybe(lambda: d.values(experts, rows)),
        "transposed": transposed,
    }


def expert_outer(d):
    (tokens, slots, experts, left, right), around, _ = layer_of_experts(d, (32, 7, 1, 100, 65))
    dtype = around["x"].dtype
    shape = (tokens, slots, right) if d.flag() else (tokens, right)
    return {
        "a": d.values(tokens, slots, left, dtype=dtype),
        "b": d.values(*shape, dtype=dtype),
        "ids": around["ids"],
        "experts": experts,
    }


def factors(d: Draws, experts: int, hidden: int, rows: int) -> dict[str, Tensor]:
    """Those of an adapter, of products of about 1."""
    rank, dtype = d.one(1, 3, 4, 9), d.dtype()
    return {
        "a": d.values(rank * experts, hidden, dtype=dtype, scale=max(1, hidden) ** -0.5),
        "b": d.values(rows, rank * experts, dtype=dtype, scale=rank**-0.5),
        "scaling": d.one(1.0, -0.25, 2.0),
    }


def linear_lora(d):
    leading, hidden, rows, dtype = d.leading(), d.width(), d.width(), d.dtype()
    around = {"added": d.values(*leading, rows, dtype=dtype), "x": d.values(*leading, hidden, dtype=dtype)}
    return {**around, **factors(d, 1, hidden, rows)}


def expert_lora(d):
    (tokens, slots, experts, hidden, rows), around, _ = layer_of_experts(d, (32, 7, 64, 100, 65, 200))
    dtype, ids = around["x"].dtype, around["ids"]
    listed = zip(("pair_order", "offsets"), packet("moe_bucket")(ids, experts), strict=True)
    return {
        "added": d.values(tokens, slots, rows, dtype=dtype),
        "x": d.values(tokens, slots, hidden, dtype=dtype) if d.flag() else around["x"],
        **factors(d, experts, hidden, rows),
        "ids": ids,
        "experts": experts,
        **(dict(listed) if d.flag() else {"pair_order": None, "offsets": None}),
    }


def expert_lora_backward(d):
    call = expert_lora(d)
    listed = packet("moe_bucket")(call["ids"], call["experts"])
    return {"dy": call.pop("added"), **call, **dict(zip(("pair_order", "offsets"), listed, strict=True))}


def moe_experts(d):
    (_, _, experts, hidden, inner), around, options = layer_of_experts(d, (32, 7, 64, 100, 65, 200))
    dtype, transposed = around["x"].dtype, d.flag()
    rows = 2 * inner if options["gated"] else inner
    gate_up, down = (hidden, rows) if transposed else (rows, hidden), (inner, hidden)
    return {
        **around,
        "gate_up": d.values(experts, *gate_up, dtype=dtype, scale=hidden**-0.5),
        "down": d.values(experts, *(down if transposed else down[::-1]), dtype=dtype, scale=inner**-0.5),
        "transposed": transposed,
        **options,
        **norm_of_input(d, hidden),
    }


# Quantised


def weight(d: Draws, prefix: str, experts: int | None, rows: int, columns: int, form: str) -> dict:
    tensors = random_quantized(experts or 1, rows, columns, form, d.dtype(), d.seed + rows)
    packed, *rest = tensors if experts else [None if t is None else t[0] for t in tensors]
    packed = packed.view(torch.int32) if d.flag() else packed
    return {f"{prefix}{p}": t for p, t in zip(("packed", "scales", "biases"), (packed, *rest), strict=True)}


def columns_of(form: str) -> tuple[int, ...]:
    return tuple(group_of(form) * count for count in (1, 2, 3, 5))


def expert_qmm(d):
    form = d.one(*EVERY_FORMAT)
    (tokens, slots, experts, hidden, _), around, _ = layer_of_experts(d, columns_of(form))
    rows = d.one(8, 1, 33, 64)
    x = d.values(tokens, slots, hidden, dtype=around["x"].dtype) if d.flag() else around["x"]
    return {
        **{"x": x, "ids": around["ids"], "format": form},
        **weight(d, "", experts, rows, hidden, form),
        "bias": d.maybe(lambda: d.values(experts, rows)),
    }


def two_formats(d: Draws) -> tuple[tuple, tuple, dict[str, Any], tuple[int, ...]]:
    """The formats of gate_up and down, how they are passed, and sizes that both divide."""
    form = d.one(*EVERY_FORMAT)
    down = d.one(form, form, *EVERY_FORMAT)
    passed = {"format": form} if down == form else {"format": form, "down_format": down}
    return form, down, passed, columns_of(max(form, down, key=group_of))


def moe_experts_quantized(d):
    form, down, passed, sizes = two_formats(d)
    (tokens, slots, experts, hidden, inner), around, options = layer_of_experts(d, sizes)
    rows = 2 * inner if options["gated"] else inner
    if slots <= experts and d.flag():
        router = completed("moe_router", d, moe_router(d, (experts, slots), tokens))
        names = {name: f"router_{name}" for name in ("bias", "norm_eps", "norm_min")}
        around |= {"ids": None, "weights": None}
        around |= {names.get(name, name): value for name, value in router.items()}
    matrices = weight(d, "gate_up_", experts, rows, hidden, form)
    matrices |= weight(d, "down_", experts, hidden, inner, down)
    if around["ids"] is None and d.flag():
        options |= dict.fromkeys(("shared_out", "gate_up_bias", "down_bias"))
        matrices |= {f"shared_{n}": None if m is None else m[0].clone() for n, m in matrices.items()}
    return {**around, **passed, **options, **norm_of_input(d, hidden), **matrices}


def expert_qmm_transposed(d):
    form = d.one(*EVERY_FORMAT)
    (tokens, slots, experts, hidden, _), around, _ = layer_of_experts(d, columns_of(form))
    rows = d.one(8, 1, 33, 64)
    return {
        "dy": d.values(tokens, slots, rows, dtype=around["x"].dtype),
        **{"ids": around["ids"], "format": form, "sums": d.flag()},
        **weight(d, "", experts, rows, hidden, form),
    }


def linear_quantized_transposed(d):
    form = d.one(*EVERY_FORMAT)
    columns, rows = d.one(*columns_of(form)), d.one(8, 1, 33, 64, 300)
    dy = d.values(*d.leading(), rows)
    return {"dy": dy, "format": form, **weight(d, "", None, rows, columns, form)}


def linear_quantized(d):
    form = d.one(*EVERY_FORMAT)
    columns, rows, leading = d.one(*columns_of(form)), d.one(8, 1, 33, 64, 300), d.leading()
    x = d.values(*leading, columns)
    activation = d.maybe(lambda: d.one("silu", "gelu", "gelu_tanh", "relu", "relu2"))
    factor = 1.0 if activation is None else d.one(1.0, 0.25, -2.0)
    return {
        **{"x": x, "format": form, **weight(d, "", None, rows, columns, form)},
        **{"activation": activation, "factor": factor},
        "activated": None if activation is None else d.maybe(lambda: d.one(1, rows, (rows + 1) // 2)),
        "order": d.maybe(lambda: torch.randperm(rows, generator=d.generator).int()),
        "out_dtype": d.maybe(lambda: torch.float32),
    }


def mlp_quantized(d):
    form, down, passed, sizes = two_formats(d)
    hidden, inner, leading, dtype = d.one(*sizes), d.one(*sizes), d.leading(), d.dtype()
    options = dict(d.one(*ACTIVATIONS))
    must = "limit" in options or options["activation"] == "swiglu_oai"
    gated = must or d.flag()
    rows = 2 * inner if gated else inner
    return {
        **{"x": d.values(*leading, hidden, dtype=dtype), **passed, **options, "gated": gated},
        **weight(d, "gate_up_", None, rows, hidden, form),
        **weight(d, "down_", None, hidden, inner, down),
        "interleaved": gated and d.flag(),
        "gate_up_bias": d.maybe(lambda: d.values(rows)),
        "down_bias": d.maybe(lambda: d.values(hidden)),
    }


def embedding_quantized(d):
    form = d.one(*EVERY_FORMAT)
    rows = d.one(8, 1, 33)
    return {
        **{"ids": d.ids(*d.leading(), experts=rows), "format": form, "dtype": d.dtype()},
        **weight(d, "", None, rows, d.one(*columns_of(form)), form),
    }


# Sequences


def cache(d: Draws, name: str, shape: tuple[int, ...], dtype: torch.dtype, quantised: bool) -> dict:
    """Keys or values [B, Hk, S, D]."""
    if not quantised:
        return {name: d.values(*shape, dtype=dtype)}
    batch, heads, keys, width = shape
    form = f"affine8_{32 if width % 64 else d.one(32, 64)}"
    tensors = random_quantized(batch * heads, keys, width, form, dtype, d.seed + width)
    packed, scales, biases = (t.view(batch, heads, keys, -1) for t in tensors)
    packed = packed.view(torch.int32) if d.flag() else packed
    return {name: packed, f"{name}_scales": scales, f"{name}_biases": biases}


def key_range(d: Draws, batch: int, keys: int) -> Tensor:
    numbers = (0, keys, 1, keys // 2, -1, -(2**31), 2**31 - 1)
    return torch.tensor([[d.one(*numbers), d.one(*numbers)] for _ in range(batch)]).int().view(batch, 2)


def attention(d):
    batch, key_heads, group = d.one(1, 2, 0), d.one(1, 2), d.one(1, 3, 8)
    tokens, keys = d.one(1, 2, 5, 0), d.one(9, 1, 40, 130, 0)
    width, value_width = d.one((64, 64), (24, 40), (7, 1), (96, 32))
    dtype, heads = d.dtype(), key_heads * group
    quantised = width % 32 == 0 and batch * keys > 0 and d.flag()
    mask = None
    kind = d.one("order", "mask", "indices", "tail")
    quantised = quantised and kind != "tail"
    if kind == "mask":
        rows = d.one(1, batch), d.one(1, key_heads), tokens
        shown = torch.rand(*rows, keys, generator=d.generator) < 0.7
        number = d.dtype()
        added = torch.randn(shown.shape, generator=d.generator).to(number)
        hidden = d.one(-math.inf, torch.finfo(number).min)
        bits = torch.randint(-(2**31), 2**31, (*rows, -(-keys // 32)), generator=d.generator).int()
        mask = d.one(shown, added.masked_fill(~shown, hidden), bits)
    lookahead = d.one(0, 3, 2**40) if kind == "order" else 0
    relative = None
    if kind == "order" and lookahead == 0:
        relative = d.maybe(lambda: d.values(batch, tokens, heads, d.one(5, 1, 200), dtype=dtype))
    block = d.one(1, 1, 7, 32) if kind == "indices" else 1
    indices, tail = None, d.one(5, 1, 70, 0)
    if kind == "indices" or (kind == "tail" and d.flag()):
        shape = batch, d.one(1, key_heads), tokens, d.one(3, 1, 40, 0)
        most = keys // block if kind == "indices" else tail
        indices = torch.randint(-1, most + 2, shape, generator=d.generator).int()
    return {
        "q": d.values(batch, heads, tokens, width, dtype=dtype),
        **cache(d, "k", (batch, key_heads, keys, width), dtype, quantised),
        **cache(d, "v", (batch, key_heads, keys, value_width), dtype, quantised),
        "scale": d.one(width**-0.5, 1.0),
        "mask": mask,
        "window": d.one(None, 1, 4, 128) if kind in ("order", "tail") else None,
        "lookahead": lookahead,
        "relative": relative,
        "key_range": None if kind != "order" else d.maybe(lambda: key_range(d, batch, keys)),
        "indices": indices,
        "index_block": block,
        "softcap": d.one(None, 2.0),
        "sinks": d.maybe(lambda: d.one(d.values(heads), d.values(batch, tokens, heads))),
        "gate": d.maybe(lambda: d.values(batch, tokens, heads, d.one(1, value_width), dtype=dtype)),
        "gate_activation": d.one("sigmoid", "softplus"),
        **(tail_of(d, (batch, key_heads, tail), (width, value_width), dtype) if kind == "tail" else {}),
        "dtype": d.one(None, dtype, torch.float32),
    }


def tail_of(d: Draws, shape: tuple[int, ...], widths: tuple[int, int], dtype) -> dict[str, Any]:
    names = zip(("k_tail", "v_tail"), widths, strict=True)
    tail = {name: d.values(*shape, width, dtype=dtype) for name, width in names}
    return {**tail, "tail_rate": d.one(4, 1, 128), "position": d.one(30, 0, 3, 5000)}


def sample(d):
    rows, vocabulary = d.one(1, 3, 0), d.one(300, 1, 31, 1000, 5000)
    return {
        "logits": d.values(rows, vocabulary, scale=d.one(1.0, 3.0, 0.0)),
        "draws": torch.empty(rows, vocabulary).exponential_(generator=d.generator),
        "invalid": d.maybe(lambda: torch.arange(rows) % 2),
        "temperature": d.one(1.0, 0.6, 2.5),
        "top_k": d.one(0, 1, 20, 5000),
        "top_p": d.one(1.0, 0.8, 0.0),
        "min_p": d.one(0.0, 0.05),
        "otherwise": d.one(0, vocabulary - 1),
    }


def index_topk(d):
    batch, tokens, heads, width = d.one(1, 2, 0), d.one(1, 2, 5, 0), d.one(2, 1, 17, 0), d.one(16, 30, 1)
    keys, dtype, block = d.one(40, 1, 9, 150, 0), d.dtype(), d.one(1, 2, 5, 32)
    reduce, top_k = d.one("heads", "keys"), d.one(5, 1, 64, 2048)
    of_heads, is_pooled = reduce == "heads", reduce == "heads" and block > 1
    weights = d.maybe(lambda: d.values(batch, tokens, heads, dtype=d.dtype())) if of_heads else None
    return {
        "q": d.values(batch, tokens, heads, width, dtype=dtype),
        "k": d.values(batch, keys, width, dtype=dtype),
        "weights": weights,
        "top_k": top_k,
        "scale": d.one(width**-0.5, 1.0),
        "key_range": None if is_pooled else d.maybe(lambda: key_range(d, batch, keys)),
        "reduce": reduce,
        "block": block,
        "tail": d.one(0, 1) if is_pooled else 0 if of_heads else min(top_k, d.one(0, 1, 2)),
        "keys": keys * block + d.one(0, -1, block - 1) if is_pooled and keys else 0,
    }


def quantize_by_importance(d):
    to, experts, rows = d.one(*ALL_FORMATS), d.one(2, 1, 0, 5), d.one(3, 1, 0, 17)
    columns = d.one(2, 1, 0, 5) * group_of(to)
    weight = d.values(experts, rows, columns, scale=d.one(1.0, 1e-3, 30.0))
    importance = d.values(experts, columns, dtype=torch.float32).mul(d.one(1.0, 0.0, 4.0)).square()
    if d.flag() and weight.numel():
        weight[:, 0], importance[0, 0] = d.one(0.0, -0.3, 1.5), 0.0
    return {"weight": weight, "importance": importance, "to": to}


def pool_window_(d):
    batch, tokens, rate, overlap = d.one(1, 2, 0), d.one(1, 2, 9, 40, 0), d.one(4, 1, 3, 16), d.one(2, 1)
    width, position, dtype = d.one(8, 2, 70, 256), d.one(3, 0, 17, 1000), d.dtype()
    columns = width * overlap
    return {
        "kv": d.values(batch, tokens, columns, dtype=dtype),
        "position_bias": d.values(rate, columns, dtype=d.dtype()),
        "state_": d.values(batch, rate * overlap, 2, columns, dtype=dtype),
        "entries_": d.values(batch, (position + tokens) // rate + d.one(0, 3), width, dtype=dtype),
        "position": position,
        "inv_freq": d.values(d.one(1, 0, width // 2), dtype=d.dtype()).abs(),
        "scaling": d.one(1.0, 0.5),
    }


def pointwise(d):
    *outer, width = d.one((3, 1, 2, 33), (5, 64), (130,), (2, 0, 7), (1, 1))
    shapes = [(*outer, width), (width,), (*(1 for _ in outer), width), (*outer, 1), (*outer, width)]
    inputs = {name: d.values(*d.one(*shapes)) for name in "bcdef" if d.flag()}
    if d.flag():
        inputs["f"] = d.ids(*outer, width, experts=9).clamp(-9, 9)
    steps: list[str] = []
    for number in range(d.one(2, 1, 5)):
        operation = d.one(*OPERATIONS)
        known = ["a", *inputs, *(f"%{n}" for n in range(number)), "0.75", "-2.0"]
        operands = [d.one(*known) for _ in range(2 if operation in BINARY else 1)]
        steps.append(" ".join((operation, *operands, d.one("f32", "f16", "bf16"))))
    options = {"dtype": d.dtype(), "mean": outer[-1:] > [0] and d.flag()}
    return {"a": d.values(*outer, width), "formula": "; ".join(steps), **options, **inputs}


def of_streams(d: Draws) -> Tensor:
    """The streams of a hyper-connection."""
    return d.values(*d.leading(), d.one(4, 1, 2, 3), d.one(64, 4, 132, 1028))


def hyper_update(d):
    return {"streams": of_streams(d)}


def hyper_connection(d):
    streams, parts, f32 = of_streams(d), d.one(3, 1, 2), torch.float32
    *leading, count, width = streams.shape
    rows = (count, 2 * count, 2 * count + count * count)[parts - 1]
    update = {
        "out": d.values(*leading, width, dtype=streams.dtype),
        "post": d.values(*leading, count, dtype=f32).abs(),
        "comb": d.maybe(lambda: d.values(*leading, count, count, dtype=f32).softmax(-1)),
    }
    return {
        "streams": streams,
        "fn": d.values(rows, count * width, scale=(count * width) ** -0.5),
        "scale": d.values(parts),
        **(update if d.flag() else dict.fromkeys(update)),
        "iterations": d.one(20, 1, 2),
        "post_factor": d.one(2.0, 1.0),
        "post_eps": d.one(0.0, 0.25),
    }


def write_cache_quantized_(d):
    batch, heads, tokens, width = d.one(1, 2, 0), d.one(1, 2), d.one(1, 3, 0), d.one(64, 32, 192)
    room, group, dtype = tokens + d.one(2, 0, 5), d.one(32, 64 if width % 64 == 0 else 32), d.dtype()
    packed = torch.randint(-(2**31), 2**31, (batch, heads, room, width // 4), generator=d.generator)
    groups = (batch, heads, room, width // group)
    return {
        "states": d.values(batch, heads, tokens, width, dtype=dtype),
        "packed_": packed.int(),
        "scales_": d.values(*groups, dtype=dtype),
        "biases_": d.values(*groups, dtype=dtype),
        "start": d.one(*range(room - tokens + 1)),
    }


def causal_conv1d_update_(d):
    batch, channels, tokens, width = d.one(1, 2, 0), d.one(6, 1, 65, 0), d.one(1, 3, 8, 0), d.one(4, 1, 2, 0)
    dtype, room = d.dtype(), d.one(0, 1, 3)
    before = d.one(0, room)
    return {
        "x": d.values(batch, tokens, channels, dtype=dtype),
        "conv_state_": d.values(batch, channels, max(0, width - 1) + room),
        "weight": d.one(d.values(channels, width), None),
        "before": before,
        "add_input": before == 0 and d.flag(),
        **pending(d, tokens, (batch, channels), (), dtype),
    }


def pending(d, tokens, before, behind, dtype):
    """Tokens that are pending, some of which are right."""
    if not d.flag():
        return {"pending_": None, "counts": None, "keep": False}
    room = d.one(8, 5, max(1, min(tokens, 8)))
    counts = torch.randint(0, room + 1, (before[0], 1), generator=d.generator).int()
    keep = tokens <= room and d.flag()
    return {
        "pending_": d.values(*before, room, *behind, dtype=dtype, scale=0.25),
        "counts": counts,
        "keep": keep,
    }


def linear_attention_(d):
    batch, tokens, key_heads, group = d.one(1, 2, 0), d.one(1, 2, 5, 0, 17), d.one(1, 2), d.one(1, 2, 3)
    key_width, value_width, dtype = d.one(16, 7, 64, 100), d.one(8, 1, 33), d.dtype()
    heads, scale = key_heads * group, key_width**-0.5
    decay, delta = d.one("log", "softplus", "sigmoid", "times_beta"), d.flag()
    is_wide = delta and decay != "times_beta" and d.flag()
    g = d.values(batch, tokens, heads, *[key_width] * is_wide)
    biases = (heads, key_width) if is_wide else (heads,)
    beta = d.values(batch, tokens, heads, scale=0.5)
    beta = beta.abs() if decay == "times_beta" else d.maybe(lambda: beta)
    activations = (
        ("none",) if beta is None else ("none", "sigmoid") if is_wide else ("none", "sigmoid", "softplus")
    )
    is_gated, width = d.flag(), key_width + value_width + 2 + (key_width if is_wide else 1)
    return {
        "q": d.values(batch, tokens, key_heads, key_width, dtype=dtype, scale=scale),
        "k": d.values(batch, tokens, key_heads, key_width, dtype=dtype, scale=scale),
        "v": d.values(batch, tokens, heads, value_width, dtype=dtype),
        "g": None if decay == "times_beta" else -g.abs() if decay == "log" else g,
        "scale": d.one(scale, 1.0),
        "beta": beta,
        "delta": delta,
        "l2norm_eps": d.one(None, 1e-6),
        "decay": decay,
        "A_log": None if decay == "log" else d.values(heads),
        "dt_bias": None if decay == "log" else d.maybe(lambda: d.values(*biases)),
        "lower_bound": -5.0 if decay == "sigmoid" else None,
        "beta_activation": d.one(*activations),
        "beta_min": None if beta is None else d.one(None, 0.25),
        "skip": d.maybe(lambda: d.values(heads)),
        "gate": d.values(batch, tokens, heads, value_width, dtype=dtype) if is_gated else None,
        "gate_activation": d.one("silu", "sigmoid"),
        "norm_weight": d.values(value_width) if is_gated else None,
        **{name: d.number(name) for name in ("norm_eps", "norm_offset")},
        **pending(d, tokens, (batch, heads), (width,), torch.float32),
    }


def selective_scan_(d):
    batch, channels, tokens, states = d.one(1, 2, 0), d.one(6, 1, 130, 0), d.one(1, 3, 33, 0), d.one(16, 1, 5)
    x, groups = d.values(batch, tokens, channels), -(-channels // 128)
    held = pending(d, tokens, (batch, groups), (256 + states,), torch.float32)
    if held["pending_"] is not None:
        held["pending_"].abs_()  # steps are not negative
    return {"x": x, "B": d.values(batch, tokens, states, dtype=x.dtype), **held}


def rg_lru_(d):
    batch, channels, tokens = d.one(1, 2, 0), d.one(6, 1, 65, 0), d.one(1, 3, 33, 0)
    positions = torch.randint(3, (batch, tokens), generator=d.generator) * d.one(1, 2**32)
    return {
        "x": d.values(batch, tokens, channels),
        "positions": d.one(None, positions, positions.clamp(max=2).int()),
        **pending(d, tokens, (batch, channels), (), torch.float32),
    }


def rope(d):
    batch, tokens, dtype, number = d.one(1, 2, 0), d.one(1, 3, 9, 0), d.dtype(), d.dtype()
    rotary = d.one(16, 2, 6, 64)
    widths = [rotary + d.one(0, 0, 2, 16) for _ in range(2)]
    with_k, halved = d.flag(), d.flag()
    table = (d.one(1, batch), tokens, rotary // 2 if halved else rotary)
    return {
        "q": d.values(batch, tokens, d.one(1, 4), widths[0], dtype=dtype),
        "k": d.values(batch, tokens, d.one(1, 2), widths[1], dtype=dtype) if with_k else None,
        **{name: d.values(*table, dtype=number) for name in ("cos", "sin")},
        **({} if with_k else {"k_weight": None}),
        "rotary_dim": rotary if halved else d.one(None, rotary),
    }


def rope_cache_(d):
    arguments = rope(d)
    while arguments["k"] is None:
        arguments |= rope(d)
    q, k = arguments["q"], arguments["k"]
    v = d.values(*q.shape[:2], d.one(1, 2), d.one(16, 2, 6, 64), dtype=q.dtype)
    before, norm = d.one(0, 1, 5), d.flag()
    held = {
        name: d.values(x.shape[0], x.shape[2], before + x.shape[1], x.shape[3], dtype=q.dtype)
        for name, x in (("keys_", k), ("values_", v))
    }
    arguments |= {"v": v, **held, "norm_v": norm, "k_bias": None}
    arguments["v_weight"] = d.maybe(lambda: d.values(v.shape[3])) if norm else None
    arguments |= {} if d.flag() else {"cos": None, "sin": None}
    if d.flag():
        arguments |= {"v": None, "values_": None, "norm_v": False, "v_weight": None}
        if d.flag():
            arguments |= {"q": None, "q_weight": None}
        if d.flag():
            number = d.dtype()
            norms = {name: d.values(k.shape[3], dtype=number) for name in ("k_weight", "k_bias")}
            arguments |= {"q_weight": None, **norms, "weight_offset": 0.0}
    return arguments


def rope_attention_(d):
    arguments = rope_cache_(d)
    while arguments["q"] is None or arguments["v"] is None:
        arguments = rope_cache_(d)
    arguments.pop("k_bias")  # of keys alone
    (batch, tokens, _, width), dtype = arguments["q"].shape, arguments["q"].dtype
    key_heads, value_width, keys = d.one(1, 2), d.one(16, 6, 64), tokens + d.one(1, 0, 40, 300)
    heads = key_heads * d.one(1, 3, 9)
    shapes = {"q": (heads, width), "k": (key_heads, width), "v": (key_heads, value_width)}
    held = {"keys_": width, "values_": value_width}
    arguments |= {n: d.values(batch, tokens, *shape, dtype=dtype) for n, shape in shapes.items()}
    arguments |= {n: d.values(batch, key_heads, keys, size, dtype=dtype) for n, size in held.items()}
    return arguments | {
        "v_weight": d.maybe(lambda: d.values(value_width)) if arguments["norm_v"] else None,
        "scale": width**-0.5,
        "window": d.one(None, 1, 128),
        "key_range": d.maybe(lambda: key_range(d, batch, keys)),
        "softcap": d.one(None, 2.0),
        "gate": d.maybe(lambda: d.values(batch, tokens, heads, d.one(1, value_width), dtype=dtype)),
    }
