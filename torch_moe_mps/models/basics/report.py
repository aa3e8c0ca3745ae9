"""Reports of what quantising and accelerating did, module by module."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..._text import aligned, fitted, in_unit, with_text
from ...quantization import Format


class QuantizedProjection(NamedTuple):
    """One quantised parameter; `error` is mean |dense - quantised| / mean |dense|."""

    projection: str
    error: float
    dense_bytes: int
    quantized_bytes: int
    format: Format


@dataclass
class QuantizationReport:
    """The result of quantising; prints as a table.

    Attributes:
        modules: {name of a quantised module: its parameters}.
        shared: {name of a module: name of the module whose quantised weight it shares}.
        skipped: {name of a matrix, or of its module, that was not quantised: reason}.
        bytes_before, bytes_after: bytes of weights that decoding one token reads.
        importance: by what errors were weighed; None for MLX's rule.
        activations: the dtype of activations beside the weights, and why; None where the caller said it.
        sizes: {name in `skipped`: bytes of dense weights}.
        notes: lines about weights that have another format than was asked for, with the reason.
    """

    modules: dict[str, list[QuantizedProjection]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    importance: str | None = None
    activations: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def dense_bytes(self) -> int:
        return sum(entry.dense_bytes for entries in self.modules.values() for entry in entries)

    @property
    def quantized_bytes(self) -> int:
        return sum(entry.quantized_bytes for entries in self.modules.values() for entry in entries)

    def rows(self) -> list[list[Any]]:
        """Rows for `add_rows`, as JSON has them."""
        return [
            [name, *entry[:4], str(entry.format)]
            for name, entries in self.modules.items()
            for entry in entries
        ]

    def add_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        for name, projection, error, before, after, format in rows:
            entry = QuantizedProjection(projection, error, before, after, Format.named(format))
            self.modules.setdefault(name, []).append(entry)

    def __str__(self) -> str:
        """Equal layers share a line, with the mean and the largest of their errors; the last line sums up."""
        lines = [f"{name}: shares the weight of {other}" for name, other in self.shared.items()]
        lines += [*self._skipped(), *self.notes]
        if self.modules:
            weighed = [] if self.importance is None else [f"errors weighed by the {self.importance}"]
            weighed += [] if self.activations is None else [self.activations]
            return "\n".join([*self._table(), *fitted([*lines, *weighed, self.summary()])])
        return "\n".join(fitted(lines)) or "Nothing in this model can be quantised."

    def _skipped(self) -> list[str]:
        groups: dict[tuple[str, str], list[str]] = {}
        for name, why in self.skipped.items():
            groups.setdefault((any_layer(name), why), []).append(name)
        lines = []
        for (name, why), names in groups.items():
            size = sum(self.sizes.get(each, 0) for each in names)
            lines.append(
                f"{name} ({len(names)}): not quantised, {why}" + (f", {in_unit(size)(size)}" if size else "")
            )
        return lines

    def summary(self) -> str:
        """One line: the size of the quantised weights, and the bytes that a token reads."""
        count = sum(map(len, self.modules.values()))
        show = in_unit(self.dense_bytes)
        return (
            f"{count} matrices quantised: {show(self.dense_bytes)} before, "
            f"{show(self.quantized_bytes)} after; "
            f"weights read for a token: {show(self.bytes_before)} before, {show(self.bytes_after)} after"
        )

    def _table(self) -> list[str]:
        """Lines of a table with a row for each kind of weights: format, errors and bytes."""
        groups: dict[tuple[str, str], list[QuantizedProjection]] = {}
        for name, entries in self.modules.items():
            for entry in entries:
                parameter = any_layer(f"{name}.{entry.projection}".removesuffix(".weight"))
                groups.setdefault((parameter, str(entry.format)), []).append(entry)
        show = in_unit(self.dense_bytes)
        rows = [("weights", "format", "n", "mean error", "largest", "before", "after")]
        for key, entries in groups.items():
            errors = [entry.error for entry in entries]
            before, after = sum(e.dense_bytes for e in entries), sum(e.quantized_bytes for e in entries)
            mean, largest = f"{sum(errors) / len(errors):.1%}", f"{max(errors):.1%}"
            rows.append((*key, str(len(entries)), mean, largest, show(before), show(after)))
        return aligned(rows, 2)


def any_layer(name: str) -> str:
    """Numbers in the name of a module replaced by *."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


class Done(NamedTuple):
    """Replacement of some of a module's code.

    Attributes:
        operator: of this package, whose kernels the model needs for it.
        text: what the report says, if not the operator's name.
        only_on_mps: True if a call on a CPU runs eager code.
    """

    operator: str
    text: str = ""
    only_on_mps: bool = False

    def __str__(self) -> str:
        return self.text or self.operator


@dataclass(frozen=True)
class Row:
    """One module: what replaced it (or parts of it), and why it, or the rest, was left alone."""

    name: str
    cls: str
    kind: str
    done: tuple[Done, ...]
    reason: str | None = None

    @property
    def replaced_by(self) -> str | None:
        return "; ".join(map(str, self.done)) or None


@dataclass
class Report:
    """The modules that matter, in the model's order. Prints as a table with equal layers on one line."""

    rows: list[Row] = field(default_factory=list)
    quantization: QuantizationReport | None = None
    compiled: str | None = None
    checked: str | None = None
    small_model: str | None = None  # the result for a small model, behind a transformers that is not known
    tensor_units: str | None = None
    tuned: Callable[[], str | None] | None = None  # asked when it is printed
    # {name of a module on a CPU: its operators that run on mps alone; eager code is faster on a CPU}
    eager_on_cpu: dict[str, tuple[Done, ...]] = field(default_factory=dict)
    beside: set[str] = field(default_factory=set)  # operators that no module runs
    capture: Callable[[], str | None] | None = None  # asked for a line on tokens when it is printed

    def add(
        self, name: str, module: object, kind: str, done: Iterable[Done], reason: str | None = None
    ) -> None:
        self.rows.append(Row(name, type(module).__name__, kind, tuple(done), reason))

    def operators(self) -> set[str]:
        """Names of the operators that run in place of modules, and beside them."""
        return {done.operator for done in self.done()} | self.beside

    def done(self) -> Iterator[Done]:
        """Operators in place of modules, as often as there are modules."""
        return (done for row in self.rows for done in row.done)

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.done]

    @property
    def left_alone(self) -> list[Row]:
        return [row for row in self.rows if not row.done]

    @property
    def experts_left_alone(self) -> list[str]:
        """Lines on the classes of experts that run unmodified."""
        experts = {(row.cls, row.reason) for row in self.left_alone if row.kind == "experts"}
        return [f"{cls} is left alone: {reason}" for cls, reason in sorted(experts)]

    @property
    def eager(self) -> list[Row]:
        """Replaced modules whose eager code runs, since they are on a CPU."""
        return [row for row in self.replaced if len(self.eager_on_cpu.get(row.name, ())) == len(row.done)]

    def __str__(self) -> str:
        """The table of modules, and lines about quantisation, checks, compilation and captured steps."""
        if not self.rows and self.quantization is None and self.small_model is None:
            return "Nothing in this model is replaced; it is left as it is."
        table = [*with_text(self._table()), ""] if self.rows else []
        if self.quantization is not None:
            table += [str(self.quantization), ""]
        lines_about = [self.small_model, self.compiled, self.checked, self.tensor_units]
        lines_about += [asked() for asked in (self.tuned, self.capture) if asked is not None]
        about = [line for line in lines_about if line is not None]
        table += [*fitted(about), ""] if about else []
        eager, alone = len(self.eager), len(self.left_alone)
        on_cpu = f"{eager} run eager code, which is faster on a CPU, " if eager else ""
        if self.rows:
            replaced = len(self.replaced) - eager
            table += fitted([f"{replaced} modules run on torch_moe_mps, {on_cpu}{alone} run unmodified."])
        return "\n".join(table).rstrip()

    def _runs(self, row: Row) -> str:
        """Operators that a replaced module runs on its device, and those for mps alone."""
        eager = self.eager_on_cpu.get(row.name, ())
        running = "; ".join(str(done) for done in row.done if done not in eager)
        return f"{running or 'eager code'} (on mps: {'; '.join(map(str, eager))})" if eager else running

    def _table(self) -> list[tuple[str, ...]]:
        """The cells of the modules; equal layers share a line."""
        groups: dict[tuple, list[str]] = {}
        for row in self.rows:
            result = self._runs(row) if row.done else f"left alone: {row.reason}"
            result += f"; the rest is left alone: {row.reason}" if row.done and row.reason else ""
            key = (any_layer(row.name) or "(model)", row.cls, result)
            groups.setdefault(key, []).append(row.name)
        lines: list[tuple[str, ...]] = [("module", "class", "n", "now runs")]
        lines += [(name, cls, str(len(names)), result) for (name, cls, result), names in groups.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, tuple("-" * width for width in (*widths[:3], 8)))
        return lines
