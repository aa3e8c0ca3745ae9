"""Dense checkpoints quantised while they are loaded: the same bits, and never the dense model in memory."""

import json
import math
import os
import re

import pytest
import safetensors.torch
import torch
import transformers
from support import gguf_files, tiny_models
from support.checkpoints import add_tokenizer, changed, fp8_blocks, mxfp4_blocks
from support.models import assert_close, output, prompt, tiny
from support.processes import forked
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps._environment import ONE_THREAD
from torch_moe_mps.checkpoints.mlx.writing import save_mlx
from torch_moe_mps.checkpoints.own.config import QuantizationConfig
from torch_moe_mps.checkpoints.quantize.sizes import total_bytes
from torch_moe_mps.checkpoints.source import Source
from torch_moe_mps.checkpoints.threads import one_by_one
from torch_moe_mps.commands import main
from torch_moe_mps.commands.perplexity import SAMPLE
from torch_moe_mps.models.basics.interface import experts_of, is_quantized
from torch_moe_mps.models.modules.linears import QuantizedLayer, has_quantized_weights
from torch_moe_mps.transformers import loading

transformers.logging.set_verbosity_error()

# Merged and transposed experts; tied and scaled embeddings. Experts one by one are those of fp8.
ALWAYS = ["gpt_oss", "gemma4", "dbrx", "jetmoe"]
EVERY = in_sweep([*tiny_models.architectures(), *ALWAYS[2:]], ALWAYS)
# Buffers that save_pretrained of transformers loses.
LOST = "balancing_biases"


def assert_same_state(model, expected) -> None:
    state, other = model.state_dict(), expected.state_dict()
    assert state.keys() == other.keys()
    for name in state:
        assert LOST in name or torch.equal(state[name], other[name]), name
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("architecture", EVERY)
def test_the_bits_are_those_of_quantising_afterwards(architecture, tmp_path):
    model = tiny(architecture)
    model.save_pretrained(tmp_path)
    config = QuantizationConfig(4, 32)
    streamed, info = type(model).from_pretrained(
        tmp_path, quantization_config=config, output_loading_info=True
    )
    report = torch_moe_mps.accelerate(model, 4, 32).quantization
    assert not any(info.values())
    assert_same_state(streamed, model)
    ours = streamed.hf_quantizer.report
    assert ours.modules.keys() == report.modules.keys() and ours.skipped == report.skipped
    assert (ours.bytes_before, ours.bytes_after) == (report.bytes_before, report.bytes_after)
    for name, entries in report.modules.items():
        for entry, other in zip(sorted(entries, key=str), sorted(ours.modules[name], key=str), strict=True):
            assert entry._replace(error=0) == other._replace(error=0)
            assert math.isclose(entry.error, other.error, rel_tol=1e-6)
    streamed.save_pretrained(tmp_path / "saved")
    again, info = torch_moe_mps.from_pretrained(tmp_path / "saved", type(model), output_loading_info=True)
    assert not any(info.values())
    assert_same_state(again, model)
    new = tmp_path / "converted"  # part by part
    assert main(["convert", str(tmp_path), str(new), "--bits", "4", "--group-size", "32"]) == 0
    files = (folder / "model.safetensors" for folder in (tmp_path / "saved", new))
    saved, converted = map(safetensors.torch.load_file, files)
    assert saved.keys() == converted.keys()
    assert all(LOST in name or torch.equal(saved[name], converted[name]) for name in saved)


@pytest.mark.parametrize("architecture", in_sweep(("qwen3_moe", "deepseek_v3"), ("deepseek_v3",)))
def test_fp8_blocks(architecture, tmp_path):
    """As transformers dequantises them without an Apple GPU: the scales are not rounded on the way."""
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32} if architecture == "deepseek_v3" else {}
    fp8_blocks(tiny(architecture, dtype=torch.bfloat16, **sizes), tmp_path)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch_moe_mps.accelerate(dense, 4, 32)
    streamed = torch_moe_mps.from_pretrained(str(tmp_path), bits=4, group_size=32)
    assert_same_state(streamed, dense)
    assert streamed.hf_quantizer.report.modules
    streamed.save_pretrained(tmp_path / "saved")
    loaded = torch_moe_mps.from_pretrained(tmp_path / "saved")
    assert_same_state(loaded, dense)


@pytest.mark.parametrize(("blocks", "architecture"), [(mxfp4_blocks, "gpt_oss"), (fp8_blocks, "qwen3_moe")])
def test_blocks_stay_packed(blocks, architecture, tmp_path):
    """transformers' own from_pretrained makes 16 bits of them."""
    blocks(tiny(architecture), tmp_path)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = torch_moe_mps.from_pretrained(tmp_path, dtype=torch.float32)
    assert any(map(has_quantized_weights, model.modules()))
    assert not any(map(has_quantized_weights, dense.modules()))
    # MXFP4 is exact; FP8 whose scales are no powers of two is quantised again, in 8 bits.
    assert_close(output(model, prompt()), output(dense, prompt()), 1e-5 if blocks is mxfp4_blocks else 0.05)


def test_a_file_that_the_machine_cannot_map_is_one_line(tmp_path, monkeypatch):
    """With its size, that of the machine, and the command that prints what fits."""
    tiny("qwen3_moe").save_pretrained(tmp_path)

    def fails(*args, **kwargs):  # torch's words
        raise RuntimeError("unable to mmap 78121482992 bytes from file <x>: Cannot allocate memory (12)")

    monkeypatch.setattr(transformers.Qwen3MoeForCausalLM, "from_pretrained", fails)
    monkeypatch.setattr(loading, "machine_memory", lambda: 23 * 10**9)
    sizes = "a file of 78.1 GB cannot be mapped on a machine with 23.0 GB"
    message = f"{tmp_path}: {sizes}; `torch-moe-mps fit {tmp_path}` prints what fits"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        torch_moe_mps.from_pretrained(tmp_path)


def test_a_recipe_while_loading(tmp_path):
    model = tiny("qwen3_moe", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    recipe = {
        "linear_bits": 8,
        "embedding_bits": 6,
        "keep": ["*.k_proj"],
        "overrides": {"experts.down_proj": 5},
    }
    loaded = torch_moe_mps.from_pretrained(str(tmp_path), bits=4, group_size=32, **recipe)
    torch_moe_mps.accelerate(model, 4, 32, **recipe)
    assert_same_state(loaded, model)


@pytest.mark.parametrize("source", ["dense", "fp8"])
def test_none_keeps_a_kind_of_weight_dense(source, tmp_path):
    model = tiny("qwen3_moe", dtype=torch.bfloat16)
    if source == "fp8":
        fp8_blocks(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    loaded = torch_moe_mps.from_pretrained(
        str(tmp_path), bits=4, group_size=32, linear_bits=None, embedding_bits=None
    )
    assert not [name for name, module in loaded.named_modules() if isinstance(module, QuantizedLayer)]
    assert all(map(is_quantized, experts_of(loaded).values()))


def test_tied_layers_that_are_both_in_the_checkpoint(tmp_path):
    model = tiny("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for other in (tensors["model.embed_tokens.weight"].clone(), -tensors["model.embed_tokens.weight"]):
        safetensors.torch.save_file(tensors | {"lm_head.weight": other}, path, metadata={"format": "pt"})
        loaded = type(model).from_pretrained(tmp_path, quantization_config=QuantizationConfig(4, 32))
        same = torch.equal(other, tensors["model.embed_tokens.weight"])
        assert (loaded.lm_head.packed is loaded.model.embed_tokens.packed) == same
        dense = type(model).from_pretrained(tmp_path)
        tiny_models.dense_twin(dense, loaded)
        assert torch.allclose(output(loaded.eval(), prompt()), output(dense.eval(), prompt()), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.fill_(torch.nan), "layers.1.mlp.experts.down_proj must be finite, got NaN, inf or"),
        (lambda t: t[:, :32], r"layers.1.mlp.experts.down_proj must be of shape .*, got"),
    ],
    ids=["NaN", "shape"],
)
def test_errors_name_the_parameter(change, message, tmp_path):
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    with changed(tmp_path / "model.safetensors") as tensors:
        for expert in range(8):
            name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
            tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        torch_moe_mps.from_pretrained(str(tmp_path), bits=4, group_size=32)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("device_map", in_sweep(("mps", torch.device("mps"), {"": "mps"}), ("mps",)), ids=str)
def test_the_bits_on_mps_are_those_on_the_cpu(device_map, tmp_path):
    dense = tiny("qwen3_moe")
    dense.save_pretrained(tmp_path)
    config = QuantizationConfig(4, 32)
    expected = type(dense).from_pretrained(tmp_path, quantization_config=config)
    model = type(dense).from_pretrained(tmp_path, quantization_config=config, device_map=device_map)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"mps"}
    assert_same_state(model.to("cpu"), expected)


# Memory

CHILD = """
import ctypes, gc, json, sys, threading, time
import torch, transformers, torch_moe_mps
from torch_moe_mps.ops import _decoded
transformers.logging.set_verbosity_error()
_decoded.memory = lambda: 0
device, warm, source, arguments = *sys.argv[1:4], json.loads(sys.argv[4])
# Freed memory goes back to the system at once: the C library would keep some of it for later.
M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
ctypes.CDLL(None).malloc_trim(0)

def private():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def load(source):
    return torch_moe_mps.from_pretrained(source, device_map=device, **arguments)

def converts(source):
    from torch_moe_mps.commands import convert, main

    convert._HELD = 0  # a machine that cannot hold the new model, and so does not measure its activations
    given = ["convert", source, source + "-new", "--bits", "4", "--to", arguments["to"]]
    assert main([*given, *(["--importance", source + "/text"] if "importance" in arguments else [])]) == 0

if "to" in arguments:
    load = converts
if "importance" in arguments:  # on a machine without a GPU, where the dense model does not run
    from torch_moe_mps.checkpoints import calibration

    calibration._SHARE, torch.backends.mps.is_available = 0, lambda: False
load(warm)  # what the first model imports and compiles is not the model's
gc.collect()
base = peak = private()
stop = threading.Event()

def watch():
    global peak
    while not stop.wait(0.001):
        peak = max(peak, private())

thread = threading.Thread(target=watch, daemon=True)
thread.start()
started = time.perf_counter(), time.process_time()
model = load(source)
seconds, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
stop.set()
thread.join(timeout=60)
model = sum(p.nbytes for p in (*model.parameters(), *model.buffers())) if model is not None else 0
print(json.dumps({"peak": peak - base, "seconds": seconds, "cpu": cpu, "model": model}))
"""


def sized_model(layers: int, hidden: int, intermediate: int, experts: int):
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=hidden, moe_intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        num_experts=experts, num_experts_per_tok=4, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    return model


def write(model, folder, source: str, shard: str) -> None:
    if source == "fp8":
        fp8_blocks(model, folder, 128)
    elif source == "mlx":
        folder.mkdir(parents=True)
        torch_moe_mps.accelerate(model, 4)
        save_mlx(model, folder, model.config.to_dict())
    elif source == "moe_mps":
        torch_moe_mps.accelerate(model, 4)
        model.save_pretrained(folder)
    elif source == "merged":
        model.save_pretrained(folder, max_shard_size=shard, save_original_format=False)
    else:
        model.save_pretrained(folder, max_shard_size=shard)


def measure(
    device, tmp_path, source, layers, hidden, intermediate, experts, shard="5GB", **arguments
) -> dict:
    model = sized_model(layers, hidden, intermediate, experts)
    dense = sum(p.nbytes for p in model.parameters())
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    small = sized_model(1, 128, 128, 8)
    for folder, each, largest in ((tmp_path, model, shard), (tmp_path / "warm", small, "5GB")):
        write(each, folder, source, largest)
        add_tokenizer(folder)
        (folder / "text").write_text(SAMPLE.read_text()[:1024])
    del model, each
    return measured(source, device, tmp_path / "warm", tmp_path, dense, layer, arguments or {"bits": 4})


def measured(source, device, warm, path, dense: int, layer: int, arguments) -> dict:
    printed = forked(CHILD, device, warm, path, json.dumps(arguments))
    result = json.loads(printed.splitlines()[-1])
    files = [path] if path.is_file() else path.glob("*.safetensors")
    result |= {
        "bound": result["model"] + 1.5 * layer,
        "dense": dense,
        "layer": layer,
        "stored": sum(file.stat().st_size for file in files),
        "rate": dense / result["seconds"] / 1e6,
    }
    shown = {k: f"{v / 2**20:.1f} MiB" if v > 1e4 else f"{v:.1f}" for k, v in result.items()}
    print(device, source, shown)
    return result


def assert_small(result: dict) -> None:
    assert result["peak"] <= result["bound"] < 0.8 * result["dense"]


def test_peak_of_private_memory(tmp_path):
    """The quantised model and 1.5 dense layers at most."""
    assert_small(measure("cpu", tmp_path, "sharded", 4, 512, 384, 12, "40MB"))


@pytest.mark.sweep
def test_peak_of_quantising_by_importance(tmp_path):
    """Of what only runs quantised: a text runs through 4 bits, and then each layer is quantised again."""
    options = {"to": "moe_mps", "importance": True}
    result = measure("cpu", tmp_path / "dense", "sharded", 4, 512, 384, 12, "40MB", **options)
    new = sum(file.stat().st_size for file in tmp_path.glob("dense-new/*.safetensors"))
    assert result["peak"] <= new + 1.5 * result["layer"] < 0.8 * result["dense"]


@pytest.mark.sweep
@pytest.mark.parametrize("to", [None, "moe_mps"])
def test_peak_of_quantising_a_gguf_file_again(to, tmp_path, monkeypatch):
    """Of 190 MiB in 5 layers, which are dequantised in pieces; a conversion keeps no layer."""
    warm = gguf_files.write_file(tmp_path / "warm.gguf", "qwen3moe", tokenizer=True)
    monkeypatch.setattr(gguf_files, "LAYERS", 5)
    monkeypatch.setattr(gguf_files, "EXPERTS", 32)
    path = gguf_files.write_file(tmp_path / "model.gguf", "qwen3moe", tokenizer=True)
    model = Source(str(path), {"dtype": torch.bfloat16}).skeleton()
    dense, layer = map(total_bytes, (model, model.model.layers[0]))
    arguments = {"bits": 4, "dtype": "auto"} if to is None else {"to": to}
    result = measured("gguf", "cpu", warm, path, dense, layer, arguments)
    if to is None:
        assert_small(result)
    else:
        assert result["peak"] <= 1.5 * layer + 4.5 / 16 * layer


HALF_A_GIGABYTE = 10, 768, 512, 24  # layers, hidden and intermediate sizes, experts


@pytest.mark.sweep
@pytest.mark.parametrize(
    "source, to", [("one by one", "mlx"), ("one by one", "moe_mps"), ("mlx", "moe_mps"), ("moe_mps", "mlx")]
)
def test_convert_needs_one_layer(source, to, tmp_path):
    """Of 10, and its quantised weights; neither tensors read nor those written are in private memory."""
    result = measure("cpu", tmp_path / "dense", source, *HALF_A_GIGABYTE, to=to)
    bound = result["bound"] + 4.5 / 16 * result["dense"] / 10
    assert result["peak"] <= min(bound, 0.3 * result["stored"])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "source, on", [("one by one", "cpu"), ("merged", "mps"), ("sharded", "cpu"), ("fp8", "mps")]
)
def test_peak_of_ten_layers(source, on, tmp_path):
    shard = "100MB" if source == "sharded" else "5GB"
    assert_small(measure(on, tmp_path, source, *HALF_A_GIGABYTE, shard))


@pytest.mark.parametrize("before", [None, "0"])
def test_two_threads_load_side_by_side(before, monkeypatch):
    """The one that ends first leaves the environment to the other; then it is as it was."""
    monkeypatch.delenv(ONE_THREAD, raising=False)
    if before is not None:
        monkeypatch.setenv(ONE_THREAD, before)
    one, other = one_by_one(True), one_by_one(True)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert os.environ.get(ONE_THREAD) == "1"
    other.__exit__(None, None, None)
    assert os.environ.get(ONE_THREAD) == before
