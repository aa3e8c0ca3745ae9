"""The cost model's predictions, against published measurements of MLX's kernels."""

import pytest
from measured.apple import published
from simulator.testing import linux_only

pytestmark = linux_only


def is_slow(entry) -> bool:
    return any(name in entry.what for name in ("gather_qmm_rhs", "qmm_t of", "qmv_wide"))


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.what, marks=pytest.mark.sweep if is_slow(entry) else [])
        for entry in published.published()
    ],
)
def test_published_measurement(entry):
    low, high = entry.band
    assert low <= entry.ratio() <= high


def test_few_exceptions():
    """The bands of the exceptions are no wider than the others', and touch them."""
    wider = [entry for entry in published.published() if entry.band != published.BAND]
    assert len(wider) == 1
    for entry in wider:
        assert entry.reason and entry.band[1] / entry.band[0] < published.BAND[1] / published.BAND[0]
