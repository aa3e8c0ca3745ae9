"""Prompts in a folder: written while others are answered, and read back behind a restart."""

import errno
import os
import threading
import time

import pytest
import torch
from support import jobs, tiny_models
from support.jobs import MEMORY, answer, octets_of
from support.models import eager
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.models.caches.parts import JoinedCache
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.loop import EngineThread
from torch_moe_mps.serving.prefix_cache import disk as disk_module
from torch_moe_mps.serving.prefix_cache.disk import Disk
from torch_moe_mps.serving.prefix_cache.files import Files, WriterThread
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

pytestmark = pytest.mark.own_gpu
LONG = torch.randint(2, 90, (1, 70), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(disk_module, "BLOCK", 16)


def model_of(architecture: str, kv_bits: int = 16, device: str = "cpu", **config):
    model = eager(tiny_models.tiny_model(architecture, **config)).to(device)
    torch_moe_mps.accelerate(model, kv_bits=kv_bits)
    return model


class Asked(jobs.Asked):
    def __init__(self, ids: torch.Tensor, new: int = 6):
        super().__init__(ids, new)
        self.ids = ids


def turn(asked: Asked, *more: int) -> torch.Tensor:
    return torch.cat((asked.ids, torch.tensor([asked.tokens]), torch.tensor([more])), 1)


@pytest.mark.parametrize(
    "architecture, how",
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"kv_bits": 8, "head_dim": 32}),
        pytest.param("qwen3_next", {}, marks=pytest.mark.slow("recurrent states")),
        pytest.param("deepseek_v4", {}, marks=pytest.mark.sweep),
        pytest.param("glm5_next", {}, marks=pytest.mark.sweep),
        pytest.param("qwen4_exp", {}, marks=pytest.mark.sweep),
        pytest.param("minimax_m3_vl", {}, marks=pytest.mark.sweep),
        pytest.param("minimax", {}, marks=pytest.mark.sweep),
        pytest.param("step3p7", {}, marks=pytest.mark.slow("sliding windows of other heads")),
        pytest.param("llama4", {}, marks=pytest.mark.sweep),
        pytest.param("longcat_flash", {}, marks=pytest.mark.sweep),
    ],
)
def test_a_turn_behind_a_restart(architecture, how, tmp_path):
    """It goes on where the first ended, with the tokens of a model that computes all of it."""
    model = model_of(architecture, **how)
    first = Asked(LONG)
    answer(model, Disk(tmp_path, MEMORY), first)
    disk = Disk(tmp_path, MEMORY)
    second = Asked(turn(first, 5, 8, 9))
    prompts = answer(model, disk, second)
    assert second.tokens == second.expected(model)
    usage = second.job.usage
    assert usage.disk_tokens == usage.cached_tokens == 75  # all but the last one of the answer
    assert (disk.hits, disk.tokens) == (1, 75)
    (kept,) = prompts.kept
    eight = [isinstance(layer.keys, QuantizedStates) for layer in kept.cache.layers if hasattr(layer, "keys")]
    assert "kv_bits" not in how or eight == [True, True]


@pytest.mark.parametrize("kv_bits", in_sweep([16, 8], [16]))
def test_a_turn_behind_a_restart_on_a_mac(kv_bits, simulated, tmp_path):
    """Keys of a cache that grows have other strides than their copy, which the GPU makes later."""
    simulated.set_schedule(0)
    model = model_of("qwen3_moe", kv_bits, "mps", num_hidden_layers=1, head_dim=32)
    first = Asked(LONG[:, :36], 2)
    answer(model, Disk(tmp_path, MEMORY), first)
    second = Asked(turn(first, 5, 7), 3)
    answer(model, Disk(tmp_path, MEMORY), second)
    assert second.job.usage.disk_tokens == 37
    assert second.tokens == second.expected(model)


@pytest.mark.slow("three turns of a model with an indexer")
def test_pools_of_an_indexer_are_derived_again(tmp_path):
    """Blocks of a turn within the indexer's budget have none, those of the next turn would have the last."""
    model, ids = model_of("qwen4_exp", indexer_budget=40), LONG[:, :34]
    for behind in (LONG[:, 34:64], LONG[:, :9], LONG[:, 9:14]):
        asked = Asked(ids)
        answer(model, Disk(tmp_path, MEMORY), asked)
        assert asked.tokens == asked.expected(model)
        ids = turn(asked, *behind[0].tolist())
    assert asked.job.usage.disk_tokens == 75


@pytest.mark.parametrize("tokens", [70, 64])
def test_a_request_that_is_asked_again(tokens, tmp_path):
    """As behind a kill: all but the last token comes from the disk, at the end of a block and elsewhere."""
    model, first, again = model_of("qwen3_moe"), Asked(LONG[:, :tokens], 1), Asked(LONG[:, :tokens], 1)
    answer(model, Disk(tmp_path, MEMORY), first)
    answer(model, Disk(tmp_path, MEMORY), again)
    assert again.job.usage.disk_tokens == again.job.usage.cached_tokens == tokens - 1
    assert again.tokens == first.tokens == first.expected(model)


def test_a_common_beginning_is_there_once(tmp_path):
    """Its blocks have one file; a prompt that shares them computes what is new in it."""
    model, disk = model_of("qwen3_moe"), Disk(tmp_path, MEMORY)
    first, other = Asked(LONG), Asked(torch.cat((LONG[:, :50], LONG[:, :9]), 1))
    answer(model, disk, first, other)
    names = [path.name for path in tmp_path.glob("*/*.block")]
    assert len(names) == 5  # 4 of 70 tokens and those behind, 3 of 59, of which 3 are the same
    assert all(path.stat().st_mode & 0o77 == 0 for path in tmp_path.rglob("*"))
    third = Asked(torch.cat((LONG[:, :40], LONG[:, 3:8]), 1))
    answer(model, disk := Disk(tmp_path, MEMORY), third)
    assert third.job.usage.disk_tokens == 32 and third.tokens == third.expected(model)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(1.5)  # another model
    fourth = Asked(LONG)
    answer(model, Disk(tmp_path, MEMORY), fourth)
    assert fourth.job.usage.disk_tokens == 0 and fourth.tokens == fourth.expected(model)


@pytest.mark.slow("an answer for each damaged file")
@pytest.mark.parametrize("architecture", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.sweep)])
def test_torn_files_are_none(architecture, tmp_path, caplog):
    """A file that ends early, has another byte, or has no name yet: all answers are right."""
    model, first = model_of(architecture), Asked(LONG)
    answer(model, Disk(tmp_path, MEMORY), first)
    files = sorted(tmp_path.glob("*/*"), key=lambda path: path.stat().st_size)
    for number, path in enumerate(files):
        whole = path.read_bytes()
        damaged = whole[: len(whole) // 2] if number % 2 else whole[:-1] + bytes([whole[-1] ^ 1])
        path.write_bytes(damaged)
        (path.parent / "half.new").write_bytes(whole[:100])
        second = Asked(turn(first, 5))
        answer(model, Disk(tmp_path, MEMORY), second)
        assert second.tokens == second.expected(model)
    assert "is left out" in caplog.text and not [*tmp_path.glob("*/*.new")]


@pytest.mark.slow("answers of two models, twice")
@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3_moe",
        pytest.param("gpt_oss", marks=pytest.mark.sweep),
        pytest.param("qwen3_next", marks=pytest.mark.sweep),
        pytest.param("deepseek_v4", marks=pytest.mark.sweep),
    ],
)
def test_files_under_other_names_are_not_used(architecture, tmp_path, caplog):
    """Each file of a folder gets the content of another one: of its prompt, of another, of another model."""
    model, asked = model_of(architecture), [LONG, LONG.flip(1)]
    for scale in (1.0, 1.5):  # two models
        with torch.no_grad():
            model.get_decoder().layers[0].input_layernorm.weight.mul_(scale)
        for ids in asked:
            answer(model, Disk(tmp_path, MEMORY), Asked(ids))
    files = sorted(tmp_path.glob("*/*"))
    content = [path.read_bytes() for path in files]
    for by in {1, len(files) // 2}:
        for number, path in enumerate(files):
            path.write_bytes(content[number - by])
        again = [Asked(ids) for ids in asked]
        answer(model, Disk(tmp_path, MEMORY), *again)
        assert [each.tokens for each in again] == [each.expected(model) for each in again]
        assert [each.job.usage.disk_tokens for each in again] == [0, 0]
    assert "its header must be" in caplog.text


def test_other_files_in_the_folder_are_skipped(tmp_path):
    """Copies that a file manager made, links to nothing, and folders: the model's own files are read."""
    model, first = model_of("qwen3_moe"), Asked(LONG)
    answer(model, Disk(tmp_path, MEMORY), first)
    (state,) = tmp_path.glob("*/*.state")
    (state.parent / f"{state.stem} copy.state").write_bytes(state.read_bytes())
    (state.parent / f"{'a' * 32}.block").symlink_to(tmp_path / "nothing")
    (state.parent / f"{'b' * 32}.block").mkdir()
    again = Asked(turn(first, 5))
    answer(model, Disk(tmp_path, MEMORY), again)
    assert again.job.usage.disk_tokens == 75 and again.tokens == again.expected(model)


@pytest.mark.slow("an answer for some tensors of each file")
@pytest.mark.parametrize("architecture", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.sweep)])
def test_memory_that_runs_out_between_two_layers(architecture, tmp_path, monkeypatch):
    """What was read whole before is used, and no file is taken for damaged."""
    model, first = model_of(architecture), Asked(LONG)
    answer(model, Disk(tmp_path, MEMORY), first)
    own, files, calls = JoinedCache._longer, {*tmp_path.glob("*/*")}, []

    def short(*given):
        calls.append(None)
        if len(calls) in failing:
            raise RuntimeError("MPS backend out of memory")
        return own(*given)

    monkeypatch.setattr(JoinedCache, "_longer", short)
    ids, failing = turn(first, 5), []
    expected = Asked(ids).expected(model)
    answer(model, Disk(tmp_path, MEMORY), Asked(ids, 1))
    for number in range(3, len(calls) + 1, 4):
        calls.clear()
        failing[:] = [number]
        again = Asked(ids)
        answer(model, Disk(tmp_path, MEMORY), again)
        assert again.tokens == expected and files <= {*tmp_path.glob("*/*")}
        assert again.job.usage.disk_tokens < 75


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_in_the_middle_of_a_write(tmp_path, monkeypatch):
    """As behind a kill: what was whole is read; what was not is computed."""
    model, first, disk, written = model_of("qwen3_moe"), Asked(LONG), Disk(tmp_path, MEMORY), []
    own = disk_module.Path.replace

    def replace(self, target):
        written.append(target)
        if len(written) == 4:  # in front of the fourth file's name
            raise SystemExit  # of the thread
        return own(self, target)

    monkeypatch.setattr(disk_module.Path, "replace", replace)
    batch = Engine(model, prompts := PrefixCache(MEMORY, disk=disk), 1)
    batch.submit(first.job)
    while batch.has_work or len(written) < 4:
        batch.step()
        prompts.store()
    os.close(disk.files._held)  # as the system does
    assert len([*tmp_path.glob("*/*.new")]) == 1
    second = Asked(turn(first, 5))
    answer(model, Disk(tmp_path, MEMORY), second)
    assert second.job.usage.disk_tokens == 48 and second.tokens == second.expected(model)


def test_a_slow_disk_delays_no_step(tmp_path, monkeypatch):
    """Answers end while the writer is in its first file; all is written once it goes on."""
    model, goes_on, calls = model_of("qwen3_moe"), threading.Event(), []
    own = WriterThread._write

    def slow(self, *given):
        calls.append(len(calls))
        assert goes_on.wait(60)
        own(self, *given)

    monkeypatch.setattr(WriterThread, "_write", slow)
    engine = EngineThread(model, PrefixCache(MEMORY, disk=Disk(tmp_path, MEMORY)), 4)
    asked = [Asked(LONG[:, n:], 20) for n in range(4)]
    for each in asked:
        engine.submit(each.job)
    for each in asked:
        assert each.done.wait(60)
    assert len(calls) == 1 and not [*tmp_path.glob("*/*")]
    goes_on.set()
    engine.close()
    again = Asked(turn(asked[0], 4))
    answer(model, Disk(tmp_path, MEMORY), again)
    assert again.job.usage.disk_tokens == 89 and again.tokens == again.expected(model)


@pytest.mark.slow("nine answers")
def test_what_waits_for_a_slow_disk_is_within_the_memory(tmp_path, monkeypatch):
    """Prompts that no memory is left for are given up, written or not; the last ones are written."""
    model, goes_on, own = model_of("qwen3_moe"), threading.Event(), WriterThread._write

    def slow(self, *given):
        assert goes_on.wait(60)
        own(self, *given)

    monkeypatch.setattr(WriterThread, "_write", slow)
    octets = octets_of(answer(model, None, Asked(LONG)).kept[0])
    disk = Disk(tmp_path, MEMORY)
    prompts = PrefixCache(int(2.5 * octets), disk=disk)
    batch, asked = Engine(model, prompts, 1), [Asked(LONG.roll(n)) for n in range(9)]
    for each in asked:
        batch.submit(each.job)
        while batch.has_work:
            batch.step()
            prompts.store()
        held = {id(layer.keys): layer.keys for kept in prompts.kept for layer in kept.cache.layers}
        held |= {id(layer.keys): layer.keys for wait in disk._pending for layer in wait.state.cache.layers}
        storages = {
            keys.untyped_storage().data_ptr(): keys.untyped_storage().nbytes() for keys in held.values()
        }
        assert sum(storages.values()) * 2 <= prompts.memory
    goes_on.set()
    prompts.close()
    again = Asked(turn(asked[-1], 4))
    answer(model, Disk(tmp_path, MEMORY), again)
    assert again.job.usage.disk_tokens == 75 and again.tokens == again.expected(model)


def test_the_folder_is_bounded(tmp_path):
    """The prompt that was used longest ago goes, its end before its beginning."""
    model = model_of("qwen3_moe")
    disk = Disk(tmp_path, MEMORY)
    first, second = Asked(LONG), Asked(LONG.flip(1))
    answer(model, disk, first)
    most = int(disk.files.nbytes * 1.6)
    for asked in (second, Asked(turn(first, 5)), Asked(LONG.roll(9))):
        disk = Disk(tmp_path, most)
        answer(model, disk, asked)
        files = [path.stat().st_size for path in tmp_path.glob("*/*")]
        assert sum(files) == disk.files.nbytes <= most
    again = Asked(turn(first, 5))
    answer(model, Disk(tmp_path, most), again)
    assert 0 < again.job.usage.disk_tokens < 70 and again.tokens == again.expected(model)


def test_no_more_than_a_days_bytes_are_written(tmp_path, monkeypatch, caplog):
    """However often prefixes make room for others, and over restarts; the next day goes on."""
    day, lines = 86400 * 20_000, []
    for now, name, is_written in (
        (day, "a", True),
        (day + 1, "b", True),  # in the place of the first
        (day + 86399, "c", False),
        (day + 86400, "d", True),
    ):
        monkeypatch.setattr(time, "time", lambda now=now: float(now))
        files, name = Files(tmp_path, 1500, 2500), f"{32 * '0'}/{32 * name}.block"
        for _ in range(1 if is_written else 3):
            files.write(name, bytes(1000))
        assert (tmp_path / name).exists() == (name in files) == is_written
        files.close()
        lines.append(caplog.messages[:])
        caplog.clear()
    allows = (
        f"no prefixes are written to {tmp_path} until tomorrow (UTC): --prompt-writes allows 2.5e-06 GB a day"
    )
    assert lines == [[], [], [allows], []]


def test_a_full_disk_fails_no_answer(tmp_path, monkeypatch, capsys):
    """Nothing of ours is on it, so nothing can make room."""
    model = model_of("qwen3_moe")

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = Disk(tmp_path, MEMORY)
    monkeypatch.setattr(Files, "_write_file", full)
    asked = Asked(LONG)
    answer(model, disk, asked)
    assert asked.tokens == asked.expected(model)
    why = "[Errno 28] No space left on device"
    line = f"torch-moe-mps: no prefixes are cached in {tmp_path} any more: {why}\n"
    assert capsys.readouterr().err == line and not [*tmp_path.glob("*/*")]


def test_a_disk_that_gets_full_keeps_the_last_prompts(tmp_path, monkeypatch, caplog, capsys):
    """Old ones make room, as if the folder had been that small; what is in the way is no longer written."""
    model, disk, own = model_of("qwen3_moe"), Disk(tmp_path, MEMORY), Files._write_file
    first, second = Asked(LONG), Asked(LONG.flip(1))
    answer(model, disk, first)
    room = int(disk.files.nbytes * 1.3)

    def write(self, path, octets):
        if sum(file.stat().st_size for file in tmp_path.glob("*/*")) + len(octets) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        own(self, path, octets)

    monkeypatch.setattr(Files, "_write_file", write)
    answer(model, disk := Disk(tmp_path, MEMORY), second)
    files = [path.stat().st_size for path in tmp_path.glob("*/*")]
    assert sum(files) == disk.files.nbytes <= disk.files.max_bytes <= room
    again = Asked(turn(second, 5))
    answer(model, Disk(tmp_path, MEMORY), again)
    assert again.job.usage.disk_tokens == 75 and again.tokens == again.expected(model)
    assert "the disk is full" in caplog.text and capsys.readouterr().err == ""


def test_a_full_disk_has_no_room_for_the_days_count_either(tmp_path, monkeypatch):
    """As files of ours, it makes room; the bytes of a file are counted once."""
    files, own = Files(tmp_path, 1000, max_written=10_000), os.pwrite
    names = [f"{number:032x}/{number:032x}.block" for number in range(3)]

    def full(descriptor, data, place):
        if len([*tmp_path.glob("*/*")]) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return own(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    for name in names:
        files.write(name, b"a" * 100)
    assert files.names() == {*names[1:]} and (tmp_path / names[2]).read_bytes() == b"a" * 100
    (marker,) = (path for path in tmp_path.iterdir() if path.is_file())
    assert marker.read_text().split()[1] == "300"
    files.close()


def test_folders_that_are_refused(tmp_path):
    """Of somebody else, of another server, and one that is none."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="notes has other files in it"):
        Disk(tmp_path / "notes", 1)
    disk = Disk(tmp_path / "own", 1)
    with pytest.raises(OSError, match="own cannot be used: another process uses it"):
        Disk(tmp_path / "own", 1)
    disk.close()
    with pytest.raises(OSError, match=r"a\.txt cannot be used: File exists"):
        Disk(tmp_path / "notes" / "a.txt", 1)
