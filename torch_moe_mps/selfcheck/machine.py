"""This machine, and what has passed on it."""

import functools
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from .._environment import caches
from .._extension import PACKAGE, SHADERS, host_library
from .._limits import CAUTIOUS_CHUNK
from ..macs import output_of

COMMAND = "torch-moe-mps check"
PASSED = "check_has_passed"  # True once `check` has, False once it has failed
SDPA, NO_CACHE = "sdpa", "no_cache"  # torch's attention for prompts; reads of experts past the page cache
_KEY = ("torch_moe_mps", "code", "torch", "macos", "gpu")  # entries that a pass holds for
_output_of = functools.cache(output_of)


def is_available() -> bool:
    """True if there is a Mac's GPU and the compiled extension."""
    return torch.backends.mps.is_available() and host_library() is not None


def machine() -> dict[str, str]:
    """The facts about this machine that a report needs."""
    described = {
        "torch_moe_mps": sys.modules[PACKAGE.name].__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "macos": _output_of("sw_vers", "-productVersion"),
        "processor": _output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine(),
        "gpu": torch.ops.moe_mps._gpu_name() if is_available() else "",
        "code": _code(host_library()),
    }
    if sys.platform == "darwin":
        described["macos"] += f" ({_output_of('sw_vers', '-buildVersion')})"
    return described


@functools.cache
def _code(host: Path | None) -> str:
    """Identifies the shaders, the host's library and the comparisons: a checkout changes without a new
    version."""
    files = [path for path in SHADERS.rglob("*") if path.suffix in (".metal", ".h", ".txt", ".metallib")]
    files += [*(PACKAGE / "ops").rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    files += [] if host is None else [host]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def where() -> str:
    """Short description of the machine."""
    about = machine()
    return f"{about['gpu']}, macOS {about['macos'] or 'none'}, torch {about['torch']}"


def cache_folder() -> Path:
    """Folder in the user's cache directory. Raises: RuntimeError if the user has no home directory."""
    home = Path.home()
    root = home / "Library/Caches" if sys.platform == "darwin" else home / ".cache"
    if sys.platform != "darwin":
        root = caches() or root
    return root / "torch_moe_mps"


def cache_file() -> Path:
    """The file that remembers what passed on this machine."""
    about = machine()
    key = "\0".join(about[part] for part in _KEY)
    return cache_folder() / f"selfcheck-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def passed_before() -> set[str]:
    """Labels of subjects that have passed; none if the file is missing or damaged."""
    return _remembered("passed")


def late_before() -> set[str]:
    """Labels of subjects for which accelerate() or a first call had no time."""
    return _remembered("late")


def _remembered(what: str) -> set[str]:
    labels = _kept().get(what)
    return (
        set(labels) if isinstance(labels, list) and all(isinstance(label, str) for label in labels) else set()
    )


def tuned_before() -> Any:
    """Results that selfcheck/tuner.py has remembered, as JSON has them."""
    return _kept().get("tuned", {})


def _kept() -> dict[str, Any]:
    """Contents of the file; nothing if it is missing, damaged, or of another machine."""
    try:
        kept, about = read_object(cache_file), machine()
        return kept if all(kept["machine"][part] == about[part] for part in _KEY) else {}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return {}


def remember(passed: Collection[str], late: Collection[str] = ()) -> None:
    """Writes the result to the file; if that fails, the next process checks again."""
    _keep(passed=sorted(passed), late=sorted(late))


def remember_tuned(tuned: Mapping[str, Any]) -> None:
    """The same of what was timed."""
    _keep(tuned=tuned)


def has_passed() -> bool:
    """True if the last `check` on this machine has passed: see `remember_check`."""
    return _kept().get(PASSED) is True


def remember_check(passed: bool) -> None:
    """Writes the result of a check of all that most models run."""
    _keep(**{PASSED: passed})


@functools.cache
def say_what_waits() -> None:
    """Tells the user, once in a process, what this package leaves out until a check has passed."""
    print(
        f"torch_moe_mps: no check has passed on this machine ({where()}), so matmuls are not timed, and "
        f"prompts of models with experts on the SSD are computed {CAUTIOUS_CHUNK} tokens at a time. "
        f"`{COMMAND} --first` or `{COMMAND} --quick` lifts both",
        file=sys.stderr,
    )


def was_faster(way: str) -> bool:
    """True if this machine was measured to be faster with a way that is not the default: SDPA, NO_CACHE."""
    return _kept().get(f"{way}_is_faster") is True


def remember_faster(way: str, is_faster: bool) -> None:
    """The same of such a measurement."""
    _keep(**{f"{way}_is_faster": is_faster})


def _keep(**parts: Any) -> None:
    write_object(cache_file, {**_kept(), "machine": machine(), **parts})


def read_object(place: Callable[[], Path]) -> dict[str, Any]:
    """Contents of a file in the user's cache directory; nothing if it is missing or damaged."""
    try:
        kept = json.loads(place().read_text())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: no home directory
        return {}
    return kept if isinstance(kept, dict) else {}


def write_object(place: Callable[[], Path], kept: Mapping[str, Any]) -> None:
    """Writes such a file, whole or not at all: what cannot be written is found out again."""
    try:
        path = place()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(kept, file, indent=1)
        os.replace(file.name, path)
    except (OSError, RuntimeError):
        return
