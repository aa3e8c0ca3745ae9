"""Tokens/s of models whose experts are read from a disk, on the simulator's timeline.

`PYTHONPATH=tests python -m measured.streamed` prints the table. A layer is a dispatch for what comes before
its experts and one for these, each as long as its bytes and starts take; the host encodes a token ahead.
Beside it stands a host that drains the queue at each layer: it waits for the ids, reads what is missing, and
encodes the experts and what comes behind them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import simulator
import torch
from simulator import shaderlib
from simulator.apple.facts import GPUS

from torch_moe_mps._faults import Mark
from torch_moe_mps.ops._samples import packet, sample_arguments
from torch_moe_mps.ops.families.slots import register_pool

LAUNCHES, START = 6, 5e-6  # of a layer, and seconds of the GPU until one starts
COMMAND = 20e-6  # seconds of the host to encode a dispatch, a signal or a wait of a captured token
LAYER = 180e-6  # and a layer module by module: 36 operators (tests/transformers/capture/test_host_calls.py)
EVENT = 50e-6  # seconds from a signal to the one who waits for it
LOOK_UP = 30e-6  # seconds of the host for the slots of a layer
WAIT = 150e-6  # seconds of the host until it knows that a command buffer is complete
TOKENS = 3  # after the first
DISK = simulator.Ssd(latency=100e-6, rate=7e9, depth=8)


@dataclass(frozen=True)
class Case:
    """A model on a Mac.

    Attributes:
        nbytes, expert: bytes of a token's weights, and of one expert.
        hits: share of a token's experts that are in memory.
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

    @property
    def bound(self) -> float:
        """Tokens/s without overlap, with 0.15 ms for each layer."""
        return 1 / (self.read / DISK.rate + self.nbytes / self.rate + 0.15e-3 * self.layers)

    def seconds(self, of_experts: bool) -> float:
        """Seconds of the GPU for the experts of a layer, or for what comes before them."""
        experts = self.layers * self.chosen * self.expert
        nbytes = experts if of_experts else self.nbytes - experts
        return nbytes / self.layers / self.rate + LAUNCHES / 2 * START


CASES = (
    Case("Qwen3-235B-A22B", "64 GB M4 Max", "M4 Max", 94, 8, 12.4e9, 10_600_000, 0.84),
    Case("gpt-oss-120b", "32 GB M4", "M4", 36, 4, 4.0e9, 13_200_000, 0.85),
    Case("gpt-oss-120b", "32 GB M2 Max", "M2 Max", 36, 4, 4.0e9, 13_200_000, 0.85),
    Case("gpt-oss-120b", "48 GB M4 Pro", "M4 Pro", 36, 4, 4.0e9, 13_200_000, 0.93),
    Case("gpt-oss-120b", "48 GB M4 Max", "M4 Max", 36, 4, 4.0e9, 13_200_000, 0.93),
)
BEFORE, EXPERTS = "rms_norm", "moe_weighted_reduce"


class Streamed:
    """Runs tokens of a case on the timeline."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._calls = {name: sample_arguments(name, "mps", torch.float32) for name in (BEFORE, EXPERTS)}
        self._ids = torch.arange(case.chosen, dtype=torch.int32, device="mps")
        self._pool = register_pool(self, "a layer")

    def __call__(self, dispatch: shaderlib.Dispatch) -> float:
        of_experts = dispatch.kernel.contents.name.decode().startswith(EXPERTS)
        shaderlib.execute(dispatch)
        return self.case.seconds(of_experts)

    @contextmanager
    def timeline(self) -> Iterator[None]:
        with simulator.timeline(self, COMMAND, an_event=EVENT) as self.clock:
            yield

    def slots(self, ids: torch.Tensor) -> torch.Tensor:
        self.clock.answer(LOOK_UP + self._read(len(ids)))
        return ids

    def _read(self, experts: int) -> float:
        self._missing += experts * (1 - self.case.hits)
        read, self._missing = divmod(self._missing, 1)
        return DISK.seconds([self.case.expert] * int(read))

    def _encode(self, name: str) -> None:
        packet(name)(**self._calls[name])

    def tokens_per_second(self, drains: bool) -> float:
        self._missing = 0.0
        with self.timeline():
            began, last = 0.0, None
            for token in range(TOKENS + 1):
                for _ in range(self.case.layers):
                    self._encode(BEFORE)
                    self._drain() if drains else torch.ops.moe_mps._expert_slots(self._ids, self._pool)
                    self._encode(EXPERTS)
                mark, last = last, Mark(torch.device("mps"), commits=True)
                for each in (mark, last) if token in (0, TOKENS) else (mark,):
                    if each is not None:
                        each.wait()
                if token == 0:
                    began = self.clock.now
            return TOKENS / (self.clock.now - began)

    def _drain(self) -> None:
        Mark(torch.device("mps"), commits=True).wait()
        self.clock.work(WAIT + LOOK_UP + self._read(self.case.chosen) + LAYER - 2 * COMMAND)


def table() -> str:
    lines = ["| model | Mac | bound | events | queue drained |", "|---|---|---|---|---|"]
    for case in CASES:
        streamed = Streamed(case)
        events, drained = (streamed.tokens_per_second(drains) for drains in (False, True))
        shares = [f"{each:.1f} ({each / case.bound:.2f})" for each in (events, drained)]
        lines.append("| " + " | ".join([case.model, case.mac, f"{case.bound:.1f}", *shares]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    from support.simulated import install

    install()
    print(table())
