"""Refuses a transformers that is too old or lacks what is needed, before anything else is done with it."""

import warnings
from importlib import metadata

from .. import _versions


def require_version() -> None:
    """Refuses a transformers that is too old; a warning says so behind one that was not tested.

    Raises: ImportError for the former.
    """
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return
    if (fault := _versions.too_old(version)) is not None:
        raise ImportError(f"torch_moe_mps: {fault}")
    if (fault := _versions.untested(version)) is not None:
        compared = "accelerate() compares a small model of each architecture with its own code"
        warnings.warn(f"torch_moe_mps {fault}: {compared}", stacklevel=2)


def lacking(error: ImportError) -> ImportError:
    """The one-line error for an import that failed, if it was of something in transformers."""
    if not str(error.name).startswith("transformers."):
        return error
    tested, version = " and ".join(_versions.TRANSFORMERS), metadata.version("transformers")
    fault = f"transformers must have what {tested} has, got {version}, which does not ({error.msg})"
    return ImportError(f"torch_moe_mps: {fault}", name=error.name)


require_version()
