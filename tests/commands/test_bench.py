"""The command bench on a tiny model: what is measured, not how fast it is."""

import argparse
import json
import re
import signal

import pytest
import torch
from simulator import shaderlib
from support import tiny_models
from support.checkpoints import add_tokenizer
from support.launches import Launches
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_moe_mps
from torch_moe_mps.commands import bench, main
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.width import Width

SIZES = ["--prompt", 6, "--max-tokens", 3, "--turn", 2, "--depth", "0,20", "--repeats", 2, "--device", "cpu"]
TESTS = ["pp6", "tg3", "tg3 sampled", "pp6 @ d20", "tg3 @ d20", "tg3 sampled @ d20", "ttft2 @ d20"]


@pytest.fixture
def checkpoint(tmp_path):
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("qwen3_moe", head_dim=32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments) -> int:
    return main(["bench", *map(str, arguments)])


def rows(output: str) -> dict[str, list[str]]:
    """{test: cells} of the table, without its head."""
    lines = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("| ")]
    assert [len(line) for line in lines] == [10] * len(lines)
    return {line[3].strip(): [cell.strip() for cell in line] for line in lines[2:]}


def test_rows_and_json(checkpoint, tmp_path, capsys):
    file = tmp_path / "speed.json"
    arguments = [*SIZES, "--bits", 4, "--group-size", 32, "--json", file, "--bandwidth", 100]
    assert run(checkpoint, *arguments) == 0
    found = rows(capsys.readouterr().out)
    assert list(found) == TESTS
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", found["tg3"][4]) and found["ttft2 @ d20"][4].endswith(" ms")
    assert re.fullmatch(r"\d+ %", found["tg3 @ d20"][5])
    data = json.loads(file.read_text())
    assert [row["test"] for row in data["rows"]] == TESTS
    config = json.loads((checkpoint / "config.json").read_text())
    heads = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]  # of K and V
    values = heads * config["head_dim"]
    bounds = [100e9 / (data["bytes_a_token"] + depth * values * 4) for depth in (0, 20)]
    generated = [row for row in data["rows"] if row["share"] is not None]
    assert [row["test"] for row in generated] == ["tg3", "tg3 sampled", "tg3 @ d20", "tg3 sampled @ d20"]
    bounds = [bound for bound in bounds for _ in range(2)]
    assert [row["rate"] / row["share"] for row in generated] == pytest.approx(bounds)
    assert run(checkpoint, *arguments, "--kv-bits", 8, "--depth", 20, "--repeats", 1) == 0
    codes = heads * (config["head_dim"] + 4 + 4)  # a scale and a bias in float32
    generated = [row for row in json.loads(file.read_text())["rows"] if row["test"].startswith("tg")]
    bound = 100e9 / (data["bytes_a_token"] + 20 * codes)
    assert generated[-1]["rate"] / generated[-1]["share"] == pytest.approx(bound)
    assert all(row["memory"] > 1e6 and row["rate"] > 0 for row in data["rows"])


@pytest.mark.slow("a context of 300 tokens")
def test_the_bound_of_a_cache_in_tiles(checkpoint, tmp_path):
    """After 300 tokens, tile 1 is quantised; a token reads tile 0 and its own tile in float32."""
    file = tmp_path / "speed.json"
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 512}
    (checkpoint / "config.json").write_text(json.dumps(config))
    arguments = [*SIZES, "--json", file, "--bandwidth", 100, "--kv-bits", "k4v2", "--repeats", 1]
    assert run(checkpoint, *arguments, "--depth", 300) == 0
    data, width = json.loads(file.read_text()), config["head_dim"]
    tile = 128 * width * (4 + 2) // 8 + 4 * (4 * width + 128)
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    nbytes = heads * (tile + (300 - 128) * 2 * width * 4)
    row = next(row for row in data["rows"] if row["test"] == "tg3 @ d300")
    assert row["rate"] / row["share"] == pytest.approx(100e9 / (data["bytes_a_token"] + nbytes))


def test_experts_of_a_step_of_several_sequences(checkpoint, capsys, monkeypatch):
    """As the routers of transformers' own model choose them."""
    monkeypatch.setattr(bench, "SEQUENCES", (1, 3))
    monkeypatch.setattr(bench, "CONTEXT", 4)
    sizes = ["--prompt", 4, "--max-tokens", 2, "--turn", 2, "--depth", 0, "--repeats", 1, "--device", "cpu"]
    assert run(checkpoint, *sizes) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("experts that")]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").eval()
    ids = torch.randint(97, (1, 4 + 2 + bench.END + 1), generator=torch.Generator().manual_seed(0))
    found = []
    for count in (1, 3):
        rows = ids.repeat(1, 9)[0, : count * 5].view(count, 5)
        with torch.no_grad():
            logits = model(rows, output_router_logits=True).router_logits
        chosen = [layer.view(count, 5, -1)[:, -1].topk(model.config.num_experts_per_tok) for layer in logits]
        mean = sum(len(each.indices.unique()) for each in chosen) / len(chosen)
        found.append(f"{mean:.1f} of {count} sequences")
    assert line == "experts that a layer reads in a step: " + ", ".join(found)


def test_launches_are_the_operators_of_a_token_on_a_cpu(checkpoint):
    """Counted by torch's profiler: what is no view and is called by the model, not by another operator."""
    from torch_moe_mps.transformers.loading import from_pretrained

    model = from_pretrained(checkpoint)
    with bench._Launches(model.device) as counted, torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.long))
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(input_ids=torch.ones(1, 1, dtype=torch.long))
    experts = [event for event in profile.events() if event.name == "moe_mps::_moe_experts"]
    assert len(experts) == 2 and 20 < counted.count < len(profile.events())


@pytest.mark.sweep
def test_on_mps(checkpoint, tmp_path, capsys, simulated):
    """All rows; a token's launches are torch's operators and the kernels that the simulator saw encoded."""
    from torch_moe_mps.transformers.loading import from_pretrained

    file = tmp_path / "speed.json"
    sizes = [*SIZES[:-2], "--device", "mps", "--bits", 4, "--group-size", 32]
    assert run(checkpoint, *sizes, "--json", file) == 0
    assert list(rows(capsys.readouterr().out)) == TESTS
    generated = [row for row in json.loads(file.read_text())["rows"] if row["test"].startswith("tg")]
    model = from_pretrained(checkpoint, bits=4, group_size=32, device_map="mps")
    ids = torch.ones(1, 1, dtype=torch.long, device="mps")
    with torch.no_grad():
        cache = cache_among(model(input_ids=ids))
        model(input_ids=ids, **cache_argument(model, cache))
    with torch.no_grad(), simulated.trace() as encoded, Launches() as operators:
        model(input_ids=ids, **cache_argument(model, cache), logits_to_keep=1)
    kernels = [line for line in str(encoded).splitlines() if " grid " in line]
    assert generated[0]["launches"] == operators.counts.total() + len(kernels) and len(kernels) > 10


def test_an_interruption_keeps_what_was_measured(checkpoint, tmp_path, capsys, monkeypatch):
    behind = bench.Bench._behind

    def interrupted(self, depth, tokens):
        if depth:
            raise KeyboardInterrupt
        return behind(self, depth, tokens)

    monkeypatch.setattr(bench.Bench, "_behind", interrupted)
    assert run(checkpoint, *SIZES, "--json", tmp_path / "speed.json") == 128 + signal.SIGINT
    assert list(rows(capsys.readouterr().out)) == TESTS[:3]
    assert [row["test"] for row in json.loads((tmp_path / "speed.json").read_text())["rows"]] == TESTS[:3]


@pytest.mark.slow("answers with drafts and without, of two contexts")
@pytest.mark.parametrize("way", ["draft", pytest.param("lookup", marks=pytest.mark.sweep)])
def test_draft_tokens_have_rows(way, checkpoint, tmp_path, capsys, monkeypatch):
    """The model as its own draft accepts all drafts: 8 tokens behind the first, 4 in each step."""
    monkeypatch.setattr("torch_moe_mps.serving.speculative.asked.Width", lambda width: Width(3))
    with tiny_models.groups_of_32():
        tiny_models.tiny_model("qwen3_moe", head_dim=32, vocab_size=128).save_pretrained(checkpoint)
    add_tokenizer(checkpoint)
    arguments = ["--speculative", checkpoint if way == "draft" else "lookup"]
    file = tmp_path / "speed.json"
    assert run(checkpoint, *SIZES, *arguments, "--max-tokens", 9, "--repeats", 1, "--json", file) == 0
    output = capsys.readouterr().out
    assert list(rows(output)) == [
        "pp6", "tg9", "tg9 sampled", "tg9 drafted",
        "pp6 @ d20", "tg9 @ d20", "tg9 sampled @ d20", "tg9 drafted @ d20", "ttft2 @ d20",
    ]  # fmt: skip
    assert " draft tokens accepted" in output
    found = [row for row in json.loads(file.read_text())["rows"] if "drafted" in row["test"]]
    assert len(found) == 2 and all(row["by_none"] > 0 and row["a_step"] >= 1 for row in found)
    if way == "draft":
        assert [(row["accepted"], row["a_step"], row["width"]) for row in found] == [(1.0, 4.0, 3.0)] * 2
        assert output.count("of the speed without drafts, 4.00 tokens and 3.00 drafts a step") == 2


@pytest.mark.parametrize("longest", ["prompt", "max_tokens", "turn"])
def test_a_context_ends_where_the_model_does(longest):
    config = LlamaConfig(max_position_embeddings=4100)
    options = argparse.Namespace(prompt=1, max_tokens=1, turn=1, depth=None)
    vars(options)[longest] = 4
    assert bench._depths(options, config) == [0, 4096]
    options.depth = [4096, 5]
    assert bench._depths(options, config) == [4096, 5]
    vars(options)[longest] = 5
    with pytest.raises(ValueError, match=r"--depth must be at most 4095: .* got 4096"):
        bench._depths(options, config)
    options.depth = None
    assert bench._depths(options, config) == [0]
    vars(options)[longest] = 4101
    with pytest.raises(ValueError, match=r"--turn must be at most the model's 4100 tokens, got 4101"):
        bench._depths(options, config)


@pytest.mark.parametrize(
    ("own", "drawn"), [({}, (0.7, 20)), ({"do_sample": True, "temperature": 0.3, "top_k": 5}, (0.3, 5))]
)
def test_sampled_tokens_are_drawn_as_the_checkpoint_says(own, drawn, monkeypatch):
    """As by chat, generate and serve; with usual settings where it says nothing."""
    model, asked = tiny_models.tiny_model("llama"), []
    model.generation_config.update(**own)

    def noted(inputs, given, *others, **named):
        config, _ = model._prepare_generation_config(given)
        asked.append((config.do_sample, config.temperature, config.top_k))
        return Job(inputs, given, *others, **named)

    monkeypatch.setattr(bench, "Job", noted)
    options = argparse.Namespace(prompt=4, max_tokens=2, turn=2, depth=[0], repeats=1)
    assert [row.test for row in bench.Bench(model, options).rows()] == ["pp4", "tg2", "tg2 sampled"]
    assert [do_sample for do_sample, *_ in asked] == [False] * 4 + [True] * 2
    assert asked[-1][1:] == drawn


def test_the_gpu_is_busy_with_the_tokens_of_a_run(simulated):
    """By its own clock, of which Metal tells late: the run that warms up does not count. The rest is idle."""
    model, seconds, runs = tiny_models.tiny_model("llama").to("mps"), 1e-5, []
    torch_moe_mps.accelerate(model)

    def executed(dispatch) -> float:
        shaderlib.execute(dispatch)
        runs[-1] += 1
        return seconds

    def answered(*given, own=bench._Answered, **how):
        runs.append(0)
        if len(runs) == 1:  # the first one does twice as much
            own(*given, **how)
        return own(*given, **how)

    simulated.set_schedule(2)
    options = argparse.Namespace(prompt=4, max_tokens=3, turn=2, depth=[0], repeats=1)
    with pytest.MonkeyPatch.context() as patch, simulated.clocked(executed):
        patch.setattr(bench, "_Answered", answered)
        row = bench.Bench(model, options)._generated("", 0, do_sample=False)
    first, second = runs
    assert first == 2 * second > 0
    assert row.gpu_busy == pytest.approx(second * seconds / options.max_tokens)
    assert row.gpu_busy + row.gpu_idle == pytest.approx(1 / row.rate)
    assert row.line("model", "size", "mps").split(" | ")[-1].startswith(f"{1e3 * row.gpu_busy:.2f} + ")
