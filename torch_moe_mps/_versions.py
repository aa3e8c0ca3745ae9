"""Limits of macOS, torch, PEFT and TRL for this package: one place for them, which setup.py reads, too."""

MACOS = (14, 0)  # of the wheel, its extensions and its compiled shaders
TORCH = ("2.13", "2.14", "2.15")  # a wheel has an extension for each
MACOS_OF_TORCH = {"2.15": (15, 0)}  # where torch itself needs a newer one
# {torch: the macOS from which on it fails, and how}
FAILS = {"2.13": ((27, 0), "its F.linear aborts with a transposed weight in bfloat16 (pytorch#197796)")}
PEFT = "0.21"  # whose functions transformers/adapters/peft.py wraps
TRL = "1.16"  # one of whose functions transformers/adapters/trl.py wraps
TENSOR_UNITS = (26, 2)  # mlx#3622


def dotted(version: tuple[int, ...]) -> str:
    """ "26.2", and "15" for (15, 0)."""
    return ".".join(map(str, version)).removesuffix(".0")


def refused(torch: str, macos: tuple[int, ...]) -> str | None:
    """Why a minor version of torch cannot run models on the GPU of a Mac, if it cannot: expected, and got."""
    if (oldest := MACOS_OF_TORCH.get(torch, MACOS)) > macos:
        return f"macOS must be {dotted(oldest)} or newer with torch {torch}, got {dotted(macos)}"
    first, how = FAILS.get(torch, ((1 << 30,), ""))
    if macos >= first:
        newer = next(version for version in TORCH if version not in FAILS)
        return f"torch must be {newer} or newer on macOS {dotted(macos)}, got {torch}: {how}"
    return None
