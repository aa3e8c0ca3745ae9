"""Checks of options before torch is imported, which takes seconds: errors come at once."""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from .._install import install_extra
from .._interrupts import ending_at_once
from .._text import one_of
from .._weight_formats import BITS, GROUP_SIZES
from .arguments import MIXED, RECIPES
from .launch import check_agent
from .places import look_for_files, look_for_models, place_of_adapter, prompts_of, utf8_text
from .processes import check_processes
from .results import check_new_folder, check_writable


def check_options(options: argparse.Namespace) -> None:
    """Checks the options of a command; `generate` has its prompts as options.texts then.

    Raises: ValueError, OSError, ImportError with a one-line message.
    """
    if options.command not in _WITHOUT_MODELS:
        _check_models(options.command, "serve" if options.command == "serve" else "transformers")
    check_processes(options)
    recipe = getattr(options, "recipe", None)
    if recipe not in (None, *RECIPES, *MIXED) and not Path(recipe).exists():
        raise ValueError(f"--recipe must be {', '.join((*RECIPES, *MIXED))} or a file, got {recipe}")
    if (check := _OWN.get(options.command)) is not None:
        check(options)
    if options.command != "launch":  # its server may have the model elsewhere
        look_for_models(options)  # on the Hub, too, which takes longer
    if options.command == "generate":
        options.texts = prompts_of(options)  # stdin last: it may take any time


@contextmanager
def importing_torch(command: str) -> Iterator[None]:
    """Context that imports torch, with a line on stderr unless it is imported already.

    Garbage collection is disabled meanwhile; it would take a quarter of the time and find nothing.
    """
    if "torch" in sys.modules:
        yield
        return
    print(f"torch-moe-mps {command}: importing torch", file=sys.stderr, flush=True)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with ending_at_once():
            yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _check(options: argparse.Namespace) -> None:
    """Refuses options of `check --bisect` that it would ignore, before torch is imported."""
    if options.bisect is None:
        return
    for option, value in (("--dtype", options.dtype), ("--format", options.format)):
        if value is not None:
            raise ValueError(f"{option} must be left out with --bisect, got {value!r}")
    _check_models("check --bisect", "transformers")


def _check_models(user: str, extra: str) -> None:
    for package in ("transformers", "accelerate"):
        _check_package(package, user, extra)


def _chat(options: argparse.Namespace) -> None:
    _check_settings(options)
    _check_adapter(options)
    _check_prompt_folder(options)


def _generate(options: argparse.Namespace) -> None:
    _check_settings(options)
    _check_prompt(options)
    look_for_files(options)
    _check_adapter(options)
    _check_prompt_folder(options)


def _serve(options: argparse.Namespace) -> None:
    _check_server("serve")
    _check_adapter(options)
    _check_prompt_folder(options)


def _check_prompt_folder(options: argparse.Namespace) -> None:
    if options.prompt_folder is not None and Path(options.prompt_folder).is_file():
        raise ValueError(f"--prompt-folder must be a folder, got the file {options.prompt_folder}")


def _launch(options: argparse.Namespace) -> None:
    check_agent(options)
    _check_server("launch")
    _check_adapter(options)


def _check_server(command: str) -> None:
    for package in ("starlette", "uvicorn", "msgspec", "prometheus_client", "pybase64", "xgrammar"):
        _check_package(package, command, "serve")


def _check_json(options: argparse.Namespace) -> None:
    check_writable("--json", options.json)


def _perplexity(options: argparse.Namespace) -> None:
    _check_json(options)
    look_for_files(options)
    if options.text is not None and Path(options.text).is_file():  # a pipe can be read once
        utf8_text("--text", options.text)
    _check_adapter(options)


def _convert(options: argparse.Namespace) -> None:
    """Refuses options of `convert`, before torch is imported."""
    if os.path.lexists(options.destination):
        raise ValueError(f"{options.destination} exists; convert writes a new folder")
    check_new_folder("DST", options.destination)
    _check_json(options)
    check_writable("--save-importance", options.save_importance)
    if options.save_importance is not None and options.importance is None:
        raise ValueError("--save-importance needs --importance, which it writes")
    if options.importance not in (None, "auto") and not Path(options.importance).is_file():
        raise ValueError(f"--importance must be auto or a file, got {options.importance}")
    if options.importance is not None and (options.bits == 1 or "fp" in options.mode):
        got = "--bits 1" if options.bits == 1 else f"--mode {options.mode}"
        raise ValueError(f"--importance must be for affine formats of 2 bits and more, or ggml's, got {got}")
    _check_format(options)
    if options.recipe is not None and (options.bits is not None or options.mode != "affine"):
        raise ValueError("--recipe already sets the bits; leave out --bits and --mode")
    if keeps_blocks(options):
        check_packed(options)
        if options.to == "mlx":
            raise ValueError("--to mlx of a GGUF file needs --bits: MLX does not have its formats")


def _check_format(options: argparse.Namespace) -> None:
    for option, value, allowed in (
        ("--bits", options.bits, BITS[options.mode]),
        ("--group-size", options.group_size, GROUP_SIZES[options.mode]),
    ):
        if value not in (None, *allowed):
            raise ValueError(f"{option} must be {one_of(allowed)} with --mode {options.mode}, got {value}")


def check_packed(options: argparse.Namespace) -> None:
    """Raises: ValueError for options of a packed SRC that stays in its formats."""
    for option, value in (("--group-size", options.group_size), ("--importance", options.importance)):
        if value is not None:
            raise ValueError(f"{option} of a packed SRC needs --bits, without which it is converted as it is")


def requests_format(options: argparse.Namespace) -> bool:
    """True if `convert` is asked for a format."""
    usual = options.bits is None and options.recipe is None and options.mode == "affine"
    return not (usual and (options.linear_bits, options.embedding_bits) == ("auto", "auto"))


def keeps_blocks(options: argparse.Namespace) -> bool:
    """True if `convert` leaves a GGUF file in its formats."""
    return options.source.endswith(".gguf") and not requests_format(options)


_WITHOUT_MODELS = ("check", "launch", "report")
_OWN: dict[str, Callable[[argparse.Namespace], None]] = {
    "bench": _check_json,
    "chat": _chat,
    "check": _check,
    "convert": _convert,
    "fit": _check_json,
    "generate": _generate,
    "launch": _launch,
    "perplexity": _perplexity,
    "serve": _serve,
}


def _check_settings(options: argparse.Namespace) -> None:
    if options.set:
        from .settings import settings_of

        with importing_torch(options.command):
            settings_of(options)


def _check_prompt(options: argparse.Namespace) -> None:
    if options.prompt and options.prompts:
        raise ValueError("--prompt and --prompts are two ways to give prompts; leave one out")
    if options.prompts is not None and options.image:
        raise ValueError("--image is for one prompt, got --prompts")
    if options.image and options.raw:
        raise ValueError("--image needs the chat template, got --raw")
    for file in options.image:
        if not Path(file).is_file():
            raise ValueError(f"--image must be a file, got {file}")
    if options.prompt is None and options.prompts is None and sys.stdin.isatty():
        raise ValueError("a prompt is needed: --prompt, --prompts or stdin")


def _check_adapter(options: argparse.Namespace) -> None:
    if options.adapter is None:
        return
    _check_package("peft", "--adapter", "adapters")
    place_of_adapter(options.adapter, weights=False)


def _check_package(package: str, user: str, extra: str) -> None:
    """Raises: ValueError with the command that brings a missing package, which an extra has."""
    if find_spec(package) is None:
        raise ValueError(f"{user} needs `{install_extra(extra)}`, which brings {package}")
