"""Decision which matmuls run on the tensor units of the M5 and later GPUs.

By default for accelerated models, each dtype and weight format once its results on this machine agree with
the CPU. `MOE_MPS_TENSOR_UNITS=0` switches them off; `=1` uses them everywhere, unchecked, even on GPUs
that compute such products without units, and slower.
"""

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from .._environment import TENSOR_UNITS
from .._extension import use_of_tensor_units
from ..ops._formats import Format
from ..ops._sample import FORMAT, E
from ..ops._samples import sample_arguments
from .calls import DTYPES, FORMATS, Call, planned_for
from .compare import Finding
from .machine import COMMAND, where
from .once import CallsToCheck, first_failures
from .units import why_no_units

# Tokens, and steps of inputs as groups: tiles of 32 pairs, and of 64, with a last step that is not full.
SIZES = (64, 3), (256, 3)


@dataclass
class Use:
    """Decision about some Metal libraries.

    Attributes:
        libraries: the used ones.
        reason: why none is used, unless a fault is the reason.
        faults: {library: its fault}.
        late: libraries that ran out of time.
    """

    libraries: list[str] = field(default_factory=list)
    reason: str = ""
    faults: dict[str, Finding] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        if not self.libraries and self.reason:
            return f"off: {self.reason}"
        parts = []
        if self.libraries:
            parts.append(f"on for {in_words(self.libraries)}" + (f" ({self.reason})" if self.reason else ""))
        parts += [f"off for {in_words([name])}: {fault}" for name, fault in self.faults.items()]
        if self.late:
            parts.append(f"no time to check {in_words(sorted(self.late))}, which is done the next time")
        return "; ".join(parts)


_decided = Use(reason="no model was accelerated on mps")


def decided() -> str:
    """Words for the decision of the last call of accelerate()."""
    return str(_decided)


def _parts(library: str) -> tuple[str, torch.dtype]:
    """ "affine4_64" and the dtype of the activations."""
    weights, _, ending = library.removeprefix("tensor_units_").rpartition("_")
    return weights, next(dtype for dtype, name in DTYPES.items() if name == ending)


def in_words(libraries: Iterable[str]) -> str:
    """ "affine4_64 in float16, dense in bfloat16"."""
    parts = map(_parts, libraries)
    return ", ".join(f"{weights} in {str(dtype).removeprefix('torch.')}" for weights, dtype in parts)


def libraries(dtypes: Collection[torch.dtype], formats: Collection[Format]) -> list[str]:
    """The names of the libraries for activations of these dtypes, and weights dense or in these formats."""
    wanted = {*map(str, formats), "dense"}
    names = torch.ops.moe_mps._libraries(tensor_units=True)
    return [
        name for name in names for weights, dtype in (_parts(name),) if weights in wanted and dtype in dtypes
    ]


def why_not() -> str:
    """Why no matmul runs on tensor units here; empty if they may."""
    use = use_of_tensor_units()
    if use == "auto":
        return why_no_units()
    return f"{TENSOR_UNITS}=0" if use == "0" else ""


def is_forced() -> bool:
    """True if the environment switches all of them on, unchecked."""
    return use_of_tensor_units() == "1"


def without_units(fault: Finding) -> str:
    """Line that tells a user why a library is not used."""
    return (
        f"torch_moe_mps: on this machine ({where()}) {fault}; matmuls of this kind do without tensor units, "
        f"slower. `{COMMAND}` writes a report for an issue; {TENSOR_UNITS}=0 tries no more"
    )


def decide(names: Collection[str], check: bool) -> Use:
    """Allows the libraries that have passed on this machine, now or before; without `check` none."""
    global _decided
    _decided = _decide(names, check)
    return _decided


def _decide(names: Collection[str], check: bool) -> Use:
    """The libraries of tensor units that a model may use, and why not the others."""
    if reason := why_not():
        return Use(reason=reason)
    if not names:
        return Use(reason="there are no weights that they take, with activations of 16 bits")
    if is_forced():
        return Use([*names], f"{TENSOR_UNITS}=1, not checked")
    if not check:
        return Use(reason=f"not checked; {TENSOR_UNITS}=1 uses them all the same")
    faults, late = first_failures(map(check_of, names))
    used = [name for name in names if name not in faults and name not in late]
    for name in used:
        torch.ops.moe_mps._allow_tensor_units(name, True)
    return Use(used, "", faults, late)


def check_of(library: str) -> CallsToCheck:
    return CallsToCheck(library, library, functools.partial(calls, library), library)


def calls(library: str) -> Iterator[Call]:
    """Calls whose matmuls a library computes, which is allowed while the iterator is open. Plans are then
    made for a full GPU.

    The inputs take several steps. The last token has no experts and is NaN, which must not reach the others.
    """
    weights, dtype = _parts(library)
    format = next((format for format in FORMATS if str(format) == weights), None)
    operators = (
        ("_moe_experts", "expert_mm") if format is None else ("_moe_experts_quantized", "linear_quantized")
    )
    torch.ops.moe_mps._allow_tensor_units(library, True)
    try:
        with planned_for(1):
            for operator in operators:
                for tokens, wider in SIZES:
                    sizes = {"format": format or FORMAT, "tokens": tokens, "wider": wider}
                    arguments = sample_arguments(operator, "cpu", dtype, **sizes)
                    if "topk_ids" in arguments:
                        arguments["topk_ids"][-1], arguments["x"][-1] = E, torch.nan
                    yield Call(operator, dtype, arguments, f"{weights} on tensor units")
    finally:
        torch.ops.moe_mps._allow_tensor_units(library, False)
