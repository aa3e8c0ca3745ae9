"""transformers' own server with a model that this package has loaded and quantised."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from .sources import folder_of, load, name_of, processes, usable_device


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

    stage = load(options, folder, device) if processes() > 1 else None  # all load at the same time
    own = ModelManager._load_model
    ModelManager._load_model = lambda *names, **progress: stage or load(options, folder, device)
    try:
        with nullcontext() if stage is None else stage.pipeline.leading():
            yield Serve(
                force_model=name_of(options),
                trust_remote_code=options.trust_remote_code,
                device=device,
                **settings,
            )
    finally:
        ModelManager._load_model = own


def follow(options: argparse.Namespace) -> None:
    """What every process of torchrun but the first does: it generates what the first is asked for."""
    device = usable_device(options.device)
    load(options, folder_of(options.model, options.revision), device).pipeline.follow()
