"""Files that commands write their results to. Importing this costs nothing."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import __version__


def check_writable(option: str, file: str | None) -> None:
    """Refuse a file that cannot be written, before the work for it begins.

    Raises: ValueError for a file that cannot be written.
    """
    if file is None:
        return
    existed = os.path.lexists(file)
    try:
        with open(file, "a"):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} must be a file that can be written, got {file}: {error.strerror}"
        ) from None
    if not existed:
        os.unlink(file)


@contextmanager
def written_whole(file: str) -> Iterator[None]:
    """Around what writes a file: if that fails, as on a full disk, no part of it is left.

    Raises: OSError that names the file.
    """
    try:
        yield
    except OSError as error:
        if os.path.isfile(file):
            os.unlink(file)
        raise OSError(f"{file} cannot be written: {error.strerror or error}") from None


def write_json(file: str | None, found: dict[str, Any]) -> None:
    """Writes what a command has found, with the versions that found it, and says so."""
    if file is None:
        return
    import torch

    versions = {"torch_moe_mps": __version__, "torch": torch.__version__}
    with written_whole(file):
        Path(file).write_text(json.dumps({**found, "versions": versions}, indent=1) + "\n")
    print(f"wrote {file}")
