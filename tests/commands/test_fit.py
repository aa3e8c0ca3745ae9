"""The command fit: sizes against what loading gives, bounds against arithmetic."""

import io
import json
import math
import re
import stat
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import tiny_models
from support.fit import PROMPT, QWEN3, context, table
from support.memory import Memory
from support.models import stored
from support.mtp import with_mtp
from support.processes import REPOSITORY
from support.sweep import rows_in_sweep

import torch_moe_mps
from torch_moe_mps import macs
from torch_moe_mps.checkpoints.quantize.sizes import prompt_bytes
from torch_moe_mps.commands import main

SHOWN = (("bytes", 1), ("bytes_a_token", 2))  # what `fit` says of a size, with so many digits


@pytest.fixture
def qwen3(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path


@pytest.fixture
def whole_qwen3(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": 48, "num_experts": 128}))
    return tmp_path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "8 bit from 48 GB, 6 bit from 36 GB, 4 bit from 32 GB, small from 24 GB"),
        (["--context", "1000000000"], "8 bit from 48 GB, 4 bit from 32 GB"),
    ],
)
def test_what_is_recommended_comes_first(whole_qwen3, capsys, more, said):
    """The most bits of 8, 6, 4 and `small` with which a Mac holds the context."""
    assert main(["fit", str(whole_qwen3), *more]) == 0
    recommended, command, empty, *_ = capsys.readouterr().out.splitlines()
    tokens = "40,960" if more else "4,096"
    assert recommended == f"Recommended, with a context of {tokens} tokens: {said}"
    assert command == f"torch-moe-mps convert {whole_qwen3} DST --bits 8" and not empty


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_width_is_the_terminals(qwen3, monkeypatch):
    """No number is lost; what is to be pasted stays whole."""
    shown = []
    for of_stdout in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdout", of_stdout)
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["fit", str(qwen3)]) == 0
        shown.append(of_stdout.getvalue())
    wide, narrow = shown
    lines = [line for line in narrow.splitlines() if not line.startswith(("sudo ", "torch-moe-mps "))]
    assert max(map(len, lines)) <= 80 < max(map(len, wide.splitlines()))
    assert {*wide.split()} == {*narrow.split()}


def test_several_macs(qwen3, tmp_path, capsys):
    """Against arithmetic: 3 of the 6 layers on each, the embedding on the first, the head on the last."""
    hidden, vocabulary, shares = 2048, 151936, 3
    attention, experts = 2 * hidden * 32 * 128 + 2 * hidden * 4 * 128, 256 * 3 * hidden * 768
    dense = 2 * (256 * hidden + 2 * hidden + 2 * 128)
    layer = attention * 13 // 16 + experts * 9 // 16 + dense  # 6 bits and 4, with scales and biases
    end = vocabulary * hidden * 9 // 16
    cache = shares * 2 * 4 * 128 * 2
    first, last = shares * layer + end + 2 * hidden, shares * layer + end
    assert main(["fit", str(qwen3), "--macs", "2x8", "--json", str(tmp_path / "x.json")]) == 0
    output = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM on Macs of 8 + 8 GB, 5.7 + 5.7 GB for the GPU" in output
    rows = table(output, "weights")
    space = min(macs.wired_limit(8) - PROMPT - part for part in (first, last))
    fits = min(context(space, cache), 40960)
    assert rows["4 bit"] == ["3 + 3", f"{first / 1e9:.1f} + {last / 1e9:.1f}", f"{fits:,}"]
    assert rows["16 bit"][-1] == "-"
    dense, *_ = json.loads((tmp_path / "x.json").read_text())["spread"]
    assert dense["name"] == "16 bit" and dense["context"] is False


def test_unequal_macs(qwen3, tmp_path, capsys):
    """The larger one has more layers, in proportion to the memory where time is not known."""
    command = ["fit", str(qwen3), "--macs", "8+2x16", "--kv-bits", "8", "--json", str(tmp_path / "x.json")]
    assert main(command) == 0
    assert "on Macs of 8 + 16 + 16 GB, 5.7 + 11.5 + 11.5 GB" in capsys.readouterr().out
    data = json.loads((tmp_path / "x.json").read_text())
    dense = next(row for row in data["spread"] if row["name"] == "16 bit")
    assert data["macs"] == [8, 16, 16] and sum(dense["layers"]) == 6
    assert dense["layers"][0] < min(dense["layers"][1:]) and dense["context"] == 40_960


def test_macs_that_cannot_share(qwen3, capsys, refused):
    error = refused("fit", qwen3, "--macs", "7x16")
    assert "--macs must be at most the number of layers, 6, got 7" in error
    with pytest.raises(SystemExit):
        main(["fit", str(qwen3), "--macs", "64"])
    assert "must be 2 Macs or more, as in 2x64 or 64+128, got '64'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fit", str(qwen3), "--macs", "64,128"])
    assert "must be Macs as in 2x64 or 64+128, with the GB of each, got '64,128'" in capsys.readouterr().err


def test_the_weights_beside_each_context(whole_qwen3, capsys):
    """Those of the most bytes where a Mac holds another context with other --kv-bits."""
    assert main(["fit", str(whole_qwen3)]) == 0
    output = capsys.readouterr().out
    shown = table(output, "--kv-bits")
    names = re.split(r"  +", output.split("\nMac ")[1].splitlines()[0].strip())[1:]
    weights = table(output, "weights")
    for mac, contexts in table(output, "Mac").items():
        held = dict(zip(names, contexts[1:], strict=True))
        below = [name for name, text in held.items() if text not in ("-", "40,960")]
        assert (mac in shown) is bool(below)
        if below:
            largest = max(below, key=lambda name: float(weights[name][0]))
            assert shown[mac][:2] == [largest, held[largest]]
    assert shown["32 GB"] == ["5 bit", "14,405", "27,937", "40,960", "40,960"]


def test_a_large_model_from_its_config_alone(whole_qwen3, capsys):
    """Against arithmetic with its shapes."""
    layers, hidden, vocabulary = 48, 2048, 151936
    attention = 2 * hidden * 32 * 128 + 2 * hidden * 4 * 128
    expert = 3 * hidden * 768
    dense = layers * (128 * hidden + 2 * hidden + 2 * 128) + hidden  # routers and norms
    quantised = 2 * vocabulary * hidden + layers * 128 * expert
    read = (vocabulary + 1) * hidden + layers * 8 * expert  # the head, and a row of the embedding
    cache = layers * 2 * 4 * 128 * 2  # K and V of a token

    def nbytes(bits: int, weights: int) -> int:
        """Groups of 64 have 32 bits of scale and bias; attention has 6 bits where the rest has fewer."""
        more = layers * attention * (2 * max(bits, 6) + 1)
        return (weights * (2 * bits + 1) + more) // 16 + 2 * dense

    assert main(["fit", str(whole_qwen3)]) == 0
    output = capsys.readouterr().out
    shown = (REPOSITORY / "docs/memory.md").read_text().partition("Shortened:\n\n")[2].partition("\n\n")[0]
    shown = [line.strip() for line in shown.splitlines()]
    assert len(shown) == 6 and {*shown} <= {line.rstrip() for line in output.splitlines()}
    assert f"{(quantised + layers * attention + dense) / 1e9:.2f} billion weights" in output
    assert f"{cache / 1e6:.3f} GB for each 1,000 tokens" in output
    sizes = {f"{bits} bit": [nbytes(bits, quantised), nbytes(bits, read)] for bits in (8, 6, 5, 4, 3, 2)}
    sizes = {"16 bit": [2 * (w + layers * attention + dense) for w in (quantised, read)]} | sizes
    # Bytes of 256 weights of gate, up and what is no expert; of down projections; and of attention.
    recipes = {"small": (110, 136, 208), "fast": (136, 136, 136), "best": (136, 176, 208)}
    for name, (most, down, of_attention) in recipes.items():
        an_expert = expert // 3 * (2 * most + down)
        parts = ((2 * vocabulary * hidden, 128), ((vocabulary + 1) * hidden, 8))
        sizes[name] = [
            (ends * most + layers * (experts * an_expert + attention * of_attention)) // 256 + 2 * dense
            for ends, experts in parts
        ]
    expected = {name: [f"{a / 1e9:.1f}", f"{b / 1e9:.2f}"] for name, (a, b) in sizes.items()}
    assert table(output, "weights") == expected and expected["4 bit"] == ["17.4", "1.96"]
    contexts = table(output, "Mac")
    assert f"a prompt takes at most {PROMPT / 1e9:.3f} GB for 2,048 tokens" in output
    line = "sudo sysctl iogpu.wired_limit_mb=$(( $(sysctl -n hw.memsize) / 1048576 - 8192 ))"
    assert line in output.splitlines()
    limit = (16 << 30) * 2 // 3 - PROMPT
    fits = f"{context(limit - sizes['2 bit'][0], cache):,}"
    assert contexts["16 GB"] == ["11.5", *["-"] * 6, fits, "-", "-", "-"]
    assert contexts["32 GB"][1:4] == ["-"] * 3 and contexts["512 GB"][1] == "40,960"
    speed = table(output, "chip")
    assert len(speed) == len(macs.BANDWIDTHS) and "No measurement" in output
    bounds = [546e9 / (token + 4096 * cache) for _, token in sizes.values()]
    assert speed["M4 Max (40 cores), 546 GB/s"] == [f"{bound:.0f}" for bound in bounds]


def test_a_model_that_reads_any_number_of_tokens(tmp_path, capsys):
    """Mamba's config has no longest context, and its states do not grow."""
    with tiny_models.groups_of_32():
        config = tiny_models.build_config(transformers.Mamba2Config, head_dim=32)
    config.architectures = ["Mamba2ForCausalLM"]
    config.save_pretrained(tmp_path)
    file = tmp_path / "x.json"
    assert main(["fit", str(tmp_path), "--group-size", "32", "--json", str(file)]) == 0
    assert {*table(capsys.readouterr().out, "Mac")["16 GB"][1:]} == {"any"}
    assert {*json.loads(file.read_text())["macs"][0]["contexts"].values()} == {None}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "llama"])
def test_the_memory_of_a_prompt_is_at_most_what_fit_says(architecture):
    """Of the activations of an accelerated model; its cache, its logits and its mask are other memory."""
    with tiny_models.sizes(num_hidden_layers=1, vocab_size=8):
        model = tiny_models.tiny_model(architecture)
    torch_moe_mps.accelerate(model)
    ids, text = torch.ones(1, 200, dtype=torch.long), model.get_decoder()
    with torch.no_grad(), Memory() as memory:
        text(input_ids=ids, use_cache=False)
    scores = 200 * 200 * model.config.num_attention_heads * 4  # the CPU's reference stores them
    assert (
        0.2 * memory.peak < prompt_bytes(model, 200) + 4 * scores and prompt_bytes(model, 200) > 200 * 32 * 4
    )


@pytest.mark.parametrize("name", ["Gemma4ForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"])
def test_models_for_images(name, tmp_path, capsys):
    """Their towers are in the size, and not in what a token reads; the cache is known."""
    cls = getattr(transformers, name)
    with tiny_models.groups_of_32():
        config = tiny_models.build_config(cls.config_class)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    assert main(["fit", str(tmp_path), "--group-size", "32", "--json", str(tmp_path / "x.json")]) == 0
    assert "unknown" not in capsys.readouterr().out
    data = json.loads((tmp_path / "x.json").read_text())
    dense = next(size for size in data["sizes"] if size["name"] == "16 bit")
    model = cls(config).to(torch.bfloat16)
    language = sum(p.nbytes for p in model.get_decoder().parameters()) + model.lm_head.weight.nbytes
    assert dense["bytes"] == sum(p.nbytes for p in model.parameters())
    assert dense["bytes"] > 1.05 * language or name.startswith("Gemma4")  # whose tiny config has no tower
    assert 0 < dense["bytes_a_token"] < language and data["kv_cache"]["bytes_a_token"] > 0


def test_a_quantised_checkpoint_as_it_is(tmp_path, capsys):
    """Ours, MXFP4 of gpt-oss, MLX's with its weights, and MLX's by its config alone: what loading gives."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    ours, mlx = tmp_path / "ours", tmp_path / "mlx"
    for folder, layout in ((ours, "moe_mps"), (mlx, "mlx")):
        command = ["convert", tmp_path / "dense", folder, "--group-size", 32, "--to", layout]
        assert main([*map(str, command)]) == 0
    expected = sum(tensor.nbytes for tensor in stored(torch_moe_mps.from_pretrained(ours)))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text((mlx / "config.json").read_text())
    with tiny_models.groups_of_32():
        gpt_oss = json.loads(tiny_models.tiny_config("gpt_oss").to_json_string())
    itemsize = {"float32": 4, "bfloat16": 2}[gpt_oss.get("dtype") or "bfloat16"]
    gpt_oss |= {"quantization_config": {"quant_method": "mxfp4"}, "architectures": ["GptOssForCausalLM"]}
    (tmp_path / "gpt_oss").mkdir()
    (tmp_path / "gpt_oss" / "config.json").write_text(json.dumps(gpt_oss))
    for folder in (ours, mlx, tmp_path / "config", tmp_path / "gpt_oss", tmp_path / "dense"):
        file = str(tmp_path / "x.json")
        capsys.readouterr()
        assert main(["fit", str(folder), "--group-size", "32", "--recipe", "mixed_4_6", "--json", file]) == 0
        found = json.loads((tmp_path / "x.json").read_text())["sizes"]
        sizes = {size["name"]: size["bytes"] for size in found}
        assert {*sizes} >= {"small", "fast", "best"}
        output = capsys.readouterr().out
        assert "  MB read for a token" in output
        in_mb = [f"{size[key] / 1e6:.{digits}f}" for size in found for key, digits in SHOWN]
        assert [cell for row in table(output, "weights").values() for cell in row] == in_mb
        assert sizes["4 bit"] < sizes["mixed_4_6"] < sizes["6 bit"]
        if folder.name in ("ours", "mlx", "config"):
            assert sizes["as it is"] == expected
        elif folder.name == "gpt_oss":
            shape = (gpt_oss["num_hidden_layers"], gpt_oss["num_local_experts"], 3 * 64, 64)
            matrices = math.prod(shape)  # with 4 bits each, and a byte for each 32
            assert sizes["16 bit"] - sizes["as it is"] == matrices * itemsize - matrices * 17 // 32
        else:
            assert "as it is" not in sizes


def test_a_checkpoint_in_float32(tmp_path, capsys):
    """Has a row for that, and one of 16 bits."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    whole = sum(p.numel() for p in model.parameters())
    for dtype, expected in (
        ("auto", {"32 bit": 4 * whole, "16 bit": 2 * whole}),
        ("bfloat16", {"16 bit": 2 * whole}),
    ):
        json_file = str(tmp_path / "x.json")
        assert main(["fit", str(tmp_path), "--group-size", "32", "--dtype", dtype, "--json", json_file]) == 0
        found = json.loads((tmp_path / "x.json").read_text())["sizes"]
        sizes = {size["name"]: size for size in found if size["name"] in ("32 bit", "16 bit")}
        assert {name: size["bytes"] for name, size in sizes.items()} == expected
        if len(sizes) == 2:
            assert sizes["32 bit"]["bytes_a_token"] == 2 * sizes["16 bit"]["bytes_a_token"]


NOT_READ = "the config must be one that transformers reads, got one that raises"
INCOMPLETE = "the config must be complete for"
HUNYUAN = transformers.HunYuanDenseV1Config(head_dim=None, architectures=["HunYuanDenseV1ForCausalLM"])
WRONG_CONFIGS = [
    ({"hidden_size": "2048"}, "field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str"),
    ({"num_experts": None}, "Field 'num_experts' expected int, got NoneType"),
    ({"rope_parameters": {"rope_type": "yarn"}}, f'{NOT_READ} KeyError: "Missing required keys in'),
    ({"dtype": "float7"}, f"{NOT_READ} AttributeError: module 'torch' has no attribute 'float7'"),
    ({"head_dim": 0}, f"{INCOMPLETE} AutoModelForCausalLM, got one that raises ZeroDivision"),
    ({"num_hidden_layers": 0}, "the config's num_hidden_layers must be at least 1, got 0"),
    (HUNYUAN.to_dict(), f"{INCOMPLETE} HunYuanDenseV1ForCausalLM, got one that raises TypeError: "),
]


@pytest.mark.parametrize(("wrong", "expected"), WRONG_CONFIGS)
def test_a_wrong_config_is_one_line(wrong, expected, tmp_path, refused):
    config = wrong if wrong.get("model_type") else QWEN3 | wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert expected in refused("fit", tmp_path)


def test_no_advice_for_other_machines(tmp_path, capfd, caplog):
    """transformers advises, once, to install causal_conv1d and others when it runs a hybrid model."""
    with tiny_models.groups_of_32():
        tiny_models.tiny_config("qwen3_next").save_pretrained(tmp_path)
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()
    logging.warning_once.cache_clear()
    try:
        assert main(["fit", str(tmp_path), "--group-size", "32"]) == 0
    finally:
        logging.set_verbosity(verbosity)
    assert "causal_conv1d" not in capfd.readouterr().err + caplog.text


LOADED = (("qwen3_moe", 4), ("qwen3_moe", 8), ("gemma4", 4), ("qwen3_5", 4), ("dbrx", 4), ("jetmoe", 4))


@pytest.mark.parametrize(("architecture", "bits"), rows_in_sweep(LOADED, LOADED[3:]))
def test_sizes_are_those_of_a_loaded_model(architecture, bits, tmp_path, capsys):
    """From a config alone, and from a checkpoint."""
    overrides = tiny_models.SMALL_GEMMA4 if architecture == "gemma4" else {}
    with tiny_models.groups_of_32(), tiny_models.sizes(hidden_size=256, moe_intermediate_size=64):
        model = tiny_models.tiny_model(architecture, torch.bfloat16, **overrides)
    model.save_pretrained(tmp_path / "model")
    model.config.save_pretrained(tmp_path / "config")
    loaded = torch_moe_mps.from_pretrained(tmp_path / "model", bits=bits, group_size=32)
    weights = [tensor for tensor in stored(loaded) if tensor.numel() > 1]  # no scalars of Gemma 4's layers
    expected = sum(tensor.nbytes for tensor in weights), loaded.hf_quantizer.report.bytes_after
    for folder in ("model", "config"):
        file = tmp_path / "x.json"
        command = ["fit", tmp_path / folder, "--group-size", 32, "--json", file]
        assert main([*map(str, command)]) == 0
        (size,) = (s for s in json.loads(file.read_text())["sizes"] if s["name"] == f"{bits} bit")
        assert (size["bytes"], size["bytes_a_token"]) == expected, folder


@pytest.mark.parametrize("architecture", ["dbrx", "jetmoe"])
def test_a_token_reads_its_experts_under_other_names(architecture, tmp_path):
    """Two of eight; their routers, and a bias, whole."""
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model(architecture)
    model.save_pretrained(tmp_path)
    expected = 64 * 4  # a row of the embedding
    for name, weight in model.named_parameters():
        is_of_experts = name.endswith((".w1", ".v1", ".w2", "put_linear.weight"))
        is_embedding = (
            name.endswith(("wte.weight", "embed_tokens.weight")) and not model.config.tie_word_embeddings
        )
        expected += 0 if is_embedding else weight.nbytes // 4 if is_of_experts else weight.nbytes
    command = ["fit", tmp_path, "--group-size", 32, "--json", tmp_path / "x.json"]
    assert main([*map(str, command)]) == 0
    data = json.loads((tmp_path / "x.json").read_text())
    (size,) = (s for s in data["sizes"] if s["name"] == "32 bit")
    assert size["bytes"] == sum(weight.nbytes for weight in model.parameters())
    assert size["bytes_a_token"] == expected
    assert data["kv_cache"]["bytes_a_token"] > 0


def test_wired_limits():
    """What Metal reports, in MiB, on Macs of users (see macs.py)."""
    reported = {16: 10922.67, 32: 21845.33, 36: 27648, 96: 73728}
    for gib, mib in reported.items():
        assert macs.wired_limit(gib) / 2**20 == pytest.approx(mib, abs=0.01)


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """A function that makes this machine a Mac, by what a program of Apple's and torch say of it."""

    def make(chip: str, gib: int, cores: int, wired: int = 0) -> None:
        values = {"machdep.cpu.brand_string": chip, "hw.memsize": gib << 30, "iogpu.wired_limit_mb": wired}
        cases = "".join(f'{name}) echo "{value}" ;;\n' for name, value in values.items())
        program = tmp_path / "bin" / "sysctl"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\ncase "$2" in\n{cases}esac\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: cores)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    return make


def test_this_mac(mac, qwen3, capsys):
    mac("Apple M4 Max", 36, 32)
    assert main(["fit", str(qwen3), "--mac", "--context", "0"]) == 0
    output = capsys.readouterr().out
    assert set(table(output, "Mac")) == {"this Mac, 36 GB"}
    assert set(table(output, "chip")) == {"M4 Max (32 cores), 410 GB/s"}
    assert f"sudo sysctl iogpu.wired_limit_mb={28 << 10}" in output.splitlines()


def test_this_mac_with_another_limit_and_an_unknown_chip(mac, qwen3, capsys):
    mac("Apple M9", 64, 10, wired=60000)
    assert main(["fit", str(qwen3), "--mac"]) == 0
    output = capsys.readouterr().out
    assert table(output, "Mac")["this Mac, 64 GB"][0] == "62.9"
    assert output.endswith("The memory bandwidth of the M9 is not known here.\n")


def test_what_does_not_fit_is_one_line(mac, qwen3, tmp_path, refused):
    mac("Intel(R) Core(TM) i7", 16, 0)
    transformers.ViTConfig().save_pretrained(tmp_path / "vit")
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"bits": 4, "keep": ["mtp.*"]}')
    for arguments, message in (
        ([qwen3, "--mac"], "--mac is for a Mac with Apple silicon; this machine is not one"),
        ([tmp_path / "nothing"], "is neither a folder nor the name of a model on the Hub"),
        ([tmp_path / "vit"], "model_type must be of a model that generates text"),
        ([qwen3, "--recipe", recipe], "the pattern 'mtp.*' fits no weight that can be quantised"),
    ):
        assert message in refused("fit", *arguments)


@pytest.mark.slow("converts a model")
def test_mtp_layers_are_counted(tmp_path, capsys):
    """As `convert` writes them, with their caches; without the weights, as the config says."""
    folder, file = tmp_path / "model", tmp_path / "fit.json"
    wide = {"hidden_size": 256, "n_routed_experts": 4, "max_position_embeddings": 10**9}
    with with_mtp("glm4_moe", folder, 2, **wide):
        asked = ["convert", str(folder), str(tmp_path / "four"), "--bits", "4", "--group-size", "32"]
        assert main(asked) == 0
        written = load_file(tmp_path / "four" / "model.safetensors")
        own = sum(t.nbytes for name, t in written.items() if re.search(r"layers\.[23]\.", name))
        for is_here in (True, False):
            if not is_here:
                (folder / "model.safetensors").unlink()
            capsys.readouterr()
            asked = ["fit", str(folder), "--group-size", "32", "--json", str(file)]
            assert main(asked) == 0
            assert "load layers of the checkpoint for drafts, of " in capsys.readouterr().out
            found = json.loads(file.read_text())
            sizes = {size["name"]: size for size in found["sizes"]}
            assert sizes["4 bit"]["speculative"] == pytest.approx(own, rel=0.01)
            space = found["macs"][0]["gpu"] - found["prompt"]["bytes"]
            space -= sizes["4 bit"]["bytes"] + sizes["4 bit"]["speculative"]
            fits = found["macs"][0]["contexts"]["4 bit"]
            assert fits == pytest.approx(context(space, 2 * found["kv_cache"]["bytes_a_token"]), rel=1e-6)
