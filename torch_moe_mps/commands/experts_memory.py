"""`python -m torch_moe_mps.commands.experts_memory MODEL FILE`: `bench` at three sizes of that memory.

On a Mac the middle one is also measured without keep-warm.

`report` runs it: with too many slots the page cache is short of memory, and only a Mac can tell how many are.
"""

import json
import sys
import tempfile
from typing import Any

from .._faults import free
from ..checkpoints.on_disk import memories_to_compare
from ..checkpoints.source import Source
from . import main
from .arguments import parser
from .results import write_json
from .sources import folder_of, loading_options, usable_device

_FEW = ("--depth", "0", "--repeats", "2")


def compare(model: str, file: str, *how: str) -> int:
    """Prints tokens/s and the share of hits by each size, and writes them with all that `bench` measures.

    Args:
        how: options of `bench`.

    Returns: the exit code of the first bench that failed, or 0.
    """
    options = parser().parse_args(["bench", model, *_FEW, *how])
    device = usable_device(options.device)
    source = Source(folder_of(model), {**loading_options(options), "device_map": device})
    sizes, rows = memories_to_compare(source, None), list[Any]()
    if not sizes:
        print("nothing to compare: no experts, or none that can be read from the disk without a file of them")
    usual = sizes[len(sizes) // 2 : len(sizes) // 2 + 1] if device == "mps" else []
    for size, warm in [*((size, True) for size in sizes), *((size, False) for size in usual)]:
        free(device)
        cold = () if warm else ("--no-keep-warm",)
        with tempfile.NamedTemporaryFile("r") as results:
            asked = ("bench", model, "--experts-memory", str(size), "--json", results.name)
            if code := main([*asked, *_FEW, *how, *cold]):
                return code
            measured = json.load(results)
        rows.append({"experts_memory": size, "keep_warm": warm, **_summary(measured), "bench": measured})
        write_json(file, {"sizes": rows})
    print("\n| experts' memory, GB | kept warm | tokens/s | hits |\n| ---: | --- | ---: | ---: |")
    for row in rows:
        cells = f"{row['experts_memory'] / 1e9:.3g} | {'yes' if row['keep_warm'] else 'no'}"
        print(f"| {cells} | {row['tokens_per_second']:.2f} | {row['hits']:.1%} |")
    return 0


def _summary(measured: dict[str, Any]) -> dict[str, float]:
    """Greedy tokens/s, and the share of a token's experts that were in slots."""
    rate = next(row["rate"] for row in measured["rows"] if row["test"].startswith("tg"))
    reads = measured.get("experts_on_disk", {"hits": 1, "misses": 0})
    return {"tokens_per_second": rate, "hits": reads["hits"] / max(1, reads["hits"] + reads["misses"])}


if __name__ == "__main__":
    raise SystemExit(compare(*sys.argv[1:]))
