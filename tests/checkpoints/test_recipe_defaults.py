"""What `bits` gives embeddings and output heads: by their share of a model's weights."""

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, output, prompt, tiny

import torch_moe_mps
from torch_moe_mps.checkpoints.quantize.decision import weights_of
from torch_moe_mps.checkpoints.quantize.recipe import requested_recipe
from torch_moe_mps.commands.recipes import arguments_of_recipe
from torch_moe_mps.models.basics.report import QuantizationReport
from torch_moe_mps.models.modules.linears import formats_in

# Shapes of models that people have, and which share embeddings and head are of their weights.
SMOLLM2 = "Llama", {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA_270M = "Gemma3", {
    "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "vocab_size": 262144,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
}  # fmt: skip
QWEN3_30B = "Qwen3Moe", {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "vocab_size": 151936,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip

# That of docs/quality_moe.md, whose embedding is the head, too, and one whose attention is large.
SMALL_MOE = "Qwen3Moe", {
    "hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 49152,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "tie_word_embeddings": True,
}  # fmt: skip
NARROW_MOE = "Qwen3Moe", SMALL_MOE[1] | {"moe_intermediate_size": 320}
WIDE_MOE = "Qwen3Moe", SMALL_MOE[1] | {"num_attention_heads": 64, "num_experts": 8}


def formats(model, **asked) -> tuple[str, str]:
    """Of the embedding, and of a matrix of attention."""
    targets = weights_of(model, requested_recipe(**asked)).targets
    found = [next(t for n, t in targets.items() if n.endswith(end)) for end in ("embed_tokens", "q_proj")]
    return tuple(str(target.formats["weight"]) for target in found)


def of_shape(kind: str, shape: dict) -> torch.nn.Module:
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**shape)
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize(
    "shape, bits, embedding, attention",
    [
        (SMOLLM2, 4, 6, 4),
        (SMOLLM2, 3, 6, 3),
        (SMOLLM2, 6, 6, 6),
        (SMOLLM2, 8, 8, 8),
        (GEMMA_270M, 4, 6, 4),
        (QWEN3_30B, 4, 4, 6),
        (QWEN3_30B, 5, 5, 6),
        (QWEN3_30B, 8, 8, 8),
        (SMALL_MOE, 3, 6, 6),
        (WIDE_MOE, 4, 6, 4),
    ],
)
def test_what_users_of_models_get(shape, bits, embedding, attention):
    model = of_shape(*shape)
    assert formats(model, bits=bits) == (f"affine{embedding}_64", f"affine{attention}_64")
    same = {"linear_bits": "same", "embedding_bits": "same"}
    assert formats(model, bits=bits, **same) == (f"affine{bits}_64",) * 2
    found = weights_of(model, requested_recipe(bits)).targets
    experts = [target for target in found.values() if target.kind == "experts"]
    assert all(str(f) == f"affine{bits}_64" for target in experts for f in target.formats.values())
    head = weights_of(model, requested_recipe(bits)).targets["lm_head"]
    assert str(head.formats["weight"]) == f"affine{embedding}_64"


def test_the_report_says_why_some_weights_have_more_bits():
    weights = weights_of(of_shape(*SMALL_MOE), requested_recipe(4))
    embeddings, linears = weights.notes
    assert embeddings.startswith("embeddings and output head in affine6_64, as they are ")
    assert embeddings.endswith('% of the weights ("same" as embedding bits: in affine4_64)')
    assert linears.startswith("linear layers in affine6_64, as they are ")
    assert linears.endswith('% of the weights ("same" as linear bits: in affine4_64)')
    same = requested_recipe(4, embedding_bits="same", linear_bits="same")
    assert not weights_of(of_shape(*SMALL_MOE), same).notes
    assert embeddings in str(QuantizationReport(notes=weights.notes))


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("small", SMALL_MOE, "affine6_64 affine6_64 q3_k iq4_xs"),
        ("fast", SMALL_MOE, "iq4_xs iq4_xs iq4_xs iq4_xs"),
        ("best", SMALL_MOE, "affine6_64 affine6_64 iq4_xs q5_k"),
        ("best", QWEN3_30B, "iq4_xs affine6_64 iq4_xs q5_k"),
        ("small", NARROW_MOE, "affine6_64 affine6_64 affine3_64 affine4_64"),
        ("fast", NARROW_MOE, "affine4_64 affine4_64 affine4_64 affine4_64"),
        ("best", NARROW_MOE, "affine6_64 affine6_64 affine4_64 affine5_64"),
    ],
)
def test_recipes_with_a_name(name, shape, expected):
    """Formats of the embedding, of attention, of gate and up, and of down projections."""
    assert named_formats(name, of_shape(*shape)) == expected


def test_recipes_with_a_name_for_mlx_and_in_groups_of_a_size():
    model = of_shape(*SMALL_MOE)
    asked = {"bits": None, "mode": "affine", "linear_bits": "auto", "embedding_bits": "auto"}
    expected = "affine6_{0} affine6_{0} affine4_{0} affine5_{0}"
    assert named_formats("best", model, for_mlx=True, group_size=None, **asked) == expected.format(64)
    assert named_formats("best", model, group_size=32, **asked) == expected.format(32)
    asked["embedding_bits"] = 8
    expected = "affine8_64 affine6_64 q3_k iq4_xs"
    assert named_formats("small", model, group_size=None, **asked) == expected


def named_formats(name: str, model: torch.nn.Module, **asked) -> str:
    recipe = requested_recipe(**arguments_of_recipe(name, model, **asked))
    targets = weights_of(model, recipe).targets
    experts = next(target.formats for target in targets.values() if target.kind == "experts")
    ends = [next(t.formats for n, t in targets.items() if n.endswith(e)) for e in ("embed_tokens", "q_proj")]
    return " ".join(str(format) for own in (*ends, experts) for format in own.values())


def test_recipes_with_a_name_of_a_dense_model():
    model = of_shape(*SMOLLM2)
    assert arguments_of_recipe("best", model) == {"bits": 4, "overrides": {}}
    asked = {"bits": None, "group_size": 32, "embedding_bits": "auto", "linear_bits": None}
    assert arguments_of_recipe("small", model, **asked) == {
        "bits": 3, "group_size": 32, "linear_bits": None, "overrides": {},
    }  # fmt: skip


def test_what_is_asked_for_is_done():
    model = of_shape(*SMOLLM2)
    assert formats(model, bits=4, group_size=32) == ("affine6_32", "affine4_32")
    assert formats(model, bits=4, embedding_bits=8)[0] == "affine8_64"
    assert formats(model, bits=4, overrides={"embed_tokens": 3, "lm_head": 3})[0] == "affine3_64"
    assert formats(model, mode="nvfp4")[0] == "nvfp4"
    model = of_shape(*SMALL_MOE)
    assert formats(model, mode="q4_k") == ("affine6_64", "affine6_64")
    assert formats(model, mode="q6_k") == ("q6_k", "q6_k")
    same = {"linear_bits": "same", "embedding_bits": "same"}
    assert formats(model, mode="q4_k", **same) == ("q4_k", "q4_k")
    assert formats(model, mode="q4_k", overrides={"self_attn.*": {"mode": "q6_k"}})[1] == "q6_k"
    with pytest.raises(ValueError, match="linear_bits must be bits, a format or None, got 'most'"):
        requested_recipe(4, linear_bits="most")


@pytest.mark.usefixtures("shipped_defaults")
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_model_by_default(tied, tmp_path):
    """Quantised in place, and while it is loaded: embedding and head have 6 bits, the rest 4."""
    model = tiny("qwen3", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    dense = type(model).from_pretrained(tmp_path)
    torch_moe_mps.accelerate(model, 4, 32)
    loaded = torch_moe_mps.from_pretrained(str(tmp_path), bits=4, group_size=32)
    for each in (model, loaded):
        own = {name: str(f["weight"]) for name, m in each.named_modules() if (f := formats_in(m))}
        large = [own.pop(name) for name in ("model.embed_tokens", "lm_head")]
        assert large == ["affine6_32"] * 2 and {*own.values()} == {"affine4_32"}
        tiny_models.dense_twin(dense, each)
        assert_close(output(each, prompt()), output(dense, prompt()), 1e-5)
