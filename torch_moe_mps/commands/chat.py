"""`chat MODEL`: `transformers chat` with a server of its own, which ends with it.

Ctrl-C ends the answer; at the prompt, or before the answer has ended, it ends the chat, as Ctrl-D does.
"""

import argparse
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ..ops._checks import first_line
from ..pipeline.torchrun import is_first_process
from .interrupts import at_ctrl_c
from .results import check_writable
from .serving import follow, server
from .settings import settings_of
from .sources import name_of


def run(options: argparse.Namespace) -> None:
    """Raises: ValueError, OSError, ImportError with one line that says what is wrong."""
    if not is_first_process():
        return follow(options)
    settings_of(options.set)  # its errors come before the model is loaded
    check_writable("--prompt-cache", options.prompt_cache)
    port = _free_port()
    with _quiet(), server(options, port=port, non_blocking=True, log_level="error") as (serve, interrupt):
        try:
            while not serve.server.started:
                if not serve._thread.is_alive():
                    raise RuntimeError("the server of the chat did not start")
                time.sleep(0.05)
            from huggingface_hub import constants
            from transformers.cli import chat

            constants.HF_HUB_OFFLINE = False  # else the client does not talk to this machine either
            with mock.patch.object(chat, "RichInterface", _interface(chat, interrupt)):
                chat.Chat(
                    model_id=name_of(options),
                    base_url=f"http://localhost:{port}",
                    generate_flags=options.set,
                    system_prompt=options.system_prompt,
                    save_folder=options.save_folder,
                )
        finally:
            serve.kill_server()


def _interface(chat: Any, interrupt: Callable[[], None]) -> type:
    """transformers' interface, which takes Ctrl-C and Ctrl-D.

    Args:
        interrupt: ends the answer that the server generates.
    """

    class Interface(chat.RichInterface):
        async def stream_output(self, stream: Any) -> tuple[str, Any]:
            stopped: list[bool] = []

            def stop() -> None:
                stopped.append(True)
                interrupt()

            async def tokens() -> Any:
                async for token in await stream:
                    if stopped:  # before the server knew of the request
                        interrupt()
                    yield token

            async def opened() -> Any:
                return tokens()

            with at_ctrl_c(stop):
                try:
                    return await super().stream_output(opened())
                except Exception as error:  # of the server or of the connection: the chat goes on
                    self.print_color(_reason(error), "red")
                    return "", None

        def input(self) -> str:
            with at_ctrl_c():
                try:
                    return super().input()
                except EOFError:
                    return "!exit"

        def confirm(self, message: str, default: bool = False) -> bool:
            with at_ctrl_c():
                try:
                    return bool(super().confirm(message, default))
                except EOFError:
                    return False

    return Interface


def _reason(error: Exception) -> str:
    """The server's own message where there is one."""
    try:
        return error.response.json()["error"]["message"]  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError):
        return first_line(error) or type(error).__name__


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
