"""The folder of the prefix cache, as a command's options name it."""

import argparse
import shutil
import sys
from pathlib import Path

from ..selfcheck.machine import cache_folder
from ..serving.prefix_cache.disk import Disk

_DISK = 16.0  # GB, by default


def disk_of(options: argparse.Namespace) -> Disk | None:
    """Disk tier of the prefix cache, or None; logs its folder, or why there is none."""
    if options.prompt_disk == 0 or (options.prompt_folder is None and options.command != "serve"):
        return None
    try:
        folder = Path(options.prompt_folder or cache_folder() / "prompts")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        gigabytes = options.prompt_disk or min(_DISK, shutil.disk_usage(folder).free / 4e9)
        disk = Disk(folder, int(gigabytes * 1e9), int(options.prompt_writes * 1e9))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"torch-moe-mps: no prefixes are cached on the disk: {error}", file=sys.stderr)
        return None
    line = f"The prefix cache is in {folder}, {disk.files.nbytes / 1e9:.1f} of at most {gigabytes:.1f} GB"
    print(f"{line}; --prompt-disk 0 disables it", file=sys.stderr)
    return disk
