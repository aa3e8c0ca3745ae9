"""docs/models.md says what the code does with the installed transformers."""

import importlib.util

import pytest
import transformers
from support.processes import REPOSITORY

TABLE = REPOSITORY / "docs" / "models.md"


def generator():
    spec = importlib.util.spec_from_file_location(
        "make_models_table", REPOSITORY / "scripts" / "make_models_table.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_is_current():
    written = TABLE.read_text()
    version = written.partition("each architecture of transformers ")[2].split()[0]
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, {transformers.__version__} is installed")
    assert written == generator().table(), "run scripts/make_models_table.py"


def test_every_model_is_right():
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 60
    for row in rows:
        assert row[1].startswith(("moe_experts", "expert_mm")), row
        assert (row[-2], row[-1]) == ("yes", "yes |"), row
