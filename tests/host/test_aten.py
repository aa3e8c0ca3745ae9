"""Operators of torch's own that prompts, steps, caches and training run on mps."""

import json
from types import SimpleNamespace

import aten_table
import pytest
import torch
from simulator import aten
from simulator.errors import BuildError
from support import tiny_models
from support.jobs import Asked
from support.models import eager
from support.pinned import assert_pinned, pinned
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.http.logprobs import Logprobs
from torch_moe_mps.serving.prefix_cache import disk
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

IDS = torch.arange(1, 41)[None]
# What torch calls on mps for an operator that other devices have.
ON_MPS = {
    "aten::convolution": "aten::_mps_convolution",
    "aten::convolution_backward": "aten::mps_convolution_backward",
}
PAUSES = ("waits", "reads", "graph")  # fields of aten.json by which the GPU or the host waits
# {version: operators that give back a scalar, which waits for whoever has the stream's queue}
SCALARS = {
    section.removeprefix("torch "): {*text.partition("\n")[0].removeprefix("scalar pool: ").split(", ")}
    for section, text in pinned("locked").items()
}


def row(name: str) -> str:
    """How an operator pauses, by version: "reads in all" or "graph in 2.13"; empty if it does not."""
    found, name = {}, ON_MPS.get(name, name)
    for version in aten.table():
        known = dict(aten.operators(version))
        assert name in known, f"torch {version} has no kernel for {name}"
        for how in PAUSES:
            if known[name].get(how):
                found.setdefault(how, []).append(version.rpartition(".")[0])
        if aten.row_of(name) in SCALARS.get(version, ()):
            found.setdefault("scalar", []).append(version.rpartition(".")[0])
    everywhere = len(aten.table())
    return ", ".join(
        f"{how} in {'all' if len(versions) == everywhere else ' '.join(versions)}"
        for how, versions in found.items()
    )


class Steps:
    """A streamer that keeps the operators of some steps, and of what comes before."""

    def __init__(self, simulated, each=lambda token: None):
        self.simulated, self.each, self.tokens, self.before, self.steps = simulated, each, 0, [], []

    def put(self, token):
        self.each(token)
        self.tokens += 1
        if self.tokens == 5:
            self.before = self.simulated.called_aten()
        if self.tokens == 8:
            self.steps = self.simulated.called_aten()

    def end(self):
        pass


def on_mps(**options):
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model("qwen3_moe")).to("mps")
    torch_moe_mps.accelerate(model, **options)
    return model


def of_generate(simulated, model, **settings) -> Steps:
    steps = Steps(simulated)
    model.generate(IDS[:, :8].to("mps"), max_new_tokens=10, pad_token_id=0, streamer=steps, **settings)
    return steps


def of_engine(simulated, model, rows: int = 1, logprobs: int = 0, **settings) -> Steps:
    processor = Logprobs(SimpleNamespace(decode=lambda tokens: "a" * len(tokens)), logprobs)
    steps = Steps(simulated, (lambda token: processor.pop(int(token))) if logprobs else lambda token: None)
    speculative = settings.pop("speculative", None)
    simulated.called_aten()
    torch_moe_mps.generate_batch(
        model,
        [IDS[0, : 8 + row].repeat(2) for row in range(rows)],
        GenerationConfig(max_new_tokens=8, eos_token_id=None, pad_token_id=0, **settings),
        progress=False,
        streamer=[steps, *(rows - 1) * [None]],
        logits_processor=[[processor] if logprobs else [], *(rows - 1) * [[]]],
        speculative=speculative,
    )
    return steps


def restored(simulated, folder) -> list[str]:
    """Of an answer behind a prefix from the disk."""
    model = on_mps()
    for _ in range(2):
        prompts = PrefixCache(1 << 30, disk=disk.Disk(folder, 1 << 30))
        asked, engine = Asked(IDS, 2), Engine(model, prompts, 1)
        simulated.called_aten()
        engine.submit(asked.job)
        while engine.has_work:
            engine.step()
            prompts.store()
        prompts.close()
    assert asked.job.usage.disk_tokens
    return simulated.called_aten()


def trained(simulated) -> list[str]:
    model, ids = on_mps().train(), IDS[:, :8].to("mps")
    simulated.called_aten()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    return simulated.called_aten()


SAMPLING = {"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.mark.slow("each way to call a model")
@pytest.mark.pinned
def test_what_torch_runs_beside_our_operators(simulated, monkeypatch, tmp_path):
    """torch has a kernel for each in every version, as its wheels for macOS say. Those that wait for the GPU,
    run MPSGraph, which ends the encoder, or give back a scalar, are pinned; none of a step waits, and none of
    the engine's gives back a scalar."""
    monkeypatch.setenv(_environment.CAPTURE, "1")
    monkeypatch.setattr(disk, "BLOCK", 16)
    model = on_mps(bits=4, group_size=32)
    greedy = of_engine(simulated, model, do_sample=False)
    found = {
        "prompt": greedy.before,
        "step": greedy.steps,
        "step that samples": of_engine(simulated, model, **SAMPLING).steps,
        "step with log probabilities": of_engine(simulated, model, logprobs=2, do_sample=False).steps,
        "step of two answers": of_engine(simulated, model, 2, do_sample=False).steps,
        "step with draft tokens": of_engine(simulated, model, do_sample=False, speculative="lookup").steps,
        "step of generate()": of_generate(simulated, model, do_sample=True, top_k=20).steps,
        "prefix from the disk": restored(simulated, tmp_path),
        "training": trained(simulated),
    }
    for what, names in found.items():
        assert names, what
        rows = {name: row(name) for name in names}
        assert_pinned("aten", what, "".join(f"{name}: {how}\n" for name, how in rows.items() if how))
        assert not ("step" in what and any("waits" in how or "reads" in how for how in rows.values())), what
        assert not ("step" in what and "generate" not in what and "scalar" in "".join(rows.values())), what
    assert found.keys() == pinned("aten").keys()


@pytest.mark.slow("generate and a training step of a model")
@pytest.mark.parametrize("architecture", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_torch_has_a_kernel_for_each(architecture, simulated):
    model, ids = tiny_models.tiny_model(architecture).to("mps"), IDS[:, :8].to("mps")
    torch_moe_mps.accelerate(model)
    simulated.called_aten()
    for settings in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        model.generate(ids, max_new_tokens=3, pad_token_id=0, **settings)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert [*map(row, simulated.called_aten())]


@pytest.mark.sweep  # downloads torch's wheels
@pytest.mark.parametrize("version", aten_table.VERSIONS)
def test_the_table_is_what_the_wheels_say(version):
    """Written by `scripts/macos/aten_table`, for all versions at once."""
    try:
        rows = aten_table.rows_of(version)
    except BuildError as error:
        pytest.skip(f"no wheel to read: {error}")
    assert json.dumps(rows) == json.dumps(aten.table()[version])
    assert aten.table().keys() == {*aten_table.VERSIONS}
