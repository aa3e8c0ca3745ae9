"""index_topk: the sets that it chooses against scores in float64, and exactly where scores are exact."""

import itertools

import pytest
import torch
from support.oracles_operators import checked
from support.values import DTYPES, EACH_DTYPE, numbers

from torch_moe_mps.ops.families.index import _index_topk

# B, T, Hi, D, S, top_k: one of everything, odd sizes, more heads than are read at a time, more keys than a
# threadgroup takes, as many as are chosen, fewer than tokens.
SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 4, 8, 33, 5),
    (1, 1, 64, 128, 300, 64),
    (1, 2, 17, 30, 1500, 700),
    (1, 5, 2, 256, 40, 40),
    (2, 2, 3, 7, 20, 64),
    (1, 7, 2, 16, 4, 2),
    (3, 1, 4, 64, 2100, 1),
]


def arguments(device, dtype, batch, tokens, heads, width, keys):
    q, k = numbers(batch, tokens, heads, width, dtype=dtype), numbers(batch, keys, width, dtype=dtype, seed=1)
    return [tensor.to(device) for tensor in (q, k, numbers(batch, tokens, heads, seed=2))]


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_sizes(device, dtype):
    for batch, tokens, heads, width, keys, top_k in SIZES:
        q, k, weights = arguments(device, dtype, batch, tokens, heads, width, keys)
        for each in (weights, weights.to(DTYPES[(DTYPES.index(dtype) + 1) % 3])):
            checked("_index_topk", q, k, each, top_k, 0.3)


def test_strides_and_ranges(device):
    """Queries whose heads come first, keys of a cache with room, and padded rows."""
    q = numbers(2, 4, 3, 16, dtype=torch.bfloat16).to(device).transpose(1, 2)
    memory = numbers(2, 60, 16, dtype=torch.bfloat16, seed=1).to(device)
    weights = numbers(2, 4, 3).to(device).transpose(1, 2)
    for k in (memory[:, 7:47], memory[:, :40], memory[:, ::2][:, :20], numbers(2, 40, 15).to(device)):
        rows = q[..., : k.shape[2]].to(k.dtype)
        for ranges in (None, [(3, 2**31 - 1), (-5, 12)], [(30, 30), (0, 1)], [(38, 39), (50, 60)]):
            given = None if ranges is None else torch.tensor(ranges, dtype=torch.int32, device=device)
            checked("_index_topk", rows, k, weights, 9, 1.0, key_range=given)


def test_the_first_of_equal_scores(device):
    """Scores are whole numbers here, most of them zero."""
    generator = torch.Generator().manual_seed(0)
    for keys, top_k in ((70, 33), (1500, 1100), (2500, 3)):
        q = torch.randint(-2, 3, (1, 2, 3, 4), generator=generator).float().to(device)
        k = torch.randint(-1, 2, (1, keys, 4), generator=generator).float().to(device)
        weights = torch.randint(-1, 3, (1, 2, 3), generator=generator).float().to(device)
        checked("_index_topk", q, k, weights, top_k, 1.0)


def test_what_is_not_finite(device):
    """NaN counts as the lowest number, above -inf; infinite scores are chosen first."""
    k = torch.tensor([1.0, torch.nan, 3.0, torch.inf, 0.5, 2.0])[None, :, None].to(device)
    one = torch.ones(1, 1, 1, 1, device=device)
    assert _index_topk(one, k, one[..., 0], 5, 1.0).tolist() == [[[0, 2, 3, 4, 5]]]
    assert _index_topk(one, k, -one[..., 0], 5, 1.0).tolist() == [[[0, 1, 2, 4, 5]]]
    zero = torch.zeros_like(one[..., 0])  # 0 * inf is NaN
    assert _index_topk(one, k, zero, 4, 1.0).tolist() == [[[0, 2, 4, 5]]]


def test_nothing_to_choose(device):
    for shape, keys in (((1, 0, 2, 4), 5), ((0, 2, 2, 4), 5), ((1, 2, 2, 4), 0), ((1, 2, 0, 4), 5)):
        q, k = torch.zeros(shape, device=device), torch.zeros(shape[0], keys, 4, device=device)
        chosen = _index_topk(q, k, torch.zeros(shape[:3], device=device), 3, 1.0)
        assert chosen.shape == (*shape[:2], min(3, keys))
        if chosen.numel():
            assert chosen.tolist() == [[[0, 1, 2], [0, 1, 2]]]


# T, Hi, D, rows of k, block, top_k: blocks that are no power of two, a word or more; more rows
# than a threadgroup takes; fewer keys than tokens.
BLOCKS = [(1, 2, 8, 40, 4, 3), (3, 5, 30, 100, 32, 2), (2, 1, 128, 300, 128, 3), (5, 4, 7, 3, 5, 1)]


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.on("mps")
@pytest.mark.parametrize("reduce", ["heads", "keys"])
def test_blocks(device, dtype, reduce):
    """Scores are whole numbers, so that what is chosen is known, whatever the order of the sums."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape):
        return torch.randint(-4, 5, shape, generator=generator).to(dtype).to(device)

    forms = itertools.cycle((False, True, True))  # of results: bits, or ids
    for tokens, heads, width, rows, block, top_k in BLOCKS:
        q, k, weights = whole(2, tokens, heads, width), whole(2, rows, width), whole(2, tokens, heads)
        options = {"key_range": None, "keys": 0, "reduce": reduce, "block": block}
        given = []
        if reduce == "heads":
            for keys in (rows * block + block - 1, rows * block, max(0, rows * block - 1)):
                given += [{"weights": w, "keys": keys, "tail": t} for w, t in ((weights, 0), (None, 1))]
        else:
            ranges = torch.tensor([(3, 2**31 - 1), (-5, rows // 2)], dtype=torch.int32)
            given += [{"tail": min(tail, top_k)} for tail in (0, 1, 2)]
            given += [{"key_range": ranges.to(device)}]
        for each, as_bits in zip(given, forms, strict=False):
            call = {"weights": None, "tail": 0, **options, **each, "as_bits": as_bits}
            checked("_index_topk", q=q, k=k, top_k=top_k, scale=0.5, **call)
