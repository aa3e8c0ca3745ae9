"""Prometheus metrics of the server."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..._faults import gpu_busy
from ...models.programs import reads_of
from ..engine.memory import memory_in_use
from .answers import Answers
from .served import Served


class Metrics:
    """Counts requests and tokens; other metrics are read from the device thread.

    Attributes:
        requests: counter of requests by path and HTTP status.
    """

    def __init__(self, served: Served):
        self._served, self._registry = served, CollectorRegistry()
        self.requests = Counter(
            "moe_mps_requests", "requests by path and status", ["path", "status"], registry=self._registry
        )
        self._generated = Counter("moe_mps_generated_tokens", "tokens of answers", registry=self._registry)
        self._registry.register(self)

    def ended(self, answers: Answers) -> None:
        """Adds the tokens of finished answers."""
        self._generated.inc(answers.tokens)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields metrics that are read from the device thread."""
        generator = self._served.generator
        prompts, nbytes = generator.prompts_held()
        counts, memory = generator.counts, generator.memory
        yield _counter("prompt_tokens", "tokens of prompts that were computed", counts.computed)
        yield _counter("cached_tokens", "tokens that the prefix cache had", counts.cached)
        yield _counter("accepted_draft_tokens", "draft tokens that were accepted", counts.accepted)
        yield _counter("rejected_draft_tokens", "draft tokens that were rejected", counts.rejected)
        yield _counter("gpu_busy_seconds", "time that the GPU has worked, by its own clock", gpu_busy())
        yield _gauge("sequences_active", "sequences that have begun", counts.active)
        yield _gauge("sequences_most", "sequences at once, at most", generator.max_sequences)
        yield _gauge("sequences_waiting", "sequences that wait", counts.waiting)
        yield _gauge("cached_prefixes", "prefixes in the prefix cache", prompts)
        yield _gauge("prefix_cache_bytes", "memory of the prefix cache", nbytes)
        yield _gauge(
            "memory_bytes", "memory in use by the model and on its device", memory_in_use(self._served.model)
        )
        if memory is not None:
            yield _gauge("memory_budget_bytes", "memory that all may take together", memory.total)
            yield _gauge("memory_room_bytes", "memory for answers and the prefix cache", memory.free)
            yield _gauge("memory_level", "1 where the system is short of memory, 2 without", memory.level)
        for what, counted in reads_of(self._served.model).items():
            yield _counter(f"{what}_hits", f"{what} that were in memory", counted.hits)
            yield _counter(f"{what}_misses", f"{what} that were read from the disk", counted.misses)
            yield _counter(f"{what}_layers", f"layers whose {what} were streamed", counted.layers)
            yield _counter(
                f"{what}_read_bytes", f"bytes of {what} that were read from the disk", counted.bytes_read
            )
            yield _counter(f"{what}_seconds", f"time that steps waited for {what}", counted.seconds)
        if (disk := generator.disk) is not None:
            yield _counter("disk_hits", "prompts that were read from the disk", disk.hits)
            yield _counter("disk_tokens", "tokens of prompts that were read from the disk", disk.tokens)
            yield _gauge("disk_bytes", "bytes of prompts on the disk", disk.files.nbytes)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"moe_mps_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"moe_mps_{name}", text, value=value)
