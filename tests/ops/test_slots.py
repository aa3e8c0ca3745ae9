"""Slots of experts by a pool, for which the GPU waits and the host does not; errors of the pool."""

import contextlib
import gc
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from measured.streamed import CASES, Streamed
from support import processes
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps._faults import Mark, release_cache
from torch_moe_mps.ops._samples import packet, sample_arguments
from torch_moe_mps.ops.families.slots import _expert_slots as expert_slots
from torch_moe_mps.ops.families.slots import host_view, register_pool

SCHEDULES = pytest.mark.parametrize("schedule", range(4))


class Pool:
    """Experts in slots, in the order in which they first came.

    Attributes:
        asked: the ids of each call.
        error: what the next call raises.
        may_answer: what the calls wait for.
    """

    def __init__(self, name: str = "layer 3", limit: float = 60.0):
        self.numbers: dict[int, int] = {}
        self.asked: list[list[int]] = []
        self.error: BaseException | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.number = register_pool(self, name, limit, "/ssd/experts")

    def slots(self, ids):
        self.asked.append(ids.tolist())
        assert self.may_answer.wait(60)
        if self.error is not None:
            raise self.error
        return torch.tensor([self.numbers.setdefault(id, len(self.numbers)) for id in ids.tolist()]).int()


def ids_on(device: str, *ids: int) -> torch.Tensor:
    return torch.tensor([ids], dtype=torch.int32, device=device)


def test_a_pool_is_asked_in_order(device):
    pool, other = Pool(), Pool()
    given = [(7, 2), (2, 5), (9, 7)]
    slots = [expert_slots(ids_on(device, *ids), pool.number) for ids in given]
    twice = expert_slots(slots[2], other.number)
    assert [each.tolist() for each in slots] == [[[0, 1]], [[1, 2]], [[3, 0]]]
    assert twice.tolist() == [[0, 1]] and twice.dtype == torch.int32
    assert pool.asked == [[*ids] for ids in given] and other.asked == [[3, 0]]


def test_an_error_of_a_pool_on_the_cpu():
    pool = Pool()
    pool.error = OSError(5, "no disk")
    with pytest.raises(OSError, match="no disk"):
        expert_slots(ids_on("cpu", 1), pool.number)


def test_a_number_ends_with_its_pool(device):
    pool = Pool()
    number, ids = pool.number, ids_on(device, 1)
    assert expert_slots(ids, number).tolist() == [[0]]
    del pool
    gc.collect()
    with pytest.raises(ValueError, match=f"pool must be the number of a pool of slots, got {number}$"):
        expert_slots(ids, number)


def test_views_of_the_host(device):
    tensor = torch.arange(12.0, device=device).view(3, 4)[:, 1:3]
    view = host_view(tensor)
    torch_moe_mps.synchronize(device)
    assert view.device.type == "cpu" and view.stride() == (4, 1) and torch.equal(view, tensor.cpu())
    view[1] = 77
    del view
    assert tensor.tolist() == [[1, 2], [77, 77], [9, 10]]
    assert host_view(torch.empty(0, 3, device=device)).shape == (0, 3)


@SCHEDULES
def test_the_queue_is_not_drained(simulated, schedule):
    """Each request commits once, in front of a wait of the GPU's; nobody else waits."""
    simulated.set_schedule(schedule)
    pool, norm = Pool(), sample_arguments("rms_norm", "mps", torch.float32)
    ids, commits = [ids_on("mps", *numbers) for numbers in ((4, 1), (1, 3))], simulated.commits()
    with simulated.trace() as commands:
        for each in ids:
            packet("rms_norm")(**norm)
            slots = expert_slots(each, pool.number)
    assert [line.split(" grid")[0].removesuffix("_f32") for line in commands] == [
        "rms_norm",
        "signal event",
        "commit",
        "wait for event",
    ] * 2
    assert simulated.commits() == commits + 2
    assert slots.tolist() == [[1, 2]]


@SCHEDULES
def test_no_more_buffers_than_a_queue_holds(simulated, schedule):
    """Of Metal's 64: the host waits for the oldest, and each buffer waits for one answer."""
    simulated.set_schedule(schedule)
    pool, ids = Pool(), ids_on("mps", 1)
    pool.may_answer.clear()
    torch_moe_mps.synchronize()
    commits, behind = simulated.commits(), []

    def answer() -> None:
        """Once the host has committed what it may, if it stops."""
        while simulated.commits() < commits + 31:
            time.sleep(0.001)
        behind.append(simulated.commits() - commits)
        pool.may_answer.set()

    with ThreadPoolExecutor(1) as threads, simulated.trace() as commands:
        answered = threads.submit(answer)
        for _ in range(100):
            slots = expert_slots(ids, pool.number)
        answered.result()
    assert behind[0] <= 33  # one more where Metal tells at once that the first is complete
    assert simulated.commits() == commits + 100
    waits = [line for line in commands if line in ("commit", "wait for event")]
    assert waits == ["commit", "wait for event"] * 100
    assert slots.tolist() == [[0]] and pool.asked == [[1]] * 100


@SCHEDULES
def test_a_slow_disk_keeps_no_buffer_waiting_for_long(simulated, schedule):
    """50 ms a layer: macOS would end a buffer of a hundred layers."""
    simulated.set_schedule(schedule)

    class Slow(Pool):
        def slots(self, ids):
            clock.answer(0.05)
            return super().slots(ids)

    pool, ids = Slow(), ids_on("mps", 1)
    with simulated.timeline(lambda dispatch: 1e-3, a_command=1e-6) as clock:
        for _ in range(200):
            slots = expert_slots(ids, pool.number)
        torch_moe_mps.synchronize()
        assert clock.waited == pytest.approx(200 * 0.05)
    assert slots.tolist() == [[0]]


def test_a_buffer_that_waits_too_long_says_so(simulated):
    """macOS ends it before the pool's limit: what it reads is named, not the display."""

    class Slow(Pool):
        def slots(self, ids):
            clock.answer(6.0)
            return super().slots(ids)

    pool = Slow()
    with simulated.timeline(lambda dispatch: 1e-3) as clock:
        expert_slots(ids_on("mps", 1), pool.number)
        with pytest.raises(torch.AcceleratorError, match="Caused GPU Timeout Error") as raised:
            torch_moe_mps.synchronize()
    assert "this one waited for experts: the disk was too slow" in str(raised.value)
    assert "keeps the display waiting" not in str(raised.value)


@contextlib.contextmanager
def kept_lock():
    """Another thread of Python's runs only where this one releases the lock."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@SCHEDULES
@pytest.mark.parametrize("wait", [release_cache, torch_moe_mps.synchronize])
def test_waits_release_pythons_lock(simulated, schedule, wait):
    """While a step is in flight, whose answer needs the lock."""
    simulated.set_schedule(schedule)
    pool, may_set = Pool(), threading.Lock()
    pool.may_answer.clear()
    may_set.acquire()
    setter = threading.Thread(target=lambda: (may_set.acquire(), pool.may_answer.set()))
    setter.start()
    with kept_lock():
        slots = expert_slots(ids_on("mps", 3), pool.number)
        may_set.release()
        wait()
        assert pool.may_answer.is_set()
    setter.join()
    assert host_view(slots).tolist() == [[0]]


@SCHEDULES
def test_a_stream_waits_for_the_one_that_used_the_slots(simulated, schedule):
    """Its kernels read an expert in a slot that another stream's request gives to another expert."""
    simulated.set_schedule(schedule)
    norm, memory = packet("rms_norm"), torch.zeros(8, device="mps")

    class One(Pool):
        """An expert's weights are its number."""

        def slots(self, ids):
            host_view(memory).fill_(float(ids[0]))
            return torch.zeros(len(ids), dtype=torch.int32)

    pool, x, results = One(), torch.ones(1, 8, device="mps"), []
    torch_moe_mps.synchronize()
    ids = {expert: ids_on("mps", expert) for expert in range(8)}
    for stream, expert in ((0, 5), (1, 7), (0, 3), (0, 4), (1, 6)):
        with simulated.stream(stream):
            expert_slots(ids[expert], pool.number)
            results.append(norm(x, memory, 0.0))
            if stream == 1:
                Mark(torch.device("mps")).wait()  # the other stream's buffer is open still
    torch_moe_mps.synchronize()
    assert [float(host_view(each)[0, 0]) for each in results] == [5.0, 7.0, 3.0, 4.0, 6.0]


def test_a_mark_is_its_own_streams(simulated):
    """Whoever waits for it."""
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    norm(**arguments), norm(**arguments)
    with simulated.stream(1):
        result = norm(**arguments)
        mark = Mark(torch.device("mps"))
    with ThreadPoolExecutor(1) as threads, simulated.trace() as commands:
        threads.submit(mark.wait).result()
    assert [line for line in commands if line == "commit"] == ["commit"]
    assert torch.equal(host_view(result), norm(**arguments).cpu())


def program_of(*pools: Pool):
    """A captured token of layers that each choose the experts behind those of the layer before."""
    program = torch.classes.moe_mps.Program()
    program.add_input(ids_on("mps", 0, 0), [], [])
    numbers = [program.add_constant(pool.number) for pool in pools]
    one = program.add_constant(1)
    for layer, number in enumerate(numbers):
        place = 2 * layer
        program.add_call("moe_mps::_expert_slots", "", [[place], [number]], [], [place + 1], [])
        program.add_call("aten::add", "Scalar", [[place], [one], [one]], [], [place + 2], [])
    program.finish(2 * len(pools) + 1, [2 * layer + 1 for layer in range(len(pools))])
    return program


def run(program, *ids: int) -> list[torch.Tensor]:
    """The slots of each layer of a captured token."""
    slots, _ = program.bind([ids_on("mps", *ids)], [], [], []).run([])
    return slots


@SCHEDULES
def test_a_captured_token_asks_anew(simulated, schedule):
    """Two tokens in flight, of which the host reads the first while the second waits."""
    simulated.set_schedule(schedule)
    pools = [Pool(f"layer {layer}") for layer in range(3)]
    program, tokens, marks = program_of(*pools), [], []
    for ids in ((5, 6), (6, 8), (5, 8)):
        tokens.append(run(program, *ids))
        marks.append(Mark(torch.device("mps"), commits=True))
    for mark, slots, expected in zip(marks, tokens, ([[0, 1]], [[1, 2]], [[0, 2]]), strict=True):
        mark.wait()
        assert [host_view(each).tolist() for each in slots] == [expected] * 3
    for layer, pool in enumerate(pools):
        assert pool.asked == [[5 + layer, 6 + layer], [6 + layer, 8 + layer], [5 + layer, 8 + layer]]


@SCHEDULES
def test_an_error_ends_the_step_once(simulated, schedule):
    """And the step behind it, which has read its results; pools are not asked again before it is raised."""
    simulated.set_schedule(schedule)
    first, second = Pool("model.layers.0"), Pool("model.layers.1")
    program = program_of(first, second)
    run(program, 1, 2)
    torch_moe_mps.synchronize()
    first.error = OSError(5, "no disk\nin detail")
    with pytest.raises(torch.AcceleratorError) as raised:
        run(program, 3, 4)
        mark = Mark(torch.device("mps"), commits=True)
        run(program, 5, 6)
        mark.wait()
    says = (
        "experts of model.layers.0 cannot be read: [Errno 5] no disk; what was computed before this message"
    )
    assert says in str(raised.value) and "\n" not in str(raised.value)
    first.error = None
    torch_moe_mps.synchronize()
    assert first.asked == [[1, 2], [3, 4]] and second.asked == [[2, 3]]
    (slots, _) = run(program, 3, 2)
    assert slots.tolist() == [[2, 1]]
    torch_moe_mps.synchronize()


@SCHEDULES
def test_a_pool_that_is_late(simulated, schedule):
    """The step ends at the limit; what the pool says later is not heard. The error names the file."""
    simulated.set_schedule(schedule)
    pool = Pool("layer 9", limit=0.05)
    pool.may_answer.clear()
    says = (
        r"experts of layer 9 cannot be read: the disk of /ssd/experts has not answered within 0\.05 s, and "
        "macOS stops a GPU that waits longer; "
    )
    with pytest.raises(torch.AcceleratorError, match=says):
        expert_slots(ids_on("mps", 1), pool.number)
        torch_moe_mps.synchronize()
    pool.may_answer.set()
    pool.number = register_pool(pool, "layer 9", 60.0)
    assert expert_slots(ids_on("mps", 2), pool.number).tolist() == [[1]]


@SCHEDULES
def test_a_buffer_that_fails_ends_the_wait(simulated, schedule):
    """Its signal never comes, and its ids are not there: no pool is asked for them."""
    simulated.set_schedule(schedule)
    pool, norm = Pool(), sample_arguments("rms_norm", "mps", torch.float32)
    ids = [ids_on("mps", number) for number in range(3)]

    def work():
        for each in ids:
            packet("rms_norm")(**norm)
            slots = expert_slots(each, pool.number)
        torch_moe_mps.synchronize()
        return slots.tolist()

    for buffer in itertools.count():
        try:
            with simulated.failing("timeout", buffer) as failure:
                work()
        except RuntimeError as error:
            assert failure.happened and "Caused GPU Timeout Error" in str(error)
        else:
            assert not failure.happened
            break
        assert work() == [[2]]
    assert buffer > 3 and {*map(tuple, pool.asked)} == {(0,), (1,), (2,)}


@SCHEDULES
def test_a_pool_that_is_freed_while_the_gpu_asks(simulated, schedule):
    simulated.set_schedule(schedule)
    before, pool, ids = Pool(), Pool("layer 5"), ids_on("mps", 1)
    before.may_answer.clear()
    with pytest.raises(torch.AcceleratorError, match="moe_mps: a model was freed while the GPU asked"):
        expert_slots(ids, before.number)
        expert_slots(ids, pool.number)
        del pool
        gc.collect()
        before.may_answer.set()
        torch_moe_mps.synchronize()


class Unreliable:
    """A pool that fails and is late at random."""

    def __init__(self, random: Random, fails: float, is_late: float):
        self.random, self.fails, self.is_late = Random(random.random()), fails, is_late
        self.number = register_pool(self, "a layer", 0.02 if is_late else 60.0)

    def slots(self, ids):
        if self.random.random() < self.fails:
            raise OSError("no disk")
        if self.random.random() < self.is_late:
            time.sleep(0.03)
        return 3 * ids + 1


@pytest.mark.parametrize("schedule", in_sweep(range(60), range(4)))
def test_random_steps(simulated, schedule):
    """Each step is right or raises one error, whatever steps before it did."""
    simulated.set_schedule(schedule)
    random, ids = Random(schedule), ids_on("mps", 1, 2)
    pools = [Unreliable(random, *chances) for chances in ((0, 0), (0, 0), (0.15, 0), (0, 0.1))]
    norm, right, wrong = sample_arguments("rms_norm", "mps", torch.float32), 0, 0
    for _ in range(60):
        try:
            slots, expected = ids, [[1, 2]]
            for _ in range(random.randrange(1, 7)):
                if random.random() < 0.5:
                    packet("rms_norm")(**norm)
                slots = expert_slots(slots, random.choice(pools).number)
                expected = [[3 * slot + 1 for slot in expected[0]]]
            mark = Mark(torch.device("mps"), commits=random.random() < 0.5)
            expert_slots(ids, random.choice(pools).number)  # of a step ahead
            mark.wait()
            assert host_view(slots).tolist() == expected
            right += 1
        except torch.AcceleratorError:
            wrong += 1
    assert right > 5 and wrong > 2
    with contextlib.suppress(torch.AcceleratorError):
        torch_moe_mps.synchronize()


def test_memory_is_released(simulated):
    """By the thread that answers, once it has let the GPU go on."""
    pool, ids = Pool(), ids_on("mps", 1)

    def living() -> tuple[int, int]:
        for _ in range(5):
            expert_slots(ids, pool.number)
        torch_moe_mps.synchronize()
        return simulated.live_buffers(), simulated.live_objects()

    before, end = living(), time.monotonic() + 60
    while (after := living()) > before and time.monotonic() < end:
        pass
    assert after <= before


@pytest.mark.parametrize("schedule", [0, 1])
def test_the_gpu_idles_for_the_disk_alone(simulated, schedule):
    """The host encodes the token meanwhile, and reads it at its end."""
    from simulator import shaderlib

    simulated.set_schedule(schedule)
    ssd, norm = simulated.Ssd(latency=80e-6, rate=7e9, depth=8), packet("rms_norm")

    class OnDisk(Pool):
        def slots(self, ids):
            clock.answer(ssd.seconds([3_500_000] * len(ids)))
            return super().slots(ids)

    pool, arguments = OnDisk(), sample_arguments("rms_norm", "mps", torch.float32)
    ids = ids_on("mps", 1, 2)

    def run(dispatch):
        shaderlib.execute(dispatch)
        return 1e-3

    with simulated.timeline(run, a_command=1e-6, an_event=30e-6) as clock:
        for _ in range(3):
            norm(**arguments)
            expert_slots(ids, pool.number)
        norm(**arguments)
        torch_moe_mps.synchronize()
        a_read = 80e-6 + 7_000_000 / 7e9
        assert clock.waited == pytest.approx(3 * (a_read + 2 * 30e-6))
        assert clock.busy == pytest.approx(4e-3)
        assert clock.idle < 10e-6


def test_events_beat_a_drained_queue(simulated):
    """The loss of the GPU that waits for the host at each layer; the goal is 0.8 of the bound."""
    for case in CASES:
        streamed = Streamed(case)
        events, drained = (streamed.tokens_per_second(drains) / case.bound for drains in (False, True))
        assert 0.94 < events < 1 and drained < 0.93 * events, case


def test_a_process_ends_while_a_disk_is_silent(simulated):
    printed = processes.forked(
        """
        import threading, torch
        from support.simulated import install
        install()
        import simulator
        from torch_moe_mps.ops.families.slots import register_pool
        simulator.set_schedule(1)  # the GPU begins at once

        class Silent:
            def slots(self, ids):
                print("asked", flush=True)
                asked.set()
                threading.Event().wait()

        asked, pool = threading.Event(), Silent()
        number = register_pool(pool, "layer 0", 3600.0)
        torch.ops.moe_mps._expert_slots(torch.ones(1, dtype=torch.int32, device="mps"), number)
        threading.Thread(target=torch.mps.synchronize, daemon=True).start()
        asked.wait(60)
        """
    )
    assert printed == "asked"
