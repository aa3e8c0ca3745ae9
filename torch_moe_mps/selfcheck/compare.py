"""One call on the GPU, twice, and on the CPU."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._faults import raise_fault
from ..ops._checks import first_line
from ..ops._samples import OF_HEADS, packet
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
        raise_fault()
    except torch.AcceleratorError:  # of the GPU, not of the operator
        raise
    except RuntimeError as error:
        kind = "does not compile" if " does not compile: " in str(error) else "raises"
        return Finding(name, kind, message=str(error))
    except ValueError:
        if name not in OF_HEADS:
            raise
        return None  # the operator takes no heads of this width, from a model neither
    expected = _results(call, "cpu", end)
    largest = max(map(difference, actual, expected), default=0.0)
    if not largest <= TOLERANCE[call.dtype]:
        return Finding(name, "differs", error=largest)
    if not all(map(_same_bits, actual, again)):
        kind = "gives another result the second time"
        return Finding(name, kind, error=max(map(difference, actual, again)))
    return None


def _results(call: Call, device: str, end: float) -> list[Tensor]:
    """What an operator returns, and what it writes in place."""
    if time.monotonic() > end:
        raise OutOfTime
    own = {
        key: _placed(value, device) if isinstance(value, Tensor) else value
        for key, value in call.arguments.items()
    }
    operator: Any = packet(call.operator)
    result = operator(**own)
    returned = [*result] if isinstance(result, tuple) else [] if result is None else [result]
    schema = operator.default._schema
    written = [own[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return returned + written


def _placed(tensor: Tensor, device: str) -> Tensor:
    """A copy with the same strides, at the same place of its memory."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.as_strided((count,), (1,), 0).to(device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where only one is NaN or infinite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if not actual.dtype.is_floating_point:
        return 0.0 if torch.equal(actual, expected) else math.inf
    return errors(actual, expected).max().item() if actual.numel() else 0.0


def errors(actual: Tensor, expected: Tensor) -> Tensor:
    """The difference of each element, relative to the largest value; of integers 0 or infinite."""
    if not actual.dtype.is_floating_point:
        return torch.where(actual == expected, 0.0, math.inf)
    largest = expected.double()[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    apart = (actual.double() - expected.double()).abs() / max(largest, 1e-30)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(same, 0.0, apart.nan_to_num(math.inf, math.inf))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)))


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} strides {list(value.stride())}"
    return repr(value)
