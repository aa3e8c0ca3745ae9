"""The dtype of a quantised model: code of others asks its parameters for it, and casts them."""

import peft
import pytest
import torch
from support.checkpoints import LETTERS, tokenizer_of
from support.models import assert_close, output, prompt, stored, tiny
from support.processes import python
from support.sweep import covering, in_sweep

import torch_moe_mps
from torch_moe_mps.checkpoints.mlx.writing import save_mlx
from torch_moe_mps.models.modules.linears import QuantizedLayer

FORMATS = {"affine": {"bits": 4, "group_size": 32}, "mxfp4": {"mode": "mxfp4"}, "nvfp4": {"mode": "nvfp4"}}


@pytest.mark.parametrize(("architecture", "mode"), covering(("qwen3", "gpt_oss"), FORMATS))
def test_codes_are_no_dtype_of_a_model(architecture, mode, tmp_path):
    """In place, streamed and loaded: parameters are of one dtype, and codes keep their names."""
    model = tiny(architecture, tie_word_embeddings=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    report = torch_moe_mps.accelerate(model, **FORMATS[mode]).quantization
    model.save_pretrained(tmp_path / "saved")
    streamed = torch_moe_mps.from_pretrained(str(tmp_path / "dense"), **FORMATS[mode])
    loaded = torch_moe_mps.from_pretrained(tmp_path / "saved", type(model))
    assert len(report.modules) > 5
    for each in (model, streamed, loaded):
        assert each.dtype == next(each.parameters()).dtype == torch.bfloat16
        assert {parameter.dtype for parameter in each.parameters()} == {torch.bfloat16}
        held = {id(t) for t in each.parameters() if t.numel()}  # one without elements counts packed weights
        assert held < {id(t) for t in each.state_dict(keep_vars=True).values()}
        assert each.state_dict().keys() == model.state_dict().keys()
        each.requires_grad_(False)
        assert_close(output(each, prompt()), output(model, prompt()), 0.03)
    layer = next(m for m in model.modules() if isinstance(m, QuantizedLayer))
    assert "packed" in layer._buffers and layer.packed.dtype == torch.int32


@pytest.mark.parametrize("mode", FORMATS)
def test_casts(mode):
    """`half`, `to` a dtype or another place leave codes alone, and layers that share them go on doing so."""
    model = tiny("qwen3", tie_word_embeddings=True)
    torch_moe_mps.accelerate(model, **FORMATS[mode])
    codes = {name: tensor.clone() for name, tensor in model.named_buffers() if not tensor.is_floating_point()}
    expected = output(model, prompt())
    for cast in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.float32)):
        assert cast(model) is model
        result = output(model, prompt())
        assert model.dtype == next(model.parameters()).dtype == result.dtype
        assert model.lm_head.packed is model.model.embed_tokens.packed
        now = dict(model.named_buffers())
        assert len(codes) > 10 and all(torch.equal(now[name], tensor) for name, tensor in codes.items())
        assert_close(result.float(), expected, 0.05)


SENTENCES = """
    import sys
    import torch
    from sentence_transformers import SentenceTransformer
    from torch_moe_mps import QuantizationConfig
    from transformers import AutoConfig
    config = QuantizationConfig(**AutoConfig.from_pretrained(sys.argv[1]).quantization_config)
    model = SentenceTransformer(sys.argv[1], device="cpu", config_kwargs={"quantization_config": config})
    inner = model[0].auto_model
    sentences = ["a first sentence", "of two"]
    result = torch.from_numpy(model.encode(sentences))
    expected = torch.stack([
        inner(torch.tensor([model.tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(0).detach()
        for text in sentences
    ])
    print(model.dtype, inner.dtype, type(inner.layers[0].mlp.up_proj).__name__)
    print(bool(result.std() > 0) and bool((result - expected).abs().max() <= 1e-4 * expected.abs().max()))
"""


@pytest.mark.sweep  # sentence-transformers, and what it imports, take ten seconds
def test_sentence_transformers(tmp_path):
    """A saved model with a config of this package, as docs/embeddings.md has it: means of tokens."""
    model = tiny("qwen3").model
    torch_moe_mps.accelerate(model, 4, 32)
    model.save_pretrained(tmp_path)
    tokenizer_of([*LETTERS, " "], pad_token=" ").save_pretrained(tmp_path)
    said = python(SENTENCES, str(tmp_path)).splitlines()[-2:]
    assert said == ["torch.float32 torch.float32 QuantizedLinear", "True"]


def test_adapters():
    """PEFT makes its weights in the model's dtype, and trains them alone."""
    model = tiny("qwen3").to(torch.bfloat16)
    torch_moe_mps.accelerate(model, 4, 32, keep=["*.q_proj"])
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all("lora_" in name for name in trained)
    assert {p.dtype for p in adapted.parameters()} == {torch.bfloat16}
    assert adapted.get_memory_footprint() >= sum(t.nbytes for t in stored(model))


@pytest.mark.parametrize("dtype", in_sweep((torch.float16, torch.float32), (torch.float16,)))
def test_a_folder_of_mlx_has_the_dtype_that_it_runs_in(dtype, tmp_path):
    """Scales in bfloat16 are cast with the rest: 16 bits hold them, and kernels want one dtype."""
    model = tiny("qwen3_moe").to(torch.bfloat16)
    torch_moe_mps.accelerate(model, 4, 32, check=False)
    save_mlx(model, tmp_path, model.config.to_dict())
    loaded = torch_moe_mps.from_pretrained(str(tmp_path), dtype=dtype)
    assert loaded.dtype == dtype and {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    layer, expected = (each.model.layers[0].self_attn.q_proj for each in (loaded, model))
    assert torch.equal(layer.scales, expected.scales.to(dtype))
    assert_close(output(loaded, prompt()), output(model, prompt()).to(dtype), 0.03)
