#!/usr/bin/env python
"""Writes docs/quality.svg: KL divergence against megabytes, of each table in docs/quality.md."""

import math
import re
from pathlib import Path
from typing import NamedTuple

from torch_moe_mps import _svg as svg

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH, HEIGHT = 620, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 54, 50
# How a recipe's name shows whose it is: the start or the end of the name, the legend, a colour.
SERIES = (
    (r": importance$", "ours, importance", "#2f81f7"),
    (r": MLX's rule$", "ours, MLX's rule", "#a371f7"),
    (r"^mlx-lm ", "mlx-lm gptq, awq, dwq", "#e3742f"),
    (r"^llama\.cpp ", "llama.cpp, importance", "#2da44e"),
)


class Point(NamedTuple):
    """A row of a table: megabytes, and the KL divergence in nats a token."""

    name: str
    megabytes: float
    divergence: float


def tables(document: str) -> list[tuple[str, list[Point]]]:
    """(heading, points) of each table with columns MB and KL, without dense models: they lose nothing."""
    heading, columns, result = "", [], []
    for line in document.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif not line.startswith("|"):
            columns = []
        elif {"MB", "KL"} <= {*cells}:
            columns = cells
            result.append((heading, []))
        elif columns and not set(line) <= set("|-: "):
            number = {name: cells[columns.index(name)] for name in ("MB", "KL")}
            point = Point(cells[0], float(number["MB"].replace(",", "")), float(number["KL"]))
            if point.divergence > 0:
                result[-1][1].append(point)
    return result


def series_of(name: str) -> int | None:
    """The index in SERIES of a recipe; None where the picture does not show it."""
    return next((i for i, (pattern, *_) in enumerate(SERIES) if re.search(pattern, name)), None)


def panel(heading: str, points: list[Point]) -> list[str]:
    """A chart with megabytes to the right, and the divergence, by powers of ten, upwards."""
    shown = [(point, index) for point in points if (index := series_of(point.name)) is not None]
    step = 10 ** math.floor(math.log10(max(point.megabytes for point, _ in shown) / 3))
    first = math.floor(min(point.megabytes for point, _ in shown) / step) * step
    last = math.ceil(max(point.megabytes for point, _ in shown) / step) * step
    low = math.floor(min(math.log10(point.divergence) for point, _ in shown))
    high = math.ceil(max(math.log10(point.divergence) for point, _ in shown))

    def x(megabytes: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (megabytes - first) / (last - first)

    def y(divergence: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(divergence) - low) / (high - low)

    parts = [svg.text(LEFT, 18, heading, size=14)]
    for power in range(low, high + 1):
        parts.append(svg.line(LEFT, y(10**power), WIDTH - RIGHT, y(10**power), opacity=0.4))
        parts.append(svg.text(LEFT - 8, y(10**power) + 4, f"{10**power:g}", "end"))
    for i in range(round((last - first) / step) + 1):
        parts.append(svg.text(x(first + i * step), HEIGHT - BOTTOM + 18, f"{first + i * step:g}", "middle"))
    parts.append(svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "MB of weights", "middle"))
    parts.append(svg.text(LEFT, TOP - 8, "KL divergence from the dense model, nats a token"))
    legend = {index for _, index in shown}
    for row, index in enumerate(sorted(legend)):
        _, words, colour = SERIES[index]
        parts.append(svg.dot(WIDTH - 190, TOP + 12 + 18 * row, 5, colour, words))
        parts.append(svg.text(WIDTH - 178, TOP + 16 + 18 * row, words))
    for point, index in shown:
        title = f"{point.name}: {point.megabytes:g} MB, {point.divergence:g}"
        parts.append(svg.dot(x(point.megabytes), y(point.divergence), 5, SERIES[index][2], title))
    return parts


def drawing(document: str) -> str:
    """The picture of a page: a chart for each table, one below the other."""
    panels = [panel(*table) for table in tables(document)]
    parts = []
    for row, shapes in enumerate(panels):
        parts += [f'<g transform="translate(0 {row * HEIGHT})">', *shapes, "</g>"]
    return svg.picture(WIDTH, HEIGHT * len(panels), "KL divergence against megabytes of weights", parts)


if __name__ == "__main__":
    (DOCS / "quality.svg").write_text(drawing((DOCS / "quality.md").read_text()))
