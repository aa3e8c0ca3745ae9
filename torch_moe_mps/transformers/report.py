"""What `accelerate` did, module by module."""

import re
from dataclasses import dataclass, field

from ..quantization import QuantizationReport


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
        return "\n".join(table)
