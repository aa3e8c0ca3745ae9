"""--adapter of the commands: the answers of PEFT on the model, and what is refused."""

import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import serving, tiny_models
from support.checkpoints import LETTERS, tokenizer_of

import torch_moe_mps
from torch_moe_mps.commands import main, sources


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A quantised checkpoint, and an adapter for it."""
    folder = tmp_path_factory.mktemp("adapter")
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("mixtral", head_dim=32, vocab_size=27)
    torch_moe_mps.accelerate(model, 4, 32, linear_bits=4)
    model.save_pretrained(folder / "model")
    tokenizer_of(LETTERS, unk_token="?", pad_token="?").save_pretrained(folder / "model")
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
    torch.manual_seed(0)
    ranks = {"r": 4, "rank_pattern": {"experts.gate_up_proj": 2}}
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **ranks, **targets))
    adapted.save_pretrained(folder / "adapter")
    return folder / "model", folder / "adapter"


def run(command: str, model, *options) -> int:
    return main([command, *map(str, (model, *options)), "--device", "cpu"])


def test_generate(folders, capsys):
    model, adapter = folders
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prompt = ("--raw", "-p", "hello", "--max-tokens", 12)
    answers = []
    for options in ((), ("--adapter", adapter)):
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # PEFT says that ranks of experts are ignored
            assert run("generate", model, *prompt, *options) == 0
        answers.append(capsys.readouterr().out)
    loaded = torch_moe_mps.from_pretrained(model, device_map="cpu")
    adapted = peft.PeftModel.from_pretrained(loaded, adapter).eval()
    ids = tokenizer("hello", return_tensors="pt").input_ids
    tokens = adapted.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert answers[1] == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    assert answers[0] != answers[1]


def test_perplexity(folders, capsys, tmp_path):
    """The figure of the model with its adapter; nothing of the model changes."""
    model, adapter = folders
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 3)
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    assert run("perplexity", model, "--text", text, "--window", 64, "--tokens", 64, "--adapter", adapter) == 0
    shown = capsys.readouterr().out
    loaded = torch_moe_mps.from_pretrained(model, device_map="cpu")
    adapted = peft.PeftModel.from_pretrained(loaded, adapter).eval()
    ids = transformers.AutoTokenizer.from_pretrained(model)(text.read_text(), return_tensors="pt").input_ids[
        :, :64
    ]
    with torch.no_grad():
        loss = adapted(input_ids=ids, labels=ids).loss
    figure = float(re.search(r"(\S+) ± ", shown)[1])
    assert figure == pytest.approx(loss.exp().item(), rel=1e-4)
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (None, "--adapter must be a folder with an adapter_config.json, got"),
        ('{"peft_type": "LORA"', "adapter_config.json must be JSON, got Expecting"),
        ("[]", "adapter_config.json must have a JSON object, got a list"),
        ('{"peft_type": "IA3"}', "--adapter must be a LoRA adapter of PEFT, got one of IA3"),
        ("{}", "--adapter must be a LoRA adapter of PEFT, got one of None"),
        ('{"peft_type": "LORA", "r": 0}', 'adapter_config.json must have "r" of at least 1, got 0'),
        (
            '{"peft_type": "LORA", "r": 8, "lora_alpha": "16"}',
            "adapter_config.json must have \"lora_alpha\" of at least 0, got '16'",
        ),
    ],
)
def test_a_folder_without_an_adapter_is_refused_before_the_model_is_loaded(tmp_path, capsys, stored, message):
    if stored is not None:
        (tmp_path / "adapter_config.json").write_text(stored)
    (tmp_path / "model").mkdir()
    assert run("generate", tmp_path / "model", "-p", "hello", "--adapter", tmp_path) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden_size": 128},
            "an adapter of this model must be base_model.model.model.layers.0.mlp.experts.lora_A",
        ),
        ({"num_hidden_layers": 3}, "an adapter of this model must be base_model.model.model.layers.2."),
        ({"num_hidden_layers": 1}, "must be without base_model.model.model.layers.1."),
    ],
)
def test_adapters_of_other_models(folders, capsys, monkeypatch, tmp_path, sizes, message):
    """Refused before the weights are loaded. PEFT drops tensors without a place and accepts missing ones."""
    monkeypatch.delattr(sources, "load_in_best")
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("mixtral", head_dim=32, vocab_size=27, **sizes)
    model.save_pretrained(tmp_path)
    tokenizer_of(LETTERS, unk_token="?", pad_token="?").save_pretrained(tmp_path)
    options = ("--raw", "-p", "hello", "--max-tokens", 1, "--adapter", folders[1])
    assert run("generate", tmp_path, "--bits", 4, "--group-size", 32, *options) == 1
    (*_, error) = capsys.readouterr().err.strip().splitlines()
    assert message in error and error.startswith("torch-moe-mps: error: ")


@pytest.mark.slow("loads two models")
def test_perplexity_beside_a_model_of_another_shape(folders, capsys, tmp_path):
    """The adapter is the measured model's alone."""
    with tiny_models.groups_of_32():
        other = tiny_models.tiny_model("mixtral", head_dim=32, vocab_size=27, hidden_size=128)
    other.save_pretrained(tmp_path / "other")
    tokenizer_of(LETTERS, unk_token="?", pad_token="?").save_pretrained(tmp_path / "other")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 3)
    options = ("--text", text, "--window", 64, "--tokens", 64, "--against", tmp_path / "other")
    assert run("perplexity", folders[0], *options, "--adapter", folders[1]) == 0
    assert "KL divergence" in capsys.readouterr().out


def test_an_adapter_of_nan(folders, capsys, tmp_path):
    shutil.copytree(folders[1], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file)
    assert run("generate", folders[0], "--raw", "-p", "hello", "--adapter", tmp_path / "adapter") == 1
    assert f"{name} of an adapter must be of finite numbers, got NaN" in capsys.readouterr().err


def asked(adapter, *options):
    """Answers of a server with an adapter, to two clients at once."""
    model, folder = adapter
    ask = {"model": str(model), "temperature": 0, "max_tokens": 6}
    with (
        serving.client_of(model, "--adapter", folder, *options) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        futures = [pool.submit(client.completions.create, prompt=text, **ask) for text in ("hello", "world")]
        return [future.result().choices[0].text for future in futures]


@pytest.mark.slow("servers and their clients")
@pytest.mark.parametrize("options", [(), ("--parallel", 2)], ids=["in turn", "side by side"])
def test_serve(folders, options):
    model, adapter = folders
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded = torch_moe_mps.from_pretrained(model, device_map="cpu")
    adapted = peft.PeftModel.from_pretrained(loaded, adapter).eval()
    right = []
    for text in ("hello", "world"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        tokens = adapted.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        right.append(tokenizer.decode(tokens, skip_special_tokens=True))
    assert asked(folders, *options) == right
