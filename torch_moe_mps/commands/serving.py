"""transformers' own server with a model that was loaded, and quantised, by this package."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .sources import bits_of, folder_of, loading_options, usable_device


@contextmanager
def server(options: argparse.Namespace, **settings: Any) -> Iterator[Any]:
    """transformers' `Serve`, which answers every request with the model.

    Args:
        settings: for `Serve`. It returns when the server ends, or at once if they have non_blocking=True.

    Raises: ValueError, OSError, ImportError with one line that says what is wrong.
    """
    device = usable_device(options.device)
    folder = folder_of(options.model, options.revision)
    from transformers.cli.serve import Serve
    from transformers.cli.serving.model_manager import ModelManager

    from ..transformers.checkpoints.files import check_files
    from ..transformers.checkpoints.loading import from_pretrained

    def load(manager: object, *names: object, **progress: object) -> Any:
        return from_pretrained(folder, device_map=device, **bits_of(options), **loading_options(options))

    check_files(folder)
    name = options.model if options.revision is None else f"{options.model}@{options.revision}"
    own, ModelManager._load_model = ModelManager._load_model, load
    try:
        yield Serve(force_model=name, trust_remote_code=options.trust_remote_code, device=device, **settings)
    finally:
        ModelManager._load_model = own
