"""Facts about Macs: memory bandwidth by chip, and how much memory macOS lets the GPU use."""

import functools
import os
import subprocess
from typing import NamedTuple

import torch

from ._extension import torch_version
from ._versions import dotted, refused

GIB = 1 << 30
MEMORIES = (16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)  # GiB of memory that Macs were sold with

# GB/s, the width of the memory's bus times its rate. Apple's specifications round it ("800GB/s").
# Sources: support.apple.com/specs of the MacBook Pro, Mac mini, Mac Studio and iMac with each chip; for M5
# apple.com/newsroom of October 2025, for the M5 Pro and Max of March 2026. The M5 Ultra has two M5 Max; the
# M6 has its faster memory option here, because bounds are computed from it.
# Where two GPUs of one chip have different memory, the number of GPU cores tells them apart.
BANDWIDTHS = {
    "M1": 68.3,
    "M1 Pro": 204.8,
    "M1 Max": 409.6,
    "M1 Ultra": 819.2,
    "M2": 102.4,
    "M2 Pro": 204.8,
    "M2 Max": 409.6,
    "M2 Ultra": 819.2,
    "M3": 102.4,
    "M3 Pro": 153.6,
    "M3 Max (30 cores)": 307.2,
    "M3 Max (40 cores)": 409.6,
    "M3 Ultra": 819.2,
    "M4": 120.0,
    "M4 Pro": 273.0,
    "M4 Max (32 cores)": 410.0,
    "M4 Max (40 cores)": 546.0,
    "M5": 153.6,
    "M5 Pro": 307.0,
    "M5 Max (32 cores)": 460.0,
    "M5 Max (40 cores)": 614.0,
    "M5 Ultra": 1228.0,
    "M6": 170.7,
}
_OF_THE_MACHINE = 0.75


def is_known(gpu: str) -> bool:
    """True if a GPU, by Metal's name, is older than this release, or is not a Mac's."""
    chips = {name.partition(" (")[0] for name in BANDWIDTHS}
    return not gpu.startswith("Apple M") or gpu.removeprefix("Apple ") in chips


class Mac(NamedTuple):
    """This machine. `chip` may be missing in BANDWIDTHS; sizes are in bytes, bandwidth in GB/s."""

    chip: str
    memory: int
    limit: int
    bandwidth: float | None


def wired_limit(gib: int) -> int:
    """Default limit in bytes of the memory that the GPU may use.

    Metal's recommendedMaxWorkingSetSize, as llama.cpp prints it: 10,922.67 MiB of 16 GiB, 21,845.34 of 32
    (two thirds: its issues #2048 and PR #2011); 27,648 of 36 and 73,728 of 96 (three quarters: issue #3213).
    """
    return gib * GIB * 2 // 3 if gib <= 32 else gib * GIB * 3 // 4


def this_mac() -> Mac:
    """Facts about this Mac. Raises: ValueError without Apple silicon."""
    if not (brand := output_of("sysctl", "-n", "machdep.cpu.brand_string")).startswith("Apple M"):
        raise ValueError("--mac is for a Mac with Apple silicon; this machine is not one")
    memory = int(output_of("sysctl", "-n", "hw.memsize"))
    chosen = output_of("sysctl", "-n", "iogpu.wired_limit_mb")  # 0 unless the user set it
    if chosen.isdecimal() and int(chosen) > 0:
        limit = int(chosen) << 20
    elif torch.backends.mps.is_available():
        limit = torch.mps.recommended_max_memory()
    else:
        limit = wired_limit(memory // GIB)
    chip = brand.removeprefix("Apple ")
    if f"{chip} (40 cores)" in BANDWIDTHS:
        chip = f"{chip} ({torch.backends.mps.get_core_count()} cores)"
    return Mac(chip, memory, limit, BANDWIDTHS.get(chip))


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_for_models(on_gpu: bool) -> int:
    """Bytes that a model with all that it computes may take."""
    return torch.mps.recommended_max_memory() if on_gpu else int(_OF_THE_MACHINE * machine_memory())


@functools.cache
def macos() -> tuple[int, ...] | None:
    """Version of macOS, or None elsewhere. Some builds of Python report an older one."""
    text = output_of("sw_vers", "-productVersion")
    if not text.replace(".", "").isdecimal():
        return None
    numbers = tuple(map(int, text.split(".")))
    return numbers if len(numbers) > 1 else (*numbers, 0)


def refusal() -> str | None:
    """Reason why this torch cannot run models on this Mac's GPU, in one line, or None."""
    system = macos()
    return None if system is None else refused(dotted(torch_version()), system)


def output_of(*command: str) -> str:
    """Output of a system program; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
