"""convert --adapter: beside the model as it is, and for mlx-lm, whose logits with it are PEFT's."""

import json

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from support import tiny_models
from support.checkpoints import LETTERS, tokenizer_of
from support.models import eager

import torch_moe_mps
from torch_moe_mps.commands import main

IDS = torch.arange(1, 13)[None]
RANKS = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}}  # mlx-lm has one of each


def written(folder, architecture: str, **options):
    """A dense checkpoint, and an adapter for it."""
    with tiny_models.groups_of_32():
        size = 16 if architecture == "mixtral" else 32  # mlx-lm divides the width by the heads
        model = eager(tiny_models.tiny_model(architecture, vocab_size=32, head_dim=size))
    model.save_pretrained(folder / "model")
    tokenizer_of(LETTERS, unk_token="?", pad_token="?", eos_token="?").save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options}
    peft.get_peft_model(model, peft.LoraConfig(**config)).save_pretrained(folder / "adapter")
    return folder / "model", folder / "adapter"


def convert(model, output, adapter, *options) -> int:
    given = (model, output, "--group-size", 32, "--adapter", adapter, *options)
    return main(["convert", *map(str, given)])


def test_beside(tmp_path):
    model, adapter = written(tmp_path, "llama", target_modules=["q_proj"])
    assert convert(model, tmp_path / "new", adapter) == 0
    loaded = torch_moe_mps.from_pretrained(tmp_path / "new", device_map="cpu")
    assert not any("lora" in name for name, _ in loaded.named_parameters())  # only where it is asked for
    again = peft.PeftModel.from_pretrained(loaded, tmp_path / "new" / "adapter")
    assert {file.name for file in (tmp_path / "new" / "adapter").iterdir()} == {
        f.name for f in adapter.iterdir()
    }
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    stored = load_file(adapter / "adapter_model.safetensors")[name]
    assert torch.equal(again.get_submodule(name.removesuffix(".weight")).default.weight, stored)


@pytest.mark.slow("mlx-lm loads a model")
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        pytest.param(
            *("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"], **RANKS}),
            marks=pytest.mark.sweep,
        ),
        (
            "qwen3_moe",
            {
                "target_modules": ["q_proj", "v_proj"],
                "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
                **RANKS,
            },
        ),
        pytest.param(
            *("mixtral", {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"]}),
            marks=pytest.mark.sweep,
        ),
        ("llama", {"target_modules": ["layers.1.self_attn.q_proj"]}),  # of one layer
    ],
)
def test_for_mlx(tmp_path, architecture, options):
    import mlx.core as mx
    import mlx_lm

    model, adapter = written(tmp_path, architecture, **options)
    assert convert(model, tmp_path / "new", adapter, "--to", "mlx") == 0
    theirs, _ = mlx_lm.load(str(tmp_path / "new"), adapter_path=str(tmp_path / "new" / "adapter"))
    found = torch.from_numpy(np.array(theirs(mx.array(IDS.numpy())).astype(mx.float32)))
    loaded = torch_moe_mps.from_pretrained(tmp_path / "new", device_map="cpu")
    with torch.no_grad():
        plain = loaded(input_ids=IDS).logits
        right = peft.PeftModel.from_pretrained(loaded, adapter).eval()(input_ids=IDS).logits
    assert (plain - right).norm() > 0.05 * right.norm()
    assert (found - right).norm() <= 1e-5 * right.norm()


def test_refused(tmp_path, capsys):
    model, adapter = written(tmp_path, "llama", target_modules=["q_proj"], use_dora=True)
    assert convert(model, tmp_path / "new", tmp_path, "--to", "mlx") == 1
    assert (
        f"--adapter must be a folder with an adapter_config.json, got {tmp_path}" in capsys.readouterr().err
    )
    assert convert(model, tmp_path / "new", adapter, "--to", "mlx") == 1
    message = "an adapter for --to mlx must be LoRA of matrices alone, got DoRA, biases or whole modules"
    assert message in capsys.readouterr().err
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_type": "LOHA"}))
    assert convert(model, tmp_path / "new", adapter) == 1
    assert "--adapter must be a LoRA adapter of PEFT, got one of LOHA" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
