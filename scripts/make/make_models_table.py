"""Writes tests/pinned/models.txt: what `accelerate` does for each architecture, with experts and without.

Nothing in the tables is written by hand: a tiny model of each architecture is built from its real config
class and compared with its own eager code, and the cells are what the report says. Launches are counted in
the simulator; mlx-lm reads and writes the checkpoints of MLX.
"""

import copy
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import paths

if __name__ == "__main__":
    paths.words(__doc__)

import models_page
import simulator
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from support.simulated import install
from torch import nn

if __name__ == "__main__":
    os.environ["MOE_MPS_CHECK"] = "0"  # kernels whose launches are counted compute nothing
    install()  # in front of whatever asks torch for MPS

from support import mlx_models, tiny_models
from support.launches import (
    launches_by_type,
    model_on_mps,
    other_on_mps,
    reason_against_capture,
    token_by_type,
)
from support.models import eager, output, prompt, tiny

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps._text import first_line
from torch_moe_mps.checkpoints.mlx.names import DENSE
from torch_moe_mps.pipeline.loop import CannotBeCut, find_loop
from torch_moe_mps.transformers import experts_of
from torch_moe_mps.transformers.capture.classes import captures_of

EXPERTS = "Architecture | Experts | Router | RoPE | Dispatches | Pipeline | Quantised | Whole model"
DENSE_MODELS = "Architecture | RoPE | MLX | Pipeline | Quantised | Whole model"
OTHERS = "Architecture | Dispatches | Whole model | Tokens"
TOLERANCE = 1e-5


def unique(texts: list[str]) -> str:
    return ", ".join(dict.fromkeys(texts)) or "-"


def of_kind(report, kind: str) -> list:
    return [row for row in report.rows if row.kind == kind]


def texts(report, operator: str) -> list[str]:
    """Words of the report for an operator."""
    return [str(done) for row in report.replaced for done in row.done if done.operator == operator]


def rope(report) -> str:
    return unique(sorted({*texts(report, "rope")} - {"rope of q and k"}))


def router(report) -> str:
    rows = of_kind(report, "router")
    return unique([(row.replaced_by or "own").partition(",")[0] for row in rows]) if rows else "own"


def relative_error(model, accelerated) -> float:
    expected, result = output(model, prompt()), output(accelerated, prompt())
    return ((result - expected).abs().max() / expected.abs().max()).item()


def verdict(error: float) -> str:
    return "yes" if error <= TOLERANCE else f"no: relative error {error:.0e}"


def quantised(architecture: str) -> tuple[str, object]:
    """The quantised model against a dense one with the values that its weights stand for, and its report."""
    dense = tiny(architecture)
    model = copy.deepcopy(dense)
    report = torch_moe_mps.accelerate(model, bits=4, group_size=32)
    left = [why for name, why in report.quantization.skipped.items() if name in experts_of(model)]
    if left:
        return "no: " + unique(left), report
    return verdict(relative_error(tiny_models.dense_twin(dense, model), model)), report


def launches(model: nn.Module, computes: bool = False) -> str:
    """`computes`: for code that asks for values; nothing of it is captured."""
    of_own = partial(launches_by_type, computes=computes)
    accelerated = copy.deepcopy(model)
    with mock.patch.dict(os.environ, {CAPTURE: "1"}):
        torch_moe_mps.accelerate(accelerated, bits=4, group_size=32)
    own = counts_by_type(model, of_own)
    ours = counts_by_type(accelerated, of_own if computes else token_by_type)
    ours.pop("outside", None)
    kinds = dict.fromkeys([*own, *ours]) or [""]
    return "; ".join(f"{kind} {own.get(kind, '-')} / {ours.get(kind, '-')}".strip() for kind in kinds)


def counts_by_type(model: nn.Module, count: Callable[..., dict[str, Counter]]) -> dict[str, int]:
    try:
        found = count(simulator, model)
    except (AttributeError, LookupError, TypeError, ValueError):  # no layers, or no cache for a token
        return {}
    except RuntimeError as error:
        if "same dtype" not in str(error):
            raise
        return {}  # its own code does not run with all weights in bfloat16
    return {kind: total for kind, layer in found.items() if (total := sum(layer.values()))}


def launches_of_other(architecture: str) -> str:
    for computes in (False, True):
        try:
            return launches(other_on_mps(architecture), computes)
        except RuntimeError as error:
            reason = first_line(error)
    return f"its own code raises with a cache: {reason}"


def pipeline(model: nn.Module) -> str:
    """Whether the layers of a model can be cut; it has its own code."""
    try:
        find_loop(model)
    except CannotBeCut as error:
        return f"no: {error}"
    return "yes"


def row(architecture: str) -> tuple[str, object]:
    model = eager(tiny_models.tiny_model(architecture))
    accelerated = copy.deepcopy(model)
    report = torch_moe_mps.accelerate(accelerated)
    experts = unique([r.replaced_by or f"no: {r.reason}" for r in of_kind(report, "experts")])
    whole = verdict(relative_error(model, accelerated))
    right, report_quantised = quantised(architecture)
    cells = [architecture, experts, router(report)]
    cells += [rope(report_quantised), launches(model_on_mps(architecture))]
    cells += [pipeline(model), right, whole]
    return "| " + " | ".join(cells) + " |", report


def dense_row(architecture: str) -> str:
    with tiny_models.groups_of_32(), tiny_models.sizes(**mlx_models.SIZES):
        model = tiny_models.tiny_model(architecture)
    accelerated, quantised_model = copy.deepcopy(model), copy.deepcopy(model)
    torch_moe_mps.accelerate(accelerated)
    report = torch_moe_mps.accelerate(quantised_model, bits=4, group_size=32)
    twin = tiny_models.dense_twin(copy.deepcopy(model), quantised_model)
    cells = [architecture, rope(report), mlx(architecture, model)]
    cells.append(pipeline(model))
    cells += [verdict(relative_error(twin, quantised_model)), verdict(relative_error(model, accelerated))]
    return "| " + " | ".join(cells) + " |"


def mlx(architecture: str, model) -> str:
    """Both ways, for the architectures that `save_mlx` knows."""
    if model.config.get_text_config().model_type not in DENSE:
        return "-"
    with tempfile.TemporaryDirectory() as folder:
        theirs, *others = mlx_models.both_ways(model, Path(folder), 4)
    errors = [(logits - theirs).abs().max() / theirs.abs().max() for logits in others]
    return verdict(max(errors).item())


def head() -> str:
    """Versions, and how many classes have transformers' interface of experts."""
    classes = tiny_models.count_experts_classes()
    return (
        f"transformers {transformers.__version__}, {classes} classes of experts, mlx-lm {version('mlx-lm')}"
    )


def found() -> dict[str, list[str]]:
    """The sections of models_page.ROWS, but for serving."""
    transformers.logging.set_verbosity_error()
    of_experts = {architecture: row(architecture) for architecture in tiny_models.architectures()}
    dense, others = tiny_models.DENSE_ARCHITECTURES, tiny_models.other_causal()
    return {
        "": [head()],
        models_page.EXPERTS: [EXPERTS, *(line for line, _ in of_experts.values())],
        models_page.ROUTERS: unchanged_routers({name: report for name, (_, report) in of_experts.items()}),
        models_page.DENSE: [DENSE_MODELS, *map(dense_row, dense)],
        models_page.TOKENS: uncaptured_tokens(),
        models_page.OTHERS: [OTHERS, *map(other_row, others)],
    }


def uncaptured_tokens() -> list[str]:
    names = [*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES]
    return [f"{name}: {reason}" for name in names if (reason := uncaptured(name)) is not None]


def uncaptured(architecture: str) -> str | None:
    """Why no token of a model in 4 bit is captured; None if one is."""
    model = model_on_mps(architecture)
    with mock.patch.dict(os.environ, {CAPTURE: "1"}):
        torch_moe_mps.accelerate(model, bits=4, group_size=32, check=False)  # which a dropped call would fail
    with simulator.dropped():
        try:
            return reason_against_capture(model)
        except (RuntimeError, TypeError) as error:
            return f"none runs, {type(error).__name__}: {first_line(error)}"


@torch.no_grad()
def other_row(architecture: str) -> str:
    """The row of a causal model in neither table."""
    try:
        model = tiny_models.other_model(architecture)
        output(model, prompt())
    except (AttributeError, ImportError, StrictDataclassError, ValueError) as error:
        return f"| {architecture} | - | - | its own code raises: {first_line(error)} |"
    accelerated = copy.deepcopy(model)
    torch_moe_mps.accelerate(accelerated, capture=True)
    cells = [architecture, launches_of_other(architecture)]
    cells += [verdict(relative_error(model, accelerated)), tokens_of(model, accelerated)]
    return "| " + " | ".join(cells) + " |"


def tokens_of(model: nn.Module, accelerated: nn.Module) -> str:
    """How tokens of `generate` run."""
    error = error_in_generate(accelerated)
    if error is not None:
        is_own = error == error_in_generate(model)
        return f"its own code raises: {error}" if is_own else f"no: {error}"
    captures = captures_of(accelerated)
    if captures is None:
        return "module by module: its forward has no argument for a cache"
    return "one call" if captures.programs else f"module by module: {captures.reason}"


def error_in_generate(model: nn.Module) -> str | None:
    try:
        model.generate(prompt(1), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    except (AttributeError, TypeError, ValueError) as error:
        return first_line(error)
    return None


def unchanged_routers(reports: dict) -> list[str]:
    return [
        f"- {architecture}: "
        + unique([r.reason for r in of_kind(report, "router") if not r.replaced_by] or ["it is not a module"])
        for architecture, report in reports.items()
        if not any(r.replaced_by for r in of_kind(report, "router"))
    ]


if __name__ == "__main__":
    models_page.write(found())
