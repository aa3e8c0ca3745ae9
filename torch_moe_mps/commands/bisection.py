"""`check --bisect MODEL`: the part without which an accelerated model agrees with its eager code."""

import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._environment import CAPTURE, REFUSE, having, refused
from .._text import first_line
from ..models.programs import cache_among, cache_argument, empty_cache
from ..ops import OPERATORS
from ..selfcheck.compare import TOLERANCE, difference
from ..selfcheck.facts import anonymous, facts
from ..transformers import accelerate, restore
from ..transformers.loading import from_pretrained
from ..transformers.self_check import operators_of_weights, passes
from .results import written_whole
from .sources import folder_of, tokenizer_of

_PROMPT = "The capital of France is Paris. The capital of Italy is"
_TOKENS = 8  # after the prompt; a step is captured from the fourth on


class Trial(NamedTuple):
    """The accelerated model with some variables of the environment, and how far its logits are from eager."""

    variables: dict[str, str]
    difference: float
    error: str | None = None

    def __str__(self) -> str:
        how = " ".join(f"{name}={value}" for name, value in self.variables.items()) or "everything on"
        return f"{how}: {f'{self.difference:.1e}' if self.error is None else f'raises {self.error}'}"


class Bisection:
    """Trials of one model, each of which is printed."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.bound = 2 * TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
        self.trials: list[Trial] = []
        self.operators: set[str] = set()  # in place of modules, with everything on
        restore(model)
        self.tokens, self.expected = greedy(model, ids)

    def run(self) -> str | None:
        """Makes trials until one mends the difference. Returns: what it leaves out; None if none does."""
        if not self.agrees({CAPTURE: "0"}):
            return self._first_operator()
        (every, _), *single = passes().items()
        if not self.agrees(_without(every)):
            return "capture"
        for name, operator in single:
            if self.agrees(_without(name)):
                puts_in = "" if operator is None else f", which puts in {operator}"
                return f"the pass {name}{puts_in}"
        return "fusion, but no single pass of it"

    def agrees(self, variables: dict[str, str]) -> bool:
        """Makes a trial, and prints it. Returns: True if the difference is rounding."""
        with having(variables):
            trial = Trial(variables, *self._difference(is_first=not self.trials))
        self.trials.append(trial)
        agrees = trial.difference <= self.bound
        print(f"{trial}{', which mends it' if agrees and len(self.trials) > 1 else ''}", flush=True)
        return agrees

    def _first_operator(self) -> str | None:
        no_eager_code = operators_of_weights(self.model)
        for operator in sorted(self.operators - no_eager_code):
            # The form of an operator that modules call has its name after an underscore.
            public = operator.removeprefix("_")
            name = public if public in OPERATORS else operator
            if self.agrees(_without(name)):
                return f"the operator {name}"
        return None

    def _difference(self, is_first: bool) -> tuple[float, str | None]:
        restore(self.model)
        try:
            with _quiet():
                report = accelerate(self.model)
            if is_first:
                self.operators = {done.operator for done in report.done()}
            _, logits = greedy(self.model, self.ids, self.tokens)
        except torch.AcceleratorError:  # the GPU has failed, and nothing after it counts
            raise
        except RuntimeError as error:
            return float("inf"), first_line(error)
        return difference(logits, self.expected), None


def _without(name: str) -> dict[str, str]:
    return {REFUSE: ",".join([*refused(), name])}


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without the warnings of experts that run unmodified, as they are meant to here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def greedy(model: Any, ids: Tensor, tokens: Iterable[Tensor] | None = None) -> tuple[list[Tensor], Tensor]:
    """The likeliest tokens after a prompt [1, T], and the logits [T + _TOKENS, V] of the prompt and of these.

    Args:
        tokens: those that follow the prompt, instead of the likeliest.
    """
    cache = empty_cache(model)
    found = model(ids, **({} if cache is None else cache_argument(model, cache)), use_cache=True)
    cache = cache_among(found, cache)
    logits, given = [found.logits[0].cpu()], []
    following = None if tokens is None else iter(tokens)
    for _ in range(_TOKENS):
        token = logits[-1][-1:].argmax(-1)[None] if following is None else next(following)
        given.append(token)
        found = model(token.to(ids.device), **cache_argument(model, cache), use_cache=True)
        logits.append(found.logits[0].cpu())
    return given, torch.cat(logits).float()


def bisect(name: str, path: str | None) -> int:
    """Prints the trials and their verdict. Returns: the exit code: 1 where model and eager code differ."""
    folder = folder_of(name)
    ids = tokenizer_of(folder)(_PROMPT, return_tensors="pt").input_ids.to("mps")
    with _quiet():
        model = from_pretrained(folder, device_map="mps")
    trials = Bisection(model, ids)
    print(
        f"Compared on mps: the logits of a prompt of {ids.shape[1]} tokens and of the {_TOKENS} likeliest "
        f"tokens after it, with those of the model's eager code. A difference of up to {trials.bound:.0e} of "
        "the largest logit is rounding."
    )
    if weights := operators_of_weights(model):
        print(
            f"{', '.join(sorted(weights))}: run quantised weights in the eager code, too, and are not judged "
            "here; `torch-moe-mps check` compares them."
        )
    agrees = trials.agrees({})
    mended = None if agrees else trials.run()
    if agrees:
        verdict = "The accelerated model agrees with its eager code."
    elif mended is None:
        verdict = "The model differs from its eager code, and no single part mends it."
    else:
        verdict = f"The model differs from its eager code. Without this it agrees: {mended}."
    print(verdict)
    if path is not None:
        entries = [trial._asdict() | {"difference": str(trial.difference)} for trial in trials.trials]
        page = {"machine": facts(), "bound": trials.bound, "trials": entries, "verdict": verdict}
        with written_whole(path):
            Path(path).write_text(anonymous(json.dumps(page, indent=1)))
    return 0 if agrees else 1
