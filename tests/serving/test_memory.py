"""One budget of memory, and a system that runs short of it."""

import json
import threading
import urllib.error
import urllib.request

import openai
import pytest
import torch
from support import scripted, serving, tiny_models
from support.jobs import ids_of, octets_of
from support.models import eager
from support.serving import said
from transformers import DynamicCache, GenerationConfig

import torch_moe_mps
from torch_moe_mps.checkpoints.quantize.sizes import prompt_bytes
from torch_moe_mps.macs import machine_memory
from torch_moe_mps.models.caches import prefix_state
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.engine.loop import EngineThread
from torch_moe_mps.serving.engine.memory import Level, Memory, memory_in_use
from torch_moe_mps.serving.prefix_cache import disk as disk_module
from torch_moe_mps.serving.prefix_cache import memory as prompts_module
from torch_moe_mps.serving.prefix_cache.disk import Disk
from torch_moe_mps.serving.prefix_cache.memory import CachedPrefix, PrefixCache

IDS = torch.randint(2, 90, (1, 30), generator=torch.Generator().manual_seed(0))


class Pressure:
    """A system whose level a test sets."""

    def __init__(self):
        self.level = Level.NORMAL

    def __call__(self) -> Level:
        return self.level


@pytest.fixture(autouse=True)
def asks_at_once(monkeypatch):
    monkeypatch.setattr("torch_moe_mps.serving.engine.memory._EVERY", 0.0)
    monkeypatch.setattr(disk_module, "BLOCK", 16)
    monkeypatch.setattr(prompts_module, "_BETWEEN_LOOKS", 0.01)


def small():
    model = eager(tiny_models.tiny_model("llama"))
    torch_moe_mps.accelerate(model)
    return model


def test_freed_memory_is_no_weight(simulated):
    """The heaps of freed tensors are given out again."""
    with simulated.torch_memory():
        layer = torch.nn.Linear(8, 8).to("mps")
        before, heaps = memory_in_use(layer), torch.mps.driver_allocated_memory()
        torch.empty(50 << 20, dtype=torch.uint8, device="mps")
        assert torch.mps.driver_allocated_memory() - heaps >= 50 << 20
        assert memory_in_use(layer) == before


def test_the_budget():
    """Three quarters of the machine, less the weights and what a piece of a prompt takes."""
    model = small()
    memory = Memory(model)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert memory.weights == weights and memory.step == prompt_bytes(model, 2048) > 0
    assert (
        memory.total == int(machine_memory() * 0.75) and memory.free == memory.total - weights - memory.step
    )
    assert memory.level is Level.NORMAL


def answered(generator, ids: torch.Tensor, new: int = 6) -> list[int]:
    tokens, ended = [], threading.Event()
    config = GenerationConfig(max_new_tokens=new, eos_token_id=None, pad_token_id=0, do_sample=False)
    job = Job({"input_ids": ids}, config, tokens.append, lambda reason: ended.set())
    generator.submit(job)
    assert ended.wait(60)
    return tokens


def wait_for(condition) -> None:
    wait = threading.Event()
    for _ in range(2000):
        if condition():
            return
        wait.wait(0.005)
    raise AssertionError


class Watched(PrefixCache):
    """Prompts that note the bytes of all whenever one is added."""

    def __init__(self, memory: int):
        self.seen = list[int]()
        super().__init__(memory)

    @property
    def kept(self) -> list[CachedPrefix]:
        return self._kept

    @kept.setter
    def kept(self, values: list[CachedPrefix]) -> None:
        seen = self.seen

        class Noting(list):
            def append(self, kept: CachedPrefix) -> None:
                super().append(kept)
                seen.append(sum(octets_of(each) for each in self))

        self._kept = Noting(values)


def test_kept_prompts_take_no_more_than_their_memory_at_any_time():
    """Room is made for a prompt before it is kept."""
    model, memory = small(), 1 << 30
    for count in (5, 2):
        prompts = Watched(memory)
        engine = EngineThread(model, prompts, 1)
        for number in range(5):
            answered(engine, ids_of(number, 30))
        engine.close()
        assert len(prompts.seen) >= 5 and max(prompts.seen) <= memory and len(prompts.kept) == count
        memory = 2 * max(octets_of(each) for each in prompts.kept)


def test_a_prompt_is_given_up_where_a_copy_of_its_beginning_has_no_room():
    """Who adds to a part of it copies that part."""
    model, prompts = small(), PrefixCache(1 << 30)
    engine = EngineThread(model, prompts, 1)
    answered(engine, ids_of(1, 30))
    engine.close()
    (kept,) = prompts.kept
    other = torch.cat((ids_of(1, 30)[0, :20], ids_of(2, 10)[0]))
    for memory, left in ((2 * octets_of(kept), [kept]), (2 * octets_of(kept) - 1, [])):
        prompts.memory = memory
        assert torch.equal(prompts.take(other, DynamicCache()).ids, other[:20]) and prompts.kept == left


def test_the_activations_of_a_prompt():
    """Inputs and outputs of the matrices of a layer; each expert of a token has some of its own."""
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    torch_moe_mps.accelerate(model)
    config, attention = model.config, model.model.layers[0].self_attn
    hidden, inner, k = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    queries, keys = len(attention.q_proj.weight), len(attention.k_proj.weight)
    of_attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    of_expert = (hidden + 2 * inner) + (inner + hidden)
    assert k > 1 and prompt_bytes(model, 7) == 7 * 4 * (of_attention + k * of_expert)


def test_a_prompt_that_is_kept_looks_at_no_other_ones_tensors(tmp_path, monkeypatch):
    """Whoever asks for many short answers would hold the others up; the oldest prompts go."""
    monkeypatch.setattr(prompts_module, "_MOST", 9)
    counts, made = list[int](), list[CachedPrefix]()
    counting = _counting(counts, prefix_state.storages_of)
    monkeypatch.setattr(prefix_state, "storages_of", counting)
    prompts = PrefixCache(1 << 30, disk=Disk(tmp_path, 1 << 30))
    prompts.read(small())
    for number in range(30):
        made.append(CachedPrefix(torch.tensor([number, 5]), DynamicCache()))
        made[-1].cache.update(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), 0)
        del counts[:]
        prompts.put(made[-1])
        assert counts == [2, 2]  # keys and values, in memory and for the disk
        assert prompts.kept == made[-9:] and prompts.nbytes == sum(map(octets_of, prompts.kept))
    prompts.shrink(3 * octets_of(made[0]))
    assert prompts.kept == made[-3:]
    prompts.close()


def _counting(counts: list[int], own):
    def counted(tensors):
        counts.append(len(tensors := [*tensors]))
        return own(tensors)

    return counted


@pytest.mark.parametrize("has_disk", [True, False])
def test_kept_prompts_go_where_the_system_is_short(has_disk, tmp_path):
    """To the disk where there is one, though nobody asks; an answer comes from there."""
    model, pressure = small(), Pressure()
    prompts = PrefixCache(1 << 30, disk=Disk(tmp_path, 1 << 30) if has_disk else None)
    generator = EngineThread(model, prompts, 4, Memory(model, pressure))
    expected = answered(generator, IDS)
    assert len(prompts.kept) == 1
    pressure.level = Level.WARN
    wait_for(lambda: not prompts.kept)
    pressure.level = Level.NORMAL
    wait_for(lambda: bool([*tmp_path.glob("*/*-35.state")]) == has_disk)
    assert answered(generator, IDS) == expected
    turn = torch.cat((IDS, torch.tensor([expected]), IDS), 1)
    pressure.level = Level.WARN
    wait_for(lambda: not prompts.kept)
    answered(generator, turn)
    assert (0 if prompts.disk is None else prompts.disk.hits) == 2 * has_disk
    generator.close()


def test_new_answers_wait_where_it_is_out_of_memory():
    """503 with Retry-After in both protocols; an answer that runs goes on."""
    with scripted.server() as here:
        pressure, begun, goes_on = Pressure(), threading.Event(), threading.Event()
        memory = Memory.__new__(Memory)
        memory.total = memory.weights = memory.step = 0
        memory._pressure, memory._asked, memory._level = pressure, -1.0, Level.NORMAL
        generator = here.says("ok")
        generator.memory = memory

        def wait(job):
            begun.set()
            assert goes_on.wait(20)

        generator.wait = wait
        got = []
        runs = threading.Thread(target=lambda: got.append(post(here, "/v1/chat/completions")))
        runs.start()
        assert begun.wait(20)
        pressure.level = Level.CRITICAL
        for path in ("/v1/chat/completions", "/v1/messages"):
            status, headers, body = post(here, path)
            assert status == 503 and headers["retry-after"] == "10"
            assert "This machine is out of memory; ask again after 10 s." in body
        with urllib.request.urlopen(f"{here.url}/metrics") as answer:
            assert "moe_mps_memory_level 2" in answer.read().decode()
        goes_on.set()
        runs.join()
        pressure.level = Level.WARN
        assert got[0][0] == 200 and post(here, "/v1/chat/completions")[0] == 200


def test_a_context_is_no_longer_than_memory(monkeypatch, tmp_path, capsys):
    """Of the 256 tokens that the model reads; the line that refuses more is one that agents know."""
    checkpoint = serving.printable_checkpoint(tmp_path / "model")
    model = serving.quantised(checkpoint)
    token = model.config.num_hidden_layers * 2 * model.config.num_key_value_heads * 32 * 4  # bytes
    memory = Memory(model)
    room = memory.weights + memory.step + (256 + 150) * token  # a cache has room for more
    monkeypatch.setattr("torch_moe_mps.macs._OF_THE_MACHINE", room / machine_memory())
    with serving.client_of(checkpoint, *serving.QUANTISED) as client:
        (entry,) = client.models.list().data
        most = entry.context_length
        assert 16 <= most <= 150
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {most} tokens") as error:
            client.chat.completions.create(model="m", messages=said("a" * most))
        assert error.value.code == "context_length_exceeded"
        asked = {"model": "m", "messages": said("a" * (most - 3)), "temperature": 0}
        assert client.chat.completions.create(**asked).usage.total_tokens <= most
    assert f"at most {most} tokens, of 256 that the model reads" in capsys.readouterr().err


def test_an_answer_without_memory_is_refused(monkeypatch):
    """503 with Retry-After; streamed, its last event says so."""
    with scripted.server() as here:
        generator = here.says("ok")
        error = RuntimeError("MPS backend out of memory (MPS allocated: 20.00 GB)")
        monkeypatch.setattr(generator, "submit", lambda job: job.end(error))
        for path in ("/v1/chat/completions", "/v1/messages"):
            status, headers, body = post(here, path)
            assert status == 503 and headers["retry-after"] == "10"
            assert "This machine is out of memory; ask again after 10 s." in body
            status, _, body = post(here, path, stream=True)
            assert status == 200 and "This machine is out of memory" in body.strip().split("\n\n")[-1]


def post(here, path: str, **more: object) -> tuple[int, dict, str]:
    content = json.dumps({"messages": said("a"), "max_tokens": 9, **more}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(here.url + path, content), timeout=20) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()
