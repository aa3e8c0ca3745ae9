"""Commits without a wait: when they come, and that they change nothing else."""

import copy
import functools

import pytest
import torch
from measured.apple.layers import Delta, _matrices, _values
from simulator.apple.count import Limit
from simulator.apple.facts import GPUS
from simulator.apple.recorder import measure
from support import tiny_models
from support.sweep import rows_in_sweep

import torch_moe_mps
from torch_moe_mps._environment import COMMIT_EVERY
from torch_moe_mps._extension import COMMIT_BY_WORK, commit_setting
from torch_moe_mps.models.attention.attention import _is_long
from torch_moe_mps.ops._samples import packet, sample_arguments
from torch_moe_mps.quantization import quantize

NORM = "fused_norm_add_scalar"  # one dispatch
WITH_MEMORY = "moe_bucket"  # of a threadgroup, whose length the encoder keeps
OPS = torch.ops.moe_mps


def norms(count: int) -> list[torch.Tensor]:
    arguments = sample_arguments(NORM, "mps", torch.float32)
    return [packet(NORM)(**arguments) for _ in range(count)]


@pytest.fixture(autouse=True)
def every(simulated):
    """Sets after how many dispatches the stream is committed, for one test; by default as users have it."""
    OPS._commit_every(COMMIT_BY_WORK)
    return OPS._commit_every


@pytest.fixture
def base_m1(simulated):
    """Plans and estimates for the slowest GPU."""
    torch.mps.synchronize()
    OPS._plan_for(GPUS["M1"].cores)
    OPS._longest_buffer()
    yield GPUS["M1"]
    OPS._plan_for(0)


def kinds(commands) -> list[str]:
    return ["commit" if line == "commit" else "dispatch" for line in commands if line != "synchronize"]


def test_a_trace_shows_commits(every, simulated):
    every(2)
    with simulated.trace() as commands:
        norms(5)
    assert kinds(commands) == ["dispatch", "dispatch", "commit"] * 2 + ["dispatch"]


def test_an_idle_gpu_gets_eight_dispatches_and_eight_to_go_on_with(simulated):
    """While it has both, everything else goes into one buffer; a wait begins anew."""
    torch.mps.synchronize()
    for _ in range(2):
        with simulated.trace() as commands:
            norms(100)
        assert kinds(commands) == (["dispatch"] * 8 + ["commit"]) * 2 + ["dispatch"] * 84
        torch.mps.synchronize()
    simulated.set_schedule(1)  # what is committed is done at once
    with simulated.trace() as commands:
        norms(20)
    assert kinds(commands) == (["dispatch"] * 8 + ["commit"]) * 2 + ["dispatch"] * 4


def test_none_when_switched_off(every, simulated):
    every(0)
    before = simulated.commits()
    norms(100)
    assert simulated.commits() == before


def test_the_environment_changes_it(monkeypatch):
    assert commit_setting() == COMMIT_BY_WORK
    for text in ("0", "7"):
        monkeypatch.setenv(COMMIT_EVERY, text)
        assert commit_setting() == int(text)
    for text in ("", "-1", "often"):
        monkeypatch.setenv(COMMIT_EVERY, text)
        with pytest.raises(ValueError, match=f"{COMMIT_EVERY} must be a number of dispatches, or 0, got"):
            commit_setting()


@pytest.mark.parametrize("schedule", [0, 1])
def test_results_with_a_commit_after_every_operator(every, simulated, schedule):
    """Committed work runs at once under odd schedules, at the next wait under even ones."""
    model = tiny_models.tiny_model("qwen2_moe")
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        expected = model(ids).logits
        accelerated = copy.deepcopy(model).to("mps")
        torch_moe_mps.accelerate(accelerated)
        simulated.set_schedule(schedule)
        every(1)
        before = simulated.commits()
        logits = accelerated(ids.to("mps")).logits
    assert simulated.commits() > before + 10
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-5, atol=1e-5)


def linear(tokens: int, inputs: int, rows: int):
    x, (packed, scales, zeros, kind) = _values(1, tokens, inputs), _matrices(1, rows, inputs)
    return OPS.linear_quantized(x, packed[0], scales[0], zeros[0], format=kind)


def mlp(tokens: int, inputs: int, between: int):
    up, down = _matrices(1, 2 * between, inputs), _matrices(1, inputs, between)
    given = [each[0] for each in (*up[:3], *down[:3])]
    return OPS._mlp_quantized(_values(1, tokens, inputs), *given, format=up[3])


@functools.cache
def routing(tokens: int, count: int, slots: int):
    return (torch.arange(tokens * slots) * 37 % count).view(tokens, slots).to("mps")


def experts(tokens: int, count: int, slots: int, inputs: int, between: int):
    up, down = _matrices(count, 2 * between, inputs), _matrices(count, inputs, between)
    ids = routing(tokens, count, slots)
    weights = _values(tokens, slots, dtype=torch.float32)
    x = _values(tokens, inputs)
    return OPS._moe_experts_quantized(x, weights, ids, *up[:3], *down[:3], format=up[3])


def attention(tokens: int, keys: int, heads: int, key_heads: int):
    k, v = (_values(1, key_heads, keys, 128) for _ in range(2))
    return OPS.cached_attention(_values(1, heads, tokens, 128), k, v, scale=0.1)


def recurrence(tokens: int, key_heads: int, heads: int):
    for call in Delta("", key_heads, heads, channels=False).token(tokens):
        call()


def of_heads(tokens: int, transposed: bool):
    x = _values(1, tokens, 32, 192 if transposed else 512, dtype=torch.bfloat16)
    return OPS._heads_quantized(x, *_matrices(32, 192, 512), transposed=transposed)


ESTIMATED = (
    (recurrence, (32, 16, 32)),
    (of_heads, (64, True)),
    (of_heads, (64, False)),
    (linear, (256, 4096, 4096)),
    (mlp, (256, 2048, 4096)),
    (experts, (512, 32, 8, 2048, 768)),
    (attention, (256, 2048, 32, 8)),
    (attention, (64, 4096, 32, 8)),
    (linear, (1, 4096, 4096)),
)


@pytest.mark.parametrize(
    ("call", "sizes"), rows_in_sweep(ESTIMATED, [ESTIMATED[place] for place in (0, 1, 4, 5, 7, 8)])
)
def test_estimates_are_what_the_cost_model_says(every, base_m1, call, sizes):
    """A tenth less at the least, on the slowest GPU."""
    every(0)
    found = measure(lambda: call(*sizes), limit=Limit(groups=8, slots=4e6))
    predicted = sum(m.bounds(base_m1).predicted_us for m in found) * 1e-6
    assert 0.95 <= OPS._longest_buffer() / predicted <= 1.6


# {model: layers, hidden, heads, key heads, what is behind attention}
MODELS = {
    "8B dense": (32, 4096, 32, 8, lambda tokens: mlp(tokens, 4096, 14336)),
    "32B dense": (64, 5120, 64, 8, lambda tokens: mlp(tokens, 5120, 25600)),
    "Qwen3-30B-A3B": (48, 2048, 32, 4, lambda tokens: experts(tokens, 128, 8, 2048, 768)),
}


def layer(model: str, tokens: int) -> None:
    _, hidden, heads, key_heads, rest = MODELS[model]
    norm = lambda: OPS.rms_norm(_values(tokens, hidden), _values(hidden), norm_eps=1e-6)  # noqa: E731
    norm(), linear(tokens, hidden, 128 * (heads + 2 * key_heads))
    attention(tokens, tokens, heads, key_heads)
    linear(tokens, 128 * heads, hidden), norm(), rest(tokens)


@pytest.mark.parametrize("tokens", [2048, 32768])
@pytest.mark.parametrize("model", MODELS)
def test_the_longest_buffer_of_a_prompt(base_m1, simulated, model, tokens):
    """On the slowest GPU, which has work all the time: 0.3 s, of what the test above allows."""
    with simulated.dropped(validate=False):
        before = simulated.commits()
        for _ in range(2):
            layer(model, tokens)
        longest = OPS._longest_buffer()
        commits = simulated.commits() - before
        total = 0.0
        OPS._commit_every(0)
        torch.mps.synchronize()
        layer(model, tokens)
        total = 2 * OPS._longest_buffer()
        OPS._commit_every(COMMIT_BY_WORK)
    print(f"{model}, {tokens} tokens: longest {longest:.3f} s, {commits} commits of {total:.2f} s")
    assert longest <= 0.3 * 0.95
    assert commits <= total / 0.1 + 1


@pytest.mark.parametrize("model", MODELS)
def test_a_token_is_committed_twice_while_the_gpu_works(base_m1, simulated, model):
    """Eight dispatches that the GPU runs, and eight behind them."""
    with simulated.dropped(validate=False):
        layer(model, 1)
        torch.mps.synchronize()
        before = simulated.commits()
        for _ in range(4):
            layer(model, 1)
        assert simulated.commits() == before + 2


@pytest.fixture
def blocks_of_64(simulated):
    """Dispatches take 64 tokens at the most."""
    OPS._limit_dispatches(1e-12)
    yield
    OPS._limit_dispatches(0.15)


TOKENS = 150  # two whole blocks and a part


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def quantized(*shape: int):
    return quantize(normal(*shape, scale=0.1), 4, 32)


def linear_arguments():
    weight = quantized(96, 64)
    packed = dict(zip(("packed", "scales", "zeros"), weight, strict=True))
    around = {
        "residual": normal(2, TOKENS // 2, 96),
        "norm_weight": normal(64),
        "order": torch.randperm(96).int(),
    }
    return {"x": normal(2, TOKENS // 2, 64), **packed, "bias": normal(96), "format": "affine4_32"} | around


def experts_arguments(shared_gate: torch.Tensor):
    ids = (torch.arange(TOKENS * 2) * 3 % 5).view(TOKENS, 2).int()
    names = {"gate_up": normal(5, 96, 64, scale=0.1), "down": normal(5, 64, 48, scale=0.1)}
    around = {"shared_out": normal(TOKENS, 64), "residual": normal(TOKENS, 64), "norm_weight": normal(64)}
    around |= {"shared_gate": shared_gate, "gate_is_logit": True}
    return {"x": normal(TOKENS, 64), **names, "topk_weights": normal(TOKENS, 2), "topk_ids": ids, **around}


def attention_arguments(keys: int, **options):
    q, k, v = normal(2, 4, TOKENS, 32), normal(2, 2, keys, 32), normal(2, 2, keys, 48)
    return {"q": q, "k": k, "v": v, "scale": 0.2, **options}


MASK = torch.ones(TOKENS, 200).tril(30).bool()[None, None].expand(2, 1, -1, -1)


@pytest.mark.parametrize(
    ("name", "make", "dispatches"),
    [
        ("linear_quantized", linear_arguments, 6),  # with a norm each
        ("_moe_experts", lambda: experts_arguments(normal(TOKENS)), 15),
        ("_moe_experts", lambda: experts_arguments(normal(TOKENS, 1)), 15),
        (
            "expert_mm",
            lambda: {
                "x": normal(TOKENS, 2, 64),
                "weight": normal(5, 48, 64),
                "topk_ids": routing(TOKENS, 5, 2).cpu(),
            },
            6,
        ),
        ("cached_attention", lambda: attention_arguments(TOKENS), 3),
        ("cached_attention", lambda: attention_arguments(200, window=70, softcap=5.0), 3),
        ("cached_attention", lambda: attention_arguments(200, attn_mask=MASK, sinks=normal(4)), 3),
        (
            "_cached_attention",
            lambda: (
                attention_arguments(200, key_range=torch.tensor([[3, 200], [60, 180]]).int())
                | {"gate": normal(2, TOKENS, 4, 48)}
            ),
            3,
        ),
    ],
)
def test_results_in_blocks_of_tokens(blocks_of_64, simulated, name, make, dispatches):
    arguments = make()
    expected = packet(name)(**arguments)
    on_mps = {key: v.to("mps") if isinstance(v, torch.Tensor) else v for key, v in arguments.items()}
    with simulated.trace() as commands:
        result = packet(name)(**on_mps)
    assert sum(" grid " in line and "merge" not in line for line in commands) == dispatches
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_long_prompts_do_not_run_in_one_dispatch_of_torch(base_m1):
    """Attention of a model whose heads torch would take: 32,768 tokens are 4.4 s, 2,048 tokens are 0.02 s."""
    assert _is_long(*2 * [torch.empty(1, 32, 32768, 128, device="meta")])
    assert not _is_long(*2 * [torch.empty(1, 32, 2048, 128, device="meta")])
    assert _is_long(
        torch.empty(1, 32, 2048, 128, device="meta"), torch.empty(1, 8, 32768, 128, device="meta")
    )


@pytest.mark.parametrize("version", ["2.13", "2.14", "2.15"])
@pytest.mark.parametrize("call", [torch.Tensor.sort, lambda x: x.topk(3)], ids=["sort", "topk"])
def test_torchs_kernels_have_all_of_the_threadgroup_memory(simulated, version, call):
    """Their own is exactly what a GPU has: nothing of ours may be set in the encoder that they share."""
    with simulated.torch_version(version):
        x = torch.arange(9.0, device="mps")
        packet(WITH_MEMORY)(**sample_arguments(WITH_MEMORY, "mps", torch.float32))
        assert call(x).values.numel() in (3, 9)
