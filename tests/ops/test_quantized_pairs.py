"""Quantised experts: all pairs on one expert, on a few, on many."""

import itertools

import pytest
import torch
from support.expert_layers import ids_of_counts
from support.oracles_experts import group_of
from support.oracles_operators import checked
from support.quantized_layers import FORMATS, check_layer, each, place, random_quantized
from support.sweep import in_sweep, rows_in_sweep
from support.values import EACH_DTYPE, random

pytestmark = pytest.mark.on("mps")


# Pairs of each expert: what one matrix takes, a few columns of them, and more than are taken at once.
COUNTS = ((1, 2, 3), (8, 1, 9), (17, 0, 16), (33, 31, 2))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("format", each(FORMATS))
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_many_pairs_of_one_expert(device, format, counts, dtype):
    """At 2 to 32 tokens the pairs of an expert are multiplied together. Rows of 3 and of 5 groups.

    In the down projection simdgroups share experts where there are at most 8.
    """
    group, seed = group_of(format), sum(counts)
    counts += (0,) * (6 * (seed % 2))
    for i, slots in enumerate((2, 3, 2)):
        ids = ids_of_counts(counts, max(slots, -(-sum(counts) // 32)), seed)
        shape = (*ids.shape, len(counts), 3 * group, group if i else 5 * group)
        check_layer(device, shape, format, dtype, seed, ids=ids)
    weight = random_quantized(len(counts), 37, 5 * group, format, dtype, seed)
    x = random((*ids.shape, 5 * group), dtype, seed)
    checked("expert_qmm", x.to(device), ids.to(device), *place(weight, device), format)


# Pairs of 12 experts whose blocks of rows are taken in twos, of 6 one by one, of 2 in halves. Where there are
# more experts than pairs it is those of the first 24 pairs, of 6 and of 2.
MANY_BLOCKS = (1, 2, 4, 5, 8, 9, 33, 0, 1, 3, 7, 17, 1, 3, 6, 12, 0, 1, 1, 5)
FEW_PAIRS = (2, 1, 1, 0, 0) * 8


@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    [
        (4, 32, torch.float32),
        pytest.param(4, 64, torch.half, marks=pytest.mark.sweep),
        pytest.param(4, 32, torch.bfloat16, marks=pytest.mark.sweep),
        pytest.param(8, 64, torch.half, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("counts", in_sweep((MANY_BLOCKS, FEW_PAIRS), (FEW_PAIRS,)), ids=["experts", "pairs"])
def test_many_blocks_of_rows(device, counts, bits, group, dtype):
    """75 blocks; the rows of the projection end in the middle of one, and their number is odd."""
    format, seed = f"affine{bits}_{group}", len(counts)
    ids = ids_of_counts(counts, max(2, -(-sum(counts) // 32)), seed)
    weight = random_quantized(len(counts), 75 * 64 - 27, 64, format, dtype, seed)
    x = random((len(ids), 64), dtype, seed)
    checked("expert_qmm", x.to(device), ids.to(device), *place(weight, device), format)
    check_layer(device, (*ids.shape, len(counts), 64, 75 * 32 // 64 * 64), format, dtype, seed, ids=ids)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("format", each(FORMATS))
def test_inputs_of_several_blocks(device, format, dtype):
    """More inputs than threadgroup memory holds at once, for one pair and for several."""
    counts, group = (1, 2, 3, 4, 9, 1), group_of(format)
    ids = ids_of_counts(counts, 2, 0)
    check_layer(device, (*ids.shape, len(counts), 2048 + group, group), format, dtype, 0, ids=ids)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("format", in_sweep(FORMATS, FORMATS[:1]))
def test_more_experts_than_simdgroups(device, format, dtype):
    """In the down projection a simdgroup goes from one to the next. Rows of whole steps, and of more."""
    for i, intermediate in enumerate((256, 512, 5 * group_of(format))):
        check_layer(device, (9, 5, 40, 128, intermediate), format, dtype, i)


def check_counts(device, counts, bits, dtype, group: int, groups: int, seed: int, **options):
    """At most 32 tokens; expert e has counts[e] pairs. The intermediate size is `groups` groups."""
    ids = ids_of_counts(counts, max(2, -(-sum(counts) // 32)), seed)
    shape = (*ids.shape, len(counts), max(64, group), group * groups)
    check_layer(device, shape, f"affine{bits}_{group}", dtype, seed, ids=ids, **options)


# Pairs of each expert; with more than 32 an expert counts again. Shares of 16 simdgroups for 1 to 16 of them.
FEW_COUNTS = (
    (2,),
    (5, 4),
    (1, 0, 3, 3),
    (1, 2, 3, 4, 5),
    (1, 0, 1, 1, 1, 1, 1, 9),
    (40,),
    (33, 65),
    (226, 2, 1, 2, 1, 2, 1, 2),
)
# Sizes of a group, and groups of a row: one step, fewer steps than simdgroups of an expert, more with a last
# one that is not full. Groups of 32 always: others have libraries of their own, which are compiled.
OF_32 = ((32, 1), (32, 5), (32, 37))
ROWS = (*OF_32, (64, 3), (128, 7), (64, 37))


@pytest.mark.parametrize(
    ("counts", "row"),
    rows_in_sweep(itertools.product(FEW_COUNTS, ROWS), [*zip(FEW_COUNTS[:7], OF_32 * 3, strict=False)]),
)
@pytest.mark.parametrize("bits", in_sweep((4, 8), [4]))
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_simdgroups_share_few_experts(device, dtype, bits, counts, row):
    bias = random((len(counts), max(64, row[0])), torch.float32, 1)
    check_counts(device, counts, bits, dtype, *row, 1, down_bias=bias)


# Experts with few pairs (to 2, 4 or 8) and with many are dealt to 12 simdgroups; those that have many leave
# turns to the others. None, 6 and 13 with many; fewer with few than there are turns to leave, and more.
TURNS_COUNTS = ((1, 2) * 13, (9, 1, 0) * 6, (9, 1, 1, 0) * 6 + (1,) * 13, (9,) * 13 + (1,) * 27)


@pytest.mark.parametrize("counts", TURNS_COUNTS, ids=lambda counts: f"{len(counts)}-{sum(counts)}")
@pytest.mark.parametrize("row", in_sweep([(32, 3), (64, 5), (128, 1)], [(32, 3)]), ids=str)
@pytest.mark.parametrize("bits", in_sweep((4, 8), [4]))
@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_simdgroups_take_experts_in_turn(device, dtype, bits, row, counts):
    check_counts(device, counts, bits, dtype, *row, 0)
