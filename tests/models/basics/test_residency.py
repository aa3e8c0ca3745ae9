"""Weights are kept ready for the GPU while their model lives, wherever they move."""

import copy
import gc
import time

import pytest
import torch
from support import tiny_models
from support.sweep import in_sweep
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.models.basics import residency
from torch_moe_mps.models.basics.residency import MOVED
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_argument

OPS = torch.ops.moe_mps
IDS = torch.arange(20)[None]


def model_on_mps(**arguments):
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", head_dim=32).to("mps")
    torch_moe_mps.accelerate(model, **arguments)
    return model


@torch.no_grad()
def run(model) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    return model(input_ids=IDS.to(model.device), **cache_argument(model, cache), use_cache=True).logits


def resident(simulated, model) -> set[bool]:
    """Of all weights; those of buffers, too."""
    return {simulated.is_resident(t) for t in (*model.parameters(), *model.buffers()) if t.numel()}


HEAPS = {"alone": 0, "in a heap": 1 << 40}  # bytes


@pytest.fixture
def sets(request, simulated):
    """What is there besides the test's own."""
    gc.collect()
    with simulated.heaps(HEAPS[request.param]):
        yield simulated.residency_sets()
    gc.collect()


@pytest.mark.parametrize("sets", in_sweep(HEAPS, ["in a heap"]), indirect=True)
def test_all_weights_are_resident_until_the_model_is_gone(simulated, sets):
    model = tiny_models.tiny_model("qwen3_moe").to("mps")
    buffers = simulated.live_buffers()
    assert resident(simulated, model) == {False}
    torch_moe_mps.accelerate(model)
    assert resident(simulated, model) == {True} and simulated.residency_sets() == sets + 1
    torch_moe_mps.accelerate(model)
    assert simulated.residency_sets() == sets + 1
    twin = copy.deepcopy(model)
    torch_moe_mps.accelerate(twin)
    assert simulated.residency_sets() == sets + 2 and resident(simulated, twin) == {True}
    torch_moe_mps.restore(model)
    assert resident(simulated, twin) == {True} and simulated.residency_sets() == sets + 1
    torch_moe_mps.restore(twin)
    assert resident(simulated, twin) == {False} and not twin._load_state_dict_post_hooks
    torch_moe_mps.accelerate(model)
    del model, twin
    gc.collect()
    assert simulated.residency_sets() == sets and simulated.live_buffers() < buffers


@pytest.mark.parametrize("sets", in_sweep(HEAPS, ["alone"]), indirect=True)
def test_weights_that_move_follow(simulated, sets, monkeypatch):
    """Quantised, joined, loaded anew, and moved to the CPU and back."""
    monkeypatch.setenv("MOE_MPS_CAPTURE", "1")
    monkeypatch.setattr(residency, "REST", 0.0)
    model = model_on_mps()
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    assert resident(simulated, model) == {True}
    expected = run(model)
    cache, ids = DynamicCache(config=model.config), IDS.to("mps")
    with torch.no_grad():
        for piece in (ids, *[ids[:, :1]] * 4):  # the third token is captured, and joins what it reads
            model(input_ids=piece, **cache_argument(model, cache), use_cache=True)
    packed = {n: w.untyped_storage().data_ptr() for n, w in model.named_buffers() if "packed" in n}
    projections = [packed[f"model.layers.0.self_attn.{name}_proj.packed"] for name in "qkv"]
    assert len({*projections}) == 1 and captures_of(model).programs
    assert resident(simulated, model) == {True} and not MOVED
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for _ in range(2):  # the first call joins weights again
        assert torch.equal(run(model), expected)
    assert resident(simulated, model) == {True}
    model.to("cpu")
    assert MOVED
    torch.testing.assert_close(run(model), expected.cpu(), atol=1e-4, rtol=1e-4)
    assert simulated.residency_sets() == sets
    model.to("mps")
    for _ in range(2):
        assert torch.equal(run(model), expected)
    assert resident(simulated, model) == {True} and simulated.residency_sets() == sets + 1


def test_what_has_left_holds_no_memory(simulated):
    """Nobody has to call the model: its set ends as soon as a weight is freed."""
    model = model_on_mps()
    gc.collect()
    buffers, sets = simulated.live_buffers(), simulated.residency_sets()
    weight = model.model.embed_tokens.weight
    weight.data = weight.data.to("cpu")
    assert simulated.live_buffers() == buffers - 1 and simulated.residency_sets() == sets - 1
    model.to("cpu")
    gc.collect()
    assert simulated.live_buffers() < buffers - 20


def test_sets_change_rarely(simulated, monkeypatch):
    """A weight that is new in every call ends one set, and no call makes one until the model has rested."""
    model = model_on_mps()
    made = []
    keep = torch.ops.moe_mps._keep_resident
    monkeypatch.setattr(torch.ops.moe_mps, "_keep_resident", lambda tensors: made.append(1) or keep(tensors))
    monkeypatch.setattr(residency, "REST", 1e6)
    for _ in range(3):
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
        run(model)
    assert not made and resident(simulated, model) == {False}
    monkeypatch.setattr(residency, "REST", 0.0)
    run(model)
    assert len(made) == 1 and resident(simulated, model) == {True}


def test_memory_is_asked_for_while_the_gpu_rests(simulated):
    """About twice a second, for macOS 26, and by no thread of torch's; not while it works or waits long."""
    gc.collect()
    others, model = simulated.residency_sets(), model_on_mps()

    def waits_for(requests: int) -> None:
        end = time.monotonic() + 20
        while simulated.residency_requests() < requests:
            assert time.monotonic() < end
            time.sleep(0.05)

    with simulated.one_thread():
        run(model)
        OPS.rms_norm(torch.ones(1, 64).to("mps"), torch.ones(64).to("mps"), norm_eps=1e-6)
        asked = simulated.residency_requests()
        time.sleep(0.7)  # nobody waits for the norm: the simulator does not compute it
        assert simulated.residency_requests() == asked
        torch_moe_mps.synchronize("mps")
        waits_for(asked + 2 * (others + 1))
    OPS._ask_until_idle(0.0)
    try:
        time.sleep(0.6)  # an interval that has begun
        asked = simulated.residency_requests()
        time.sleep(0.6)
        assert simulated.residency_requests() == asked
        OPS._ask_until_idle(5.0)
        run(model)
        torch_moe_mps.synchronize("mps")
        waits_for(asked + 1)
    finally:
        OPS._ask_until_idle(180.0)


def test_memory_is_not_asked_for_beside_work(simulated):
    """A request takes its turn in a pause: not in half a second in which something was encoded."""
    gc.collect()
    model, x = model_on_mps(), torch.ones(1, 8, device="mps")
    asked, end = simulated.residency_requests(), time.monotonic() + 1.1
    while time.monotonic() < end:
        OPS.rms_norm(x, None, norm_eps=1e-6)
    assert simulated.residency_requests() == asked
    del model


@pytest.mark.parametrize(("name", "value"), [("SIMULATED_MACOS", "14"), ("MOE_MPS_RESIDENCY", "0")])
def test_without_sets(simulated, monkeypatch, name, value):
    """On macOS 14, and where the user wants none."""
    monkeypatch.setenv(name, value)
    gc.collect()
    before = simulated.residency_sets()
    model = model_on_mps()
    run(model)
    assert resident(simulated, model) == {False} and simulated.residency_sets() == before


def test_memory_that_torch_frees_first_stays_until_the_set_ends(simulated):
    """The host retains it: nothing says that Metal's set does."""
    buffers, sets = simulated.live_buffers(), simulated.residency_sets()
    weights = [torch.zeros(1000).to("mps"), torch.zeros(1000).to("mps")]
    number = OPS._keep_resident(weights)
    del weights
    assert simulated.live_buffers() == buffers + 2
    OPS._end_residency(number)
    assert simulated.live_buffers() == buffers and simulated.residency_sets() == sets
