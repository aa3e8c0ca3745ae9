"""Names on the Hub, which are asked for once: the libraries try again for half a minute."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def named_on_the_hub(name: str, what: str = "a model") -> Iterator[None]:
    """Checks the syntax of a Hub name. Raises: ValueError."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        yield
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(f"{name} is neither a folder nor the name of {what} on the Hub") from None


def folder_in_the_cache(
    name: str, files: Sequence[str], without: Sequence[str] = (), what: str = "a model", **where: Any
) -> str:
    """Folder of a Hub repository in the local cache; files that match patterns are downloaded if needed.

    Args:
        without: patterns of excluded files.
        what: noun for errors, such as "model".
        where: revision and other arguments of snapshot_download.

    Raises: ValueError for an invalid name, and for one not in the cache where the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with named_on_the_hub(name, what):
            return snapshot_download(name, allow_patterns=[*files], ignore_patterns=[*without], **where)
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{name} is no folder here; as a name, it is not in the Hub's cache, and the Hub cannot be "
            "reached"
        ) from None
