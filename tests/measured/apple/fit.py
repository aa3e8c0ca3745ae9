"""The model with the numbers of one GPU, as `torch-moe-mps check --probe` measures them there."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from simulator.apple.facts import (
    COSTS,
    DRAM_REACH,
    EXPERT_READS,
    GPUS,
    LANES,
    M1,
    M2,
    M3,
    M5,
    SCHEDULERS,
    START_US,
    Cost,
    Gpu,
)
from simulator.errors import SimulatorError

FAMILIES = {"1": M1, "2": M2, "3": M3, "4": M3, "5": M5}
MACS = 512  # of a product of 8 x 8 matrices
HOLDS = {  # what the kernels rely on, and what the page says then
    "matrix_layout": {"as_assumed": True},
    "bfloat_rounding": {"to_nearest_even": True, "nan_stays": True},
    "nan": {"isnan": True, "compares": False},
    "subnormals": {
        "single_operand": False,
        "single_result": False,
        "half_operand": True,
        "half_result": True,
    },
}


class Fitted(NamedTuple):
    """What the page measures: the GPU, the microseconds that a dependent dispatch takes, and costs of
    instructions; `lines` for people have what was assumed, and what does not hold."""

    gpu: Gpu
    start_us: float
    costs: dict[str, Cost]
    lines: list[str]


def fitted(file: str) -> Fitted:
    """Raises: SimulatorError for a file that is no such page."""
    try:
        page = json.loads(Path(file).read_text())
    except OSError as error:
        raise SimulatorError(f"--facts: {file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise SimulatorError(f"--facts: {file} is not JSON") from None
    try:
        return _fitted(page)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wanted = "the page of `torch-moe-mps check --probe`"
        raise SimulatorError(f"--facts: {file} must be {wanted}, got none with {error}") from None


def _fitted(page: dict[str, Any]) -> Fitted:
    about = page["machine"]
    name = about["gpu"].removeprefix("Apple ")
    generation = re.match(r"M(\d)", name)
    if generation is None or generation[1] not in FAMILIES:
        raise SimulatorError(f"--facts: the GPU must be one of M1 to M5, got {about['gpu']}")
    cores = int(about.get("cores") or about["cores_planned_for"])
    known = [gpu for gpu in GPUS.values() if gpu.name == name or gpu.name.startswith(f"{name} ")]
    assumed = min(known, key=lambda gpu: abs(gpu.cores - cores), default=None)
    largest = max(page["read_gbs"], key=float)
    reached = float(page["read_gbs"][largest])
    ghz = float(page["fma_tmacs"]) * 1e3 / (cores * SCHEDULERS * LANES)
    gpu = Gpu(f"{name}, measured", FAMILIES[generation[1]], cores, ghz, reached / DRAM_REACH)
    costs, lines = {}, [f"{about['gpu']}, macOS {about['macos']}: measured (assumed)"]
    compared = [("cores", cores, assumed and assumed.cores), ("GHz", ghz, assumed and assumed.ghz)]
    compared.append((f"GB/s of reads of {largest} MB", reached, assumed and assumed.dram_bytes_per_us / 1e3))
    for kind, operand in (("mma16", "half"), ("mma32", "float")):
        cycles = gpu.core_cycles_per_us * SCHEDULERS * MACS / (float(page["matrix_tmacs"][operand]) * 1e6)
        costs[kind] = Cost(cycles)
        compared.append((f"issue slots of {kind}", cycles, COSTS[kind].slots))
    start = float(page["dispatch_us"]["run"]["1"])
    lines += [
        f"  {what}: {value:.4g} ({was if was is None else f'{was:.4g}'})" for what, value, was in compared
    ]
    reads, (slowest, fastest) = page["expert_reads_gbs"], EXPERT_READS
    reach = float(reads["ranges"]) / float(reads["stream"])
    lines.append(f"  reads of experts, times those of a stream: {reach:.3g} ({slowest:g} to {fastest:g})")
    least, most = START_US
    lines.append(f"  us of a dependent dispatch: {start:.4g} ({least:.4g} to {most:.4g})")
    for part, expected in HOLDS.items():
        lines += [
            f"  NOT as assumed: {part} has {key} {page[part].get(key)}"
            for key, value in expected.items()
            if page[part].get(key) != value
        ]
    return Fitted(gpu, start, costs, lines)
