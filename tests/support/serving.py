"""A server of this package in this process, and OpenAI's client of it."""

import contextlib
import time
from collections.abc import Iterator

import openai

from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.commands.chat import _free_port
from torch_moe_mps.commands.serving import server


@contextlib.contextmanager
def client_of(*arguments: object, **settings: object) -> Iterator[openai.OpenAI]:
    """Of `serve` with these arguments on the CPU."""
    port = _free_port()
    given = parser().parse_args(["serve", *map(str, arguments), "--device", "cpu"])
    with server(given, port=port, non_blocking=True, log_level="error", **settings) as (serve, _):
        try:
            while not serve.server.started:
                assert serve._thread.is_alive()
                time.sleep(0.01)
            url = f"http://localhost:{port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
                yield client
        finally:
            serve.kill_server()
