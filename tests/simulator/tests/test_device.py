"""The simulated device as an ordinary PyTorch device: what models, checkpoints and generation need of it."""

import copy
import io
import threading

import pytest
import simulator
import torch
import torch.nn.functional as F
from simulator.errors import SimulatorError
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

pytestmark = pytest.mark.usefixtures("simulated")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu(), b.cpu())


def test_is_an_accelerator():
    assert torch.backends.mps.is_available() and torch.backends.mps.is_built()
    assert torch.accelerator.current_accelerator() == torch.device("mps")
    assert torch.mps.device_count() == torch.accelerator.device_count() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_round_trip(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    y = x.to("mps")
    assert y.device == torch.device("mps:0") and y.dtype == dtype
    assert torch.equal(y.cpu(), x) and torch.equal(y.t().cpu(), x.t()) and y[1, 2].item() == x[1, 2].item()


def test_data_pointer_is_the_metal_buffer(simulated):
    before = simulated.live_buffers()
    x = torch.ones(5, device="mps")
    assert simulated.live_buffers() == before + 1
    assert x[2:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unwritten_memory_is_nan(dtype):
    assert torch.empty(7, dtype=dtype, device="mps").isnan().all()


def test_unwritten_ids_are_far_out_of_range():
    assert (torch.empty(3, dtype=torch.int32, device="mps").cpu() > 1 << 30).all()


def test_new_memory_is_filled_where_torch_is_deterministic():
    """As torch fills it on every device: what nobody writes can be told from what was there."""
    torch.use_deterministic_algorithms(True)
    try:
        floats, ids = (
            torch.empty(9, device="mps"),
            torch.empty_strided((3,), (2,), dtype=torch.int32, device="mps"),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert (floats.cpu().view(torch.int32) == 0x7FC00000).all() and (ids.cpu() == 2**31 - 1).all()
    assert (torch.empty(9, device="mps").cpu().view(torch.int32) != 0x7FC00000).all()


def test_views_share_memory():
    x = torch.arange(20.0, device="mps")
    view = x[5:9]
    assert view.storage_offset() == 5
    view.fill_(0)
    x.view(4, 5).t()[1].add_(1)
    assert x.cpu().tolist() == [0, 2, 2, 3, 4, 0, 1, 0, 0, 9, 10, 12, 12, 13, 14, 15, 17, 17, 18, 19]


def test_large_buffers_are_mapped_lazily():
    x = torch.empty(5 << 30, dtype=torch.uint8, device="mps")
    x[-3:] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert x[-4:].tolist() == [0, 1, 2, 3]
    with open("/proc/self/statm") as file:
        assert int(file.read().split()[1]) * 4096 < 4 << 30


def test_no_float64():
    for make in (
        lambda: torch.empty(1, dtype=torch.float64, device="mps"),
        lambda: torch.ones(2, dtype=torch.float64).to("mps"),
        lambda: torch.ones(2, device="mps").double(),
    ):
        with pytest.raises(TypeError, match="MPS framework doesn't support float64"):
            make()


def test_resize_and_out():
    x = torch.empty(0, device="mps")
    torch.add(torch.ones(3, device="mps"), 1, out=x)
    assert x.tolist() == [2, 2, 2]
    x.resize_(5)[3:] = 7
    assert x.tolist() == [2, 2, 2, 7, 7]


def test_indexing():
    x = torch.arange(24.0).reshape(8, 3)
    y, ids = x.to("mps"), torch.tensor([1, 3], device="mps")
    assert same(y[ids], x[ids.cpu()]) and same(y[y > 4], x[x > 4])
    y[ids] = 0
    y.index_add_(0, ids, torch.ones(2, 3, device="mps"))
    assert y[1].tolist() == [1, 1, 1] and torch.nonzero(ids).tolist() == [[0], [1]]


@pytest.mark.parametrize("mask", [None, "causal", "boolean", "additive"])
def test_attention(mask):
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    k, v = k[:, :2], v[:, :2]
    allowed = torch.rand(2, 1, 5, 5) > 0.4
    allowed[..., 0] = True
    settings = {"is_causal": mask == "causal", "enable_gqa": True}
    if mask == "boolean":
        settings["attn_mask"] = allowed
    elif mask == "additive":
        settings["attn_mask"] = torch.zeros(2, 1, 5, 5).masked_fill(~allowed, -1e9)
    expected = F.scaled_dot_product_attention(q, k, v, **settings)
    if "attn_mask" in settings:
        settings["attn_mask"] = settings["attn_mask"].to("mps")
    result = F.scaled_dot_product_attention(*(x.to("mps") for x in (q, k, v)), **settings)
    torch.testing.assert_close(result.cpu(), expected)


# Function, shape of the weight, settings; the input has 8 channels.
CONVOLUTIONS = {
    "conv1d": (F.conv1d, (6, 8, 3), {"padding": 2, "stride": 2}),
    "conv1d_groups": (F.conv1d, (6, 4, 3), {"groups": 2, "dilation": 2}),
    "conv1d_causal_depthwise": (F.conv1d, (8, 1, 4), {"groups": 8, "padding": 3}),  # of linear attention
    "conv2d": (F.conv2d, (6, 8, 3, 3), {"padding": (1, 2)}),
    "conv2d_same": (F.conv2d, (8, 2, 3, 3), {"padding": "same", "groups": 4}),
    "conv3d_patches": (F.conv3d, (6, 8, 2, 2, 2), {"stride": 2}),  # of vision towers
    "conv_transpose1d": (F.conv_transpose1d, (8, 5, 3), {"stride": 2, "output_padding": 1}),
    "conv_transpose2d": (F.conv_transpose2d, (8, 3, 3, 3), {"groups": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, dtype):
    """Values and gradients against float64."""
    function, shape, settings = CONVOLUTIONS[name]
    x, weight = torch.randn(2, 8, *(7,) * (len(shape) - 2)), torch.randn(shape)
    bias = torch.randn(function(x, weight, **settings).shape[1])
    x, weight, bias = (value.to(dtype) for value in (x, weight, bias))

    def run(device, dtype):
        leaves = [value.to(device, dtype, copy=True).requires_grad_() for value in (x, weight, bias)]
        out = function(*leaves, **settings)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    epsilon = torch.finfo(dtype).eps
    for found, expected in zip(run("mps", dtype), run("cpu", torch.float64), strict=True):
        assert found.device.type == "mps" and found.dtype == dtype
        error = (found.cpu().double() - expected).abs().max() / expected.abs().max()
        assert error <= 8 * epsilon


def test_generators():
    torch.manual_seed(3)
    first = torch.randn(4, device="mps")
    torch.randn(4)  # the CPU's generator is another one
    second = torch.randn(4, device="mps")
    torch.manual_seed(3)
    assert same(torch.randn(4, device="mps"), first) and same(torch.randn(4, device="mps"), second)
    torch.mps.manual_seed(5)
    state = torch.mps.get_rng_state()
    x = torch.rand(2, device="mps")
    torch.mps.set_rng_state(state)
    assert same(torch.rand(2, device="mps"), x)
    own = torch.Generator("mps").manual_seed(9)
    assert own.device.type == "mps"
    y = torch.randn(3, device="mps", generator=own)
    assert same(torch.randn(3, device="mps", generator=own.manual_seed(9)), y)


def test_events_and_streams():
    start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    start.record()
    torch.ones(3, device="mps")
    end.record()
    torch.mps.synchronize()
    assert end.query() and 0 <= start.elapsed_time(end) < 10_000
    event = torch.Event("mps")
    event.record()
    event.synchronize()
    torch.accelerator.current_stream().synchronize()


@pytest.mark.parametrize("wait", [lambda start, end: end.synchronize(), torch.mps.Event.elapsed_time])
def test_a_second_wait_for_an_event_is_found(wait):
    start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    start.record(), end.record()
    wait(start, end)
    with pytest.raises(SimulatorError, match="the host has waited for the end event before"):
        start.elapsed_time(end)
    end.record()
    assert start.elapsed_time(end) >= 0


def test_pinned_memory():
    assert torch.randn(3).pin_memory().to("mps", non_blocking=True).device.type == "mps"


def test_memory_statistics():
    before = torch.mps.current_allocated_memory()
    x = torch.empty(1000, device="mps")
    assert torch.mps.current_allocated_memory() - before == x.nbytes
    torch.mps.empty_cache()


MIB = 1 << 20


def test_memory_is_recycled_with_what_is_in_it(simulated):
    """A program that rests on new memory being NaN, or zero, is seen to: it has what was freed last."""
    x = torch.full((100,), 7.0, device="mps")
    with simulated.torch_memory():
        before, live = torch.mps.current_allocated_memory(), simulated.live_buffers()
        y = x + 1
        assert torch.mps.current_allocated_memory() - before == 512 and simulated.live_buffers() == live + 1
        del y
        assert torch.mps.current_allocated_memory() == before and simulated.live_buffers() == live
        recycled = torch.empty(100, device="mps")
        assert (recycled == 8).all() and torch.empty(100, device="mps").isnan().all()
    assert (recycled == 8).all()
    del recycled
    assert torch.empty(100, device="mps").isnan().all()
    assert simulated.live_buffers() == live


@pytest.mark.parametrize("version", ["2.13", "2.15"])
def test_the_driver_has_heaps_until_the_cache_is_emptied(simulated, version):
    with simulated.torch_version(version), simulated.torch_memory():
        before = torch.mps.driver_allocated_memory()

        def heaps() -> int:
            return (torch.mps.driver_allocated_memory() - before) // MIB

        kept = torch.empty(3, device="mps")
        assert heaps() == 8
        large = [torch.empty(size * MIB, dtype=torch.uint8, device="mps") for size in (1, 2, 9, 10, 500)]
        assert heaps() == 8 + 32 + 1024
        alone = torch.empty(599 * MIB + 1, dtype=torch.uint8, device="mps")
        assert heaps() == 8 + 32 + 1024 + 600
        del large, alone
        assert heaps() == 8 + 32 + 1024 + 600
        torch.mps.empty_cache()
        assert heaps() == 8
        del kept
        torch.mps.empty_cache()
        assert heaps() == 0
        holed = [torch.empty(12 * MIB, dtype=torch.uint8, device="mps") for _ in range(85)]
        del holed[::2]  # of a heap of 1,024 with 4 left; what is free is too small for more
        torch.empty(13 * MIB, dtype=torch.uint8, device="mps")
        assert heaps() == 2 * 1024
        del holed
        torch.mps.empty_cache()
        assert heaps() == 0


def test_the_watermarks(simulated):
    """From 1.4 of the recommended size on heaps are as small as can be; over 1.7 torch raises its error."""
    with simulated.torch_memory(1024 * MIB):
        assert torch.mps.recommended_max_memory() == 1024 * MIB
        before = torch.mps.driver_allocated_memory()
        first = torch.empty(600 * MIB, dtype=torch.uint8, device="mps")
        second = torch.empty(100 * MIB, dtype=torch.uint8, device="mps")
        assert torch.mps.driver_allocated_memory() - before == 1624 * MIB
        third = torch.empty(100 * MIB, dtype=torch.uint8, device="mps")  # has room in the heap of 1 GiB
        text = (
            r"MPS backend out of memory \(MPS allocated: 1\.59 GiB, .*Tried to allocate 900\.00 MiB on shared"
        )
        with pytest.raises(RuntimeError, match=text):
            torch.empty(900 * MIB, dtype=torch.uint8, device="mps")
        with pytest.raises(RuntimeError, match=r"^Invalid buffer size: 1\.00 GiB"):  # of any memory
            torch.empty(1024 * MIB, dtype=torch.uint8, device="mps")
        del first, second, third  # what is cached goes before that
        assert torch.empty(900 * MIB, dtype=torch.uint8, device="mps").nbytes == 900 * MIB
        torch.mps.empty_cache()
        assert torch.mps.driver_allocated_memory() == before


def test_save_load_deepcopy():
    tensors = {"a": torch.randn(3, device="mps"), "b": torch.randn(2, dtype=torch.bfloat16, device="mps")}
    file = io.BytesIO()
    torch.save(tensors, file)
    for location in (None, "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert loaded["a"].device.type == (location or "mps")
        assert all(same(loaded[name], tensors[name]) for name in tensors)
    copied = copy.deepcopy(tensors)
    tensors["a"].zero_()
    assert copied["a"].device.type == "mps" and same(copied["a"], loaded["a"])


def test_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    x = torch.randn(3, 4, dtype=torch.bfloat16)
    save_file({"x": x}, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors", device="mps")["x"]
    assert loaded.device.type == "mps" and same(loaded, x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    torch._dynamo.reset()
    x = torch.randn(5, 6, device="mps")
    compiled = torch.compile(lambda x: torch.relu(x @ x.t()) + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x).cpu(), torch.relu(x.cpu() @ x.cpu().t()) + 1)


def test_operators_of_other_libraries_do_not_fall_back():
    library = torch.library.Library("simulator_device_test", "FRAGMENT")
    library.define("nothing(Tensor x) -> Tensor")
    library.impl("nothing", lambda x: x.clone(), "CPU")
    assert torch.ops.simulator_device_test.nothing(torch.ones(1)).item() == 1
    with pytest.raises(NotImplementedError, match="simulator_device_test::nothing has no MPS kernel"):
        torch.ops.simulator_device_test.nothing(torch.ones(1, device="mps"))


@pytest.fixture(scope="module")
def tiny_qwen(tmp_path_factory) -> str:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def generate(model, ids, cache):
    settings = GenerationConfig(
        max_new_tokens=6, do_sample=False, cache_implementation=cache, disable_compile=True, pad_token_id=0
    )
    return model.generate(
        ids.to(model.device), attention_mask=torch.ones_like(ids).to(model.device), generation_config=settings
    )


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("load", ["device_map", "to"])
def test_transformers_model_generates(tiny_qwen, load, cache):
    ids = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    on_cpu = AutoModelForCausalLM.from_pretrained(tiny_qwen, dtype=torch.float32)
    if load == "to":
        model = AutoModelForCausalLM.from_pretrained(tiny_qwen, dtype=torch.float32).to("mps")
    else:
        model = AutoModelForCausalLM.from_pretrained(tiny_qwen, dtype=torch.float32, device_map="mps")
    assert {parameter.device.type for parameter in model.parameters()} == {"mps"}
    with torch.no_grad():
        expected = on_cpu(ids).logits
        torch.testing.assert_close(model(ids.to("mps")).logits.cpu(), expected, atol=1e-5, rtol=1e-4)
    assert same(generate(model, ids, cache), generate(on_cpu, ids, cache))


def test_a_second_thread_is_a_finding():
    """Of operators and of copies; outside of the block any thread may."""
    value, raised = torch.ones(4, device="mps"), []

    def use():
        try:
            (value + 1).cpu()
        except simulator.SimulatorError as error:
            raised.append(str(error))

    def in_another_thread():
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    in_another_thread()
    with simulator.one_thread():
        in_another_thread()
        assert not raised  # it was the first
    with simulator.one_thread():
        use()
        in_another_thread()
    assert raised == ["a second thread uses the device, which one thread alone may"]
