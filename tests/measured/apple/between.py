"""Idle time of a GPU between two tokens of the engine.

The order is the engine's: a step is encoded when the host reads a token, and the read waits for that token's
step alone (tests/serving/test_timeline.py). The host's times are assumed, the GPU's are those of `tokens`. A
step is taken to be encoded whole before its first command buffer is committed: idle times are at most these.
"""

from collections.abc import Iterator

from simulator.apple.facts import START_US, Gpu

from .tokens import TOKENS

HOSTS_MS = (0.3, 0.6, 1.2)
SEQUENCES = (1, 8)
_MOST_TOKENS = 64
_AHEAD = 1  # steps


def idle_ms(host_ms: float, gpu_ms: float, ahead: int) -> float:
    """Idle time of the GPU for each token, where so many steps are encoded before the host reads one."""
    now, free, idle = 0.0, 0.0, 0.0
    ends = list[float]()
    for token in range(_MOST_TOKENS):
        while len(ends) <= token + ahead:
            now += host_ms
            begins = max(now, free)
            idle += begins - free if ends else 0.0
            free = begins + gpu_ms
            ends.append(free)
        now = max(now, ends[token])
    return idle / (len(ends) - 1)


def table(gpus: list[Gpu]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    hosts = " | ".join(f"host {host_ms:g} ms" for host_ms in HOSTS_MS)
    yield f"| predicted | chip | sequences | GPU, ms | {hosts} |"
    yield f"| --- | --- | ---: | ---: |{' ---: |' * len(HOSTS_MS)}"
    for token in TOKENS:
        for gpu in gpus:
            for sequences in SEQUENCES:
                step = token if sequences == 1 else token.verifying(sequences)
                gpu_ms = step.ms(gpu, START_US[0], 1.0)
                cells = []
                for host_ms in HOSTS_MS:
                    before, after = (idle_ms(host_ms, gpu_ms, n) for n in (0, _AHEAD))
                    gain = (gpu_ms + before) / (gpu_ms + after)
                    cells.append(f"{before:.2f}, {after:.2f} ({gain:.2f})")
                line = f"| {token.model} | {gpu.name} | {sequences} | {gpu_ms:.1f}"
                yield f"{line} | {' | '.join(cells)} |"
