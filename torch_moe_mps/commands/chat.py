"""`chat MODEL`: `transformers chat` with a server of its own, which ends with it."""

import argparse
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .serving import follow, server
from .sources import is_first_process, name_of


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, ImportError with one line that says what is wrong."""
    if not is_first_process():
        return follow(options)
    port = _free_port()
    with _quiet(), server(options, port=port, non_blocking=True, log_level="error") as serve:
        try:
            while not serve.server.started:
                if not serve._thread.is_alive():
                    raise RuntimeError("the server of the chat did not start")
                time.sleep(0.05)
            from huggingface_hub import constants
            from transformers.cli.chat import Chat

            constants.HF_HUB_OFFLINE = False  # else the client does not talk to this machine either
            Chat(
                model_id=name_of(options),
                base_url=f"http://localhost:{port}",
                generate_flags=options.set,
                system_prompt=options.system_prompt,
                save_folder=options.save_folder,
            )
        finally:
            serve.kill_server()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the server logs of each request out of the chat."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
