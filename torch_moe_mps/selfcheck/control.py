"""Operators of torch itself on the GPU beside the CPU: where these are wrong, our results say nothing.

Some machines compute torch's own operators wrongly: virtual GPUs of hosted runners (runner-images#14380), and
some releases of torch on some chips (pytorch#183535, #180776, #195163).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .._faults import raise_fault
from .._text import first_line
from .compare import TOLERANCE, Finding
from .long_sums import TERMS, operands, product

Operation = Callable[..., Tensor]
_WIDTH, _ROWS, _WIDE = 256, 48, 1024


def calls() -> Iterator[tuple[str, Operation, tuple[Tensor, ...]]]:
    """(name, operation, its tensors in float32 or integers), with sizes that models have."""
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, y, weight = values(_ROWS, _WIDTH), values(_ROWS, _WIDTH), values(_WIDE, _WIDTH) / 16
    heads = tuple(values(1, 4, 40, 64) for _ in range(3))
    ids = torch.randint(0, _WIDE, (_ROWS,), generator=generator)
    yield "add", torch.add, (x, y)
    yield "mul", torch.mul, (x, y)
    yield "exp", torch.exp, (x,)
    yield "rsqrt", lambda t: (t.abs() + 0.5).rsqrt(), (x,)
    yield "silu", F.silu, (x,)
    yield "gelu", F.gelu, (x,)
    yield "softmax", lambda t: t.softmax(-1), (x,)
    yield "mean", lambda t: t.mean(-1), (x,)
    yield "cumsum", lambda t: t.cumsum(0), (x,)
    yield "sort", lambda t: t.sort(-1).values, (x,)
    yield "topk", lambda t: t.topk(8).values, (x,)
    yield "argmax", lambda t: t.argmax(-1), (x,)
    yield "where", lambda t, u: torch.where(t > u, t, u), (x, y)
    yield "cat", lambda t, u: torch.cat((t, u), -1), (x, y)
    yield "transposed copy", lambda t: t.T.contiguous(), (x,)
    yield "view with an offset", lambda t: t[7:, 5:].contiguous(), (x,)
    yield "index_select", lambda t, i: t.index_select(0, i), (weight, ids)
    yield "embedding", lambda i, t: F.embedding(i, t), (ids, weight)
    yield "index_put", lambda t, u, i: t.clone().index_put_((i,), u[:20]), (x, y, torch.arange(20))
    yield "linear of one row", lambda t, w: F.linear(t[:1], w), (x, weight)
    yield "linear of many rows", F.linear, (x, weight)
    yield "linear of 3 dimensions", lambda t, w: F.linear(t.view(2, -1, _WIDTH), w), (x, weight)
    yield "bmm", lambda t, w: torch.bmm(t.view(4, -1, _WIDTH), w.view(4, -1, _WIDTH).mT), (x, weight)
    yield f"bmm of over {TERMS:,} terms", product, operands()
    yield "layer_norm", lambda t: F.layer_norm(t, (_WIDTH,)), (x,)
    yield "attention", F.scaled_dot_product_attention, heads
    yield "causal attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads
    yield "attention to more keys", lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :3], k, v), heads


def control(dtypes: dict[str, torch.dtype]) -> tuple[int, list[Finding]]:
    """Number of calls, and those whose results differ from the CPU's in float32 by more than rounding.

    Args:
        dtypes: {name: dtype} of the tensors on the GPU. A fault of the GPU counts as a wrong result.
    """
    count, findings = 0, []
    for label, dtype in dtypes.items():
        for name, operation, tensors in calls():
            rounded = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
            exact = operation(*(t.float() if t.is_floating_point() else t for t in rounded))
            count += 1
            try:
                got = operation(*(t.to("mps") for t in rounded)).cpu()
                raise_fault()
            except RuntimeError as error:
                findings.append(Finding(f"torch's own {name}", "raises", label, message=first_line(error)))
                continue
            largest = float((got.double() - exact.double()).abs().max() / exact.double().abs().max())
            if not largest <= TOLERANCE[dtype]:
                findings.append(Finding(f"torch's own {name}", "differs", label, error=largest))
    return count, findings
