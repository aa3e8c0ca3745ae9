"""A process that has imported what takes long, and forks for each process that tests ask for.

`support.processes` starts it. It ends with the test run. On a Mac, where Metal does not survive a fork, it
has imported nothing, and each process is a fresh interpreter.
"""

import atexit
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time

IMPORTED = (
    "transformers.generation",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "torch_moe_mps.commands.chat",
    "torch_moe_mps.commands.convert",
    "torch_moe_mps.commands.perplexity",
    "torch_moe_mps.commands.serve",
    "torch_moe_mps.serving.http.app",
    "torch_moe_mps.transformers",
    "support.pipeline",
    "support.recipes",
)
NUMBER = struct.Struct("i")
SECONDS = struct.Struct("d")
ON_MAC = sys.platform == "darwin"
_ended: list[bool] = []  # what a process runs has ended without an exception


def serve(listener: int, owner: int) -> str:
    """Returns in each new process, with the source that it runs; never in the server."""
    atexit.register(_leave)  # the first of the handlers is the last that runs
    if not ON_MAC:
        from support.simulated import install

        install()
        for name in IMPORTED:
            importlib.import_module(name)
        gc.freeze()  # collecting would copy the imported objects into each new process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the new processes
    counted = 0.0  # CPU seconds of this process that requests were told of
    with socket.socket(fileno=listener) as requests:
        path = requests.getsockname()
        while _lives(owner):
            if not select.select([requests], [], [], 1.0)[0]:
                continue
            connection, _ = requests.accept()
            with connection:
                spent, counted = time.process_time() - counted, time.process_time()
                if os.fork() == 0:
                    requests.close()
                    return _begun(connection, spent)
    os.unlink(path)
    os.unlink(f"{path}.lock")
    os._exit(0)


def end() -> None:
    """The process ends with code 0, without tearing modules down, which takes over a second.

    Handlers of `atexit` run and threads are joined; a process that raises ends as Python ends it.
    """
    _ended.append(True)


def _leave() -> None:
    if _ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _begun(connection: socket.socket, spent: float) -> str:
    """In a process that waits for a new one, and in the new one, where it returns.

    The first sends the pid, then the exit code and the CPU seconds, with those that were `spent` before.
    """
    header, files, _, _ = socket.recv_fds(connection, NUMBER.size, 3)
    (length,) = NUMBER.unpack(header)
    request = json.loads(connection.recv(length, socket.MSG_WAITALL))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process == 0:
        connection.close()
        return _become(request, files)
    for file in files:
        os.close(file)
    connection.sendall(NUMBER.pack(process))
    _, status, used = os.wait4(process, 0)
    connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
    connection.sendall(SECONDS.pack(spent + used.ru_utime + used.ru_stime))
    os._exit(0)


def _become(request: dict, files: list[int]) -> str:
    """This process is now like `python -c SOURCE ARGUMENTS`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if ON_MAC:
        os.chdir(request["folder"])
        program = [sys.executable, "-c", request["source"], *request["arguments"]]
        os.execve(sys.executable, program, request["variables"])
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    sys.argv = ["-c", *request["arguments"]]
    random.seed()  # as each would otherwise draw the same
    return request["source"]
