"""The commands convert and perplexity, on tiny checkpoints with a tokenizer of characters."""

import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import weakref

import pytest
import safetensors.torch
import torch
import transformers
from support import tiny_models
from support.checkpoints import add_tokenizer
from support.disk import files_of
from support.processes import COMMAND, interrupted
from support.sweep import covering

import torch_moe_mps
from torch_moe_mps.commands import convert, main, perplexity
from torch_moe_mps.commands.perplexity import SAMPLE, Means, measure, save_references, windows
from torch_moe_mps.commands.sources import usable_device
from torch_moe_mps.models.basics.interface import formats_of

# Tests that do not depend on experts: a dense model, in the sweep.
ONE_KIND = pytest.mark.parametrize(
    "checkpoint", ["qwen3_moe", pytest.param("llama", marks=pytest.mark.sweep)], indirect=True
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folders of models, each written once."""

    @functools.cache
    def write(architecture):
        folder = tmp_path_factory.mktemp(architecture)
        with tiny_models.groups_of_32():
            tiny_models.tiny_model(architecture).save_pretrained(folder, max_shard_size="50KB")
        add_tokenizer(folder)
        return folder

    return write


@pytest.fixture
def checkpoint(request, written, tmp_path):
    """A folder that is not quantised, sharded, with a tokenizer."""
    return shutil.copytree(written(getattr(request, "param", "qwen3_moe")), tmp_path / "dense")


@pytest.fixture
def short_text(tmp_path):
    (tmp_path / "text.txt").write_text(SAMPLE.read_text()[:100])
    return tmp_path / "text.txt"


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


@ONE_KIND
def test_convert(checkpoint, tmp_path, capsys):
    assert (
        run("convert", checkpoint, tmp_path / "new", "--bits", 4, "--group-size", 32, "--keep", "*.k_proj")
        == 0
    )
    output = capsys.readouterr().out
    size = sum(file.stat().st_size for file in (tmp_path / "new").iterdir()) / 1e6
    assert (
        "weights read for a token" in output and f"wrote {tmp_path / 'new'}, {size:.1f} MB of files" in output
    )
    converted = torch_moe_mps.from_pretrained(tmp_path / "new")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    torch_moe_mps.accelerate(model, 4, 32, keep=["*.k_proj"])
    state, expected = converted.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "new"}


def test_mixed_recipe(tmp_path):
    """Of 8 layers the first, every third from it and the last."""
    checkpoint = tmp_path / "dense"
    with tiny_models.groups_of_32(), tiny_models.sizes(num_hidden_layers=8):
        tiny_models.tiny_model("qwen3_moe").save_pretrained(checkpoint)
    assert run("convert", checkpoint, tmp_path / "new", "--recipe", "mixed_4_6", "--group-size", 32) == 0
    model = torch_moe_mps.from_pretrained(tmp_path / "new")
    more = [0, 3, 6, 7]
    for index, layer in enumerate(model.model.layers):
        bits = [f.bits for f in formats_of(layer.mlp.experts).values()]
        assert bits == [4, 6 if index in more else 4]
        assert layer.self_attn.v_proj.format.bits == bits[1] and layer.self_attn.k_proj.format.bits == 4
    assert model.lm_head.format.bits == 6 and model.model.embed_tokens.format.bits == 4


@pytest.mark.slow("a table of three models")
@ONE_KIND
def test_perplexity(checkpoint, tmp_path, capsys):
    """One table of several models, none of which is changed."""
    text = tmp_path / "text.txt"
    text.write_text(SAMPLE.read_text()[:70])
    new, mlx, found = (tmp_path / name for name in ("new", "mlx", "found.json"))
    assert run("convert", checkpoint, new, "--bits", 8, "--group-size", 32) == 0
    assert run("convert", checkpoint, mlx, "--bits", 3, "--group-size", 32, "--to", "mlx") == 0
    arguments = [new, mlx, "--against", checkpoint, "--text", text, "--window", 32, "--device", "cpu"]
    before = {file: file.read_bytes() for folder in (new, mlx, checkpoint) for file in folder.iterdir()}
    assert run("perplexity", *arguments, "--json", found) == 0
    assert {file: file.read_bytes() for file in before} == before
    output, data = capsys.readouterr().out, json.loads(found.read_text())
    first, second = data["models"]
    assert data["tokens"] == 70 and first["divergence"] < second["divergence"]
    lines = [line.split() for line in output.splitlines()]
    assert [str(checkpoint), f"{data['perplexity_of_other']:.4f}"] in lines
    assert first["divergence_error"] > 0 and first["standard_error"] > 0
    for folder, own in ((new, first), (mlx, second)):
        figures = f"{own['perplexity']:.4f} ± {own['standard_error']:.4f}"
        divergence = f"{own['divergence']:.5f} ± {own['divergence_error']:.5f}"
        top = f"{100 * own['agreement']:.2f} %"
        assert [str(folder), *figures.split(), *divergence.split(), *top.split()] in lines


def test_models_of_two_tokenizers_are_no_table(checkpoint, short_text, tmp_path, refused):
    other = shutil.copytree(checkpoint, tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":'))
    error = refused("perplexity", checkpoint, other, "--text", short_text, "--device", "cpu")
    assert error == f"all models must have the tokenizer of {checkpoint}, got {other}"


def too_short(checkpoint, text):
    text.write_text("a")
    return f"--text must have 2 tokens or more, got 1 in {text}"


def no_tokenizer(checkpoint, text):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    return f"{checkpoint} has no tokenizer"


@ONE_KIND
@pytest.mark.parametrize("damage", [too_short, no_tokenizer], ids=lambda f: f.__name__)
def test_texts_that_cannot_be_read_are_one_line(damage, checkpoint, short_text, refused):
    message = damage(checkpoint, short_text)
    assert message in refused("perplexity", checkpoint, "--text", short_text, "--device", "cpu")


@torch.no_grad()
def test_the_first_tokens_of_a_text(checkpoint, tmp_path, capsys, refused):
    """--tokens is the text cut off there; less than two are no prediction."""
    short, long, found = tmp_path / "short.txt", tmp_path / "long.txt", tmp_path / "found.json"
    short.write_text(SAMPLE.read_text()[:100])
    long.write_text(SAMPLE.read_text()[:300])
    values = []
    for more in (["--text", short], ["--text", long, "--tokens", 100]):
        assert run("perplexity", checkpoint, *more, "--device", "cpu", "--json", found) == 0
        values.append(json.loads(found.read_text()))
    assert values[0]["tokens"] == values[1]["tokens"] == 100
    assert values[0]["models"] == values[1]["models"]


def test_perplexity_with_a_cache_in_8_bits(tmp_path):
    """Of a model in float32, whose heads of 64 have groups: close to what it predicts with a dense cache."""
    model = tiny_models.tiny_model("llama", head_dim=64)
    pieces = [torch.randint(2, 90, (40,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    save_references(model, pieces, tmp_path)
    means = measure(perplexity.WithQuantizedCache(model, 8), pieces, tmp_path)
    assert means.loss == pytest.approx(means.other, rel=1e-3) and means.loss != means.other
    assert 0 < means.divergence < 1e-3


def lookup(table):
    """A model whose logits of the next token depend on this token alone."""
    return lambda input_ids: type("Output", (), {"logits": table[input_ids]})


def measured(tables, ids, first, window, folder) -> tuple[Means, dict[str, float]]:
    """What `perplexity` measures of the first model against the second, and the definitions in float64."""
    pieces = windows(ids, first, window)
    save_references(lookup(tables[1]), pieces, folder)
    result = measure(lookup(tables[0]), pieces, folder)
    contexts = torch.cat([piece[:-1] for piece in pieces])
    targets = torch.cat([piece[1:] for piece in pieces])
    p, q = (table.double().softmax(-1)[contexts] for table in tables)
    return result, {
        "loss": -p.gather(1, targets[:, None]).log().mean().item(),
        "other": -q.gather(1, targets[:, None]).log().mean().item(),
        "divergence": (q * (q / p).log()).sum(1).mean().item(),
        "agreement": (p.argmax(1) == q.argmax(1)).double().mean().item(),
        "loss_error": error_of(p.gather(1, targets[:, None]).log()),
        "divergence_error": error_of((q * (q / p).log()).sum(1)),
    }


def error_of(values) -> float:
    """The standard error of the mean."""
    return values.std().item() / len(values) ** 0.5


def test_measure_is_the_definition(tmp_path):
    torch.manual_seed(0)
    tables = [torch.randn(7, 7) for _ in range(2)]
    ids = torch.randint(0, 7, (50,))
    result, expected = measured(tables, ids, ids[:0], 16, tmp_path)
    assert vars(result) == pytest.approx(expected | {"rest": 0.0}, rel=1e-5)


def test_divergence_of_a_large_vocabulary_is_a_lower_bound(tmp_path):
    """It only misses the divergence within the class, whose probability the output gives."""
    torch.manual_seed(0)
    tables = [3 * torch.randn(64, 3000) for _ in range(2)]
    tables[1] = tables[0] + 0.3 * torch.randn(64, 3000)
    tables = [torch.cat([table, torch.zeros(3000 - 64, 3000)]) for table in tables]
    result, expected = measured(tables, torch.randint(0, 64, (65,)), torch.zeros(0).long(), 65, tmp_path)
    missing = expected["divergence"] - result.divergence
    assert 0 < missing < 2 * result.rest * expected["divergence"] and 1e-3 < result.rest < 0.1
    assert result.other == pytest.approx(expected["other"]) and result.agreement == expected["agreement"]


@pytest.mark.parametrize(("begins", "window"), [(0, 2), (0, 5), (1, 2), (1, 5), (1, 100)])
def test_windows_predict_each_token_once(begins, window):
    ids, first = torch.arange(1, 14), torch.zeros(begins).long()
    pieces = windows(ids, first, window)
    assert all(len(piece) <= window and torch.equal(piece[:begins], first) for piece in pieces)
    assert torch.cat([piece[1:] for piece in pieces]).tolist() == list(range(2 - begins, 14))


def test_a_hopeless_model_has_an_infinite_perplexity(checkpoint, tmp_path, monkeypatch, capsys):
    """exp of a mean loss over 709 nats overflows a double."""
    text = tmp_path / "text.txt"
    text.write_text(SAMPLE.read_text()[:40])
    monkeypatch.setattr(perplexity, "measure", lambda *arguments: Means(loss=800.0))
    assert run("perplexity", checkpoint, "--text", text, "--device", "cpu") == 0
    assert " inf ± " in capsys.readouterr().out


@pytest.mark.parametrize("rest", [0.0, 0.0123])
def test_the_probability_of_tokens_that_count_as_one_is_said(rest, checkpoint, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text(SAMPLE.read_text()[:40])
    monkeypatch.setattr(perplexity, "measure", lambda *arguments: Means(rest=rest))
    assert run("perplexity", checkpoint, "--against", checkpoint, "--text", text, "--device", "cpu") == 0
    assert ("with 1.230 % of the probability" in capsys.readouterr().out) is (rest > 0)


def test_models_are_compared_one_after_the_other(checkpoint, tmp_path, monkeypatch):
    """The first is gone when the second is loaded."""
    text = tmp_path / "text.txt"
    text.write_text(SAMPLE.read_text()[:40])
    load, loaded = perplexity.load_stored, []

    def load_alone(*arguments):
        gc.collect()
        assert all(model() is None for model in loaded)
        model = load(*arguments)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(perplexity, "load_stored", load_alone)
    assert run("perplexity", checkpoint, "--against", checkpoint, "--text", text, "--device", "cpu") == 0
    assert len(loaded) == 2


def in_the_cache(folder, cache, revision: str, branch: str | None = "main") -> None:
    """Put a folder into a cache of the Hub, as the model org/name."""
    repository = cache / "models--org--name"
    shutil.copytree(folder, repository / "snapshots" / revision)
    (repository / "refs").mkdir(exist_ok=True)
    if branch:
        (repository / "refs" / branch).write_text(revision)


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch):
    """The Hub, which cannot be reached, with a checkpoint in its cache."""
    (checkpoint / "tokenization_own.py").write_text("# the tokenizer's own code\n")
    (checkpoint / "original").mkdir()
    (checkpoint / "original" / "params.json").write_text("{}")
    cache = tmp_path / "hub"
    in_the_cache(checkpoint, cache, "a" * 40)
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    in_the_cache(checkpoint, cache, "b" * 40, "other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "org/name"


def test_convert_of_a_name_keeps_the_tokenizer(hub, tmp_path):
    assert run("convert", hub, tmp_path / "new", "--group-size", 32) == 0
    text = SAMPLE.read_text()[:40]
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "new")(text).input_ids) == 40
    assert (tmp_path / "new" / "tokenization_own.py").read_text() == "# the tokenizer's own code\n"
    assert not (tmp_path / "new" / "original").exists()


def test_a_revision_and_a_dtype(hub, tmp_path):
    arguments = ["--revision", "other", "--dtype", "float16", "--group-size", 32]
    assert run("convert", hub, tmp_path / "new", *arguments) == 0
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["dtype"] == "float16"
    tensors = safetensors.torch.load_file(tmp_path / "new" / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float16}


def test_names_that_are_not_there_are_one_line(hub, checkpoint, tmp_path, refused):
    for arguments, message in (
        (
            ["org/nothing"],
            "org/nothing is no folder here; as a name, it is not in the Hub's cache, and the Hub",
        ),
        (["./no/such/folder"], "./no/such/folder is neither a folder nor the name of a model on the Hub"),
        ([checkpoint, "--revision", "main"], "--revision needs a name on the Hub, got the folder"),
    ):
        assert message in refused("convert", *arguments, tmp_path / "new")


def test_code_of_a_model_runs_only_when_trusted(tmp_path, refused):
    folder = tmp_path / "own"
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("llama").save_pretrained(folder)
    own = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    config = json.loads((folder / "config.json").read_text()) | own
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "import transformers\n"
        "class OwnConfig(transformers.LlamaConfig):\n    model_type = 'own'\n"
        "class Own(transformers.LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    error = refused("convert", folder, tmp_path / "new", "--group-size", 32, progress=True)
    assert error.endswith("--trust-remote-code lets it run.")
    trusted = ["--group-size", 32, "--trust-remote-code"]
    assert run("convert", folder, tmp_path / "new", *trusted) == 0
    assert (tmp_path / "new" / "own.py").exists()


def test_the_dry_run_says_what_a_token_reads(tmp_path, capsys):
    """As the report of the conversion does, from the tensors that were written. It writes nothing."""
    with tiny_models.groups_of_32(), tiny_models.sizes(hidden_size=512, moe_intermediate_size=512):
        tiny_models.tiny_model("qwen3_moe").save_pretrained(tmp_path / "dense")
    assert run("convert", tmp_path / "dense", tmp_path / "new", "--group-size", 32, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "fits in three quarters of this machine's" in said
    table = [line.split() for line in said.splitlines()]
    assert ["model.layers.*.self_attn.q_proj", "float32", "affine4_32", "2"] in [line[:4] for line in table]
    assert ["model.layers.*.mlp.gate", "float32", "float32", "2"] in [line[:4] for line in table]
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}
    model = torch_moe_mps.from_pretrained(tmp_path / "dense", bits=4, group_size=32)
    expected = model.hf_quantizer.report.bytes_after
    assert f", {expected / 1e6:.1f} MB of the new one" in said and expected > 1e6


def broken_link(folder):
    (folder / "vocab.json").symlink_to("nowhere")
    return f"{folder / 'vocab.json'} is a broken link, not a file"


def folder_like_a_file(folder):
    (folder / "extra.json").mkdir()
    return f"{folder / 'extra.json'} is a folder, not a file"


@pytest.mark.parametrize("damage", [broken_link, folder_like_a_file], ids=lambda f: f.__name__)
def test_what_cannot_be_copied_is_said_before_the_conversion(
    damage, checkpoint, tmp_path, refused, monkeypatch
):
    monkeypatch.delattr(convert, "_convert")
    message = damage(checkpoint)
    assert refused("convert", checkpoint, tmp_path / "new", "--group-size", 32) == message


def test_a_link_to_nowhere_is_no_destination(checkpoint, tmp_path, refused, monkeypatch):
    monkeypatch.delattr(convert, "_convert")
    (tmp_path / "link").symlink_to("nowhere")
    error = refused("convert", checkpoint, tmp_path / "link", "--group-size", 32)
    assert "link exists; convert writes a new folder" in error


def test_two_conversions_to_one_folder(checkpoint, tmp_path, refused, monkeypatch):
    """The one that ends second says so, leaves the first one's result alone and keeps its own."""

    def save_late(*arguments):
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "config.json").write_text("of the first")

    monkeypatch.setattr(convert, "_save_generation_config", save_late)
    error = refused("convert", checkpoint, tmp_path / "new", "--group-size", 32, progress=True)
    assert error.endswith("new was written by something else while this ran; it was not changed")
    assert (tmp_path / "new" / "config.json").read_text() == "of the first"
    assert (tmp_path / ".new.unfinished" / "model.safetensors").exists()


def test_a_conversion_that_is_told_to_end_leaves_nothing_incomplete(
    checkpoint, tmp_path, monkeypatch, capsys
):
    before = signal.getsignal(signal.SIGTERM)

    def end(*arguments, **named):
        assert any(path.name.startswith(".new.") for path in tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(convert, "save_parts", end)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run("convert", checkpoint, tmp_path / "new", "--group-size", 32)
    said = f"nothing of {tmp_path / 'new'} is complete: the same command begins anew"
    assert said in capsys.readouterr().err.splitlines()
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}
    assert signal.getsignal(signal.SIGTERM) is before


def test_devices_that_hold_no_tensors_are_one_line(checkpoint, capsys):
    assert run("perplexity", checkpoint, "--device", "meta") == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and "--device must be one that holds tensors here, got meta: " in error[0]


def shards(folder) -> list:
    return sorted(folder.glob("*.safetensors"))


def missing(folder):
    name = shards(folder)[1].name
    shards(folder)[1].unlink()
    return f"names {name}, which is missing"


def nothing(folder):
    for shard in shards(folder):
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    return f"{folder} has no safetensors files"


def no_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    return f"{folder / 'model.safetensors.index.json'} is truncated or has no weight_map in JSON"


def other_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    return f"{folder / 'model.safetensors.index.json'} is truncated or has no weight_map in JSON"


def no_config(folder):
    (folder / "config.json").unlink()
    return f"{folder} has no config.json"


@pytest.mark.parametrize(
    "damage",
    [missing, nothing, no_index, other_index, no_config],
    ids=lambda f: f.__name__,
)
def test_damaged_checkpoints_are_one_line(damage, checkpoint, tmp_path, refused):
    message = damage(checkpoint)
    line = refused("convert", checkpoint, tmp_path / "new", "--group-size", 32)
    assert message in line and "Error" not in line  # no other error in it
    assert not (tmp_path / "new").exists()


def test_what_does_not_fit_is_one_line(checkpoint, tmp_path, refused):
    (tmp_path / "there").mkdir()
    for arguments, message in (
        (
            [checkpoint, tmp_path / "new", "--group-size", 128],
            "must be of an input dimension that is a multiple",
        ),
        ([checkpoint, tmp_path / "new", "--recipe", "mixed"], "mixed_4_6 or a file, got mixed"),
        (
            [checkpoint, tmp_path / "new", "--recipe", checkpoint / "config.json"],
            "config.json must have bits, ",
        ),
    ):
        assert message in refused("convert", *arguments, progress=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "there"]
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "qwen3_moe"


@pytest.mark.parametrize(("limit", "layout"), covering((2000, 40000), ("moe_mps", "mlx")))
def test_a_full_disk_is_one_line(limit, layout, checkpoint, tmp_path, capsys):
    with files_of(limit):
        code = run("convert", checkpoint, tmp_path / "new", "--group-size", 32, "--to", layout)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1 and error.startswith("torch-moe-mps: error: ") and "File too large" in error
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}


def test_output_that_cannot_be_written_is_one_line(checkpoint, refused):
    """As on a full disk: what waits in Python's buffer, too, which it would write after the command."""
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        error = refused("fit", checkpoint, "--group-size", 32, progress=True)
    assert error == "[Errno 28] No space left on device"


def test_a_pipe_that_nobody_reads_ends_a_command_quietly(checkpoint, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, contextlib.redirect_stdout(pipe):
        assert run("fit", checkpoint, "--group-size", 32) == 128 + signal.SIGPIPE
    assert "error" not in capsys.readouterr().err.lower()


def test_no_part_of_a_result_is_left_on_a_full_disk(checkpoint, tmp_path, capsys, refused):
    file = tmp_path / "sizes.json"
    with files_of(100):
        error = refused("fit", checkpoint, "--group-size", 32, "--json", file, progress=True)
    assert error == f"{file} cannot be written: File too large" and not file.exists()
    error = refused("fit", checkpoint, "--group-size", 32, "--json", "/dev/full")
    assert "/dev/full cannot be written: No space left on device" in error


def test_ctrl_c_of_a_perplexity(checkpoint, tmp_path):
    """What is said begins a line of its own behind the bar of progress; no file is begun."""
    options = [checkpoint, "--device", "cpu", "--window", 8, "--json", tmp_path / "found.json"]
    code, errors = interrupted(COMMAND, "Reading:", "perplexity", *options)
    assert code == 130 and errors.splitlines()[-1] == "torch-moe-mps: interrupted"
    assert "Traceback" not in errors and not (tmp_path / "found.json").exists()


def test_without_an_apple_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert usable_device("cpu") == "cpu" and capsys.readouterr().err == ""
    assert usable_device(None) == "cpu"
    assert capsys.readouterr().err.splitlines() == [
        "torch finds no Apple GPU here: operators run their references on the CPU"
    ]
