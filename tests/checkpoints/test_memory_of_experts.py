"""Experts on the disk, and a GPU without memory for those of them that the user wants there."""

import gc

import pytest
import torch
from support.models import generate, prompt, tiny

from torch_moe_mps import from_pretrained
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.checkpoints.source import Source
from torch_moe_mps.disk.pool import least_memory

HEAP = 8 << 20  # bytes of torch's heap for small tensors


@pytest.mark.slow("loads three models")
def test_memory_that_cannot_be_had_for_experts(tmp_path, simulated, monkeypatch):
    """Others have it: torch's error ends the load, which keeps nothing of the GPU's. The next one works."""
    tiny("qwen3_moe").save_pretrained(tmp_path)
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)

    def load(**options):
        return from_pretrained(str(tmp_path), device_map="mps", **options)

    resident = load()
    expected = generate(resident, prompt(1).to("mps"))
    source = Source(str(tmp_path), {"device_map": "mps"})
    model = on_disk.placed(source, None)
    layers = on_disk.experts_file(source, None, model, on_disk.layers_of(model, True)).layers
    whole_layer = least_memory(layers, 0) // 2
    assert 3 * max(layers[0].sizes) < whole_layer  # the slots of a layer can be had
    gc.collect()
    torch.mps.empty_cache()
    before = torch.mps.driver_allocated_memory()
    with simulated.torch_memory(int((before + HEAP + whole_layer - 1) / 1.7)):
        with pytest.raises(RuntimeError, match=r"^MPS backend out of memory .* Tried to allocate") as raised:
            load(experts_memory="1MB")
        assert "\n" not in str(raised.value)
        del raised
        gc.collect()
        torch.mps.empty_cache()
        assert torch.mps.driver_allocated_memory() == before
    assert torch.equal(generate(load(experts_memory="1MB"), prompt(1).to("mps")), expected)
