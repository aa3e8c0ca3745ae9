"""References compute in float64 where activations have it, so that gradcheck and oracles can rest on them."""

import numpy as np
import pytest
import torch
from support.ops.tiles import words_of_codes
from support.oracles_operators import expected, written

from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._checks import dtype_name
from torch_moe_mps.ops._registry import DECLARED
from torch_moe_mps.ops._samples import copies, more_samples, packet, sample_arguments

# Their activations have the dtypes of a formula, or there are none, or they are rounded to codes.
WITHOUT = (
    *("_pointwise", "embedding_quantized", "_expert_slots", "moe_bucket", "moe_compute_ids_tpe"),
    "_seal_tiles_",
)


def in_float64(name: str, arguments: dict) -> dict:
    """A call whose activations float32 does not hold, and whose weights it holds dequantised."""
    declared, generator = {argument for argument, *_ in DECLARED[name].tensors}, torch.Generator()
    made = dict(arguments)
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            more = 1 + 1e-7 * torch.rand(value.shape, generator=generator, dtype=torch.float64)
            made[argument] = value.double() * more if argument in declared else value.bfloat16()
    for part in "kv":
        if (tiles := arguments.get(f"{part}_tiles")) is not None:
            codes = words_of_codes(arguments[f"{part}_dense"].shape[3], arguments[f"{part}_bits"])
            words = tiles.view(torch.int32)
            numbers = words[..., codes:].contiguous().view(torch.float32).double()
            made[f"{part}_tiles"] = torch.cat((words[..., :codes], numbers.view(torch.int32)), -1)
    if name in ("router_logits", "_heads_quantized"):
        made["dtype"] = "float64"
    return made


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in WITHOUT])
def test_references(name):
    """Results have float64's precision, so that float32 is nowhere inside."""
    base = sample_arguments(name, "cpu", torch.float32)
    for changes in ({}, *more_samples(name, "cpu", torch.float32)):
        arguments = in_float64(name, base | changes)
        given = copies(arguments)
        results = packet(name)(**given)
        results = results if isinstance(results, tuple) else () if results is None else (results,)
        rights = expected(name, arguments, results)
        in_place = [given[argument] for argument in written(name) if given.get(argument) is not None]
        dtype = arguments.get("dtype") or "float64"
        for result, right in zip([*results, *in_place], rights, strict=True):
            assert not result.dtype.is_floating_point or dtype_name(result.dtype) == dtype
            off = abs(result.double().numpy() - right.value)
            wrong = off > (1e-6 if dtype == "float32" else 1e-12) * abs(right.value).max(initial=0.0)
            assert not (wrong & np.isfinite(right.value) & right.known).any()


@pytest.mark.parametrize(("x", "weight"), [("float64", "float32"), ("float32", "float64")])
def test_tensors_of_two_dtypes(x, weight):
    """The result has the dtype of the first, and is computed in float64."""
    x, weight = (torch.rand(2, 8, dtype=getattr(torch, dtype)) for dtype in (x, weight))
    right = torch.topk((x.double() @ weight.double().T).softmax(-1), 2)
    logits = packet("router_logits")(x, weight, dtype="float64")
    weights, _ = packet("moe_router_topk_softmax")(logits, 2, norm_topk_prob=True)
    torch.testing.assert_close(weights, right.values, rtol=1e-13, atol=0)
    out = packet("linear_lora")(x, x, *(torch.eye(8, dtype=weight.dtype) for _ in range(2)))
    assert out.dtype == x.dtype and torch.equal(out, 2 * x)


def test_only_the_cpu_has_it(device):
    x = torch.ones(2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, got 'float64'"):
        packet("router_logits")(x.float(), x.float(), dtype="float64")
    if device == "mps":
        with pytest.raises((TypeError, ValueError), match="float64"):
            packet("expert_activation")(x.to(device))
