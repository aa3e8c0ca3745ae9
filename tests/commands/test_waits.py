"""Between the tokens of an answer the host does not wait for the device, whatever the model's cache is."""

import contextlib

import pytest
import torch
from support import serving, tiny_models
from support.jobs import Asked, run
from support.serving import said
from support.waits import Waits

import torch_moe_mps
from torch_moe_mps.commands import main
from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.commands.bench import Bench
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

# {architecture: its sizes}: compressed keys, recurrent states, and states of a convolution alone.
HYBRIDS = {
    "deepseek_v4": {},
    "qwen3_next": {},
    "kimi_linear": {},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": 3},
    "lfm2_moe": {},
}
SLOW = [pytest.param(name, marks=pytest.mark.sweep) for name in [*HYBRIDS][1:]]


@pytest.fixture
def waits(monkeypatch) -> list[int]:
    """Waits of each answer of an engine, on whatever thread."""
    seen, step = [], Engine.step

    def counted(self):
        if not self.active:
            seen.append(0)
        with Waits() as waits:
            step(self)
        seen[-1] += waits.count

    monkeypatch.setattr(Engine, "step", counted)
    return seen


@pytest.mark.slow("captures programs in the simulator")
@pytest.mark.parametrize("architecture", ["deepseek_v4", *SLOW])
def test_no_token_waits(architecture, simulated, waits):
    """Tokens are those of `generate` alone, also of a second turn, behind an answer that has ended early."""
    model = tiny_models.tiny_model(architecture, **HYBRIDS[architecture])
    ids = torch.randint(3, 20, (1, 40), generator=torch.Generator().manual_seed(0))
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 999}

    def expected(ids, new):
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **settings)

    whole = expected(ids, 12)
    new = whole[0, 40:51].tolist()
    count = max(position for position, token in enumerate(new) if token not in new[:position]) + 1
    later = torch.cat([whole[:, : 40 + count], ids[:, :9]], 1)
    assert count > 4
    cases = [(ids, 4), (ids, count), (later, 5)]
    results = [expected(ids, new)[0, ids.shape[1] :].tolist() for ids, new in cases]
    model = model.to("mps")
    torch_moe_mps.accelerate(model)
    prefixes = PrefixCache(1 << 30)
    ended = Asked(ids, 12, lambda token: token == results[1][-1])
    asked = [Asked(ids, 4), ended, Asked(later, 5)]
    engines = [Engine(model, prefixes, 1) for _ in asked]
    for engine, each, found in zip(engines, asked, results, strict=True):
        run(engine, each)
        assert each.tokens == found
    few, many, second = waits
    assert few >= many >= second  # the first one compiles, too
    # The first eight tokens of a prompt are kept, and all that was generated: of the second turn only what is
    # new was computed.
    assert [engine.counts.computed for engine in engines] == [40, 32, 9]


def test_no_token_of_chat_and_serve_waits(tmp_path, simulated, waits, monkeypatch, capsys):
    """And one thread uses the device in both. `test_on_the_gpu.py` shows it of several answers."""
    checkpoint = serving.chat_checkpoint(tmp_path / "model", "qwen3_next")
    texts = []
    on_mps = ("--device", "mps", "--parallel", 1)
    with serving.client_of(checkpoint, *on_mps) as client, simulated.one_thread():
        for tokens in (3, 9):
            asked = {"model": str(checkpoint), "messages": said("hello"), "temperature": 0}
            answer = client.chat.completions.create(**asked, max_tokens=tokens)
            texts.append(answer.choices[0].message.content)
    assert len(texts[0]) < len(texts[1]) and texts[1].startswith(texts[0])
    served = [*waits]
    del waits[:]
    for tokens in (3, 9):
        with contextlib.ExitStack() as chat:
            lines = iter(["hello", "!exit"])

            def asked_for(prompt, chat=chat, lines=lines) -> str:
                line = next(lines)
                if line == "hello":  # the model is loaded
                    chat.enter_context(simulated.one_thread())
                return line

            monkeypatch.setattr("builtins.input", asked_for)
            flags = ["--set", f"max_new_tokens={tokens}", "--set", "do_sample=False", "--device", "mps"]
            assert main(["chat", str(checkpoint), *flags]) == 0
        assert texts[tokens == 9] in capsys.readouterr().out
    assert served[0] >= served[1] and waits[0] >= waits[1]


def test_no_token_of_bench_waits(simulated):
    """Behind a context of a model with recurrent states, greedy and sampled."""
    model = tiny_models.tiny_model("qwen3_next").to("mps")
    torch_moe_mps.accelerate(model)
    waits = []
    for tokens in (3, 9):
        sizes = ["--prompt", "6", "--max-tokens", str(tokens), "--turn", "2", "--depth", "20"]
        bench = Bench(model, parser().parse_args(["bench", "model", *sizes, "--repeats", "1"]))
        with torch.no_grad():
            bench._read(20)
            bench._generated("", 20, do_sample=False)
            with simulated.dropped(), Waits() as seen:  # which do not depend on what is computed
                bench._generated("", 20, do_sample=False)
                bench._generated("", 20, do_sample=True, temperature=0.7, top_k=20, top_p=0.95)
        waits.append(seen.count)
    assert waits[0] == waits[1]
