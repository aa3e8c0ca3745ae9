"""Replaces the modules of a model, and the calls around them: the steps that a small model is tried with."""

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from ..models.attention.implementations import attention_layers, choose_implementations, use_attention
from ..models.attention.latents import use_latents
from ..models.basics.code import unchanged
from ..models.basics.configs import EXPERTS, ImplementationNames, drop_views
from ..models.basics.interface import experts_of, get_experts, is_experts, is_quantized
from ..models.basics.logits import mark_head
from ..models.basics.report import Done, Report
from ..models.basics.unmodified import refusal, why_unmodified
from ..models.caches.cache import grow_caches_in_place, restore_caches
from ..models.capture.classes import capture_calls, operators_of_calls, restore_calls, tokens_of
from ..models.modules.experts import NAME, described, unsupported
from ..models.modules.linears import QuantizedLayer
from ..models.modules.loss import chunk_losses, restore_losses
from ..models.modules.results import complete_results, restore_results
from ..models.modules.rules.norms import warn_of_traces
from ..models.modules.stacked_experts import restore_experts, run_operators
from ..models.trials.untested import verdict_of_small_model
from .install import is_rewritten, restore_modules, rewrite
from .self_check import is_wanted
from .steps import Run, UndoableStep, undo

ATTENTION = Done("cached_attention")
# Operators in place of modules that traces recognise: each model has such modules.
_TRACED = {"rms_norm", "layer_norm", "rms_norm_gated", "_mlp_quantized", "moe_router", "_pointwise"}
_ROUTERS = {"router", "gate"}  # names of routers in blocks


def compare_small_model(run: Run) -> None:
    """Compares a small model with its eager code, where this transformers was not tested."""
    quantizes = run.recipe is not None and run.recipe.experts is not None
    check = run.check and is_wanted()
    verdict = verdict_of_small_model(
        "accelerate", run.model, check, quantizes, _replace_in_small_model, restore_replaced
    )
    run.is_unmodified = verdict.reason is not None
    run.capture = run.capture if verdict.captures else False
    run.report.small_model = verdict.report_line


def _replace_in_small_model(model: nn.Module, report: Report, capture: bool) -> None:
    replace(Run(model, capture=capture, report=report))


def replace(run: Run) -> None:
    """Makes all replacements, and the rows of the report. A model that must run unmodified has none."""
    if run.is_unmodified:
        restore_replaced(run.model)
        return
    run.names, run.refused = ImplementationNames(), {}
    with unchanged():
        for step in REPLACEMENTS:
            step.make(run)


def replace_again(run: Run) -> None:
    """Replaces without the operators that were found to fail since."""
    restore_replaced(run.model)
    run.report.rows.clear()
    replace(run)


def restore_replaced(model: nn.Module) -> None:
    """Undoes `replace`."""
    undo(REPLACEMENTS, model)


def replace_experts(run: Run) -> None:
    """Replaces the experts."""
    drop_views(run.model)  # names that an earlier call shows
    found = experts_of(run.model, run.refused)
    for name, experts in found.items():
        done = described(experts)
        reason = unsupported(experts) or why_unmodified(experts) or refusal(experts, done)
        if reason is None and not run_operators(experts) and not is_quantized(experts):
            run.names.add(experts.config, EXPERTS, NAME)
        run.report.add(name, experts, "experts", () if reason else done, reason)
    run.experts = found.keys()


def restore_all_experts(model: nn.Module) -> None:
    """Undoes `replace_experts`. Quantised experts stay, and so do those that transformers' interface runs."""
    for module in model.modules():
        restore_experts(module)


def show_names(run: Run) -> None:
    """Shows the names of our implementations to modules, before forwards that ask for one are rewritten."""
    layers = {} if refusal(run.model, [ATTENTION]) else attention_layers(run.model)
    run.attentions = {name: layer for name, layer in layers.items() if why_unmodified(layer) is None}
    choose_implementations(run.attentions.values(), run.names)
    run.names.show(run.model)


def replace_modules(run: Run) -> None:
    """Replaces routers, attention and all modules that a rule knows."""
    model, routers = run.model, set(_routers(run.model, run.experts))
    # Children first; the model, whose name is empty, is the last.
    for name, module in sorted(model.named_modules(), key=lambda item: (not item[0], -item[0].count("."))):
        if name in run.experts or _is_left_out(name, module):
            continue
        done, reason = rewrite(module)
        if name in run.attentions:
            is_sdpa = getattr(module.config, "_attn_implementation", None) == "sdpa"
            done = [*done, ATTENTION._replace(only_on_mps=is_sdpa), *use_latents(module)]
        _add_row(run.report, name, module, done, reason, routers)
    use_attention(run.attentions.values())
    if _TRACED.isdisjoint(run.report.operators()):
        warn_of_traces()


def _add_row(
    report: Report, name: str, module: nn.Module, done: list[Done], reason: str | None, routers: set[str]
) -> None:
    """Adds the row of a router, of attention, or of another module that operators run.

    Args:
        routers: names of routers.
    """
    routes = any(one.operator == "moe_router" for one in done)
    inside = {f"{name}.{child}" for child in module._modules} & routers if routes else set()
    is_router = name in routers or (routes and not inside)
    if is_router or done or "attention" in type(module).__name__.lower():
        report.add(name, module, "router" if is_router else "other", done, reason)
        report.rows = [row for row in report.rows if row.done or row.name not in inside]


def report_other_experts(run: Run) -> None:
    """Adds rows of experts that no operator runs, with the reason, and sorts all rows as the model is."""
    model, report = run.model, run.report
    blocks = {row.name for row in report.rows if row.kind == "experts" and row.done}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if name in run.experts or is_rewritten(module) or parent in blocks:
            continue
        around = model.get_submodule(parent)
        if reason := _other_experts(name, module, around, run.refused):
            report.add(name, module, "experts", (), reason)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    report.rows.sort(key=lambda row: order[row.name])


def capture(run: Run) -> None:
    """Captures decode steps, and lets the report say what they run."""
    capture_calls(run.model, run.capture)
    run.report.capture = tokens_of(run.model)
    run.report.beside = operators_of_calls(run.model)


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
    """The names of the routers of experts: modules next to theirs, or the block around them."""
    for name in found:
        parent, code = name.rpartition(".")[0], get_experts(model.get_submodule(name)).code
        if code.is_of_family:
            yield from () if code.routes else (parent,)
            continue
        for child, module in model.get_submodule(parent).named_children():
            if child in _ROUTERS and not _is_left_out(child, module):
                yield f"{parent}.{child}".lstrip(".")


def _is_left_out(name: str, module: nn.Module) -> bool:
    """True if a module is a model, or a layer of torch or of ours that no rule replaces."""
    is_torchs = type(module).__module__.startswith("torch.") and not isinstance(module, nn.LayerNorm)
    is_layer = is_torchs or isinstance(module, QuantizedLayer)
    return is_layer or hasattr(module, "base_model_prefix") or not name


REPLACEMENTS = (
    UndoableStep(replace_experts, restore_all_experts),
    UndoableStep(show_names, drop_views),
    UndoableStep(replace_modules, restore_modules),
    UndoableStep(report_other_experts),
    UndoableStep(lambda run: complete_results(run.model), restore_results),
    UndoableStep(lambda run: grow_caches_in_place(run.model, run.kv_bits), restore_caches),
    UndoableStep(lambda run: mark_head(run.model)),  # quantised heads stay, and so do their marks
    UndoableStep(lambda run: chunk_losses(run.model), restore_losses),
    UndoableStep(capture, restore_calls),
)
