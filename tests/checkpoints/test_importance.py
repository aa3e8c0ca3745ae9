"""Importance: what weights multiply, collected, kept in files, and quantised by."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers
from support import tiny_models
from support.models import tiny
from torch import nn

import torch_moe_mps
from torch_moe_mps.checkpoints import calibration
from torch_moe_mps.checkpoints.quantize.decision import weights_of
from torch_moe_mps.checkpoints.quantize.importance import PRIOR, Importance
from torch_moe_mps.checkpoints.quantize.recipe import Recipe
from torch_moe_mps.quantization import Format, quantize

transformers.logging.set_verbosity_error()

WIDE = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 16}


def moe(**overrides):
    return tiny("qwen3_moe", **{**WIDE, **overrides})


def tokens(count: int = 600) -> torch.Tensor:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(3))


def collected(model, ids=None) -> Importance:
    return torch_moe_mps.collect_importance(model, tokens() if ids is None else ids, progress=False)


@torch.no_grad()
def inputs_seen(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """In float64 the mean square of every call of torch's linear, by the weight that it was called with.

    Experts of transformers' own eager code call it for each expert with its tokens alone.
    """
    model.set_experts_implementation("eager")
    names, sums, counts = {p.data_ptr(): n for n, p in model.named_parameters()}, {}, {}
    linear = nn.functional.linear

    def watched(x, weight, bias=None):
        whole = weight if weight._base is None else weight._base
        offset = weight.storage_offset() // max(1, weight.numel()) if whole is not weight else 0
        name = names[whole.data_ptr()] + (f"[{offset}]" if whole.dim() == 3 else "")
        squares = x.double().square().flatten(0, -2)
        sums[name] = sums.get(name, 0) + squares.sum(0)
        counts[name] = counts.get(name, 0) + len(squares)
        return linear(x, weight, bias)

    nn.functional.linear = watched
    try:
        for window in ids.split(512):
            model(input_ids=window[None], use_cache=False)
    finally:
        nn.functional.linear = linear
    return {name: (sums[name], counts[name]) for name in sums}


def test_means_are_those_of_all_calls_of_torch():
    model = moe(tie_word_embeddings=False)
    seen = inputs_seen(model, tokens())
    model = torch_moe_mps.restore(model)
    found = collected(model)
    assert found.tokens == 600 and len(found.text) == 64
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj", "lm_head"):
        total, count = seen[f"{name}.weight"]
        assert count == 600
        torch.testing.assert_close(found.means[name].double(), total / count, rtol=1e-5, atol=0)
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        each = [seen.get(f"{path}[{index}]", (0, 0)) for index in range(8)]
        whole = sum(total for total, _ in each) / sum(count for _, count in each)
        for mean, (total, count) in zip(found.means[path], each, strict=True):
            expected = (total + PRIOR * whole) / (count + PRIOR)
            torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-12)


def test_quantised_and_accelerated_models_have_the_same_means():
    """But for what quantising in 8 bits changes."""
    model = moe()
    dense = collected(model)
    torch_moe_mps.accelerate(model, bits=8, group_size=32, check=False)
    quantised = collected(model)
    assert quantised.means.keys() == dense.means.keys()
    for name, mean in dense.means.items():
        torch.testing.assert_close(quantised.means[name], mean, rtol=0.1, atol=0.02 * float(mean.max()))


def test_means_of_experts_under_other_names():
    """DBRX's, by its own code, which calls a module with each expert's matrices."""
    own = tiny("dbrx", n_layers=1)
    model, sums, counts = copy.deepcopy(own), torch.zeros(2, 8, 96).double(), torch.zeros(8).double()

    def watched(_, args):
        x, w1, v1, _ = args
        number = w1.storage_offset() // w1.numel()
        counts[number] += len(x)
        rows = torch.nn.functional.silu(x @ w1.T) * (x @ v1.T)
        for place, each in enumerate((x, rows)):
            sums[place, number, : each.shape[-1]] += each.double().square().sum(0)

    own.transformer.blocks[0].ffn.experts.mlp.register_forward_pre_hook(watched)
    with torch.no_grad():
        for window in tokens().split(512):
            own(input_ids=window[None], use_cache=False)
    torch_moe_mps.accelerate(model, check=False)
    found = collected(model)
    for total, name in zip(sums, ("gate_up_proj", "down_proj"), strict=True):
        mean = found.means[f"transformer.blocks.0.ffn.experts.{name}"]
        expected = (total + PRIOR * total.sum(0) / counts.sum()) / (counts[:, None] + PRIOR)
        torch.testing.assert_close(mean.double(), expected[:, : mean.shape[1]], rtol=1e-5, atol=1e-9)
    report = torch_moe_mps.accelerate(model, 4, 32, importance=found, check=False)
    assert "for 5 of 6 matrices" in report.quantization.importance  # of all but the embedding


@pytest.mark.parametrize("architecture", ["jetmoe", "llama4"])
def test_experts_that_are_called_without_ids_have_no_means(architecture):
    with tiny_models.groups_of_32():
        model = tiny(architecture)
    found = collected(model)
    assert found.means and not any("down_proj" in name and "experts" in name for name in found.means)
    report = torch_moe_mps.accelerate(model, 4, 32, importance=found, check=False)
    assert report.quantization.importance is not None


SOME = ("deepseek_v3", "gpt_oss", "qwen3_next")
# Parts of names: of what few keys do not reach, and of what pictures alone do.
UNSEEN = (".indexer.", ".multi_modal_projector", ".vision_moe.", ".resampler_model.")


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(a, marks=() if a in SOME else pytest.mark.sweep)
        for a in [*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES]
    ],
)
def test_every_matrix_of_every_architecture_is_seen(architecture):
    """Whatever runs in place of its module. Embeddings multiply nothing."""
    with tiny_models.groups_of_32():
        model = tiny(architecture)
    torch_moe_mps.accelerate(model, check=False)
    importance = collected(model, tokens().remainder(90))
    usual = Format(4, 32)
    targets = weights_of(model, Recipe(usual, usual, usual)).targets
    importance.assign(model, targets)
    unseen = [
        target.path(parameter)
        for target in targets.values()
        for parameter in target.formats
        if parameter not in target.importance and not isinstance(target.module, nn.Embedding)
    ]
    assert [name for name in unseen if not any(part in name for part in UNSEEN)] == []


@pytest.mark.parametrize("letters, most", [(8, 258), (5000, 20), (1, 0)])
def test_a_part_of_a_text_is_read_that_has_its_first_tokens(letters, most, monkeypatch):
    """Whatever the length of a token: here of a word, whose number of letters it is."""
    read = []

    def tokenizer(text, **options):
        read.append(len(text))
        return SimpleNamespace(input_ids=torch.tensor([[len(word) for word in text.split(" ")]]))

    monkeypatch.setattr(calibration, "read_tokenizer", lambda *named: tokenizer)
    words = [letters + number % 3 for number in range(20 * (most + 64))]
    text = " ".join("a" * length for length in words)
    ids = calibration.tokens_of_text(SimpleNamespace(path="", gguf=None, others={}), text, most)
    assert ids.tolist() == words[:most]
    assert read[-1] <= 8 * (letters + 2) * (most + 64)


def test_an_expert_without_tokens_has_the_mean_of_its_layer():
    model = moe()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[5] = 0
        model.model.layers[0].mlp.gate.weight[5, 0] = (
            -1e3 * model.model.layers[0].mlp.gate.weight[0, 0].sign()
        )
    routed = []
    block = model.model.layers[0].mlp.experts
    hook = block.register_forward_pre_hook(lambda _, args: routed.append(args[1]))
    means = collected(model).means["model.layers.0.mlp.experts.gate_up_proj"]
    hook.remove()
    unseen = sorted({*range(8)} - {*torch.cat(routed).flatten().tolist()})
    assert means.shape == (8, 64) and bool((means > 0).all())
    for first, second in itertools.pairwise(unseen):
        assert torch.equal(means[first], means[second])


def of_random(model, recipe=None) -> Importance:
    """Means that differ from matrix to matrix."""
    means = collected(model).means
    generator = torch.Generator().manual_seed(7)
    return Importance(
        {name: torch.rand(mean.shape, generator=generator).pow(6) for name, mean in means.items()},
        9,
        "m",
        "t",
    )


@pytest.mark.parametrize("way", ["accelerate", "from_pretrained", "file"])
def test_each_weight_is_quantised_by_its_own(tmp_path, way):
    model = moe(tie_word_embeddings=True)
    importance = of_random(model)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recipe = {"bits": 4, "group_size": 32, "check": False}
    if way == "accelerate":
        torch_moe_mps.accelerate(model, importance=importance, **recipe)
        report = None
    else:
        model.save_pretrained(tmp_path / "model")
        given = importance
        if way == "file":
            given = tmp_path / "importance.safetensors"
            importance.save(given)
        model = torch_moe_mps.from_pretrained(str(tmp_path / "model"), importance=given, **recipe)
        report = str(model.hf_quantizer.report)
        assert "errors weighed by the importance of 9 tokens through m, for 14 of 14 matrices" in report
    state = model.state_dict()
    for name, mean in importance.means.items():
        if name.endswith("gate"):  # of a router
            continue
        prefix = f"{name}_" if ".experts." in name else f"{name}."
        weight = dense[name if ".experts." in name else f"{name}.weight"]
        expected = quantize(weight, 4, 32, importance=mean)
        assert torch.equal(state[f"{prefix}packed"], expected.packed.view(torch.int32)), name
        assert torch.equal(state[f"{prefix}scales"], expected.scales), name
    assert torch.equal(state["model.embed_tokens.packed"], state["lm_head.packed"])


def test_files_keep_everything(tmp_path):
    model = moe()
    model.config._name_or_path = "/home/somebody/models/mine"
    found = collected(model)
    found.save(tmp_path / "i.safetensors")
    again = torch_moe_mps.read_importance(tmp_path / "i.safetensors")
    assert (again.model, again.text, again.tokens) == ("mine", found.text, 600)
    assert b"somebody" not in (tmp_path / "i.safetensors").read_bytes()
    assert again.means.keys() == found.means.keys()
    assert all(torch.equal(again.means[name], mean) for name, mean in found.means.items())


# Bad input


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda means: {f"other.{n}": m for n, m in means.items()},
            "importance must be of the model, which has",
        ),
        (
            lambda means: {n: m[..., :-32] for n, m in means.items()},
            r"\S+ must be of shape \(64,\), as the model has it, got \(32,\)",
        ),
        (
            lambda means: {n: m[:4] if m.dim() == 2 else m for n, m in means.items()},
            r"\S+experts.gate_up_proj must be of shape \(8, 64\), as the model has it, got \(4, 64\)",
        ),
        (
            lambda means: {n: torch.full_like(m, torch.nan) for n, m in means.items()},
            r"\S+ in i.safetensors must be finite and not negative, got NaN",
        ),
    ],
    ids=["another model", "narrower", "fewer experts", "NaN"],
)
def test_importance_that_does_not_fit(tmp_path, change, message):
    model = moe()
    found = collected(model)
    found.means = change(found.means)
    found.save(tmp_path / "i.safetensors")
    with pytest.raises(ValueError, match=f"^moe_mps::importance: {message}") as raised:
        torch_moe_mps.accelerate(model, bits=4, group_size=32, importance=tmp_path / "i.safetensors")
    assert "\n" not in str(raised.value)
    assert not any("packed" in name for name in model.state_dict())


def test_other_bad_input(tmp_path):
    model = moe()
    with pytest.raises(ValueError, match=r"ids must be \[T\].*at least 512, got \(511,\): too little text"):
        collected(model, tokens(511))
    with pytest.raises(ValueError, match=r"ids must be tokens \[T\] of a text, .*, got a str$"):
        collected(model, "a text")
    importance = collected(model)
    with pytest.raises(
        ValueError, match=r"^moe_mps::accelerate: importance needs bits or a mode, got neither"
    ):
        torch_moe_mps.accelerate(model, importance=importance)
    with pytest.raises(
        ValueError,
        match=r"importance must be for affine formats of 2 bits and more, or ggml's, got affine1_32",
    ):
        torch_moe_mps.accelerate(model, bits=1, group_size=32, importance=importance)
    with pytest.raises(TypeError, match=r"importance must be an Importance or a file of it, got dict"):
        torch_moe_mps.accelerate(model, bits=4, importance={})
    with pytest.raises(ValueError, match=r"the file .*none.safetensors does not exist"):
        torch_moe_mps.accelerate(model, bits=4, importance=tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match=r"cut.safetensors is no file of importance"):
        torch_moe_mps.accelerate(model, bits=4, importance=tmp_path / "cut.safetensors")
    model.save_pretrained(tmp_path / "weights")
    with pytest.raises(
        ValueError, match=r"must be written by Importance.save, got a safetensors file of another"
    ):
        torch_moe_mps.accelerate(model, bits=4, importance=tmp_path / "weights" / "model.safetensors")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    with pytest.raises(ValueError, match=r"what \S+ multiplies must be finite and not negative, got NaN"):
        collected(model)
