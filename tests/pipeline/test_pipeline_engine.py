"""The engine in the first of several processes: answers are those of one process, token by token."""

import functools
import json

import pytest
from support import tiny_models
from support.pipeline import answers_of, launch
from support.sweep import in_sweep

import torch_moe_mps

PROMPT = [number % 13 for number in range(40)]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": []}
SAMPLED = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.5, "top_k": 20, "eos_token_id": []}
# Two with a common prefix; one that has nothing of them; sampled ones; one whose logits are changed.
JOBS = [
    {"ids": [*PROMPT, 1, 1, 1], **GREEDY},
    {"ids": [*PROMPT, 2, 2, 2, 2], **GREEDY, "max_new_tokens": 12},
    {"ids": [5, 3, 5], **GREEDY, "max_new_tokens": 9},
    {"ids": [*PROMPT, 1, 1, 1, 1], **SAMPLED, "seed": 7},
    {"ids": [4, 4, 4, 4], **SAMPLED, "seed": 8},
    {"ids": [4, 4, 4, 4], **GREEDY, "repetition_penalty": 1.7},
]
# The first is drafted for the second, rightly, and for the third, wrongly.
AGAIN = [JOBS[2], JOBS[2], {**JOBS[2], "repetition_penalty": 1.1}]
# {name: (architecture, arguments)}
SCENARIOS = {
    "batched": ("mixtral", {"jobs": JOBS, "together": 4}),
    "with drafts": ("mixtral", {"jobs": JOBS, "together": 4, "drafts": True}),
    "states": ("qwen3_next", {"jobs": JOBS, "together": 3, "drafts": True}),
    "states with drafts": ("qwen3_next", {"jobs": AGAIN, "drafts": True}),
    "a layer each": ("deepseek_v4", {"jobs": JOBS[:4], "together": 3}),
    "stages with other modules": ("glm5_next", {"jobs": JOBS[:3], "together": 3}),
    "in turn": ("mixtral", {"jobs": JOBS[:4], "memory": 0}),
    "cancelled": ("mixtral", {"jobs": JOBS[1:3], "together": 2, "cancelled": 0}),
    "not batchable": ("mixtral", {"jobs": JOBS[:3], "together": 3, "patched": "not_batchable"}),
    "not batchable there": ("mixtral", {"jobs": JOBS[:3], "together": 3, "patched": "second_has_no_rows"}),
}
FAILING = "mixtral", {"jobs": JOBS[:3], "together": 2, "patched": "second_raises"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for architecture in ("mixtral", "qwen3_next", "deepseek_v4", "glm5_next"):
        made[architecture] = str(tmp_path_factory.mktemp(architecture))
        with tiny_models.groups_of_32():
            tiny_models.tiny_model(architecture).save_pretrained(made[architecture])
    return made


@pytest.fixture(scope="module")
def outcomes(folders):
    """{scenario: what each process found}."""
    scenarios = SCENARIOS | {"failing": FAILING}
    wanted = [{"folder": folders[name], **given} for name, given in scenarios.values()]
    return dict(zip(scenarios, zip(*launch("engines", wanted), strict=True), strict=True))


@pytest.fixture(scope="module")
def alone(folders):
    """The answers of one process to jobs of an architecture, each by itself, with nothing cached."""
    models = {name: torch_moe_mps.from_pretrained(folder) for name, folder in folders.items()}

    @functools.cache
    def answer(architecture, job):
        return answers_of(models[architecture], [json.loads(job)], memory=0)[0][0]

    return lambda architecture, jobs: [answer(architecture, json.dumps(job)) for job in jobs]


@pytest.mark.slow("two processes load models")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_answers_are_those_of_one_process(scenario, outcomes, alone):
    architecture, given = SCENARIOS[scenario]
    first, second = outcomes[scenario]
    expected = alone(architecture, given["jobs"])
    if scenario == "cancelled":
        expected[0] = expected[0][:2]
    assert first["answers"] == expected
    assert first["calls"] == second["calls"] and first["cached"] == second["cached"]


def test_sequences_are_batched(outcomes):
    most = {name: max(rows for rows, _ in outcomes[name][0]["calls"]) for name in SCENARIOS}
    assert most == {
        "batched": 4, "with drafts": 4, "states": 3, "states with drafts": 1, "a layer each": 3,
        "stages with other modules": 3,
        "in turn": 1, "cancelled": 2, "not batchable": 1,
        "not batchable there": 1,
    }  # fmt: skip


def test_drafts_are_verified_in_all_processes(outcomes):
    for name in ("with drafts", "states with drafts"):
        assert outcomes[name][0]["drafted"] > 0


def test_a_shared_prefix_is_computed_once(outcomes):
    """And of prefixes that the first process gives up, no other one has any."""
    first, _ = outcomes["batched"]
    assert sum(tokens for rows, tokens in first["calls"] if rows == 1 and tokens > 1) < 100
    assert len(outcomes["in turn"][1]["cached"]) == 1


def test_a_process_that_fails_ends_all_answers(outcomes):
    for answer in outcomes["failing"][0]["answers"]:
        assert "moe_mps: rank 1 (" in str(answer) and "closed its connection" in answer


@pytest.mark.slow("two processes load a model, whose prompts have over two tiles")
@pytest.mark.parametrize("bits", in_sweep([4, "k4v2"], [4]))
def test_tiles(bits, tmp_path):
    """Entries for layers of the other process keep as many tokens as these: prefixes are cut alike."""
    tiny_models.tiny_model("mixtral", head_dim=32).save_pretrained(tmp_path)
    model = torch_moe_mps.from_pretrained(str(tmp_path), kv_bits=bits)
    prompt = [number * number % 83 + 2 for number in range(400)]
    jobs = [
        {"ids": ids, **GREEDY, "max_new_tokens": 12}
        for ids in (prompt[:380], [*prompt[:300], 3, 3], prompt[:250], [*prompt[:378], 4])
    ]
    expected = [answers_of(model, [job], memory=0)[0][0] for job in jobs]
    common = {"folder": str(tmp_path), "kv_bits": bits, "jobs": jobs}
    for first, second in zip(
        *launch("engines", [common | how for how in ({"together": 3}, {"drafts": True})]), strict=True
    ):
        assert first["answers"] == expected
        assert first["calls"] == second["calls"] and first["cached"] == second["cached"]


@pytest.mark.sweep
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("architecture", ["qwen4_exp", "deepseek_v4", "glm5_next", "minimax_m3_vl"])
def test_layers_of_single_sequences(architecture, processes, tmp_path, monkeypatch):
    layers = dict.fromkeys(("num_hidden_layers", "num_layers"), processes)
    kinds = ("layer_types", "mlp_layer_types", "indexer_types")
    for sizes in (tiny_models.SIZES, *tiny_models.EXTRA.values()):
        for kind in kinds:
            if kind in sizes:
                monkeypatch.setitem(sizes, kind, [*sizes[kind], sizes[kind][-1]][:processes])
    with tiny_models.groups_of_32(), tiny_models.sizes(**layers):
        tiny_models.tiny_model(architecture).save_pretrained(tmp_path)
    model = torch_moe_mps.from_pretrained(str(tmp_path))
    expected = [answers_of(model, [job], memory=0)[0][0] for job in JOBS[:4]]
    wanted = [
        {"folder": str(tmp_path), "jobs": JOBS[:4], **how} for how in ({"together": 3}, {"drafts": True})
    ]
    for outcome in launch("engines", wanted, processes=processes)[0]:
        assert outcome["answers"] == expected


def test_several_answers_are_refused_in_every_process(outcomes):
    for found in outcomes["batched"]:
        assert "several answers at once need a model in one process, got a pipeline" in found["refused"]
