"""The row of an architecture whose config names experts: what small models of it run on operators.

scripts/upstream prints the rows of a release, or of a modelling file; docs/models.md has those of the
architectures without transformers' interface of experts.
"""

import copy
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import simulator
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps._text import first_line
from torch_moe_mps.models.basics.report import Report
from torch_moe_mps.models.trials.memory import apart
from torch_moe_mps.models.trials.small_models import small_model
from torch_moe_mps.models.trials.untested import results_of

from . import tiny_models
from .launches import (
    NotCaptured,
    captured_by_type,
    launches_by_type,
    model_on_mps,
    other_on_mps,
    own_interfaces,
    reason_against_capture,
    token_by_type,
)
from .models import eager
from .upstream import Row


def of_file(path: Path) -> str:
    """The architecture of a modelling file: its folder is a package of transformers' models from here on."""
    name = path.stem.removeprefix("modeling_")
    package = ModuleType(f"{transformers.models.__name__}.{name}")
    package.__path__ = [str(path.parent)]
    sys.modules[package.__name__] = package
    return name


def row(name: str) -> Row:
    """The row of an architecture."""
    faults: list[str] = []
    found = max(tried(name, faults), default=None, key=lambda each: (each.has_experts, each.runs))
    if found is None:
        return Row(name, f"no: no small model is built: {faults[0]}")
    others = {
        f"{row.cls}: {row.reason}"
        for row in found.report.rows
        if row.reason and row.kind not in ("experts", "router")
    }
    counts = "-"
    if found.runs and works(found.on_mps):
        counts = dispatches(found.on_mps)
        others |= {f"tokens: {why}"} if (why := uncaptured(found.on_mps)) is not None else set()
    return Row(name, experts(found.report), router(found.report), counts, unique(sorted(others)))


# --- small models


class Small(NamedTuple):
    """A small model, and the report of what runs in it.

    Attributes:
        model: with its own code.
        on_mps: makes it again in bfloat16, of sizes that can be quantised.
        runs: whether its own code says tokens behind a prompt alone.
    """

    model: PreTrainedModel
    report: Report
    on_mps: Callable[[], nn.Module]
    runs: bool

    @property
    def has_experts(self) -> bool:
        return bool(of_kind(self.report, "experts"))


def tried(name: str, faults: list[str]) -> Iterator[Small]:
    """Small models of an architecture, up to the first that has experts and runs."""
    for build, on_mps in _ways(name):
        try:
            model = eager(build())
        except Exception as error:  # of its config, or of its own code
            faults.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        runs = says_tokens(model)
        small = Small(model, torch_moe_mps.accelerate(copy.deepcopy(model)), on_mps, runs)
        yield small
        if small.has_experts and runs:
            return


def says_tokens(model: PreTrainedModel) -> bool:
    """Whether a model's own code says tokens behind a prompt alone."""
    try:
        with apart():
            results_of(model)
    except Exception:  # of sizes that it does not take, or of a prompt without an image
        return False
    return not model.config.is_encoder_decoder


def works(build: Callable[[], object]) -> bool:
    """Whether a model can be built of sizes."""
    try:
        build()
    except Exception:  # of its config
        return False
    return True


def _ways(name: str) -> Iterator[tuple[Callable[[], PreTrainedModel], Callable[[], nn.Module]]]:
    """How small models are built, in float32 and on mps: by sizes of ours, or shrunk from the config's."""
    yield partial(tiny_models.tiny_model, name), partial(model_on_mps, name)
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:  # which may have its code in another folder
        yield partial(tiny_models.other_model, name), partial(other_on_mps, name)
    shrunk = functools.cache(partial(_shrunk, name))
    yield (
        lambda: copy.deepcopy(shrunk()),
        lambda: tiny_models.as_loaded(copy.deepcopy(shrunk()), torch.bfloat16).to("mps"),
    )


def _shrunk(name: str) -> PreTrainedModel:
    """A model with layers of all kinds that its config has when nothing is said."""
    cls = tiny_models.model_class(name)
    with torch.device("meta"):
        model = cls(cls.config_class())
    with apart():
        torch.default_generator.manual_seed(0)
        return small_model(model, results_of)


# --- cells


def unique(texts: list[str]) -> str:
    return ", ".join(dict.fromkeys(texts)) or "-"


def of_kind(report: Report, kind: str) -> list:
    return [row for row in report.rows if row.kind == kind]


def experts(report: Report) -> str:
    rows = of_kind(report, "experts")
    return unique([row.replaced_by or f"no: {row.reason}" for row in rows] or ["no: no module is named so"])


def router(report: Report) -> str:
    rows = of_kind(report, "router")
    return unique([(row.replaced_by or "own").partition(",")[0] for row in rows]) if rows else "own"


def dispatches(on_mps: Callable[[], nn.Module]) -> str:
    """`launches` of a model that may ask for values."""
    for computes in (False, True):
        try:
            return launches(on_mps(), computes)
        except RuntimeError as error:
            reason = first_line(error)
    return f"its own code raises with a cache: {reason}"


def launches(model: nn.Module, computes: bool = False) -> str:
    """Kernels of a token by the types of layers: the model's own code / captured, in 4 bits.

    Args:
        model: on mps.
        computes: for own code that asks for values.
    """
    of_own = partial(launches_by_type, computes=computes)
    with own_interfaces():
        own = counts_by_type(model, of_own)
    accelerated = _captured(copy.deepcopy(model))
    try:
        ours = counts_by_type(accelerated, captured_by_type if computes else token_by_type)
    except (NotCaptured, RuntimeError):  # what runs in it may ask, too
        if not computes:
            raise
        ours = counts_by_type(accelerated, of_own)
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


def uncaptured(on_mps: Callable[[], nn.Module]) -> str | None:
    """Why no token of a model in 4 bits is captured; None if one is."""
    for device in (simulator.dropped, nullcontext):  # some code asks for values
        model = _captured(on_mps())
        try:
            with device():
                return reason_against_capture(model)
        except (RuntimeError, TypeError) as error:
            fault = f"none runs, {type(error).__name__}: {first_line(error)}"
    return fault


def _captured(model: nn.Module) -> nn.Module:
    """The model, accelerated in 4 bits so that its tokens are captured."""
    with mock.patch.dict(os.environ, {CAPTURE: "1"}):
        torch_moe_mps.accelerate(model, bits=4, group_size=32, check=False)  # which a dropped call would fail
    return model
