"""GGUF files of the architectures that our rows read, written by hand from small models of their classes."""

import copy
import json
import re
import warnings

import pytest
import torch
from gguf import GGUFWriter
from support.gguf_models import PUBLISHED, VOCABULARY, small_model, tensors_of, text_state, write_model
from support.llama_cpp import log_probabilities
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import torch_moe_mps
from torch_moe_mps.checkpoints.gguf import architectures
from torch_moe_mps.checkpoints.gguf.file import read_architectures
from torch_moe_mps.checkpoints.source import read_tokenizer
from torch_moe_mps.commands import main

IDS = [*range(3, 15)]
# Entries of a config that a file does not state, or states in other words.
NOT_STATED = ("_name_or_path", "dtype", "architectures", "quantization_config")


def load(path):
    return torch_moe_mps.from_pretrained(path, device_map="cpu", check=False)


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


# DBRX's experts become stacks; test_gguf.py compares them.
@pytest.mark.parametrize("architecture", [name for name in PUBLISHED if name != "dbrx"])
def test_has_the_model_of_the_file(tmp_path, architecture):
    """Config, parameters and logits of transformers' model that was written."""
    written = small_model(architecture)
    model = load(write_model(tmp_path / "model.gguf", architecture, written))
    expected, found = (each.config.get_text_config().to_dict() for each in (written, model))
    unlike = {key for key in expected if key not in NOT_STATED and found.get(key) != expected[key]}
    assert unlike <= NO_KEY.get(architecture, set())
    state = model.state_dict()
    for name, value in text_state(written).items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6, msg=name)
    expected_logits = logits(written, IDS)
    assert (logits(model, IDS) - expected_logits).abs().max() <= 1e-5 * expected_logits.abs().max()


# Classes that keep the bias by which a router chooses experts in float32. Step-3.5's does not.
WITH_BIAS = [
    *("glm4moe", "deepseek2", "dots1", "nemotron_h_moe", "ernie4_5-moe", "afmoe", "exaone-moe"),
    *("lfm2moe", "glm-dsa", "kimi-linear", "mimo2"),
]
BIASES = ("e_score_correction_bias", "expert_bias")


@pytest.mark.parametrize("architecture", WITH_BIAS)
def test_the_bias_of_a_router_stays_in_float32(tmp_path, architecture):
    """In a model in 16 bits: its values are those of the file, which bfloat16 does not have."""
    written = small_model(architecture)
    path = write_model(tmp_path / "model.gguf", architecture, written, "q8_0")
    model = torch_moe_mps.from_pretrained(path, device_map="cpu", check=False, dtype=torch.bfloat16)
    assert model.get_input_embeddings().weight.dtype != torch.float32
    state = model.state_dict()
    biases = {name: value for name, value in written.state_dict().items() if name.endswith(BIASES)}
    assert biases
    for name, value in biases.items():
        assert not torch.equal(value.bfloat16().float(), value)
        assert state[name].dtype == torch.float32 and torch.equal(state[name], value), name


def with_llama3_rope(factor: float):
    """A model with the rotary embedding of Llama 3.1, and what divides its frequencies."""
    model = small_model("arcee")
    plain = model.model.rotary_emb.inv_freq
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {
        "original_max_position_embeddings": 8192,
        "rope_theta": model.config.rope_parameters["rope_theta"],
    }
    config = type(model.config).from_dict({**model.config.to_dict(), "rope_parameters": rope})
    scaled = type(model)(config).eval()
    scaled.load_state_dict(model.state_dict())
    return scaled, plain / scaled.model.rotary_emb.inv_freq


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_frequencies_are_those_of_llama_3(tmp_path, factor):
    """A file has them as a tensor, and no metadata say so."""
    written, factors = with_llama3_rope(factor)
    assert factors.max() == factor
    path = tmp_path / "model.gguf"
    model = load(write_model(path, "arcee", written, others={"rope_freqs.weight": factors}))
    positions = torch.arange(12)[None] * 700
    with torch.no_grad():
        found, expected = (m(torch.tensor([IDS]), position_ids=positions).logits for m in (model, written))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    write_model(path, "arcee", written, others={"rope_freqs.weight": factors * 1.5})
    message = r"rope_freqs\.weight must be the factors of Llama 3\.1 for 8,192 or 131,072 positions, got"
    with pytest.raises(ValueError, match=message):
        load(path)


def test_factors_of_step_35_are_of_the_layers_without_a_window(tmp_path):
    """A file has those of a whole head, of which such layers turn a half."""
    scaled = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
    scaled |= {"original_max_position_embeddings": 131072, "rope_theta": 5e6}
    whole = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=scaled)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](whole, "cpu")
    factors = 5e6 ** -(torch.arange(16) / 16) / inverse
    torch.testing.assert_close(factors.aminmax(), (torch.tensor(1.0), torch.tensor(2.0)))
    model = small_model("step35")
    config = copy.deepcopy(model.config)
    config.text_config.rope_parameters["full_attention"] |= scaled
    written = type(model)(config).eval()
    written.load_state_dict(model.state_dict())
    path = write_model(tmp_path / "model.gguf", "step35", written, others={"rope_freqs.weight": factors})
    model = load(path)
    assert model.config.text_config.rope_parameters == config.text_config.rope_parameters
    positions = torch.arange(12)[None] * 700
    with torch.no_grad():
        found, expected = (m(torch.tensor([IDS]), position_ids=positions).logits for m in (model, written))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_factors_short.weight": None},
            r"rope_factors_short\.weight must be in the file, got no such tensor",
        ),
        (
            {"rope_factors_long.weight": torch.ones(5)},
            r"rope_factors_long\.weight must be 6 positive factors, got \[1.0, 1.0, 1.0, 1.0, 1.0\]",
        ),
        (
            {"rope_factors_long.weight": torch.zeros(6)},
            r"rope_factors_long\.weight must be 6 positive factors, got \[0.0, ",
        ),
        (
            {"rope.scaling.original_context_length": None},
            r"phi3\.rope\.scaling\.original_context_length must be in the metadata of a file",
        ),
    ],
)
def test_wrong_factors_for_long_texts_are_refused(tmp_path, changes, message):
    tensors = {name: value for name, value in changes.items() if name.endswith("weight")}
    keys = {key: value for key, value in changes.items() if key not in tensors}
    path = tmp_path / "model.gguf"
    write_model(path, "phi3:long", small_model("phi3:long"), keys=keys, others=tensors)
    with pytest.raises(ValueError, match=f"^moe_mps::gguf: {message}"):
        load(path)


def test_factors_for_long_texts_need_a_plain_rotation(tmp_path):
    """Here a class that divides its frequencies by itself."""
    factors = {f"rope_factors_{kind}.weight": torch.ones(8) for kind in ("long", "short")}
    path = write_model(tmp_path / "model.gguf", "deepseek2", small_model("deepseek2"), others=factors)
    with pytest.raises(
        ValueError, match=r"^moe_mps::gguf: rope_factors_long\.weight must be absent where the"
    ):
        load(path)


# Entries of the small models' configs that no computation reads.
NO_KEY = {
    "jamba": {"use_mamba_kernels"},
    "nemotron_h": {"n_routed_experts", "num_experts_per_tok", "norm_topk_prob"},
    "nemotron_h_moe": {"intermediate_size"},
}
# llama.cpp has windows of EXAONE 4 only in a model of 64 layers, and norms and a router of its own in
# Phi-3.5-MoE. In MiMo-V2 its windows are a token shorter, and values are as they are without a factor. It
# rounds the bounds of YaRN, which gpt-oss does not.
ONLY_HERE = ("exaone4:windows", "phimoe", "mimo2:window", "mimo2:first", "gpt-oss")
IN_LLAMA_CPP = [name for name in PUBLISHED if name not in ONLY_HERE]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("architecture", IN_LLAMA_CPP)
def test_llama_cpp_has_the_same_probabilities(tmp_path, architecture, kind):
    """llama.cpp reads the values of the blocks in float32: it would round activations to 8 bits otherwise."""
    written = small_model(architecture, 256 if kind == "q4_k" else 64)
    plain = write_model(tmp_path / "values.gguf", architecture, written, kind, packed=False)
    path = write_model(tmp_path / "model.gguf", architecture, written, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors that llama.cpp transposes are dequantised
        model = load(path)
    tokens, expected = log_probabilities(plain, IDS, VOCABULARY)
    found = logits(model, IDS + tokens)[len(IDS) - 1 : -1].log_softmax(-1)
    probable = expected > -1e30  # the smallest float32 for a probability of 0
    error = (found - expected).abs()[probable].max() / found.abs().max()
    assert error <= 1e-4


TAKEN_OUT = ("dots1", "glm4moe", "qwen3next", "granitehybrid", "hunyuan-moe")


@pytest.mark.parametrize("architecture", TAKEN_OUT)
def test_other_architectures_are_refused_by_name(tmp_path, monkeypatch, architecture):
    """Five have no row here; each is refused before anything is read, and the message names what is read."""
    path = write_model(tmp_path / "model.gguf", architecture, small_model(architecture))
    for name in TAKEN_OUT:
        monkeypatch.delitem(architectures.ARCHITECTURES, name)
    known = read_architectures()
    assert {"deepseek2", "qwen3moe", "gpt-oss"} <= {*known} and not {*TAKEN_OUT} & {*known}
    expected = f"an architecture among {', '.join(known)}; got {architecture}"
    with pytest.raises(ValueError, match=f"^moe_mps::gguf: {path} must be of {expected}$"):
        load(path)


@pytest.mark.parametrize(
    ("architecture", "kind", "tensor", "got"),
    [
        ("clip", "mmproj", "v.blk.0.attn_q.weight", "that of a vision or audio tower (clip)"),
        ("llama", "adapter", "blk.0.attn_q.weight.lora_a", "one of the type adapter"),
    ],
)
def test_what_is_no_model_is_refused_by_what_it_is(tmp_path, capsys, architecture, kind, tensor, got):
    """The file of a vision tower lies next to that of the model, and is easily taken for it."""
    writer = GGUFWriter(path := tmp_path / "other.gguf", architecture)
    writer.add_type(kind)
    writer.add_tensor(tensor, torch.ones(32, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = f"{path} must be the file of a language model, got {got}"
    with pytest.raises(ValueError, match=f"^moe_mps::gguf: {re.escape(expected)}$"):
        load(path)
    for command in (["fit", str(path)], ["generate", str(path), "--prompt", "a"]):
        assert main(command) == 1
        assert capsys.readouterr().err == f"torch-moe-mps: error: moe_mps::gguf: {expected}\n"


@pytest.mark.parametrize(
    ("architecture", "class_name", "tower"),
    [
        ("qwen3vlmoe", "Qwen3VLMoeForConditionalGeneration", "visual"),
        ("step35", "Step3p7ForConditionalGeneration", "vision_model"),
    ],
)
def test_a_language_model_is_the_whole_class_without_its_tower(tmp_path, architecture, class_name, tower):
    """`fit` counts no tower either, which would have gigabytes."""
    path = write_model(tmp_path / "model.gguf", architecture, small_model(architecture))
    assert main(["fit", str(path), "--json", str(tmp_path / "fit.json")]) == 0
    sizes = json.loads((tmp_path / "fit.json").read_text())["sizes"]
    assert len(sizes) > 2 and all(size["bytes"] < 2e6 for size in sizes)
    model = load(path)
    assert type(model).__name__ == class_name and text_state(model).keys() == model.state_dict().keys()
    expected = f"the checkpoint must have model.{tower} for this, got a language model alone"
    with pytest.raises(RuntimeError, match=expected):
        getattr(model.model, tower)(torch.zeros(1, 3, 28, 28))


def test_a_tensor_for_each_expert_is_refused(tmp_path):
    """Files of Mixtral have them from before April 2024, when llama.cpp merged the experts of a layer."""
    written = small_model("llama:mixtral")
    stacks = [name for name in tensors_of("llama:mixtral", written) if "_exps" in name]
    assert len(stacks) == 6
    apart = dict.fromkeys(stacks) | {
        name.replace("_exps", f".{expert}"): torch.ones(64, 64) for name in stacks for expert in range(8)
    }
    path = write_model(tmp_path / "model.gguf", "llama:mixtral", written, others=apart)
    message = (
        "moe_mps::gguf: the experts of a layer must be one tensor, ffn_gate_exps.weight, got "
        "blk.0.ffn_gate.0.weight of one expert, as in files from before April 2024"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(path)


@pytest.mark.parametrize("architecture", ["glm4moe", "deepseek2", "exaone-moe"])
def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(tmp_path, architecture):
    written = small_model(architecture)
    layers = written.config.num_hidden_layers
    further = {f"blk.{layers}.{name}.weight": torch.ones(64) for name in ("attn_norm", "nextn.enorm")}
    keys = {"nextn_predict_layers": 1, "block_count": layers + 1}
    if architecture == "exaone-moe":
        keys["attention.sliding_window_pattern"] = [True, False] * 2 + [False]
    path = write_model(tmp_path / "model.gguf", architecture, written, keys=keys, others=further)
    with pytest.warns(UserWarning, match="predict further tokens") as said:
        model = load(path)
    (found,) = [str(each.message) for each in said if "predict further" in str(each.message)]
    begin = "torch_moe_mps: 2 tensors of the GGUF file predict further tokens and are left out: "
    assert found == f"{begin}blk.{layers}.attn_norm.weight, ..."
    assert len(model.model.layers) == layers
    torch.testing.assert_close(logits(model, IDS), logits(written, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": None}, "dots1.expert_used_count must be in the metadata, got no such key"),
        ({"embedding_length": None}, "dots1.embedding_length must be in the metadata, got no such key"),
        ({"attention.new": 3}, "dots1.attention.new must be a key whose meaning is known, got 3"),
        ({"expert_count": [4, 8]}, r"dots1.expert_count must be the same in all layers, got \[4, 8\]"),
        ({"expert_gating_func": 1}, "dots1.expert_gating_func must be 2, got 1"),
        ({"rope.scaling.type": "su"}, "dots1.rope.scaling.type must be none, linear or yarn, got su"),
        ({"rope.scaling.type": "yarn"}, "dots1.rope.scaling.factor must be in the metadata, got no such key"),
        (
            {"embedding_length": 32},
            "token_embd.weight must be of the shape that makes model.embed_tokens.weight",
        ),
    ],
)
def test_wrong_metadata_is_refused_before_anything_is_read(tmp_path, changes, message):
    path = write_model(tmp_path / "model.gguf", "dots1", small_model("dots1"), keys=changes)
    with pytest.raises(ValueError, match=f"^moe_mps::gguf: {message}"):
        load(path)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "mimo2",
            {"attention.head_count_kv": [1, 1, 1, 2]},
            r"mimo2.attention.head_count_kv must be the same in all layers of a type, 2 times as large in "
            r"those with a window, got \[1, 1, 1, 2\]",
        ),
        (
            "mimo2",
            {"attention.head_count_kv": [1, 2, 1]},
            "mimo2.attention.head_count_kv must be one value, or one for each of the 4 layers, got 3",
        ),
        (
            "dots1",
            {"attention.head_count": 65},
            "dots1.attention.head_count must be at most the embedding_length 64, got 65",
        ),
        ("mimo2", {"rope.freq_base_swa": None}, "mimo2.rope.freq_base_swa must be in the metadata"),
        ("mimo2", {"rope.scaling.type": "yarn"}, "mimo2.rope.scaling.type must be none, got yarn"),
        (
            "step35",
            {"attention.head_count": [4, 6, 5, 6]},
            r"step35.attention.head_count must be the same in all layers of a type, got \[4, 6, 5, 6\]",
        ),
        ("step35", {"expert_weights_norm": False}, "step35.expert_weights_norm must be true, got false"),
        ("step35", {"expert_weights_norm": None}, "step35.expert_weights_norm must be in the metadata"),
        ("qwen3vlmoe", {"expert_weights_norm": False}, "qwen3vlmoe.expert_weights_norm must be true, got"),
        (
            "qwen3vlmoe",
            {"rope.dimension_sections": None},
            "qwen3vlmoe.rope.dimension_sections must be in the",
        ),
        (
            "mistral4",
            {"attention.temperature_length": 9},
            "mistral4.attention.temperature_length must be 8, as rope.scaling.original_context_length, got 9",
        ),
    ],
)
def test_wrong_metadata_of_two_kinds_of_layers(tmp_path, architecture, changes, message):
    path = write_model(tmp_path / "model.gguf", architecture, small_model(architecture), keys=changes)
    with pytest.raises(ValueError, match=f"^moe_mps::gguf: {message}"):
        load(path)


@pytest.mark.parametrize("split", ["deepseek-llm", "default", "new"])
def test_an_unknown_way_to_split_text_is_refused_by_name(tmp_path, split):
    """transformers would split text as GPT-2 does. The model is read, for a tokenizer of its own; a file of a
    known way has one."""
    model = small_model("arcee")
    path = write_model(tmp_path / "model.gguf", "arcee", model, keys={"tokenizer.ggml.pre": split})
    message = f"^{path} has no .*tokenizer.ggml.pre must be one of .*qwen2.*; got {split}. Take the tokenizer"
    with pytest.raises(ValueError, match=message):
        read_tokenizer(str(tmp_path), path.name, False)
    torch.testing.assert_close(logits(load(path), IDS), logits(model, IDS), rtol=1e-5, atol=1e-5)
    for known in ("qwen2", "gpt-2"):
        write_model(path, "arcee", model, keys={"tokenizer.ggml.pre": known})
        assert read_tokenizer(str(tmp_path), path.name, False)("ab").input_ids
