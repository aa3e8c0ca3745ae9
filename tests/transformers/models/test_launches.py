"""How many kernels a token launches, layer by layer: what binds decode on a Mac after the bytes."""

from collections import Counter

import pytest
import torch
from support import tiny_models
from support.families import check_launches, check_types, of_layers
from support.launches import (
    captured_by_type,
    captured_call,
    captured_token,
    kernels_of,
    launches_by_type,
    model_on_mps,
    of_aten,
    operators_of_token,
    own_interfaces,
    prompted,
)
from support.mtp import with_mtp
from support.speculative import Answered, prompts, settings
from support.sweep import in_sweep, rows_in_sweep

import torch_moe_mps
from torch_moe_mps.models.caches.batched import BatchedCache
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.serving.speculative.mtp import Mtp
from torch_moe_mps.transformers.deferrable import deferrable_layers

# Models with LayerNorms: in 4 bit, and dense, where no product takes the sum in front of the norm.
LAYER_NORMS = {
    ("phi", 4): 6, ("phi", None): 11, ("starcoder2", 4): 7, ("starcoder2", None): 10,
    ("stablelm", 4): 8, ("stablelm", None): 9,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("captured")


def accelerated(architecture: str, **overrides: object):
    model = model_on_mps(architecture, **overrides)
    torch_moe_mps.accelerate(model, bits=4, group_size=32)
    return model


def test_launches_of_a_layer(simulated):
    """Of Cohere's model; tests/models/families has those of others."""
    captured, of_modules = {"dense": 9, "sparse": 8, "outside": 4}, {"dense": 13, "sparse": 21}
    check_launches(simulated, "cohere2_moe", captured, of_modules)


@pytest.mark.slow("a model of tiny layers is captured three times")
def test_norms_in_float32_launch_nothing_more(simulated):
    """In float16, unlike bfloat16, from_pretrained keeps those of gpt-oss in float32."""
    model = accelerated("gpt_oss", dtype=torch.float16)
    assert model.model.norm.weight.dtype == torch.float32 != model.dtype
    check_types(captured_by_type(simulated, model), {"sliding": 9, "full": 6, "outside": 2})


# Launches of each type of layer for a token of each of eight rows, whose number is a symbol. With the first
# layer count the tables of angles, as above.
EIGHT_ROWS = {
    "qwen3_moe": {"": 9},
    "llama": {"": 7},
    "qwen3_next": {"linear": 13, "full": 15},
    "gpt_oss": {"sliding": 12, "full": 9},
}


@pytest.mark.slow("three models of tiny layers are captured")
@pytest.mark.parametrize("architecture", in_sweep(EIGHT_ROWS, ("qwen3_moe", "qwen3_next")))
def test_launches_of_a_layer_for_eight_rows(simulated, architecture):
    found = captured_by_type(simulated, accelerated(architecture), rows=8)
    check_types(of_layers(found), EIGHT_ROWS[architecture])


# Launches of a token of one sequence and of four in one step, whose layers that count from a sequence's first
# token run once for each: two layers of each model. docs/models.md has these numbers.
SEQUENCES = {
    "deepseek_v4": (50, 122),
    "glm5_next": (36, 78),
    "minimax_m3_vl": (19, 37),
    "qwen4_exp": (52, 101),
}


@pytest.mark.slow("a model of tiny layers is captured twice")
@pytest.mark.parametrize("architecture", in_sweep(SEQUENCES, ("minimax_m3_vl",)))
def test_launches_of_sequences_with_layers_of_their_own(simulated, architecture):
    model, found = accelerated(architecture), {}
    captures, token = captures_of(model), torch.full((4, 1), 5, device="mps")
    for count in (1, 4):
        captures.clear()
        rows = BatchedCache(model, deferrable_layers(model))
        with simulated.dropped(), torch.no_grad():
            for length in (9, 17, 25, 33)[:count]:
                rows.admit(prompted(model, [*range(1, length + 1)]), length)
            for _ in range(9):
                with simulated.trace() as commands:
                    model(token[:count], **cache_argument(model, rows.cache), **rows.arguments())
                rows.advance()
                if captures.reason is None:  # a token that fills a window is another call
                    found[count] = (of_aten(model) + kernels_of(commands)).total()
    assert (found[1], found[4]) == SEQUENCES[architecture]


# Launches of each type of layer for two to four tokens of one conversation, of which all but the first are
# drafts: experts and attention, windows, latents, recurrent states. Those of a token: ../families.
VERIFIED = {
    "llama": {"": 8, "outside": 3},
    "qwen3_moe": {"": 10, "outside": 3},
    "gpt_oss": {"sliding": 13, "full": 10, "outside": 3},
    "deepseek_v3": {"dense": 15, "sparse": 16, "outside": 3},
    "qwen3_next": {"linear": 23, "full": 16, "outside": 3},
    "kimi_linear": {"linear, dense": 12, "full, sparse": 17, "outside": 3},
    "granitemoehybrid": {"linear": 13, "full": 12, "outside": 4},
    "jamba": {"linear, mamba": 13, "full, attention": 10, "outside": 3},
    "lfm2_moe": {"conv": 12, "full": 13, "outside": 3},
}


@pytest.mark.slow("two models of tiny layers are captured")
@pytest.mark.parametrize("architecture", in_sweep(VERIFIED, ("gpt_oss", "deepseek_v3")))
def test_launches_of_a_layer_for_drafts(simulated, architecture):
    """One program has steps of all these widths, and launches as much for each."""
    model, counts = accelerated(architecture), []
    check_types(captured_by_type(simulated, model, tokens=(2, 3, 4)), VERIFIED[architecture])
    with simulated.dropped():
        call = captured_call(model, tokens=(2, 3, 4))
        for tokens in (2, 3, 4):
            with simulated.trace() as commands:
                call(tokens)
            counts.append(kernels_of(commands).total())
    assert counts[0] == counts[1] == counts[2] > 0 and len(captures_of(model).programs) == 1


# Models whose states lag: by the delta rule, a decay for each channel, Mamba-2, Mamba-1, and a
# convolution alone.
LAGGING = ("qwen3_next", "kimi_linear", "granitemoehybrid", "jamba", "lfm2_moe")
# A state that lags is not joined with its tokens in front of a convolution.
LESS = {"qwen3_next": {"linear": 20}, "lfm2_moe": {"conv": 9}}


@pytest.mark.slow("a model of tiny layers is captured four times")
@pytest.mark.parametrize("architecture", in_sweep(LAGGING, ("granitemoehybrid",)))
def test_states_that_lag_launch_nothing_more(simulated, architecture):
    """The kernels of a token and of several take in what the tokens before have left."""
    model = accelerated(architecture)
    assert deferrable_layers(model)
    found, several = (
        captured_by_type(simulated, model, tokens=tokens, lags=True) for tokens in ((1,), (2, 3, 4))
    )
    assert found == captured_by_type(simulated, model)
    check_types(several, VERIFIED[architecture] | LESS.get(architecture, {}))


STATES = {"of the last layer": -1, "of two layers": (1, 2)}  # numbers of states that drafts rest on


@pytest.mark.slow("a model of tiny layers is captured four times")
@pytest.mark.parametrize("architecture", in_sweep(VERIFIED, ("qwen3_next",)))
@pytest.mark.parametrize("tokens", [(1,), (2, 3, 4)], ids=["one", "several"])
def test_states_for_drafts_launch_next_to_nothing(simulated, architecture, tokens):
    """At most the sums and norms that a product has taken in where nobody asks for what is between."""
    model = accelerated(architecture)
    plain = captured_token(simulated, model, tokens=tokens).total()
    for name, states in STATES.items():
        found = captured_token(simulated, model, tokens=tokens, output_hidden_states=states)
        assert found.total() <= plain + 2, (name, found)


# Launches of one token of a layer of the checkpoint that drafts, with embedding and head.
DRAFTING = {"deepseek_v3": 19, "mellum": 15}


@pytest.mark.slow("models of tiny layers and their MTP layers are captured, and answer")
@pytest.mark.parametrize("architecture", in_sweep(DRAFTING, ("deepseek_v3",)))
def test_launches_of_a_draft(simulated, monkeypatch, tmp_path, architecture):
    """Programs, too: one of the model's steps of several tokens, and of its layer one of a token, and one
    where keys have moved on.
    """
    counts, own = [], Mtp._called

    def counted(*arguments):
        with simulated.trace() as commands:
            result = own(*arguments)
        counts.append(kernels_of(commands).total())
        return result

    monkeypatch.setattr(Mtp, "_called", counted)
    with with_mtp(architecture, tmp_path) as cls:
        model = cls.from_pretrained(tmp_path, dtype=torch.bfloat16).to("mps").eval()
        torch_moe_mps.accelerate(model, bits=4, group_size=32)
        source = Mtp(model, 0)
        (step,) = source._steps
        Answered(model, prompts(1), [settings(12)], source, width=3)
    others = operators_of_token(step).keys() - {*dir(torch.ops.moe_mps)}
    assert counts.count(min(counts)) > 5 and min(counts) + len(others) <= DRAFTING[architecture]
    assert len(captures_of(model).programs) == 1 and len(captures_of(step).programs) <= 2


@pytest.mark.parametrize(("architecture", "bits"), rows_in_sweep(LAYER_NORMS, [("phi", None)]))
def test_launches_of_a_layer_with_layer_norms(simulated, architecture, bits):
    """A LayerNorm and the sum of the residual stream in front of it are one."""
    model = model_on_mps(architecture)
    torch_moe_mps.accelerate(model, bits=bits, group_size=bits and 32)
    (layer,) = of_layers(captured_by_type(simulated, model)).values()
    assert sum(layer.values()) == LAYER_NORMS[architecture, bits], dict(layer)


# Launches of a layer whose indexer chooses 16 of 60 keys: not at most but exactly, so that a change is seen.
CHOOSING = {
    "axk2": {"dense": 23, "sparse": 25},
    "deepseek_v32": {"dense": 15, "sparse": 13},
    "hy_v4": {"dense": 23, "sparse": 21},
}


@pytest.mark.slow("a model is captured three times")
@pytest.mark.parametrize("architecture", in_sweep(CHOOSING, ("axk2",)))
def test_launches_of_a_layer_that_chooses_keys(simulated, architecture):
    with tiny_models.sizes(index_topk=16, index_n_heads=16, index_head_dim=32):
        model = accelerated(architecture)
    found = of_layers(captured_by_type(simulated, model, length=60))
    assert {kind: sum(layer.values()) for kind, layer in found.items()} == CHOOSING[architecture]
    assert all(layer["index_select_bf16"] == 1 for layer in found.values())


# Launches of layers that choose 2 of 3 pools of 16 keys, by the tokens in front: in the middle of a pool, and
# at its end, where a token makes the pool's mean, turns it and keeps it. And those of a token's tables of
# angles, which all layers share.
CHOOSING_POOLS = {
    50: {"linear": 17, "indexed": 20, "tables": 2},
    60: {"linear": 17, "indexed": 22, "tables": 4},
}


@pytest.mark.slow("a model is captured five times")
@pytest.mark.parametrize("tokens", in_sweep(CHOOSING_POOLS, (60,)))
def test_launches_of_a_layer_that_chooses_pools(simulated, monkeypatch, tokens):
    sizes = {"indexer_compress_ratio": 16, "indexer_budget": 32, "indexer_head_dim": 32}
    sizes["layer_types"] = ["linear_attention", *["full_attention"] * 2]
    extra = tiny_models.EXTRA["qwen4_exp_text"] | sizes
    monkeypatch.setitem(tiny_models.EXTRA, "qwen4_exp_text", extra)
    with tiny_models.sizes(num_hidden_layers=3):
        model = accelerated("qwen4_exp")
    found = captured_by_type(simulated, model, length=tokens)
    every_layer = captured_token(simulated, model, length=tokens)
    found["tables"] = every_layer - sum(
        (found[kind] for kind in ("outside", "linear", "indexed", "indexed")), Counter()
    )
    assert {kind: found[kind].total() for kind in CHOOSING_POOLS[tokens]} == CHOOSING_POOLS[tokens]
    assert found["indexed"]["index_select_bf16"] == 1 and found["tables"].keys() == {"pointwise_bf16"}


# Launches of a layer of experts, with the norms beside it in Gemma 4; and of an MLP in its place.
_EXPERTS = Counter(
    ["normed_logits_few_bf16", "matmul_rows_chosen8_affine4_32_bf16", "expert_down_affine4_32_bf16"]
)
_MLP = Counter(["matmul_rows_normed_affine4_32_bf16", "matmul_rows_affine4_32_bf16"])
# Models without experts, with what they have in place of a relative's experts.
DENSE_RELATIVES = {
    "qwen3_5": ("qwen3_5_moe", {}, _EXPERTS, _MLP),
    "gemma4": (
        "gemma4",
        {"enable_moe_block": False},
        _EXPERTS + Counter(["rms_norm_bf16", "norm_add_bf16"]),
        Counter(),
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", DENSE_RELATIVES)
def test_a_dense_layer_launches_what_its_relative_does_beside_experts(simulated, architecture):
    """Kernel by kernel, so that no row of one family is missing in the other."""
    relative, overrides, experts, mlp = DENSE_RELATIVES[architecture]
    dense = of_layers(captured_by_type(simulated, accelerated(architecture, **overrides)))
    sparse = of_layers(captured_by_type(simulated, accelerated(relative)))
    assert dense.keys() == sparse.keys() and len(dense) == 2
    for kind, layer in sparse.items():
        assert not experts - layer, kind
        assert dense[kind] == layer - experts + mlp, kind


def test_launches_of_a_layer_of_a_small_gemma4(simulated):
    """Without keys of its own. 4 are for the table of each layer: gate, product, projection and norm."""
    model = accelerated("gemma4", **tiny_models.SMALL_GEMMA4)
    found = of_layers(captured_by_type(simulated, model))
    assert {kind: sum(layer.values()) for kind, layer in found.items()} == {"sliding": 12, "full": 12}


# Of a layer for a prompt, which runs module by module; the model's own code launches 59 to 174.
PROMPT = {
    "mixtral": {"": 20},
    "qwen3_moe": {"": 23},
    "gpt_oss": {"sliding": 23, "full": 20},
    "glm4_moe": {"dense": 15, "sparse": 22},
    "deepseek_v3": {"dense": 19, "sparse": 26},
    "gemma4": {"sliding": 44, "full": 41},
    "qwen3_next": {"linear": 45, "full": 32},
}


@pytest.mark.parametrize("architecture", in_sweep(PROMPT, ("deepseek_v3", "gemma4", "qwen3_next")))
def test_launches_of_a_prompt(simulated, architecture):
    check_types(launches_by_type(simulated, accelerated(architecture), prompt=200), PROMPT[architecture])


def test_a_model_runs_its_own_code_beside_accelerated_ones(simulated):
    """With `own_interfaces`, whose indexers read transformers' mask and not a CausalMask."""
    model, other = model_on_mps("deepseek_v32"), tiny_models.tiny_model("llama")

    def counted():
        with own_interfaces():
            return launches_by_type(simulated, model)

    before = counted()
    torch_moe_mps.accelerate(other)
    assert counted() == before != launches_by_type(simulated, model)
