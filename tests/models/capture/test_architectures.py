"""Captured tokens of every architecture: the bits of what runs module by module, or roundings beside them."""

import copy
import itertools
import pickle

import pytest
import torch
from support import tiny_models
from support.capturing import PROMPT, accelerated, answer, assert_equal, pair, without_capture
from support.models import Conversation, assert_close, generate, output, prompt, tiny
from support.sweep import in_sweep, rows_in_sweep
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import torch_moe_mps
from torch_moe_mps.models.attention.attention import NAME
from torch_moe_mps.models.basics import tensors
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

pytestmark = pytest.mark.usefixtures("captured")


# One classifies tokens without a cache.
ARCHITECTURES = sorted(
    {*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES} - {"openai_privacy_filter"}
)
ARCHITECTURES += ["dbrx", "jetmoe", "llama4", "longcat_flash", "step3p7"]

QUANTISED_SIZES = {"q_lora_rank": 32, "kv_lora_rank": 32, "shared_expert_intermediate_size": 64}


# Their indexers make masks for torch's attention; a batch with padding runs module by module.
OWN_MASKS = {"glm5_next", "minimax_m3_vl", "qwen4_exp"}

# By padding. Llama 4's masks of chunks ask where it ends.
ONE_BY_ONE = {0: set(), 4: {"deepseek_v4", "unlimited_ocr", "llama4", *OWN_MASKS}}


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", [*filter("inkling2".__ne__, ARCHITECTURES)])
@pytest.mark.parametrize("device", ["mps"], indirect=True)
@torch.no_grad()
def test_every_architecture(architecture, device, same_bits):
    """Without Inkling 2, which needs a router in float32 beside layers in bfloat16."""
    with tiny_models.sizes(**QUANTISED_SIZES):
        model, own = pair(architecture, device, torch.bfloat16, bits=4, group_size=32)
    captures_of(model)._user_code = False  # all that runs is a library's
    assert_equal(answer(model, device), answer(own, device))
    captures = captures_of(model)
    assert captures.programs, str(captures)


@pytest.mark.sweep
@pytest.mark.parametrize(("padding", "bits"), [(0, 4), (4, None)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_passes_on_every_architecture(architecture, padding, bits):
    """As close to the model's own code as roundings allow; in 4 bit, to what runs module by module."""
    with tiny_models.sizes(**QUANTISED_SIZES):
        model = accelerated(architecture, "cpu", bits=bits, group_size=32 if bits else None)
        own = tiny(architecture) if bits is None else without_capture(copy.deepcopy(model))
    for each in (model, own) if bits else (model,):
        if architecture not in OWN_MASKS:
            each.set_attn_implementation(NAME)  # on a CPU, too
    assert_close(answer(model, "cpu", padding), answer(own, "cpu", padding), 2e-5)
    if architecture not in ONE_BY_ONE[padding]:
        assert captures_of(model).reason is None, captures_of(model).reason


# Architectures whose cache has rows that stand for several tokens, the programs for tokens behind the prompt,
# and the token from which on all run as one. Where the model's own code makes a row, the token that completes
# it is of another kind, and the third of them is captured.
KINDS_OF_TOKENS = {"deepseek_v4": (1, 2), "minimax_m3_vl": (1, 2), "glm5_next": (2, 15), "qwen4_exp": (2, 7)}


@pytest.mark.parametrize("architecture", in_sweep(KINDS_OF_TOKENS, ("deepseek_v4",)))
@torch.no_grad()
@pytest.mark.on("cpu")
def test_tokens_that_choose_from_rows_for_several(device, architecture, same_bits):
    rates = dict.fromkeys(("index_kpool", "indexer_compress_ratio", "index_block_size"), 4)
    chosen = {"index_topk": 8, "indexer_budget": 8, "index_topk_blocks": 2}
    if architecture == "deepseek_v4":  # whose rates are 2 and 3
        rates, chosen = {}, {"index_topk": 3}
    with tiny_models.sizes(**rates, **chosen, index_head_dim=16):
        model, own = pair(architecture, device, torch.bfloat16)
    captures = captures_of(model)
    ids, mine, theirs, by_modules = prompt(1, PROMPT).to(device), [], [], []
    cache, other = (
        cache_among(each(ids, **cache_argument(each, DynamicCache(config=each.config))))
        for each in (model, own)
    )
    programs, first = KINDS_OF_TOKENS[architecture]
    for number, token in enumerate(torch.arange(first + 8, device=device).view(-1, 1, 1)):
        captures.reason = "none ran"
        mine.append(model(token, **cache_argument(model, cache))[0].cpu())
        theirs.append(own(token, **cache_argument(own, other))[0].cpu())
        if captures.reason is not None:
            by_modules.append(number)
    assert_equal(mine, theirs)
    assert len(captures.programs) == programs
    assert by_modules[-1] == first - 1


@torch.no_grad()
def test_a_program_runs_as_long_as_an_indexer_may_choose_all_keys(monkeypatch):
    """Masks of indexers are cut out of the causal mask, of as many keys as there are."""
    monkeypatch.setattr(tensors, "_constants", {})
    model = accelerated("axk2", "cpu")
    Conversation(model, length=3).tokens(20)
    captures = captures_of(model)
    assert len(captures.programs) == 1 and captures.reason is None


ON_BOTH = ("qwen3_moe", "qwen3_next", "gemma4")

ON_THE_CPU = ("mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "deepseek_v2")


def tokens_behind_passes(architecture, device, batch):
    """As close to those of the model's own code, with the values of 4 bits, as roundings allow."""
    with tiny_models.sizes(linear_num_value_heads=16, **QUANTISED_SIZES):
        model, own = accelerated(architecture, device, bits=4, group_size=32), tiny(architecture)
    tiny_models.dense_twin(own, copy.deepcopy(model).cpu())
    mine, theirs = Conversation(model, batch=batch), Conversation(own, batch=batch)
    assert_close(mine.tokens(5), theirs.tokens(5), 2e-5)
    assert captures_of(model).programs


@torch.no_grad()
@pytest.mark.on("cpu")
@pytest.mark.parametrize("architecture", in_sweep(ON_BOTH, ("qwen3_next",)))
def test_tokens_behind_passes(architecture, device):
    tokens_behind_passes(architecture, device, 1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "batch"), rows_in_sweep(itertools.product(ON_THE_CPU, (2, 1)), [("deepseek_v3", 2)])
)
def test_tokens_behind_passes_of_more(architecture, batch):
    tokens_behind_passes(architecture, "cpu", batch)


# Architectures with own code for a padded batch -> why its tokens are not captured; None where they are.
PADDED = {
    "deepseek_v4": "the call takes attributes from a layer of its cache",
    "minimax_m3_vl": None,
    "unlimited_ocr": None,
    "glm5_next": "it asks for values that only the GPU knows (aten.nonzero.default)",
    "qwen4_exp": "it asks for values that only the GPU knows (aten.nonzero.default)",
}


@torch.no_grad()
@pytest.mark.parametrize("architecture", in_sweep(PADDED, ["minimax_m3_vl"]))
def test_own_code_for_padded_batches(architecture, same_bits, caplog, recwarn):
    model = accelerated(architecture, "cpu")
    ids, shown = prompt(2, 24), torch.ones(2, 24, dtype=torch.int64)
    shown[1, :3] = 0
    results = []
    for each in (model, without_capture(copy.deepcopy(model))):
        cache = DynamicCache(config=model.config)
        parts = [slice(0, 9), *(slice(n, n + 1) for n in range(9, 24))]
        given = [(ids[:, part], shown[:, : part.stop].contiguous()) for part in parts]
        results.append([output(each, i, attention_mask=m, **cache_argument(each, cache)) for i, m in given])
    assert_equal(*results)
    reason = PADDED[architecture]
    assert captures_of(model).reason == reason
    said = [text for text in map(str, (warning.message for warning in recwarn)) if "be captured" in text]
    assert len(said) == (reason is not None) and all(text.endswith(f": {reason}") for text in said)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]  # torch's own


@torch.no_grad()
def test_a_model_that_would_make_a_cache_with_a_list_of_states():
    """MiniMax-01 in `generate`: its tokens are captured. Its cache is of its class, in a pickle as well,
    and goes on after `restore`."""
    own = tiny("minimax")
    model = accelerated("minimax", "cpu")
    assert torch.equal(generate(model, prompt(1)), generate(own, prompt(1)))
    assert captures_of(model).reason is None and captures_of(model).programs
    cache = model(prompt(1), use_cache=True).cache
    assert isinstance(cache, MiniMaxCache) and not cache.is_croppable
    own_cache = own(prompt(1), use_cache=True).cache
    token, cache = prompt(1, 1), pickle.loads(pickle.dumps(cache))
    for restored in (False, True):
        if restored:
            torch_moe_mps.restore(model)
        expected = own(token, cache=own_cache, use_cache=True).logits
        assert_close(model(token, cache=cache, use_cache=True).logits, expected, 1e-5)


def test_a_model_that_keeps_its_states_runs_module_by_module_and_says_where(simulated):
    """RecurrentGemma has them in attributes; a recording that failed leaves them as they were."""
    model = tiny_models.other_model("recurrent_gemma")
    expected = generate(model, prompt(1))
    torch_moe_mps.accelerate(model)
    assert torch.equal(generate(model, prompt(1)), expected)
    assert captures_of(model).reason == "a call changes model.layers.0.temporal_block.conv1d_state"


@pytest.mark.sweep
@torch.no_grad()
@pytest.mark.on("mps")
@pytest.mark.parametrize(
    "architecture,sizes,bits",
    [
        ("gpt_oss", {"head_dim": 32, "sliding_window": 12}, 8),
        pytest.param("deepseek_v3", {"kv_lora_rank": 32}, None, marks=pytest.mark.sweep),
        pytest.param(
            *("deepseek_v3", {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32}, 8),
            marks=pytest.mark.sweep,
        ),
        pytest.param("qwen3_next", {}, None, marks=pytest.mark.sweep),
    ],
)
def test_caches(architecture, sizes, bits, device, same_bits):
    """In 8 bits, of latents in one memory, with recurrent states."""
    model, own = pair(architecture, device, torch.bfloat16, sizes, bits=4, group_size=32, kv_bits=bits)
    mine, theirs = Conversation(model, batch=2), Conversation(own, batch=2)
    if bits:
        assert all(isinstance(layer.keys, QuantizedStates) for layer in mine.cache.layers)
    assert_equal(mine.tokens(14), theirs.tokens(14))
    assert captures_of(model).programs, str(captures_of(model))
    for layer, other in zip(mine.cache.layers, theirs.cache.layers, strict=True):
        assert vars(layer).keys() == vars(other).keys()
