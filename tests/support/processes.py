"""Processes beside the tests': fresh interpreters, and forks of one that has imported what takes long."""

import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

from support.fork_server import NUMBER, SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = "import runpy; runpy.run_module('torch_moe_mps', run_name='__main__')"  # python -m torch_moe_mps

# Of a process that has printed all: tearing modules down takes a second.
LEAVE = "\nimport os, sys; sys.stdout.flush(); os._exit(0)"


def environment(*paths: object) -> dict[str, str]:
    """The variables of this process with `paths`, the checkout and its tests in front of other packages."""
    folders = [*paths, REPOSITORY, REPOSITORY / "tests", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}


def python(source: str, *arguments: str, paths: tuple = (), **variables: str) -> str:
    """What a fresh interpreter prints, with `variables` of the environment."""
    command = [sys.executable, "-c", textwrap.dedent(source) + LEAVE, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(*paths) | variables
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# The server is started by the first process of a test run that needs it, and serves all of them.
_OWNER = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
_SOCKET = os.path.join(tempfile.gettempdir(), f"moe_mps-tests-{_OWNER}")


@functools.cache
def _start_server() -> None:
    with open(f"{_SOCKET}.lock", "w") as lock, socket.socket(socket.AF_UNIX) as listener:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(_SOCKET):
            return
        listener.bind(_SOCKET)
        listener.listen(64)
        call = f"serve({listener.fileno()}, {_OWNER})"
        source = f"from support import fork_server; exec(fork_server.{call}); fork_server.end()"
        subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            env=environment(),
        )


class Spent:
    """CPU seconds of forked processes, which are no children of this one."""

    seconds = 0.0


spent = Spent()


class Forked:
    """A process that runs `source` as `python -c` does, and has imported torch, transformers and the package.

    It leads a session. `files` are its input, its output and its errors.
    """

    def __init__(self, source: str, *arguments: object, files: tuple, **variables: object) -> None:
        _start_server()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_SOCKET)
        request = {
            "source": textwrap.dedent(source),
            "arguments": [str(argument) for argument in arguments],
            "variables": environment() | {name: str(value) for name, value in variables.items()},
            "folder": os.getcwd(),
        }
        text = json.dumps(request).encode()
        numbers = [file if isinstance(file, int) else file.fileno() for file in files]
        socket.send_fds(self._connection, [NUMBER.pack(len(text))], numbers)
        self._connection.sendall(text)
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        data = self._connection.recv(NUMBER.size, socket.MSG_WAITALL)
        assert len(data) == NUMBER.size, "the server of processes has ended"
        return NUMBER.unpack(data)[0]

    def wait(self, seconds: float) -> int:
        """Its exit code. TimeoutError if it is still running."""
        if self.returncode is None:
            self._connection.settimeout(max(seconds, 1e-3))
            self.returncode = self._number()
            (seconds,) = SECONDS.unpack(self._connection.recv(SECONDS.size, socket.MSG_WAITALL))
            spent.seconds += seconds
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


class Recorded(Forked):
    """One whose output and errors are kept."""

    def __init__(self, source: str, *arguments: object, **variables: object) -> None:
        self.folder = tempfile.TemporaryDirectory()
        output, errors = self.printed = [Path(self.folder.name, name) for name in ("output", "errors")]
        with open(os.devnull) as none, output.open("wb") as out, errors.open("wb") as err:
            super().__init__(source, *arguments, files=(none, out, err), **variables)

    def end(self, seconds: float) -> tuple[int, str, str]:
        """Return code, output and errors. One that still runs then is killed."""
        try:
            self.wait(seconds)
        except TimeoutError:
            self.kill()
        code = self.wait(60)
        output, errors = (file.read_text() for file in self.printed)
        return code, output, errors


def forked(source: str, *arguments: object, **variables: object) -> str:
    """What a forked process prints, with `variables` of the environment."""
    code, output, errors = Recorded(source, *arguments, **variables).end(300)
    assert code == 0, errors
    return output.strip()


def interrupted(source: str, mark: str, *arguments: object) -> tuple[int, str]:
    """Ctrl-C for a forked process once it has printed `mark`. Returns: its exit code, and its errors."""
    reader, writer = os.pipe()
    with open(os.devnull) as none, open(reader) as output:
        process = Forked(source, *arguments, files=(none, writer, writer))
        os.close(writer)
        limit = threading.Timer(250, process.kill)
        limit.start()
        try:
            said = ""
            while mark not in said:
                letter = output.read(1)
                assert letter, said
                said += letter
            os.kill(process.pid, signal.SIGINT)
            return process.wait(250), output.read()
        finally:
            limit.cancel()
            process.kill()
