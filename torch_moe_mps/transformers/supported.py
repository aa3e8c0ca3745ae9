"""Version check of transformers, before anything else of it is used."""

import warnings
from importlib import metadata
from importlib.util import find_spec

from .. import _versions
from .._install import install_extra


def require_version() -> None:
    """Warns about an untested version of transformers.

    Raises: ImportError for a version that is too old, and where there is none.
    """
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(
            f"torch_moe_mps: models need transformers: `{install_extra('transformers')}`"
        )
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:  # a checkout
        return
    if (fault := _versions.too_old(version)) is not None:
        raise ImportError(f"torch_moe_mps: {fault}")
    if (fault := _versions.untested(version)) is not None:
        compared = "accelerate() compares a small model of each architecture with its eager code"
        warnings.warn(f"torch_moe_mps {fault}: {compared}", stacklevel=2)


def lacking(error: ImportError) -> ImportError:
    """The one-line error for an import that failed, if it was of something in transformers."""
    if not str(error.name).startswith("transformers."):
        return error
    tested, version = " and ".join(_versions.TRANSFORMERS), metadata.version("transformers")
    fault = f"transformers must have what {tested} has, got {version}, which does not ({error.msg})"
    return ImportError(f"torch_moe_mps: {fault}", name=error.name)


require_version()
