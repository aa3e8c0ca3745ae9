"""One call on the GPU, twice, and on the CPU."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops._checks import first_line
from ..ops._samples import packet
from .calls import Call

# Relative to the largest value of a result: how much rounding in another order may change.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


class OutOfTime(Exception):
    """There was no time to finish a comparison."""


@dataclass
class Finding:
    """What is wrong with an operator, a kernel, or a Metal library.

    Attributes:
        subject: the operator, the kernel or the library.
        kind: "does not compile", "raises", "differs", "gives another result the second time", or "was not
            compared".
        error: the largest difference, relative to the largest value; None where there is no result.
        message: of the compiler or of the error, whole.
        arguments: {name: dtype and shape, or value} of the call.
    """

    subject: str
    kind: str
    dtype: str = ""
    format: str = ""
    error: float | None = None
    message: str = ""
    arguments: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.dtype, self.format)))
        what = self.kind if self.error is None else f"{self.kind} (largest error {self.error:.1e})"
        line = first_line(self.message)
        return f"{self.subject}{f' ({where})' if where else ''} {what}{f': {line}' if line else ''}"


def compare(call: Call, end: float = math.inf) -> Finding | None:
    """Returns: what is wrong with a call. Raises: OutOfTime after `end`, by the clock time.monotonic."""
    finding = _compare(call, end)
    if finding is not None:
        finding.format = call.format
        finding.dtype = str(call.dtype).removeprefix("torch.")
        finding.arguments = {key: _text(value) for key, value in call.arguments.items()}
    return finding


def _compare(call: Call, end: float) -> Finding | None:
    name = call.operator
    try:
        # Both results of the GPU are kept, so that the second one gets other memory than the first.
        first = _results(call, "mps", end)
        actual = [tensor.cpu() for tensor in first]
        again = [tensor.cpu() for tensor in _results(call, "mps", end)]
    except RuntimeError as error:
        kind = "does not compile" if " does not compile: " in str(error) else "raises"
        return Finding(name, kind, message=str(error))
    except ValueError:  # the operator takes no heads of this width, from a model neither
        return None
    expected = _results(call, "cpu", end)
    largest = max(map(difference, actual, expected), default=0.0)
    if not largest <= TOLERANCE[call.dtype]:
        return Finding(name, "differs", error=largest)
    if not all(map(torch.equal, actual, again)):
        kind = "gives another result the second time"
        return Finding(name, kind, error=max(map(difference, actual, again)))
    return None


def _results(call: Call, device: str, end: float) -> list[Tensor]:
    """What an operator returns, and what it writes in place."""
    if time.monotonic() > end:
        raise OutOfTime
    own = {
        key: value.to(device, copy=True) if isinstance(value, Tensor) else value
        for key, value in call.arguments.items()
    }
    operator: Any = packet(call.operator)
    result = operator(**own)
    returned = [*result] if isinstance(result, tuple) else [] if result is None else [result]
    schema = operator.default._schema
    written = [own[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return returned + written


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where one of them is NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if actual.numel() == 0:
        return 0.0
    if not actual.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else math.inf
    difference = (actual.double() - expected.double()).abs().max().item()
    largest = expected.double().abs().max().item()
    return math.inf if math.isnan(difference) else difference / max(largest, 1e-30) if difference else 0.0


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} strides {list(value.stride())}"
    return repr(value)
