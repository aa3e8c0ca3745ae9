"""`python -m torch_moe_mps.disk.rates FILE`: GB/s of the disk, in reads as of experts, for `report`."""

import fcntl
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .pool import PIECE

DEPTHS = (1, 2, 4, 8, 16, 32)
_NOCACHE: int | None = getattr(fcntl, "F_NOCACHE", None)  # macOS has it


def rates(read: int = 512 << 20) -> dict[str, Any]:
    """{depth: GB/s} of a new file, with the page cache and, on macOS, without.

    Args:
        read: bytes at each depth; no byte is read twice.
    """
    ways = (False,) if _NOCACHE is None else (False, True)
    count = read // PIECE * len(DEPTHS) * len(ways)
    if count * PIECE > shutil.disk_usage(tempfile.gettempdir()).free // 2:
        return {"error": "the disk has no room"}
    places, result = random.Random(0).sample(range(count), count), dict[str, Any]()
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        _open_as(file.fileno(), without_cache=True)
        for _ in range(count):
            file.write(os.urandom(PIECE))
        os.fsync(file.fileno())
        for without_cache in ways:
            _open_as(file.fileno(), without_cache)
            rows = result["F_NOCACHE" if without_cache else "page cache"] = {}
            for depth in DEPTHS:
                own, places = places[: read // PIECE], places[read // PIECE :]
                rows[depth] = round(_rate(file.fileno(), own, depth) / 1e9, 2)
    return result


def _open_as(file: int, without_cache: bool) -> None:
    if _NOCACHE is not None:
        fcntl.fcntl(file, _NOCACHE, int(without_cache))


def _rate(file: int, places: Sequence[int], depth: int) -> float:
    """Bytes a second of reads, `depth` of them at once."""

    def read(own: Sequence[int]) -> None:
        memory = bytearray(PIECE)
        for place in own:
            os.preadv(file, [memory], place * PIECE)

    with ThreadPoolExecutor(depth) as threads:
        began = time.perf_counter()
        [*threads.map(read, [places[first::depth] for first in range(depth)])]
        return len(places) * PIECE / (time.perf_counter() - began)


if __name__ == "__main__":
    text = json.dumps(rates(), indent=1)
    Path(sys.argv[1]).write_text(text + "\n")
    print(text)
