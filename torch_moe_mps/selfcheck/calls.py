"""Calls for the self-check: for each operator, enough to run every kernel that it can dispatch.

A subject is an operator with a dtype and, where kernels depend on them, a format of weights and the widths of
heads. Its calls have few and many tokens, and plans for few and many cores.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._extension import setting, use_of_tensor_units
from ..ops import OPERATORS
from ..ops._checks import NAMED_DTYPES
from ..ops._formats import FORMATS as NAMED_FORMATS
from ..ops._formats import Format
from ..ops._sample import FORMAT, HEAD, Sample, T
from ..ops._samples import (
    FAMILY_OF,
    LINEAR_ATTENTION,
    OF_HEADS,
    changed_samples,
    more_samples,
    packet,
    sample_arguments,
)
from .sizes import SIZES

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
FORMATS = tuple(NAMED_FORMATS.values())
LINEARS = ("linear_quantized", "_mlp_quantized")
DENSE = ("expert_mm", "_moe_experts")
CACHE = "_write_cache_quantized_"
# Optional arguments with kernels in libraries of their own, so that few models need their calls.
WITH = {"cached_attention": ("k_scales", "indices"), "_cached_attention": ("k_scales", "indices", "k_tail")}
_APART = {"k_scales", "k_tail"}  # refused beside each other
ON_IDS = ("moe_bucket", "moe_compute_ids_tpe", "_expert_slots")  # without activations, so without their dtype
# The argument whose dtype the kernels have, if it is not the first one.
TYPED_BY = {
    "_rope_cache_": "k",
    "router_logits": "weight",
    "moe_gate": "weight",
    "moe_weighted_reduce": "expert_out",
    "_pointwise": "dtype",
    "embedding_quantized": "dtype",
}
# One, few, and for products in tiles of 8 and of 32 pairs of an expert.
TOKENS = (1, 12, 40, 56)
# Heads of every kernel, for `torch-moe-mps check`.
HEADS = {
    **dict.fromkeys(WITH, (HEAD, (64, 64), (128, 128), (256, 256), (576, 512))),
    CACHE: (HEAD, (64, 64), (128, 128), (256, 256), (512, 512)),
    "_tiled_attention": (HEAD, (128, 128), (256, 256), (576, 512)),
    **dict.fromkeys(("rope", "rope_heads", "_rope_cache_"), (HEAD, (128, 128))),
    "_rope_attention_": (HEAD, (64, 64), (128, 128), (256, 256), (512, 512)),
    **dict.fromkeys(LINEAR_ATTENTION, (HEAD, (128, 128), (256, 256))),
}
# Heads of most models.
_COMMON_HEADS = {
    name: tuple(head for head in heads if name in LINEAR_ATTENTION or head[1] <= 256)
    for name, heads in HEADS.items()
}
# Operators of training, of dense experts, and of few models: families, and names of other families.
_UNCOMMON = {"experts", "index", "pooling", "hyper_connection", "lora", "quantize", "heads", "slots", "tiles"}
_UNCOMMON |= {CACHE, "gated_delta_rule_", "sample"}  # models run the private forms of the latter two


class Subject(NamedTuple):
    """Subject of a verdict: an operator in a dtype.

    `format` and `head` are None where no kernel depends on them; `given` are its arguments of WITH.
    """

    operator: str
    dtype: torch.dtype
    format: Format | None = None
    head: tuple[int, int] | None = None
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = self.head and "{}x{}".format(*self.head)
        parts = (self.operator, DTYPES[self.dtype], self.format, head, *self.given)
        return " ".join(str(part) for part in parts if part)

    def without_head(self) -> str:
        return str(self._replace(head=None))


class Call(NamedTuple):
    """A call, its arguments on the CPU. `format`: of its weights, if it has any."""

    operator: str
    dtype: torch.dtype
    arguments: dict[str, Any]
    format: str = ""


def subjects(
    operators: Collection[str],
    dtypes: Iterable[torch.dtype],
    formats: Collection[Format],
    heads: Mapping[str, Collection[tuple[int, int]]] = HEADS,
    combinations: Collection[tuple[str, ...]] | None = None,
) -> list[Subject]:
    """Subjects that have to be compared.

    `heads` are by operator; an operator that it lacks has sample heads. `combinations` None: all.
    """
    listed = [
        Subject(name, torch.float32 if name in ON_IDS else dtype, format, head, beside)
        for name in OPERATORS
        if name in operators
        for dtype in dtypes
        for format in (formats if "format" in names_of(name) else (None,))
        for head in (heads.get(name) or (HEAD,) if name in OF_HEADS else (None,))
        for beside in (_combinations(name) if combinations is None or name not in WITH else combinations)
    ]
    return [*dict.fromkeys(listed)]


def common_subjects(dtypes: Iterable[torch.dtype], formats: Collection[Format]) -> list[Subject]:
    """Subjects of the operators and heads that most models run."""
    common = [name for name in OPERATORS if not {name, FAMILY_OF[name]} & _UNCOMMON]
    return subjects(common, dtypes, formats, _COMMON_HEADS, [()])


def _combinations(name: str) -> list[tuple[str, ...]]:
    optional = WITH.get(name, ())
    return [
        chosen
        for count in range(len(optional) + 1)
        for chosen in itertools.combinations(optional, count)
        if not _APART.issubset(chosen)
    ]


def _given(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(other for other in WITH.get(name, ()) if arguments.get(other) is not None)


def subjects_of(name: str, arguments: Mapping[str, Any]) -> list[Subject]:
    """Subjects that must have been compared before this call."""
    dtype = _dtype_of(name, arguments)
    names = [arguments[argument] for argument in ("format", "down_format") if arguments.get(argument)]
    formats: list[Format | None] = [NAMED_FORMATS[format] for format in dict.fromkeys(names)]
    head = None
    if name in OF_HEADS:
        widths = [arguments[x].shape[-1] for x in OF_HEADS[name] if arguments[x] is not None]
        q, v = widths[0], widths[-1]
        head = (q, v if arguments.get("v_scales") is None else 4 * v)
    result = [Subject(name, dtype, format, head, _given(name, arguments)) for format in formats or [None]]
    if name == "_moe_experts_quantized" and arguments["logits"] is not None:
        result += subjects_of("moe_router", arguments)  # it may choose in a launch of its own
    if name == "_gated_delta_rule_" and arguments["norm_weight"] is not None:
        result.append(Subject("rms_norm_gated", dtype))  # prompts of few heads have it in one of its own
    return result


def _dtype_of(name: str, arguments: Mapping[str, Any]) -> torch.dtype:
    """Dtype that the kernels of a call compute in."""
    typed = arguments[TYPED_BY.get(name) or names_of(name)[0]]
    dtype: torch.dtype = torch.float32
    if name not in ON_IDS:
        dtype = NAMED_DTYPES[typed] if isinstance(typed, str) else typed.dtype
    for scales in names_of(name) if "format" in names_of(name) else ():
        passed = arguments[scales] if scales.endswith("scales") else None
        if passed is not None and passed.dtype != dtype:
            other = arguments.get("down_format") if scales.endswith("down_scales") else None
            if NAMED_FORMATS[other or arguments["format"]].is_affine:
                # Rows of an embedding are decoded in the dtype of the scales; else float32 holds both.
                dtype = passed.dtype if name == "embedding_quantized" else torch.float32
    return dtype


@functools.cache
def names_of(operator: str) -> list[str]:
    """The names of an operator's arguments, in the order of its schema."""
    overload: Any = packet(operator)
    return [argument.name for argument in overload.default._schema.arguments]


def calls(subject: Subject) -> Iterator[Call]:
    """While the iterator is open, the plans that it needs are in force: close it after the last call."""
    for arguments in _arguments(subject, subject.format or FORMAT, subject.head or HEAD):
        yield Call(subject.operator, subject.dtype, arguments, str(subject.format or ""))


def has_calls_at_size(subject: Subject) -> bool:
    return subject.operator in SIZES and not subject.given


def calls_at_size(subject: Subject) -> Iterator[Call]:
    """Calls for branches of the kernels that only real sizes, and odd values, reach."""
    sizes: dict[str, Any] = {"format": subject.format or FORMAT, "head": subject.head or HEAD}
    name, dtype = subject.operator, subject.dtype
    with torch.device("cpu"), _without_tensor_units():
        for changes in changed_samples(name, SIZES, "cpu", dtype, 2, **sizes):
            arguments = sample_arguments(name, "cpu", dtype, **sizes) | changes
            yield Call(name, dtype, arguments, str(subject.format or ""))


def _arguments(subject: Subject, format: Format, head: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Arguments of calls that run every kernel of an operator, for one format and width of heads."""
    name, dtype = subject.operator, subject.dtype

    def sample(tokens: int = T, wider: int = 1, of: str = name) -> dict[str, Any]:
        return sample_arguments(of, "cpu", dtype, format=format, tokens=tokens, wider=wider, head=head)

    odd = Sample("cpu", dtype, seed=3)
    with torch.device("cpu"), _without_tensor_units():
        for changes in ({}, *more_samples(name, "cpu", dtype, head)) if format == FORMAT else ({},):
            if _given(name, changes) == subject.given:
                yield {**sample(), **changes}
        if subject.given:
            return
        # Among operators with heads, only attention has other kernels for many tokens.
        for tokens in TOKENS if name in WITH or name not in OF_HEADS else TOKENS[:2]:
            arguments = sample(tokens=tokens)
            if "topk_ids" in arguments and tokens == TOKENS[-1]:
                arguments["topk_ids"] = arguments["topk_ids"].long()
            yield arguments
        if name in WITH and dtype.itemsize == 2:
            with planned_for(1):  # one core is full with blocks of the most queries, which only 16 bits have
                yield sample(tokens=TOKENS[-1])
        if "format" in names_of(name) or name in DENSE:
            yield from _products(name, sample, format, odd)


def _products(
    name: str, sample: Callable[..., dict[str, Any]], format: Format, odd: Sample
) -> Iterator[dict[str, Any]]:
    """Arguments of an operator that multiplies: normed, chosen and other inputs, and plans of other GPUs."""
    if "norm_weight" in names_of(name):
        yield from _normed(sample(tokens=1), sample(tokens=T), odd)
    if name == "_moe_experts_quantized":
        yield from _chosen(sample(tokens=1), odd)
    if name == "_heads_quantized":
        yield from _both_ways(sample(), sample(of="linear_quantized")["x"].shape[-1], odd)
    # Where few threadgroups fill the GPU, each takes more rows: of linear layers more than there are.
    with planned_for(1):
        wider = 1 if name not in LINEARS else max(1, 256 // max(32, format.multiple))
        for tokens in (T, TOKENS[-2]):
            yield sample(tokens=tokens, wider=wider)


def _normed(one: dict[str, Any], several: dict[str, Any], odd: Sample) -> Iterator[dict[str, Any]]:
    """Normed inputs of one token, in whose kernel the weight is of either dtype, and of several."""
    for arguments, dtypes in ((one, 2), (several, 1)):
        for weight in _norm_weights(odd, arguments)[:dtypes]:
            yield arguments | {"norm_weight": weight}


def _chosen(arguments: dict[str, Any], odd: Sample) -> Iterator[dict[str, Any]]:
    """Routing cases of one token: few and many experts, with and without normalised weights."""
    weights = _norm_weights(odd, arguments)
    for times, norm in (*((times, weight) for weight in weights for times in (1, 40)), (1, None)):
        many = {
            n: v.repeat(times, 1, 1) if n.startswith(("gate_up_", "down_")) and isinstance(v, Tensor) else v
            for n, v in arguments.items()
        }
        logits = odd.values(1, len(many["gate_up_packed"]))
        yield many | {
            "topk_weights": None,
            "topk_ids": None,
            "norm_weight": norm,
            "logits": logits,
            "top_k": 2,
        }


def _norm_weights(odd: Sample, arguments: dict[str, Any]) -> list[Tensor]:
    """Weights for a norm of `x`: in its dtype and, if that is another one, in float32."""
    weight = odd.values(arguments["x"].shape[-1])
    return [weight] if weight.dtype == torch.float32 else [weight, weight.float()]


def _both_ways(arguments: dict[str, Any], width: int, odd: Sample) -> Iterator[dict[str, Any]]:
    """Products of heads with their matrices and, as given, the transposed ones, of one token and of few."""
    x, appended = arguments["x"], arguments["appended"]
    columns = odd.values(*x.shape[:-1], width)
    for tokens in (1, T):
        yield arguments | {"x": x[:1, :tokens], "appended": appended[:1, :tokens]}
        yield arguments | {"x": columns[:1, :tokens], "appended": None, "transposed": False}


@contextmanager
def planned_for(cores: int) -> Iterator[None]:
    """Inside the block, plans are for a GPU with so many cores; 0: this GPU's."""
    before = torch.ops.moe_mps._plan_for(cores)
    try:
        yield
    finally:
        torch.ops.moe_mps._plan_for(before)


def _without_tensor_units() -> AbstractContextManager[None]:
    """Their kernels have checks of their own: see tensor_units.py."""
    return setting("_set_tensor_units", "0", use_of_tensor_units())
