"""Random steps of a whole model with the fewest slots: bit for bit those of the resident model."""

import contextlib
import os
import sys
import time
from functools import partial
from random import Random

import pytest
import simulator
import torch
from support import processes
from support.jobs import Asked, ids_of
from support.models import tiny
from support.sweep import rows_in_sweep
from transformers import DynamicCache

from torch_moe_mps import _environment, from_pretrained
from torch_moe_mps._faults import release_cache, synchronize
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.checkpoints.source import Source
from torch_moe_mps.disk import pool as disk_pool
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.capture.replay import Captures
from torch_moe_mps.models.graphs import passes
from torch_moe_mps.models.graphs.passes.routing import choose_in_experts
from torch_moe_mps.models.modules.experts_on_disk import expert_pools
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.serving.engine import executor
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

pytestmark = pytest.mark.own_gpu
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


class Walk:
    """Random calls of the resident model and of one whose experts are on the disk, side by side.

    Args:
        shortest: least tokens of a prompt.
        captured: tokens are. Both models capture them before a file is short: a call that it ends counts for
            the resident model alone, which would capture its next token while the other one's is eager. A
            captured token has other bits: its queries and keys turn without being rounded behind their norm.

    Attributes:
        model: the one on the disk.
        steps: calls whose logits were compared.
        ended: calls that a truncated file ended.
    """

    def __init__(self, resident, model, random: Random, shortest: int, captured: bool):
        self.resident, self.model, self.random, self.shortest = resident, model, Random(0), shortest
        self.steps = self.ended = 0
        self.file = expert_pools(model).layers[0].reader.file.path
        self._captures: list[Captures] = []
        if captured:
            for tokens in (shortest, 40):  # no length is a constant of the second program
                self._begin(tokens)
                self._call(None, None, None)
            self._captures = [captures_of(each) for each in (resident, model)]
        self.random = random
        self._prompt()

    def run(self, count: int) -> None:
        """Takes so many steps more."""
        last = self.steps + count
        while self.steps < last:
            kind = self.random.choices(
                (self._decode, self._continue, self._prompt, self._release), (60, 15, 15, 5)
            )[0]
            kind() if self.random.random() < 0.9 else self._truncated(kind)

    def _begin(self, tokens: int) -> None:
        self._caches = DynamicCache(config=self.resident.config), DynamicCache(config=self.model.config)
        self._last = None
        self._prompt_of(tokens)

    def _prompt(self) -> None:
        self._begin(self.random.randrange(self.shortest, 40))

    def _continue(self) -> None:
        self._prompt_of(self.random.randrange(self.shortest, self.shortest + 8))

    def _prompt_of(self, tokens: int) -> None:
        self._call(
            torch.randint(2, 90, (1, tokens), generator=torch.manual_seed(self.random.getrandbits(32)))
        )

    def _decode(self) -> None:
        """A few tokens, which the host encodes without a look at any of them."""
        self._call(*[None] * self.random.randrange(1, 5))

    def _release(self) -> None:
        release_cache(self.model.device)

    def _call(self, *inputs: torch.Tensor | None) -> None:
        """Compares the logits of calls with these tokens; None is the likeliest of the call before."""
        logits = []
        for model, cache in zip((self.resident, self.model), self._caches, strict=True):
            token, own = self._last, []
            for ids in inputs:
                ids = token if ids is None else ids.to(model.device)
                own.append(model(ids, **cache_argument(model, cache), use_cache=True).logits)
                assert all(each.reason is None for each in self._captures), f"eager at step {self.steps}"
                token = own[-1][:, -1:].argmax(-1)
            logits.append(own)
        got = [each.cpu() for each in logits[1]]
        synchronize(self.model.device)
        assert all(map(torch.equal, got, (each.cpu() for each in logits[0]))), f"step {self.steps}"
        self._last = token
        self.steps += len(inputs)

    def _truncated(self, step) -> None:
        """A step while the file is short: it has the right values, or ends with an error of the file."""
        content = self.file.read_bytes()
        os.truncate(self.file, self.random.randrange(len(content) // 4, len(content)))
        try:
            step()
        except (ValueError, torch.AcceleratorError) as error:
            assert "is truncated" in str(error)
            is_over = True
        else:
            is_over = False
        finally:
            self.file.write_bytes(content)
        if is_over:
            self.ended += 1
            self._prompt()


@contextlib.contextmanager
def simulated_machine(device: str, seed: int):
    """In the simulator some reads stall, and the GPU runs beside the host, as drawn by the seed."""
    if sys.platform == "darwin":
        yield
        return
    own_gpu = simulator.own_gpu(seed) if device == "mps" else contextlib.nullcontext()
    with own_gpu, simulator.reads(simulator.Stalls(seed)):
        yield


@pytest.fixture
def keeps_warm(device, monkeypatch):
    """A GPU that waits for experts gets small kernels, at once and each millisecond."""
    monkeypatch.setenv(_environment.KEEP_WARM, "1")
    monkeypatch.setattr(disk_pool, "BEAT", (1e-3, 1))
    yield
    torch.ops.moe_mps._keep_warm(0.0, 1)


FEW = 8  # tokens of a call that is captured
# (seed, steps) of two walks: few, and 10,000 in the sweep
SEEDS = [(0, 30), *((seed, 50) for seed in range(1, 101))]


@pytest.mark.slow("loads four models, and captures their tokens")
@pytest.mark.parametrize(("seed", "steps"), rows_in_sweep(SEEDS, SEEDS[:1]))
def test_random_steps(device, keeps_warm, seed, steps, tmp_path, monkeypatch):
    """Tokens, prompts, freed memory, reads that stall and files that end early, by random numbers of slots.

    The second walk runs module by module: captured calls of a few tokens, which the resident model alone
    has, round otherwise.
    """
    monkeypatch.setattr(passes, "PASSES", [each for each in passes.PASSES if each is not choose_in_experts])
    dtype = torch.float16 if device == "mps" else torch.float32
    tiny("qwen3_moe", dtype=dtype, num_hidden_layers=3).save_pretrained(tmp_path)
    load = partial(from_pretrained, str(tmp_path), device_map=device, bits=4, group_size=32)
    ended, misses, beats = 0, 0, torch.ops.moe_mps._beats()[0]
    for shortest in (FEW + 1, 1):
        random, is_captured = Random(seed + shortest / 10), shortest > FEW
        monkeypatch.setenv(_environment.CAPTURE, str(int(is_captured)))
        resident = load()
        slots = random.randrange(TOP_K, resident.config.num_experts)
        monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory, slots=slots: slots)
        model = load(experts_memory="1GB")
        with torch.no_grad(), simulated_machine(device, 2 * seed + is_captured):
            walk = Walk(resident, model, random, shortest, is_captured)
            walk.run(steps)
        ended, misses = ended + walk.ended, misses + expert_pools(model).counters.misses
        assert bool(captures_of(model) and captures_of(model).programs) == is_captured
    beats = torch.ops.moe_mps._beats()[0] - beats
    print(f"seed {seed}: {misses} misses, {ended} ended by the file, {beats} beats")
    assert misses > 0 and (ended > 0 or seed)
    assert (beats > 0) == (device == "mps") or sys.platform == "darwin"  # whose disk may be too fast


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
