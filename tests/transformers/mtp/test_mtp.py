"""`generate(use_mtp=True)` of transformers: MTP layers are quantised as the others, and kept."""

import copy
import json
import pickle
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.checkpoints import changed
from support.mtp import with_mtp
from support.other_libraries import CompressedTensors, Fp8, Gptq, apart, quantised, say, weights
from support.sweep import in_sweep, rows_in_sweep
from transformers import GenerationMixin
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import (
    MTPCandidateGenerator,
    PromptLookupCandidateGenerator,
)
from transformers.modeling_layers import MtpModel

import torch_moe_mps
from torch_moe_mps import accelerate
from torch_moe_mps.checkpoints.mtp import _counted
from torch_moe_mps.commands import main
from torch_moe_mps.models.modules.linears import formats_in
from torch_moe_mps.transformers.mtp.steps import mtp_layers, mtp_steps

PROMPT = torch.arange(1, 9)[None]
SETTINGS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module", params=in_sweep(("deepseek_v3", "glm4_moe"), ("deepseek_v3",)))
def checkpoint(request, tmp_path_factory):
    """With a third layer that is no layer of the model, named as in the checkpoints of these makers."""
    folder = tmp_path_factory.mktemp(request.param)
    with with_mtp(request.param, folder) as cls:
        yield cls, folder


def tokens_of(model, **settings) -> list[int]:
    ids = PROMPT.to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS, **settings)[0, 8:].tolist()


def drafted(layers: MtpModel) -> torch.Tensor:
    """Logits of the token behind the next one, for a prompt whose states are given."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, 8, layers.config.hidden_size, generator=generator)
    with torch.no_grad():
        return layers(PROMPT, states, None, torch.arange(8)[None], MtpCache(config=layers.config))[1]


def test_tokens_are_those_of_the_model(checkpoint, monkeypatch):
    """And drafts those of the values that the quantised layers stand for; they are read once."""
    cls, folder = checkpoint
    model = torch_moe_mps.from_pretrained(folder, bits=4, group_size=32)
    expected = tokens_of(model)
    made, init = [], MtpModel.__init__
    monkeypatch.setattr(MtpModel, "__init__", lambda self, *given: made.append(self) or init(self, *given))
    for _ in range(2):
        assert tokens_of(model, use_mtp=True) == expected
    (ours,) = made
    assert formats_of(ours.layers) == {"affine4_32"}

    dense = cls.from_pretrained(folder).eval()
    twin = MtpModel.from_pretrained(tiny_models.dense_twin(dense, model)).eval()
    assert tokens_of(dense) == tokens_of(dense, use_mtp=True)  # those without us
    tiny_models.dense_twin(twin.layers, ours.layers)
    torch.testing.assert_close(drafted(ours), drafted(twin), atol=1e-3, rtol=1e-3)


def generators_of(model, monkeypatch, **settings) -> list:
    """Generators of candidates that a call makes; tokens are those without drafts."""
    expected, found = tokens_of(model), []
    own = type(model)._get_candidate_generator

    def noted(self, *args, **kwargs):
        found.append(own(self, *args, **kwargs))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_get_candidate_generator", noted)
        assert tokens_of(model, **settings) == expected
    return found


def test_only_accelerated_models_read_them_once(checkpoint, monkeypatch):
    """Their generator has the attributes of transformers'; `restore` and models beside them have its own."""
    cls, folder = checkpoint
    plain, model = (cls.from_pretrained(folder).eval() for _ in range(2))
    torch_moe_mps.accelerate(model)
    pickled = pickle.dumps(model)  # of one that was called, transformers' own hooks cannot be
    (theirs,) = generators_of(plain, monkeypatch, use_mtp=True)
    (ours,) = generators_of(model, monkeypatch, use_mtp=True)
    assert type(theirs) is MTPCandidateGenerator and type(ours) is not type(theirs)
    simple = [
        {name: value for name, value in vars(each).items() if not hasattr(value, "forward")}
        for each in (ours, theirs)
    ]
    assert vars(ours).keys() == vars(theirs).keys() and simple[0].keys() == simple[1].keys()
    for name in simple[0].keys() - {"mtp_cache", "logits_processor"}:
        assert simple[0][name] == simple[1][name]
    (lookup,) = generators_of(model, monkeypatch, use_mtp=True, prompt_lookup_num_tokens=2)
    assert type(lookup) is PromptLookupCandidateGenerator

    (again,) = generators_of(model, monkeypatch, use_mtp=True)
    (of_copy,) = generators_of(copy.deepcopy(model), monkeypatch, use_mtp=True)
    (of_pickle,) = generators_of(pickle.loads(pickled), monkeypatch, use_mtp=True)
    assert type(ours) is type(again) is type(of_copy) is type(of_pickle)
    assert again.mtp_model is ours.mtp_model
    assert of_copy.mtp_model.embed_tokens is not ours.mtp_model.embed_tokens
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    (quantised,) = generators_of(model, monkeypatch, use_mtp=True)
    assert {*map(str, formats_of(quantised.mtp_model.layers))} == {"affine4_32"}
    assert not formats_of(again.mtp_model.layers)
    restored = torch_moe_mps.restore(pickle.loads(pickled))
    assert type(restored)._get_candidate_generator is GenerationMixin._get_candidate_generator
    (restored,) = generators_of(restored, monkeypatch, use_mtp=True)
    assert type(restored) is MTPCandidateGenerator


@pytest.mark.slow("three models")
def test_what_transformers_own_generator_takes(checkpoint, monkeypatch):
    """An accelerated dense model, with the tokens of eager code; once it takes packed ones, ours can go."""
    cls, folder = checkpoint
    eager = cls.from_pretrained(folder).eval()
    dense, packed = (
        cls.from_pretrained(folder).eval(),
        torch_moe_mps.from_pretrained(folder, bits=4, group_size=32),
    )
    torch_moe_mps.accelerate(dense)
    for model in (dense, packed):
        own = GenerationMixin._get_candidate_generator
        monkeypatch.setattr(type(model), "_get_candidate_generator", own)
    (generator,) = generators_of(dense, monkeypatch, use_mtp=True)
    assert type(generator) is MTPCandidateGenerator
    assert tokens_of(dense, use_mtp=True) == tokens_of(eager, use_mtp=True)
    with pytest.raises(
        RuntimeError, match=r"weights are missing .*'embed_tokens.packed'.*'shared_head.packed'"
    ):
        tokens_of(packed, use_mtp=True)


def test_they_are_found_by_a_name_on_the_hub(checkpoint, tmp_path, monkeypatch):
    """In its cache, in the revision that is asked for alone, and by copies."""
    _, folder = checkpoint
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", "a" * 40), ("other", "b" * 40)):
        (repository / "refs" / name).write_text(commit)
        shutil.copytree(folder, repository / "snapshots" / commit)
        if name != "other":
            with changed(repository / "snapshots" / commit / "model.safetensors") as tensors:
                for key in [key for key in tensors if key.startswith("model.layers.2.")]:
                    del tensors[key]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    how = {"bits": 4, "group_size": 32, "revision": "other"}
    model = torch_moe_mps.from_pretrained("org/name", **how)
    for each in (model, pickle.loads(pickle.dumps(model))):
        assert tokens_of(each, use_mtp=True) == tokens_of(each)
        assert str(mtp_layers(each, accelerate).layers[0].eh_proj.format) == "affine4_32"


def test_convert_quantises_them(checkpoint, tmp_path):
    """As the last layer, as in a model that quantises them while loading; once more they stay so."""
    _, folder = checkpoint
    quantised, figures = tmp_path / "four", tmp_path / "plan.json"
    asked = ["convert", str(folder), str(quantised), "--bits", "4", "--group-size", "32"]
    assert main([*asked, "--json", str(figures)]) == 0
    after = load_file(quantised / "model.safetensors")
    size = sum(tensor.nbytes for tensor in after.values())
    assert json.loads(figures.read_text())["after"] == pytest.approx(size, rel=1e-3)  # without buffers
    names = [name for name in after if name.startswith("model.layers.2.")]
    assert sum(name.endswith("packed") for name in names) > 5
    model = torch_moe_mps.from_pretrained(quantised)
    assert tokens_of(model, use_mtp=True) == tokens_of(model)
    dense = torch_moe_mps.from_pretrained(folder, bits=4, group_size=32)
    found, expected = (mtp_layers(each, accelerate).layers.state_dict() for each in (model, dense))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    again = tmp_path / "again"
    assert main(["convert", str(quantised), str(again)]) == 0
    once_more = load_file(again / "model.safetensors")
    assert all(torch.equal(once_more[name], after[name]) for name in names)
    model = torch_moe_mps.from_pretrained(again)
    assert tokens_of(model, use_mtp=True) == tokens_of(model)


# {name: (writer, format)} of libraries whose values are ours to the bit.
WRITERS = {
    "fp8 of blocks": (lambda: Fp8("fp8", "weight_scale_inv", (32, 32), True), "mxfp8"),
    "int4": (CompressedTensors, "affine4_32"),
    "gptq": (Gptq, "affine4_32"),
    "fp8 of modelopt": (lambda: Fp8("modelopt", "weight_scale", "row", True), "mxfp8"),
}
SIZES = {"deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32}}


@contextmanager
def written(name: str, architecture: str, folder: Path):
    """Yields: the class of a model that a library has quantised in folder / "packed", these layers, too; in
    folder / "dense" are the values that it stands for.
    """
    writer, dense = WRITERS[name][0](), folder / "dense"
    with with_mtp(architecture, dense, **SIZES.get(architecture, {})) as cls:
        shutil.copytree(dense, folder / "packed")
        torch.manual_seed(0)
        tensors = apart(load_file(dense / "model.safetensors"), architecture)
        fits = {n for n, t in tensors.items() if t.shape[0] % 8 == 0 and t.shape[-1] % 32 == 0}
        packed, values = quantised(writer, tensors, fits.__contains__)
        say(folder / "packed", writer, packed)
        values = {name: tensor.float().contiguous() for name, tensor in values.items()}
        save_file(values, dense / "model.safetensors", {"format": "pt"})
        yield cls


def formats_of(layers) -> set[str]:
    return {str(format) for module in layers.modules() for format in formats_in(module).values()}


OF_LIBRARIES = [("fp8 of blocks", "deepseek_v3"), ("int4", "glm4_moe"), ("gptq", "qwen3_next")]
OF_LIBRARIES += [("fp8 of modelopt", "glm4_moe"), ("fp8 of blocks", "qwen3_next")]


@pytest.mark.slow("two models, and their layers")
@pytest.mark.parametrize(("name", "architecture"), rows_in_sweep(OF_LIBRARIES, OF_LIBRARIES[:3]))
def test_layers_that_libraries_have_quantised(name, architecture, tmp_path):
    """They stay packed, with the library's values; `convert` keeps them; a model of four bits has four."""
    with written(name, architecture, tmp_path) as cls:
        own = cls.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
        twin = MtpModel.from_pretrained(_counted(own, str(tmp_path / "dense"))).eval()
        model = torch_moe_mps.from_pretrained(tmp_path / "packed", dtype=torch.float32)
        (step,) = mtp_steps(model, accelerate)
        assert formats_of(step.layers.layers) == {WRITERS[name][1]}
        pairs = [*weights(step.layers.layers, twin.layers)]
        assert len(pairs) > 6 and all(torch.equal(*pair) for pair in pairs)
        torch.testing.assert_close(drafted(step.layers), drafted(twin), atol=1e-4, rtol=1e-4)
        is_fp8 = WRITERS[name][0]().config["quant_method"] == "fp8"
        options = ["--group-size", "32"] if is_fp8 else []
        assert main(["convert", str(tmp_path / "packed"), str(tmp_path / "ours"), *options]) == 0
        (again,) = mtp_steps(torch_moe_mps.from_pretrained(tmp_path / "ours"), accelerate)
        kept = {"affine4_32"} if is_fp8 else {WRITERS[name][1]}
        assert formats_of(again.layers.layers) == kept
        ours, before = again.layers.layers.state_dict(), step.layers.layers.state_dict()
        same = [torch.equal(ours[n], t) for n, t in before.items() if n.endswith("packed")]
        assert all(same) if kept == {WRITERS[name][1]} else not any(same)
        if name.startswith("fp8 of blocks"):
            four = torch_moe_mps.from_pretrained(tmp_path / "packed", bits=4, group_size=32)
            expected = torch_moe_mps.from_pretrained(tmp_path / "dense", bits=4, group_size=32)
            found, other = (mtp_steps(each, accelerate)[0].layers.layers for each in (four, expected))
            assert formats_of(found) == {"affine4_32"}
            found, other = found.state_dict(), other.state_dict()
            assert all(torch.equal(found[n], t) for n, t in other.items() if n.endswith("packed"))


BAD = [
    (
        "bitsandbytes",
        lambda tensors: None,
        r"must be dense, or quantised by .* in .*, got those of bitsandbytes",
    ),
    (
        None,
        lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"),
        "eh_proj.weight .*must be in the check",
    ),
    (
        None,
        lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(3, 3)}),
        r"eh_proj.weight must be of shape .*, got \(3, 3\)",
    ),
]


@pytest.mark.parametrize(("method", "change", "message"), BAD)
def test_rejects_layers_that_cannot_be_read(method, change, message, checkpoint, tmp_path):
    _, folder = checkpoint
    model = torch_moe_mps.from_pretrained(folder, bits=4, group_size=32)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    with changed(tmp_path / "model.safetensors") as tensors:
        change(tensors)
    if method is not None:
        with changed(tmp_path / "config.json") as config:
            config["quantization_config"] = {"quant_method": method, "load_in_4bit": True}
    model.config.name_or_path = str(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        tokens_of(model, use_mtp=True)
    assert "\n" not in str(raised.value)


def test_a_tensor_of_a_library_that_is_missing_is_named(tmp_path):
    with written("int4", "glm4_moe", tmp_path):
        model = torch_moe_mps.from_pretrained(tmp_path / "packed")
        with changed(tmp_path / "packed" / "model.safetensors") as tensors:
            del tensors["model.layers.2.eh_proj.weight_scale"]
        with pytest.raises(
            ValueError, match=r"layers.2.eh_proj.weight_scale must be in the checkpoint, got no"
        ):
            mtp_steps(model, accelerate)
