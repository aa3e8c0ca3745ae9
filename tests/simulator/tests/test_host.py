"""Host code in the simulated Metal runtime: faults that must be found, with their message, and code that must
pass."""

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import simulator
import torch
from simulator import SimulatorError, shaderlib
from simulator.testing import near, told, usable

pytestmark = pytest.mark.usefixtures("calls")

CALLS = Path(__file__).with_name("host_calls.mm")

NOT_OURS = "host code encodes with stream->commandEncoder() only"
OUTSIDE = "the encoder is used outside the dispatch_sync block in which it was taken"
NO_BLOCK = "commandEncoder() is called outside of a block of the stream's queue"
NESTED = "dispatch_sync on queue 'metal gpu stream' inside a block of that queue: on macOS this waits forever"
WITH_ENCODER = "commit: commit command buffer with uncommitted encoder"
FAULTS = {
    "unbound buffer": "axpy: buffer(1) 'y' is not bound",
    "buffer of an earlier block": "axpy: buffer(0) 'x' is not bound",
    "offset out of range": "setBuffer: offset 400 is out of range, the buffer has 400 bytes",
    "unaligned reference": "axpy: buffer(3) 'alpha' is bound at offset 2, a reference argument needs a",
    "short reference": "axpy: buffer(3) 'alpha' has 2 bytes, the shader's type needs 4",
    "tensor of the CPU": "setBuffer: the argument is no live MTLBuffer",
    "index over 30": "setBuffer: index 31 is over the last one, 30",
    "range over 30": "setBuffer: index 31 is over the last one, 30",
    "setBytes for an output": "axpy: buffer(2) 'out' is written, and setBytes memory is read only",
    "setBytes over 4096": "setBytes: length 4097 at index 3 is not in 1..4096",
    "threadgroup memory over 32 KiB": "setThreadgroupMemoryLength: 32784 bytes at index 0 are over",
    "threadgroup memory over 32 KiB in sum": "axpy: 32784 bytes of threadgroup memory are over",
    "threadgroup memory length": "setThreadgroupMemoryLength: 100 at index 0 is no multiple of 16",
    "threadgroup memory not set": "scratch: threadgroup(0) 'memory' has no memory",
    "threadgroup memory that stays": "axpy: threadgroup(0) is still set to 64 bytes by a command before",
    "too many threads": "axpy: 1088 threads per threadgroup (64x17x1) are over the pipeline's limit of 384",
    "threads over the kernel's attribute": "narrow: 65 threads per threadgroup (65x1x1) are over the",
    "no threads": "axpy: threads per threadgroup are 0x1x1, none may be 0",
    "empty grid": "axpy: the grid is 0x1x1, none may be 0",
    "indirect offset": "IndirectBuffer: offset 6 is no multiple of 4",
    "indirect out of range": "IndirectBuffer: offset 392 is out of range, the buffer has 400 bytes",
    "no pipeline": "dispatchThreadgroups: no pipeline is set in this block",
    "nil pipeline": "setComputePipelineState: the pipeline is nil",
    "nested dispatch_sync": NESTED,
    "reading a tensor inside a block": NESTED,
    "exception through dispatch_sync": "a C++ exception leaves a dispatch_sync block, which ends the",
    "encoder kept": OUTSIDE,
    "encoder after its block": OUTSIDE,
    "encoder outside of a block": NO_BLOCK,
    "encoder in a block of another queue": NO_BLOCK,
    "ending the encoder": "endEncoding: the encoder belongs to PyTorch's stream",
    "residency of a buffer of a heap": "addAllocation: a buffer of a heap is resident with its heap alone",
    "residency before the commit": "requestResidency: commit what was added first",
    "residency without a request": "endResidency: it was not requested",
    "removal of what is not there": "removeAllocation: of what is not in the set",
    "own device": "MTLCreateSystemDefaultDevice: host code uses PyTorch's device",
    "own memory on the stream": "setBuffer: nothing orders torch's streams and a queue of host code's own",
    "a tensor on an own queue": "setBuffer: nothing orders torch's streams and a queue of host code's own",
    "own heap": "newHeapWithDescriptor: " + NOT_OURS,
    "own blits": "blitCommandEncoder: " + NOT_OURS,
    "own buffers of the stream": "commandBufferFromCommandQueue: " + NOT_OURS,
    "own command buffer": "[commandQueue commandBuffer]: " + NOT_OURS,
    "own encoder": "computeCommandEncoder: " + NOT_OURS,
    "commit": "commit: " + NOT_OURS,
    "wait": "waitUntilCompleted: " + NOT_OURS,
    "stream synchronize": "stream->synchronize: host code never waits, it only commits",
    "commit outside of a block": "stream->synchronize: a commit is called outside of a block",
    "encoder after a commit": OUTSIDE,
    "handler after the commit": "addCompletedHandler: Completed handler provided after commit call",
    "signal beside an encoder": "encodeSignalEvent:value: with uncommitted encoder",
    "signal beside another thread's encoder": "encodeSignalEvent:value: with uncommitted encoder",
    "signal with an encoder": "encodeSignalEvent:value: with uncommitted encoder",
    "second encoder": "blitCommandEncoder: A command encoder is already encoding to this command buffer",
    "commit with an encoder": WITH_ENCODER,
    "commit of the stream with an encoder": WITH_ENCODER,
    "encoder that ends twice": "endEncoding: the encoder has ended",
    "encoding after the end": "fillBuffer: the encoder has ended",
    "encoder after the commit": "computeCommandEncoder: the command buffer is committed",
    "commit twice": "commit: commit an already committed command buffer",
    "enqueue after the commit": "enqueue: enqueue an already enqueued command buffer",
    "scheduled handler after the commit": "Scheduled handler provided after commit call",
    "wait before the commit": "waitUntilCompleted: the command buffer is not committed",
    "wait behind an enqueued buffer": "waitUntilCompleted waits for a command buffer behind one that is",
    "wait outside of a block": "encodeWaitForEvent: is called outside of a block of the stream's queue",
    "wait for no event": "encodeWaitForEvent: the event is nil",
    "signal after the commit": "encodeSignalEvent: the command buffer is committed",
    "listener of no one": "notifyListener: the listener is nil",
}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(100.0, device="mps")


@pytest.fixture
def own_gpu(simulated):
    """A GPU with a thread of its own. Returns: the schedule, whose handlers come in no order."""
    with simulated.own_gpu(1):
        yield 2


def test_every_fault_has_its_message():
    named = re.findall(r'^ {4}\{"([^"]+)",', CALLS.read_text(), re.MULTILINE)
    elsewhere = {
        "autorelease without pool",
        "encoder that is released",
        "fast math",
        "language 3.2",
        "object that is not released",
        "overrun",
        "residency that does not end",
    }
    assert set(named) == FAULTS.keys() | elsewhere


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_at_the_call(calls, simulated, name):
    with simulated.heaps(1 << 20 if "of a heap" in name else 0):
        x = torch.arange(100.0, device="mps")
    with pytest.raises(simulated.SimulatorError, match=re.escape(FAULTS[name])):
        calls.fault(name, x)
    assert usable(calls)


def test_residency_that_does_not_end_is_found(calls, simulated, x):
    calls.fault("residency that does not end", x)
    with pytest.raises(simulated.SimulatorError, match="a residency set is released before endResidency"):
        torch.mps.synchronize()


def test_an_encoder_that_is_released_is_found(calls, simulated, x):
    calls.fault("encoder that is released", x)
    with pytest.raises(SimulatorError, match="Command encoder released without endEncoding"):
        torch.mps.synchronize()
    assert usable(calls)


@pytest.mark.parametrize("schedule", [*range(4), "own"])
def test_command_buffers_of_a_queue(calls, simulated, x, schedule, request):
    """They run in the order in which they were enqueued, and live until their handlers were called."""
    if schedule == "own":
        schedule = request.getfixturevalue("own_gpu")
    simulated.set_schedule(schedule)
    middle, out = torch.zeros_like(x), torch.zeros_like(x)
    calls.axpy(x, x, 1.0).cpu()  # its pipeline stays
    objects = simulated.live_objects()
    calls.own_buffers(x, middle, out)
    assert torch.equal(out.cpu(), 4 * x.cpu())
    seen = told(calls, 4)
    expected = ["first begins", "second begins", "first ends: 4", "second ends: 4"]
    assert seen == expected if schedule < 2 else sorted(seen) == sorted(expected)
    assert simulated.live_objects() == objects


def test_memory_that_a_command_buffer_does_not_retain(calls, simulated):
    calls.release_early(True)
    torch.mps.synchronize()
    calls.release_early(False)
    with pytest.raises(SimulatorError, match="a buffer is released before the end of a command buffer that"):
        torch.mps.synchronize()


def test_finding_of_a_shader_comes_at_the_next_synchronisation(calls, simulated, x):
    calls.fault("overrun", x)
    with pytest.raises(simulated.SimulatorError, match="overrun"):
        torch.mps.synchronize()
    assert usable(calls)


@pytest.mark.parametrize(
    "read",
    [lambda x: x.cpu(), lambda x: x[0].item(), lambda x: x + 1, lambda x: x.fill_(0), lambda x: print(x)],
    ids=["cpu", "item", "operator", "fill", "print"],
)
def test_everything_that_reads_synchronises(calls, simulated, x, read):
    calls.fault("overrun", x)
    with pytest.raises(simulated.SimulatorError, match="overrun"):
        read(x)


def test_a_null_device_validates_unless_told_not_to(calls, simulated, x):
    with simulated.dropped(), pytest.raises(simulated.SimulatorError, match="is not bound"):
        calls.fault("unbound buffer", x)
    with simulated.dropped(validate=False):
        calls.fault("unbound buffer", x)
        calls.fault("overrun", x)
    assert usable(calls)


def test_object_without_a_pool_is_reported(calls, simulated, x):
    calls.fault("autorelease without pool", x)
    with pytest.raises(simulated.SimulatorError, match="autoreleased where no @autoreleasepool is open"):
        torch.mps.synchronize()
    assert usable(calls)


def test_metals_message_for_a_shader_that_does_not_compile(calls):
    broken = CALLS.with_suffix(".metal").read_text().replace("alpha * x[i]", "alpha * xx[i]")
    line = broken[: broken.index("xx")].count("\n") + 1
    with pytest.raises(RuntimeError, match=rf"{line}:\d+: error: use of undeclared identifier 'xx'"):
        calls.set_shader(broken)
    assert usable(calls)


@pytest.mark.parametrize(
    ("name", "message"),
    [("fast math", "compiled with fast math"), ("language 3.2", "version is over 3.1")],
)
def test_compile_options(calls, x, name, message):
    with pytest.raises(RuntimeError, match=message):
        calls.fault(name, x)


@pytest.mark.parametrize("groups", [0, 1, 3, 8])
def test_indirect_grid_is_read_when_the_command_runs(calls, groups):
    result = calls.indirect(torch.tensor([groups], dtype=torch.int32, device="mps"))
    assert result.tolist() == [i + 1 if i < 2 * groups else 0 for i in range(16)]


def test_indirect_grid_over_the_output_is_found(calls, simulated):
    calls.indirect(torch.tensor([9], dtype=torch.int32, device="mps"))
    with pytest.raises(simulated.SimulatorError, match="mark"):
        torch.mps.synchronize()


def test_exception_inside_a_block_reaches_python(calls, x):
    with pytest.raises(RuntimeError, match="alpha is unlucky"):
        calls.axpy(x, x, 13.0)
    assert usable(calls)


def run_threads(work, count):
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_two_threads_encode_chains(calls):
    def work(i):
        x = y = torch.arange(64.0).to("mps")
        for _ in range(30):
            y = calls.axpy(x, y, i + 1.0)
        return y.tolist() == ((30 * (i + 1) + 1) * torch.arange(64.0)).tolist()

    assert run_threads(work, 2) == [True, True]


def test_threads_wait_for_commands_that_another_thread_runs(calls):
    def work(_):
        x, values = torch.arange(64.0).to("mps"), torch.arange(64.0)
        steps = range(100, 160)
        return [s for s in steps if calls.axpy(x, x, float(s)).tolist() != ((s + 1) * values).tolist()]

    assert run_threads(work, 3) == [[], [], []]


def test_buffers_live_as_long_as_commands_need_them(calls, simulated):
    gc.collect()
    before = simulated.live_buffers()
    x = torch.ones(64, device="mps")
    for _ in range(10):
        x = calls.axpy(x, x, 1.0)
    assert simulated.live_buffers() == before + 1
    assert x.tolist() == [1024.0] * 64
    del x
    assert simulated.live_buffers() == before


def test_objects_that_are_not_released_are_counted(calls, simulated, x):
    calls.axpy(x, x, 1.0).cpu()
    before = simulated.live_objects()
    for _ in range(5):
        with pytest.raises(RuntimeError, match="unlucky"):
            calls.axpy(x, x, 13.0)
        calls.axpy(x, x, 1.0).cpu()
    assert simulated.live_objects() == before
    calls.fault("object that is not released", x)
    assert simulated.live_objects() == before + 2  # the library and the function


def test_operator_without_a_kernel_fails(calls, x):
    with pytest.raises(NotImplementedError, match="simulator_test::no_kernel has no MPS kernel"):
        calls.no_kernel(x)


def test_trace(calls, simulated):
    x = torch.zeros(100, device="mps")
    with simulated.trace() as commands:
        y = calls.axpy(x[10:50], x[20:60], 2.0)
        calls.axpy(y, x[:40], 1.0)
        calls.indirect(torch.ones(1, dtype=torch.int32, device="mps"))
    assert str(commands) == (
        "axpy grid 40x1x1 threads of 40x1x1: 0=A[40:400] 1=A[80:400] 2=B[0:160] 3=4 bytes\n"
        "axpy grid 40x1x1 threads of 40x1x1: 0=B[0:160] 1=A[0:400] 2=C[0:160] 3=4 bytes\n"
        "synchronize\n"
        "make_grid grid 1x1x1 threads of 1x1x1: 0=D[0:4] 1=E[0:20]\n"
        "barrier\n"
        "mark grid E[8:20] of 2x1x1: 0=F[0:64]"
    )


@pytest.mark.parametrize("schedule", [0, 1])
def test_commit(calls, simulated, x, schedule):
    """Work that is committed runs at once under odd schedules; what it finds is raised by the next wait."""
    simulated.set_schedule(schedule)
    before = simulated.commits()
    with simulated.trace() as commands:
        calls.axpy(x, x, 2.0)
        calls.commit()
        calls.commit()
    assert [line.split()[0] for line in commands] == ["axpy", "commit", "commit"]
    assert simulated.commits() == before + 2
    calls.fault("overrun", x)
    calls.commit()
    calls.axpy(x, x, 2.0)
    with pytest.raises(SimulatorError, match="overrun"):
        torch.mps.synchronize()
    assert usable(calls)


@simulator.torch_version("2.14")  # which stores no error
@pytest.mark.parametrize("schedule", [0, 1])
def test_handlers_see_how_a_buffer_ended(calls, simulated, x, schedule):
    """Each once, in order, before a wait returns; what a buffer that failed would have written is missing."""
    simulated.set_schedule(schedule)
    y = torch.zeros_like(x)
    before = simulated.live_objects()
    with simulated.failing("timeout", 1) as failure:
        first = calls.axpy(x, y, 2.0)
        calls.watch("a"), calls.watch("b")
        calls.commit()
        assert calls.seen() == ["a: 4", "b: 4"] * schedule
        second = calls.axpy(x, y, 2.0)
        calls.watch("c")
        calls.commit()
        third = calls.axpy(x, y, 2.0)
        torch.mps.synchronize()
        text = "5 2 Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
        assert calls.seen() == ["a: 4", "b: 4"] * (1 - schedule) + [f"c: {text}"]
        assert torch.equal(first, 2 * x) and torch.equal(third, 2 * x) and second.isnan().all()
    del first, second, third
    assert failure.happened and simulated.live_objects() == before
    with simulated.failing("memory", 5) as failure:
        calls.axpy(x, y, 2.0)
    assert not failure.happened
    calls.watch("d")
    simulated.reset()  # what is dropped is complete, too
    assert calls.seen() == ["d: 4"]


@simulator.torch_version("2.14")
def test_what_follows_a_timeout(calls, simulated, x):
    """A buffer that waits behind it fails with it; after the last that macOS forgives, it runs none."""
    y, results = torch.zeros_like(x), []

    def run(*names: str) -> None:
        for name in names:
            results.append(calls.axpy(x, y, 2.0))
            calls.watch(name), calls.commit()
        torch.mps.synchronize()

    with simulated.ignoring(2, victims=True):
        for then in ("c: 4", "c: 5 4 Ignored (for causing prior/excessive GPU errors)"):
            with simulated.failing("timeout"):
                run("a", "b")
            timeout, victim = calls.seen()
            assert timeout.startswith("a: 5 2 Caused GPU Timeout Error")
            assert victim.startswith("b: 5 1 Discarded (victim of GPU error/recovery)")
            run("c")
            assert calls.seen()[0].startswith(then)
        assert [result.isnan().all().item() for result in results] == [True, True, False, True, True, True]
    assert usable(calls)


@simulator.torch_version("2.14")
@pytest.mark.parametrize("schedule", [0, 1])
def test_memory_that_the_gpu_may_not_have(calls, simulated, x, schedule):
    """Each buffer whose kernels need more fails, and none of its commands runs; the host has its tensors."""
    simulated.set_schedule(schedule)
    y, few = torch.zeros_like(x), torch.ones(10, device="mps")
    torch.mps.synchronize()

    def run(tensor: torch.Tensor) -> torch.Tensor:
        result = calls.axpy(tensor, tensor, 2.0)
        calls.watch("a"), calls.commit()
        torch.mps.synchronize()
        return result

    with simulated.working_set(2 * x.nbytes - 1):
        for _ in range(2):
            assert run(x).isnan().all()
            text = "5 8 Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
            assert calls.seen() == [f"a: {text}"]
        assert torch.equal(run(few), 3 * few) and calls.seen() == ["a: 4"]
        calls.axpy(few, few, 2.0), calls.axpy(x, y, 2.0)  # of the same buffer
        run(few)
        assert calls.seen() == [f"a: {text}"]
    with simulated.working_set(2 * x.nbytes):
        assert torch.equal(run(x), 3 * x) and calls.seen() == ["a: 4"]
    assert usable(calls)


@simulator.torch_version("2.14")
@pytest.mark.parametrize("schedule", [2, 3])
def test_late_handlers(calls, simulated, x, schedule):
    """Of the newest buffer first, behind the wait, on another thread; the buffer knows its end before."""
    simulated.set_schedule(schedule)
    calls.axpy(x, x, 1.0).cpu()  # its pipeline stays
    y, buffers, objects = torch.zeros_like(x), simulated.live_buffers(), simulated.live_objects()
    for name in ("a", "b", "c"):
        result = calls.axpy(x, y, 2.0)
        calls.watch(name)
        if schedule == 2:
            calls.commit()
    torch.mps.synchronize()
    assert torch.equal(result.cpu(), 2 * x.cpu())
    assert told(calls, 3) == (["c: 4", "b: 4", "a: 4"] if schedule == 2 else ["a: 4", "b: 4", "c: 4"])
    del result
    assert (simulated.live_buffers(), simulated.live_objects()) == (buffers, objects)
    with simulated.failing("timeout"):
        calls.axpy(x, y, 2.0), calls.watch("d")
    assert told(calls, 1)[0].startswith("d: 5 2 Caused GPU Timeout Error")


def test_streams_have_buffers_of_their_own(calls, simulated, x):
    """A commit of one leaves the other's open; a wait runs both."""
    y = torch.zeros_like(x)
    with simulated.trace() as commands:
        first = calls.axpy(x, y, 2.0)
        calls.watch("default")
        with simulated.stream(1):
            second = calls.axpy(x, y, 3.0)
            calls.watch("other"), calls.commit()
        third = calls.axpy(x, y, 4.0)
        calls.watch("still default")
        torch.mps.synchronize()
    assert [line.split()[0] for line in commands] == ["axpy", "axpy", "commit", "axpy", "synchronize"]
    assert calls.seen() == ["other: 4", "default: 4", "still default: 4"]
    for result, factor in ((first, 2), (second, 3), (third, 4)):
        assert torch.equal(result.cpu(), factor * x.cpu())


@pytest.mark.parametrize("schedule", range(4))
def test_a_wait_for_one_stream_leaves_the_others_open(calls, simulated, x, schedule):
    """Torch commits only the buffer of the stream that it waits for."""
    simulated.set_schedule(schedule)
    y = torch.zeros_like(x)
    with simulated.stream(1):
        result = calls.axpy(x, y, 3.0)
        calls.watch("other")
    calls.axpy(x, y, 2.0), calls.watch("default")
    torch.mps.synchronize()
    assert told(calls, 1) == ["default: 4"]
    with simulated.stream(1):
        torch.mps.synchronize()
        assert told(calls, 1) == ["other: 4"] and torch.equal(result.cpu(), 3 * x.cpu())


def test_streams_of_two_threads(calls, simulated, x):
    """What one thread waits for is complete, whoever runs it."""

    def work(number: int) -> bool:
        with simulated.stream(number):
            y = torch.zeros_like(x)
            return all(torch.equal(calls.axpy(x, y, float(n)).cpu(), n * x.cpu()) for n in range(1, 12))

    for schedule in range(4):
        simulated.set_schedule(schedule)
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(work, (1, 2)))


@simulator.torch_version("2.14")
def test_a_commit_that_nobody_sees(calls, simulated, x):
    """As MPSGraph makes within a graph: what comes behind lies in another buffer."""
    y = torch.zeros_like(x)
    with simulated.trace() as commands, simulated.failing("fault", 1):
        first = calls.axpy(x, y, 2.0)
        calls.watch("a")
        simulated.commit_unseen()
        second = calls.axpy(x, y, 2.0)
        calls.watch("b")
    assert [line.split()[0] for line in commands] == ["axpy", "axpy", "synchronize"]
    seen = calls.seen()
    assert seen[0] == "a: 4" and seen[1].startswith("b: 5") and len(seen) == 2
    assert torch.equal(first.cpu(), 2 * x.cpu()) and second.cpu().isnan().all()


def test_the_gpus_clock(calls, simulated, x):
    """It moves on by what a test says, while a buffer's dispatches run."""

    def run(dispatch) -> float:
        shaderlib.execute(dispatch)
        return 0.25

    calls.commit()
    with simulated.clocked(run):
        for times in (1, 3):
            for _ in range(times):
                y = calls.axpy(x, x, 2.0)
            calls.watch(str(times))
            calls.commit()
        assert torch.equal(y.cpu(), 3 * x.cpu())
    calls.axpy(x, x, 2.0), calls.watch("outside")
    torch.mps.synchronize()
    assert calls.seen() == ["1: 4 in 0.25 s", "3: 4 in 0.75 s", "outside: 4"]


def test_the_hosts_clock(calls, simulated, x):
    """It goes on while the GPU works, and waits where torch does: for copies that block, to and fro."""

    def run(dispatch) -> float:
        shaderlib.execute(dispatch)
        return 1.0

    expected = 3 * x.cpu() + 1
    with simulated.timeline(run, 0.25, 0.5) as times:
        y = calls.axpy(x, x, 2.0) + 1  # an operator of aten, in the same buffer
        assert (times.now, times.busy, times.idle) == near(0.5, 0.0, 0.0)
        host = torch.empty(x.shape).copy_(y, non_blocking=True)  # which ends the buffer
        assert (times.now, times.busy, times.idle) == near(0.75, 0.0, 0.0)
        torch.ones(3).to("mps")
        assert torch.equal(host, expected)
        assert (times.now, times.busy, times.idle) == near(0.75 + 1 + 3 * 0.5, 2.5, 0.75)
        times.work(5.0)
        assert torch.equal(y.cpu(), expected)
        assert (times.busy, times.idle) == near(3.0, 0.75 + 5.25)


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_heap(calls, simulated, is_placed):
    """Which gives out what was given back, where it fits."""
    objects = simulated.live_objects()
    rest = [] if is_placed else [False]  # 512 are left in front, 512 behind
    assert calls.heap(is_placed, 256) == [1024, 2048, 1024, 256 if is_placed else 0, *rest]
    if is_placed:
        with pytest.raises(SimulatorError, match="another buffer lies there"):
            calls.heap(True, 768)
        with pytest.raises(SimulatorError, match="offset 100 is no multiple of 256"):
            calls.heap(True, 100)
    else:
        assert simulated.live_objects() == objects


@pytest.mark.parametrize("schedule", range(4))
def test_blits(calls, simulated, x, schedule):
    """In the order of encoding. A size that is no multiple of 4 is for torch alone."""
    simulated.set_schedule(schedule)
    y = torch.zeros(100, device="mps")
    z = calls.axpy(x, x, 1.0)
    calls.blit(z, y, [8, 80, 12], False, True), calls.blit(y, y, [0, 4], False, True)
    calls.axpy_into(x, x, 2.0, z)
    expected = torch.zeros(100)
    expected[20:23], expected.view(torch.uint8)[:4] = torch.tensor([4.0, 6, 8]), 7
    assert torch.equal(y.cpu(), expected) and torch.equal(z.cpu(), 3 * x.cpu())
    calls.blit(x, y, [5, 3, 1], True, True)
    for values, ends, text in (
        ([5, 0, 4], True, "multiples of 4, got 5"),
        ([0, 0, 6], True, "multiples of 4, got 6"),
        ([398, 4], True, "multiples of 4, got 398"),
        ([400, 0, 4], True, "offset 400 is out of range"),
        ([0, 4], False, "Command encoder released without endEncoding"),
    ):
        with pytest.raises(SimulatorError, match=text):
            calls.blit(x, y, values, False, ends)
            torch.mps.synchronize()


def test_reads_of_a_disk():
    """Each begins once there is place in the queue; they share the rate."""
    assert simulator.Ssd(1.0, 4.0).seconds([4, 4, 4]) == 6.0
    assert simulator.Ssd(1.0, 4.0, depth=2).seconds([4, 4, 4]) == 4.0
    assert simulator.Ssd(1.0, 4.0, depth=8).seconds([4, 4, 4]) == 4.0
    assert simulator.Ssd(1.0, 4.0, depth=8).seconds([]) == 0.0


def test_counters(calls, simulated):
    x, y = torch.ones(128, device="mps"), torch.ones(128, device="mps")
    with simulated.counters() as dispatches:
        calls.axpy(x, y, 2.0)
    (dispatch,) = dispatches
    assert dispatch.kernel == "axpy" and dispatch.threadgroups == 2 and dispatch.threads == 128
    read = {index: traffic.bytes_read for index, traffic in dispatch.buffers.items()}
    assert read == {0: 512, 1: 512, 2: 0, 3: 512} and dispatch.bytes_read == 1536
    assert dispatch.buffers[2].bytes_written == dispatch.buffers[2].distinct_bytes_written == 512
    assert dispatch.buffers[3].distinct_bytes_read == 4
