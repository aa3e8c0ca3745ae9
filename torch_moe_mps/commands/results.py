"""Files that commands write their results to. Importing this costs nothing."""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .. import __version__


def check_writable(option: str, file: str | None) -> None:
    """Checks that a file can be written, before the work for it begins.

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
def locked(folder: Path, name: object) -> Iterator[None]:
    """Context that holds the lock of a folder, which is created if missing and removed if it stays empty.

    Raises: ValueError if another process holds the lock; OSError.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{name} is being written by another process") from None
            yield
        finally:
            os.close(lock)
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()


def check_new_folder(option: str, folder: str) -> None:
    """Raises: ValueError for a name that is none of a new folder, or where none can be written."""
    if Path(folder).name in ("", ".."):
        raise ValueError(f"{option} must name a new folder, got {folder!r}")
    try:
        with locked(unfinished(Path(folder)), folder):
            tempfile.TemporaryFile(dir=unfinished(Path(folder))).close()
    except OSError as error:
        expected = "must be a folder that can be written"
        raise ValueError(f"{option} {expected}, got {folder}: {error.strerror}") from None


def unfinished(destination: Path) -> Path:
    """Temporary folder, which is renamed when its content is complete."""
    return destination.parent / f".{destination.name}.unfinished"


@contextmanager
def written_whole(file: str) -> Iterator[None]:
    """Block that writes a file; if it fails, as on a full disk, no part of the file is left.

    Raises: OSError that names the file.
    """
    try:
        yield
    except OSError as error:
        if os.path.isfile(file):
            os.unlink(file)
        raise OSError(f"{file} cannot be written: {error.strerror or error}") from None


def write_json(file: str | None, found: dict[str, Any]) -> None:
    """Writes a command's results as JSON, with versions, and prints the file's name."""
    if file is None:
        return
    import torch

    versions = {"torch_moe_mps": __version__, "torch": torch.__version__}
    with written_whole(file):
        Path(file).write_text(json.dumps({**found, "versions": versions}, indent=1) + "\n")
    print(f"wrote {file}")
