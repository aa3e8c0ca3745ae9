"""Mixture-of-Experts models of Hugging Face transformers on the operators of this package.

    torch_moe_mps.accelerate(model)             experts, routers, shared experts and norms, in place
    torch_moe_mps.accelerate(model, bits=4)     the same with quantised experts
    torch_moe_mps.restore(model)                the model as it was

What is replaced is found by the modules' own attributes and formulas, never by the name of a model, and what
is not recognised stays as it is. Training, gradients that are needed and autocast run the model's own code.
"""

import ast
import warnings

from torch import nn

from ..quantization import keep_when_saving, quantize_experts, requested_format
from .experts import NAME, describe, is_experts, unsupported
from .formulas import Reader
from .modules import restore_module, rewrite
from .programs import Unsupported
from .report import Report, Row
from .straightening import straighten

__all__ = ["Report", "Row", "accelerate", "is_experts", "restore", "unsupported"]

_PREVIOUS = "_moe_mps_previous_implementation"


def accelerate(
    model: nn.Module, bits: int | None = None, group_size: int | None = None, mode: str | None = None
) -> Report:
    """Make the Mixture-of-Experts layers of a model run on `torch.ops.moe_mps`, in place.

    Args:
        model: any module, most often a model of transformers; PEFT and other wrappers are looked through.
        bits: 4 or 8 quantises the experts' weights, layer by layer; None leaves them dense.
        group_size, mode: of the quantisation, as in `torch_moe_mps.quantization.quantize`; mode "mxfp4" needs
            no bits.

    Returns: a report that prints as a table: what replaced each module, or why it was left alone.

    Raises: ValueError for a quantisation that does not fit the weights, and for a group_size or a mode
        without one, before anything is changed.
    """
    report = Report()
    format = requested_format(bits, group_size, mode)
    if format is not None:
        report.quantization = quantize_experts(model, **format.to_dict())
    else:
        keep_when_saving(model)
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    for module in found.values():  # all of them first: layers share their config
        module.__dict__.setdefault(_PREVIOUS, getattr(module.config, "_experts_implementation", None))
    for name, module in found.items():
        reason = unsupported(module)
        if reason is None:
            module.config._experts_implementation = NAME
        report.add(name, module, "experts", None if reason else describe(module), reason)
    for name, module in model.named_modules():
        if name not in found and _looks_like_experts(module):
            report.add(
                name, module, "experts", None, "its class does not follow transformers' experts interface"
            )
    for name, kind, module in _around(model, found):
        rewrites, reason = rewrite(module)
        if kind == "router" and "_moe_mps_gate" in module.__dict__:
            rewrites = ["moe_gate, called by the layer"]
        report.add(name, module, kind, "; ".join(rewrites) or None, reason)
    report.rows.sort(key=_model_order(model))
    _warn_of_experts_left_alone(report)
    return report


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`: the model's own code runs again. Quantised experts stay quantised.

    Returns: the model.
    """
    for module in model.modules():
        restore_module(module)
        if _PREVIOUS in module.__dict__:
            module.config._experts_implementation = module.__dict__.pop(_PREVIOUS)
    return model


def _looks_like_experts(module: nn.Module) -> bool:
    """A stack of routed experts by the name of its class, with an interface that is not known."""
    name = type(module).__name__
    stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return name.endswith("Experts") and "Shared" not in name and stacked


def _warn_of_experts_left_alone(report: Report) -> None:
    reasons = {(row.cls, row.reason) for row in report.left_alone if row.kind == "experts"}
    for cls, reason in sorted(reasons):
        warnings.warn(f"torch_moe_mps: {cls} is left alone: {reason}", stacklevel=3)


def _around(model: nn.Module, found: dict[str, nn.Module]):
    """(name, kind, module) of the routers, blocks and layers that the experts belong to, each once."""
    seen: set[str] = set()
    for name in found:
        parent = name.rpartition(".")[0]
        block = model.get_submodule(parent)
        routers = list(_routers(block, name.rpartition(".")[2]))
        owners = list(_owners(model, parent))
        around = [
            (path, "layer" if path == owners[-1] else "block", model.get_submodule(path)) for path in owners
        ]
        around += [(f"{parent}.{child}".lstrip("."), "router", router) for child, router in routers]
        for path, kind, module in around:
            if path not in seen:
                seen.add(path)
                yield path, kind, module


def _routers(block: nn.Module, experts: str):
    """(name, module) of the children whose results are the expert ids of a block."""
    try:
        program = straighten(block)
    except Unsupported:
        return
    reader = Reader(program)
    values = [s.value for s in program.statements if isinstance(s, ast.Assign)] + [program.result]
    calls = (node for value in values for node in ast.walk(value) if isinstance(node, ast.Call))
    for call in calls:
        if ast.unparse(call.func) == f"self.{experts}" and len(call.args) == 3:
            ids = reader.read(call.args[1]).peel()
            if ids.op == "item" and ids.args[0].op == "module":
                name = ids.args[0].args[0].removeprefix("self.")
                yield name, block.get_submodule(name)


def _owners(model: nn.Module, path: str):
    """The paths of a block and of what is above it, up to the layer: the last below a list or a model."""
    while True:
        yield path
        above = path.rpartition(".")[0]
        module = model.get_submodule(above)
        if (
            not path
            or isinstance(module, (nn.ModuleList, nn.ModuleDict))
            or hasattr(module, "base_model_prefix")
        ):
            return
        path = above


def _model_order(model: nn.Module):
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return lambda row: order[row.name]
