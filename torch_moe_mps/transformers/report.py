"""What quantising and accelerating did, module by module."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ..quantization import Format


class QuantizedProjection(NamedTuple):
    """What became of one parameter; `error` is mean |dense - quantised| / mean |dense|."""

    projection: str
    error: float
    dense_bytes: int
    quantized_bytes: int
    format: Format


@dataclass
class QuantizationReport:
    """What quantising did; prints as a table.

    Attributes:
        modules: {name: what became of its parameters} of the quantised modules.
        shared: {name: name} of modules that have the quantised weight of another.
        skipped: {name: reason} of modules that were left as they are.
        bytes_before, bytes_after: bytes of weights that decoding one token reads.
    """

    modules: dict[str, list[QuantizedProjection]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    @property
    def dense_bytes(self) -> int:
        return sum(entry.dense_bytes for entries in self.modules.values() for entry in entries)

    @property
    def quantized_bytes(self) -> int:
        return sum(entry.quantized_bytes for entries in self.modules.values() for entry in entries)

    def __str__(self) -> str:
        """Equal layers are on one line, with the mean and the largest of their errors."""
        lines = [f"{name}: shares the weight of {other}" for name, other in self.shared.items()]
        reasons = Counter((_any_layer(name), why) for name, why in self.skipped.items())
        lines += [f"{name} ({n}): left as it is, {why}" for (name, why), n in reasons.items()]
        if self.modules:
            before, after = (f"{count / 1e6:.1f} MB" for count in (self.bytes_before, self.bytes_after))
            lines.append(f"weights read for a token: {before} before, {after} after")
            return "\n".join(self._table() + lines)
        return "\n".join(lines) or (
            "No experts with transformers' experts interface found; nothing is quantised."
        )

    def _table(self) -> list[str]:
        groups: dict[tuple[str, str], list[QuantizedProjection]] = {}
        for name, entries in self.modules.items():
            for entry in entries:
                parameter = _any_layer(f"{name}.{entry.projection}".removesuffix(".weight"))
                groups.setdefault((parameter, str(entry.format)), []).append(entry)
        rows = [("parameter", "format", "n", "mean error", "largest", "before", "after")]
        rows += [(*key, str(len(entries)), *_summary(entries)) for key, entries in groups.items()]
        everything = [entry for entries in groups.values() for entry in entries]
        rows.append(("all", "", str(len(everything)), *_summary(everything)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = [[str.ljust] * 2 + [str.rjust] * 5] * len(rows)
        return [
            "  ".join(f(c, w) for f, c, w in zip(align, row, widths, strict=True))
            for align, row in zip(aligned, rows, strict=True)
        ]


def _any_layer(name: str) -> str:
    """Numbers in the name of a module replaced by *."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _summary(entries: list[QuantizedProjection]) -> tuple[str, str, str, str]:
    errors = [entry.error for entry in entries]
    before, after = sum(e.dense_bytes for e in entries), sum(e.quantized_bytes for e in entries)
    return f"{sum(errors) / len(errors):.4f}", f"{max(errors):.4f}", _mib(before), _mib(after)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Row:
    """One module: what replaced it (or parts of it), or why it was left alone."""

    name: str
    cls: str
    kind: str
    replaced_by: str | None
    reason: str | None = None


@dataclass
class Report:
    """The modules that matter, in the model's order. Prints as a table with equal layers on one line."""

    rows: list[Row] = field(default_factory=list)
    quantization: QuantizationReport | None = None
    compiled: str | None = None

    def add(
        self, name: str, module: object, kind: str, replaced_by: str | None, reason: str | None = None
    ) -> None:
        self.rows.append(Row(name, type(module).__name__, kind, replaced_by, reason))

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.replaced_by]

    @property
    def left_alone(self) -> list[Row]:
        return [row for row in self.rows if not row.replaced_by]

    def __str__(self) -> str:
        if not self.rows:
            return "No experts with transformers' experts interface found; the model is left as it is."
        groups: dict[tuple, list[str]] = {}
        for row in self.rows:
            result = row.replaced_by or f"left alone: {row.reason}"
            key = (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.name) or "(model)", row.cls, result)
            groups.setdefault(key, []).append(row.name)
        lines = [("module", "class", "n", "now runs")]
        lines += [(name, cls, str(len(names)), result) for (name, cls, result), names in groups.items()]
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        table = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]) for line in lines
        ]
        table.insert(1, "  ".join("-" * w for w in (*widths, 8)))
        if self.quantization is not None:
            table += ["", str(self.quantization)]
        if self.compiled is not None:
            table += ["", self.compiled]
        return "\n".join(table)
