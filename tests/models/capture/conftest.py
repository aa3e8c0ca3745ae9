import pytest


@pytest.fixture
def same_bits(monkeypatch):
    """Without the passes, which join roundings: what was recorded is what runs."""
    import torch_moe_mps.transformers  # noqa: F401  asks torch for MPS; families put their passes into PASSES
    from torch_moe_mps.models.graphs import passes

    monkeypatch.setattr(passes, "PASSES", ())
