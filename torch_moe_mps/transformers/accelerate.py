"""Makes models run on the operators of this package, and undoes it."""

import inspect
import os
import warnings
from collections.abc import Collection
from typing import Any

from torch import nn

from .._faults import synchronize
from ..checkpoints.in_place import keep_when_saving, quantize_model
from ..checkpoints.own.saving import restore_saving
from ..checkpoints.quantize.importance import Importance, given_importance
from ..checkpoints.quantize.recipe import ARGUMENTS, requested_recipe
from ..models.attention.implementations import require_kv_bits
from ..models.basics.interface import weights_in
from ..models.basics.report import Report
from ..models.basics.residency import end_residency, keep_resident
from ..models.basics.state import KVBits, kv_bits_of
from ..models.basics.unmodified import eager_on_cpu
from ..models.capture.policy import wanted_capture
from ..models.modules.linears import has_quantized_weights
from ..models.trials.memory import on_the_cpu
from .compiling import align_weights, compile_kernels, require_torch
from .install import drop_forwards_of_classes
from .replacing import compare_small_model, replace, replace_again, restore_replaced
from .self_check import compare_replacements, compare_weights, read_requested, use_tensor_units
from .steps import Run, UndoableStep, undo


def accelerate(
    model: nn.Module,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    *,
    importance: Importance | str | os.PathLike | None = None,
    kv_bits: KVBits | None = None,
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
        kv_bits: 8 lets the model's caches hold keys and values in 8 bits, in about half of the memory; 4 in
            4 bits, in about a quarter, and "k4v2" keys in 4 and values in 2. With 4 and "k4v2" the first and
            the last tokens stay in 16 bits, and layers with a sliding window, an indexer or states hold 8.
            Static caches and compiled calls raise an error then. 16 undoes it, None changes nothing. Where
            writing or reading so few bits fails the comparison with the CPU, a warning says that they are
            held in 8 or 16.
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
    wanted = requested_recipe(bits, group_size, mode, **recipe)
    weighed = given_importance("accelerate", importance, wanted is not None)
    require_kv_bits("accelerate", kv_bits)
    run = Run(model, wanted, weighed, kv_bits, check, wanted_capture(capture))
    with on_the_cpu():  # for tensors made to try and to check, whatever torch.set_default_device says
        for step in STEPS:
            step.make(run)
    return run.report


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`: the model runs unmodified again. Quantised experts stay quantised.

    Registrations with transformers by names of ours (implementations, the quantizer) stay until the process
    ends. What stands in the place of functions of other libraries, the rows of `upstream/reach.py`, goes with
    the last model that needs it.

    Returns: the model.

    Raises: TypeError for an object that is not a module.
    """
    _require_module("restore", model)
    undo(STEPS, model)
    return model


def _quantise(run: Run) -> None:
    if run.recipe is not None:
        run.report.quantization = quantize_model(run.model, run.recipe, run.importance)
    else:
        keep_when_saving(run.model)


def _compile(run: Run) -> None:
    strict = run.seconds is None
    run.report.compiled = compile_kernels(run.model, run.report.operators(), strict=strict)


def _replace_without_failing(run: Run) -> None:
    """Compares the operators that replace modules, and replaces without those that fail."""
    if compare_replacements(run):
        run.kv_bits = kv_bits_of(run.model)
        replace_again(run)


def _report_eager(run: Run) -> None:
    run.report.eager_on_cpu = eager_on_cpu(run.model, run.report.rows)


def _wait(run: Run) -> None:
    """Waits for the GPU, so that a fault of these steps is raised here."""
    for device in {weight.device for weight in weights_in(run.model)}:
        synchronize(device)


def _warn_of_what_was_left(run: Run) -> None:
    """Warns of experts that no operator runs, and if nothing was quantised that should be."""
    for line in run.report.experts_left_alone:
        warnings.warn(f"torch_moe_mps: {line}", stacklevel=3)
    if run.recipe is not None and not any(map(has_quantized_weights, run.model.modules())):
        warnings.warn("torch_moe_mps: nothing was found that can be quantised", stacklevel=3)


# The steps of `accelerate` in their order; backwards, those of `restore`.
STEPS = (
    UndoableStep(read_requested),
    UndoableStep(compare_small_model),
    UndoableStep(compare_weights),
    UndoableStep(lambda run: drop_forwards_of_classes(run.model)),
    UndoableStep(_quantise, restore_saving),
    UndoableStep(replace, restore_replaced),
    UndoableStep(lambda run: align_weights(run.model)),
    UndoableStep(_compile),
    UndoableStep(_replace_without_failing),
    UndoableStep(use_tensor_units),
    UndoableStep(_report_eager),
    UndoableStep(lambda run: keep_resident(run.model), end_residency),
    UndoableStep(_wait),
    UndoableStep(_warn_of_what_was_left),
)


def _require_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"moe_mps::{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def _require_known(recipe: Collection[str]) -> None:
    parameters = [*inspect.signature(accelerate).parameters][:-1]  # without those of the recipe
    for name in recipe:
        if name not in ARGUMENTS:
            known = ", ".join(dict.fromkeys([*parameters, *ARGUMENTS]))
            raise TypeError(f"moe_mps::accelerate: arguments must be some of {known}, got {name!r}")
