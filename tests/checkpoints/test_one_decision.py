"""What is quantised, and to what, is one decision: in place, while it is read, and when it is converted."""

import copy

import pytest
import torch
import transformers
from support import tiny_models
from support.sweep import in_sweep
from torch import nn
from transformers.initialization import no_tie_weights

import torch_moe_mps
from torch_moe_mps.checkpoints.quantize.decision import weights_of
from torch_moe_mps.checkpoints.quantize.recipe import requested_recipe
from torch_moe_mps.commands import main
from torch_moe_mps.commands.recipes import arguments_of_recipe
from torch_moe_mps.models.modules.linears import formats_in

BERT = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
MARIAN = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "pad_token_id": 95, "decoder_start_token_id": 95, "eos_token_id": 1,
}  # fmt: skip
T5 = {"vocab_size": 96, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
# The embedding is 7 % of the weights, and would be 13 % if it counted for the head, too.
TIED = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
OTHERS = {
    "BertForMaskedLM": transformers.BertConfig(**BERT),
    "MarianMTModel": transformers.MarianConfig(**MARIAN),
    "T5ForConditionalGeneration": transformers.T5Config(**T5),
    "LlamaForCausalLM": transformers.LlamaConfig(**TIED),
}


def decided(model: nn.Module, **asked) -> tuple[dict[str, str], dict[str, str]]:
    """{parameter: format} of what is to be quantised, and {name: reason} of what is not."""
    weights = weights_of(model, requested_recipe(**asked))
    formats = {f"{n}.{p}": str(f) for n, t in weights.targets.items() for p, f in t.formats.items()}
    return formats, weights.dense


def done(model: nn.Module) -> dict[str, str]:
    modules = model.named_modules()
    return {f"{n}.{p}": str(f) for n, m in modules for p, f in formats_in(m).items()}


def check(cls, config) -> None:
    config.tie_word_embeddings = True
    with torch.device("meta"), no_tie_weights():  # as `from_pretrained` has it until all is read
        model = cls(config)
    recipes = [{"bits": 4, "group_size": 32}]
    if hasattr(config.get_text_config(), "num_hidden_layers"):
        recipes.append(arguments_of_recipe("mixed_4_6", model, group_size=32))
    streamed = [decided(model, **recipe) for recipe in recipes]
    model.tie_weights()
    assert [decided(model, **recipe) for recipe in recipes] == streamed


@pytest.mark.usefixtures("shipped_defaults")
@pytest.mark.parametrize("part", in_sweep(range(24), (0,)))
def test_all_architectures(part):
    names = [*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES][part::24]
    with tiny_models.groups_of_32():
        for name in names:
            check(tiny_models.model_class(name), tiny_models.tiny_config(name))


@pytest.mark.usefixtures("shipped_defaults")
@pytest.mark.parametrize("name", in_sweep(OTHERS, ("LlamaForCausalLM",)))
def test_whole_runs(name, tmp_path):
    """In place, streamed and converted: {module: formats} are equal, and the tied embedding is quantised."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(OTHERS[name]).eval()
    model.save_pretrained(tmp_path / "dense")
    for recipe, options in (({"bits": 4}, ["--bits", 4]), ({}, ["--recipe", "mixed_4_6"])):
        asked = {"group_size": 32} | (recipe or arguments_of_recipe("mixed_4_6", model))
        expected, _ = decided(model, **asked)
        new = tmp_path / f"new{options[-1]}"
        assert main([*map(str, ["convert", tmp_path / "dense", new, "--group-size", 32, *options])]) == 0
        streamed = torch_moe_mps.from_pretrained(str(tmp_path / "dense"), cls, **asked)
        converted = torch_moe_mps.from_pretrained(new, cls)
        in_place = copy.deepcopy(model)
        torch_moe_mps.accelerate(in_place, **asked)
        for each in (in_place, streamed, converted):
            assert done(each) == expected
            assert not any(
                isinstance(m, nn.Embedding) and m.embedding_dim == 64 and m.num_embeddings > 95
                for m in each.modules()
            )


RWKV = {
    "vocab_size": 96, "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "rescale_every": 1,
}  # fmt: skip


def test_weights_that_code_writes_to_stay_dense(tmp_path):
    """RWKV halves two matrices of some layers in place, before its first token."""
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**RWKV)).eval()
    dense, ids = copy.deepcopy(model), torch.arange(12).view(2, 6)
    report = torch_moe_mps.accelerate(model, bits=4, group_size=32).quantization
    ends = ("attention.output", "feed_forward.value")
    names = [f"rwkv.blocks.{i}.{end}" for i in range(2) for end in ends]
    assert report.skipped == dict.fromkeys(names, "the code around it writes to its weight")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = tiny_models.dense_twin(dense, model)(ids).logits
        for each in (model, torch_moe_mps.from_pretrained(tmp_path).eval()):
            torch.testing.assert_close(each(ids).logits, expected, rtol=1e-4, atol=1e-4)
