"""Experts modules whose dense parameters are replaced by quantised ones."""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..ops._checks import Check
from ..quantization import Format, QuantizedWeight, relative_error
from ..quantization.formats import check_finite, empty_weight, quantize_stack
from .experts import pinned_config, unsupported
from .interface import is_quantized, projections
from .report import QuantizationReport, QuantizedProjection


def _rows_first(module: nn.Module, projection: str) -> Tensor:
    """The view [E, output, input] of a dense parameter."""
    weight = getattr(module, projection).detach()
    return weight.mT if module.is_transposed else weight


def check_module(name: str, module: nn.Module, format: Format) -> None:
    """Raise the one-line error for a module that cannot be quantised, before anything is changed."""
    check = Check("quantize_experts")
    for projection in projections(module):
        weight = _rows_first(module, projection)
        argument = f"{name}.{projection}"
        if hasattr(weight, "placements"):  # a DTensor
            check.fail(argument, "a plain tensor, without expert parallelism", type(weight).__name__)
        if weight.is_meta:
            check.fail(argument, "loaded and not offloaded", "a tensor on the meta device")
        if weight.shape[-1] % format.group_size != 0:
            expected = f"of an input dimension that is a multiple of group_size {format.group_size}"
            check.fail(argument, expected, weight.shape[-1])
        check_finite(check, argument, weight)


def _replace(module: nn.Module, weights: Mapping[str, QuantizedWeight], format: Format) -> None:
    """The quantised parameters in place of the dense ones, and a config of the module's own.

    All of it is one assignment: whenever a user interrupts, the module is either dense or quantised.
    """
    parameters = {name: value for name, value in module._parameters.items() if name not in weights}
    for projection, quantized in weights.items():
        # int32 where quantize gives uint32: torch 2.13 cannot unpickle uint32, and lacks operations for it.
        quantized = quantized._replace(packed=quantized.packed.view(torch.int32))
        for suffix, tensor in zip(QuantizedWeight._fields, quantized, strict=True):
            if tensor is not None:
                parameters[f"{projection}_{suffix}"] = nn.Parameter(tensor, requires_grad=False)
    module.__dict__.update(_parameters=parameters, quantization=format, config=pinned_config(module))


def empty_quantized_module(module: nn.Module, format: Format) -> None:
    """Replace the dense parameters by uninitialised quantised ones on their devices, to load a checkpoint."""
    weights = {projection: _rows_first(module, projection) for projection in projections(module)}
    empty = {name: empty_weight(w.shape, w.dtype, w.device, format) for name, w in weights.items()}
    _replace(module, empty, format)


def quantize_module(module: nn.Module, format: Format) -> list[QuantizedProjection]:
    """Replace `<projection>` by `<projection>_packed` (int32), `_scales` and, in mode affine, `_biases`.

    The module is one that passed check_module. Nothing is replaced before everything is computed: a failure,
    for want of memory, leaves a module that works. Sets `module.quantization`, and pins the implementation.
    """
    done, replacements = [], {}
    for projection in projections(module):
        weight = _rows_first(module, projection)
        quantized = replacements[projection] = quantize_stack(weight, format)
        error = relative_error(weight, quantized, format)
        done.append(QuantizedProjection(projection, error, weight.nbytes, quantized.nbytes))
    _replace(module, replacements, format)
    return done


# The modules of a model


def _check_adapters(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """An adapter of PEFT computes with the dense parameters that quantising removes."""
    names = {id(module): name for name, module in modules.items()}
    for adapter in model.modules():
        if hasattr(adapter, "get_base_layer") and id(adapter.get_base_layer()) in names:
            name = names[id(adapter.get_base_layer())]
            raise ValueError(
                f"moe_mps::quantize_experts: a PEFT adapter is on {name}; merge_and_unload() it first"
            )


def _check_one_method(model: nn.Module) -> None:
    for module in model.modules():
        stored = getattr(getattr(module, "config", None), "quantization_config", None)
        get = stored.get if isinstance(stored, Mapping) else partial(getattr, stored)
        method = get("quant_method", None)
        if method not in (None, "moe_mps"):
            raise ValueError(
                "moe_mps::quantize_experts: the model is already quantised with "
                f"{getattr(method, 'value', method)}: a checkpoint holds one method; use bits=None"
            )


def _release_cache(module: nn.Module) -> None:
    """Give freed weights back to the system: PyTorch's MPS allocator keeps them for buffers of that size."""
    if any(parameter.device.type == "mps" for parameter in module.parameters()):
        torch.mps.empty_cache()


def _with_progress(items: Collection, enabled: bool) -> Iterable:
    """A progress bar where tqdm is installed, as it is with transformers."""
    if not enabled:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc="Quantising experts", unit="layer")


def quantize_modules(
    model: nn.Module, modules: Mapping[str, nn.Module], format: Format, progress: bool = True
) -> QuantizationReport:
    """Quantise experts modules of a model, by name, after checking all of them."""
    report = QuantizationReport(format)
    dense = {}
    for name, module in modules.items():
        reason = f"already {module.quantization}" if is_quantized(module) else unsupported(module)
        if reason is not None:
            report.skipped[name] = reason
        else:
            check_module(name, module, format)
            dense[name] = module
    if dense:
        _check_adapters(model, dense)
        _check_one_method(model)
    for name in _with_progress(dense, progress):
        report.modules[name] = quantize_module(dense[name], format)
        _release_cache(dense[name])
    return report
