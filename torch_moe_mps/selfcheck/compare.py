"""One call on the GPU, twice, and on the CPU."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._extension import setting
from .._faults import fault_of, raise_fault
from .._text import first_line
from ..ops._samples import JUDGED, OF_HEADS, packet
from . import differences
from .calls import Call, planned_for
from .differences import errors

# Relative to the largest value of a result: how much rounding in another order may change.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}

# {operator: the largest error of its calls that agree}, in this process
LARGEST: dict[str, float] = {}


class OutOfTime(Exception):
    """There was no time to finish a comparison."""


@dataclass
class Finding:
    """Fault of an operator, a kernel, or a Metal library.

    Attributes:
        subject: the operator, the kernel or the library.
        kind: "does not compile", "raises", "stops the GPU", "differs", "gives another result the second
            time", or "was not compared".
        error: the largest difference, relative to the largest value; None where there is no result.
        message: of the compiler or of the error, whole.
        arguments: {name: dtype and shape, or value} of the call.
        details: of a wrong result, what `diagnose` finds.
    """

    subject: str
    kind: str
    dtype: str = ""
    format: str = ""
    error: float | None = None
    message: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """The subject, with the dtype and the format that it failed for."""
        where = ", ".join(filter(None, (self.dtype, self.format)))
        return f"{self.subject} ({where})" if where else self.subject

    def __str__(self) -> str:
        kind = self.kind if self.error is None else f"{self.kind} (largest error {self.error:.1e})"
        line = first_line(self.message)
        return f"{self.what} {kind}{f': {line}' if line else ''}"

    def lines(self) -> list[str]:
        """Lines that describe a wrong result to people."""
        found = self.details
        if "results" not in found:
            return []
        lines = [differences.in_words(name, result) for name, result in found["results"].items()]
        lines.append(f"planned for {found['cores']} cores: {', '.join(found['plan'])}")
        if "one_core" in found:
            wrong = found["one_core"]["wrong"]
            lines.append(f"planned for one core: {f'{wrong:,} are wrong, too' if wrong else 'all is right'}")
        return lines


def compare(call: Call, end: float = math.inf) -> Finding | None:
    """The fault of a call, or None. Raises: OutOfTime after `end`, by the clock time.monotonic."""
    finding = _compare(call, end)
    if finding is not None:
        finding.format = call.format
        finding.dtype = str(call.dtype).removeprefix("torch.")
        finding.arguments = {key: _text(value) for key, value in call.arguments.items()}
    return finding


def in_words(call: Call) -> str:
    """dtypes and shapes, for the journal."""
    tensors = ((k, v) for k, v in call.arguments.items() if isinstance(v, Tensor))
    return ", ".join(f"{key} {_dtype(value)}{list(value.shape)}" for key, value in tensors)


def _compare(call: Call, end: float) -> Finding | None:
    """The finding about a call on the GPU, made twice, against the CPU; None where all agree."""
    name = call.operator
    try:
        # Both results of the GPU are kept, so that the second one gets other memory than the first.
        first = _results(call, "mps", end)
        actual = [tensor.cpu() for tensor in first.values()]
        again = [tensor.cpu() for tensor in _results(call, "mps", end).values()]
        raise_fault()
    except RuntimeError as error:
        if (fault := fault_of(error)) is not None:  # the GPU has failed, not the operator
            raise fault from None
        kind = "does not compile" if " does not compile: " in str(error) else "raises"
        return Finding(name, kind, message=str(error))
    except ValueError:
        if name not in OF_HEADS:
            raise
        return None  # the operator takes no heads of this width, from a model neither
    expected = [*_results(call, "cpu", end).values()]
    judged = JUDGED.get(name, lambda _, results: results)
    largest = max(
        map(difference, *(judged(call.arguments, results) for results in (actual, expected))), default=0.0
    )
    if not largest <= TOLERANCE[call.dtype]:
        return Finding(name, "differs", error=largest, details=diagnose(call, actual, expected))
    if not all(map(_same_bits, actual, again)):
        kind = "gives another result the second time"
        largest = max(map(difference, actual, again))
        return Finding(name, kind, error=largest, details=diagnose(call, again, actual, tolerance=0.0))
    LARGEST[name] = max(largest, LARGEST.get(name, 0.0))
    return None


def diagnose(
    call: Call, actual: list[Tensor], expected: list[Tensor], tolerance: float | None = None
) -> dict[str, Any]:
    """Describe how the results of a call are wrong, and whether the plan for one core is wrong, too.

    Returns: `cores`, for which the call was planned; `plan`, its dispatches; `results`, by name what
    differences.described() finds; `one_core`, its plan and how many elements are wrong with it.
    """
    bound = TOLERANCE[call.dtype] if tolerance is None else tolerance
    cores = torch.ops.moe_mps._gpu_cores()
    result: dict[str, Any] = {"cores": cores}
    try:
        names, result["plan"] = _recorded(call)
        before = [None if key.startswith("result") else call.arguments[key] for key in names]
        kept = differences.untouched(lambda: _on_cpu(call), before, actual)
        result["results"] = {
            name: differences.described(a, e, bound, u)
            for name, a, e, u in zip(names, actual, expected, kept, strict=True)
            if difference(a, e) > bound
        }
        if cores > 1:
            with planned_for(1):
                _, plan = _recorded(call)
                wrong = [errors(a, e) > bound for a, e in zip(_on_cpu(call), expected, strict=True)]
            result["one_core"] = {"wrong": sum(int(item.sum()) for item in wrong), "plan": plan}
        raise_fault()
    except (RuntimeError, ValueError) as error:  # a GPU that has just been wrong may raise
        result["not_diagnosed"] = first_line(error)
    return result


def _recorded(call: Call) -> tuple[list[str], list[str]]:
    """The names of a call's results, and its dispatches."""
    with setting("_record_dispatches", True, False):
        names = [*_results(call, "mps", math.inf)]
        return names, torch.ops.moe_mps._recorded_dispatches()


def _on_cpu(call: Call) -> list[Tensor]:
    return [tensor.cpu() for tensor in _results(call, "mps", math.inf).values()]


def _results(call: Call, device: str, end: float) -> dict[str, Tensor]:
    """Results of an operator, and tensors that it writes in place, by the argument's name."""
    if time.monotonic() > end:
        raise OutOfTime
    placed = {
        key: _placed(value, device) if isinstance(value, Tensor) else value
        for key, value in call.arguments.items()
    }
    operator: Any = packet(call.operator)
    result = operator(**placed)
    returned = [*result] if isinstance(result, tuple) else [] if result is None else [result]
    arguments = operator.default._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    named = {f"result {number}": tensor for number, tensor in enumerate(returned)}
    return named | {name: placed[name] for name in written if placed.get(name) is not None}


def _placed(tensor: Tensor, device: str) -> Tensor:
    """A copy with the same strides, at the same place of its memory."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.as_strided((count,), (1,), 0).to(device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where only one is NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if not actual.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else math.inf
    return errors(actual, expected).max().item() if actual.numel() else 0.0


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)))


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{_dtype(value)}{list(value.shape)} strides {list(value.stride())}"
    return repr(value)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
