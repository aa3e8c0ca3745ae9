"""docs/models.md says what the code does with the installed transformers."""

import functools
import importlib.util
import re

import pytest
import transformers
from support import tiny_models
from support.processes import REPOSITORY
from support.sweep import in_sweep

TABLE = REPOSITORY / "docs" / "models.md"
ALWAYS = ["qwen3_moe", "gemma4", "glm5_next"]  # every other row in the sweep
DENSE_ALWAYS = ["gemma3"]


@functools.cache
def generator(name: str = "make_models_table"):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / "make" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(table: int = 0) -> dict[str, str]:
    """{architecture: line} of the tables: experts, 0, dense models, 1, other causal models, 2, serving, 3."""
    section = re.split("\n## (?:Dense models|Other causal models|Serving)\n", TABLE.read_text())[table]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


@pytest.fixture
def current():
    version = TABLE.read_text().partition("each architecture of transformers ")[2].split()[0]
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, {transformers.__version__} is installed")


def test_every_architecture_is_listed(current):
    assert list(rows()) == list(tiny_models.architectures())
    assert TABLE.read_text().startswith(generator().header())


def test_every_dense_architecture_is_listed():
    assert list(rows(1)) == list(tiny_models.DENSE_ARCHITECTURES)


def reasons(text: str, architecture: str) -> list[str]:
    """The lines of a list that are about this architecture."""
    return [line for line in text.splitlines() if line.startswith(f"- {architecture}: ")]


@pytest.mark.parametrize("architecture", in_sweep(tiny_models.architectures(), ALWAYS))
def test_row_is_current(current, simulated, architecture):
    """And whether it is among those whose router is left unchanged."""
    line, report = generator().row(architecture)
    assert rows()[architecture] == line, "run scripts/make/make_models_table.py"
    unchanged = reasons(generator().footer({architecture: report}), architecture)
    assert reasons(TABLE.read_text(), architecture) == unchanged, "run scripts/make/make_models_table.py"


@pytest.mark.parametrize("architecture", in_sweep(tiny_models.DENSE_ARCHITECTURES, DENSE_ALWAYS))
def test_dense_row_is_current(current, architecture):
    assert rows(1)[architecture] == generator().dense_row(architecture), (
        "run scripts/make/make_models_table.py"
    )


def test_every_other_causal_model_is_listed_and_right(current):
    assert list(rows(2)) == tiny_models.other_causal()
    assert generator().others([*rows(2).values()]) in TABLE.read_text()

    assert not [line for line in rows(2).values() if "| no" in line]


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", in_sweep(tiny_models.other_causal(), ["qwen3_5_text"]))
def test_row_of_another_causal_model_is_current(current, simulated, architecture):
    assert rows(2)[architecture] == generator().other_row(architecture), (
        "run scripts/make/make_models_table.py"
    )


@pytest.mark.parametrize(
    "architecture", in_sweep([*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES], ["minimax"])
)
def test_tokens_are_captured(current, simulated, architecture):
    """All of them: the document lists none that is not."""
    assert generator().uncaptured(architecture) is None


def test_counts():
    """In the sentences beside the tables."""
    text, models = TABLE.read_text(), len(rows())
    own_router = text.partition("unchanged:\n")[2].partition("\n## ")[0].count("\n- ")
    assert (
        f"{models} of {models} architectures run" in text and f" {models - own_router} their router" in text
    )
    both = models + len(rows(1))
    assert f"Of {both} architectures in the tables, {both} have tokens that are captured" in text


def test_every_model_is_right():
    assert len(rows()) > 60
    for line in rows().values():
        row = line.split(" | ")
        assert row[1].startswith(("moe_experts", "expert_mm")), row
        assert (row[-2], row[-1]) == ("yes", "yes |"), row


def test_every_dense_model_is_right():
    assert len(rows(1)) >= 20
    for line in rows(1).values():
        row = line.split(" | ")
        assert row[-4] in ("yes", "-") and (row[-2], row[-1]) == ("yes", "yes |"), row


@pytest.mark.parametrize(
    "architecture",
    in_sweep(sorted({*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES}), ["olmoe"]),
)
def test_row_of_serving_is_current(current, architecture):
    assert rows(3)[architecture] == generator("make_serving_table").row(architecture), (
        "run scripts/make/make_serving_table.py"
    )


def test_what_mlx_lm_lacks(current):
    """In README and above the table, counted with the installed mlx-lm."""
    serving = generator("make_serving_table")
    assert serving.head() in TABLE.read_text(), "run scripts/make/make_serving_table.py"
    count, missing = len(tiny_models.architectures()), serving.missing_in_mlx_lm()
    written = f"{count} Mixture-of-Experts architectures, {len(missing)} of which mlx-lm 0.32.2 does not have"
    assert written in " ".join((REPOSITORY / "README.md").read_text().split())
    assert {"qwen3_moe", "mixtral"}.isdisjoint(missing) and "hunyuan_v1_moe" in missing
