"""What holds for every operator: schema, registration, errors, compilation, autograd, documentation."""

import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import expecttest
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import torch_moe_mps
from torch_moe_mps import _extension
from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._checks import Check

# What is tested here does not depend on the order of threads.
pytestmark = pytest.mark.one_schedule

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODULES = (
    torch_moe_mps.ops.norms,
    torch_moe_mps.ops.routing,
    torch_moe_mps.ops.combine,
    torch_moe_mps.ops.experts,
    torch_moe_mps.ops.quantized,
)
T, H, E, K, I = 3, 64, 8, 2, 32


def packet(name: str) -> Callable:
    return getattr(torch.ops.moe_mps, name)


def sample_arguments(device: str, dtype: torch.dtype) -> dict[str, dict]:
    """Good arguments of every operator, by name. All sizes differ from each other."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def integers(high, *shape, dtype):
        return torch.randint(high, shape, generator=generator, dtype=torch.int64).to(dtype).to(device)

    norm = {
        "residual": values(T, H),
        "input": values(T, H),
        "weight": values(H, dtype=torch.float32),
        "eps": 1e-6,
    }
    ids = torch.tensor([[0, 7], [3, E], [5, 3]], dtype=torch.int32, device=device)
    weights = values(T, K, dtype=torch.float32).abs()
    slots = {"slots": values(T, K, H), "weights": weights}
    format = {"bits": 4, "group_size": 32, "mode": "affine"}

    def affine(prefix, rows, columns):
        groups = (E, rows, columns // 32)
        return {
            f"{prefix}packed": integers(2**31, E, rows, columns // 8, dtype=torch.int32),
            f"{prefix}scales": values(*groups),
            f"{prefix}biases": values(*groups),
        }

    return {
        "fused_norm_add": norm,
        "fused_norm_add_scalar": {**norm, "scalar": values(1)},
        "fused_residual_norm": norm,
        "fused_residual_norm_scalar": {**norm, "scalar": values(H)},
        "moe_router": {"logits": values(T, E), "top_k": K, "scoring": "softmax", "norm_topk_prob": True},
        "moe_router_topk_softmax": {"logits": values(T, E), "top_k": K, "norm_topk_prob": True},
        "fused_moe_routing": {"logits": values(T, E), "per_expert_scale": values(E), "top_k": K},
        "moe_gate": {
            "hidden": values(T, H),
            "router_weight": values(E, H),
            "norm_weight": values(H),
            "per_expert_scale": values(E).abs(),
            "top_k": K,
            "eps": 1e-6,
        },
        "moe_bucket": {"ids": ids, "num_experts": E},
        "moe_compute_ids_tpe": {"ids": ids, "num_experts": E, "gate_up_rows": 2 * I, "down_rows": H},
        "silu_mul_stacked": {"gate": values(T, I), "up": values(T, I)},
        "weighted_sum_stacked": slots,
        "weighted_sum_residual_stacked_": {"residual_": values(T, H), **slots},
        "weighted_sum_residual_norm_stacked_": {
            "residual_": values(T, H),
            **slots,
            "norm_weight": values(H),
            "eps": 1e-6,
        },
        "moe_weighted_reduce": {"weights": weights, "expert_out": values(T, K, H)},
        "expert_mm": {"x": values(T, H), "weight": values(E, I, H), "ids": ids},
        "moe_experts": {
            "x": values(T, H),
            "gate_up": values(E, 2 * I, H),
            "down": values(E, H, I),
            "ids": ids,
            "weights": weights,
        },
        "expert_qmm": {"x": values(T, H), **affine("", I, H), "ids": ids, **format},
        "moe_experts_quantized": {
            "x": values(T, H),
            **affine("gate_up_", 2 * I, H),
            **affine("down_", H, I),
            "ids": ids,
            "weights": weights,
            **format,
        },
    }


def more_samples(name: str, device: str, dtype: torch.dtype) -> list[dict]:
    """What to change in the good arguments for other paths of the operator."""

    def values(*shape, dtype=dtype):
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)

    tail = {"shared_gate": values(T, 1), "shared_out": values(T, H), "residual": values(T, H)}
    strided = values(H, T).t()
    return {
        "fused_norm_add": [{"input": strided, "weight_offset": 1.0}],
        "fused_residual_norm": [{"residual": strided, "write_sum": False}],
        "moe_router": [
            {
                "scoring": "sigmoid",
                "bias": values(E),
                "num_groups": 4,
                "top_groups": 2,
                "per_expert_scale": values(E, dtype=torch.float32),
            },
            {"scoring": "softmax_after_topk", "logits": values(E, T).t(), "norm_topk_prob": False},
        ],
        "fused_moe_routing": [{"logits": values(E)}],
        "moe_gate": [{"renormalize_after_scale": False}],
        "moe_bucket": [{"ids": torch.zeros(0, K, dtype=torch.int64, device=device)}],
        "silu_mul_stacked": [{"gate": values(I, T).t()}],
        "weighted_sum_residual_stacked_": [{"residual_": values(H, T).t()}],
        "weighted_sum_residual_norm_stacked_": [{"residual_": values(H, T).t()}],
        "moe_weighted_reduce": [{"expert_out": values(T * K, H), **tail, "gate_is_logit": True}],
        "moe_experts": [{**tail, "gate_up_bias": values(E, 2 * I), "interleaved": True}],
    }.get(name, [])


def positional(name: str, arguments: dict) -> tuple[list, dict]:
    """The arguments as a caller without keywords passes them; defaults in between are filled in."""
    args, kwargs = [], {}
    for argument in packet(name).default._schema.arguments:
        value = arguments.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def copies(arguments: dict) -> dict:
    """Fresh tensors with the same strides, for operators that write."""
    return {
        name: value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def wrapped(line: str) -> str:
    return textwrap.fill(line, 108, subsequent_indent="    ")


class TestSchemas(expecttest.TestCase):
    def test_all(self):
        schemas = [str(packet(name).default._schema) for name in OPERATORS]
        self.assertExpectedInline(
            "\n".join(wrapped(schema) for schema in schemas),
            """\
moe_mps::fused_norm_add(Tensor residual, Tensor input, Tensor weight, float eps, float weight_offset=0.) ->
    Tensor
moe_mps::fused_norm_add_scalar(Tensor residual, Tensor input, Tensor weight, Tensor scalar, float eps, float
    weight_offset=0.) -> Tensor
moe_mps::fused_residual_norm(Tensor residual, Tensor input, Tensor weight, float eps, bool write_sum=True,
    float weight_offset=0.) -> (Tensor, Tensor)
moe_mps::fused_residual_norm_scalar(Tensor residual, Tensor input, Tensor weight, Tensor scalar, float eps,
    float weight_offset=0.) -> Tensor
moe_mps::silu_mul_stacked(Tensor gate, Tensor up) -> Tensor
moe_mps::weighted_sum_stacked(Tensor slots, Tensor weights) -> Tensor
moe_mps::weighted_sum_residual_stacked_(Tensor(a!) residual_, Tensor slots, Tensor weights) -> ()
moe_mps::weighted_sum_residual_norm_stacked_(Tensor(a!) residual_, Tensor slots, Tensor weights, Tensor
    norm_weight, float eps) -> Tensor
moe_mps::moe_weighted_reduce(Tensor weights, Tensor expert_out, Tensor? shared_gate=None, Tensor?
    shared_out=None, Tensor? residual=None, bool gate_is_logit=False) -> Tensor
moe_mps::expert_mm(Tensor x, Tensor weight, Tensor ids, Tensor? bias=None, bool transposed=False) -> Tensor
moe_mps::moe_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, *, Tensor?
    gate_up_bias=None, Tensor? down_bias=None, str activation="silu", float? alpha=None, float? limit=None,
    bool gated=True, bool interleaved=False, bool transposed=False, Tensor? shared_gate=None, Tensor?
    shared_out=None, Tensor? residual=None, bool gate_is_logit=False) -> Tensor
moe_mps::expert_qmm(Tensor x, Tensor packed, Tensor scales, Tensor? biases, Tensor ids, int bits, int
    group_size, str mode, Tensor? bias=None) -> Tensor
moe_mps::moe_experts_quantized(Tensor x, Tensor gate_up_packed, Tensor gate_up_scales, Tensor?
    gate_up_biases, Tensor down_packed, Tensor down_scales, Tensor? down_biases, Tensor ids, Tensor weights,
    int bits, int group_size, str mode, *, Tensor? gate_up_bias=None, Tensor? down_bias=None, str
    activation="silu", float? alpha=None, float? limit=None, bool gated=True, bool interleaved=False,
    Tensor? shared_gate=None, Tensor? shared_out=None, Tensor? residual=None, bool gate_is_logit=False) ->
    Tensor
moe_mps::moe_router(Tensor logits, int top_k, *, str scoring, Tensor? bias=None, int num_groups=1, int
    top_groups=1, str group_score="top2_sum", float? masked_score=None, bool bias_on_logits=False, bool
    norm_topk_prob, float norm_eps=9.9999999999999995e-21, float norm_min=0., float scaling_factor=1.,
    Tensor? per_expert_scale=None) -> (Tensor weights, Tensor ids)
moe_mps::moe_router_topk_softmax(Tensor logits, int top_k, bool norm_topk_prob) -> (Tensor weights, Tensor
    ids)
moe_mps::fused_moe_routing(Tensor logits, Tensor per_expert_scale, int top_k) -> (Tensor weights, Tensor
    ids)
moe_mps::moe_gate(Tensor hidden, Tensor router_weight, Tensor norm_weight, Tensor per_expert_scale, int
    top_k, float eps, bool renormalize_after_scale=True) -> (Tensor weights, Tensor ids)
moe_mps::moe_bucket(Tensor ids, int num_experts) -> (Tensor pair_order, Tensor offsets)
moe_mps::moe_compute_ids_tpe(Tensor ids, int num_experts, int gate_up_rows, int down_rows) -> (Tensor tpe,
    Tensor ids_by_expert, Tensor gate_up_args, Tensor down_args)""",
        )


def test_samples_cover_every_operator():
    assert set(sample_arguments("cpu", torch.float32)) == set(OPERATORS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(device, name, dtype):
    base = sample_arguments(device, dtype)[name]
    for changes in ({}, *more_samples(name, device, dtype)):
        args, kwargs = positional(name, copies({**base, **changes}))
        torch.library.opcheck(packet(name).default, args, kwargs)


@pytest.mark.parametrize("name", OPERATORS)
def test_keyword_and_positional_calls_agree(device, name):
    """By keyword, by position, and through the public function."""
    base = sample_arguments(device, torch.float32)[name]
    module = next(module for module in MODULES if hasattr(module, name))
    args, kwargs = positional(name, copies(base))
    results = [
        packet(name)(**copies(base)),
        packet(name)(*args, **kwargs),
        getattr(module, name)(**copies(base)),
    ]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_every_operator_has_its_kernels(device):
    """With MPS none is left to the reference, unseen.

    Operators that write in place keep the kernel for autograd that is registered in Python: PyTorch's own for
    extensions does not see that residual_ changes.
    """
    for name in OPERATORS:
        keys = ["CPU", "Meta", "CompositeExplicitAutograd", "Autograd"]
        if device == "mps":
            keys += ["MPS"] if name.endswith("_") else ["MPS", "AutogradMPS"]
        for key in keys:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_mps::{name}", key), (name, key)


# Errors


def bad_arguments(device: str) -> list[tuple[str, dict]]:
    """(operator, what is wrong with its arguments), each with its own message."""

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    half, integer, short = torch.float16, torch.int32, torch.int16  # MPS has no float64
    norm = [
        {"residual": zeros(T, H, dtype=short)},
        {"residual": zeros()},
        {"input": zeros(T, H, dtype=half)},
        {"input": zeros(T + 1, H)},
        {"input": zeros(H)},
        {"weight": zeros(H, dtype=integer)},
        {"weight": zeros(H - 1)},
        {"weight": zeros(1, H)},
    ]
    scalar = [{"scalar": zeros(2)}, {"scalar": zeros(1, 1)}, {"scalar": zeros(1, dtype=short)}]
    logits = [
        {"logits": zeros(T, E, dtype=integer)},
        {"logits": zeros(1, T, E)},
        {"logits": zeros(T, 0)},
        {"logits": zeros(T, 1025)},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": E + 1},
        {"logits": zeros(T, 128), "top_k": 65},
    ]
    scale = [{"per_expert_scale": zeros(E + 1)}, {"per_expert_scale": zeros(E, dtype=integer)}]
    router = [
        {"scoring": "tanh"},
        {"bias": zeros(E, 1)},
        {"bias": zeros(E, dtype=short)},
        {"num_groups": 0},
        {"num_groups": 3},
        {"num_groups": E, "group_score": "top2_sum"},
        {"group_score": "sum"},
        {"num_groups": 4, "top_groups": 5},
        {"num_groups": 4, "top_groups": 0},
        {"num_groups": 4, "top_groups": 1, "top_k": 3},
        *scale,
    ]
    gate = [
        {"hidden": zeros(T, H, dtype=short)},
        {"hidden": zeros(H)},
        {"router_weight": zeros(E, H, dtype=integer)},
        {"router_weight": zeros(E * H)},
        {"router_weight": zeros(E, H + 1)},
        {"norm_weight": zeros(H + 1)},
        {"norm_weight": zeros(H, dtype=short)},
        *scale,
        {"router_weight": zeros(1025, H), "per_expert_scale": zeros(1025)},
        {"top_k": 0},
        {"top_k": E + 1},
    ]
    ids = [
        {"ids": zeros(T, K)},
        {"ids": zeros(T, K, dtype=short)},
        {"ids": zeros(T * K, dtype=integer)},
        {"num_experts": 0},
        {"num_experts": 1025},
    ]
    slots = [
        {"slots": zeros(T, K, H, dtype=short)},
        {"slots": zeros(H)},
        {"slots": zeros(T, 0, H), "weights": zeros(T, 0)},
        {"weights": zeros(T, K + 1)},
        {"weights": zeros(T, K, dtype=integer)},
    ]
    residual = [
        {"residual_": zeros(T, H, dtype=half)},
        {"residual_": zeros(T, H + 1)},
        {"residual_": zeros(1, H).expand(T, H)},
    ]
    tail = [
        {"shared_out": zeros(T, H + 1)},
        {"shared_out": zeros(T, H, dtype=half)},
        {"shared_gate": zeros(T)},
        {"shared_out": zeros(T, H), "shared_gate": zeros(T, 2)},
        {"shared_out": zeros(T, H), "shared_gate": zeros(T + 1)},
        {"shared_out": zeros(T, H), "shared_gate": zeros(T, dtype=integer)},
        {"residual": zeros(T + 1, H)},
        {"residual": zeros(T, H, dtype=half)},
        {"shared_out": zeros(T, H), "gate_is_logit": True},
    ]
    table = {
        "fused_norm_add": [*norm, {"weight": None}, {"eps": float("nan")}, {"weight_offset": 1e39}],
        "fused_norm_add_scalar": [norm[3], *scalar, {"scalar": None}],
        "fused_residual_norm": [norm[0]],
        "fused_residual_norm_scalar": [norm[6], scalar[0]],
        "moe_router": [
            *logits,
            *router,
            {"norm_eps": -5.0},
            {"norm_min": float("nan")},
            {"masked_score": 1e39},
        ],
        "moe_router_topk_softmax": logits,
        "fused_moe_routing": [*logits, *scale, {"per_expert_scale": None}],
        "moe_gate": [*gate, {"hidden": None}],
        "moe_bucket": ids,
        "moe_compute_ids_tpe": [*ids, {"gate_up_rows": 0}, {"down_rows": -1}],
        "silu_mul_stacked": [
            {"gate": zeros(T, I, dtype=integer)},
            {"gate": zeros()},
            {"up": zeros(T, I, dtype=half)},
            {"up": zeros(I)},
        ],
        "weighted_sum_stacked": slots,
        "weighted_sum_residual_stacked_": [slots[3], *residual, {"residual_": None}],
        "weighted_sum_residual_norm_stacked_": [
            residual[0],
            {"norm_weight": zeros(H, dtype=short)},
            {"norm_weight": zeros(1)},
        ],
        "moe_weighted_reduce": [
            {"weights": zeros(T, K, dtype=integer)},
            {"weights": zeros(T * K)},
            {"weights": zeros(T, 0)},
            {"expert_out": zeros(T, K, H, dtype=short)},
            {"expert_out": zeros(T * K * H)},
            {"expert_out": zeros(T, K + 1, H)},
            {"expert_out": zeros(T, H)},
            *tail,
        ],
    }
    return [(name, changes) for name, cases in table.items() for changes in cases]


def error_messages(device: str) -> list[str]:
    messages = []
    for name, changes in bad_arguments(device):
        arguments = {**sample_arguments(device, torch.float32)[name], **changes}
        with pytest.raises(ValueError) as error:
            packet(name)(**arguments)
        messages.append(str(error.value))
    return messages


class TestErrorMessages(expecttest.TestCase):
    def test_all(self):
        messages = error_messages("cpu")
        self.assertExpectedInline(
            "\n".join(wrapped(message) for message in messages),
            """\
moe_mps::fused_norm_add: residual must be float32 or float16 or bfloat16, got int16
moe_mps::fused_norm_add: residual must be at least 1-D, got 0-D of shape ()
moe_mps::fused_norm_add: input must be float32, got float16
moe_mps::fused_norm_add: input must be of shape [..., H] of residual = (3, 64), got (4, 64)
moe_mps::fused_norm_add: input must be of shape [..., H] of residual = (3, 64), got (64,)
moe_mps::fused_norm_add: weight must be float32 or float16 or bfloat16, got int32
moe_mps::fused_norm_add: weight must be of shape [H] = (64,), got (63,)
moe_mps::fused_norm_add: weight must be of shape [H] = (64,), got (1, 64)
moe_mps::fused_norm_add: weight must be a tensor, got None
moe_mps::fused_norm_add: eps must be a number in the range of float32, got nan
moe_mps::fused_norm_add: weight_offset must be a number in the range of float32, got 1e+39
moe_mps::fused_norm_add_scalar: input must be of shape [..., H] of residual = (3, 64), got (4, 64)
moe_mps::fused_norm_add_scalar: scalar must be of 1 or H = 64 elements, got shape (2,)
moe_mps::fused_norm_add_scalar: scalar must be of 1 or H = 64 elements, got shape (1, 1)
moe_mps::fused_norm_add_scalar: scalar must be float32 or float16 or bfloat16, got int16
moe_mps::fused_norm_add_scalar: scalar must be a tensor, got None
moe_mps::fused_residual_norm: residual must be float32 or float16 or bfloat16, got int16
moe_mps::fused_residual_norm_scalar: weight must be of shape [H] = (64,), got (63,)
moe_mps::fused_residual_norm_scalar: scalar must be of 1 or H = 64 elements, got shape (2,)
moe_mps::moe_router: logits must be float32 or float16 or bfloat16, got int32
moe_mps::moe_router: logits must be 2-D, got 3-D of shape (1, 3, 8)
moe_mps::moe_router: logits must be [T, E] with E between 1 and 1024, got E = 0
moe_mps::moe_router: logits must be [T, E] with E between 1 and 1024, got E = 1025
moe_mps::moe_router: top_k must be between 1 and 8, the smaller of E and 64, got 0
moe_mps::moe_router: top_k must be between 1 and 8, the smaller of E and 64, got -1
moe_mps::moe_router: top_k must be between 1 and 8, the smaller of E and 64, got 9
moe_mps::moe_router: top_k must be between 1 and 64, the smaller of E and 64, got 65
moe_mps::moe_router: scoring must be one of softmax, sigmoid, sqrtsoftplus, softmax_after_topk, got 'tanh'
moe_mps::moe_router: bias must be of shape [E] = (8,), got (8, 1)
moe_mps::moe_router: bias must be float32 or float16 or bfloat16, got int16
moe_mps::moe_router: num_groups must be between 1 and 8, got 0
moe_mps::moe_router: num_groups must be a divisor of the 8 experts, got 3
moe_mps::moe_router: num_groups must be at most 4, for 2 experts a group with top2_sum, got 8
moe_mps::moe_router: group_score must be one of top2_sum, max, got 'sum'
moe_mps::moe_router: top_groups must be between 1 and 4, got 5
moe_mps::moe_router: top_groups must be between 1 and 4, got 0
moe_mps::moe_router: top_k must be at most 2, the experts in top_groups groups, got 3
moe_mps::moe_router: per_expert_scale must be of shape [E] = (8,), got (9,)
moe_mps::moe_router: per_expert_scale must be float32 or float16 or bfloat16, got int32
moe_mps::moe_router: norm_eps must be at least 0.0, got -5.0
moe_mps::moe_router: norm_min must be a number in the range of float32, got nan
moe_mps::moe_router: masked_score must be a number in the range of float32, got 1e+39
moe_mps::moe_router_topk_softmax: logits must be float32 or float16 or bfloat16, got int32
moe_mps::moe_router_topk_softmax: logits must be 2-D, got 3-D of shape (1, 3, 8)
moe_mps::moe_router_topk_softmax: logits must be [T, E] with E between 1 and 1024, got E = 0
moe_mps::moe_router_topk_softmax: logits must be [T, E] with E between 1 and 1024, got E = 1025
moe_mps::moe_router_topk_softmax: top_k must be between 1 and 8, the smaller of E and 64, got 0
moe_mps::moe_router_topk_softmax: top_k must be between 1 and 8, the smaller of E and 64, got -1
moe_mps::moe_router_topk_softmax: top_k must be between 1 and 8, the smaller of E and 64, got 9
moe_mps::moe_router_topk_softmax: top_k must be between 1 and 64, the smaller of E and 64, got 65
moe_mps::fused_moe_routing: logits must be float32 or float16 or bfloat16, got int32
moe_mps::fused_moe_routing: logits must be 1-D or 2-D, got 3-D of shape (1, 3, 8)
moe_mps::fused_moe_routing: logits must be [T, E] with E between 1 and 1024, got E = 0
moe_mps::fused_moe_routing: logits must be [T, E] with E between 1 and 1024, got E = 1025
moe_mps::fused_moe_routing: top_k must be between 1 and 8, the smaller of E and 64, got 0
moe_mps::fused_moe_routing: top_k must be between 1 and 8, the smaller of E and 64, got -1
moe_mps::fused_moe_routing: top_k must be between 1 and 8, the smaller of E and 64, got 9
moe_mps::fused_moe_routing: top_k must be between 1 and 64, the smaller of E and 64, got 65
moe_mps::fused_moe_routing: per_expert_scale must be of shape [E] = (8,), got (9,)
moe_mps::fused_moe_routing: per_expert_scale must be float32 or float16 or bfloat16, got int32
moe_mps::fused_moe_routing: per_expert_scale must be a tensor, got None
moe_mps::moe_gate: hidden must be float32 or float16 or bfloat16, got int16
moe_mps::moe_gate: hidden must be 2-D, got 1-D of shape (64,)
moe_mps::moe_gate: router_weight must be float32 or float16 or bfloat16, got int32
moe_mps::moe_gate: router_weight must be 2-D, got 1-D of shape (512,)
moe_mps::moe_gate: router_weight must be of shape [E, H] = (8, 64), got (8, 65)
moe_mps::moe_gate: norm_weight must be of shape [H] = (64,), got (65,)
moe_mps::moe_gate: norm_weight must be float32 or float16 or bfloat16, got int16
moe_mps::moe_gate: per_expert_scale must be of shape [E] = (8,), got (9,)
moe_mps::moe_gate: per_expert_scale must be float32 or float16 or bfloat16, got int32
moe_mps::moe_gate: router_weight must be [E, H] with E between 1 and 1024, got E = 1025
moe_mps::moe_gate: top_k must be between 1 and 8, the smaller of E and 64, got 0
moe_mps::moe_gate: top_k must be between 1 and 8, the smaller of E and 64, got 9
moe_mps::moe_gate: hidden must be a tensor, got None
moe_mps::moe_bucket: ids must be int32 or int64, got float32
moe_mps::moe_bucket: ids must be int32 or int64, got int16
moe_mps::moe_bucket: ids must be 2-D, got 1-D of shape (6,)
moe_mps::moe_bucket: num_experts must be between 1 and 1024, got 0
moe_mps::moe_bucket: num_experts must be between 1 and 1024, got 1025
moe_mps::moe_compute_ids_tpe: ids must be int32 or int64, got float32
moe_mps::moe_compute_ids_tpe: ids must be int32 or int64, got int16
moe_mps::moe_compute_ids_tpe: ids must be 2-D, got 1-D of shape (6,)
moe_mps::moe_compute_ids_tpe: num_experts must be between 1 and 1024, got 0
moe_mps::moe_compute_ids_tpe: num_experts must be between 1 and 1024, got 1025
moe_mps::moe_compute_ids_tpe: gate_up_rows must be between 1 and 2147483647, got 0
moe_mps::moe_compute_ids_tpe: down_rows must be between 1 and 2147483647, got -1
moe_mps::silu_mul_stacked: gate must be float32 or float16 or bfloat16, got int32
moe_mps::silu_mul_stacked: gate must be at least 1-D, got 0-D of shape ()
moe_mps::silu_mul_stacked: up must be float32, got float16
moe_mps::silu_mul_stacked: up must be of shape [..., I] of gate = (3, 32), got (32,)
moe_mps::weighted_sum_stacked: slots must be float32 or float16 or bfloat16, got int16
moe_mps::weighted_sum_stacked: slots must be at least 2-D, got 1-D of shape (64,)
moe_mps::weighted_sum_stacked: slots must be [..., S, H] with S at least 1, got (3, 0, 64)
moe_mps::weighted_sum_stacked: weights must be of shape [..., S] of slots = (3, 2), got (3, 3)
moe_mps::weighted_sum_stacked: weights must be float32 or float16 or bfloat16, got int32
moe_mps::weighted_sum_residual_stacked_: weights must be of shape [..., S] of slots = (3, 2), got (3, 3)
moe_mps::weighted_sum_residual_stacked_: residual_ must be float32, got float16
moe_mps::weighted_sum_residual_stacked_: residual_ must be of shape [..., H] of slots = (3, 64), got (3, 65)
moe_mps::weighted_sum_residual_stacked_: residual_ must be free of expanded (stride-0) dimensions, got
    strides (0, 1)
moe_mps::weighted_sum_residual_stacked_: residual_ must be a tensor, got None
moe_mps::weighted_sum_residual_norm_stacked_: residual_ must be float32, got float16
moe_mps::weighted_sum_residual_norm_stacked_: norm_weight must be float32 or float16 or bfloat16, got int16
moe_mps::weighted_sum_residual_norm_stacked_: norm_weight must be of shape [H] = (64,), got (1,)
moe_mps::moe_weighted_reduce: weights must be float32 or float16 or bfloat16, got int32
moe_mps::moe_weighted_reduce: weights must be 2-D, got 1-D of shape (6,)
moe_mps::moe_weighted_reduce: weights must be [T, K] with K at least 1, got (3, 0)
moe_mps::moe_weighted_reduce: expert_out must be float32 or float16 or bfloat16, got int16
moe_mps::moe_weighted_reduce: expert_out must be 2-D or 3-D, got 1-D of shape (384,)
moe_mps::moe_weighted_reduce: expert_out must be of shape [T, K, H] = (3, 2, 64), got (3, 3, 64)
moe_mps::moe_weighted_reduce: expert_out must be of shape [T * K, H] = (6, 64), got (3, 64)
moe_mps::moe_weighted_reduce: shared_out must be of shape [T, H] = (3, 64), got (3, 65)
moe_mps::moe_weighted_reduce: shared_out must be float32, got float16
moe_mps::moe_weighted_reduce: shared_out must be given when shared_gate is, got None
moe_mps::moe_weighted_reduce: shared_gate must be of shape [T, 1] = (3, 1), got (3, 2)
moe_mps::moe_weighted_reduce: shared_gate must be of shape [T] = (3,), got (4,)
moe_mps::moe_weighted_reduce: shared_gate must be float32 or float16 or bfloat16, got int32
moe_mps::moe_weighted_reduce: residual must be of shape [T, H] = (3, 64), got (4, 64)
moe_mps::moe_weighted_reduce: residual must be float32, got float16
moe_mps::moe_weighted_reduce: gate_is_logit must be False without shared_gate, got True""",
        )


def test_sparse_tensors():
    gate = torch.ones(2, 3)
    message = "moe_mps::silu_mul_stacked: gate must be a dense tensor, got sparse_coo"
    with pytest.raises(ValueError, match=message):
        packet("silu_mul_stacked")(gate.to_sparse(), gate)


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_nothing(device, name):
    """The operators compute in the dtypes that they document, not in those of the caller's autocast."""
    arguments = sample_arguments(device, torch.float32)[name]
    expected = packet(name)(**copies(arguments))
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.testing.assert_close(packet(name)(**copies(arguments)), expected, rtol=0, atol=0)


def test_errors_read_the_same_everywhere(device):
    """On the device and on meta: one line that begins with the operator and names the argument."""
    messages = error_messages(device)
    assert messages == error_messages("meta")
    for (name, _), message in zip(bad_arguments("meta"), messages, strict=True):
        assert message.startswith(f"moe_mps::{name}: ") and " must be " in message and ", got " in message
        assert "\n" not in message


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_of_two_devices(name):
    """Each tensor argument but the first on meta beside a first one on the CPU."""
    arguments = sample_arguments("cpu", torch.float32)[name]
    tensors = [argument for argument, value in arguments.items() if isinstance(value, Tensor)]
    for argument in tensors[1:]:
        mixed = {**arguments, argument: arguments[argument].to("meta")}
        with pytest.raises(
            ValueError, match=rf"^moe_mps::{name}: {argument} must be on the device of .*, got meta$"
        ):
            packet(name)(**mixed)


# torch.compile and torch.export


class Layer(torch.nn.Module):
    """A MoE layer that calls an operator of every kind, the mutating ones included."""

    def __init__(self, device: str):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape):
            return torch.nn.Buffer((torch.randn(shape, generator=generator) * H**-0.5).to(device))

        self.norm_weight, self.scale, self.bias = weight(H), weight(E), weight(E)
        self.router, self.gate_up, self.down = weight(E, H), weight(E, 2 * I, H), weight(E, H, I)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ops = torch.ops.moe_mps
        normed, stream = ops.fused_residual_norm(x, x, self.norm_weight, 1e-6)
        weights, ids = ops.moe_router(
            normed @ self.router.T, K, scoring="sigmoid", bias=self.bias, norm_topk_prob=True
        )
        _, gate_ids = ops.moe_gate(stream, self.router, self.norm_weight, self.scale, K, 1e-6)
        order, offsets = ops.moe_bucket(ids, E)
        out = ops.moe_experts(normed, self.gate_up, self.down, ids, weights, residual=stream)
        slots = ops.expert_mm(normed, self.down.mT.contiguous(), gate_ids)
        slots = ops.silu_mul_stacked(slots, slots + 1.0)
        total = ops.weighted_sum_stacked(slots, weights)
        updated = out.clone()
        next_input = ops.weighted_sum_residual_norm_stacked_(
            updated, out.unsqueeze(1).expand(-1, K, -1), weights, self.norm_weight, 1e-6
        )
        ops.weighted_sum_residual_stacked_(updated, out.unsqueeze(1), weights[:, :1])
        return updated, next_input, total, order, offsets


def check_compiled(device: str, backend: str) -> None:
    layer = Layer(device)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    torch._dynamo.reset()
    with torch.no_grad():
        for tokens in (5, 12, 1):
            x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(tokens)).to(device)
            torch.testing.assert_close(compiled(x), layer(x))


def test_compile_with_aot_eager(device):
    check_compiled(device, "aot_eager")


def test_compile_with_inductor():
    check_compiled("cpu", "inductor")


def test_compile_keeps_the_graph_dynamic():
    """Any number of tokens from 2 on runs in one graph."""
    layer = Layer("cpu")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    torch._dynamo.reset()
    with torch.no_grad():
        for tokens in (2, 3, 33, 200):
            compiled(torch.randn(tokens, H))
    assert counter.frame_count == 1


def test_export(device):
    layer = Layer(device)
    x = torch.randn(6, H).to(device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert torch.ops.moe_mps.moe_experts.default in called
    for tokens in (6, 9, 1):
        x = torch.randn(tokens, H).to(device)
        torch.testing.assert_close(program.module()(x), layer(x))


# Autograd


def floating_arguments(name: str, device: str) -> tuple[dict, list[str]]:
    arguments = sample_arguments(device, torch.float32)[name]
    mutated = {
        a.name for a in packet(name).default._schema.arguments if a.alias_info and a.alias_info.is_write
    }
    floating = [n for n, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point()]
    return arguments, [n for n in floating if n not in mutated]


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name not in ("moe_bucket", "moe_compute_ids_tpe")]
)
def test_backward_fails_by_name(device, name):
    """Whichever argument needs the gradient, backward raises instead of leaving it out."""
    arguments, floating = floating_arguments(name, device)
    for argument in floating:
        needy = copies(arguments)
        needy[argument] = needy[argument].requires_grad_()
        result = packet(name)(**needy)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        outputs += [needy["residual_"]] if "residual_" in needy else []
        floats = [output for output in outputs if output.is_floating_point()]
        assert floats and all(output.requires_grad for output in floats)
        assert not any(output.requires_grad for output in outputs if not output.is_floating_point())
        for output in floats:
            with pytest.raises(RuntimeError, match=f"moe_mps::{name}.* not implemented"):
                output.sum().backward(retain_graph=True)


@pytest.mark.filterwarnings("ignore:Error detected in _NoBackward")
def test_compiled_backward_fails_by_name():
    """torch.compile traces backward with forward, so the same error comes when it compiles."""
    arguments = copies(sample_arguments("cpu", torch.float32)["fused_norm_add"])
    arguments["weight"].requires_grad_()
    compiled = torch.compile(
        lambda: packet("fused_norm_add")(**arguments), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="moe_mps::fused_norm_add: backward is not implemented"):
        compiled().sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(), packet("fused_norm_add")(**arguments))


@pytest.mark.parametrize(
    "name", [name for name in OPERATORS if name not in ("moe_bucket", "moe_compute_ids_tpe")]
)
def test_forward_mode_fails_by_name(device, name):
    """Forward-mode differentiation raises too: a tangent that is left out would be a wrong derivative."""
    arguments, floating = floating_arguments(name, device)
    for argument in floating:
        with torch.autograd.forward_ad.dual_level():
            dual = copies(arguments)
            dual[argument] = torch.autograd.forward_ad.make_dual(
                dual[argument], torch.ones_like(dual[argument])
            )
            with pytest.raises(NotImplementedError, match=name):
                packet(name)(**dual)


def test_jvp_fails_by_name():
    arguments, _ = floating_arguments("silu_mul_stacked", "cpu")
    gate, up = arguments["gate"], arguments["up"]
    with pytest.raises(NotImplementedError, match="moe_mps::silu_mul_stacked: forward-mode"):
        torch.func.jvp(packet("silu_mul_stacked"), (gate, up), (gate, up))


def test_grad_of_a_function_fails_by_name(device):
    arguments, _ = floating_arguments("silu_mul_stacked", device)
    with pytest.raises(NotImplementedError, match=r"moe_mps::silu_mul_stacked.*not implemented"):
        torch.func.grad(lambda gate: packet("silu_mul_stacked")(gate, arguments["up"]).sum())(
            arguments["gate"]
        )


IN_PLACE = [name for name in OPERATORS if name.endswith("_")]


@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_in_place_is_seen_by_autograd(device, name):
    """What was saved for a backward pass and overwritten since gives an error, not a wrong gradient."""
    arguments = copies(sample_arguments(device, torch.float32)[name])
    residual = arguments["residual_"]
    version = residual._version
    factor = torch.ones_like(residual, requires_grad=True)
    product = (factor * residual).sum()
    packet(name)(**arguments)
    assert residual._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("name", IN_PLACE)
def test_writing_in_place_over_other_arguments(device, name):
    arguments = copies(sample_arguments(device, torch.float32)[name])
    slots, residual = arguments["slots"], arguments["residual_"]
    buffer = torch.cat([slots.flatten(), residual.flatten()])
    arguments["slots"] = buffer[: slots.numel()].view(slots.shape)
    arguments["residual_"] = buffer[1 : 1 + residual.numel()].view(residual.shape)
    message = f"moe_mps::{name}: residual_ must be free of overlap with slots, got a view of the same memory"
    with pytest.raises(ValueError, match=message):
        packet(name)(**arguments)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_with_weights_that_need_gradients(device, mode):
    for name in OPERATORS:
        arguments, floating = floating_arguments(name, device)
        for argument in floating:
            arguments[argument] = arguments[argument].requires_grad_()
        with mode():
            result = packet(name)(**arguments)
        outputs = [result] if isinstance(result, Tensor) else list(result or ())
        assert not any(output.requires_grad for output in outputs)


def test_in_place_on_a_leaf_that_needs_gradients(device):
    arguments = copies(sample_arguments(device, torch.float32)["weighted_sum_residual_stacked_"])
    arguments["residual_"].requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        packet("weighted_sum_residual_stacked_")(**arguments)


# Use


def test_two_threads(device):
    """Operators called from two threads at once give what they give alone."""
    arguments = {name: sample_arguments(device, torch.float32)[name] for name in OPERATORS}
    alone = {name: packet(name)(**copies(arguments[name])) for name in OPERATORS}
    failures = []

    def work(names):
        try:
            for _ in range(3):
                for name in names:
                    torch.testing.assert_close(
                        packet(name)(**copies(arguments[name])), alone[name], rtol=0, atol=0
                    )
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(names,)) for names in (OPERATORS, OPERATORS[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("name", OPERATORS)
def test_documentation(name):
    """Help on the function is complete: every argument by name, the result, the errors."""
    function = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    document = inspect.getdoc(function)
    assert document == inspect.cleandoc(packet(name).__doc__)
    assert "Args:" in document and "Raises:" in document
    parameters = list(inspect.signature(function).parameters)
    assert parameters == [argument.name for argument in packet(name).default._schema.arguments]
    entries = re.findall(r"^ +((?:\w+,\s+)*\w+): ", document.partition("Args:")[2], re.MULTILINE)
    described = {parameter for entry in entries for parameter in re.split(r",\s+", entry)}
    described |= set(re.findall("`(gate_is_logit)`", document))  # stands with the gate that it is about
    assert set(parameters) <= described
    if packet(name).default._schema.returns:
        assert "Returns" in document


def test_defaults_of_functions_and_schemas_agree():
    for name in OPERATORS:
        function = next(getattr(module, name) for module in MODULES if hasattr(module, name))
        for argument in packet(name).default._schema.arguments:
            parameter = inspect.signature(function).parameters[argument.name]
            assert argument.has_default_value() == (parameter.default is not parameter.empty), (
                name,
                argument.name,
            )
            if argument.has_default_value():
                assert argument.default_value == parameter.default
            assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)


def test_buffers_beside_each_other_do_not_overlap(device):
    """On mps an address is that of a buffer object, and these lie closer together than buffers are long."""
    tensors = [torch.zeros(2**20, device=device) for _ in range(8)]
    for written, read in itertools.permutations(tensors, 2):
        Check("an_operator").apart("residual_", written, slots=read)
    with pytest.raises(ValueError, match="free of overlap with slots"):
        Check("an_operator").apart("residual_", tensors[0][1:], slots=tensors[0][:-1])


WITHOUT_EXTENSION = """
import sys, warnings
import torch
from simulator import build_device, install
build_device.host_library = lambda: None
install()
from test_operators import OPERATORS, copies, packet, sample_arguments
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name in OPERATORS:
        expected = copies(sample_arguments("cpu", torch.float32)[name])
        arguments = copies(sample_arguments("mps", torch.float32)[name])
        torch.testing.assert_close(packet(name)(**arguments), packet(name)(**expected), check_device=False)
        if name.endswith("_"):
            torch.testing.assert_close(arguments["residual_"].cpu(), expected["residual_"])
print(*(warning.message for warning in caught), sep="\\n")
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has the extension")
def test_mps_without_the_extension():
    """Every operator runs its reference there, and one warning says so."""
    tests = Path(__file__).parent
    output = subprocess.check_output([sys.executable, "-c", WITHOUT_EXTENSION], text=True, cwd=tests)
    (warning,) = output.splitlines()
    assert warning.startswith("torch_moe_mps: the Metal extension is not loaded")


def test_library_for_another_torch(tmp_path, monkeypatch):
    """It is not loaded into this one, whose classes may differ."""
    (tmp_path / "_C_torch1_0.cpython-310-darwin.so").touch()
    monkeypatch.setattr(_extension, "PACKAGE", tmp_path)
    with pytest.warns(
        UserWarning, match=r"_C_torch1_0\S* is for another torch or Python .*; build it again: `pip"
    ):
        assert not _extension.load_extension()
    (tmp_path / (_extension.extension_name() + EXTENSION_SUFFIXES[0])).touch()
    with pytest.warns(UserWarning, match="does not load into torch"):
        assert not _extension.load_extension()


MESSAGE_ABOUT_A_SHADER = """
import sys
import torch
from simulator import install
install()
from torch_moe_mps.ops.norms import fused_norm_add
torch.ops.moe_mps._set_shader_directory(sys.argv[1])
x = torch.ones(2, 8, device="mps")
try:
    fused_norm_add(x, x, x[0], 1e-6)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="the simulator stands for Metal's compiler")
def test_message_of_a_shader_that_does_not_compile(tmp_path):
    """It names file and line, though the compiler gets one text in which headers are pasted."""
    shaders = Path(shutil.copytree(_extension.SHADERS, tmp_path / "shaders"))
    faults = []
    for name in ("norms.h", "norms.metal"):
        source = (shaders / name).read_text()
        (shaders / name).write_text(f"{source}static_assert(false);\n")
        faults.append(f"{name}:{source.count(chr(10)) + 1}:")
    command = [sys.executable, "-c", MESSAGE_ABOUT_A_SHADER, str(shaders)]
    output = subprocess.check_output(command, text=True, cwd=Path(__file__).parent)
    assert output.startswith("moe_mps: norms_f32 does not compile: ")
    assert all(fault in output for fault in faults), output


def test_a_signature_is_checked_once(simulated, monkeypatch):
    """Later calls do not enter Python, also when calls with another signature lie between them."""
    checked, check = [], Check.same_device

    def counting(self, **tensors):
        checked.append(tensors)
        check(self, **tensors)

    monkeypatch.setattr(Check, "same_device", counting)
    first, second = (torch.ones(3, columns, device="mps") for columns in (1013, 1019))
    for gate in (first, second, first, second):
        packet("silu_mul_stacked")(gate, gate)
    assert len(checked) == 2


def test_signatures_of_other_shapes_are_told_apart(simulated):
    """Of as many elements, and in the other order, after each has been seen in a good call."""
    shapes = ((2, 3), (3, 2), (6,), (1, 6))
    tensors = [torch.ones(shape, device="mps") for shape in shapes]
    for tensor in tensors:
        packet("silu_mul_stacked")(tensor, tensor)
    for gate, up in itertools.permutations(tensors, 2):
        with pytest.raises(ValueError, match="up must be of shape"):
            packet("silu_mul_stacked")(gate, up)


def test_pipeline_that_allows_fewer_threads(simulated):
    """Metal would leave out such a dispatch without a word."""
    arguments = sample_arguments("mps", torch.float32)["fused_norm_add"]
    message = r"moe_mps: norm_add_f32 takes \d+ threads a threadgroup, its pipeline on this GPU at most 16"
    with simulated.pipeline_limit(16), pytest.raises(RuntimeError, match=message):
        packet("fused_norm_add")(**arguments)


UNKNOWN_TRANSFORMERS = """
import warnings
import torch_moe_mps
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from transformers.quantizers.auto import VALUE
print(VALUE, *(warning.message for warning in caught))
"""


def test_unknown_transformers_can_be_imported(tmp_path):
    """A version that lacks what is registered with runs as if this package were not there, with a warning."""
    module = tmp_path / "transformers" / "quantizers"
    module.mkdir(parents=True)
    for folder in (module.parent, module):
        (folder / "__init__.py").touch()
    (module / "auto.py").write_text("VALUE = 42\n")
    metadata = tmp_path / "transformers-4.57.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n")
    root = Path(torch_moe_mps.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    output = subprocess.check_output([sys.executable, "-c", UNKNOWN_TRANSFORMERS], text=True, env=environment)
    assert output.startswith("42 torch_moe_mps: transformers 4.57.1 is not supported")


def test_import_is_fast_and_without_transformers():
    code = (
        "import sys, time, torch; start = time.perf_counter(); import torch_moe_mps; "
        "print(time.perf_counter() - start, 'transformers' in sys.modules)"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(2)]
    assert all(loaded == "False" for _, loaded in runs)
    assert min(float(seconds) for seconds, _ in runs) < 0.3


def test_public_names():
    assert all(callable(getattr(torch_moe_mps, name)) for name in set(torch_moe_mps.__all__) - {"ops"})
    with pytest.raises(AttributeError, match="has no attribute 'acelerate'"):
        torch_moe_mps.acelerate  # noqa: B018
