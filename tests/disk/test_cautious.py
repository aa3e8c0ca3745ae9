"""Prompts with experts on the disk are computed in short chunks until a check has passed on the machine."""

import pytest
from support.jobs import Asked, ids_of
from support.models import tiny

from torch_moe_mps import _limits, from_pretrained
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.selfcheck import machine
from torch_moe_mps.serving.engine import abilities, executor
from torch_moe_mps.serving.engine.engine import Engine

SHORT, PROMPT = 16, 40


@pytest.fixture
def chunks(tmp_path, monkeypatch):
    """Function that computes a prompt on a device. Returns: the tokens of each call, and the answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(abilities, "CAUTIOUS_CHUNK", SHORT)
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)
    tiny("qwen3_moe").save_pretrained(tmp_path / "model")

    def computed(device: str, **options) -> tuple[list[int], list]:
        model = from_pretrained(str(tmp_path / "model"), device_map=device, **options)
        call, lengths = executor.call_model, []

        def noting(model, cache, **inputs):
            lengths.append(inputs["input_ids"].shape[1])
            return call(model, cache, **inputs)

        monkeypatch.setattr(executor, "call_model", noting)
        engine, asked = Engine(model, None, 1), Asked(ids_of(0, PROMPT), 2)
        engine.submit(asked.job)
        while engine.has_work:
            engine.step()
        monkeypatch.setattr(executor, "call_model", call)
        return [length for length in lengths if length > 1], asked.tokens

    machine.say_what_waits.cache_clear()
    return computed


@pytest.mark.slow("loads a model on two devices, and with two memories")
def test_until_a_check_has_passed(simulated, chunks, capsys):
    """On the GPU and with experts on the disk only; the tokens are the same, and the user is told once."""
    lengths, tokens = chunks("mps", experts_memory="1GB")
    assert lengths == [SHORT, SHORT, PROMPT - 2 * SHORT]
    said = [line for line in capsys.readouterr().err.splitlines() if "no check has passed" in line]
    assert (
        len(said) == 1
        and f"{_limits.CAUTIOUS_CHUNK} tokens at a time. `torch-moe-mps check --first`" in said[0]
    )
    assert chunks("mps")[0] == chunks("cpu", experts_memory="1GB")[0] == [PROMPT]
    machine.remember_check(True)
    assert chunks("mps", experts_memory="1GB") == ([PROMPT], tokens)
    machine.remember_check(False)
    assert chunks("mps", experts_memory="1GB")[0] == lengths
    assert "no check has passed" not in capsys.readouterr().err
