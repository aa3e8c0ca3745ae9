"""`serve MODEL`: `transformers serve` with a model that this package loads."""

import argparse

from .serving import server


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, ImportError with one line that says what is wrong."""
    settings = {"continuous_batching": options.continuous_batching, "enable_cors": options.enable_cors}
    with server(options, host=options.host, port=options.port, log_level=options.log_level, **settings):
        pass
