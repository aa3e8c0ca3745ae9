"""Captured tokens of models whose experts are on the disk: the GPU waits for them, the host does not."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.experts_on_disk import NGRAMS
from support.jobs import Asked, ids_of
from support.models import Conversation, generate, in_parts, prompt, tiny
from torch import nn

from torch_moe_mps import _environment, from_pretrained
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.checkpoints.quantize import sizes
from torch_moe_mps.disk import pool
from torch_moe_mps.models.basics.interface import on_disk_of
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.modules.experts_on_disk import expert_pools
from torch_moe_mps.serving.engine.loop import EngineThread

pytestmark = pytest.mark.own_gpu
SLOTS = 3  # of 8 experts, 2 of which a token needs


@pytest.fixture(autouse=True)
def captured_anywhere(monkeypatch):
    monkeypatch.setenv(_environment.CAPTURE, "1")


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a small model onto the device."""
    tiny("qwen3_moe", dtype=torch.float16).save_pretrained(tmp_path)
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: SLOTS)
    return lambda **options: from_pretrained(str(tmp_path), **{"device_map": "mps"} | options)


def is_captured(model: nn.Module) -> bool:
    captures = captures_of(model)
    return captures is not None and captures.reason is None and bool(captures.programs)


@pytest.mark.slow("loads two models, and captures their tokens")
def test_the_tokens_of_the_resident_model(simulated, load):
    """Of dense experts; tests/disk/test_steps.py has those in 4 bits."""
    simulated.set_schedule(1)
    resident, model = load(), load(experts_memory="1GB")
    with torch.no_grad():
        a, b = Conversation(resident), Conversation(model)
        expected, logits = a.tokens(6), b.tokens(6)
    assert all(map(torch.equal, expected, logits))
    assert is_captured(resident) and is_captured(model)
    assert expert_pools(model).counters.misses > 0


@pytest.mark.slow("loads two models, and captures their tokens")
def test_embeddings(simulated, load, tmp_path, monkeypatch):
    """Rows of a table of tokens and of one of their pairs are read within a captured token, too."""
    simulated.set_schedule(2)
    tiny("qwen4_exp", dtype=torch.float16, **NGRAMS).save_pretrained(tmp_path)
    monkeypatch.setattr(sizes, "_TABLE", 1e-12)
    monkeypatch.setattr(pool, "TABLE_ROWS", 40)
    resident, model = load(), load(experts_memory="1GB")
    assert on_disk_of(model.model.embed_tokens) is not None
    with torch.no_grad():
        a, b = Conversation(resident), Conversation(model)
        assert torch.equal(a.token, b.token) and all(map(torch.equal, a.tokens(6), b.tokens(6)))
    assert is_captured(model)


@pytest.mark.slow("loads two models")
def test_dense_matrices_whose_inputs_come_first(simulated, load, tmp_path):
    """They lie as the kernels read them, in slots and in staging: no call copies them."""
    tiny("gpt_oss", dtype=torch.float32).save_pretrained(tmp_path)  # whose bytes are not those of the model
    half = {"dtype": torch.float16}
    resident, model = load(**half), load(**half, experts_memory="1GB")
    with torch.no_grad():
        a, b = Conversation(resident), Conversation(model)
        assert torch.equal(a.token, b.token) and all(map(torch.equal, a.tokens(2), b.tokens(2)))
    experts = model.model.layers[1].mlp.experts
    for matrix in (experts.gate_up_proj, experts.down_proj):
        assert len(matrix) == SLOTS and matrix.mT.is_contiguous() and not matrix.is_contiguous()
    staged = expert_pools(model).staging.tensors[1]["gate_up_proj"]
    assert staged.is_contiguous() and staged.shape[1:] == experts.gate_up_proj.mT.shape[1:]
    says = r"experts\.moe_mps has its experts for another device or class: remove it"
    with pytest.raises(ValueError, match=says):
        from_pretrained(str(tmp_path), **half, experts_memory="1GB")


@pytest.mark.slow("loads two models, and captures their tokens")
def test_events_of_a_token(simulated, load, tmp_path, monkeypatch):
    """One signal and one wait in each layer; none where the memory holds all experts."""

    def events(model: nn.Module) -> list[int]:
        with torch.no_grad():
            talk = Conversation(model)
            talk.tokens(2)
            torch.mps.synchronize()
            with simulated.trace() as commands:
                talk.tokens(1)
        assert is_captured(model)
        return [commands.count(name) for name in ("signal event", "wait for event")]

    some = load(experts_memory="1GB")
    monkeypatch.undo()
    monkeypatch.setenv(_environment.CAPTURE, "1")
    (tmp_path / on_disk.NAME).unlink()
    whole = load(experts_memory="1GB")
    assert expert_pools(whole) is None and not (tmp_path / on_disk.NAME).exists()
    assert events(whole) == [0, 0] and events(some) == [2, 2]


@pytest.mark.slow("loads two models, and captures their tokens")
def test_a_step_ahead(simulated, load):
    """The host encodes the next token while the disk is slow with the experts of this one."""
    resident, model = load(), load(experts_memory="1GB")
    ids = prompt(1, 9).to("mps")
    expected = generate(resident, ids)
    with simulated.reads(lambda file, offset, size: (time.sleep(0.005), size)[1]):
        for schedule in range(3):
            simulated.set_schedule(schedule)
            assert torch.equal(generate(model, ids), expected)
    assert is_captured(model) and expert_pools(model).counters.misses > 0


@pytest.mark.slow("loads two models, and captures their tokens")
def test_calls_that_need_more_experts_than_slots(simulated, tmp_path, monkeypatch):
    """They run module by module, as their layers are read beside the pools; one token is captured still."""
    tiny("qwen3_moe", num_hidden_layers=3).save_pretrained(tmp_path)  # two have the same memory
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: SLOTS)
    resident, model = (
        from_pretrained(str(tmp_path), device_map="cpu", **options)
        for options in ({}, {"experts_memory": "1GB"})
    )
    for rows, tokens in ((1, 4), (3, 1), (1, 1)):
        ids = prompt(rows, 5 + 6 * tokens)
        expected, logits = (in_parts(each, ids, *[tokens] * 6)[0] for each in (resident, model))
        assert all(map(torch.equal, expected, logits)), (rows, tokens)
    assert is_captured(model)


@pytest.mark.slow("loads two models, and captures their tokens")
@pytest.mark.parametrize("captured", [0, 1])
def test_threads_that_share_a_model(load, captured, monkeypatch):
    """Each has the answers of the resident model: no thread replaces the experts of another one's step.

    Which tokens are captured is chance. On a CPU they have the bits of eager ones, since the weights are
    converted, and begin at multiples of 64 bytes. Mapped from a file they need not: torch's matmuls look.
    """
    monkeypatch.setenv(_environment.CAPTURE, str(captured))
    resident, model = (
        load(device_map="cpu", dtype="float32", **own) for own in ({}, {"experts_memory": "1GB"})
    )
    slots = pool.ExpertPool.slots

    def slowly(self, ids):
        found = slots(self, ids)
        time.sleep(0.002)  # in which other threads ask
        return found

    monkeypatch.setattr(pool.ExpertPool, "slots", slowly)

    def tokens(number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return Conversation(model, length=3 + number).tokens(8)

    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(tokens, range(4))]
    for number, own in enumerate(answers):
        with torch.no_grad():
            expected = Conversation(resident, length=3 + number).tokens(8)
        assert all(map(torch.equal, own, expected))
    assert bool(captures_of(model) and captures_of(model).programs) == bool(captured)


@pytest.mark.slow("loads a model, and captures its tokens")
def test_memory_that_the_gpu_may_not_have_ends_one_answer(simulated, load):
    """Prompts that need a whole layer of experts at once do not fit; tokens, which need some slots, do."""
    model = load(experts_memory="1GB")
    whole_layer = expert_pools(model).staging.tensors[0]["down_proj"].untyped_storage().nbytes()
    engine = EngineThread(model, None, 1)

    def answer(length: int, until=lambda tokens: None) -> list[int]:
        asked = Asked(ids_of(length, length), 6, until=lambda token: until(asked.tokens))
        asked.config.do_sample = False
        engine.submit(asked.job)
        assert asked.done.wait(60)
        if isinstance(asked.reasons[0], Exception):
            raise asked.reasons[0]
        return asked.tokens

    def fails(length: int, *until) -> None:
        says = r"Insufficient Memory .* a smaller experts_memory, "
        with pytest.raises(torch.AcceleratorError, match=says) as raised:
            answer(length, *until)
        assert "\n" not in str(raised.value)

    one, many = answer(1), answer(9)
    assert is_captured(model)
    with simulated.working_set(whole_layer - 1):
        for _ in range(2):
            fails(9)
            assert answer(1) == one
    assert answer(9) == many
    with contextlib.ExitStack() as nothing:  # is left for a captured token, from the third on
        fails(1, lambda tokens: len(tokens) == 2 and nothing.enter_context(simulated.working_set(0)))
    assert answer(1) == one and is_captured(model)
    engine.close()


@pytest.mark.slow("loads two models, and captures their tokens")
def test_an_error_of_the_disk_ends_one_answer(simulated, load):
    """In a captured token, with one error where it is read; the next answer is right."""
    resident, model = load(), load(experts_memory="1GB")
    ids = prompt(1, 9).to("mps")
    expected = generate(resident, ids)
    assert torch.equal(generate(model, ids), expected) and is_captured(model)
    with torch.no_grad():
        talk = Conversation(model)
        talk.tokens(2)

        def fails(*args):
            raise OSError(5, "Input/output error")

        says = r"experts of model.layers.* cannot be read: .*Input/out"
        with simulated.reads(fails), pytest.raises(torch.AcceleratorError, match=says):
            talk.tokens(8)
    assert torch.equal(generate(model, ids), expected)
