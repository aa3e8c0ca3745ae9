"""Counts how often weights are decoded on a CPU."""

import gc

import pytest

from torch_moe_mps.ops import _decoded, _formats


@pytest.fixture
def decodings(monkeypatch) -> list[tuple[int, ...]]:
    """Grows by the shape of the codes for each time that something is decoded; all of it may be cached."""
    shapes, own = [], _formats.dequantize_values

    def counted(packed, *others):
        shapes.append(tuple(packed.shape))
        return own(packed, *others)

    gc.collect()
    gc.freeze()  # what lives is imported: the next search for garbage need not walk it
    monkeypatch.setattr(_formats, "dequantize_values", counted)
    monkeypatch.setattr(_decoded, "memory", lambda: 10**9)
    return shapes
