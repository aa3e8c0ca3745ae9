"""Events, and a GPU with a thread of its own: who waits for whom, and who may touch memory until then."""

import contextlib
import ctypes
import random
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import simulator
import torch
from simulator import SimulatorError, shaderlib
from simulator.testing import answering, ask, near, told, usable

pytestmark = pytest.mark.usefixtures("calls")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(100.0, device="mps")


@pytest.mark.parametrize("schedule", range(4))
def test_the_gpu_waits_for_the_host(calls, simulated, x, schedule):
    """Each sees what the other wrote before its signal."""
    simulated.set_schedule(schedule)
    before, memory = calls.axpy(x, x, 1.0), torch.zeros_like(x)
    read, written = (
        (ctypes.c_float * 100).from_address(simulator.runtime.address(each)) for each in (before, memory)
    )
    first = calls.signalled() + 1

    def work():
        assert [*read] == (2 * torch.arange(100.0)).tolist()
        written[:] = [5.0] * 100

    with ThreadPoolExecutor(1) as pool, simulated.trace() as commands:
        answered = pool.submit(answering(calls, first, work))
        ask(calls, first)
        after = calls.axpy(x, memory, 0.0)
        assert after.tolist() == [5.0] * 100 and answered.result()
    kinds = [line.split(" grid")[0] for line in commands]
    assert kinds == ["signal event", "commit", "wait for event", "axpy", "synchronize"]
    assert calls.signalled() == first + 1


def found(does: str, command_does: str, where: str = "", byte: int = 0) -> str:
    """A pattern of the finding about what the host does with memory of a command."""
    memory = rf"memory that axpy, a command of the GPU, {command_does} \(byte {byte} of \d+, touched {where}"
    return rf"{re.escape(__file__)}:\d+: the host {does} {memory}"


@pytest.mark.parametrize("schedule", range(4))
def test_memory_that_is_read_before_a_signal_is_found(calls, simulated, x, schedule):
    """By the line that asks for it; behind the signal it may be read, although commands to come write it."""
    simulated.set_schedule(schedule)
    three, seven, first = x + 3, x + 7, calls.signalled() + 1
    y = calls.axpy(x, three, 1.0)
    calls.first_of(y)
    with pytest.raises(SimulatorError, match=found("reads", "writes")):
        torch.mps.synchronize()
    assert calls.first_of(y) == 3.0
    z, read = calls.axpy(x, three, 1.0), []
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answering(calls, first, lambda: read.append(calls.first_of(z))))
        ask(calls, first)
        calls.axpy_into(x, seven, 1.0, z)
        torch.mps.synchronize()
        assert answered.result() and read == [3.0] and calls.first_of(z) == 7.0


@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_with_a_thread_of_its_own(calls, simulated, x, seed):
    """The host hears of its end without a wait; both go on while one waits for the other."""
    first, source = calls.signalled() + 1, torch.ones(100)
    with simulated.own_gpu(seed):
        y = calls.axpy(x, x, 2.0)
        calls.watch("a"), calls.commit()
        assert told(calls, 1) == ["a: 4"]
        calls.wait_by_gpu(first)
        z = calls.axpy(y, y, 1.0)
        sent = source.to("mps", non_blocking=True)  # commits
        calls.watch("b"), calls.commit()
        source.fill_(3)  # while the GPU waits: it reads what is there once it goes on
        calls.signal_by_host(first)
        assert told(calls, 1) == ["b: 4"]
        with pytest.raises(SimulatorError, match=r"test_events.py:\d+: the source of a copy to mps"):
            torch.mps.synchronize()
        assert torch.equal(z.cpu(), 6 * x.cpu()) and (sent == 3).all()


def test_a_late_gpu_runs_nothing_of_a_trace(calls, simulated, x):
    """Its thread begins once the trace has: no commit of the trace waits for it."""
    simulated.set_schedule(1)
    for seed in range(10):
        first = calls.signalled() + 1
        with simulated.event_limit(0.2), simulated.own_gpu(seed):
            calls.axpy(x, x, 1.0), calls.commit()
            with simulated.trace():
                calls.wait_by_gpu(first), calls.commit()
                time.sleep(0.001)  # it has begun
                calls.axpy(x, x, 1.0), calls.commit()
                calls.signal_by_host(first)


@pytest.fixture
def kept(calls, simulated):
    """A tensor of four pages, the host's pointer to its floats, and a wait for all commands so far."""
    wide = torch.zeros(4096, device="mps")
    with simulated.own_gpu(random.randrange(1 << 30)):
        yield wide, (ctypes.c_float * 4096).from_address(calls.contents(wide))


def write(pointer, place: int = 0):
    pointer[place] = 5.0


@pytest.mark.parametrize("kind", ["reads, written", "writes, read", "writes, written"])
def test_a_host_that_touches_memory_of_a_committed_command_is_found(calls, simulated, x, kept, kind):
    """Whether the command has run or not, until the host has heard of its end; what lies before is free."""
    wide, pointer = kept
    command, is_write = kind.split(", ")[0], kind.endswith("written")
    used, place = wide[2048:2148], 2048
    calls.axpy(used, x, 1.0) if command == "reads" else calls.axpy_into(x, x, 1.0, used)
    calls.commit()
    write(pointer)
    write(pointer, place) if is_write else pointer[place]
    where = f"at {re.escape(__file__)}:"
    with pytest.raises(
        SimulatorError, match=found("writes" if is_write else "reads", command, where, 4 * place)
    ):
        torch.mps.synchronize()
    write(pointer, place)  # it has waited
    calls.axpy(used, x, 1.0)
    calls.watch("a"), calls.commit()
    assert pointer[place] == 5.0  # both read
    assert told(calls, 1) == ["a: 4"]
    write(pointer, place)  # it was told
    torch.mps.synchronize()


def test_memory_of_commands_behind_a_wait_is_the_hosts(calls, simulated, x, kept):
    (wide, pointer), first = kept, calls.signalled() + 1
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answering(calls, first, lambda: write(pointer)))
        ask(calls, first)
        calls.commit()
        y = calls.axpy(wide[:100], x, 1.0)
        calls.commit()
        assert answered.result()
        assert y[0].item() == 5.0
    calls.wait_by_gpu(first + 2), calls.axpy(wide[:100], x, 1.0), calls.commit()
    write(pointer)
    calls.signal_by_host(first + 2)
    write(pointer)  # from here on it may run
    with pytest.raises(SimulatorError, match=found("writes", "reads")):
        torch.mps.synchronize()


def test_a_file_that_is_read_into_memory_of_a_committed_command(calls, simulated, x, tmp_path):
    """Where a command has read these bytes, as its results show: others are other slots."""
    wide, file = torch.zeros(4096, device="mps"), tmp_path / "zeros"
    file.write_bytes(bytes(4096))
    calls.axpy(wide[:100], x, 1.0), calls.commit()
    calls.read_file(str(file), wide, 400, 4096)
    torch.mps.synchronize()
    calls.axpy(wide[:100], x, 1.0), calls.commit()
    calls.read_file(str(file), wide, 396, 8)
    with pytest.raises(SimulatorError, match=found("writes", "reads", "in ", 396)):
        torch.mps.synchronize()


def test_a_wait_that_nobody_ends_is_found(calls, simulated, x):
    value = calls.signalled() + 7
    with simulated.event_limit(0.05):
        calls.wait_by_gpu(value)
        calls.axpy(x, x, 1.0)
        with pytest.raises(SimulatorError) as raised:
            torch.mps.synchronize()
    says = f": the GPU waits for the value {value} of an event, and nobody signals it; it has {value - 7}"
    assert re.match(rf"{re.escape(__file__)}:\d+{says}$", str(raised.value))
    assert not calls.wait_by_host(value, 10)
    assert usable(calls)


@pytest.mark.parametrize("gpu", [contextlib.nullcontext, lambda: simulator.own_gpu(1)])
@pytest.mark.parametrize("wait", [lambda x: torch.mps.empty_cache(), lambda x: x.untyped_storage().cpu()])
def test_a_wait_keeps_pythons_lock(calls, simulated, x, wait, gpu):
    """As torch does there: a thread of Python's that would signal the event never runs."""
    first, may_answer, interval = calls.signalled() + 1, threading.Event(), sys.getswitchinterval()
    with ThreadPoolExecutor(1) as pool, gpu(), simulated.event_limit(0.5):
        answered = pool.submit(answering(calls, first, may_answer.wait))
        ask(calls, first)
        sys.setswitchinterval(1e6)
        try:
            may_answer.set()
            with pytest.raises(SimulatorError, match=r"testing.py:\d+: the GPU waits for the value"):
                wait(x)
        finally:
            sys.setswitchinterval(interval)
        assert answered.result()
    assert usable(calls)


def test_a_wait_keeps_pythons_lock_whenever_the_gpu_begins(calls, simulated):
    """While threads of the GPU's begin and end, no thread of Python's that wants the lock has it."""
    x, may_run, ran = torch.ones(2000, device="mps"), threading.Lock(), threading.Event()
    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(1) as pool, simulated.own_gpu(1):
        for _ in range(100):
            may_run.acquire()
            running = pool.submit(lambda: (may_run.acquire(), ran.set()))
            for _ in range(4):
                calls.axpy(x, x, 1.0), calls.commit()
            sys.setswitchinterval(1e6)
            try:
                may_run.release()
                torch.mps.empty_cache()
                is_taken = ran.is_set()
            finally:
                sys.setswitchinterval(interval)
            running.result()
            may_run.release(), ran.clear()
            assert not is_taken


@pytest.mark.parametrize("schedule", range(4))
def test_listeners_are_told_once(calls, simulated, schedule):
    simulated.set_schedule(schedule)
    first = calls.signalled() + 1
    calls.listen(first, "a"), calls.listen(first + 2, "b"), calls.listen(first + 1, "c")
    calls.signal_by_gpu(first)
    torch.mps.synchronize()
    assert told(calls, 1) == ["a"]
    calls.signal_by_host(first + 2)
    assert sorted(told(calls, 2)) == ["b", "c"]
    calls.listen(first, "d")  # it was there before
    assert told(calls, 1) == ["d"]


def test_events_run_on_the_null_device(calls, simulated):
    first = calls.signalled() + 1
    with ThreadPoolExecutor(1) as pool, simulated.dropped(validate=False):
        answered = pool.submit(answering(calls, first))
        ask(calls, first)
        torch.mps.synchronize()
        assert answered.result()


def test_the_clock_of_who_answers(calls, simulated, x):
    """The GPU waits for the answer, and for each signal to be heard of."""

    def run(dispatch) -> float:
        shaderlib.execute(dispatch)
        return 1.0

    first = calls.signalled() + 1
    with ThreadPoolExecutor(1) as pool, simulated.timeline(run, 0.25, 0.0, an_event=0.5) as times:
        ends = []
        answered = pool.submit(answering(calls, first, lambda: ends.append(times.answer(2.0))))
        y = calls.axpy(x, x, 1.0)
        ask(calls, first)
        calls.axpy(y, y, 1.0).cpu()
        assert answered.result() and tuple(ends) == near(0.5 + 1.0 + 0.5 + 2.0)
        assert (times.idle, times.waited, times.busy) == near(0.5, 3.0, 2.0)
        assert (times.now,) == near(0.5 + 1.0 + 3.0 + 1.0)


@simulator.torch_version("2.14")  # which raises nothing where it waits
@pytest.mark.parametrize("schedule", [0, 1])
@pytest.mark.parametrize("waits", [False, True])
def test_a_buffer_that_takes_over_5_s_fails(calls, simulated, x, schedule, waits):
    """By the GPU's clock, whether it works or waits; those behind it run."""
    simulated.set_schedule(schedule)

    def run(dispatch) -> float:
        shaderlib.execute(dispatch)
        return 2.0

    def buffers(dispatches: int, answer: float) -> list[str]:
        """Statuses of one that works and waits so long, and of one behind it."""
        first = calls.signalled() + 1
        with ThreadPoolExecutor(1) as pool, simulated.timeline(run, 0.25) as times:
            answered = pool.submit(answering(calls, first, lambda: times.answer(answer)))
            ask(calls, first)
            for _ in range(dispatches):
                calls.axpy(x, x, 1.0)
            calls.watch("a"), calls.commit()
            z = calls.axpy(x, x, 3.0)
            calls.watch("b")
            torch.mps.synchronize()
            assert answered.result()
        assert torch.equal(z.cpu(), 4 * x.cpu())
        return [status.partition(" in ")[0] for status in told(calls, 2)]

    assert buffers(1, 2.5) == ["a: 4", "b: 4"]
    says, rest = buffers(1, 5.5) if waits else buffers(4, 0.5)
    assert says.startswith("a: 5 2 Caused GPU Timeout Error") and rest == "b: 4"


@pytest.mark.parametrize("own_gpu", [False, True])
def test_a_queue_of_the_hosts_own_goes_on_beside_a_stream_that_waits(calls, simulated, x, own_gpu):
    """It is no part of a trace, and the stream has its bits."""
    first = calls.signalled() + 1
    with simulated.own_gpu(1) if own_gpu else contextlib.nullcontext(), ThreadPoolExecutor(1) as pool:
        calls.wait_by_gpu(first)
        y = calls.axpy(x, x, 1.0)
        calls.commit()
        waits = pool.submit(torch.mps.synchronize)
        assert [calls.beat(5.0) for _ in range(3)] == [2.0] * 3
        assert calls.signalled() < first and not waits.done()
        calls.signal_by_host(first)
        waits.result()
        assert torch.equal(y.cpu(), 2 * x.cpu())


def test_an_own_queue_is_no_part_of_a_trace(calls, simulated, x):
    with simulated.trace() as commands, ThreadPoolExecutor(1) as pool:
        beat = pool.submit(calls.beat, 5.0)
        while not beat.done():
            torch.mps.synchronize()
        assert beat.result() == 2.0
    assert not [line for line in commands if "axpy" in line]


@pytest.mark.parametrize("answers", [False, True])
def test_a_watchdog_ends_a_buffer_that_waits(calls, simulated, x, answers):
    """By the real clock, beside a host that goes on. Torch is told, too."""
    first = calls.signalled() + 1
    late = contextlib.nullcontext() if answers else pytest.raises(torch.AcceleratorError, match="GPU Timeout")
    with late, simulated.own_gpu(1, watchdog=20.0 if answers else 0.2):
        calls.wait_by_gpu(first)
        y = calls.axpy(x, x, 1.0)
        calls.watch("late"), calls.commit()
        if answers:
            calls.signal_by_host(first)
        (end,) = told(calls, 1)
        assert end == "late: 4" if answers else end.startswith("late: 5 2 Caused GPU Timeout Error")
        calls.signal_by_host(first)
    if answers:
        assert torch.equal(y.cpu(), 2 * x.cpu())
