"""Texts that tests pin: a file each in the folder pinned/ beside the test, so that a change shows in review.

    EXPECTTEST_ACCEPT=1 scripts/test tests/host/test_traces.py

writes what came instead.
"""

import os
from pathlib import Path


def assert_pinned(test: str, name: str, text: str) -> None:
    """`test` is the file of the test."""
    file = Path(test).parent / "pinned" / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.write_text(text)
    assert text == file.read_text()
