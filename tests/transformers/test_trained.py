"""Trained weights: SmolLM2 from its GGUF file."""

from support import trained


def test_the_file_is_whole(smollm2):
    assert smollm2.stat().st_size == 98_362_432 and smollm2.open("rb").read(4) == b"GGUF"


def test_without_the_package_there_is_no_file(monkeypatch):
    monkeypatch.setattr(trained, "find_spec", lambda name: None)
    assert trained.smollm2.__wrapped__() is None
