"""Pools: the slots have the bytes of the experts that were asked for, whatever the disk does."""

import errno
import fcntl
import gc
import itertools
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support import processes
from support.experts_on_disk import EXPERTS, LAYERS, SHAPES, draw, same, write

from torch_moe_mps.disk import pool as module
from torch_moe_mps.disk import rates
from torch_moe_mps.disk.file import ExpertsFile, Layer, bytes_of, written
from torch_moe_mps.disk.pool import Pools, least_memory, slots_in
from torch_moe_mps.ops.families.slots import new_number, register_pool, with_slots_locked
from torch_moe_mps.selfcheck import machine

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file whose blocks are three reads, and its tensors."""
    monkeypatch.setattr(module, "PIECE", 1000)
    tensors = write(tmp_path / "experts")
    return ExpertsFile(tmp_path / "experts", "key"), tensors


@pytest.fixture(params=["host", "reference"])
def either(request, file, monkeypatch):
    """The file for the compiled extension, and for what runs without it."""
    if request.param == "reference":
        monkeypatch.setattr(module, "host_library", lambda: None)
    return file


def check(pools: Pools, tensors, layer: int, ids: list[int]) -> None:
    slots = pools.layers[layer].slots(torch.tensor(ids, dtype=torch.int32))
    assert slots.dtype == torch.int32 and len(slots) == len(ids)
    for expert, slot in zip(ids, slots.tolist(), strict=True):
        for name, tensor in pools.layers[layer].tensors.items():
            assert same(tensor[slot], tensors[layer][name][expert])


def lru(slots: int, steps: list[tuple[int, list[int]]]) -> int:
    """How many experts a least recently used cache of each layer reads, by its definition."""
    held: dict[int, list[int]] = {}
    misses = 0
    for layer, ids in steps:
        own = held.setdefault(layer, [])
        misses += len({*ids} - {*own})
        held[layer] = ([each for each in own if each not in ids] + [*{*ids}])[-slots:]
    return misses


def steps(count: int, top_k: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """(layer, distinct experts of a token), with a liking for some experts as routers have it."""
    generator = torch.Generator().manual_seed(seed)
    likings = torch.tensor([1 / (1 + expert) for expert in range(EXPERTS)])
    return [
        (step % LAYERS, torch.multinomial(likings, top_k, generator=generator).tolist())
        for step in range(count)
    ]


@pytest.mark.parametrize(
    ("slots", "count"), [(2, 300), (5, 100), pytest.param(2, 10_000, marks=pytest.mark.sweep)]
)
def test_random_steps(either, slots, count):
    """At the smallest pool, the experts of one token, and with others between: every byte is right."""
    pools, tensors = Pools(either[0], slots, CPU), either[1]
    taken = steps(count, 2)
    for layer, ids in taken:
        check(pools, tensors, layer, ids)
    counters = pools.counters
    assert counters.hits + counters.misses == 2 * count
    if slots == 2:  # which of the oldest two goes is not said
        assert counters.misses == lru(2, taken)
    assert counters.bytes_read == counters.misses * sum(either[0].layers[0].sizes)
    assert counters.seconds > 0


def test_the_least_recently_used_expert_goes(either):
    pools = Pools(either[0], 3, CPU)
    pool = pools.layers[0]
    for expert in (0, 1, 2, 0, 3):
        pool.slots(torch.tensor([expert]))
    before = pool.reader.counters.misses
    pool.slots(torch.tensor([0, 2, 3]))
    assert pool.reader.counters.misses == before
    pool.slots(torch.tensor([1]))
    assert pool.reader.counters.misses == before + 1


def test_ids_of_no_expert_stay(either):
    pools = Pools(either[0], 2, CPU)
    pool = pools.layers[0]
    assert pool.slots(torch.tensor([-1, 4, EXPERTS, 2**31 - 1, 4])).tolist() == [-1, 0, EXPERTS, 2**31 - 1, 0]
    assert pool.slots(torch.empty(0, dtype=torch.int32)).shape == (0,)
    with pytest.raises(
        ValueError, match=r"ids must name at most 2 experts, the slots of layers.0.experts, got 3"
    ):
        pool.slots(torch.tensor([1, 2, 3]))


def damaged(file: ExpertsFile, layer: int, expert: int) -> None:
    with open(file.path, "r+b") as opened:
        opened.seek(file._places.starts[layer] + expert * file.layers[layer].block + 1500)
        opened.write(b"\xff\x00\xff\x00")


def test_an_expert_with_another_checksum_ends_its_step_alone(either):
    pools, tensors = Pools(either[0], 2, CPU), either[1]
    check(pools, tensors, 1, [3, 4])
    damaged(either[0], 1, 5)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"expert 5 of layers.1.experts has another checksum than"):
            pools.layers[1].slots(torch.tensor([4, 5]))
        check(pools, tensors, 1, [4, 6])
        check(pools, tensors, 1, [0, 1])


def test_a_file_that_becomes_short_ends_its_step_alone(either):
    """Both experts are beyond its end, and are read side by side."""
    pools, tensors = Pools(either[0], 2, CPU), either[1]
    check(pools, tensors, 0, [0, 1])
    os.truncate(either[0].path, either[0]._places.starts[1] + 1500)
    with pytest.raises(ValueError, match=r"expert [01] of layers.1.experts is truncated"):
        pools.layers[1].slots(torch.tensor([0, 1]))
    check(pools, tensors, 0, [2, 7])


def test_errors_of_the_disk(file, simulated):
    """At any of the reads of a step; later steps work, in all slots."""
    for failing in range(6):
        pools, tensors = Pools(file[0], 3, CPU), file[1]
        calls = itertools.count()

        def read(fd, offset, size, calls=calls, failing=failing):
            if next(calls) == failing:
                raise OSError(5, "Input/output error")
            return size

        says = r"experts: expert \d of layers.0.experts: Input/output error"
        with simulated.reads(read), pytest.raises(OSError, match=says):
            pools.layers[0].slots(torch.tensor([failing, 7]))
        check(pools, tensors, 0, [failing, 7, (failing + 1) % 7])


def test_an_error_of_the_disk_without_the_extension(file, monkeypatch):
    monkeypatch.setattr(module, "host_library", lambda: None)
    pools = Pools(file[0], 3, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            pools.layers[0].slots(torch.tensor([1, 7]))
    check(pools, file[1], 0, [1, 7, 2])


def test_reads_that_give_less_than_was_asked(file, simulated):
    """And every third one, which a signal interrupts, gives nothing."""
    calls = itertools.count()

    def read(fd, offset, size):
        if next(calls) % 3 == 1:
            raise InterruptedError(errno.EINTR, "")
        return 1 + size // 3

    with simulated.reads(read):
        check(Pools(file[0], 4, CPU), file[1], 2, [1, 5, 6])
    assert next(calls) > 3


@pytest.mark.parametrize("seed", range(3))
def test_reads_that_stall(file, simulated, seed):
    """Requests of three layers at once, whose reads pass those that stall; then a whole layer."""
    pools, tensors = Pools(file[0], 3, CPU), file[1]
    stalls, begun = simulated.Stalls(seed, share=0.2), threading.Barrier(LAYERS)

    def ask(layer: int) -> None:
        begun.wait()
        for _, ids in steps(30, 2, seed=10 * seed + layer):
            check(pools, tensors, layer, ids)
        pools.staging.read(layer) if layer == 0 else None

    with simulated.reads(stalls), ThreadPoolExecutor(LAYERS) as threads:
        [*threads.map(ask, range(LAYERS))]
    assert stalls.count > 0 and stalls.passed > 0
    assert all(same(own, tensors[0][name]) for name, own in pools.staging.tensors[0].items())


def test_a_late_disk(file, simulated, monkeypatch):
    """A step ends in time with one error; its slots are used again only once its reads have ended."""
    monkeypatch.setattr(module, "SILENT", 0.05)
    monkeypatch.setattr(module, "TICK", 0.01)
    pools, tensors = Pools(file[0], 3, CPU), file[1]
    for expert in range(3):  # one by one: of one request any may be the oldest
        check(pools, tensors, 0, [expert])
    answers = threading.Event()
    with simulated.reads(lambda fd, offset, size: size * answers.wait(60)):
        for expert in (3, 4):
            begun = time.monotonic()
            with pytest.raises(TimeoutError, match=r"the disk of .*experts is silent for 0\.05 s"):
                pools.layers[0].slots(torch.tensor([expert]))
            assert time.monotonic() - begun < 10
        check(pools, tensors, 0, [2])  # the one that is left
        with pytest.raises(TimeoutError):
            pools.layers[0].slots(torch.tensor([2, 5]))
        with pytest.raises(TimeoutError):  # all slots are being read into
            pools.layers[0].slots(torch.tensor([6]))
        answers.set()
        monkeypatch.setattr(module, "SILENT", 20.0)
        for ids in ([0, 1, 2], [5, 6, 7], [3, 4, 5]):
            check(pools, tensors, 0, ids)


def test_requests_of_several_threads(file, simulated):
    """At once, in fewer slots than they need together: each has its own experts while it was not answered."""
    pools, begun, read = Pools(file[0], 3, CPU), threading.Barrier(4), []

    def late(fd, offset, size):
        read.append(offset)
        time.sleep(0.001)
        return size

    def ask(first: int) -> None:
        begun.wait()
        for step in range(5):
            slots = pools.layers[0].slots(torch.tensor([first, (first + step) % EXPERTS]))
            assert min(slots) >= 0 and len({*slots.tolist()}) == 1 + (step > 0)

    with simulated.reads(late), ThreadPoolExecutor(4) as threads:
        [*threads.map(ask, (0, 1, 1, 5))]
    check(pools, file[1], 0, [0, 1, 5])
    before = len(read)
    with simulated.reads(late), ThreadPoolExecutor(2) as threads:  # one read serves both
        [*threads.map(lambda _: pools.layers[1].slots(torch.tensor([4])), range(2))]
    assert len(read) - before == 3


def interrupted_at(last: int, call) -> bool:
    """Raises KeyboardInterrupt at a line of pool.py that this thread runs. Returns: whether there is one."""
    lines = itertools.count(1)

    def trace(frame, event, argument):
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line" and next(lines) == last:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line(file):
    """Of a step or of a whole layer: the calls behind it have all slots, and their own bytes."""
    pools, tensors = Pools(file[0], 2, CPU), file[1]
    for last in itertools.count(1):
        found = interrupted_at(last, lambda last=last: pools.layers[0].slots(torch.tensor([last % 7, 7])))
        check(pools, tensors, 0, [(last + 1) % 7, (last + 2) % 7])
        for layer in (0, 1):
            found |= interrupted_at(last, lambda layer=layer: pools.staging.read(layer))
        pools.staging.read(0)
        assert all(same(own, tensors[0][name]) for name, own in pools.staging.tensors[0].items())
        if not found:
            break
    assert last > 5


def test_torch_knows_what_was_written(either):
    """Decoded weights are kept for tensors of one version: those of the expert before are not used again."""
    pools = Pools(either[0], 2, CPU)
    staged = pools.staging.tensors[2]["codes"]
    for expert in range(4):
        pool = pools.layers[0]
        before = pool.tensors["codes"]._version, staged._version
        pool.slots(torch.tensor([expert]))
        pools.staging.read(2)
        assert pool.tensors["codes"]._version > before[0] and staged._version > before[1]


def test_whole_layers(file):
    """All experts of each layer, ahead of the layer that is computed, or the needed ones; pools survive."""
    pools, tensors = Pools(file[0], 3, CPU), file[1]
    check(pools, tensors, 1, [0, 6, 7])
    for _ in range(2):
        for layer in range(LAYERS):
            pools.staging.read(layer)
            assert all(same(own, tensors[layer][name]) for name, own in pools.staging.tensors[layer].items())
    size = sum(file[0].layers[0].sizes)
    assert pools.counters.bytes_read == size * (3 + 2 * (LAYERS * EXPERTS - 3))
    pools.staging.read(0)  # and 1 behind it, which nobody asks for
    pools.staging.read(2, {1, 5})
    assert all(same(own[[1, 5]], tensors[2][name][[1, 5]]) for name, own in pools.staging.tensors[2].items())
    misses = pools.counters.misses
    check(pools, tensors, 1, [0, 6, 7])
    assert pools.counters.misses == misses and pools.counters.layers == 2 * LAYERS + 2


def test_an_error_ahead_ends_the_step_that_needs_it(either):
    pools, tensors = Pools(either[0], 3, CPU), either[1]
    damaged(either[0], 1, 5)
    pools.staging.read(0)
    with pytest.raises(ValueError, match=r"expert 5 of layers.1.experts has another checksum"):
        pools.staging.read(1)
    pools.staging.read(2)
    assert all(same(own, tensors[2][name]) for name, own in pools.staging.tensors[2].items())


def test_two_processes_read_one_file(file):
    """Each has its own slots; another file of that name is not read."""
    a, b = Pools(file[0], 2, CPU), Pools(ExpertsFile(file[0].path), 4, CPU)
    file[0].path.unlink()
    write(file[0].path, seed=1)
    for layer, ids in steps(60, 2):
        check(a, file[1], layer, ids)
        check(b, file[1], layer, ids)


def test_whole_layers_of_a_late_disk(file, simulated, monkeypatch):
    """The step ends in time; the memory is read into again only once the reads that are late have ended."""
    monkeypatch.setattr(module, "SILENT", 0.05)
    monkeypatch.setattr(module, "TICK", 0.01)
    pools, answers = Pools(file[0], 3, CPU), threading.Event()
    with simulated.reads(lambda fd, offset, size: size * answers.wait(60)):
        for layer in (2, 0, 2):
            with pytest.raises(TimeoutError, match=r"the disk of .*experts is silent for 0\.05 s"):
                pools.staging.read(layer)
        answers.set()
        monkeypatch.setattr(module, "SILENT", 20.0)
        for layer in (0, 1, 2):
            pools.staging.read(layer)
            staged = pools.staging.tensors[layer]
            assert all(same(own, file[1][layer][name]) for name, own in staged.items())


class Clock:
    """The clock of pools, and a disk whose reads take so many seconds of it.

    A second passes where a pool that waits reads the clock while the disk reads. A thread that a busy machine
    makes late takes none.
    """

    def __init__(self, monkeypatch, seconds: float):
        self.now, self._seconds, self._changed, self._end = 0, seconds, threading.Condition(), 0.0
        self._answers = False
        own = SimpleNamespace(monotonic=self._monotonic, perf_counter=time.perf_counter)
        monkeypatch.setattr(module, "time", own)
        monkeypatch.setattr(module, "TICK", 0.001)
        monkeypatch.setattr(module, "DEPTH", 1)

    def _monotonic(self) -> int:
        with self._changed:
            self.now += self.now < self._end
            self._changed.notify_all()
        return self.now

    def read(self, fd: int, offset: int, size: int) -> int:
        """One read at a time: DEPTH is 1."""
        with self._changed:
            self._end = self.now + self._seconds
            assert self._changed.wait_for(lambda: self._answers or self.now >= self._end, 60)
        return size

    def answer(self) -> None:
        """All reads end from here on."""
        with self._changed:
            self._answers = True
            self._changed.notify_all()


def test_a_disk_that_answers_steadily_is_not_late(file, simulated, monkeypatch):
    """However long all reads of a step, or of a layer, take together."""
    clock = Clock(monkeypatch, 15.0)
    with simulated.reads(clock.read):
        pools = Pools(file[0], 4, CPU)
        check(pools, file[1], 0, [0, 1, 2, 3])
        pools.staging.read(LAYERS - 1)
    staged = pools.staging.tensors[LAYERS - 1]
    assert all(same(own, file[1][LAYERS - 1][name]) for name, own in staged.items())
    assert clock.now > (4 + EXPERTS) * 15


def test_a_disk_that_is_silent_is_late(file, simulated, monkeypatch):
    clock = Clock(monkeypatch, float("inf"))
    with simulated.reads(clock.read):
        pools = Pools(file[0], 4, CPU)
        with pytest.raises(TimeoutError, match=r"the disk of .*experts is silent for 20 s"):
            pools.layers[0].slots(torch.tensor([5]))
        assert 20 <= clock.now <= 2 * 21  # the clock is read twice at most while nothing ends
        clock.answer()
        check(pools, file[1], 0, [5])


def test_a_fork_of_a_process_that_reads_loads_a_model_of_its_own(file, simulated):
    """Whatever a thread holds while it waits for the disk."""
    begun, answers = threading.Event(), threading.Event()

    def silent(fd, offset, size):
        begun.set()
        answers.wait(60)
        return size

    pools = Pools(file[0], 2, CPU)
    ask = with_slots_locked(lambda pools: check(pools, file[1], 0, [0, 1]))
    with simulated.reads(silent):
        thread = threading.Thread(target=ask, args=(pools,))
        thread.start()
        begun.wait()
    if (child := os.fork()) == 0:
        signal.alarm(60)  # it would hang
        try:
            ask(Pools(ExpertsFile(file[0].path), 2, CPU))
        except BaseException:
            os._exit(1)
        os._exit(0)
    answers.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("silent", ["a step", "a whole layer"])
def test_ctrl_c_ends_a_process_whose_disk_is_silent(tmp_path, simulated, silent):
    """Its reads never return."""
    write(tmp_path / "experts")
    code, errors = processes.interrupted(
        """
        import os, sys, torch
        from pathlib import Path
        from support.simulated import install
        install()
        import simulator
        from torch_moe_mps.disk.file import ExpertsFile
        from torch_moe_mps.disk.pool import Pools

        pools = Pools(ExpertsFile(Path(sys.argv[1])), 2, torch.device("cpu"))
        never = os.pipe()

        def silent(fd, offset, size):
            print("asked", flush=True)
            os.read(never[0], 1)

        reads = simulator.reads(silent)
        reads.__enter__()
        pools.layers[0].slots(torch.tensor([1, 2])) if sys.argv[2] == "a step" else pools.staging.read(0)
        """,
        "asked",
        tmp_path / "experts",
        silent,
    )
    assert code != 0 and "KeyboardInterrupt" in errors


def test_slots_of_a_memory():
    """All experts, without staging; or as many as fit beside two whole layers, the same in each."""
    layers = [
        Layer(str(number), 16, {"codes": ("int32", (4096 * (1 + number % 2),))}) for number in range(20)
    ]
    blocks, whole = 10 * (1 << 14) + 10 * (1 << 15), 16 << 15
    assert least_memory(layers, 16) == 16 * blocks
    assert slots_in(layers, 16 * blocks) == 16
    for slots in (0, 2, 13):
        assert least_memory(layers, slots) == 2 * whole + slots * blocks
        assert slots_in(layers, 2 * whole + slots * blocks) == slots
    assert slots_in(layers, 16 * blocks - 1) == 12 + 1 and slots_in(layers, 10) == 0


def test_rates_of_a_disk():
    """Each depth has one, and no byte is read twice; without room nothing is written."""
    found = rates.rates(4 * rates.PIECE)
    assert found.keys() == {"page cache"} or found.keys() == {"page cache", "F_NOCACHE"}
    assert all([*rows] == [*rates.DEPTHS] and min(rows.values()) > 0 for rows in found.values())
    assert rates.rates(1 << 60) == {"error": "the disk has no room"}


@pytest.mark.parametrize("faster", [False, True])
def test_the_page_cache_is_used_unless_it_was_slower(file, faster, tmp_path, monkeypatch):
    """What `rates` measures on a Mac, the files of experts that are opened later use."""
    control, cached, number = fcntl.fcntl, {}, 48
    monkeypatch.setattr(fcntl, "F_NOCACHE", number, raising=False)
    monkeypatch.setattr(
        fcntl,
        "fcntl",
        lambda fd, how, *rest: cached.update({fd: not rest[0]}) if how == number else control(fd, how, *rest),
    )
    monkeypatch.setattr(machine, "cache_file", lambda: tmp_path / "measured.json")
    monkeypatch.setattr(rates, "_rate", lambda fd, *_: 2e9 if cached[fd] != faster else 1e9)
    assert [*rates.rates(4 * rates.PIECE)] == ["page cache", "F_NOCACHE"]
    cached.clear()
    read = ExpertsFile(file[0].path)
    assert cached == ({read._file: False} if faster else {})


def test_a_fork_says_that_it_has_no_experts(file):
    """In one line, at once; the process that was forked goes on."""
    pools, tensors = Pools(file[0], 2, CPU), file[1]
    check(pools, tensors, 0, [0, 1])
    (read, write), calls = os.pipe(), (lambda: check(pools, tensors, 0, [2]), lambda: pools.staging.read(0))
    if os.fork() == 0:
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                os.write(write, f"{error}\n".encode())
        os._exit(0)
    os.wait()
    said = os.read(read, 10_000).decode().splitlines()
    assert len(said) == 2
    assert all(
        line.endswith("experts: a fork cannot read experts on the disk: load the model in it")
        for line in said
    )
    check(pools, tensors, 0, [2, 3])


def test_layers_with_few_experts_have_no_pool(tmp_path):
    """Their experts are all in memory, as ever; staging has the others."""
    about = [Layer(str(number), count, SHAPES) for number, count in enumerate((2, 8, 3, 8))]
    tensors = [
        {name: tensor[: layer.experts] for name, tensor in own.items()}
        for layer, own in zip(about, draw(count=4), strict=True)
    ]
    with written(tmp_path / "experts", "key", about) as new:
        for number in [*new.left]:
            new.add(number, tensors[number])
    pools = Pools(ExpertsFile(tmp_path / "experts"), 3, CPU)
    assert [pool.about.name for pool in pools.layers] == ["1", "3"]
    for number, pool in enumerate(pools.layers):
        check(pools, {number: tensors[pool.layer]}, number, [7, 0, 5])
        pools.staging.read(number)
        assert all(same(own, tensors[pool.layer][n]) for n, own in pools.staging.tensors[number].items())


def test_staging_ends_while_python_keeps_its_lock(file):
    """No thread of the disk takes it, whatever it frees: at exit there is no Python to give it."""
    pools, tensors, interval = Pools(file[0], 2, CPU), file[1], sys.getswitchinterval()
    staged, wanted = pools.staging.tensors[1]["codes"].zero_(), bytes_of(tensors[1]["codes"])
    memory, end = bytes_of(staged), time.monotonic() + 10
    sys.setswitchinterval(1e6)  # nobody gets the lock of whoever computes
    try:
        readings = [pools.staging._begun(layer, None) for layer in [0] * 40 + [1]]
        while memory != wanted and time.monotonic() < end:
            pass
        assert memory == wanted
    finally:
        sys.setswitchinterval(interval)
    assert all(reading.wait(60) for _, reading in readings)


def files_of(path) -> list[str]:
    """The open files of this process by that name."""
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if os.path.lexists(link) and str(path) in os.readlink(link)]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


NO_THREAD = """
    import resource, sys, threading, torch
    from pathlib import Path
    from support.simulated import install
    install()
    import torch_moe_mps
    from torch_moe_mps.disk.file import ExpertsFile
    from torch_moe_mps.disk.pool import Pools

    pools, device = Pools(ExpertsFile(Path(sys.argv[1])), 2, torch.device(sys.argv[2])), sys.argv[2]
    ids, never = torch.tensor([1, 2], dtype=torch.int32, device=device), threading.Event()

    def slots():
        result = torch.ops.moe_mps._expert_slots(ids, pools.layers[0].number)
        torch_moe_mps.synchronize(device)
        return result.tolist()

    torch.ops.moe_mps._expert_slots(ids, 0).tolist()  # what a GPU needs is there
    torch.ops.moe_mps._pipelines("probe_f32")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), before[1]))
    try:
        while True:
            threading.Thread(target=never.wait, daemon=True).start()
    except RuntimeError:  # no stack of a thread that has ended is left
        pass
    for call in slots, lambda: pools.staging.read(0), slots:
        try:
            call()
        except (OSError, torch.AcceleratorError) as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_AS, before)
    print(sorted(slots()))
    pools.staging.read(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no memory for a thread's stack")
@pytest.mark.parametrize(("place", "keeps_warm"), [("cpu", 0), ("mps", 0), ("mps", 1)])
def test_no_thread_can_be_made(tmp_path, place, keeps_warm):
    """Each step says so, and a later one reads; that the GPU is not kept warm, no step says."""
    write(tmp_path / "experts")
    variables = {"MOE_MPS_KEEP_WARM": str(keeps_warm)}
    *said, slots = processes.forked(NO_THREAD, tmp_path / "experts", place, **variables).splitlines()
    assert len(said) == 3 and slots == "[0, 1]"
    says = "experts cannot be read, as no thread can be made: Resource temporarily unavailable"
    assert all(says in line for line in said)


class LatePool:
    """A pool that lets a GPU wait for its answer, and reads nothing."""

    def __init__(self, seconds: float):
        self.number = new_number()
        torch.ops.moe_mps._add_late_pool(self.number, seconds)
        register_pool(self, self.number)


@pytest.mark.own_gpu
def test_a_disk_is_not_late_while_the_gpu_works(file, simulated, monkeypatch):
    """A layer's memory is read into once the GPU has read the layer before, however long that takes."""
    monkeypatch.setattr(module, "SILENT", 0.05)
    monkeypatch.setattr(module, "TICK", 0.01)
    simulated.set_schedule(1)  # the GPU begins at once
    pools, late = Pools(file[0], 3, torch.device("mps")), LatePool(0.3)
    torch.ops.moe_mps._expert_slots(torch.ones(1, dtype=torch.int32, device="mps"), late.number)
    pools.staging.read(0)
    assert all(same(own.cpu(), file[1][0][name]) for name, own in pools.staging.tensors[0].items())


@pytest.mark.own_gpu
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_that_is_freed_while_a_layer_is_queued(tmp_path, simulated):
    """Behind the GPU's work. It is read, and then neither a thread nor a file is left."""
    write(tmp_path / "experts")
    simulated.set_schedule(1)  # the GPU begins at once
    ids, late = torch.ones(1, dtype=torch.int32, device="mps"), LatePool(0.3)
    torch.ops.moe_mps._expert_slots(ids, 0).tolist()
    before = threads()
    pools = Pools(ExpertsFile(tmp_path / "experts"), 2, torch.device("mps"))
    for layer in range(LAYERS):
        pools.staging.read(layer)  # by all threads that read
    torch.ops.moe_mps._expert_slots(ids, late.number)
    pools.staging._begun(0, None)
    del pools
    gc.collect()
    end = time.monotonic() + 30
    while (files_of(tmp_path) or threads() > before) and time.monotonic() < end:
        time.sleep(0.01)
    assert files_of(tmp_path) == [] and threads() <= before


@pytest.mark.own_gpu
def test_a_token_ends_while_python_keeps_its_lock(file, simulated):
    """No other thread has taken it behind the encoding: the host looks up and reads without Python."""
    pools, tensors, ran = Pools(file[0], 2, torch.device("mps")), file[1], threading.Event()
    ids = torch.tensor([[3, 6]], dtype=torch.int32, device="mps")
    may_run, other, interval = threading.Lock(), None, sys.getswitchinterval()
    for _ in range(2):  # misses, and hits
        may_run.acquire()
        other = threading.Thread(target=lambda: (may_run.acquire(), ran.set()))
        other.start()
        slots = [torch.ops.moe_mps._expert_slots(ids, pool.number) for pool in pools.layers]
        sys.setswitchinterval(1e6)
        try:
            may_run.release()  # whoever gets Python's lock from here on shows
            torch.mps.empty_cache()  # waits for the GPU with it
            taken = ran.is_set()
        finally:
            sys.setswitchinterval(interval)
        other.join()
        may_run.release()
        assert not taken and ran.is_set()
        ran.clear()
        for layer, (pool, own) in enumerate(zip(pools.layers, slots, strict=True)):
            for name, tensor in pool.tensors.items():
                assert same(tensor.cpu()[own.flatten().tolist()], tensors[layer][name][[3, 6]])
    assert pools.counters.misses == 2 * LAYERS and pools.counters.hits == 2 * LAYERS
