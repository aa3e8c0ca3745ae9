"""Limits of macOS and of other libraries for this package: one place for them, which setup.py reads, too."""

import re

MACOS = (14, 0)  # the oldest for the wheel, its extensions and its compiled shaders
TORCH = ("2.13", "2.14", "2.15")  # a wheel has an extension for each
MACOS_OF_TORCH = {"2.15": (15, 0)}  # where torch itself needs a newer one
# {torch: the macOS from which on it fails, and how}
FAILS = {"2.13": ((27, 0), "its F.linear aborts with a transposed weight in bfloat16 (pytorch#197796)")}
# Tested: the first is the oldest that is taken. What runs behind another one is compared at run time.
TRANSFORMERS = ("5.23", "5.24")
PEFT = "0.21"  # models/adapters/peft.py stands around a function of it
TENSOR_UNITS = (26, 2)  # mlx#3622
SDPA_ON_UNITS = (2, 15)  # the first torch whose attention runs on them


def dotted(version: tuple[int, ...]) -> str:
    """ "26.2", and "15" for (15, 0)."""
    return ".".join(map(str, version)).removesuffix(".0")


def minor(version: str) -> str:
    """ "5.24" for "5.24.1" and "5.24.0.dev0"."""
    return ".".join(re.findall(r"\d+", version)[:2])


def too_old(transformers: str) -> str | None:
    """(expected, got) if this transformers is too old, or None."""
    is_older = [*map(int, minor(transformers).split("."))] < [*map(int, TRANSFORMERS[0].split("."))]
    return f"transformers must be {TRANSFORMERS[0]} or newer, got {transformers}" if is_older else None


def untested(transformers: str) -> str | None:
    """The versions that this release was tested with, where this one is none of them; else None."""
    if minor(transformers) in TRANSFORMERS:
        return None
    return f"was tested with transformers {' and '.join(TRANSFORMERS)}, got {transformers}"


def refused(torch: str, macos: tuple[int, ...]) -> str | None:
    """(expected, got) if this version of torch cannot run models on a Mac's GPU, or None."""
    if (oldest := MACOS_OF_TORCH.get(torch, MACOS)) > macos:
        return f"macOS must be {dotted(oldest)} or newer with torch {torch}, got {dotted(macos)}"
    first, how = FAILS.get(torch, ((1 << 30,), ""))
    if macos >= first:
        newer = next(version for version in TORCH if version not in FAILS)
        return f"torch must be {newer} or newer on macOS {dotted(macos)}, got {torch}: {how}"
    return None
