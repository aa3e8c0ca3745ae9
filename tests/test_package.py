"""The package as a whole: what an import costs, and what it provides."""

import tomllib

import pytest
from support.processes import REPOSITORY

import torch_moe_mps
from torch_moe_mps._versions import TORCH


def test_public_names():
    assert all(callable(getattr(torch_moe_mps, name)) for name in set(torch_moe_mps.__all__) - {"ops"})
    with pytest.raises(AttributeError, match="has no attribute 'acelerate'"):
        torch_moe_mps.acelerate  # noqa: B018


def test_metadata_takes_the_versions_of_torch_that_have_an_extension():
    metadata = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    major, last = TORCH[-1].split(".")
    assert metadata["dependencies"][0] == f"torch>={TORCH[0]},<{major}.{int(last) + 1}"
    hub = tomllib.loads((REPOSITORY / "hub" / "build.toml").read_text())
    assert hub["torch"]["minver"] == TORCH[0]
