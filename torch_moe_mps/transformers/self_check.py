"""Excludes operators that fail the self-check on this machine.

Modules that need a failing operator keep their original forward. Quantised weights have no fallback and are
rejected.
"""

import difflib
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from .._environment import CHECK, REFUSE, is_on, refused
from .._limits import KV_FORMATS
from ..models.basics.interface import formats_of, is_experts, is_quantized
from ..models.basics.scoped import having
from ..models.basics.state import KVBits
from ..models.basics.unmodified import FAILED, REQUESTED, is_on_mps
from ..models.graphs.passes import FUSION, INTRODUCED, PASSES
from ..models.modules.linears import QuantizedEmbedding, QuantizedLinear, formats_in
from ..ops import OPERATORS
from ..ops._formats import Format
from ..ops._samples import LINEAR_ATTENTION, OF_HEADS
from ..ops.families.attention import CACHE_BITS
from ..selfcheck import once, tuner
from ..selfcheck.calls import CACHE, DTYPES, subjects
from ..selfcheck.compare import Finding
from ..selfcheck.libraries import libraries
from ..selfcheck.machine import COMMAND, is_available, where
from ..selfcheck.tensor_units import decide, is_forced, why_not, without_units
from .compiling import SOFTMAX_HEADS, cache_libraries, compile_libraries, head_widths, tensor_libraries_of
from .steps import Run

_ALLOWED = ContextVar("moe_mps_check_allowed", default=True)
_OF_KIND = {
    "experts": "_moe_experts_quantized",
    "linears": "linear_quantized",
    "embeddings": "embedding_quantized",
}


# {kv_bits: the operators that write and read keys and values in them}
_OF_KV_BITS: dict[KVBits, tuple[str, ...]] = {
    **dict.fromkeys(KV_FORMATS, ("_seal_tiles_", "_tiled_attention")),
    CACHE_BITS: (CACHE, "cached_attention"),
}


class Needs(NamedTuple):
    """Forms in which a model calls operators.

    Attributes:
        dtypes: of activations, from the floating-point weights on mps.
        heads: {operator: widths of heads of queries and keys, and of values}, as far as modules name them.
            What they do not name is compared before its first call.
    """

    dtypes: list[torch.dtype]
    heads: dict[str, set[tuple[int, int]]]

    @classmethod
    def of(cls, model: nn.Module) -> "Needs":
        used = {parameter.dtype for parameter in model.parameters() if parameter.device.type == "mps"}
        softmax = {heads for names in SOFTMAX_HEADS for heads in head_widths(model, *names)}
        linear = head_widths(model, "head_k_dim", "head_v_dim")
        heads = {operator: linear if operator in LINEAR_ATTENTION else softmax for operator in OF_HEADS}
        return cls([dtype for dtype in DTYPES if dtype in used], heads)


def allowed(check: bool) -> AbstractContextManager[bool]:
    """Context in which models that are accelerated may be checked, or not."""
    return having(_ALLOWED, check and _ALLOWED.get())


def reset() -> None:
    """Forgets what was found to fail, and compares nothing."""
    FAILED.clear()
    once.forget()
    once.watch(False)


def read_requested(run: Run) -> None:
    """Reads which operators and passes MOE_MPS_REFUSE names.

    Raises: ValueError for a name that is none, and for an operator of quantised weights of the model.
    """
    found: dict[str, str] = {}
    names_of_passes = passes().keys()
    for name in refused():
        # `moe_experts` also stands for the form of it that modules call.
        named = {name, f"_{name}"} & {*OPERATORS} or {name} & names_of_passes
        if not named:
            close = difflib.get_close_matches(name, [*OPERATORS, *names_of_passes], 1, 0)[0]
            raise ValueError(
                f"moe_mps::accelerate: {REFUSE} must be names of operators or of passes with commas between, "
                f"or {FUSION}, got {name!r}; the nearest is {close}"
            )
        found |= dict.fromkeys(named, name)
    weights = operators_of_weights(run.model, run.formats()) if found else set()
    for operator in found:
        if operator in weights:
            raise ValueError(
                f"moe_mps::accelerate: {REFUSE} must be operators in place of a model's own code, got "
                f"{found[operator]!r}, which runs the quantised weights of this model"
            )
    REQUESTED.clear()
    REQUESTED.update(found)


def passes() -> dict[str, str | None]:
    """{name of a pass for MOE_MPS_REFUSE: the operator that it puts in, or None}.

    The first name stands for all passes. Passes that put operators in come next.
    """
    every = {passed.__name__: INTRODUCED.get(passed) for passed in dict.fromkeys([*INTRODUCED, *PASSES])}
    return {FUSION: None, **every}


def operators_of_weights(
    model: nn.Module, formats: Mapping[str, Collection[Format]] = MappingProxyType({})
) -> set[str]:
    """The operators that run quantised weights of a model, present or requested: there is no eager code."""
    found = {operator for operator, its_formats in _of_weights(model, formats).items() if its_formats}
    return found | {"expert_qmm"} if _OF_KIND["experts"] in found else found


def compare_weights(run: Run) -> None:
    """Compares the operators of quantised weights with the CPU, before the model is changed.

    The run gets the seconds that are left for `compare_replacements`, None where nothing is compared; and
    more kv_bits where fewer fail.

    Raises: RuntimeError if an operator of quantised weights, present or requested, fails here.
    """
    while run.kv_bits in _OF_KV_BITS:
        requested = next(filter(None, map(REQUESTED.get, _OF_KV_BITS[run.kv_bits])), None)
        if requested is None:
            break
        run.kv_bits, instead = _more_bits(run.kv_bits)
        warnings.warn(f"torch_moe_mps: {REFUSE} names {requested}; {instead}", stacklevel=3)
    if not run.check or not _is_wanted(run.model):
        reset()
        return
    once.watch(False)  # until it is known what fails
    run.seconds = _require_quantized(_of_weights(run.model, run.formats()), Needs.of(run.model))
    run.kv_bits = working_kv_bits(run.model, run.kv_bits)


def is_wanted() -> bool:
    """True if the self-check is enabled."""
    return _ALLOWED.get() and is_on(CHECK)


def _is_wanted(model: nn.Module) -> bool:
    """True if the self-check is enabled, and the model's operators can run on a GPU."""
    return is_wanted() and is_available() and is_on_mps(model)


def _require_quantized(used: Mapping[str, Collection[Format]], needs: Needs) -> float:
    """Seconds left for `compare_replacements`, after comparing the operators of quantised weights.

    Args:
        used: {operator: formats of weights}.

    Raises: the one-line error of an operator that fails here.
    """
    names = libraries(needs.dtypes, set().union(*used.values()))
    compile_libraries([name for name in names if name.startswith("quantized_")], strict=False)
    end = time.monotonic() + once.time_allowed()
    for operator, its_formats in used.items():
        result, _ = _failing(needs, [operator], its_formats, end - time.monotonic())
        for finding in result.values():
            _refuse_weights(finding)
    return end - time.monotonic()


def _of_weights(model: nn.Module, formats: Mapping[str, Collection[Format]]) -> dict[str, set[Format]]:
    """{operator of quantised weights: formats, present or requested}."""
    used: dict[str, set[Format]] = {operator: set() for operator in _OF_KIND.values()}
    for module in model.modules():
        if is_experts(module) and is_quantized(module):
            used["_moe_experts_quantized"].update(formats_of(module).values())
        elif isinstance(module, QuantizedLinear):
            used["linear_quantized"].add(module.format)
        elif isinstance(module, QuantizedEmbedding):
            used["embedding_quantized"].add(module.format)
    for kind, wanted in formats.items():
        used[_OF_KIND[kind]].update(wanted)
    used["linear_quantized"].update(formats.get("embeddings", ()))  # the output head
    return used


def compare_replacements(run: Run) -> bool:
    """Compares the operators that replace modules. Returns: True if some failed and must not be used.

    Raises: RuntimeError if a failing operator runs quantised weights.
    """
    if run.seconds is None:
        return False
    report, named = run.report, run.report.operators()
    if report.capture is not None and report.capture() is not None:
        named.update(INTRODUCED.values())  # no module calls them
    formats = {format for module in run.model.modules() for format in formats_in(module).values()}
    started = time.perf_counter()
    result, late = _failing(Needs.of(run.model), named, formats, run.seconds)
    took = time.perf_counter() - started
    once.watch(True, run.seconds - took)
    tuner.start()
    report.tuned = lambda: tuner.told(tuner.known())
    FAILED.clear()
    FAILED.update(result)
    agree = len(named - result.keys() - late)
    report.checked = f"{agree} of {len(named)} operators agree with the CPU on this GPU ({took:.1f} s)"
    if late:
        report.checked += f"; no time for {', '.join(sorted(late))}: they are checked the next time"
    for operator, finding in result.items():
        if operator in ("expert_qmm", *_OF_KIND.values()):
            _refuse_weights(finding)
        warnings.warn(_warning(finding), stacklevel=4)
    return bool(result)


def working_kv_bits(model: nn.Module, bits: KVBits | None) -> KVBits | None:
    """`bits` of keys and values, or more if writing or reading so many fails on this machine."""
    if bits not in _OF_KV_BITS or not _is_wanted(model):
        return bits
    needs = Needs.of(model)
    names = [name for dtype in needs.dtypes for name in cache_libraries(model, DTYPES[dtype], bits)]
    compile_libraries(names, strict=False)
    result, _ = _failing(needs, _OF_KV_BITS[bits], options=[("k_scales",)] if bits == CACHE_BITS else [()])
    if not result:
        return bits
    more, instead = _more_bits(bits)
    for finding in result.values():
        warnings.warn(_warning(finding, instead), stacklevel=4)
    return working_kv_bits(model, more)


def _more_bits(bits: KVBits) -> tuple[KVBits, str]:
    """(kv_bits where these fail, what that means)"""
    if bits == CACHE_BITS:
        return 16, "keys and values stay in 16 bits"
    return CACHE_BITS, f"keys and values are held in {CACHE_BITS} bits"


def use_tensor_units(run: Run) -> None:
    """Decides which matmuls of a model on a Mac's GPU run on tensor units, and reports it."""
    if not is_available() or not is_on_mps(run.model):
        return
    names, check = [] if why_not() else tensor_libraries_of(run.model), run.seconds is not None
    if check or is_forced():
        compile_libraries(names, strict=is_forced())
    use = decide(names, check)
    for fault in use.faults.values():
        warnings.warn(without_units(fault), stacklevel=3)
    run.report.tensor_units = f"tensor units: {use}"


def _failing(
    needs: Needs,
    operators: Collection[str],
    formats: Iterable[Format] = (),
    seconds: float | None = None,
    options: Collection[tuple[str, ...]] = ((),),
) -> tuple[dict[str, Finding], set[str]]:
    """Faults of operators in the dtypes and head widths of a model: see once.first_failures."""
    wanted = subjects(operators, needs.dtypes, sorted(formats, key=str), needs.heads, options)
    return once.first_failures(once.checks_of(wanted), seconds)


def _warning(finding: Finding, instead: str = "what it replaces runs unmodified") -> str:
    """Line that tells a user why an operator is not used."""
    return (
        f"torch_moe_mps: on this machine ({where()}) {finding}; {instead}. "
        f"`{COMMAND}` writes a report for an issue"
    )


def _refuse_weights(finding: Finding) -> None:
    raise RuntimeError(
        f"moe_mps::accelerate: quantised weights cannot be used on this machine ({where()}): "
        f"{finding}. `{COMMAND}` writes a report for an issue; check=False uses them all the same"
    )
