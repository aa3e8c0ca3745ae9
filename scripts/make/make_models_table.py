"""Writes tests/pinned/models.txt: what `accelerate` does for each architecture, with experts and without.

Nothing in the tables is written by hand: a tiny model of each architecture is built from its real config
class and compared with its own eager code, and the cells are what the report says. Launches are counted in
the simulator; mlx-lm reads and writes the checkpoints of MLX. With names of sections it writes those alone.
"""

import copy
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import paths

if __name__ == "__main__":
    NAMED = paths.words(__doc__, "section")

import models_page
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from support.simulated import install
from torch import nn

if __name__ == "__main__":
    os.environ["MOE_MPS_CHECK"] = "0"  # kernels whose launches are counted compute nothing
    install()  # in front of whatever asks torch for MPS

from support import coverage, mlx_models, tiny_models, upstream
from support.coverage import launches, of_kind, unique
from support.launches import model_on_mps, other_on_mps
from support.models import eager, output, prompt, tiny

import torch_moe_mps
from torch_moe_mps._text import first_line
from torch_moe_mps.checkpoints.mlx.names import DENSE
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.pipeline.loop import CannotBeCut, find_loop
from torch_moe_mps.transformers import experts_of

EXPERTS = "Architecture | Experts | Router | RoPE | Dispatches | Pipeline | Quantised | Whole model"
DENSE_MODELS = "Architecture | RoPE | MLX | Pipeline | Quantised | Whole model"
OTHERS = "Architecture | Dispatches | Whole model | Tokens"
TOLERANCE = 1e-5


def texts(report, operator: str) -> list[str]:
    """Words of the report for an operator."""
    return [str(done) for row in report.replaced for done in row.done if done.operator == operator]


def rope(report) -> str:
    found = {*texts(report, "rope")} - {"rope of q and k"}
    return unique(sorted(found | {"rope"} if texts(report, "rope_heads") else found))


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
    whole = verdict(relative_error(model, accelerated))
    right, report_quantised = quantised(architecture)
    cells = [architecture, coverage.experts(report), coverage.router(report)]
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


def found() -> dict[str, Callable[[], list[str]]]:
    """{section of models_page.ROWS: what gives its lines}, but for serving."""
    of_experts = functools.cache(lambda: {name: row(name) for name in tiny_models.architectures()})
    return {
        "": lambda: [head()],
        models_page.EXPERTS: lambda: [EXPERTS, *(line for line, _ in of_experts().values())],
        models_page.WITHOUT: without_interface,
        models_page.ROUTERS: lambda: unchanged_routers(
            {name: report for name, (_, report) in of_experts().items()}
        ),
        models_page.DENSE: lambda: [DENSE_MODELS, *map(dense_row, tiny_models.DENSE_ARCHITECTURES)],
        models_page.TOKENS: uncaptured_tokens,
        models_page.OTHERS: lambda: [OTHERS, *map(other_row, tiny_models.other_causal())],
    }


def without_interface() -> list[str]:
    """Rows of architectures whose configs name experts, and whose classes lack transformers' interface."""
    names = [name for name in upstream.architectures() if name not in tiny_models.architectures()]
    return [upstream.COVERAGE, *(str(coverage.row(name)) for name in names)]


def uncaptured_tokens() -> list[str]:
    names = [*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES]
    return [f"{name}: {reason}" for name in names if (reason := uncaptured(name)) is not None]


def uncaptured(architecture: str) -> str | None:
    """Why no token of a model in 4 bit is captured; None if one is."""
    return coverage.uncaptured(partial(model_on_mps, architecture))


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
    cells = [architecture, coverage.dispatches(partial(other_on_mps, architecture))]
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
    transformers.logging.set_verbosity_error()
    sections = found()
    if unknown := {*NAMED} - sections.keys():
        sys.exit(f"sections must be some of {', '.join(filter(None, sections))}, got {unknown.pop()}")
    models_page.write({name: sections[name]() for name in NAMED or sections})
