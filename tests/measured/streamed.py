"""Tokens/s of models whose experts are read from a disk, on the simulator's timeline.

`PYTHONPATH=tests python -m measured.streamed` prints the tables. A layer is a dispatch for what comes before
its experts and one for these, each as long as its bytes and starts take; the host encodes a token ahead.
Beside it stands a host that drains the queue at each layer: it waits for the ids, reads what is missing, and
encodes the experts and what comes behind them.

Prompts stream whole layers. Their time is a sum over layers: of the disk, and of the GPU by the cost model.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import simulator
import torch
from simulator import shaderlib
from simulator.apple.facts import GPUS
from support.experts_on_disk import NumberedPool

from torch_moe_mps._faults import Mark
from torch_moe_mps.ops._samples import packet, sample_arguments

LAUNCHES, START = 6, 5e-6  # of a layer, and seconds of the GPU until one starts
COMMAND = 20e-6  # seconds of the host to encode a dispatch, a signal or a wait of a captured token
LAYER = 180e-6  # and a layer module by module: 36 operators (tests/models/capture/test_host_calls.py)
LOOK_UP = 30e-6  # seconds of the host for the slots of a layer, where it drains the queue
WAIT = 150e-6  # seconds of the host until it knows that a command buffer is complete
TOKENS = 3  # after the first
DISK = simulator.Ssd(latency=100e-6, rate=7e9, depth=8)
PIECE = 2 << 20  # bytes of a read ahead
COPIES = 40e9  # bytes a second that a thread copies from slots. Assumed
BUSY = 0.5  # share of the time that a GPU works, below which its clock falls


@dataclass(frozen=True)
class Waits:
    """What a GPU loses where it waits for the host.

    Attributes:
        layer: seconds that the bound has for each layer.
        event: seconds from a signal to the one who waits for it, of two for each request.
        wakes: seconds until a thread that reads is awake.
        clock: of a GPU that works for less than BUSY of a token, beside that of a busy one.
        beat: seconds of the work that a second queue gives a GPU which waits, so often that its clock stays;
            0 for no such queue.
    """

    layer: float
    event: float
    wakes: float
    clock: float
    beat: float = 0.0


# The round trip of an event that mlx#1773 has measured; and a layer as others have it in all, on a GPU whose
# clock falls to a third.
EVENTS = Waits(layer=0.15e-3, event=75e-6, wakes=50e-6, clock=1.0)
LAYERS = Waits(layer=0.8e-3, event=350e-6, wakes=100e-6, clock=1 / 3)
# That GPU kept awake, by a product of 256 x 256 each half millisecond: experts wait for a whole one.
AWAKE = replace(LAYERS, beat=10e-6)


@dataclass(frozen=True)
class Case:
    """A model on a Mac.

    Attributes:
        nbytes, expert: bytes of a token's weights, and of one expert.
        hits: share of a token's experts that are in memory, by the bytes that `fit` has a token read.
    """

    model: str
    mac: str
    gpu: str
    layers: int
    chosen: int
    nbytes: float
    expert: int
    hits: float

    @property
    def rate(self) -> float:
        """Bytes a second that the GPU reads, of which it reaches 75 %."""
        return 0.75 * GPUS[self.gpu].gbs * 1e9

    @property
    def read(self) -> float:
        """Bytes of the disk for a token."""
        return self.layers * self.chosen * (1 - self.hits) * self.expert

    def bound(self, waits: Waits) -> float:
        """Tokens/s without overlap, with what the GPU loses in each layer."""
        return 1 / (self.read / DISK.rate + self.nbytes / self.rate + waits.layer * self.layers)

    def seconds(self, of_experts: bool) -> float:
        """Seconds of the GPU for the experts of a layer, or for what comes before them."""
        experts = self.layers * self.chosen * self.expert
        nbytes = experts if of_experts else self.nbytes - experts
        return nbytes / self.layers / self.rate + LAUNCHES / 2 * START


CASES = (
    Case("Qwen3-235B-A22B", "64 GB M4 Max", "M4 Max", 94, 8, 12.4e9, 10_600_000, 0.84),
    Case("gpt-oss-120b", "32 GB M4", "M4", 36, 4, 4.0e9, 13_200_000, 0.77),
    Case("gpt-oss-120b", "32 GB M2 Max", "M2 Max", 36, 4, 4.0e9, 13_200_000, 0.77),
    Case("gpt-oss-120b", "48 GB M4 Pro", "M4 Pro", 36, 4, 4.0e9, 13_200_000, 0.92),
    Case("gpt-oss-120b", "48 GB M4 Max", "M4 Max", 36, 4, 4.0e9, 13_200_000, 0.92),
)
BEFORE, EXPERTS = "rms_norm", "moe_weighted_reduce"


class Streamed:
    """Runs tokens of a case on the timeline."""

    def __init__(self, case: Case, waits: Waits) -> None:
        self.case, self.waits = case, waits
        self._calls = {name: sample_arguments(name, "mps", torch.float32) for name in (BEFORE, EXPERTS)}
        self._pool = NumberedPool("a layer", slots=case.chosen, experts=2 * case.chosen)
        self._one_at_a_time = threading.Lock()
        self._misses, ids = [], []
        missing, held = 0.0, list(range(2 * case.chosen))  # the experts in slots, and the others
        for _ in range(case.layers * (TOKENS + 1)):
            missing += case.chosen * (1 - case.hits)
            count, missing = int(missing), missing % 1
            held = held[count:] + held[:count]
            self._misses.append(count)
            ids.append(held[: case.chosen])
        self._ids = torch.tensor(ids, dtype=torch.int32).to("mps")
        self._pool.slots(torch.arange(case.chosen))
        self._pool.before = self._read_one

    def __call__(self, dispatch: shaderlib.Dispatch) -> float:
        of_experts = dispatch.kernel.contents.name.decode().startswith(EXPERTS)
        shaderlib.execute(dispatch)
        beat = self.waits.beat if of_experts else 0.0
        return self._at_its_clock(self.case.seconds(of_experts)) + beat

    def _at_its_clock(self, seconds: float) -> float:
        """Seconds of a dispatch, by the share of the token before for which a busy GPU would have worked."""
        if self._dispatches and self._dispatches % (2 * self.case.layers) == 0:
            now = self.clock.busy + self.clock.idle + self.clock.waited
            self._is_slow = not self.waits.beat and self._worked < BUSY * (now - self._token_began)
            self._worked, self._token_began = 0.0, now
        self._dispatches += 1
        self._worked += seconds
        return seconds / self.waits.clock if self._is_slow else seconds

    @contextmanager
    def timeline(self) -> Iterator[None]:
        # Waits has a beat of its own: real ones come when the machine's clock says, and differ in each run.
        torch.ops.moe_mps._keep_warm(0.0, 1)
        self._dispatches, self._worked, self._token_began, self._is_slow = 0, 0.0, 0.0, False
        self._reads = (count for count in self._misses for _ in range(count))
        timeline = simulator.timeline(self, COMMAND, an_event=self.waits.event, an_end=WAIT)
        with timeline as self.clock, simulator.reads(NumberedPool.read_of):
            yield

    def _read_one(self) -> None:
        with self._one_at_a_time:
            count = next(self._reads)
            self.clock.answer((self.waits.wakes + self._seconds(count)) / count)

    def _seconds(self, experts: int) -> float:
        return DISK.seconds([self.case.expert] * experts)

    def _encode(self, name: str) -> None:
        packet(name)(**self._calls[name])

    def tokens_per_second(self, drains: bool) -> float:
        with self.timeline():
            began, last, steps = 0.0, None, iter(range(len(self._misses)))
            for token in range(TOKENS + 1):
                for _ in range(self.case.layers):
                    step = next(steps)
                    self._encode(BEFORE)
                    self._drain(step) if drains else self._ask(step)
                    self._encode(EXPERTS)
                mark, last = last, Mark(torch.device("mps"), commits=True)
                for each in (mark, last) if token in (0, TOKENS) else (mark,):
                    if each is not None:
                        each.wait()
                if token == 0:
                    began = self.clock.now
            return TOKENS / (self.clock.now - began)

    def _ask(self, step: int) -> None:
        torch.ops.moe_mps._expert_slots(self._ids[step], self._pool.number)

    def _drain(self, step: int) -> None:
        Mark(torch.device("mps"), commits=True).wait()
        read = self._seconds(self._misses[step])
        self.clock.work(LOOK_UP + read + LAYER - 2 * COMMAND)


def reached(case: Case, waits: Waits, drains: bool = False) -> float:
    """Tokens/s, as a share of the bound."""
    return Streamed(case, waits).tokens_per_second(drains) / case.bound(waits)


@dataclass(frozen=True)
class Lookahead:
    """Experts of the next layer that are read while the GPU works: those that its router names too early.

    Attributes:
        recall: share of the missing experts that it names.
        in_vain: experts that it names, that are missing and that nobody chooses, for each missing one.
    """

    recall: float
    in_vain: float


# {share of hits: what a router names}. The first is that of a model of 8 layers with 32 experts each, which
# was trained for 200 s of a processor: its routers name 85 % of the next layer's experts
# (`scripts/bench/bench_lookahead.py`). Others report 78 % of GLM-5.2; the rest is scaled by that.
SMALL = {0.77: Lookahead(0.78, 0.38), 0.84: Lookahead(0.78, 0.38), 0.92: Lookahead(0.77, 0.58)}
REPORTED = {0.77: Lookahead(0.7, 0.56), 0.84: Lookahead(0.7, 0.56), 0.92: Lookahead(0.7, 0.85)}


def seconds_ahead(case: Case, waits: Waits, ahead: Lookahead, tokens: int = 20) -> float:
    """Seconds of a token where the disk reads ahead while it has nothing else to do.

    A read ahead is of PIECE bytes, one at a time; what is asked for waits for the one that was begun. An
    expert of which a part was read is read from there on. The clock falls as in `Streamed`.
    """
    draws, missing, counts = random.Random(0), 0.0, []
    for _ in range(case.layers * tokens + 1):
        missing += case.chosen * (1 - case.hits)
        counts.append(int(missing))
        missing %= 1
    gpu, begun, idle_from, named = 0.0, 0.0, 0.0, list[list[float]]()  # [is chosen, bytes that are left]
    worked, is_slow = case.seconds(False) + case.seconds(True), False
    for step, count in enumerate(counts[:-1]):
        if step % case.layers == 0 and step:
            is_slow = not waits.beat and worked * case.layers < BUSY * (gpu - begun)
            begun = gpu
        clock = waits.clock if is_slow else 1.0
        asked = (gpu := gpu + case.seconds(False) / clock) + waits.event
        now = idle_from
        for expert in named:
            while expert[1] > 0 and now < asked:
                size = min(PIECE, expert[1])
                now += size / DISK.rate + DISK.latency
                expert[1] -= size
        chosen = [left for is_chosen, left in named if is_chosen]
        left = [each for each in chosen if each > 0] + [float(case.expert)] * (count - len(chosen))
        late = max(0.0, now - asked) if named else 0.0
        done = asked + (waits.wakes + late + DISK.latency + sum(left) / DISK.rate if left else 0.0)
        following = counts[step + 1]
        vain = following * ahead.in_vain
        named = [[True, case.expert] for _ in range(following) if draws.random() < ahead.recall]
        named += [[False, case.expert] for _ in range(int(vain) + (draws.random() < vain % 1))]
        draws.shuffle(named)
        idle_from = max(done, now)
        gpu = done + waits.event + case.seconds(True) / clock + waits.beat
    return gpu / tokens


def gain_ahead(case: Case, waits: Waits, ahead: Lookahead) -> float:
    """Tokens/s with reads ahead, beside those without any, minus 1."""
    return seconds_ahead(case, waits, Lookahead(0.0, 0.0)) / seconds_ahead(case, waits, ahead) - 1


def table_of_lookahead() -> str:
    """Gains by a router that names 85 % of the experts, and by one that names 78 %."""
    titles = ["model", "Mac", "0.15 ms a layer", "0.8 ms a layer", "kept awake"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for case in CASES:
        pairs = (
            [f"{gain_ahead(case, waits, named[case.hits]):+.0%}" for named in (SMALL, REPORTED)]
            for waits in (EVENTS, LAYERS, AWAKE)
        )
        lines.append(f"| {case.model} | {case.mac} | {' | '.join(map(', '.join, pairs))} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Prompt:
    """A prompt of 2,048 tokens by a model on a Mac, which needs all experts of each layer.

    Attributes:
        experts, expert: experts of a layer, and bytes of one.
        resident: share of the experts that slots or the page cache have.
        before, matmuls: seconds of the GPU for what comes before the experts of a layer, and for these, as
            `measured.apple.cases.ours` and the rows of `measured.apple.goals` predict them.
    """

    model: str
    mac: str
    layers: int
    experts: int
    expert: int
    resident: float
    before: float
    matmuls: float

    def seconds(self, of_layers: bool) -> float:
        """Seconds to the first token, by whole layers or expert by expert.

        By layers the next one is read once what comes before this one's experts is computed: its memory is
        that of the layer before. Expert by expert the disk never stops but for memory of as many experts.
        """
        count = 1 if of_layers else self.experts
        nbytes = self.experts * self.expert / count
        copied, read = self.resident * nbytes / COPIES, (1 - self.resident) * nbytes / DISK.rate
        disk, gpu, computed, ends = 0.0, 0.0, self.before, [0.0] * 2 * count
        for _ in range(self.layers):
            if of_layers:
                disk = max(disk, computed)
            gpu += self.before
            for _ in range(count):
                disk = max(disk, ends[-2 * count]) + max(copied, read)
                gpu = max(gpu, disk) + self.matmuls / count
                ends.append(gpu)
            computed = gpu - self.matmuls
        return gpu


PROMPTS = (
    Prompt("Qwen3-235B-A22B", "64 GB M4 Max", 94, 128, 10_600_000, 0.31, 0.0301, 0.0509),
    Prompt("gpt-oss-120b", "32 GB M4", 36, 128, 13_200_000, 0.23, 0.0539, 0.1562),
    Prompt("gpt-oss-120b", "48 GB M4 Max", 36, 128, 13_200_000, 0.48, 0.0125, 0.0364),
    Prompt("Step-3.7", "128 GB M4 Max", 42, 288, 8_850_000, 0.83, 0.0315, 0.0449),
)


def table_of_prompts() -> str:
    lines = ["| model | Mac | a prompt of 2,048 tokens by layers, s | expert by expert |", "|---" * 4 + "|"]
    for prompt in PROMPTS:
        seconds = " | ".join(f"{prompt.seconds(of_layers):.2f}" for of_layers in (True, False))
        lines.append(f"| {prompt.model} | {prompt.mac} | {seconds} |")
    return "\n".join(lines)


def table() -> str:
    titles = [
        "model",
        "Mac",
        "bound, 0.15 ms a layer",
        "reached",
        "queue drained",
        "bound, 0.8 ms",
        "reached",
        "kept awake",
    ]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for case in CASES:
        row = [case.model, case.mac, f"{case.bound(EVENTS):.1f}"]
        row += [f"{reached(case, EVENTS, drains):.2f}" for drains in (False, True)]
        row += [f"{case.bound(LAYERS):.1f}", *(f"{reached(case, each):.2f}" for each in (LAYERS, AWAKE))]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    from support.simulated import install

    install()
    print(table(), table_of_lookahead(), table_of_prompts(), sep="\n\n")
