"""Variables of the environment: no other file of the package reads one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

API_KEY = "MOE_MPS_API_KEY"
CAPTURE = "MOE_MPS_CAPTURE"
CHECK = "MOE_MPS_CHECK"
KEEP_WARM = "MOE_MPS_KEEP_WARM"
REFUSE = "MOE_MPS_REFUSE"
RESIDENCY = "MOE_MPS_RESIDENCY"
TENSOR_UNITS = "MOE_MPS_TENSOR_UNITS"
TUNE = "MOE_MPS_TUNE"
COMMIT_EVERY = "MOE_MPS_COMMIT_EVERY"  # for diagnosis
_SWITCHES = (CAPTURE, CHECK, KEEP_WARM, REFUSE, RESIDENCY, TENSOR_UNITS, TUNE, COMMIT_EVERY)
# transformers reads a checkpoint without threads where it is "1".
ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
_NO_BARS = "TQDM_DISABLE"
# Turns that a thread of libgomp waits for work before it sleeps. Its own choice is 300,000 for the threads of
# the main thread, and 1,000 where there are more threads than cores, as in the server. Beside two busy
# processes on two cores `generate` made 0.7 tokens/s with the first, and 3.4 with the second.
_SPINS = ("GOMP_SPINCOUNT", "1000")
_SHOWN = ("MOE_MPS_", "PYTORCH_MPS_", "PYTORCH_ENABLE_MPS", "MTL_", "METAL_")
_SECRETS = ("_KEY", "_TOKEN")  # ends of names whose values no report may have


def is_on(name: str) -> bool:
    """True unless a variable is 0."""
    return os.environ.get(name) != "0"


def is_asked(name: str) -> bool:
    """True if a variable is 1."""
    return os.environ.get(name) == "1"


def choice(name: str) -> str:
    """The variable's "0", "1" or "auto", which is the default. Raises: ValueError for any other value."""
    text = os.environ.get(name, "auto")
    if text not in ("0", "1", "auto"):
        raise ValueError(f"torch_moe_mps: {name} must be 0, 1 or auto, got {text!r}")
    return text


def commit_interval() -> int | None:
    """Dispatches after which the stream is committed, or None. Raises: ValueError for another value."""
    text = os.environ.get(COMMIT_EVERY)
    if text is not None and not text.isdecimal():
        raise ValueError(f"torch_moe_mps: {COMMIT_EVERY} must be a number of dispatches, or 0, got {text!r}")
    return None if text is None else int(text)


def refused() -> list[str]:
    """The names that MOE_MPS_REFUSE has, with commas between."""
    return [name for part in os.environ.get(REFUSE, "").split(",") if (name := part.strip())]


def api_key() -> str | None:
    return os.environ.get(API_KEY) or None


def processes() -> int:
    """Number of processes that this command runs in, which WORLD_SIZE has; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """True for the process that talks: the only one, or rank 0."""
    return processes() == 1 or os.environ.get("RANK") == "0"


def caches() -> Path | None:
    """The folder of XDG_CACHE_HOME, which is not macOS's."""
    return Path(text) if (text := os.environ.get("XDG_CACHE_HOME")) else None


def shows_progress() -> bool:
    return not is_asked(_NO_BARS)


def show_no_progress() -> None:
    os.environ.setdefault(_NO_BARS, "1")


def prepare_libraries(terminal: bool) -> None:
    """Sets what libraries read when they are imported: threads of libgomp that wait let other processes have
    the cores; the Hub and transformers show bars on a terminal alone."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(*_SPINS)
    if not terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def set_one_thread(value: str | None) -> str | None:
    """Sets or removes ONE_THREAD. Returns: its value before."""
    before = os.environ.pop(ONE_THREAD, None)
    if value is not None:
        os.environ[ONE_THREAD] = value
    return before


@contextlib.contextmanager
def having(variables: dict[str, str]) -> Iterator[None]:
    """Context in which these variables of the package have these values."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def with_others(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a new process."""
    return {**os.environ, **variables}


def shown() -> dict[str, str | None]:
    """The package's switches, None where they are not set, and other variables that may explain a fault or a
    slow run."""
    names = (name for name in sorted(os.environ) if name.startswith(_SHOWN) and not name.endswith(_SECRETS))
    return dict.fromkeys(_SWITCHES) | {name: os.environ[name] for name in names}
