"""GGUF files, loaded by transformers' own from_pretrained: packed, with the file's values."""

import os

import pytest
import torch
from support.gguf_files import write_file
from transformers import AutoModelForCausalLM, GgufConfig

from torch_moe_mps.transformers.linears import formats_in

IDS = torch.arange(1, 9)[None]
CASES = [
    ("llama", ("q4_k", "q6_k", "q5_k"), {}),  # rows of q and k move
    ("qwen2", ("q4_0", "q8_0", "iq4_nl"), {"tied": True}),
    ("qwen3moe", ("q4_k", "q6_k", "iq4_xs"), {}),
    ("qwen3moe", ("q3_k", "q2_k", "q5_1"), {}),
    ("qwen2", ("q4_1", "q5_0", "mxfp4"), {}),
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
    expected, found = logits(dense(path)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    parameters = {id(p): p.nbytes for p in model.parameters()}
    assert sum(parameters.values()) <= 1.05 * os.path.getsize(path)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), found) and again.dtype == model.dtype == torch.float32


def test_what_cannot_stay_packed_is_named(tmp_path):
    """Gate and up projections of two types, which one matrix cannot have."""
    path = write_file(tmp_path / "model.gguf", "qwen3moe", up="q5_k")
    with pytest.warns(UserWarning, match="6 tensors of the GGUF file cannot stay packed"):
        model = load(path)
    skipped = model.hf_quantizer.report.skipped
    assert len(skipped) == 6 and skipped["blk.0.ffn_up_exps.weight"].startswith("q5_k, ")
    expected, found = logits(dense(path)), logits(model)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


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
