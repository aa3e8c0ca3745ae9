"""Commands with experts on the disk: the answers of the resident model, and what was read."""

import json
import os
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import openai
import peft
import pytest
import torch
from support import gguf_files
from support.disk import files_of
from support.models import tiny
from support.serving import QUANTISED, client_of, said

from torch_moe_mps import commands
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.checkpoints.quantize import sizes
from torch_moe_mps.commands import experts_memory, fit, main
from torch_moe_mps.commands.residency import hits_of
from torch_moe_mps.disk import pool as disk_pool
from torch_moe_mps.disk.file import Layer, written

ON_DISK = ("--experts-memory", "1GB")


def run(*arguments: object) -> int:
    return main([*map(str, arguments)])


@pytest.fixture
def converted(checkpoint, tmp_path, monkeypatch):
    """A checkpoint three of whose experts are in memory, and none of its embeddings."""
    folder = tmp_path / "converted"
    assert run("convert", checkpoint, folder, "--bits", 4, "--group-size", 32) == 0
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)
    monkeypatch.setattr(on_disk, "written", None)  # its own files serve
    monkeypatch.setattr(sizes, "_TABLE", 1e-12)
    return folder


@pytest.mark.slow("converts a model, and loads it twice")
def test_generate(converted, capsys):
    """No file is written; speculative decoding is off unless it is asked for."""
    capsys.readouterr()
    texts = []
    for options in ((), ON_DISK, (*ON_DISK, "--speculative", "lookup")):
        assert (
            run("generate", converted, "-p", "hello", "--max-tokens", 12, "--dtype", "float32", *options) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) > 1


@pytest.mark.slow("a server and its clients")
def test_answers_of_a_server(converted, simulated):
    """Side by side; one that is cancelled and one that the disk ends leave the others; /metrics counts."""
    texts, asked = ["hello", "abcabc", "quick"], {"model": "m", "temperature": 0, "max_tokens": 12}
    with client_of(converted, "--dtype", "float32") as client:
        create = client.chat.completions.create
        expected = [create(messages=said(text), **asked).choices[0].message.content for text in texts]
    with client_of(
        converted, "--dtype", "float32", "--parallel", 3, "--prompt-memory", 0, *ON_DISK
    ) as client:
        create = client.chat.completions.create

        def ask(text: str) -> str:
            return create(messages=said(text), **asked).choices[0].message.content

        def fails(*read):
            raise OSError(5, "Input/output error")

        cancelled = create(messages=said("long"), stream=True, **asked | {"max_tokens": 100})
        next(iter(cancelled))
        cancelled.close()
        with ThreadPoolExecutor(3) as threads:
            assert [*threads.map(ask, texts)] == expected
        with simulated.reads(fails), pytest.raises(openai.InternalServerError, match="Input/output error"):
            ask("other")
        assert [ask(text) for text in texts] == expected
        with urllib.request.urlopen(f"{str(client.base_url).removesuffix('v1/')}metrics") as answer:
            lines = answer.read().decode().splitlines()
        counted = dict(line.split() for line in lines if line.startswith(("moe_mps_exp", "moe_mps_emb")))
    names = [f"experts_{name}" for name in ("hits", "misses", "layers", "read_bytes", "seconds")]
    names += [f"embeddings_{name}" for name in ("hits", "misses", "read_bytes", "seconds")]
    assert float(counted.pop("moe_mps_embeddings_layers_total")) == 0
    assert {*counted} == {f"moe_mps_{name}_total" for name in names}
    assert all(float(value) > 0 for value in counted.values())


@pytest.mark.slow("loads a model")
def test_bench(converted, tmp_path, capsys):
    file = tmp_path / "bench.json"
    sizes = ("--prompt", 6, "--max-tokens", 3, "--turn", 2, "--depth", "0", "--repeats", 1, "--device", "cpu")
    assert run("bench", converted, *sizes, "--json", file, "--dtype", "float32", *ON_DISK) == 0
    written, out = json.loads(file.read_text()), capsys.readouterr().out
    for what in ("experts", "embeddings"):
        counted = written[f"{what}_on_disk"]
        asked = counted["hits"] + counted["misses"]
        assert f"\n{what} on the disk: {counted['hits'] / asked:.1%} of {asked:,} were in memory" in out
        assert 0 < counted["hits"] < asked and counted["bytes_read"] > 0


@pytest.mark.parametrize(
    ("resident", "expected"), [(0.31, 0.84), (0.30, 0.85), (0.51, 0.93), (1.0, 1.0), (0, 0)]
)
def test_hits(resident, expected):
    """As others measured them with other models, too: between the figures of one."""
    assert hits_of(resident) == pytest.approx(expected, abs=0.03)


@pytest.mark.slow("makes a model of 94 layers, without weights")
def test_fit(tmp_path, capsys):
    """Qwen3-235B-A22B on 64 GB: 1.28 GB a token in others' count, 4.4 tokens/s with the M4 Max's memory.

    Slots have half of the 44 GB that are left for experts, and the page cache the others.
    """
    config = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16",
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
        "vocab_size": 151936,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("fit", tmp_path, "--json", tmp_path / "fit.json") == 0
    rows = json.loads((tmp_path / "fit.json").read_text())["on_disk"]
    own = next(row for row in rows if row["mac"] == "64 GB")
    assert own["weights"] == "4 bit" and own["memory"] == pytest.approx(22e9, rel=0.02)
    assert own["resident"] == pytest.approx((22 - 2 * 1.36) / 128, abs=0.005)
    assert own["read"] == pytest.approx(1.28e9, rel=0.1)
    seconds = own["read"] / 7e9 + 94 * 0.15e-3
    assert own["bound"] == pytest.approx(1 / seconds)
    assert "22GB" in capsys.readouterr().out
    assert not any(row["mac"] == "512 GB" for row in rows)


def test_fit_of_a_gguf_file(tmp_path, capsys, monkeypatch):
    """Where it does not fit by a byte, what is read is the file itself."""
    monkeypatch.setattr(gguf_files, "LAYERS", 6)
    path = gguf_files.write_file(tmp_path / "model.gguf", "qwen3moe", ("q4_k", "q4_k", "q4_k"))
    monkeypatch.setattr(sizes, "_BESIDE", 0)
    assert run("fit", path, "--json", tmp_path / "fit.json") == 0
    assert "the GGUF file itself" not in capsys.readouterr().out
    found = json.loads((tmp_path / "fit.json").read_text())
    stored = next(size["bytes"] for size in found["sizes"] if size["name"] == "as it is")
    limit = found["prompt"]["bytes"] + stored - 1
    monkeypatch.setattr(fit, "_limits", lambda mac: [("small", limit)])
    assert run("fit", path) == 0
    assert "experts are read from the GGUF file itself, and no other file" in capsys.readouterr().out


def test_a_pipeline_is_refused(refused, monkeypatch):
    """Before torch is imported, and any process waits for another one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "--experts-memory is for one process, got a pipeline of several" in refused("bench", "m", *ON_DISK)


def of_another_checkpoint(file: Path) -> None:
    with written(file, "other", [Layer("0", 1, {"codes": ("int32", (1,))})]) as new:
        new.add(0, {"codes": torch.zeros(1, 1, dtype=torch.int32)})


def adapter(folder: Path) -> tuple[str, str]:
    """The option of an adapter of experts."""
    config = peft.LoraConfig(target_modules=[], target_parameters=["experts.down_proj"])
    peft.get_peft_model(tiny("qwen3_moe"), config).save_pretrained(folder)
    return "--adapter", str(folder)


@pytest.mark.slow("runs a command five times")
def test_what_is_refused(checkpoint, tmp_path, monkeypatch, capsys):
    """In one line; the folder has what it had."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")

    def is_refused(says: str, *options: str) -> None:
        before = {*os.listdir(folder)}
        assert run("generate", folder, "-p", "hello", *QUANTISED, *ON_DISK, *options) != 0
        assert says in capsys.readouterr().err.splitlines()[-1] and {*os.listdir(folder)} == before

    is_refused("experts_memory must be at least 0.000266 GB, for a token's 2", "--experts-memory", "5KB")
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)
    with files_of(60_000):
        is_refused(f"{on_disk.NAME} cannot be written: File too large")
    for make, says in (
        (of_another_checkpoint, "has the experts of another checkpoint or format: remove it"),
        (lambda file: file.write_bytes(b"moe_mps"), "is damaged or not a file of experts: remove it"),
    ):
        make(folder / on_disk.NAME)
        is_refused(f"{on_disk.NAME} {says}")
        (folder / on_disk.NAME).unlink()
    is_refused(
        "--adapter must be without LoRA on experts beside --experts-memory, got one of model.layers.0.mlp.ex",
        *adapter(tmp_path / "adapter"),
    )


def test_an_option_turns_keep_warm_off(monkeypatch):
    """For this command: a later one in the same process has the variable as it was."""
    seen = []
    monkeypatch.delenv("MOE_MPS_KEEP_WARM", raising=False)
    monkeypatch.setattr(commands, "check_options", lambda options: None)
    monkeypatch.setattr(commands, "_run", lambda _: seen.append(os.environ.get("MOE_MPS_KEEP_WARM")) or 0)
    for options in ((), ("--no-keep-warm",), ()):
        assert main(["bench", "model", *ON_DISK, *options]) == 0
    assert seen == [None, "0", None]


@pytest.mark.slow("converts a model, and loads it three times")
def test_sizes_of_the_experts_memory(tmp_path, capsys):
    """Each has its tokens/s and hits, which grow with it; where all weights fit, the last one is of all."""
    folder, file = tmp_path / "converted", tmp_path / "sizes.json"
    tiny("qwen3_moe", num_hidden_layers=10).save_pretrained(tmp_path / "model")
    assert run("convert", tmp_path / "model", folder, "--bits", 4, "--group-size", 32) == 0
    few = ("--device", "cpu", "--dtype", "float32", "--prompt", "6", "--max-tokens", "4", "--turn", "2")
    assert experts_memory.compare(str(folder), str(file), *few) == 0
    rows = json.loads(file.read_text())["sizes"]
    sizes, hits = ([row[name] for row in rows] for name in ("experts_memory", "hits"))
    experts = sizes[-1]
    assert experts // 3 <= sizes[0] < sizes[1] == 2 * experts // 3
    assert 0 < hits[0] <= hits[1] < hits[2] == 1
    assert all(row["tokens_per_second"] > 0 and row["bench"]["rows"] for row in rows)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][-3:]
    assert [line.split(" | ")[1::2] for line in table] == [["yes", f"{hit:.1%} |"] for hit in hits]


@pytest.mark.own_gpu
@pytest.mark.slow("loads a model twice, on the simulated GPU")
def test_a_gpu_is_measured_with_and_without_keep_warm(tmp_path, simulated, monkeypatch, capsys):
    """While the second row was measured, the GPU got no small kernels."""
    monkeypatch.delenv("MOE_MPS_KEEP_WARM")
    monkeypatch.setattr(disk_pool, "BEAT", (1e-3, 1))
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 2)
    size, beats, measure = 10**6, [], experts_memory.main
    monkeypatch.setattr(experts_memory, "memories_to_compare", lambda *_: [size])

    def counted(arguments):
        before = torch.ops.moe_mps._beats()[0]
        code = measure(arguments)
        beats.append(torch.ops.moe_mps._beats()[0] - before)
        return code

    monkeypatch.setattr(experts_memory, "main", counted)
    folder, file = tmp_path / "converted", tmp_path / "sizes.json"
    tiny("qwen3_moe", dtype=torch.float16, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    assert run("convert", tmp_path / "model", folder, "--bits", 4, "--group-size", 32) == 0
    few = ("--device", "mps", "--dtype", "float16", "--prompt", "3", "--max-tokens", "3", "--turn", "2")
    try:
        assert experts_memory.compare(str(folder), str(file), *few, "--repeats", "1") == 0
    finally:
        torch.ops.moe_mps._keep_warm(0.0, 1)
    rows = json.loads(file.read_text())["sizes"]
    assert [(row["experts_memory"], row["keep_warm"]) for row in rows] == [(size, True), (size, False)]
    assert beats[0] > 0 == beats[1] and all(row["tokens_per_second"] > 0 for row in rows)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][-2:]
    assert [line.split(" | ")[1] for line in table] == ["yes", "no"]


@pytest.mark.parametrize(("room", "expected"), [(90, [22, 45, 67]), (46, [20, 32, 46]), (8, [8]), (7, [])])
def test_which_sizes_are_compared(room, expected, monkeypatch, tmp_path):
    """Half, once and one and a half times what auto chooses, as far as they fit and a token's experts do."""
    experts = 400 if room == 90 else 60
    weights = SimpleNamespace(room=room, experts=experts, least=8 if room < 10 else 20, layers=[])
    (tmp_path / on_disk.NAME).touch()
    monkeypatch.setattr(on_disk, "placed", lambda *_: tiny("qwen3_moe"))
    monkeypatch.setattr(on_disk, "_weights_of", lambda *_: weights)
    source = SimpleNamespace(gguf=None, folder=str(tmp_path), others={})
    assert on_disk.memories_to_compare(source, None) == expected
