"""The package as a whole: what an import costs, and what it provides."""

import pytest

import torch_moe_mps


def test_public_names():
    assert all(callable(getattr(torch_moe_mps, name)) for name in set(torch_moe_mps.__all__) - {"ops"})
    with pytest.raises(AttributeError, match="has no attribute 'acelerate'"):
        torch_moe_mps.acelerate  # noqa: B018
