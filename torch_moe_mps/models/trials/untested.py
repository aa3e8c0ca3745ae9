"""Compares an architecture with its eager code, once, behind a transformers that this release does not know.

A release is tested with some versions of transformers (`_versions.TRANSFORMERS`). Behind another one, a small
model of the same class (`small_models`) says a few tokens by its eager code and by ours, on the CPU. Classes
that differ run unmodified: such a model is slower, and not wrong.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..._environment import CHECK
from ..._text import first_line
from ..._versions import untested
from ...selfcheck.journal import noted
from ..basics.interface import experts_of, is_quantized
from ..basics.report import Report
from ..basics.state import class_before
from ..basics.unmodified import UNMODIFIED, all_operators
from .comparing import TOLERANCE
from .memory import note_error, recall_of_model
from .small_models import VOCABULARY, CannotBeShrunk, fill, small_model

TOKENS = 7  # behind the prompt: of its calls the third is captured, and others follow
_PROMPT = 9
_SEEDS = (0, 1)  # two draws of weights: where a router is undecided, rounding decides

Replace = Callable[[nn.Module, Report, bool], None]
Restore = Callable[[nn.Module], object]


class Verdict(NamedTuple):
    """Result of comparing models under an untested transformers.

    Attributes:
        own: names of classes whose modules run unmodified.
        captures: True if tokens may be captured.
        reason: why everything runs unmodified, if it does.
        fault: the difference that was found, if there was one.
        report_line: the report's line.
    """

    own: tuple[str, ...] = ()
    captures: bool = True
    reason: str | None = None
    fault: str | None = None
    report_line: str | None = None


def is_tested() -> bool:
    """True if this release was tested with the transformers that is there."""
    return untested(transformers.__version__) is None


def verdict_of_small_model(
    function: str, model: nn.Module, check: bool, quantizes: bool, replace: Replace, restore: Restore
) -> Verdict:
    """Verdict on which modules may run our code; a warning says which run unmodified.

    Args:
        check: False lets all run our code.
        quantizes: True if experts are to be quantised.
        replace: puts our code into a model, and captures its tokens if its last argument is True.
        restore: undoes it.

    Raises: RuntimeError for quantised experts that would have to run unmodified, which there is none of.
    """
    found = [*_outermost(model)]
    for module in model.modules():
        UNMODIFIED.pop(class_before(module), None)
    if is_tested() or not check or not found:
        return Verdict()
    version, results = transformers.__version__, [(one, _judged(one, replace, restore)) for one in found]
    for one, verdict in results:
        if (line := _warning(one, verdict)) is not None:
            _require_experts(function, one, verdict, quantizes)
            warnings.warn(line, stacklevel=4)
        class_names = {_name(one)} if verdict.reason is not None else {*verdict.own}
        for cls in {*map(class_before, one.modules())}:
            if cls.__name__ in class_names:
                UNMODIFIED[cls] = f"it differs from its eager code with transformers {version}"
    names = ", ".join(dict.fromkeys(map(_name, found)))
    return _of_all([verdict for _, verdict in results], names, f"transformers {version} is not tested: ")


def _of_all(verdicts: list[Verdict], names: str, begins: str) -> Verdict:
    """Verdict on a model by those on its parts. `begins` starts the report's line."""
    reason = next((verdict.reason for verdict in verdicts if verdict.reason is not None), None)
    report_line = f"a small {names} agrees with its eager code"
    if reason is not None:
        report_line = f"{names} runs unmodified, {reason}"
    elif any(verdict.fault is not None for verdict in verdicts):
        report_line = f"a part of {names} differs from its eager code, and runs unmodified"
    return Verdict(
        (), all(verdict.captures for verdict in verdicts), reason, report_line=begins + report_line
    )


def _require_experts(function: str, model: PreTrainedModel, verdict: Verdict, quantizes: bool) -> None:
    class_names = {class_before(module).__name__ for module in experts_of(model).values()}
    if verdict.reason is None:
        class_names &= {*verdict.own}
    if class_names and (quantizes or any(map(is_quantized, experts_of(model).values()))):
        got = verdict.fault or verdict.reason
        raise RuntimeError(
            f"moe_mps::{function}: quantised experts cannot be used with transformers "
            f"{transformers.__version__}, which torch_moe_mps was not tested with: {got}. check=False uses "
            "them all the same"
        )


def _judged(model: PreTrainedModel, replace: Replace, restore: Restore) -> Verdict:
    def compare() -> Verdict:
        with noted(f"comparing a small {_name(model)} with its eager code"):
            return _compared(model, replace, restore)

    return recall_of_model(model, compare, _compared)


def _outermost(model: nn.Module) -> Iterator[PreTrainedModel]:
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and isinstance(module, PreTrainedModel):
            inside.update(module.modules())
            yield module


def _name(model: nn.Module) -> str:
    return class_before(model).__name__


# --- the comparison


def _compared(model: PreTrainedModel, replace: Replace, restore: Restore) -> Verdict:
    """The verdict on a model: if a class alone is at fault, it is named."""
    with all_operators():
        try:
            torch.default_generator.manual_seed(0)
            small = small_model(model, results_of)
        except CannotBeShrunk as error:
            return Verdict(reason=f"a small model cannot be compared ({error})")
        compare = functools.partial(_difference, small, replace, restore)
        fault, _ = compare(captures=True)
        if fault is None:
            return Verdict()
        of_modules, classes = compare(captures=False)
        if of_modules is None:
            return Verdict(captures=False, fault=fault)
        cls = _at_fault(classes, lambda left_out: compare(False, left_out, seeds=_SEEDS[:1])[0] is None)
        if cls is None:
            return Verdict(reason="a small model gives other results than its eager code", fault=of_modules)
        return Verdict((cls.__name__,), compare(True, [cls])[0] is None, fault=of_modules)


def _at_fault(classes: Sequence[type], agrees: Callable[[Sequence[type]], bool]) -> type | None:
    """The class without which a model agrees with its eager code, found by halves; None for no single one."""
    rest = classes
    while len(rest) > 1:
        first, second = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        rest = first if agrees(first) else second
    return rest[0] if rest and agrees(rest) else None


@contextlib.contextmanager
def _unmodified(classes: Sequence[type]) -> Iterator[None]:
    UNMODIFIED.update(dict.fromkeys(classes, "it is left out to see whether it is at fault"))
    try:
        yield
    finally:
        for cls in classes:
            del UNMODIFIED[cls]


def _difference(
    small: PreTrainedModel,
    replace: Replace,
    restore: Restore,
    captures: bool,
    left_out: Sequence[type] = (),
    seeds: Sequence[int] = _SEEDS,
) -> tuple[str | None, list[type]]:
    """The difference that is found with each of the weights, None for none; and classes that run our code."""
    fault, classes = None, list[type]()
    for seed in seeds:
        torch.default_generator.manual_seed(seed)
        fill(small)
        expected = results_of(small)
        report = Report()
        try:
            with _unmodified(left_out):
                replace(small, report, captures)
                classes = _classes(small, report)
                fault = _differs(results_of(small), expected)
        except Exception as error:
            note_error(error)
            fault = f"it raises {type(error).__name__}: {first_line(error)}"
        finally:
            restore(small)
        if fault is None:
            break
    return fault, classes


def _classes(model: nn.Module, report: Report) -> list[type]:
    return [*dict.fromkeys(class_before(model.get_submodule(row.name)) for row in report.replaced)]


def results_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """{what a model gives: its logits}: the tokens behind a prompt, one by one, and the last of padded rows.

    Of a model that says no tokens the first output of a prompt counts, and where rows cannot be padded, none.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY // 2, (2, _PROMPT), generator=generator)
    result = {}
    if model.can_generate():
        how = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        told = {"return_dict_in_generate": True, "output_logits": True}
        logits = model.generate(ids[:1], **how, **told).logits
        result = {f"token {number}": of_token for number, of_token in enumerate(logits)}
    else:
        result["a prompt"] = model(input_ids=ids[:1])[0]
    mask = torch.ones_like(ids)
    mask[1, : _PROMPT // 3] = 0
    try:
        result["a padded prompt"] = model(input_ids=ids, attention_mask=mask)[0][:, -1]
    except Exception as error:  # a model without masks may say anything of them
        note_error(error)
    return result


def _differs(result: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    for name, theirs in expected.items():
        ours = result.get(name)
        if ours is None or ours.shape != theirs.shape:
            return f"{name} has no logits of the shape {[*theirs.shape]}"
        error = (torch.sub(ours, theirs).abs().max() / theirs.abs().max()).item()
        if not error <= TOLERANCE:
            return f"{name} differs by {error:.1g} of the largest logit"
    return None


def _warning(model: PreTrainedModel, verdict: Verdict) -> str | None:
    """Line that tells a user what runs unmodified, and why."""
    where = f"torch_moe_mps: with transformers {transformers.__version__}, which it was not tested with,"
    leave_out = f"{CHECK}=0 compares nothing, and uses it all the same"
    fault = "" if verdict.fault is None else f" ({verdict.fault})"
    if verdict.reason is not None:
        return f"{where} {_name(model)} runs unmodified: {verdict.reason}{fault}. {leave_out}"
    if verdict.own:
        names = ", ".join(verdict.own)
        return f"{where} {names} differs from its eager code{fault}, and runs unmodified. {leave_out}"
    if not verdict.captures:
        return f"{where} captured tokens differ{fault}: they run module by module. {leave_out}"
    return None
