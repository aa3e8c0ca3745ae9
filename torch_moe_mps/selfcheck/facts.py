"""The state of this machine, for a report; and a report without the names of its user."""

import getpass
import importlib.metadata
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from .._environment import shown
from ..macs import output_of
from .machine import late_before, machine

PACKAGES = ("transformers", "mlx", "mlx-lm", "accelerate", "safetensors")


def facts() -> dict[str, Any]:
    """`machine()` and what may explain a fault or a slow run. What the system does not tell is left out."""
    result: dict[str, Any] = dict(machine())
    result["cores_planned_for"] = torch.ops.moe_mps._gpu_cores()
    result["memory_recommended"] = torch.mps.recommended_max_memory()
    result["versions"] = dict(filter(None, map(_version, PACKAGES)))
    result["switches"] = shown()
    result["late"] = sorted(late_before())  # calls that accelerate() had no time for
    return result | (_of_macos() if sys.platform == "darwin" else {})


def _version(package: str) -> tuple[str, str] | None:
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _of_macos() -> dict[str, Any]:
    """Facts printed by macOS programs, as bytes or text."""
    power = output_of("pmset", "-g")
    result: dict[str, Any] = {
        "cores": _number(r'"gpu-core-count" = (\d+)', output_of("ioreg", "-rc", "AGXAccelerator", "-d1")),
        "memory": _number(r"(\d+)", output_of("sysctl", "-n", "hw.memsize")),
        "wired_limit_mb": _number(r"(\d+)", output_of("sysctl", "-n", "iogpu.wired_limit_mb")),
        "memory_free_percent": _number(r"free percentage: (\d+)%", output_of("memory_pressure", "-Q")),
        "swap": output_of("sysctl", "-n", "vm.swapusage"),
        "displays": _displays(output_of("system_profiler", "SPDisplaysDataType", "-json")),
        "low_power_mode": _number(r"lowpowermode\s+(\d)", power),
        "power_mode": _number(r"powermode\s+(\d)", power),
        "power_source": _first(r"drawing from '([^']+)'", output_of("pmset", "-g", "batt")),
        "speed_limit": _number(r"CPU_Speed_Limit\s*=\s*(\d+)", output_of("pmset", "-g", "therm")),
        "load": os.getloadavg()[0],
    }
    return {name: value for name, value in result.items() if value not in (None, "")}


def _first(pattern: str, text: str) -> str | None:
    matched = re.search(pattern, text)
    return matched and matched[1]


def _number(pattern: str, text: str) -> int | None:
    result = _first(pattern, text)
    return None if result is None else int(result)


def _displays(text: str) -> int | None:
    """Number of attached displays; a Mac without one ends no long command buffer."""
    try:
        gpus = json.loads(text)["SPDisplaysDataType"]
        return sum(len(gpu.get("spdisplays_ndrvs", ())) for gpu in gpus)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def anonymous(text: str) -> str:
    """Without folders, and without the names of the user, the home directory and the machine."""
    text = re.sub(r"(?<![\w.~])~?/(?:[^\s/\"'\\:,]+/)+", ".../", text)
    names = {_user(): "USER", _home(): "USER", socket.gethostname().partition(".")[0]: "HOST"}
    for name, instead in names.items():
        if len(name) > 2:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text, flags=re.IGNORECASE)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user may have no name
        return ""


def _home() -> str:
    try:
        return Path.home().name
    except RuntimeError:
        return ""
