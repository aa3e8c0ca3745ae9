"""Texts that tests pin: a file for each kind of text in tests/pinned/, so that a change shows in review.

`scripts/test --pin` writes what the tests marked `pinned` give now, `scripts/test --pin TEST` one test.
"""

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "pinned"
HEADING = re.compile(r"^== (.+) ==\n", re.MULTILINE)


def pinned(kind: str) -> dict[str, str]:
    """{section: its text}"""
    _, *parts = HEADING.split((FOLDER / f"{kind}.txt").read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))


def assert_pinned(kind: str, section: str, text: str) -> None:
    if os.environ.get("MOE_MPS_PIN"):
        sections = sorted((pinned(kind) | {section: text}).items())
        lines = "".join(f"== {name} ==\n{own}" for name, own in sections)
        (FOLDER / f"{kind}.txt").write_text(lines)
    assert text == pinned(kind).get(section)
