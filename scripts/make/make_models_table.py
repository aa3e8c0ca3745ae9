"""Writes docs/models.md: what `accelerate` does for each architecture with experts, and for dense ones.

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
from pathlib import Path
from unittest import mock

import make_serving_table
import paths
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
from torch_moe_mps.pipeline.loop import CannotBeCut, find_loop
from torch_moe_mps.transformers import experts_of
from torch_moe_mps.transformers.capture.classes import captures_of
from torch_moe_mps.transformers.checkpoints.mlx.names import DENSE

HEADER = """# Models

This page has a row for each architecture of transformers {version} with what this package does:
{architectures} Mixture-of-Experts architectures ({classes} classes with transformers' interface of
experts), [dense models](#dense-models), and [all other causal models](#other-causal-models).
[Serving](#serving) says which are batched, have a prefix cache and take draft tokens.
`scripts/make/make_models_table.py` generates the tables from tiny models with random weights; tests check
that they are current. Nothing here was measured on a Mac.

- **Experts**: the operator, and its activation. "own activation" means `expert_mm`, the model's
  activation and norm, `expert_mm`, `moe_weighted_reduce`.
- **Router**: `moe_router` with its scoring, behind `router_logits` where the matmul is in float32; "own"
  where the model's router runs unmodified. In a captured decode step the experts choose themselves.
- **RoPE**: `rope`, where it applies the rotary embedding; in captured decode steps with the heads' norms.
- **Dispatches**: kernels of a layer for one token with a cache, in bfloat16, for each type of layer in
  the config's words: the model's own code with eager experts (2 for a token here) / accelerated in 4
  bits, as captured. The first layer counts what all share (3 for a table of angles, 8 for unlimited_ocr's
  mask). An operator of aten that is no view counts as one, an operator of this package as many as it
  encodes. "-": the layers could not be found, or the model does not run in bfloat16 without us.
- **Pipeline**: whether its layers can be spread over several Macs ([distributed.md](distributed.md)).
- **Quantised**: whether the model in 4 bits gives the logits of a dense model with the same rounded
  weights.
- **Whole model**: logits (or hidden states) equal to the model's eager code in float32 within 1e-5.

From the third token with the same call signature on, a decode step is one call
([speed.md](speed.md#counts)), in all [these models](#tokens).

| Architecture | Experts | Router | RoPE | Dispatches | Pipeline | Quantised | Whole model |
|---|---|---|---|---|---|---|---|
"""
FOOTER = """
{served} of {architectures} architectures run their experts on the operators, {routers} their router too.
Routers left unchanged:

{reasons}
"""
DENSE_HEADER = """
## Dense models

Models without experts are quantised, accelerated, converted and measured in the same way. The table has
the architectures that were tried. Others work too where the form of their norms, linear layers and rotary
embedding is known; everything else runs unmodified. The columns are the same, and:

- **MLX**: whether a 4-bit checkpoint of mlx-lm is read with the same logits, and `convert --to mlx`
  writes one that has them in mlx-lm; "-" where mlx-lm lacks the architecture or computes it differently.

| Architecture | RoPE | MLX | Pipeline | Quantised | Whole model |
|---|---|---|---|---|---|
"""
TOKENS = """
## Tokens

Of {count} architectures in the tables, {captured} have tokens that are captured. Continuous batching,
where transformers can batch a model, runs module by module.{others}
"""
OTHERS = """
## Other causal models

The other {count} models of transformers' mapping of causal models, built tiny: dispatches of a layer as
above, of layers that run several times together; whether the logits equal the model's own code within the
bound above; and how `generate` decodes. {right} are right, {captured} with captured decode steps,
{counted} with layers that are counted; the own code of the others raises an error for such a model.
Without a cache, the dispatches of a token are the own code's for the whole text.

| Architecture | Dispatches | Whole model | Tokens |
|---|---|---|---|
"""
LAST = """
Several Macs, as a pipeline: [distributed.md](distributed.md).
"""
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


def header() -> str:
    counts = {
        "classes": tiny_models.count_experts_classes(),
        "architectures": len(tiny_models.architectures()),
    }
    return HEADER.format(version=transformers.__version__, **counts)


def table() -> str:
    transformers.logging.set_verbosity_error()
    rows = {architecture: row(architecture) for architecture in tiny_models.architectures()}
    return (
        header()
        + "\n".join(line for line, _ in rows.values())
        + "\n"
        + footer({a: r for a, (_, r) in rows.items()})
        + DENSE_HEADER
        + "".join(f"{dense_row(architecture)}\n" for architecture in tiny_models.DENSE_ARCHITECTURES)
        + tokens()
        + others([other_row(architecture) for architecture in tiny_models.other_causal()])
        + LAST
    )


def tokens() -> str:
    names = [*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES]
    reasons = {name: reason for name in names if (reason := uncaptured(name)) is not None}
    lines = "\n".join(f"- {name}: {reason}." for name, reason in reasons.items())
    others = f" Tokens of the others run module by module:\n\n{lines}" if lines else ""
    return TOKENS.format(count=len(names), captured=len(names) - len(reasons), others=others)


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


def others(lines: list[str]) -> str:
    cells = "| yes |", "| one call |", " / "
    right, captured, counted = (sum(cell in line for line in lines) for cell in cells)
    counts = {"count": len(lines), "right": right, "captured": captured, "counted": counted}
    return OTHERS.format(**counts) + "".join(f"{line}\n" for line in lines)


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


def footer(reports: dict) -> str:
    served = sum(all(r.replaced_by for r in of_kind(report, "experts")) for report in reports.values())
    own = {
        architecture: unique(
            [r.reason for r in of_kind(report, "router") if not r.replaced_by] or ["it is not a module"]
        )
        for architecture, report in reports.items()
        if not any(r.replaced_by for r in of_kind(report, "router"))
    }
    reasons = "\n".join(f"- {architecture}: {reason}" for architecture, reason in own.items())
    return FOOTER.format(
        served=served, architectures=len(reports), routers=len(reports) - len(own), reasons=reasons
    )


if __name__ == "__main__":
    path = paths.REPOSITORY / "docs" / "models.md"
    path.parent.mkdir(exist_ok=True)
    _, mark, serving = path.read_text().partition(make_serving_table.MARK)
    path.write_text(table() + mark + serving)
    print(f"wrote {path.relative_to(paths.REPOSITORY)}")
