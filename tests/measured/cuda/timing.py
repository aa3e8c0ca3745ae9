"""Times on the GPU."""

from collections.abc import Callable
from itertools import cycle, islice

import torch

COLD_BYTES = 192 << 20  # more than three times the largest L2 of the GPUs in question
GRAPH_MICROSECONDS = 4000.0
REPEATS = 7


def microseconds(calls: list[Callable[[], None]]) -> float:
    """The median time of one call. They are taken in turn inside a CUDA graph, which is replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        once = elapsed(lambda: [call() for call in calls], stream) / len(calls)
        rounds = max(1, min(20, round(GRAPH_MICROSECONDS / once / len(calls))))
        count = len(calls) * rounds
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for call in islice(cycle(calls), count):
                call()
        finally:
            graph.capture_end()
        graph.replay()
        times = sorted(elapsed(graph.replay, stream) for _ in range(REPEATS))
    torch.cuda.synchronize()
    return times[REPEATS // 2] / count


def elapsed(run: Callable[[], object], stream: torch.cuda.Stream) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_bandwidth() -> float:
    """GB/s of a copy within the device, counting what is read and what is written."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    stream = torch.cuda.current_stream()
    target.copy_(source)
    times = sorted(elapsed(lambda: target.copy_(source), stream) for _ in range(REPEATS))
    return 2 * source.numel() / times[REPEATS // 2] / 1e3
