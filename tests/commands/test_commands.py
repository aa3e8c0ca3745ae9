"""The commands convert and perplexity, on tiny checkpoints with a tokenizer of characters."""

import contextlib
import json
import resource

import pytest
import safetensors.torch
import torch
import transformers
from support import tiny_models
from tokenizers import Tokenizer, models, pre_tokenizers

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.commands.perplexity import SAMPLE, measure
from torch_moe_mps.transformers.interface import formats_of


@pytest.fixture
def checkpoint(tmp_path):
    """A dense folder, sharded, with a tokenizer."""
    with tiny_models.groups_of_32(), tiny_models.sizes(num_hidden_layers=8):
        model = tiny_models.tiny_model("qwen3_moe")
    folder = tmp_path / "dense"
    model.save_pretrained(folder, max_shard_size="200KB")
    letters = {
        character: index for index, character in enumerate([*sorted(set(SAMPLE.read_text())), "?" * 2])
    }
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="??"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def test_convert(checkpoint, tmp_path, capsys):
    assert (
        run("convert", checkpoint, tmp_path / "new", "--bits", 4, "--group-size", 32, "--keep", "*.k_proj")
        == 0
    )
    output = capsys.readouterr().out
    assert "weights read for a token" in output and f"wrote {tmp_path / 'new'}" in output
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    torch_moe_mps.accelerate(model, 4, 32, keep=["*.k_proj"])
    state, expected = converted.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "new"}


def test_dry_run_writes_nothing(checkpoint, tmp_path, capsys):
    assert run("convert", checkpoint, tmp_path / "new", "--bits", 4, "--group-size", 32, "--dry-run") == 0
    assert "fits in three quarters of this machine's" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}


def test_mixed_recipe(checkpoint, tmp_path):
    """Of 8 layers the first, every third from it and the last."""
    assert run("convert", checkpoint, tmp_path / "new", "--recipe", "mixed_4_6", "--group-size", 32) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    more = [0, 3, 6, 7]
    for index, layer in enumerate(model.model.layers):
        bits = [f.bits for f in formats_of(layer.mlp.experts).values()]
        assert bits == [4, 6 if index in more else 4]
        assert layer.self_attn.v_proj.format.bits == bits[1] and layer.self_attn.k_proj.format.bits == 4
    assert model.lm_head.format.bits == 6 and model.model.embed_tokens.format.bits == 4


def test_budget(checkpoint, tmp_path):
    """The recipe that was measured is written, and gives the same model again."""
    text, recipe = tmp_path / "text.txt", tmp_path / "recipe.json"
    text.write_text(SAMPLE.read_text()[:100])
    arguments = ["--group-size", 32, "--text", text, "--save-recipe", recipe]
    assert run("convert", checkpoint, tmp_path / "new", "--budget", 7, *arguments) == 0
    assert run("convert", checkpoint, tmp_path / "again", "--recipe", recipe) == 0
    assert len(set(json.loads(recipe.read_text())["overrides"].values())) > 1
    first, second = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("new", "again")
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_perplexity(checkpoint, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(SAMPLE.read_text()[:400])
    assert run("convert", checkpoint, tmp_path / "new", "--bits", 8, "--group-size", 32) == 0
    arguments = ["--text", text, "--window", 64, "--device", "cpu"]
    assert run("perplexity", tmp_path / "new", "--against", checkpoint, *arguments) == 0
    output = capsys.readouterr().out
    assert "mean KL divergence from it 0.0" in output and "400 tokens in windows of 64" in output


def test_measure_is_the_definition():
    torch.manual_seed(0)
    tables = [torch.randn(7, 7) for _ in range(2)]

    def model(table):
        return lambda input_ids: type("Output", (), {"logits": table[input_ids]})

    ids = torch.randint(0, 7, (50,))
    result = measure(model(tables[0]), ids, 16, model(tables[1]))
    p, q = (table.double().softmax(-1)[ids[:-1]] for table in tables)
    expected = torch.exp(-p.gather(1, ids[1:, None]).log().mean())
    assert result["perplexity"] == pytest.approx(expected.item(), rel=1e-5)
    assert result["divergence"] == pytest.approx((q * (q / p).log()).sum(1).mean().item(), rel=1e-4)
    assert result["agreement"] == pytest.approx((p.argmax(1) == q.argmax(1)).double().mean().item())


def shards(folder) -> list:
    return sorted(folder.glob("*.safetensors"))


def truncated(folder):
    shards(folder)[0].write_bytes(shards(folder)[0].read_bytes()[:5000])
    return rf"{shards(folder)[0]} is truncated or no safetensors file"


def missing(folder):
    name = shards(folder)[1].name
    shards(folder)[1].unlink()
    return f"names {name}, which is missing"


def nothing(folder):
    for shard in shards(folder):
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    return "has no safetensors files"


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
    "damage", [truncated, missing, nothing, no_index, other_index, no_config], ids=lambda f: f.__name__
)
def test_damaged_checkpoints_are_one_line(damage, checkpoint, tmp_path, capsys):
    message = damage(checkpoint)
    assert run("convert", checkpoint, tmp_path / "new", "--group-size", 32) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("torch-moe-mps: error: ") and message in error and "\n" not in error
    assert not (tmp_path / "new").exists()


def test_what_does_not_fit_is_one_line(checkpoint, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    for arguments, message in (
        ([checkpoint, tmp_path / "new", "--bits", 7], "bits must be 2 or 3 or"),
        (
            [checkpoint, tmp_path / "new", "--group-size", 128],
            "must be of an input dimension that is a multiple",
        ),
        ([checkpoint, tmp_path / "there"], "there exists; convert writes a new folder"),
        ([checkpoint, tmp_path / "new", "--recipe", "mixed_4_6", "--bits", 4], "leave --bits and --mode out"),
        ([checkpoint, tmp_path / "new", "--recipe", "mixed"], "mixed_4_6 or a file, got mixed"),
        (
            [checkpoint, tmp_path / "new", "--recipe", checkpoint / "config.json"],
            "config.json must have bits, ",
        ),
        ([checkpoint, tmp_path / "new", "--budget", 3, "--group-size", 32], "budget must be"),
        ([checkpoint, tmp_path / "new", "--save-recipe", "x"], "--save-recipe needs --budget"),
    ):
        assert run("convert", *arguments) == 1
        assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "there"]
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "qwen3_moe"


@pytest.mark.parametrize("layout", ["moe_mps", "mlx"])
def test_damaged_tensors_of_quantised_checkpoints_are_one_line(layout, checkpoint, tmp_path, capsys):
    """Lacking, and of another shape; the file or the tensors that it is made of are named."""
    assert run("convert", checkpoint, tmp_path / "whole", "--group-size", 32, "--to", layout) == 0
    file = tmp_path / "whole" / "model.safetensors"
    layer, packed = "model.layers.1.self_attn.q_proj", "packed" if layout == "moe_mps" else "weight"
    tensors = safetensors.torch.load_file(file)
    form = {"format": "pt" if layout == "moe_mps" else "mlx"}
    place = str(file) if layout == "moe_mps" else f"made of {layer}.scales"
    for change, message in (
        (
            {f"{layer}.scales": tensors[f"{layer}.scales"][:-1]},
            f"{layer}.scales must be of shape (64, 2), got",
        ),
        ({f"{layer}.{packed}": None}, f"{layer}."),
        ({"model.norm.weight": None}, "model.norm.weight must be in the checkpoint"),
    ):
        left = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        safetensors.torch.save_file({n: t.contiguous() for n, t in left.items()}, file, metadata=form)
        capsys.readouterr()
        assert run("convert", tmp_path / "whole", tmp_path / "new") == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("torch-moe-mps: error: ") and message in error
        assert None in change.values() or place in error
        assert not (tmp_path / "new").exists()


@contextlib.contextmanager
def files_of(limit: int):
    """No file grows over `limit` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [2000, 40000], ids=["while quantising", "while writing"])
@pytest.mark.parametrize("layout", ["moe_mps", "mlx"])
def test_a_full_disk_is_one_line(limit, layout, checkpoint, tmp_path, capsys):
    with files_of(limit):
        code = run("convert", checkpoint, tmp_path / "new", "--group-size", 32, "--to", layout)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 1 and error.startswith("torch-moe-mps: error: ") and "File too large" in error
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}
