"""The commands `torch-moe-mps` and `python -m torch_moe_mps`.

Each command NAME has its options in arguments.py, which imports nothing heavy so that --help is fast, and
`run(options)` in NAME.py, which returns None or an exit code.
"""

import argparse
import atexit
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .._environment import KEEP_WARM, having, prepare_libraries
from .._install import install_extra
from .._text import first_line
from .arguments import parse, parser
from .option_checks import check_options, importing_torch
from .processes import first_process_talks, follow, follows

WITHOUT_TORCH = ("launch",)
_ENDED = (signal.SIGTERM, signal.SIGHUP)


def run() -> int:
    """Runs the command, then exits without tearing modules down, which takes over a second.

    Handlers of `atexit` run and threads are joined; an exception of `--debug` ends Python as ever.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first of the handlers is the last that runs
    try:
        codes.append(main())
    except SystemExit as error:
        if not isinstance(error.code, int):
            raise
        codes.append(error.code)
    return codes[0]


def _leave(codes: list[int]) -> None:
    """Ends the process at once with the code of its command, if it has one."""
    if codes:
        sys.stdout.flush()
        os._exit(codes[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns: the exit code."""
    if sys.stdout is None:  # closed, as by >&-
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    options, message = parse(sys.argv[1:] if arguments is None else arguments), None
    if options.command is None:
        parser().print_help()
        return 0
    pressed: list[int] = []
    try:
        with _signals_raise(pressed), first_process_talks(), having(_variables(options)):
            if "torch" not in sys.modules:
                prepare_libraries(sys.stderr.isatty())
            check_options(options)  # before the seconds in which torch is imported
            code = _run(options)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has seen enough
        code = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)  # behind ^C, or a bar of progress that has not begun to count
        code, message = 128 + signal.SIGINT, "interrupted"
    except Exception as error:
        line = "" if pressed else _line(error)  # an import that Ctrl-C interrupts raises anything
        if line is None or options.debug:
            raise
        code, message = (128 + signal.SIGINT, "interrupted") if pressed else (1, f"error: {line}")
    if message is not None:  # behind a bar of progress, which has ended its line with the exception
        print(f"torch-moe-mps: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # a full disk or a closed pipe raises once more when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """Variables of the environment that options set."""
    return {KEEP_WARM: "0"} if getattr(options, "no_keep_warm", False) else {}


def _run(options: argparse.Namespace) -> int:
    """Runs a command, or follows the process that does. Returns: the exit code."""
    command = _imported(options.command)
    if follows(options.command):
        from .sources import folder_of, load, usable_device

        follow(load(options, folder_of(options.model, options.revision), usable_device(options.device)))
        return 0
    return command.run(options) or 0


def _imported(command: str) -> Any:
    """The module of a command; stderr says that torch is imported, if it is."""
    if command in WITHOUT_TORCH:
        return importlib.import_module(f".{command}", __package__)
    with importing_torch(command):
        from .. import register_operators

        register_operators()
        return importlib.import_module(f".{command}", __package__)


def _line(error: Exception) -> str | None:
    """Line to print for an error that a user can cause; None for any other."""
    if isinstance(error, ImportError):
        return _of_import(error)
    if _is(error, "huggingface_hub.errors", "StrictDataclassError"):  # its second line says what is wrong
        return "the model's config.json: " + " ".join(str(error).split())
    if _is(error, "jinja2", "TemplateError"):
        return f"the model's chat template: {first_line(error)}"
    is_known = isinstance(error, (ValueError, OSError, RuntimeError))
    if not is_known and not _is(error, "safetensors", "SafetensorError"):
        return None
    if "torch" in sys.modules:  # torch's own words for a fault of the GPU name neither operators nor help
        from .._faults import fault_of

        error = fault_of(error) or error
    line = first_line(error) or type(error).__name__
    return f"{line} --trust-remote-code lets it run." if "trust_remote_code" in str(error) else line


def _is(error: Exception, module: str, name: str) -> bool:
    """Whether an error is of a class of a module, which is imported then, and may be missing."""
    return isinstance(error, getattr(sys.modules.get(module), name, ()))


def _of_import(error: ImportError) -> str:
    """An import error with its cause, which transformers leaves out."""
    causes: list[BaseException] = [error]  # a circle, where one is raised again
    while (inner := causes[-1].__cause__ or causes[-1].__context__) and inner not in causes:
        causes.append(inner)
    cause = causes[-1]
    text = str(error) if cause is error else f"{error}: {type(cause).__name__}: {cause}"
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing in ("transformers", "accelerate"):
        text += f"; `{install_extra('transformers')}` installs what the commands need"
    return " ".join(text.split())


@contextmanager
def _signals_raise(pressed: list[int]) -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, so that half-written files are removed.

    Ctrl-C raises KeyboardInterrupt, and is noted in `pressed`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    def interrupt(number: int, frame: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    handlers = dict.fromkeys(_ENDED, end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handlers[signal.SIGINT] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
