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

from ..selfcheck.machine import NO_CACHE, remember_faster
from .file import cache
from .pool import DEPTH, PIECE

DEPTHS = (1, 2, 4, 8, 16, 32)
PAGE_CACHE, F_NOCACHE = "page cache", "F_NOCACHE"
CLEARLY = 1.1  # the cache holds experts that have left their slots. Untuned


def rates(read: int = 512 << 20) -> dict[str, Any]:
    """{depth: GB/s} of a new file, with the page cache and, on macOS, without: the faster way is remembered.

    Args:
        read: bytes at each depth; no byte is read twice.
    """
    ways = {PAGE_CACHE: True, F_NOCACHE: False} if hasattr(fcntl, F_NOCACHE) else {PAGE_CACHE: True}
    count = read // PIECE * len(DEPTHS) * len(ways)
    if count * PIECE > shutil.disk_usage(tempfile.gettempdir()).free // 2:
        return {"error": "the disk has no room"}
    places, result = random.Random(0).sample(range(count), count), dict[str, Any]()
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        cache(file.fileno(), False)
        for _ in range(count):
            file.write(os.urandom(PIECE))
        os.fsync(file.fileno())
        for way, is_cached in ways.items():
            cache(file.fileno(), is_cached)
            rows = result[way] = {}
            for depth in DEPTHS:
                chunk, places = places[: read // PIECE], places[read // PIECE :]
                rows[depth] = round(_rate(file.fileno(), chunk, depth) / 1e9, 2)
    if F_NOCACHE in ways:
        remember_faster(NO_CACHE, result[F_NOCACHE][DEPTH] > CLEARLY * result[PAGE_CACHE][DEPTH])
    return result


def _rate(file: int, places: Sequence[int], depth: int) -> float:
    """Bytes a second of reads, `depth` of them at once."""

    def read(chunk: Sequence[int]) -> None:
        memory = bytearray(PIECE)
        for place in chunk:
            os.preadv(file, [memory], place * PIECE)

    with ThreadPoolExecutor(depth) as threads:
        began = time.perf_counter()
        [*threads.map(read, [places[first::depth] for first in range(depth)])]
        return len(places) * PIECE / (time.perf_counter() - began)


if __name__ == "__main__":
    text = json.dumps(rates(), indent=1)
    Path(sys.argv[1]).write_text(text + "\n")
    print(text)
