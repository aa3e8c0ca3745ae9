"""How many layers each process has: every division of small models is tried."""

import itertools

import pytest

from torch_moe_mps.pipeline.shares import Machine, given_shares, shares_of

LAYERS, ENDS = [10, 30, 30, 30, 30, 30, 20], [15, 25]


def sizes(shares, layers=LAYERS):
    """The bytes of each process."""
    ends = list(itertools.accumulate(shares))
    found = [sum(layers[end - share : end]) for share, end in zip(shares, ends, strict=True)]
    found[0] += ENDS[0]
    found[-1] += ENDS[1]
    return found


def slowest(shares, machines):
    return max(size / m.bandwidth for size, m in zip(sizes(shares), machines, strict=True))


def divisions(parts, machines):
    for shares in itertools.product(range(1, len(LAYERS)), repeat=parts):
        fits = sum(shares) == len(LAYERS)
        if fits and all(s <= m.memory for s, m in zip(sizes(shares), machines, strict=True)):
            yield shares


@pytest.mark.parametrize("bandwidths", [(1, 1), (4, 1), (1, 3), (1, 1, 1), (2, 1, 4)])
@pytest.mark.parametrize("memory", [90, 130, 200, 1000])
def test_the_slowest_is_as_fast_as_can_be(bandwidths, memory):
    machines = [Machine(memory, bandwidth) for bandwidth in bandwidths]
    possible = [slowest(shares, machines) for shares in divisions(len(machines), machines)]
    shares = shares_of(LAYERS, ENDS, machines)
    assert sum(shares) == len(LAYERS) and len(shares) == len(machines)
    if possible:
        assert slowest(shares, machines) == min(possible)
        assert all(size <= memory for size in sizes(shares))


def test_memory_counts_where_nothing_fits():
    machines = [Machine(20, 800), Machine(60, 100)]
    shares = shares_of(LAYERS, ENDS, machines)
    assert sizes(shares)[1] > 2 * sizes(shares)[0]


def test_equal_shares_of_unknown_machines():
    assert shares_of([10] * 8, [0, 0], [Machine(None, None)] * 4) == [2, 2, 2, 2]
    assert shares_of([10] * 8, [0, 0], [Machine(1000, None), Machine(1000, 400.0)]) == [4, 4]


def test_given_shares():
    assert given_shares([3, 5], 2, 8) == [3, 5]


@pytest.mark.parametrize("shares", [[4, 3], [8], [0, 8], [4.0, 4.0], 4, "44", [2, 2, 4]])
def test_wrong_shares(shares):
    with pytest.raises(ValueError, match=r"shares must be 2 numbers of layers that add up to 8, got"):
        given_shares(shares, 2, 8)
