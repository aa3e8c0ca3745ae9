"""Experts that are read from a GGUF file itself: the model is the resident one, bit for bit."""

import itertools

import pytest
import torch
from support import gguf_models
from support.gguf_files import write_file
from support.models import generate, prompt, same_answers
from support.sweep import rows_in_sweep

from torch_moe_mps import from_pretrained
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.models.modules.experts_on_disk import expert_pools


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    """The slots of a token's experts and one more, in memory that would hold the small model as a whole."""
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)


@pytest.mark.slow("loads three models")
def test_merged_projections(tmp_path, monkeypatch):
    """Gate and up projections are one tensor of some files, and one read of each expert."""
    dense = gguf_models.small_model("olmoe")
    parts = gguf_models.write_model(tmp_path / "parts.gguf", "olmoe", dense, "q8_0")
    tensors = gguf_models.tensors_of("olmoe", dense)
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        halves = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = torch.cat(halves, 1)
    monkeypatch.setattr(gguf_models, "tensors_of", lambda *_: tensors)
    merged = gguf_models.write_model(tmp_path / "merged.gguf", "olmoe", dense, "q8_0")
    model = from_pretrained(str(merged), device_map="cpu", experts_memory="1GB")
    places = next(expert_pools(model).layers[0].reader.file.places())
    assert len(places.blocks) == 2
    with torch.no_grad():
        for path in (parts, merged):
            same_answers(from_pretrained(str(path), device_map="cpu"), model)
    assert {*tmp_path.iterdir()} == {parts, merged}


# Gate and up projections alternate, or are joined; both are transposed in transformers' classes.
DENSE_EXPERTS = [
    *itertools.product(("llama4", "gpt-oss"), ("f32", "f16", "bf16"), (torch.float32,)),
    *itertools.product(("llama4", "gpt-oss"), ("f16", "bf16"), (torch.bfloat16,)),
    *itertools.product(
        ("dbrx", "granitemoe", "jamba", "llama:mixtral"), ("f32", "f16", "bf16"), (torch.float32,)
    ),
]


@pytest.mark.slow("loads two models")
@pytest.mark.parametrize(
    ("architecture", "kind", "dtype"), rows_in_sweep(DENSE_EXPERTS, (DENSE_EXPERTS[0], DENSE_EXPERTS[9]))
)
def test_dense_experts(tmp_path, architecture, kind, dtype):
    """They are read from the file itself, and lie in the slots as the loader keeps them in memory."""
    written = gguf_models.small_model(architecture)
    path = gguf_models.write_model(tmp_path / "model.gguf", architecture, written, kind)
    model = from_pretrained(str(path), device_map="cpu", dtype=dtype, experts_memory="1GB")
    (reader,) = {layer.reader.file for layer in expert_pools(model).layers}
    kinds = {block for places in reader.places() for block, _ in places.blocks}
    assert kinds - {"f32"} == {kind} - {"f32"}  # biases are f32 in every file
    assert [*tmp_path.iterdir()] == [path]
    with torch.no_grad():
        same_answers(from_pretrained(str(path), device_map="cpu", dtype=dtype), model)
    assert expert_pools(model).counters.misses > 0


@pytest.mark.slow("loads two models")
def test_on_mps(tmp_path, simulated):
    """Captured tokens, a prompt and the tokens behind it, with two orders of the simulator's threads."""
    path = str(write_file(tmp_path / "model.gguf", "qwen3moe", ("q4_k", "q6_k", "q4_k")))
    resident, model = (
        from_pretrained(path, device_map="mps", dtype=torch.float16, **options)
        for options in ({}, {"experts_memory": "1GB"})
    )
    before = prompt(1, 4).to("mps")
    expected = generate(resident, before, max_new_tokens=3)
    for schedule in range(2):
        simulated.set_schedule(schedule)
        assert torch.equal(generate(model, before, max_new_tokens=3), expected)
    assert expert_pools(model).counters.misses > 0
    assert [*tmp_path.iterdir()] == [tmp_path / "model.gguf"]
