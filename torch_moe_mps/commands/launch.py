"""`launch codex|claude|opencode [MODEL]`: a coding agent that asks a model on this machine.

A server that answers already is asked; otherwise one runs as long as the agent does. What the agent is told
is for its process alone: no file of its settings changes.
"""

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .._environment import API_KEY, api_key, with_others
from .places import look_for_models

_NAME = "torch-moe-mps"  # the provider's name in the settings of an agent
_WAITS = 30.0  # seconds for the server to end
# Options of `serve` that are handed on.
_OF_THE_SERVER = (
    "bits", "group_size", "kv_bits", "device", "dtype", "revision", "adapter", "prompt_folder",
    "prompt_disk", "prompt_memory", "prompt_writes",
)  # fmt: skip


class RunningServer(NamedTuple):
    """A running server.

    Attributes:
        url: without a path.
        model: the name by which it has the model.
        context: the tokens that the model reads; None for any number.
    """

    url: str
    model: str
    context: int | None


class Start(NamedTuple):
    """Arguments of an agent, in front of the user's own, and variables of its environment."""

    arguments: list[str]
    variables: dict[str, str]


def _codex(server: RunningServer, key: str | None) -> Start:
    about = {"name": _NAME, "base_url": f"{server.url}/v1", "wire_api": "responses"}
    if key is not None:
        about["env_key"] = API_KEY
    provider = ", ".join(f"{name}={json.dumps(value)}" for name, value in about.items())
    settings = [f'model_provider="{_NAME}"', f"model_providers.{_NAME}={{{provider}}}"]
    if server.context is not None:
        settings.append(f"model_context_window={server.context}")
    words = [word for setting in settings for word in ("-c", setting)]
    return Start([*words, "-m", server.model], {})


def _claude(server: RunningServer, key: str | None) -> Start:
    kinds = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))
    connection = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": key or "none",
        "ANTHROPIC_API_KEY": "",
    }
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return Start([], {**connection, **dict.fromkeys(kinds, server.model), **quiet})


def _opencode(server: RunningServer, key: str | None) -> Start:
    """Start of OpenCode, whose config in the environment names the server as a provider."""
    model: dict[str, Any] = {"name": server.model}
    if server.context is not None:
        # Its history may have what an answer leaves of the context: with all of it for one there is none.
        model["limit"] = {"context": server.context, "output": server.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _NAME,
        "options": {"baseURL": f"{server.url}/v1", "apiKey": key or "none"},
        "models": {server.model: model},
    }
    names = {"model": f"{_NAME}/{server.model}", "small_model": f"{_NAME}/{server.model}"}
    config = {"provider": {_NAME: provider}, **names}
    return Start([], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


# {agent: the package of npm that has it, and what it is started with}
_AGENTS: dict[str, tuple[str, Callable[[RunningServer, str | None], Start]]] = {
    "codex": ("@openai/codex", _codex),
    "claude": ("@anthropic-ai/claude-code", _claude),
    "opencode": ("opencode-ai", _opencode),
}


def check_agent(options: argparse.Namespace) -> None:
    """Raises: ValueError for an agent that is not installed, and one line how it is."""
    if shutil.which(options.agent) is None:
        package, _ = _AGENTS[options.agent]
        raise ValueError(f"{options.agent} is not installed: `npm install -g {package}` brings it")


def run(options: argparse.Namespace) -> int:
    """Returns: the exit code of the agent.

    Raises: ValueError, OSError with a one-line message.
    """
    key = api_key()
    program = shutil.which(options.agent)
    with _server(options, key) as server:
        _, how = _AGENTS[options.agent]
        start = how(server, key)
        command = [str(program), *start.arguments, *options.arguments]
        with _ctrl_c_is_the_agents():
            code = subprocess.call(command, env=with_others(start.variables))
    return code if code >= 0 else 128 - code


@contextmanager
def _server(options: argparse.Namespace, key: str | None) -> Iterator[RunningServer]:
    """Context with the server at --port, which is started if none answers.

    Raises: ValueError if none answers and no model is named, or if the new server exits.
    """
    running = _answering(options.port, key)
    if running is not None and options.model in (None, running.model):
        print(f"{running.model} answers at {running.url}/v1", file=sys.stderr)
        yield running
        return
    if options.model is None:
        raise ValueError(f"no server answers at port {options.port}: name a MODEL, which one is started for")
    look_for_models(options)
    port = options.port if running is None and _is_free(options.port) else _free_port()
    values = {name: getattr(options, name) for name in _OF_THE_SERVER}
    words = [
        word
        for name, value in values.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    trusts = ["--trust-remote-code"] if options.trust_remote_code else []
    command = [
        sys.executable,
        "-m",
        "torch_moe_mps",
        "serve",
        options.model,
        "--port",
        str(port),
        *words,
        *trusts,
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        print(f"A server of {options.model} starts", file=sys.stderr, flush=True)
        with log.open("wb") as output:  # a session of its own: Ctrl-C is for the agent
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        try:
            while (server := _answering(port, key)) is None:
                if process.poll() is not None:
                    *_, last = ["it said nothing", *log.read_text(errors="replace").strip().splitlines()]
                    raise ValueError(f"the server has ended: {last.removeprefix('torch-moe-mps: error: ')}")
                time.sleep(0.2)
            print(f"{server.model} answers at {server.url}/v1 until {options.agent} ends", file=sys.stderr)
            yield server
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Ends a server as Ctrl-C does: cached prefixes are written."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_WAITS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answering(port: int, key: str | None) -> RunningServer | None:
    """The server of this package at a port; None for none, and for one of another program."""
    url = f"http://localhost:{port}"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=5
        ) as page:
            told = json.load(page)
        (model,) = told["data"]
        return (
            RunningServer(url, model["id"], model["context_length"]) if model["owned_by"] == _NAME else None
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _ctrl_c_is_the_agents() -> Iterator[None]:
    """Context where this process ignores Ctrl-C, which the agent in the same terminal handles."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
