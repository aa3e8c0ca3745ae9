"""Quantises models in place: experts, linear layers and embeddings."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from torch import nn

from .._faults import release_cache
from .._progress import with_progress
from ..models.basics.interface import formats_of, is_quantized, remove_unread, weights_in
from ..models.basics.report import QuantizationReport
from ..models.modules.experts import unsupported
from ..models.modules.linears import QuantizedLayer, has_quantized_weights
from .own.saving import describe_when_saving, mark_quantized
from .quantize.counting import count_packed_weights
from .quantize.decision import weights_of
from .quantize.importance import Importance
from .quantize.recipe import Recipe
from .quantize.sizes import bytes_a_token
from .quantize.target import Target, size_of
from .quantize.tied import sharing, tie_quantized
from .quantize.weights import check_target, quantize_target


def quantize_model(
    model: nn.Module, recipe: Recipe, importance: Importance | None = None, progress: bool = True
) -> QuantizationReport:
    """Quantise a model by a recipe in place, weight by weight; what cannot be quantised stays dense.

    The dense weights of a module are freed before the next one is quantised, so the peak is the dense model
    plus one quantised layer, and the dense one where its stack has to be joined. Everything is checked first;
    if a check fails, the model is unchanged.

    Raises: ValueError for a shape that does not fit a format; for weights that are not finite, offloaded,
        distributed or under an adapter of PEFT; for importance of another model; and for a model with another
        quantisation method.
    """
    weights = weights_of(model, recipe)
    report = QuantizationReport(
        skipped=weights.dense | _packed(model), sizes=weights.sizes, notes=weights.notes
    )
    if importance is not None:
        report.importance = importance.assign(model, weights.targets)
    quantize_targets(model, weights.targets, report, progress)
    return report


def _packed(model: nn.Module) -> dict[str, str]:
    """{name: reason} of layers that are quantised already, and stay in their format."""
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer))
    return {name: f"already {layer.format}" for name, layer in layers}


def quantize_targets(
    model: nn.Module, targets: Mapping[str, Target], report: QuantizationReport, progress: bool
) -> QuantizationReport:
    """The report, with the results of all targets, which are checked and then quantised."""
    dense = {}
    for name, target in targets.items():
        reason = _reason(target)
        if reason is not None:
            report.skipped[name], report.sizes[name] = reason, size_of(target)
        else:
            check_target(target)
            dense[name] = target
    if dense:
        _check_adapters(model, dense)
        _check_one_method(model)
        if _is_savable(model):
            describe_when_saving(model)  # before an interruption can leave some weights quantised
    report.bytes_before = report.bytes_before or bytes_a_token(model)
    alike = sharing(model, dense)
    try:
        for name in with_progress(list(dense), "Quantising", "module", wanted=progress):
            others = [dense[other] for other in alike.get(name, ()) if other in dense and other != name]
            if name in report.modules or name in report.shared:
                continue
            report.modules[name] = quantize_target(model, dense[name], others)
            report.shared.update({other.name: name for other in others})
            release_cache(next(weights_in(dense[name].module)).device)
    finally:  # after an interruption the model works, and can be saved
        for target in dense.values():
            if target.kind == "experts":
                remove_unread(target.module)
        tie_quantized(model)
        if report.modules:
            if not _is_adapted(model):  # there PEFT has chosen what is trained
                model.requires_grad_(False)  # quantised weights have no backward
            count_packed_weights(model)
        keep_when_saving(model)
    report.bytes_after = bytes_a_token(model)
    return report


def _reason(target: Target) -> str | None:
    """Why a target stays dense."""
    if target.kind != "experts":
        return None
    if is_quantized(target.module):
        formats = dict.fromkeys(map(str, formats_of(target.module).values()))
        return f"already {' and '.join(formats)}"
    return unsupported(target.module)


# Called with each model that a quantizer has loaded, and with the MTP layers of an accelerated one.
LOADED: list[Callable[[Any], object]] = []


def finish_loading(model: Any) -> None:
    """Finish a loaded quantised model: no gradients, marked for saving, accelerated."""
    model.requires_grad_(False)
    count_packed_weights(model)
    mark_quantized(model)
    for item in LOADED:
        item(model)


def keep_when_saving(model: nn.Module) -> None:
    """Marks the models of transformers in `model` as quantised."""
    if _is_savable(model) and any(map(has_quantized_weights, model.modules())):
        mark_quantized(model)


def _is_adapted(model: nn.Module) -> bool:
    """True for a model with adapters of PEFT, which notes their configs in it."""
    return any("peft_config" in vars(module) for module in model.modules())


def _is_savable(model: nn.Module) -> bool:
    """True for a module with a model of transformers, which may not be installed."""
    return any(hasattr(module, "save_pretrained") for module in model.modules())


def _check_adapters(model: nn.Module, targets: Mapping[str, Target]) -> None:
    """A PEFT adapter needs the dense parameters that quantising removes."""
    names = {id(target.module): name for name, target in targets.items()}
    for adapter in model.modules():
        get_base_layer: Any = getattr(adapter, "get_base_layer", None)
        name = None if get_base_layer is None else names.get(id(get_base_layer()))
        if name is not None:
            raise ValueError(f"moe_mps::quantize: a PEFT adapter is on {name}; merge_and_unload() it first")


def _check_one_method(model: nn.Module) -> None:
    """Raises: ValueError for a model that another library has quantised."""
    for module in model.modules():
        stored = getattr(getattr(module, "config", None), "quantization_config", None)
        get = stored.get if isinstance(stored, Mapping) else partial(getattr, stored)
        method = get("quant_method", None)
        if method not in (None, "moe_mps") and not get("dequantize", False):
            refuse_second_method(getattr(method, "value", method))


def refuse_dequantizing() -> NoReturn:
    """Raises the error of `model.dequantize()`, which is not supported."""
    raise NotImplementedError(
        "moe_mps::dequantize: packed weights stay packed; from_pretrained of the dense checkpoint has dense "
        "ones, or of a GGUF file with GgufConfig(dequantize=True)"
    )


def refuse_second_method(method: object) -> NoReturn:
    raise ValueError(
        f"moe_mps::quantize: the model is already quantised with {method}: a checkpoint holds one method; "
        "use bits=None"
    )
