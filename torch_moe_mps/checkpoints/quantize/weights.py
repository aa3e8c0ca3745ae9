"""Replaces dense parameters of modules by quantised weights.

While a checkpoint is loaded, all that is read is parameters of the dense modules, as transformers expects;
quantised modules have codes as buffers.

A parameter `gate_up_proj` becomes `gate_up_proj_packed` (int32), `_scales` and, in mode affine, `_biases`;
the `weight` of a layer becomes `packed`, `scales` and `biases` of a layer of linears.py.
"""

import copy
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...models.basics.interface import on_disk_of, set_experts
from ...models.basics.report import QuantizedProjection
from ...models.modules.experts import pinned_config
from ...models.modules.linears import (
    GroupedLinear,
    OrderedLinear,
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedLinear,
    as_codes,
)
from ...models.modules.stacked_experts import run_operators
from ...models.upstream.reach import hold_reach
from ...ops._checks import Check
from ...quantization import TENSORS, QuantizedWeight
from ...quantization.formats import ErrorSums, check_finite, quantize_stack
from .reasons import groups_of
from .target import Target


def quantized_names(parameter: str) -> list[str]:
    """Names of the packed codes, scales and biases that replace a dense parameter."""
    prefix = "" if parameter == "weight" else f"{parameter}_"
    return [f"{prefix}{part}" for part in TENSORS]


def check_target(target: Target) -> None:
    """Raises: ValueError for weights that cannot be quantised; changes nothing."""
    check = Check("quantize")
    if on_disk_of(target.module) is not None:
        expected = "in memory (from_pretrained with bits quantises what it leaves on the disk)"
        check.fail(target.name, expected, "weights on the disk")
    for parameter in target.formats:
        argument = f"{target.name}.{parameter}"
        for weight in target.parts(parameter):
            if hasattr(weight, "placements"):  # a DTensor
                check.fail(argument, "a plain tensor, without expert parallelism", type(weight).__name__)
            if weight.is_meta:
                check.fail(argument, "loaded and not offloaded", "a tensor on the meta device")
    target.check_columns(check)
    for parameter in target.formats:
        for weight in target.parts(parameter):
            check_finite(check, f"{target.name}.{parameter}", target.rows_first(weight.detach()))


def as_int32(tensor: Tensor) -> Tensor:
    """Packed codes as int32: torch 2.13 cannot unpickle uint32 and has few operations for it."""
    return tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor


def as_parameters(target: Target, stack: QuantizedWeight) -> QuantizedWeight:
    """A stack of matrices as parameters of a target; a layer has one matrix, without the stack dimension."""

    def parameter(tensor: Tensor) -> nn.Parameter:
        shaped = tensor if target.kind == "experts" else tensor.squeeze(0)
        result: Any = nn.Parameter(as_int32(shaped), requires_grad=False)
        result._is_hf_initialized = not result.is_meta
        return result

    return stack.map(parameter)


def store_empty(target: Target) -> None:
    """Replaces dense tensors by uninitialised quantised ones on the same devices, to load a checkpoint.

    Until `install_stored` the module keeps dense ones on the meta device for code of transformers that reads
    them, marked as initialised.
    """
    for parameter in target.formats:
        empty = empty_weight(target, parameter)
        for name, tensor in zip(quantized_names(parameter), empty, strict=True):
            if isinstance(tensor, nn.Parameter):
                target.module.register_parameter(name, tensor)
    for parameter in target.formats.keys() & {*target.parameters}:
        weight = getattr(target.module, parameter)
        delattr(target.module, parameter)
        if target.has_order:
            order = torch.empty(target.rows_first(weight).shape[-1], dtype=torch.int32, device=weight.device)
            target.module.register_parameter("order", nn.Parameter(order, requires_grad=False))
        dense: Any = torch.empty_like(weight, device="meta")
        dense._is_hf_initialized = True
        vars(target.module)[parameter] = dense


def empty_weight(target: Target, parameter: str) -> QuantizedWeight:
    """Uninitialised quantised weight for a dense parameter, on its device."""
    weight, format = target.dense(parameter), target.formats[parameter]
    shape = target.rows_first(weight).shape
    return as_parameters(target, QuantizedWeight.empty(shape, weight.dtype, weight.device, format))


def install_stored(model: nn.Module, target: Target) -> None:
    """Makes a module quantised once the tensors of `store_empty` are loaded."""
    replace(model, target, {parameter: _stored(target, parameter) for parameter in target.formats})


def _stored(target: Target, parameter: str) -> QuantizedWeight:
    tensors: list[Any] = [getattr(target.module, name, None) for name in quantized_names(parameter)]
    packed, scales, biases = tensors
    return QuantizedWeight(packed, scales, biases, target.formats[parameter])


def quantize_target(model: nn.Module, target: Target, others: list[Target]) -> list[QuantizedProjection]:
    """Quantises the weights of a target that passed check_target, and replaces them in all that share them.

    Everything is computed first and then replaced by one assignment: if a user interrupts, each module is
    either dense or quantised.
    """
    done, weights = [], {}
    for parameter in target.formats:
        weight = target.rows_first(target.dense(parameter, values=True).detach())
        weights[parameter], entry = quantize_parameter(target, parameter, weight)
        done.append(entry)
    for item in (target, *others):
        replace(model, item, weights)
    return done


def quantize_parameter(
    target: Target, parameter: str, stack: Tensor
) -> tuple[QuantizedWeight, QuantizedProjection]:
    """Quantises a parameter, given as `rows_first` gives it.

    Raises: ValueError for values that are not finite.
    """
    format, errors = target.formats[parameter], ErrorSums()
    importance = target.importance.get(parameter)
    if importance is not None and len(importance) != len(stack):  # the rows of one layer are several matrices
        several = stack.view(len(importance), -1, stack.shape[-1])
        quantized = quantize_stack(several, format, errors, importance)
        quantized = quantized.map(lambda tensor: tensor.flatten(0, 1).unsqueeze(0))
    else:
        quantized = quantize_stack(stack, format, errors, importance)
    if not math.isfinite(errors.magnitude):
        expected, got = "finite", "NaN, inf or a range over that of float32"
        Check("quantize").fail(f"{target.name}.{parameter}", expected, got)
    weight = as_parameters(target, quantized)
    return weight, QuantizedProjection(parameter, errors.relative, stack.nbytes, weight.nbytes, format)


def replace(model: nn.Module, target: Target, weights: Mapping[str, QuantizedWeight]) -> None:
    """Replaces the dense weights of a module by quantised ones."""
    if target.kind == "experts":
        _replace_experts(target, weights)
    else:
        _replace_layer(model, target, weights["weight"])


def _replace_experts(target: Target, weights: Mapping[str, QuantizedWeight]) -> None:
    """Gives an experts module packed weights in place of dense ones."""
    module = target.module
    replaced = {*weights, *chain.from_iterable(map(quantized_names, weights))}
    parameters, buffers = (
        {name: value for name, value in tensors.items() if name not in replaced}
        for tensors in (module._parameters, module._buffers)
    )
    for parameter, quantized in weights.items():
        for name, tensor in zip(quantized_names(parameter), quantized, strict=True):
            if tensor is not None and tensor.is_floating_point():
                parameters[name] = cast(nn.Parameter, tensor)
            elif tensor is not None:
                buffers[name] = as_codes(tensor)
    run_operators(module)  # operators take dense weights, too, while eager code takes no packed ones
    set_experts(
        module,
        target.experts.packed(target.formats),
        _parameters=parameters,
        _buffers=buffers,
        config=pinned_config(module),
        _reach=hold_reach("peft"),
    )
    for parameter in weights:
        vars(module).pop(parameter, None)  # left by `store_empty`


def _replace_layer(model: nn.Module, target: Target, weight: QuantizedWeight) -> None:
    """Puts a quantised layer in place of a dense one, wherever the model has it."""
    layer = _layer(target.module, weight, target.dtype)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is target.module:
                parent._modules[name] = layer
    target.module = layer


def _layer(module: nn.Module, weight: QuantizedWeight, dtype: torch.dtype) -> QuantizedLayer:
    """The quantised module for a dense one: an embedding, or a linear layer of one of three kinds."""
    layer: QuantizedLayer
    if isinstance(module, nn.Embedding):
        scale = _scale_of(module, weight.packed.device)
        layer = QuantizedEmbedding(weight, dtype, module.padding_idx, scale)
    elif (order := module._parameters.get("order")) is not None:
        layer = OrderedLinear(weight, dtype, module._parameters["bias"], order)
    elif (groups := groups_of(module)) is not None:
        layer = GroupedLinear(weight, dtype, groups)
    else:
        layer = QuantizedLinear(weight, dtype, module._parameters["bias"])
    return layer.train(module.training)


def _scale_of(embedding: nn.Embedding, device: torch.device) -> Tensor | None:
    """Factor by which an embedding subclass scales its rows; None without one."""
    if type(embedding).forward is nn.Embedding.forward:
        return None
    probe = copy.copy(embedding)
    ones = nn.Parameter(torch.ones(1, embedding.embedding_dim, device=device), requires_grad=False)
    probe.__dict__.pop("weight", None)  # left by `store_empty`
    probe.__dict__["_parameters"] = {"weight": ones}
    probe.padding_idx = None
    row = probe(torch.zeros(1, dtype=torch.long, device=device))[0]
    if row.is_meta:  # it has no values, and never multiplies any
        return row
    return row[0].clone() if bool((row == row[0]).all()) else row
