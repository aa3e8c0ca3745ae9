"""Random steps of a whole model with the fewest slots: bit for bit those of the resident model."""

import sys
import time
from random import Random

import pytest
import torch
from support import processes
from support.jobs import Asked, ids_of
from support.models import tiny

from torch_moe_mps import _environment, from_pretrained
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.checkpoints.source import Source
from torch_moe_mps.serving.engine import executor
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache
from torch_moe_mps.transformers.capture.classes import captures_of
from torch_moe_mps.transformers.graphs import passes
from torch_moe_mps.transformers.graphs.passes.routing import choose_in_experts
from torch_moe_mps.transformers.modules.experts_on_disk import expert_pools

TOP_K = 2


@pytest.fixture(params=["captured", "in rows"])
def models(device, request, tmp_path, monkeypatch):
    """The resident model, the one on the disk, and how many sequences run at once.

    Captured tokens are of one: several need more experts than there are slots, which the host has to know.
    Experts choose for themselves only where all are in memory, and add a router's scores in another order.
    """
    monkeypatch.setattr(passes, "PASSES", [each for each in passes.PASSES if each is not choose_in_experts])
    is_captured = request.param == "captured"
    monkeypatch.setenv(_environment.CAPTURE, str(int(is_captured)))
    tiny("qwen3_moe", dtype=torch.float16 if device == "mps" else torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: TOP_K)
    load = lambda **options: from_pretrained(str(tmp_path), device_map=device, **options)  # noqa: E731
    resident, model = load(bits=4, group_size=32), load(bits=4, group_size=32, experts_memory="1GB")
    yield resident, model, 1 if is_captured else 4
    pools = expert_pools(model)
    assert pools.counters.misses > 0 and pools.counters.layers > 0
    assert all(len(pool.tensors["down_proj_packed"]) == TOP_K for pool in pools.layers)
    if is_captured:
        assert captures_of(model).programs and captures_of(resident).programs


def answers(model, logits: list | None, rows: int, seed: float, steps: int) -> list:
    """(tokens, reasons) of random jobs that enter, end and are cancelled at random steps.

    Args:
        logits: notes those of each call.
    """
    random, call, jobs, plan = Random(seed), executor.call_model, [], {}

    def noting(*args, **inputs):
        out = call(*args, **inputs)
        logits.append(out.logits.clone())
        return out

    engine = Engine(model, random.choice([None, PrefixCache(1 << 30)]), rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)  # the engine's choices depend on it
        if logits is not None:
            patch.setattr(executor, "call_model", noting)
        for step in range(steps):
            if not engine.has_work or random.random() < 0.15:
                length, new = random.choice([1, 2, 3, random.randrange(1, 60)]), random.randrange(1, 16)
                asked = Asked(ids_of(random.randrange(6), length), new, seed=random.randrange(1 << 32))
                asked.config.do_sample, asked.config.temperature = random.random() < 0.7, 2.0
                plan[step + random.randrange(1, 20)] = asked if random.random() < 0.3 else None
                jobs.append(asked)
                engine.submit(asked.job)
            if (cancelled := plan.get(step)) is not None:
                cancelled.job.cancel()
            engine.step()
        engine.end_all()
    return [(asked.tokens, asked.reasons) for asked in jobs]


@pytest.mark.slow("loads two models, and captures their tokens")
@pytest.mark.parametrize(
    ("seed", "steps"), [(0, 40), *(pytest.param(seed, 500, marks=pytest.mark.sweep) for seed in range(1, 11))]
)
def test_the_resident_model(models, seed, steps):
    """Half of the steps with all logits, half as they are, with tokens in flight."""
    *models, rows = models
    random = Random(seed)
    for part in range(max(2, steps // 100)):
        logits = ([], []) if part % 2 else (None, None)
        own = rows, random.random(), min(100, steps // 2)
        expected, got = (answers(*each, *own) for each in zip(models, logits, strict=True))
        assert got == expected and len(expected) > 1
        assert not any(isinstance(reason, Exception) for _, reasons in expected for reason in reasons)
        if part % 2:
            assert len(logits[0]) == len(logits[1]) > 9 and all(map(torch.equal, *logits))


GROWN = """
    import sys
    import torch
    from support.models import generate, prompt
    from torch_moe_mps import from_pretrained

    def kilobytes(name):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    torch.set_num_threads(1)
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = kilobytes("VmRSS")
    model = from_pretrained(sys.argv[1], device_map="cpu", experts_memory=int(sys.argv[2]))
    generate(model, prompt(1, 9), max_new_tokens=3, min_new_tokens=3)
    print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_memory(tmp_path):
    """Of a process that answers: the memory for experts, a quarter of these, and 80 MB for all else."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16}
    tiny("qwen3_moe", num_hidden_layers=12, **sizes).save_pretrained(tmp_path)
    experts = 12 * 16 * 3 * 256 * 256 * 4
    source = Source(str(tmp_path), {})
    model = on_disk.placed(source, None)
    on_disk.experts_file(source, None, model, on_disk.layers_of(model))
    grown = int(processes.forked(GROWN, tmp_path, experts // 4))
    assert experts // 4 < grown < experts // 4 + 80 * 10**6 < experts
