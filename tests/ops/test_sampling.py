"""sample: what it keeps against its definition and float64, and what it draws."""

import numpy as np
import pytest
import torch
from support.oracles import exact
from support.values import EACH_DTYPE, numbers

from torch_moe_mps.ops.families.sampling import _sample_with_flags, sample

pytestmark = pytest.mark.own_gpu
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
CASES = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7, "temperature": 2.5},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.6},
    {"top_p": 0.95},
    {"top_p": 0.0},
    {"top_p": 0.5, "min_p": 0.1},
    {"min_p": 0.05, "temperature": 1.5},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7},
    {"top_k": 10_000, "top_p": 0.999},
]


def processed(logits, temperature, top_k, top_p, min_p):
    """Scores in which tokens that are not kept have -inf. tests/upstream has what transformers keeps."""
    scores = logits.cpu().float() / temperature
    for row in scores.numpy():
        order = len(row) - 1 - np.argsort(-row[::-1], kind="stable")  # of equal ones, the last comes first
        kept = row >= row[order[min(top_k or len(row), len(row)) - 1]]
        order = order[kept[order]]
        weights = np.exp(row[order].astype(np.float64) - row.max())
        if top_p < 1.0:
            shares = (np.cumsum(weights) - weights) / weights.sum()  # of those before each one
            kept[order[1:][shares[1:] >= top_p]] = False
        kept[order[weights < min_p]] = False
        row[~kept] = -np.inf
    return scores


def sampled(logits, draws, **how):
    """Tokens and flags. `sample` gives the same tokens."""
    tokens, invalid = _sample_with_flags(logits, draws.to(logits.device), **how).cpu()
    how.pop("invalid", None)
    assert torch.equal(sample(logits, draws.to(logits.device), **how).cpu(), tokens)
    return tokens, invalid


def last_first(logits, temperature):
    """Draws with which the least probable of the tokens that are kept comes first."""
    scores = logits.cpu().float() / temperature
    return (scores - scores.amax(-1, keepdim=True)).exp().square().clamp(min=1e-37)


def test_what_is_kept(device):
    """The least probable token, and the first of several, says which are."""
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (1, 33, 2001):
        random = torch.randn(2, vocabulary, generator=generator) * 1.5
        tied = torch.randint(-3, 4, (2, vocabulary), generator=generator) / 2
        for logits in (random, random.bfloat16(), tied.half(), torch.zeros(1, vocabulary)):
            for case in CASES:
                how = OFF | case
                scores = processed(logits, **how)
                expected = scores.masked_fill(scores == -torch.inf, torch.inf).argmin(-1)
                draws = last_first(logits, how["temperature"])
                tokens, invalid = sampled(logits.to(device), draws, **how)
                assert torch.equal(tokens, expected), (vocabulary, logits.dtype, case)
                assert not invalid.any()


@pytest.mark.parametrize("vocabulary", [128_256, 151_937])
def test_a_large_vocabulary(device, vocabulary):
    """Against sums in float64, which float32 sums of as many tokens are not near enough to be."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    scores, order = (
        (exact(logits[0]) / 1.25).astype(np.float32),
        np.argsort(-logits[0].numpy(), kind="stable"),
    )
    weights = np.exp(scores.astype(np.float64) - scores.max())
    for top_k, top_p in ((0, 0.9), (50, 0.9), (2000, 0.4)):
        kept = order[: top_k or vocabulary]
        share = np.cumsum(weights[kept]) / weights[kept].sum()
        draws = last_first(logits, 1.25)
        tokens, _ = sampled(logits.to(device), draws, temperature=1.25, top_k=top_k, top_p=top_p)
        place = int(np.flatnonzero(kept == int(tokens))[0])
        assert share[place] >= top_p - 1e-6 and (place == 0 or share[place - 1] < top_p + 1e-6)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_tokens_are_those_of_multinomial(device, dtype):
    """Given the numbers that torch draws; rows of a larger tensor, and columns that lie apart."""
    wide = (numbers(9, 3, 1000, dtype=torch.float32) * 4).to(dtype)
    for logits in (wide[:, -1], wide[:, 1, 7:], wide[0].t()[:300].t(), wide[:3, 0, ::3]):
        for case in CASES[:5]:
            how = OFF | case
            probabilities = processed(logits, **how).softmax(-1)
            torch.manual_seed(3)
            expected = torch.multinomial(probabilities, 1).squeeze(1)
            torch.manual_seed(3)
            draws = torch.empty(logits.shape).exponential_()
            on_device = wide.to(device)
            moved = on_device.as_strided(logits.shape, logits.stride(), logits.storage_offset())
            tokens, _ = sampled(moved, draws, **how)
            assert torch.equal(tokens, expected), case


def test_rows_without_a_distribution(device):
    """They get the token that is asked for, and are noted; others stay."""
    logits = numbers(6, 900)
    logits[1, 800], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, :500], logits[5, 1:] = -torch.inf, -torch.inf
    draws = torch.empty(6, 900).exponential_(generator=torch.Generator().manual_seed(0))
    for case in CASES:
        tokens, invalid = sampled(logits.to(device), draws, **OFF | case, otherwise=17)
        assert invalid.tolist() == [0, 1, 1, 1, 0, 0]
        assert tokens[1:4].tolist() == [17] * 3 and tokens[4] >= 500 and tokens[5] == 0
        before = torch.tensor([0, 0, 1, 0, 1, 3], device=device)  # of the tokens before
        again, invalid = sampled(logits.to(device), draws, **OFF | case, otherwise=17, invalid=before)
        assert torch.equal(again, tokens) and invalid.tolist() == [0, 1, 1, 1, 1, 1]
    assert sampled(logits[:0].to(device), draws[:0])[0].shape == (0,)


def test_draws_that_are_no_numbers(device):
    """A token with NaN for its draw wins nothing, and where all have, the row has no distribution."""
    logits = torch.tensor([[1.0, 5.0, 2.0], [1.0, 5.0, 2.0]], device=device)
    draws = torch.tensor([[1.0, torch.nan, 1.0], [torch.nan] * 3])
    tokens, invalid = sampled(logits, draws, otherwise=1)
    assert tokens.tolist() == [2, 1] and invalid.tolist() == [0, 1]


def test_draws_of_zero(device):
    """Of torch's numbers on mps, one in about 3e7 is -0: no token wins by it that is not kept."""
    logits = torch.tensor([[-torch.inf, 2.0, 1.0, -torch.inf, -3.0]] * 3, device=device)
    draws = torch.ones(3, 5)
    draws[0, [0, 3]] = -0.0
    draws[1, 1] = draws[2, 1] = -0.0
    draws[2, 2] = 0.0
    tokens, wrong = sampled(logits, draws, **OFF)
    assert tokens.tolist() == [1, 1, 1] and wrong.tolist() == [0, 0, 0]
    (token,), (wrong,) = sampled(logits[:1], -torch.zeros(1, 5), **OFF | {"top_k": 1}, otherwise=4)
    assert (token, wrong) == (1, 0)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_the_token_with_the_highest_logit(device, dtype):
    """The first of equal ones, and +inf where there is no NaN; -inf alone and NaN have none."""
    logits = numbers(9, 1000, dtype=dtype).to(device)
    logits[1, [3, 700]] = 60.0
    logits[2, 5:900] = -torch.inf
    logits[3, [800, 20]] = torch.inf
    logits[4] = -torch.inf
    logits[5, 500], logits[5, 2] = torch.nan, torch.inf
    logits[6] = torch.nan
    logits[7], logits[7, 1] = -torch.inf, torch.finfo(dtype).min
    invalid = torch.zeros(9, dtype=torch.int64, device=device)
    invalid[8] = 1
    how = {"top_k": 3, "top_p": 0.5, "min_p": 0.5, "otherwise": 7}
    tokens, wrong = _sample_with_flags(logits, None, **how, invalid=invalid).cpu()
    assert wrong.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 1]
    for row in (0, 1, 2, 3, 7, 8):
        assert tokens[row] == int(np.argmax(logits[row].float().cpu().numpy()))
    assert tokens[[4, 5, 6]].tolist() == [7, 7, 7]


def test_the_temperature_makes_no_difference_without_draws(device):
    """The division would make these equal, or infinite."""
    logits = torch.zeros(4, 300)
    logits[0, 17], logits[0, 18] = 1.999900221824646, 1.9999003410339355  # neighbours, of equal thirds
    logits[1, 250] = 3e38
    logits[2, 9], logits[2, 8] = torch.inf, 3e38
    logits[3] = -3e38
    expected = torch.tensor([[18, 250, 9, 0], [0, 0, 0, 0]])
    for temperature in (1e-3, 3.0, 1e38):
        found = _sample_with_flags(logits.to(device), None, temperature=temperature).cpu()
        assert torch.equal(found, expected), temperature
