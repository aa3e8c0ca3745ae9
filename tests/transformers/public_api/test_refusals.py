"""What docs/transformers.md says is refused: the call, and the error that it names."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from support import tiny_models
from support.pages import script_of
from support.processes import REPOSITORY
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from transformers import AttentionInterface, AutoModelForCausalLM, StaticCache

import torch_moe_mps
from torch_moe_mps import accelerate

PAGE = (REPOSITORY / "docs" / "transformers.md").read_text()
ROWS = re.findall(r"^\| `(.*?)`.* \| .*?(`+)(\w+: .*?)\2 \|$", PAGE.partition("## What is refused")[2], re.M)
IDS = torch.tensor([[3, 5, 7]])


@pytest.fixture
def model():
    with tiny_models.groups_of_32():
        return tiny_models.tiny_model("qwen3_moe")


def offloaded(model, _):
    model.model.layers[0].mlp.experts.to("meta")
    accelerate(model, bits=4, group_size=32)


def distributed(model, _):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        experts, mesh = model.model.layers[0].mlp.experts, init_device_mesh("cpu", (1,))
        experts.gate_up_proj = torch.nn.Parameter(distribute_tensor(experts.gate_up_proj.detach(), mesh))
        accelerate(model, bits=4, group_size=32)
    finally:
        dist.destroy_process_group()


def static_cache(model, _):
    accelerate(model, kv_bits=8)
    with torch.no_grad():
        model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=8))


def offloading(model, folder):
    model.save_pretrained(folder)
    parts = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    where = {**parts, "model.rotary_emb": "cpu"}
    torch_moe_mps.from_pretrained(folder, bits=4, group_size=32, device_map=where, offload_folder=folder)


def bitsandbytes(model, folder):
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)


REFUSED = {
    "accelerate(model, bits=7)": lambda model, _: accelerate(model, bits=7),
    "accelerate(model, bits=4, group_size=128)": lambda model, _: accelerate(model, bits=4, group_size=128),
    "accelerate(model, bit=4)": lambda model, _: accelerate(model, bit=4),
    "accelerate(model, kv_bits=5)": lambda model, _: accelerate(model, kv_bits=5),
    "accelerate(offloaded, bits=4)": offloaded,
    "accelerate(distributed, bits=4)": distributed,
    "model(ids, past_key_values=StaticCache(...))": static_cache,
    "from_pretrained(folder, bits=4, device_map=offloading)": offloading,
    "AutoModelForCausalLM.from_pretrained(bitsandbytes)": bitsandbytes,
}


def test_the_page_names_these_calls():
    assert sorted(row[0] for row in ROWS) == sorted(REFUSED)


@pytest.mark.parametrize(("call", "error"), [(row[0], row[2]) for row in ROWS])
def test_refusal(call, error, model, tmp_path):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Exception) as raised:
        REFUSED[call](model, tmp_path)
    said = f"{type(raised.value).__name__}: {raised.value}"
    assert said.startswith(error) and len(said.splitlines()) == 1
    if call != "AutoModelForCausalLM.from_pretrained(bitsandbytes)":  # transformers' own, which says more
        assert said == error
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in after.items():
        if not value.is_meta and not isinstance(value, DTensor):  # which the call itself has moved
            assert torch.equal(value, before[name])


def test_packed_weights_are_frozen(model):
    accelerate(model, bits=4, group_size=32)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_transformers_serve_takes_experts_from_the_config_alone(model, tmp_path):
    from transformers.cli.serving.model_manager import ModelManager

    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "experts_implementation": "moe_mps"}))
    served = ModelManager(device="cpu")._load_model(str(tmp_path))
    assert served.config._experts_implementation == "moe_mps"
    with torch.no_grad():
        torch.testing.assert_close(served(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'moe_mps'"):
        ModelManager(attn_implementation="moe_mps")


def test_the_reproduction_of_upstream():
    """The script about `transformers serve` in docs/upstream.md raises what its comment says."""
    script = script_of("upstream.md", "## transformers serve")
    error = re.search(r"# ValueError: (.*)", script)[1]
    try:
        with pytest.raises(ValueError, match=re.escape(error)):
            exec(script, {})
    finally:
        AttentionInterface._global_mapping.pop("mine", None)
