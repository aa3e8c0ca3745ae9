"""GGUF files, loaded by transformers' own from_pretrained: packed, with the file's values."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from safetensors.torch import load_file, save_file
from support.gguf_blocks import type_of
from support.gguf_files import FIRST_LOADER, of_architecture, write, write_file
from support.memory import Memory
from support.models import operators_of
from transformers import AutoModelForCausalLM, DynamicCache, GgufConfig

import torch_moe_mps
from torch_moe_mps import quantization
from torch_moe_mps.transformers.checkpoints import gguf_file
from torch_moe_mps.transformers.checkpoints.targets import quantizable
from torch_moe_mps.transformers.linears import OrderedLinear, formats_in
from torch_moe_mps.transformers.report import any_layer

IDS = torch.arange(1, 9)[None]
CASES = [
    ("llama", ("q4_k", "q6_k", "q5_k"), {}),  # rows of q and k move
    ("qwen2", ("q4_0", "q8_0", "iq4_nl"), {"tied": True}),
    ("qwen3moe", ("q4_k", "q6_k", "iq4_xs"), {}),
    ("qwen3moe", ("q3_k", "q2_k", "q5_1"), {}),
    ("qwen2", ("q4_1", "q5_0", "mxfp4"), {}),
    ("qwen35", ("q4_k", "q6_k", "q5_k"), {}),  # an input is taken in another order
    ("qwen35moe", ("q3_k", "q4_1", "q8_0"), {"tied": True}),  # blocks move instead
    ("lfm2", ("iq4_xs", "q4_0", "q2_k"), {}),
]


def load(path, device_map="cpu", **options):
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, device_map=device_map, **options
    )


def logits(model):
    with torch.no_grad():
        return model(IDS.to(model.device)).logits.cpu()


def dense(path):
    """The model with the file's values in float32, as transformers' own loader makes it."""
    return load(path, quantization_config=GgufConfig(dequantize=True))


@pytest.mark.parametrize(("architecture", "kinds", "options"), CASES)
def test_packed_and_exact(tmp_path, recwarn, architecture, kinds, options):
    """The file's bytes and a little more; the dense model's logits; the same after saving and reading."""
    path = write_file(tmp_path / "model.gguf", architecture, kinds, **options)
    model = load(path)
    assert not [w for w in recwarn if "GGUF" in str(w.message)]
    formats = {format.name for module in model.modules() for format in formats_in(module).values()}
    assert formats == set(kinds) and not model.hf_quantizer.report.skipped
    assert any(isinstance(m, OrderedLinear) for m in model.modules()) == (architecture == "qwen35")
    expected, found = logits(dense(path)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    parameters = {id(p): p.nbytes for p in model.parameters()}
    assert sum(parameters.values()) <= 1.05 * os.path.getsize(path)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), found) and again.dtype == model.dtype == torch.float32


# Weights that stay dense: rows that are no rows of the file, and those without code of ours.
DENSE = {
    "bloom": ["transformer.h.*.self_attention.query_key_value.weight"],
    "gemma2": ["lm_head.weight"],  # tied
    "qwen2_moe": ["model.layers.*.mlp.shared_expert_gate.weight"],  # a vector
    "gpt_oss": ["model.layers.*.mlp.experts.down_proj", "model.layers.*.mlp.experts.gate_up_proj"],
}


@pytest.mark.parametrize("architecture", FIRST_LOADER)
def test_every_architecture_stays_packed(monkeypatch, architecture):
    stored, _, matrices, model = of_architecture(architecture, "q8_0")
    tensors = []
    for name, (shape, kind) in matrices.items():
        values, size = GGML_QUANT_SIZES[type_of(kind)]
        data = np.broadcast_to(np.uint8(0), (*shape[:-1], shape[-1] // values * size))
        tensors.append(gguf_file.Stored(name, kind.upper(), shape, data))
    monkeypatch.setattr(gguf_file, "read_file", lambda path: (stored, tensors))
    file = gguf_file.File("model.gguf", model)
    found = {
        target.name + "." + parameter: file.sources(target, parameter)
        for target in quantizable(model).values()
        for parameter in target.parameters
    }
    assert sum(map(bool, found.values())) >= 3
    dense = {any_layer(name) for name, source in found.items() if not source}
    assert sorted(dense) == DENSE.get(architecture, [])


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", [name for name in FIRST_LOADER if name != "gpt_oss"])
def test_every_architecture_is_exact(tmp_path, architecture):
    """But for gpt-oss, whose experts transformers does not find in a file."""
    stored, keys, matrices, _ = of_architecture(architecture, "q8_0")
    path = write(tmp_path / "model.gguf", stored, keys, matrices)
    expected, found = logits(dense(path)), logits(load(path))
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


class OfTheCpu(Memory):
    def watch(self, tensors):
        super().watch(tensor for tensor in tensors if not tensor.is_meta)


def test_loading_takes_the_file_and_a_layer(tmp_path, monkeypatch):
    """Blocks are taken apart in pieces, here smaller ones than of a real file; one thread is counted."""
    path = write_file(tmp_path / "model.gguf", "qwen3moe", ("q4_k", "q6_k", "iq4_xs"))
    monkeypatch.setattr(quantization.gguf, "VALUES_AT_ONCE", 1 << 14)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    with OfTheCpu() as memory:
        model = load(path)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    file = os.path.getsize(path)
    assert 0.98 * file < memory.peak <= file + 1.5 * layer


def operators_of_a_token(model) -> dict[str, int]:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        return operators_of(lambda: model(IDS[:, :1], past_key_values=cache))


def test_a_layer_launches_what_it_does_with_affine_weights(tmp_path):
    """With values of another type, as in Q4_K_M, queries and keys still run together."""
    one, two = (
        write_file(tmp_path / f"{kinds[1]}.gguf", "qwen3moe", kinds)
        for kinds in (("q4_k", "q4_k", "q4_k"), ("q4_k", "q6_k", "q4_k"))
    )
    affine = dense(one)
    torch_moe_mps.accelerate(affine, bits=4)
    counts = operators_of_a_token(affine)
    assert operators_of_a_token(load(one)) == counts
    assert operators_of_a_token(load(two)) == counts | {"linear_quantized": counts["linear_quantized"] + 2}


def test_gate_and_up_of_two_types_are_two_matrices(tmp_path, recwarn):
    path = write_file(tmp_path / "model.gguf", "qwen3moe", up="q5_k")
    model = load(path)
    assert not [w for w in recwarn if "GGUF" in str(w.message)]
    formats = {name: str(form) for name, form in formats_in(model.model.layers[1].mlp.experts).items()}
    assert formats == {"gate_up_proj": "q4_k", "up_proj": "q5_k", "down_proj": "q6_k"}
    expected, found = logits(dense(path)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert sum(p.nbytes for p in model.parameters()) <= 1.05 * os.path.getsize(path)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), found)


def test_what_cannot_stay_packed_is_named(tmp_path):
    """Here rows of an attention that transformers moves by the width of a row."""
    stored, keys, matrices, _ = of_architecture("bloom", "q8_0")
    path = write(tmp_path / "model.gguf", stored, keys, matrices)
    with pytest.warns(UserWarning, match="2 tensors of the GGUF file cannot stay packed"):
        model = load(path)
    why = {"blk.0.attn_qkv.weight": "q8_0, which cannot stay as it is in the model"}
    assert model.hf_quantizer.report.skipped == why | {"blk.1.attn_qkv.weight": why["blk.0.attn_qkv.weight"]}
    expected, found = logits(dense(path)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_an_order_that_is_none_is_refused(tmp_path):
    load(write_file(tmp_path / "model.gguf", "qwen35", ("q4_0", "q8_0", "q4_k"))).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".order"))
    tensors[name][0] = 512
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"out_proj\.order must be the numbers from 0 to 511, got others$"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_without_the_entry_point_transformers_loads_it(tmp_path):
    path = write_file(tmp_path / "model.gguf")
    code = f"""
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(path.parent)!r}, gguf_file={path.name!r}, device_map="cpu")
print(type(model.hf_quantizer).__name__, "torch_moe_mps" in sys.modules)
"""
    environment = {**os.environ, "MOE_MPS_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=300)
    assert done.stdout.split() == [b"GgufHfQuantizer", b"False"], done.stderr


def test_types_without_a_format_get_the_nearest(tmp_path):
    """The report has their errors."""
    path = write_file(tmp_path / "model.gguf", "qwen3moe", ("iq3_s", "tq2_0", "iq1_s"))
    with pytest.warns(
        UserWarning, match="16 tensors of the GGUF file have no format here and are now in the"
    ):
        model = load(path)
    report = model.hf_quantizer.report
    entries = [entry for own in report.modules.values() for entry in own]
    assert not report.skipped and {str(entry.format) for entry in entries} == {"affine4_32", "affine2_32"}
    assert all(entry.error < 1e-4 for entry in entries)  # their values are those of affine formats
    expected, found = logits(dense(path)), logits(model)
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_types_without_values_are_one_line(tmp_path):
    keys, matrices = {}, {"token_embd.weight": ((96, 256), "q8_k")}
    with pytest.raises(
        ValueError, match=r"token_embd.weight must be of a type whose values the package gguf"
    ):
        gguf_file.read_file(write(tmp_path / "model.gguf", "llama", keys, matrices))[1][0].values()


def test_on_mps(simulated, tmp_path):
    path = write_file(tmp_path / "model.gguf", "qwen3moe")
    model = load(path, device_map="mps")
    expected = logits(dense(path).to("cpu"))
    assert (logits(model) - expected).abs().max() <= 2e-4 * expected.abs().max()


def _damaged(data: bytes, how: str) -> bytes:
    if how == "cut off":
        return data[: len(data) - 5000]
    if how == "no magic":
        return b"GGUG" + data[4:]
    if how == "cut in the header":
        return data[:200]
    if how == "huge counts":
        return data[:8] + (2**60).to_bytes(8, "little") + data[16:]
    name = b"blk.1.attn_q.weight"
    place = data.index(name) + len(name) + 4  # behind the number of dimensions
    changes = {"huge dimension": (place, 2**40, 8), "unknown type": (place + 16, 999, 4)}
    changes["offset outside"] = (place + 20, 2**50, 8)
    start, value, size = changes[how]
    return data[:start] + value.to_bytes(size, "little") + data[start + size :]


@pytest.mark.parametrize(
    "how",
    [
        *("cut off", "no magic", "cut in the header", "huge counts"),
        *("huge dimension", "unknown type", "offset outside"),
    ],
)
def test_damaged_files(tmp_path, how):
    """One line that names the file, before anything is loaded."""
    path = write_file(tmp_path / "model.gguf")
    path.write_bytes(_damaged(path.read_bytes(), how))
    with pytest.raises(ValueError, match=r"^moe_mps::gguf: [^\n]*model\.gguf[^\n]*$"):
        load(path)
