"""Writes the table of docs/speed.md: what owners of Macs have measured, a file of measured/ each.

Such a file lies beside the report that `torch-moe-mps report MODEL` writes.
"""

import json
import re
from pathlib import Path
from typing import Any

import paths

from torch_moe_mps.commands.measured import check_form

FOLDER = paths.REPOSITORY / "measured"
DOCUMENT = paths.REPOSITORY / "docs" / "speed.md"
MARK = "<!-- scripts/make/make_measured_table.py writes what follows, up to the next heading -->\n"
HEAD = (
    *("chip", "GPU cores", "memory, GB", "macOS", "torch", "model", "prompt, tokens/s", "tokens/s"),
    *("at 4,096", "GPU idle, us a token", "check"),
)


def read(folder: Path) -> list[dict[str, Any]]:
    """The files in the order of their names. Raises: ValueError for one of another form."""
    contents = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        check_form(content, file.name)
        contents.append(content)
    return contents


def row(content: dict[str, Any]) -> list[str]:
    def rate(pattern: str) -> str:
        found = [value for test, value in content["tokens_s"].items() if re.fullmatch(pattern, test)]
        return f"{found[0]:,.1f}" if found else "-"

    def cell(key: str) -> str:
        return "-" if content[key] in (None, "") else str(content[key])

    failures = content["failures"]
    verdict = "-" if failures is None else "passes" if failures == 0 else f"{failures} failures"
    start = map(cell, ("chip", "gpu_cores", "memory_gb", "macos", "torch", "model"))
    rates = map(rate, (r"pp\d+", r"tg\d+", r"tg\d+ @ d4096"))
    return [*start, *rates, cell("gpu_idle_us"), verdict]


def table(folder: Path) -> str:
    if not (contents := read(folder)):
        return "None yet.\n"
    lines = [HEAD, ("---",) * len(HEAD), *map(row, contents)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    before, _, behind = DOCUMENT.read_text().partition(MARK)
    _, heading, rest = behind.partition("\n## ")
    DOCUMENT.write_text(before + MARK + table(FOLDER) + heading + rest)


if __name__ == "__main__":
    main()
