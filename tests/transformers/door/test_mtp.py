"""`generate(use_mtp=True)` of transformers: layers that guess are quantised as the others, and kept."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import tiny_models
from support.mtp import with_mtp
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.transformers.modules.linears import formats_in

PROMPT = torch.arange(1, 9)[None]
SETTINGS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe"])
def checkpoint(request, tmp_path_factory):
    """With a third layer that is no layer of the model, named as in the checkpoints of these makers."""
    folder = tmp_path_factory.mktemp(request.param)
    with with_mtp(request.param, folder) as cls:
        yield cls, folder


def tokens_of(model, **settings) -> list[int]:
    ids = PROMPT.to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS, **settings)[0, 8:].tolist()


def guessed(layers: MtpModel) -> torch.Tensor:
    """Logits of the token behind the next one, for a prompt whose states are given."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, 8, layers.config.hidden_size, generator=generator)
    with torch.no_grad():
        return layers(PROMPT, states, None, torch.arange(8)[None], MtpCache(config=layers.config))[1]


def test_tokens_are_those_of_the_model(checkpoint, monkeypatch):
    """And guesses those of the values that the quantised layers stand for; they are read once."""
    cls, folder = checkpoint
    model = torch_moe_mps.from_pretrained(folder, bits=4, group_size=32)
    expected = tokens_of(model)
    made, init = [], MtpModel.__init__
    monkeypatch.setattr(MtpModel, "__init__", lambda self, *given: made.append(self) or init(self, *given))
    for _ in range(2):
        assert tokens_of(model, use_mtp=True) == expected
    (ours,) = made
    formats = {str(format) for module in ours.layers.modules() for format in formats_in(module).values()}
    assert formats == {"affine4_32"}

    dense = cls.from_pretrained(folder).eval()
    twin = MtpModel.from_pretrained(tiny_models.dense_twin(dense, model)).eval()
    assert tokens_of(dense) == tokens_of(dense, use_mtp=True)  # those without us
    tiny_models.dense_twin(twin.layers, ours.layers)
    torch.testing.assert_close(guessed(ours), guessed(twin), atol=1e-3, rtol=1e-3)


def test_convert_quantises_them(checkpoint, tmp_path, capsys):
    """As the last layer, to what a model has that quantises them when it is loaded; once more they stay so.

    MLX's layout has none, as mlx-lm reads none.
    """
    _, folder = checkpoint
    quantised, figures = tmp_path / "four", tmp_path / "plan.json"
    asked = ["convert", str(folder), str(quantised), "--bits", "4", "--group-size", "32"]
    assert main([*asked, "--json", str(figures)]) == 0
    after = load_file(quantised / "model.safetensors")
    size = sum(tensor.nbytes for tensor in after.values())
    assert json.loads(figures.read_text())["after"] == pytest.approx(size, rel=1e-3)  # without buffers
    names = [name for name in after if name.startswith("model.layers.2.")]
    assert sum(name.endswith("packed") for name in names) > 5
    model = transformers.AutoModelForCausalLM.from_pretrained(quantised)
    assert tokens_of(model, use_mtp=True) == tokens_of(model)
    dense = torch_moe_mps.from_pretrained(folder, bits=4, group_size=32)
    found, expected = (
        MtpModel.from_pretrained(each, device_map={"": "cpu"}).layers.state_dict() for each in (model, dense)
    )
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    again = tmp_path / "again"
    assert main(["convert", str(quantised), str(again), "--bits", "3", "--group-size", "32"]) == 0
    once_more = load_file(again / "model.safetensors")
    assert all(torch.equal(once_more[name], after[name]) for name in names)
    model = transformers.AutoModelForCausalLM.from_pretrained(again)
    assert tokens_of(model, use_mtp=True) == tokens_of(model)
    asked[2] = str(tmp_path / "mlx")
    assert main([*asked, "--to", "mlx"]) == 0
    assert not {*names} & {*load_file(tmp_path / "mlx" / "model.safetensors")}


def test_layers_of_another_format_are_refused(checkpoint, tmp_path):
    """transformers would read their codes as values."""
    _, folder = checkpoint
    model = torch_moe_mps.from_pretrained(folder, bits=4, group_size=32)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model.config.name_or_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"use_mtp must have dense layers for it in .*, got those of fp8"):
        tokens_of(model, use_mtp=True)
