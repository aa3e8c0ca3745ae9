import pytest


@pytest.fixture
def same_bits(monkeypatch):
    """Without the passes, which join roundings: what was recorded is what runs."""
    from torch_moe_mps.models.graphs import passes  # which asks torch for MPS

    monkeypatch.setattr(passes, "PASSES", ())
