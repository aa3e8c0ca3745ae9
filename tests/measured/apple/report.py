"""The lines of the command's tables."""

from simulator.apple.facts import GPUS, LANES, Gpu
from simulator.apple.model import Measurement

from .cases import Row

KERNEL_WIDTH = 36
HEAD = (
    f"{'T':>4} {'matmul':7} {'':4} {'kernel':{KERNEL_WIDTH}} {'slots/MAC':>11} {'lanes':>5} {'regs':>4} "
    f"{'threads':>15} {'occ':>4} {'L1':>5} {'tg':>5} {'banks':>5} {'DRAM MB':>8}"
)


def head(gpus: list[Gpu]) -> str:
    return HEAD + "".join(f" | {gpu.name + ': bound (next), predicted us':38}" for gpu in gpus)


def line(tokens: int, side: str, row: Row, gpus: list[Gpu], of: list[Gpu]) -> str:
    """The row of one dispatch, with empty columns for GPUs of `gpus` that are not in `of`."""
    m = row.measurement
    name = m.kernel.split("<")[0] + (f" x {row.repeats}" if row.repeats > 1 else "")
    name += f" ±{100 * m.sampling_error:.0f} %" if m.sampling_error > 0.02 else ""
    cells = f"{tokens:4} {row.matmul:7} {side:4} {name[:KERNEL_WIDTH]:{KERNEL_WIDTH}} {_counts(m)}"
    cells += f" {m.dram_bytes * row.repeats / 1e6:7.1f}{' ' if m.fraction == 1 else '~'}"
    return cells + "".join(f" | {_bound(row, gpu) if gpu in of else '':38}" for gpu in gpus)


def _counts(m: Measurement) -> str:
    if m.work is None:
        slots, bytes_ = f"{m.slots(GPUS['M1']) * LANES / 1e6:8.2f} M ", f"{'':11}"
    else:
        slots = f"{m.slots_per_mac(GPUS['M1']):5.2f} {m.slots_per_mac(GPUS['M3']):5.2f}"
        bytes_ = f"{m.traffic.l1 / m.work.macs:5.2f} {m.traffic.threadgroup / m.work.macs:5.2f}"
    registers = f"{m.registers.registers:4.0f} {_threads(m):>15} {m.occupancy:4.2f}"
    return f"{slots:11} {m.active_lanes:5.2f} {registers} {bytes_} {m.bank_conflicts:5.2f}"


def _threads(m: Measurement) -> str:
    return f"{m.threads}/{m.declared_threads or '-'}/{m.allowed_threads}{' ' if m.fits else '!'}"


def _bound(row: Row, gpu: Gpu) -> str:
    bounds = row.measurement.bounds(gpu).__dict__
    (binding, most), (second, next_) = sorted(bounds.items(), key=lambda item: -item[1])[:2]
    return f"{binding:11} ({second} {next_ / most:.2f})".ljust(29) + f"{most * row.repeats:9.1f}"


def classes(row: Row, gpu: Gpu) -> str:
    groups = row.measurement.by_group(gpu)
    return " " * 17 + ", ".join(f"{name} {n:.3f}" for name, n in groups.items())


def comparison(tokens: int, sides: list[tuple[str, list[Row], list[Gpu]]], gpus: list[Gpu]) -> list[str]:
    """For each matmul of both sides, MLX's predicted time over ours."""
    lines = []
    own = next(rows for side, rows, _ in sides if side == "ours")
    for matmul in dict.fromkeys(row.matmul for row in own if row.measurement.work):
        ratios = []
        for gpu in gpus:
            theirs = [rows for side, rows, of in sides if side == "MLX" and gpu in of]
            if theirs:
                ratio = _predicted(theirs[0], matmul, gpu) / _predicted(own, matmul, gpu)
                ratios.append(f"{gpu.name} {ratio:.2f}")
        if ratios:
            lines.append(f"{tokens:4} {matmul:7} MLX / ours, predicted: {', '.join(ratios)}")
    return lines


def _predicted(rows: list[Row], matmul: str, gpu: Gpu) -> float:
    return sum(r.measurement.bounds(gpu).predicted_us * r.repeats for r in rows if r.matmul == matmul)
