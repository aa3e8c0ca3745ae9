"""Makes models run on the operators of this package, and undoes it."""

import inspect
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from .._faults import synchronize
from ..checkpoints.in_place import keep_when_saving, quantize_model
from ..checkpoints.quantize.importance import Importance, given_importance
from ..checkpoints.quantize.recipe import ARGUMENTS, requested_recipe
from ..models.attention.implementations import (
    attention_layers,
    choose_implementations,
    require_kv_bits,
    use_attention,
)
from ..models.attention.latents import use_latents
from ..models.basics.code import unchanged
from ..models.basics.configs import EXPERTS, ImplementationNames, drop_views
from ..models.basics.interface import (
    FORM,
    are_apart,
    experts_of,
    forget_form,
    is_experts,
    is_quantized,
    is_settled,
    weights_in,
)
from ..models.basics.logits import mark_head
from ..models.basics.report import Done, Report
from ..models.basics.residency import end_residency, keep_resident
from ..models.basics.state import kv_bits_of
from ..models.basics.unmodified import eager_on_cpu, refusal, why_unmodified
from ..models.modules.experts import NAME, described, unsupported
from ..models.modules.linears import QuantizedLayer, has_quantized_weights
from ..models.modules.results import complete_results, restore_results
from ..models.modules.rules.norms import warn_of_traces
from ..models.modules.stacked_experts import restore_form, run_form
from ..models.trials.comparing import on_the_cpu
from .compiling import align_weights, compile_kernels, require_torch
from .install import drop_forward_of_class, is_rewritten, restore_module, rewrite
from .self_check import begin, check_replacements, is_wanted, read_requested, use_tensor_units

ATTENTION = Done("cached_attention")
# Operators in place of modules that traces recognise: each model has such modules.
_TRACED = {"rms_norm", "layer_norm", "rms_norm_gated", "_mlp_quantized", "moe_router", "_pointwise"}
_ROUTERS = {"router", "gate"}  # names of routers in blocks
_PRODUCTS = {"_moe_experts", "expert_mm"}  # run first in blocks that are rewritten with their experts


@on_the_cpu()  # for tensors made to try and to check, whatever torch.set_default_device says
def accelerate(
    model: nn.Module,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    *,
    importance: Importance | str | os.PathLike | None = None,
    kv_bits: int | None = None,
    check: bool = True,
    capture: bool | None = None,
    **recipe: Any,
) -> Report:
    """Make the Mixture-of-Experts layers of a model run on `torch.ops.moe_mps`, in place.

    Args:
        model: any module, most often a model of transformers; PEFT and other wrappers are looked through.
        bits: quantises the weights, layer by layer: experts, linear layers, embeddings and output head; None
            leaves them dense.
        group_size, mode: of the quantisation, as in `torch_moe_mps.quantization.quantize`; only mode "affine"
            needs bits.
        importance: with bits, an importance matrix that weighs quantisation errors: the result of
            `collect_importance`, or a file of it. It costs no bytes and no time of the model. None quantises
            by MLX's rule.
        recipe: linear_bits, embedding_bits, keep and overrides, for weights that are quantised differently
            or not at all: see `requested_recipe`.
        kv_bits: 8 lets the model's caches hold keys and values in 8 bits, in about half of the memory;
            static caches and compiled calls raise an error then. 16 undoes it, None changes nothing. Where
            writing or reading 8 bits fails the comparison with the CPU, a warning says that they stay in 16.
        check: False leaves out the comparison with the CPU, as MOE_MPS_CHECK=0 in the environment does.
        capture: None lets a token of a model on mps be one call where all code that it runs is a library's.
            True does so on any device of a Mac, and where code of your own runs: what that reads outside of
            the model (a global, a closure, another file, the environment) then keeps the value that it had
            when the token was captured. False lets every token run module by module. MOE_MPS_CAPTURE=1 or 0
            in the environment is what None means.

    A model on mps has its Metal kernels compiled here, not in its first token; one line on stderr says so.
    From macOS 15 on its weights stay resident until the model is gone or restored; not with
    MOE_MPS_RESIDENCY=0 in the environment.
    The first time on a machine, each operator that the model uses is compared with the CPU. Where one fails,
    the modules that it would replace run unmodified, and a warning names it. Behind a transformers that this
    release was not tested with, a small model of the same class is compared with its eager code likewise.

    Returns: a report that prints as a table: what replaced each module, or why it was left alone.

    Raises: ValueError for a quantisation that does not fit the weights, for importance of another model or
        without bits, for a group_size or a mode without one, for other kv_bits or capture, and for a name in
        MOE_MPS_REFUSE that is no operator's, TypeError for
        what is not a module and for an unknown argument, RuntimeError for a model on mps with torch before
        2.13, whose own operators are wrong there, or with a torch and a macOS that do not go together, and
        for quantised weights whose operator fails on this machine: all before anything is changed.
        torch.AcceleratorError if the GPU fails meanwhile.
    """
    _require_module("accelerate", model)
    require_torch("accelerate", model)
    _require_known(recipe)
    report = Report()
    wanted = requested_recipe(bits, group_size, mode, **recipe)
    weighed = given_importance("accelerate", importance, wanted is not None)
    require_kv_bits("accelerate", kv_bits)
    formats_wanted = {} if wanted is None else wanted.formats()
    read_requested("accelerate", model, formats_wanted)
    is_unmodified = False
    if _is_of_transformers(model):
        from ..models.capture.policy import wanted_capture
        from ..models.trials.untested import settle

        capture = wanted_capture(capture)
        formats = wanted is not None and wanted.experts is not None
        verdict = settle("accelerate", model, check and is_wanted(), formats, _replace, restore)
        is_unmodified = verdict.reason is not None
        capture = capture if verdict.captures else False
        report.small_model = verdict.said
    seconds, kv_bits = begin("accelerate", model, formats_wanted, kv_bits, check)
    check = seconds is not None
    for module in model.modules():
        drop_forward_of_class(module)
    if wanted is not None:
        report.quantization = quantize_model(model, wanted, weighed)
    else:
        keep_when_saving(model)
    if is_unmodified:
        restore(model)
    else:
        _replace(model, report, capture, kv_bits)
    align_weights(model)
    report.compiled = compile_kernels(model, report.operators(), strict=not check)
    if seconds is not None and check_replacements("accelerate", model, report, seconds):
        kv_bits = kv_bits_of(model)
        restore(model)
        report.rows.clear()
        _replace(model, report, capture, kv_bits)
    report.tensor_units = use_tensor_units(model, check)
    report.eager_on_cpu = eager_on_cpu(model, report.rows)
    keep_resident(model)
    for device in {weight.device for weight in weights_in(model)}:
        synchronize(device)
    _warn_of_what_was_left(model, report, wanted is not None)
    return report


def _warn_of_what_was_left(model: nn.Module, report: Report, quantises: bool) -> None:
    """Warns of experts that no operator runs, and if nothing was quantised that should be."""
    for line in report.experts_left_alone:
        warnings.warn(f"torch_moe_mps: {line}", stacklevel=3)
    if quantises and not any(map(has_quantized_weights, model.modules())):
        warnings.warn("torch_moe_mps: nothing was found that can be quantised", stacklevel=3)


def _replace(model: nn.Module, report: Report, capture: bool | None, kv_bits: int | None = None) -> None:
    """Replaces modules and calls, and adds a row for each module to the report, in the model's order."""
    drop_views(model)
    names, refused = ImplementationNames(), dict[str, str]()
    with unchanged():
        experts = _replace_experts(model, report, names, refused)
        _replace_others(model, report, experts, names)
    _add_other_experts(model, report, experts, refused)
    if _TRACED.isdisjoint(report.operators()):
        warn_of_traces()
    if _is_of_transformers(model):
        _replace_calls(model, report, kv_bits, capture)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    report.rows.sort(key=lambda row: order[row.name])


def _replace_experts(
    model: nn.Module, report: Report, names: ImplementationNames, refused: dict[str, str]
) -> Collection[str]:
    """Replaces the experts, and returns their names. A rule knows those with stacks elsewhere.

    Args:
        refused: as for experts_of.
    """
    found = experts_of(model, refused)
    result = {name: experts for name, experts in found.items() if not are_apart(experts)}
    for name, experts in result.items():
        done = described(experts)
        reason = unsupported(experts) or why_unmodified(experts) or refusal(experts, done)
        if reason is None and FORM in vars(experts):
            run_form(experts)
        elif reason is None and not is_quantized(experts):
            names.add(experts.config, EXPERTS, NAME)
        report.add(name, experts, "experts", () if reason else done, reason)
    return result.keys()


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    """{name: layer} of attention that the operator may run."""
    layers = {} if refusal(model, [ATTENTION]) else attention_layers(model)
    return {name: layer for name, layer in layers.items() if why_unmodified(layer) is None}


def _replace_others(
    model: nn.Module, report: Report, experts: Collection[str], names: ImplementationNames
) -> None:
    """Replaces routers, attention and all modules that a rule knows."""
    routers, attentions = set(_routers(model, experts)), _attentions(model)
    choose_implementations(attentions.values(), names)
    names.show(model)  # before forwards that ask for a name are rewritten
    # Children first; the model, whose name is empty, is the last.
    for name, module in sorted(model.named_modules(), key=lambda item: (not item[0], -item[0].count("."))):
        if name in experts or _is_left_out(name, module):
            continue
        done, reason = rewrite(module)
        if name in attentions:
            is_sdpa = getattr(module.config, "_attn_implementation", None) == "sdpa"
            done = [*done, ATTENTION._replace(only_on_mps=is_sdpa), *use_latents(module)]
        _add_row(report, name, module, done, reason, routers)
    use_attention(attentions.values())


def _add_row(
    report: Report, name: str, module: nn.Module, done: list[Done], reason: str | None, routers: set[str]
) -> None:
    """Adds the row of a router, of attention, or of a module that operators run.

    Args:
        routers: names of routers. Experts whose operator does not route add the block around them.
    """
    routes = any(one.operator == "moe_router" for one in done)
    are_experts = bool(done) and done[0].operator in _PRODUCTS
    if are_experts and not routes:
        routers.add(name.rpartition(".")[0])
    inside = {f"{name}.{child}" for child in module._modules} & routers if routes else set()
    is_router = name in routers or (routes and not inside)
    if is_router or done or "attention" in type(module).__name__.lower():
        kind = "experts" if are_experts else "router" if is_router else "other"
        report.add(name, module, kind, done, reason)
        report.rows = [row for row in report.rows if row.done or row.name not in inside]


def _add_other_experts(
    model: nn.Module, report: Report, known: Collection[str], refused: Mapping[str, str]
) -> None:
    """Notes the experts that no operator runs, and why."""
    blocks = {row.name for row in report.rows if row.kind == "experts" and row.done}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if name in known or is_rewritten(module) or parent in blocks:
            continue
        around = model.get_submodule(parent)
        if reason := _other_experts(name, module, around, refused):
            report.add(name, module, "experts", (), reason)


def _replace_calls(model: nn.Module, report: Report, kv_bits: int | None, capture: bool | None) -> None:
    """Changes calls of the model: its caches, its head and losses, tokens that become one call."""
    from ..models.caches.cache import grow_caches_in_place
    from ..models.capture.classes import capture_calls, operators_of_calls, tokens_of
    from ..models.modules.loss import chunk_losses

    complete_results(model)
    grow_caches_in_place(model, kv_bits)
    mark_head(model)
    chunk_losses(model)
    capture_calls(model, capture)
    report.capture = tokens_of(model)
    report.beside = operators_of_calls(model)


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`: the model runs unmodified again. Quantised experts stay quantised.

    Registrations with transformers by names of ours (implementations, the quantizer) stay until the process
    ends. What stands in the place of functions of other libraries, the rows of `upstream/reach.py`, goes with
    the last model that needs it.

    Returns: the model.

    Raises: TypeError for an object that is not a module.
    """
    _require_module("restore", model)
    end_residency(model)
    if _is_of_transformers(model):
        from ..checkpoints.own.saving import restore_saving
        from ..models.caches.cache import restore_cache
        from ..models.capture.classes import restore_calls
        from ..models.modules.loss import restore_losses

        restore_calls(model)
        restore_losses(model)
        restore_saving(model)
        restore_results(model)
        for module in model.modules():
            restore_cache(module)
    drop_views(model)
    for module in model.modules():
        restore_module(module)
        if not is_quantized(module) and not is_settled(module):
            restore_form(module)
            forget_form(module)
    return model


def _is_of_transformers(model: nn.Module) -> bool:
    """True if code for it may import transformers, which is not complete when this module is imported."""
    return any(hasattr(module, "save_pretrained") for module in model.modules())


def _require_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"moe_mps::{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def _require_known(recipe: Collection[str]) -> None:
    parameters = [*inspect.signature(accelerate).parameters][:-1]  # without those of the recipe
    for name in recipe:
        if name not in ARGUMENTS:
            known = ", ".join(dict.fromkeys([*parameters, *ARGUMENTS]))
            raise TypeError(f"moe_mps::accelerate: arguments must be some of {known}, got {name!r}")


def _other_experts(path: str, module: nn.Module, around: nn.Module, refused: Mapping[str, str]) -> str | None:
    """Why a module in another one is left alone although its name, or its class's, says experts."""
    cls, name = type(module).__name__, path.rpartition(".")[2]
    if "shared" in f"{cls} {name}".lower():
        return None
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        named = cls.endswith("Experts") or name.endswith("experts")
        separate = named and not any(map(is_experts, module.modules()))
        if separate and any(hasattr(child, "expert_capacity") for child in around.children()):
            return "its router drops the tokens beyond an expert's capacity"
        return "each expert is a module, without transformers' experts interface" if separate else None
    if path in refused:
        return refused[path]
    stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    if cls.endswith("Experts") and stacked:
        return "its class does not follow transformers' experts interface"
    return None


def _routers(model: nn.Module, found: Collection[str]) -> Iterator[str]:
    """The names of the routers beside the experts."""
    for name in found:
        parent = name.rpartition(".")[0]
        for child, module in model.get_submodule(parent).named_children():
            if child in _ROUTERS and not _is_left_out(child, module):
                yield f"{parent}.{child}".lstrip(".")


def _is_left_out(name: str, module: nn.Module) -> bool:
    """True if a module is a model, or a layer of torch or of ours that no rule replaces."""
    is_torchs = type(module).__module__.startswith("torch.") and not isinstance(module, nn.LayerNorm)
    is_layer = is_torchs or isinstance(module, QuantizedLayer)
    return is_layer or hasattr(module, "base_model_prefix") or not name
