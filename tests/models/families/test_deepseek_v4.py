"""DeepSeek-V4: attention to a window and to compressed keys; its cache, captured tokens."""

import copy
import inspect
import itertools

import pytest
import torch
from support import families, tiny_models
from support.recognition import by_operators
from support.sweep import in_sweep, rows_in_sweep
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.families.deepseek_v4 import attention as compressed_attention
from torch_moe_mps.models.graphs import passes
from torch_moe_mps.models.upstream.calls import cache_argument

IDS = torch.randint(1, 90, (2, 34), generator=torch.Generator().manual_seed(5))
CUTS = ((34,), (9, 1, 1, 3, 1, 1, 1, 8, 1, 1, 1, 6), (1,) * 34)


def logits_of(model, ids, cuts, cache=None, begin=0, modes=(torch.no_grad,), positions=None):
    """`modes` take turns; `positions` gives those of a call from the cache's."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    parts = []
    for tokens, mode in zip(cuts, itertools.cycle(modes), strict=False):
        part, given = ids[:, begin : begin + tokens].to(model.device), {}
        if positions is not None:
            given["position_ids"] = positions(torch.arange(begin, begin + tokens)[None]).to(model.device)
        with mode():
            logits = model(part, **cache_argument(model, cache), use_cache=True, **given).logits
        parts.append(logits.detach().cpu())
        begin += tokens
    return torch.cat(parts, 1), cache


def states_of(cache) -> list:
    """What the layers of transformers' classes hold."""
    items = [item for layer in copy.deepcopy(cache).layers for item in sorted(vars(layer).items())]
    values = [value for name, value in items if name != "is_in_order"]  # of our layers alone
    values += [each for value in values if type(value) is dict for each in value.values()]
    return [value for value in values if isinstance(value, torch.Tensor | int)]


def assert_same_states(cache, own, atol=2e-5):
    found, right = states_of(cache), states_of(own)
    assert len(found) == len(right) > 20
    for ours, theirs in zip(found, right, strict=True):
        if isinstance(theirs, int):
            assert ours == theirs
        else:
            assert ours.shape == theirs.shape and torch.allclose(ours.float(), theirs.float(), 0, atol)


@pytest.fixture(scope="module")
def own():
    """The model in float64, which runs transformers' code, and its logits."""
    model = tiny_models.tiny_model("deepseek_v4").double()
    model.set_experts_implementation("eager")
    logits, cache = logits_of(model, IDS, CUTS[1])
    return model, logits, cache


def accelerated(own):
    model = copy.deepcopy(own[0]).float()
    report = str(torch_moe_mps.accelerate(model))
    assert report.count("_pool_window_") == 2 and "_index_topk" in report
    return model


def ours_of(model, *args, **options):
    """What `logits_of` gives of an accelerated model, whose operators ran."""
    return by_operators(lambda: logits_of(model, *args, **options), "_pool_window_", "_index_topk")


@pytest.mark.parametrize("cuts", in_sweep(CUTS, CUTS[1:2]), ids=len)
def test_any_cut_gives_what_transformers_gives(own, cuts):
    logits, cache = ours_of(accelerated(own), IDS, cuts)
    assert (logits - own[1]).abs().max() < 1e-4
    assert_same_states(cache, own[2])


MODES = {
    "gradients": (torch.enable_grad,),
    "in turn": (torch.no_grad, torch.enable_grad, torch.enable_grad, torch.no_grad, torch.inference_mode),
    "inference first": (torch.inference_mode, *(torch.no_grad,) * 40),
}


@pytest.mark.parametrize(
    ("mode", "cuts"), rows_in_sweep(itertools.product(MODES, CUTS[1:]), [("in turn", CUTS[1])])
)
def test_any_mode_gives_what_transformers_gives(own, mode, cuts):
    """With gradients its own code runs, on a cache that grows."""
    run = logits_of if mode == "gradients" else ours_of
    logits, cache = run(accelerated(own), IDS, cuts, modes=MODES[mode])
    assert (logits - own[1]).abs().max() < 1e-4
    if torch.enable_grad not in MODES[mode]:  # torch does not copy what has gradients
        assert_same_states(cache, own[2])


POSITIONS = {
    "behind": lambda positions: positions + 5,
    "twice": lambda positions: 2 * positions,
    "backwards": lambda positions: positions.flip(1),
    "lower later": lambda positions: positions - 8 * (positions > 11).long(),
    "of rows": lambda positions: torch.cat((positions, positions + 3)),
}


@pytest.mark.parametrize("kind", in_sweep(POSITIONS, ("lower later", "of rows")))
def test_positions_by_hand(own, kind):
    """Which entries a token sees follows from them, and not from the cache.

    Eager code runs from the first call on whose positions are not in order.
    """
    cuts, positions = (9, 1, 1, 3, 1, 1, 5), POSITIONS[kind]
    right, plain = logits_of(own[0], IDS, cuts, positions=positions)
    run = ours_of if kind == "lower later" else logits_of
    logits, cache = run(accelerated(own), IDS, cuts, positions=positions)
    assert (logits - right).abs().max() < 1e-4
    assert_same_states(cache, plain)
    cache.reset()
    logits, _ = ours_of(accelerated(own), IDS, cuts, cache, positions=lambda same: same)
    assert (logits - own[1][:, :21]).abs().max() < 1e-4 and all(l.is_in_order for l in cache.layers)


def test_a_cache_goes_from_one_code_to_the_other(own):
    """And back: by a copy, and by gradients."""
    model, plain = accelerated(own), copy.deepcopy(own[0]).float()
    _, cache = ours_of(model, IDS, (7, 1))
    logits, copied = logits_of(plain, IDS, (3, 1, 1), copy.deepcopy(cache), 8)
    assert (logits - own[1][:, 8:13]).abs().max() < 1e-4
    logits, copied = ours_of(model, IDS, (1, 1, 4, 1), copied, 13)
    assert (logits - own[1][:, 13:20]).abs().max() < 1e-4
    with torch.enable_grad():
        logits = model(IDS[:, 20:22], **cache_argument(model, copied), use_cache=True).logits
    assert (logits - own[1][:, 20:22]).abs().max() < 1e-4
    logits, copied = ours_of(model, IDS, (1, 1, 1, 5), copied, 22)
    assert (logits - own[1][:, 22:30]).abs().max() < 1e-4


def test_reordered_beams(own):
    model = accelerated(own)
    order = torch.tensor([1, 0, 1])
    right, plain = logits_of(own[0], IDS, (9, 1))
    _, cache = ours_of(model, IDS, (9, 1))
    for each in (plain, cache):
        each.reorder_cache(order)
    ids = IDS[order]
    expected, plain = logits_of(own[0], ids, (1, 1, 3, 1), plain, 10)
    logits, cache = ours_of(model, ids, (1, 1, 3, 1), cache, 10)
    assert (logits - expected).abs().max() < 1e-4
    assert_same_states(cache, plain)
    cache.reset()
    assert (logits_of(model, ids, (9, 1), cache)[0][:2] - right[order[:2]]).abs().max() < 1e-4


def test_it_cannot_go_back(own):
    _, cache = logits_of(accelerated(own), IDS, (3,))
    with pytest.raises(RuntimeError, match="a cache of compressed keys cannot be cropped"):
        cache.crop(-1)


@pytest.mark.parametrize(
    "name, ours, theirs",
    [
        ("DeepseekV4Attention", "cos, -sin)", "cos, sin)"),
        ("DeepseekV4HCACompressor", "+ self.position_bias", "- self.position_bias"),
        ("DeepseekV4CSACompressor", "chunk_kv[:, :-1, :, :", "chunk_kv[:, 1:, :, :"),
        ("DeepseekV4Indexer", "(position_ids + 1) //", "(position_ids + 2) //"),
    ],
)
def test_another_formula_stays(monkeypatch, own, name, ours, theirs):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as file

    source = inspect.getsource(getattr(file, name))
    assert ours in source
    spaces = dict(vars(file))
    exec(source.replace(ours, theirs), spaces)
    monkeypatch.setattr(getattr(file, name), "forward", spaces[name].forward)
    found = [compressed_attention.rewrite_compressed_attention(l.self_attn) for l in own[0].model.layers]
    assert None in found


def captured_model(dtype):
    with tiny_models.sizes(head_dim=64):
        model = tiny_models.tiny_model("deepseek_v4", dtype).to("mps")
    torch_moe_mps.accelerate(model)
    return model


@pytest.mark.sweep
def test_captured_tokens(simulated, monkeypatch):
    """They have the bits of tokens that run module by module, over ends of windows of all kinds."""
    monkeypatch.setattr(passes, "PASSES", ())  # which join roundings
    found = []
    for capture in ("0", "1"):
        monkeypatch.setenv("MOE_MPS_CAPTURE", capture)
        model = captured_model(torch.bfloat16)
        logits, cache = logits_of(model, IDS[:1], (6, *(1,) * 20))
        found.append((logits, cache))
        captures = captures_of(model)
        assert (captures is not None and captures.programs != []) == (capture == "1")
    (logits, cache), (captured, of_captured) = found
    assert torch.equal(logits, captured)
    assert_same_states(of_captured, cache, 0.0)


@pytest.mark.sweep
def test_positions_by_hand_behind_captured_tokens(simulated, monkeypatch):
    """generate() gives positions that follow from the cache; any others are looked at, token by token."""
    monkeypatch.setenv("MOE_MPS_CAPTURE", "1")
    model, cuts = captured_model(torch.float32), (6, *(1,) * 8)
    with tiny_models.sizes(head_dim=64):
        own = tiny_models.tiny_model("deepseek_v4").double()
    own.set_experts_implementation("eager")
    own.load_state_dict(model.state_dict())
    generation = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # The third token is captured or, where something else in the process changes meanwhile, the eighth.
    model.generate(IDS[:1, :6].to("mps"), **generation | {"max_new_tokens": 12})
    assert captures_of(model).reason is None and captures_of(model).programs
    for positions in (lambda same: same - 4 * (same > 9), lambda same: same):
        right, _ = logits_of(own, IDS[:1], cuts, positions=positions)
        logits, _ = logits_of(model, IDS[:1], cuts, positions=positions)
        assert (logits - right).abs().max() < 1e-3
        assert "position_ids" in captures_of(model).reason
    answers = []
    for each in (own, model):
        _, cache = logits_of(each, IDS[:1], (8,))
        positions = torch.tensor([[*range(8), 2]], device=each.device)
        asked = {
            **cache_argument(each, cache),
            "position_ids": positions,
            "attention_mask": torch.ones_like(positions),
        }
        result = {"output_logits": True, "return_dict_in_generate": True}
        answer = each.generate(IDS[:1, :9].to(each.device), **asked, **result, **generation)
        answers.append(torch.cat(answer.logits).cpu())
    assert (answers[0] - answers[1]).abs().max() < 1e-3


NAME = "deepseek_v4"


@pytest.mark.slow("a model of streams or indexers is saved, loaded and answers")
def test_a_checkpoint_loads_and_its_tokens_are_those_of_eager_code(tmp_path):
    families.check_tokens(NAME, tmp_path)


@pytest.mark.sweep
@pytest.mark.usefixtures("captured")
def test_launches_of_a_layer(simulated):
    captured = {"heavily compressed, hash moe": 26, "compressed sparse, moe": 19}
    of_modules = {"heavily compressed, hash moe": 43, "compressed sparse, moe": 40}
    families.check_launches(simulated, NAME, captured, of_modules)
