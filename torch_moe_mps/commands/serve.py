"""`serve MODEL`: `transformers serve` with a model that this package loads."""

import argparse

from ..pipeline.torchrun import is_first_process, processes
from .serving import follow, server


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, ImportError with one line that says what is wrong."""
    if not 0 <= options.port < 1 << 16:
        raise ValueError(f"--port must be from 0 to 65535, got {options.port}")
    if options.continuous_batching and processes() > 1:
        raise ValueError("--continuous-batching is for one process, got a pipeline of several")
    if options.continuous_batching and options.kv_bits != 16:
        raise ValueError(
            "--kv-bits must be 16 with --continuous-batching, whose cache of pages is transformers' own, "
            f"got {options.kv_bits}"
        )
    if options.continuous_batching and (options.prompt_cache or options.draft or options.prompt_lookup):
        raise ValueError(
            "--prompt-cache, --draft and --prompt-lookup are for requests one by one; --continuous-batching "
            "has ways of its own"
        )
    if not is_first_process():
        return follow(options)
    settings = {"continuous_batching": options.continuous_batching, "enable_cors": options.enable_cors}
    with server(options, host=options.host, port=options.port, log_level=options.log_level, **settings):
        pass
