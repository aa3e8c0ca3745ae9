"""Command buffers that fail, as where macOS stops one or memory is short: an error, never a result."""

import itertools
import re
from contextlib import suppress

import pytest
import torch
from support import tiny_models

import torch_moe_mps
from torch_moe_mps._environment import CAPTURE
from torch_moe_mps._faults import Mark, fault_of, gpu_busy, is_out_of_memory, lost_gpu, synchronized
from torch_moe_mps.ops._samples import packet, sample_arguments

SAYS = {  # what macOS says, and what helps
    "timeout": ("Caused GPU Timeout Error", "MOE_MPS_COMMIT_EVERY=4"),
    "fault": ("Caused GPU Address Fault Error", "torch-moe-mps check"),
    "memory": ("Insufficient Memory", "kv_bits=8"),
}
LATE = [2, 3]  # schedules in which handlers come late, from another thread, and the newest buffer's first
IDS = torch.arange(1, 13)[None]


def at_each_buffer(simulated, work, expected, step=1) -> int:
    """Runs `work` with one buffer after the other failing. Returns: how many there were."""
    for number, kind in zip(itertools.count(0, step), itertools.cycle(SAYS)):
        try:
            with simulated.failing(kind, number) as failure:
                result = work()
        except RuntimeError as error:
            assert SAYS[kind][0] in str(error), number
            assert failure.happened
        else:
            assert not failure.happened, f"buffer {number} failed, and nobody says so"
            assert torch.equal(result, expected)
            return number
        assert torch.equal(work(), expected)  # the next call is right


@pytest.fixture
def model():
    model = tiny_models.tiny_model("qwen2_moe", num_hidden_layers=1).to("mps")
    torch_moe_mps.accelerate(model)
    return model


@pytest.mark.parametrize("kind", SAYS)
def test_the_next_call_names_what_failed(simulated, kind):
    rms_norm, reduce = packet("rms_norm"), packet("moe_weighted_reduce")
    norm, combine = (
        sample_arguments(name, "mps", torch.float32) for name in ("rms_norm", "moe_weighted_reduce")
    )
    expected = rms_norm(**norm).cpu()
    with simulated.failing(kind):
        rms_norm(**norm), reduce(**combine), rms_norm(**norm)
        with suppress(RuntimeError):  # torch's own, from 2.15 on
            torch.mps.synchronize()
        says, helps = SAYS[kind]
        with pytest.raises(
            RuntimeError, match=f"with rms_norm, moe_weighted_reduce: {says}.*{helps}"
        ) as raised:
            rms_norm(**norm)
    assert "\n" not in str(raised.value)
    with simulated.trace() as commands:
        rms_norm(**norm), reduce(**combine)
    launched = [line.partition(": ")[0] for line in str(commands).splitlines() if " grid " in line]
    assert len(launched) == 2 and str(raised.value).endswith(f"; its kernels: {', '.join(launched)}")
    assert torch.equal(rms_norm(**norm).cpu(), expected)  # once for each fault


def test_a_wait_raises_it(simulated):
    arguments = sample_arguments("rms_norm", "mps", torch.float32)
    with simulated.failing("timeout"):
        result = packet("rms_norm")(**arguments)
        with suppress(
            torch.AcceleratorError
        ):  # torch does not ask before 2.15, and does not name what failed
            result.cpu()
        with pytest.raises(RuntimeError, match="Caused GPU Timeout Error"):
            torch_moe_mps.synchronize()
    torch_moe_mps.synchronize()


@pytest.mark.parametrize("schedule", range(4))
def test_macos_ignores_a_process_after_its_timeouts(simulated, schedule):
    """What it commits from then on fails at once, and each call says so in one line."""
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    simulated.set_schedule(schedule)
    expected = norm(**arguments).cpu()

    def said() -> str:
        with pytest.raises(torch.AcceleratorError) as raised:
            norm(**arguments)
            torch_moe_mps.synchronize()
        return str(raised.value)

    with simulated.ignoring(2):
        for _ in range(2):
            assert lost_gpu() is None
            with simulated.failing("timeout"):
                assert "Caused GPU Timeout Error" in said()
        line = r"moe_mps: macOS has stopped all GPU work of this process, .*: restart it \(Ignored .*\)"
        for _ in range(2):
            assert re.fullmatch(line, said()) and re.fullmatch(line, str(lost_gpu()))
        with suppress(torch.AcceleratorError):  # torch may be told of the last buffer later
            torch.mps.synchronize()
    assert torch.equal(norm(**arguments).cpu(), expected)
    assert lost_gpu() is None


def test_work_that_fails_with_other_work(simulated):
    """Another stream's buffer is lost with one that times out; what failed with another program's says so."""
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    expected = norm(**arguments).cpu()
    with simulated.ignoring(3, victims=True), simulated.failing("timeout"):
        norm(**arguments)
        with simulated.stream(1):
            result = norm(**arguments)
            with pytest.raises(torch.AcceleratorError, match="Caused GPU Timeout Error"):
                torch_moe_mps.synchronize()
            assert not torch.equal(result.cpu(), expected)
        with pytest.raises(torch.AcceleratorError, match="Caused GPU Timeout Error"):
            torch_moe_mps.synchronize()
    with simulated.failing("victim"):
        norm(**arguments)
        with pytest.raises(torch.AcceleratorError, match=r"Discarded .* the same call may be right now; its"):
            torch_moe_mps.synchronize()
    assert torch.equal(norm(**arguments).cpu(), expected)


@pytest.mark.parametrize("version", ["2.13", "2.15"])
@pytest.mark.parametrize(("schedule", "kind"), [(0, "timeout"), (1, "memory"), (2, "fault"), (3, "memory")])
def test_a_fault_is_raised_once_by_torch_or_by_us(simulated, kind, version, schedule):
    """Torch 2.15 stores it, too, and raises it where it waits: in an innocent request, if nobody takes it."""
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    simulated.set_schedule(schedule)
    expected = norm(**arguments).cpu()
    mark = Mark(torch.device("mps"))
    with simulated.torch_version(version):
        with simulated.failing(kind):
            norm(**arguments)
            with pytest.raises(torch.AcceleratorError, match=f"with rms_norm: {SAYS[kind][0]}"):
                Mark(torch.device("mps")).wait()
            torch.ones(3).to("mps")
            assert torch.equal(norm(**arguments).cpu(), expected)
        with simulated.failing(kind):
            result = norm(**arguments)
            if version == "2.13":
                result.cpu()
            else:
                with pytest.raises(RuntimeError) as raised:
                    result.cpu()
                assert not is_out_of_memory(raised.value)
                assert "with rms_norm" in str(fault_of(raised.value))
                assert torch.equal(norm(**arguments).cpu(), expected)
            with suppress(torch.AcceleratorError):
                torch_moe_mps.synchronize()
    mark.wait()


@pytest.mark.parametrize("schedule", range(4))
def test_a_wait_for_one_buffer_raises_the_fault_of_an_earlier_one(simulated, schedule):
    """A step has several buffers, and Metal may tell of the last one first."""
    arguments = sample_arguments("rms_norm", "mps", torch.float32)
    torch.ops.moe_mps._commit_every(1)
    simulated.set_schedule(schedule)
    for _ in range(20):
        with simulated.failing("timeout"):
            try:  # with an odd schedule a call may know it
                for _ in range(40):
                    packet("rms_norm")(**arguments)
                Mark(torch.device("mps")).wait()
            except torch.AcceleratorError as fault:
                assert "Caused GPU Timeout Error" in str(fault)
            else:
                pytest.fail("nobody says that the first buffer failed")
        torch_moe_mps.synchronize()


def test_a_buffer_that_nobody_was_told_of_is_not_taken_for_an_old_one(simulated):
    """Two buffers fail, the second one encoded behind the error of the first."""
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    torch.ops.moe_mps._commit_every(1)
    simulated.set_schedule(1)  # work runs when it is committed
    with simulated.failing("fault"):
        norm(**arguments)
        with pytest.raises(RuntimeError, match="Address Fault"):
            norm(**arguments)
        with simulated.failing("memory"):
            norm(**arguments)
            with pytest.raises(RuntimeError, match="Insufficient Memory"):
                torch_moe_mps.synchronize()


@torch.no_grad()
def logits_of(model):
    """Logits of a prompt, once the GPU has told how it went."""
    with synchronized("mps"):
        output = model(input_ids=IDS.to("mps"))
    return output.logits.cpu()


@pytest.mark.parametrize(("schedule", "step"), [(0, 1), (1, 1), *((late, 3) for late in LATE)])
def test_each_buffer_of_a_prompt(simulated, model, schedule, step):
    """Buffers of four dispatches, which run when they are committed or at the next wait."""
    simulated.set_schedule(schedule)
    torch.ops.moe_mps._commit_every(4)
    assert at_each_buffer(simulated, lambda: logits_of(model), logits_of(model), step) > 4


@pytest.mark.parametrize("captured", [False, True])
def test_each_buffer_of_generate(simulated, monkeypatch, captured):
    monkeypatch.setenv(CAPTURE, "auto" if captured else "0")
    model = tiny_models.tiny_model("qwen2_moe", num_hidden_layers=1).to("mps")
    report = torch_moe_mps.accelerate(model)
    ids = IDS.to("mps")

    def generate():
        tokens = 6 if captured else 2
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
        return model.generate(ids, **given).cpu()

    generate(), generate()
    assert (report.capture() or "").startswith("a token is one call") == captured
    assert at_each_buffer(simulated, generate, generate(), step=4 if captured else 1) > 10


def test_an_error_that_follows_from_wrong_results_is_not_the_one_that_is_raised(simulated, model):
    class Streamer:
        def put(self, value):
            raise IndexError("a token that the model does not have")

    with simulated.failing("timeout"), pytest.raises(RuntimeError, match="Caused GPU Timeout Error"):
        model.generate(IDS.to("mps"), streamer=Streamer())
    with pytest.raises(IndexError, match=re.escape("a token that the model does not have")):
        model.generate(IDS.to("mps"), streamer=Streamer())


@pytest.mark.parametrize("schedule", LATE)
def test_a_wait_hears_of_a_failure_that_is_told_late(simulated, schedule):
    arguments = sample_arguments("rms_norm", "mps", torch.float32)
    simulated.set_schedule(schedule)
    for _ in range(20):
        with simulated.failing("timeout"):
            packet("rms_norm")(**arguments)
            with pytest.raises(RuntimeError, match="Caused GPU Timeout Error"):
                torch_moe_mps.synchronize()
    torch_moe_mps.synchronize()


def test_the_first_buffer_that_failed_is_named_whichever_is_told_first(simulated):
    """Both fail; the second one's handler comes first."""
    norm, reduce = (
        sample_arguments(name, "mps", torch.float32) for name in ("rms_norm", "moe_weighted_reduce")
    )
    torch.ops.moe_mps._commit_every(1)
    simulated.set_schedule(2)
    with simulated.failing("fault", also=1):
        packet("rms_norm")(**norm)
        packet("moe_weighted_reduce")(**reduce)
        with pytest.raises(RuntimeError, match="command buffer with rms_norm: Caused GPU Address Fault"):
            torch_moe_mps.synchronize()
        torch_moe_mps.synchronize()  # both have been raised


@pytest.mark.parametrize("schedule", range(4))
def test_each_streams_users_are_told_once(simulated, schedule):
    """What one stream computes, another may read; buffers of two streams are not taken for one another's."""
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    simulated.set_schedule(schedule)
    expected = norm(**arguments).cpu()
    with simulated.stream(1):
        norm(**arguments)
        torch_moe_mps.synchronize()
    with simulated.failing("timeout"):
        norm(**arguments)
        for _ in range(3):  # turn by turn, in two buffers that are open
            with simulated.stream(1):
                norm(**arguments)
            norm(**arguments)
        for number in (0, 1):
            with simulated.stream(number):
                with pytest.raises(RuntimeError, match="Caused GPU Timeout Error"):
                    torch_moe_mps.synchronize()
                torch_moe_mps.synchronize()
                assert torch.equal(norm(**arguments).cpu(), expected)


def test_streams_commit_by_what_lies_in_their_own_buffers(simulated):
    torch.mps.synchronize()
    torch.ops.moe_mps._commit_every(4)
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    before = simulated.commits()
    for _ in range(3):
        norm(**arguments)
        with simulated.stream(1):
            norm(**arguments)
    assert simulated.commits() == before  # six dispatches, three in each
    norm(**arguments)
    assert simulated.commits() == before + 1


def test_a_buffer_that_mpsgraph_commits_takes_its_work_along(simulated):
    """What is encoded behind it is watched anew, and named alone."""
    norm, reduce = (
        sample_arguments(name, "mps", torch.float32) for name in ("rms_norm", "moe_weighted_reduce")
    )
    for after, named in ((0, "rms_norm"), (1, "moe_weighted_reduce")):
        with simulated.failing("fault", after):
            packet("rms_norm")(**norm)
            simulated.commit_unseen()
            packet("moe_weighted_reduce")(**reduce)
            with pytest.raises(RuntimeError, match=f"command buffer with {named}: Caused GPU"):
                torch_moe_mps.synchronize()


def test_time_that_the_gpu_has_worked(simulated):
    """By its own clock: what the host does between the buffers does not count."""
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    before = gpu_busy()
    with simulated.timeline(lambda dispatch: 0.5, 0.25) as times:
        for count in (1, 3):
            for _ in range(count):
                norm(**arguments)
            torch_moe_mps.synchronize()
            times.work(10.0)
        assert times.idle > 10
    assert gpu_busy() - before == pytest.approx(2.0)


@pytest.mark.parametrize("schedule", LATE)
def test_times_that_are_told_late(simulated, schedule):
    """Of the tuner: a buffer whose time has not come yet has taken no time."""
    norm, arguments = packet("rms_norm"), sample_arguments("rms_norm", "mps", torch.float32)
    simulated.set_schedule(schedule)
    with simulated.clocked(lambda dispatch: 0.5):
        for _ in range(10):
            for count in (1, 2):
                torch.ops.moe_mps._time_buffer()
                for _ in range(count):
                    norm(**arguments)
            torch.mps.synchronize()
            assert torch.ops.moe_mps._buffer_seconds() == pytest.approx([0.5, 1.0])
