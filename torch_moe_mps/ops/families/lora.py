"""Low-rank adapters (LoRA) beside linear layers and experts: a product of two narrow factors is added.

The factors of E experts are stored as PEFT stores them: A [r E, H], row e r + i is row i of expert e, and
B [N, r E], column i E + e is column i of expert e.
"""

import math

import torch
from torch import Tensor

from .._checks import MAX_EXPERTS, wide, widened
from .._registry import Backward, operator
from .._sample import Calls, Changes
from .experts import IDS, Product, is_per_token, project_pairs

MAX_RANK = 256  # the inner products of a tile stay in threadgroup memory
_FACTORS = "a[_, H] b[N, _]:a"
_PAIRS = "pair_order[...*K]:int32 offsets[_]:int32"


def _check_factors(check, a, b, experts, scaling):
    columns = a.shape[0]
    if b.shape[1] != columns:
        check.fail("b", f"of shape [N, r E] with r E = {columns} rows as in a", tuple(b.shape))
    if columns % experts or not 1 <= columns // experts <= MAX_RANK:
        expected = f"of r E rows, with E = {experts} and r between 1 and {MAX_RANK}"
        check.fail("a", expected, tuple(a.shape))
    if not math.isfinite(scaling):
        check.fail("scaling", "a finite number", scaling)


def _meta_linear_lora(check, added, x, a, b, scaling):
    _check_factors(check, a, b, 1, scaling)
    return torch.empty_like(added, memory_format=torch.contiguous_format)


@operator(f"added[..., N] x[..., H]:added {_FACTORS}", _meta_linear_lora, public="adapters on linear layers")
def linear_lora(added: Tensor, x: Tensor, a: Tensor, b: Tensor, *, scaling: float = 1.0) -> Tensor:
    """A linear layer's output with its adapter: out = added + scaling * (x @ a^T) @ b^T.

    Args:
        added: [..., N], float32, float16 or bfloat16: the layer's output.
        x: [..., H] in the dtype of `added`: its input.
        a: [r, H], float32, float16 or bfloat16, with r <= 256.
        b: [N, r] in the dtype of `a`.
        scaling: a finite number.

    Returns: [..., N] in the dtype of `added`; computed in float32, rounded once. On Metal it is one dispatch.

    Raises: ValueError for a dtype, shape, number or device that does not fit.

    In models with adapters.

    Example:
        >>> x, a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0], [2.0]])
        >>> ops.linear_lora(torch.tensor([[100.0, 200.0]]), x, a, b, scaling=2.0).tolist()
        [[122.0, 244.0]]
    """
    rows, of_x, of_out = widened(x, a, b)
    return (wide(added) + (rows @ of_x.T) @ of_out.T * scaling).to(added.dtype)


def _of_expert(factor: Tensor, experts: int, is_b: bool) -> Product:
    """The product with the matrix of the pair's expert: A, or B."""
    if is_b:
        matrices = wide(factor).unflatten(1, (-1, experts)).permute(2, 1, 0)  # [E, r, N]
    else:
        matrices = wide(factor).unflatten(0, (experts, -1)).mT  # [E, H, r]
    return Product(matrices.__getitem__, matrices.shape[2])


def _inner(x: Tensor, a: Tensor, topk_ids: Tensor, experts: int) -> Tensor:
    """[..., K, r]: the product with A."""
    return project_pairs(wide(x), topk_ids, (experts, len(a) // experts), _of_expert(a, experts, False), None)


def _meta_expert_lora(check, added, a, b, offsets, num_experts, scaling, **_):
    _check_factors(check, a, b, num_experts, scaling)
    if offsets is not None:
        check.shape("offsets", offsets, (num_experts + 1,), "[E + 1]")
    return added.new_empty(added.shape)


def _lora_backward(grad, asked, given):
    names = ("x", "topk_ids", "a", "b", "pair_order", "offsets", "num_experts", "scaling")
    gradients = {"added": grad}
    if asked != ["added"]:
        if given["pair_order"] is None:
            given |= zip(
                ("pair_order", "offsets"),
                torch.ops.moe_mps.moe_bucket(given["topk_ids"], num_experts=given["num_experts"]),
                strict=True,
            )
        dx, da, db = torch.ops.moe_mps._expert_lora_backward(grad, *(given[name] for name in names))
        gradients |= {"x": dx, "a": da, "b": db.t()}
    return gradients


_READ = ("x", "topk_ids", "a", "b", "pair_order", "offsets")


@operator(
    f"{IDS} added[..., K, N] x[..., H]|[..., K, H]:added {_FACTORS} {_PAIRS}",
    _meta_expert_lora,
    allowed={"num_experts": range(1, MAX_EXPERTS + 1)},
    dependences=("offsets only with pair_order",),
    backward=Backward(_lora_backward, {"added": (), **dict.fromkeys(("x", "a", "b"), _READ)}),
    public="adapters on experts, and their training",
)
def expert_lora(
    added: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    num_experts: int,
    pair_order: Tensor | None = None,
    offsets: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """The output of expert_mm or expert_qmm plus a LoRA adapter of each expert:

    out[t, k] = added[t, k] + scaling * b_e (a_e x[t]) with e = topk_ids[t, k], or with x[t, k]

    Args:
        added: [..., K, N], float32, float16 or bfloat16: the experts' output.
        x: [..., H] or [..., K, H] in the dtype of `added`: their input.
        topk_ids: [..., K] with K <= 64, int32 or int64. An id outside [0, E) gives `added` alone.
        a: [r E, H], float32, float16 or bfloat16, with r <= 256; row e r + i is row i of a_e.
        b: [N, r E] in the dtype of `a`; column i E + e is column i of b_e. Where columns lie one after
            another, strides (1, N), a pair reads only its expert's columns.
        num_experts: E, between 1 and 1024.
        pair_order, offsets: what moe_bucket makes of `topk_ids`, so that pairs of an expert read its factors
            together; None for few pairs.
        scaling: a finite number.

    Returns: [..., K, N] in the dtype of `added`; computed in float32, rounded once. Gradients reach `added`,
        `x`, `a` and `b`.

    Raises: ValueError for a dtype, shape, number or device that does not fit.

    In models with adapters on experts.

    Example:
        >>> x, topk_ids = torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]])
        >>> a, b = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[2.0, 5.0]])  # rank 1, two experts
        >>> ops.expert_lora(torch.zeros(1, 2, 1), x, topk_ids, a, b, num_experts=2).tolist()
        [[[10.0], [6.0]]]
    """
    outer = project_pairs(
        _inner(x, a, topk_ids, num_experts),
        topk_ids,
        (num_experts, len(b)),
        _of_expert(b, num_experts, True),
        None,
    )
    return (wide(added) + outer * scaling).to(added.dtype)


def _meta_backward(check, x, a, b, offsets, num_experts, scaling, **_):
    _check_factors(check, a, b, num_experts, scaling)
    check.shape("offsets", offsets, (num_experts + 1,), "[E + 1]")
    return x.new_empty(x.shape), a.new_empty(a.shape), b.new_empty(b.shape[::-1])


@operator(
    f"{IDS} dy[..., K, N] x[..., H]|[..., K, H]:dy {_FACTORS} {_PAIRS}",
    _meta_backward,
    allowed={"num_experts": range(1, MAX_EXPERTS + 1)},
)
def _expert_lora_backward(
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    a: Tensor,
    b: Tensor,
    pair_order: Tensor,
    offsets: Tensor,
    num_experts: int,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, a and b of expert_lora: with g = scaling * b_e^T dy[t, k] and i = a_e x[t, k]

    dx[t, k] = a_e^T g, added over k where x has one row for each token
    da_e = sum over the pairs of e g x[t, k]^T
    db_e = scaling * sum over the pairs of e dy[t, k] i^T

    Args:
        dy: [..., K, N], float32, float16 or bfloat16: the gradient of the output.
        x: [..., H] or [..., K, H] in the dtype of `dy`.
        topk_ids, a, b, pair_order, offsets, num_experts, scaling: as for expert_lora.

    Returns: dx and da like x and a, and db [r E, N], the columns of b one after another; computed in float32,
        rounded once. On Metal sums go over the pairs in ascending order, and dx of a pair is rounded before
        it is added to others.

    Raises: ValueError for a dtype, shape, number or device that does not fit.
    """
    inner = _inner(x, a, topk_ids, num_experts)
    matrices = wide(b).unflatten(1, (-1, num_experts)).permute(2, 0, 1)  # [E, N, r]
    of_b = Product(matrices.__getitem__, matrices.shape[2])
    own = project_pairs(wide(dy), topk_ids, (num_experts, len(a) // num_experts), of_b, None) * scaling
    of_a = Product(wide(a).unflatten(0, (num_experts, -1)).__getitem__, a.shape[1])  # [E, r, H]
    dx = project_pairs(own, topk_ids, (num_experts, a.shape[1]), of_a, None)
    outer = torch.ops.moe_mps._expert_outer
    da = outer(own, wide(x), topk_ids, num_experts).flatten(0, 1)
    db = outer(wide(dy), inner, topk_ids, num_experts).permute(2, 0, 1).flatten(0, 1) * scaling
    return (dx.sum(-2) if is_per_token(x, topk_ids) else dx).to(x.dtype), da.to(a.dtype), db.to(b.dtype)


def _factors(s, experts, rank=3):
    return {"a": s.values(rank * experts, s.H), "b": s.values(s.I, rank * experts)}


def _of_experts(s):
    return {**_factors(s, s.E), "topk_ids": s.topk_ids, "num_experts": s.E, "scaling": 0.5}


def _listed(s):
    return dict(
        zip(("pair_order", "offsets"), torch.ops.moe_mps.moe_bucket(s.topk_ids, num_experts=s.E), strict=True)
    )


CALLS: Calls = {
    "linear_lora": lambda s: {**s.of("added[T, I] x[T, H]"), **_factors(s, 1), "scaling": 0.5},
    "expert_lora": lambda s: {**s.of("added[T, K, I] x[T, H]"), **_of_experts(s)},
    "_expert_lora_backward": lambda s: {**s.of("dy[T, K, I] x[T, H]"), **_of_experts(s), **_listed(s)},
}
CHANGES: Changes = {
    "linear_lora": lambda s: [s.of("added[1, 1, I] x[1, 1, H]")],
    "expert_lora": lambda s: [_listed(s), s.of("x[T, K, H]", topk_ids=s.topk_ids)],
    "_expert_lora_backward": lambda s: [s.of("x[T, K, H]", topk_ids=s.topk_ids)],
}
