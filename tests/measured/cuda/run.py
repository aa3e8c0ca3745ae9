"""The cases of a plan on a machine: inputs, checks, times."""

import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

from simulator.cuda.compile import Job, job_of
from simulator.cuda.plan import Plan, Recording

from ..cases.experts import Case, make_case
from ..cases.values import Shapes, Values
from . import peers_mlx, programs, timing
from .programs import Program, Tensors
from .replay import Replay

MAX_SETS = 128


@dataclass
class Row:
    """One line of the table: a case or a part of it, beside one peer. `wrong` is empty for a right result."""

    case: str
    group: str
    part: str
    wrong: str = ""
    ours_us: float | None = None
    bytes: int = 0
    peer: str = ""
    peer_us: float | None = None
    peer_wrong: str = ""

    @property
    def ratio(self) -> float | None:
        return self.peer_us / self.ours_us if self.peer_us and self.ours_us else None

    @property
    def gigabytes_per_second(self) -> float | None:
        return self.bytes / self.ours_us / 1e3 if self.ours_us else None

    def as_dict(self) -> dict:
        return asdict(self) | {"ratio": self.ratio, "gigabytes_per_second": self.gigabytes_per_second}


def case_of(recording: Recording) -> Case:
    return make_case(recording.family, recording.arguments)


def uses_tf32(case: Case) -> bool:
    """Float matrices of 16-bit data are multiplied in one product; of float32, and of numbers that a kernel
    computed from its data, in three.
    """
    return getattr(case, "dtype", "") in ("f16", "bf16") and not case.has_float_matrices


def jobs(plan: Plan, recordings: list[Recording], architecture: str, with_peers: bool) -> list[Job]:
    """Every kernel that the cases need."""
    found = []
    for recording in recordings:
        case = case_of(recording)
        all_programs = [programs.ours(case, recording), *(peers_mlx.peers(plan, case) if with_peers else [])]
        dispatches = [dispatch for program in all_programs for dispatch in program.dispatches]
        found += [job_of(plan, dispatch, uses_tf32(case), architecture) for dispatch in dispatches]
    return found


class Inputs:
    """Input sets, made on `source`. Weights are kept from case to case, and copied where the cache would hold
    them."""

    def __init__(self, machine, source: str):
        self.machine, self.source = machine, source
        self.key, self.copies = None, []

    def made(self, make: Callable, seed: int, number: int) -> Tensors:
        return moved(make(Values(self.source, seed, number)), self.machine.device)

    def weights(self, case: Case) -> list[Tensors]:
        shapes = case.weights(Shapes("meta"))
        key = [(name, tuple(t.shape), t.dtype) for name, t in shapes.items()]
        if key != self.key:
            self.key, self.copies = key, []
            size = sum(t.nbytes for t in shapes.values())
            count = -(-timing.COLD_BYTES // size) if size else 1
            seed = zlib.crc32(repr(key).encode())
            self.copies = [self.made(case.weights, seed, number) for number in range(count)]
        return self.copies

    def sets(self, case: Case, only_first: bool) -> list[Tensors]:
        """So many that they do not fit in the cache together."""
        weights, seed = self.weights(case), zlib.crc32(case.name.encode())

        def make(number: int) -> Tensors:
            return weights[number % len(weights)] | self.made(case.inputs, seed, number)

        first = make(0)
        if only_first:
            return [first]
        count = -(-timing.COLD_BYTES // case.bytes_moved(first))
        count = min(MAX_SETS, max(count, len(weights)))
        return [first, *(make(number) for number in range(1, count))]


def moved(tensors: Tensors, device: str) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


class Runner:
    """Runs cases. With `only_check` the machine only launches ours; inputs and checks are the CPU's."""

    def __init__(self, machine, plan: Plan, only_check: bool, time: Callable = timing.microseconds):
        self.machine, self.plan, self.only_check, self.time = machine, plan, only_check, time
        self.inputs = Inputs(machine, "cpu" if only_check else machine.device)

    def run(self, recording: Recording) -> list[Row]:
        case = case_of(recording)
        self.machine.tf32 = uses_tf32(case)
        sets = self.inputs.sets(case, self.only_check)
        program = programs.ours(case, recording)
        replays = self.replays(case, program, sets)
        wrong = self.check(program, sets[0], replays[0])
        parts = {} if self.only_check else programs.parts(case, program)
        rows = {
            part: Row(case.name, case.group, part, wrong, bytes=case.bytes_moved(sets[0], part))
            for part in (*parts, "")
        }
        if not self.only_check:
            for part, row in rows.items():
                row.ours_us = self.time(
                    [lambda r=r, p=part: r.run(parts.get(p, slice(None))) for r in replays]
                )
        del replays
        return self.beside_peers(case, sets, rows)

    def replays(self, case: Case, program: Program, sets: list[Tensors]) -> list[Replay]:
        """One for each input set, each run once: from then on indirect grids are known."""
        replays = [Replay(self.machine, program, tensors, case.mutated) for tensors in sets]
        for replay in replays:
            replay.run()
        self.machine.synchronize()
        return replays

    def check(self, program: Program, tensors: Tensors, replay: Replay) -> str:
        device = "cpu" if self.only_check else self.machine.device
        return program.wrong(moved(tensors, device), moved(replay.buffers, device))

    def beside_peers(self, case: Case, sets: list[Tensors], rows: dict[str, Row]) -> list[Row]:
        result, beside = [], set()
        for peer in [] if self.only_check else peers_mlx.peers(self.plan, case):
            if peer.part not in rows:
                continue
            row = Row(**asdict(rows[peer.part]) | {"peer": peer.label})
            self.add_peer(row, case, peer, sets)
            result.append(row)
            beside.add(peer.part)
        return result + [row for part, row in rows.items() if part not in beside]

    def add_peer(self, row: Row, case: Case, peer: Program, sets: list[Tensors]) -> None:
        try:
            replays = self.replays(case, peer, sets)
            row.peer_wrong = self.check(peer, sets[0], replays[0])
            row.peer_us = self.time([replay.run for replay in replays])
        except Exception as error:  # a peer's fault is none of ours
            self.machine.synchronize()  # unless nothing works any more
            row.peer_wrong = str(error).splitlines()[0]

    def kernels(self, recording: Recording) -> list[dict]:
        """What the compiler made of ours, and each dispatch's own time."""
        case = case_of(recording)
        self.machine.tf32 = uses_tf32(case)
        sets = self.inputs.sets(case, only_first=False)
        replays = self.replays(case, programs.ours(case, recording), sets)
        described = []
        for i, dispatch in enumerate(recording.dispatches):
            time = self.time([lambda r=r, i=i: r.run(slice(i, i + 1)) for r in replays])
            described.append(self.machine.describe(dispatch) | {"microseconds": time})
        return described
