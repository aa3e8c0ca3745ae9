"""tests/pinned/models.txt and docs/models.md say what the code does with the installed transformers."""

import ast
import functools
import importlib.util
import re
from importlib.metadata import version

import pytest
import transformers
from support import tiny_models, upstream
from support.processes import REPOSITORY
from support.sweep import in_sweep

PAGE = REPOSITORY / "docs" / "models.md"
ALWAYS = ["qwen3_moe", "gemma4", "openai_privacy_filter"]  # every other row in the sweep
DENSE_ALWAYS = ["gemma3"]


@functools.cache
def generator(name: str = "make_models_table"):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / "make" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(section: str) -> list[str]:
    return generator("models_page").sections()[section]


def rows(section: str) -> dict[str, str]:
    """{architecture: line} of a table."""
    of_table = [line for line in lines(section) if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in of_table}


@pytest.fixture
def current():
    version = lines("")[0].split()[1].rstrip(",")
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}, {transformers.__version__} is installed")


def test_the_page_is_of_these_rows():
    assert PAGE.read_text() == generator("models_page").page(), "run scripts/make/models_page.py"


def test_the_page_says_what_differs(monkeypatch):
    """A cell that is not "yes" is named; the rows have one each."""
    page = generator("models_page")
    found = page.sections()
    changes = {
        "experts": ("| mixtral |", "| yes | yes | yes |", "| no: why | no: relative error 1e-02 | yes |"),
        "serving": ("| mixtral |", "| yes | yes | yes |", "| yes | no | yes |"),
    }
    for section, (start, before, after) in changes.items():
        found[section] = [
            line.removesuffix(before) + after if line.startswith(start) else line for line in found[section]
        ]
    found["tokens that are not captured"] = ["mixtral: why"]
    monkeypatch.setattr(page, "sections", lambda: found)
    text = " ".join(page.page().split())
    assert "rounded weights, except mixtral (no: relative error 1e-02, yes)." in text
    assert "95 of 96 architectures, with experts or dense, except mixtral: why." in text
    assert "inkling2, mixtral, muse_spark" in text and "- mixtral has no prefix cache" in text


def test_every_architecture_is_listed(current):
    assert list(rows("experts")) == list(tiny_models.architectures())
    assert lines("") == [generator().head()]


WITHOUT = "experts without transformers' interface"


def test_every_config_that_names_experts_is_listed(current):
    """And README and the page count those that run on operators."""
    listed = {**rows("experts"), **rows(WITHOUT)}
    assert sorted(listed) == upstream.architectures() and rows("experts").keys().isdisjoint(rows(WITHOUT))
    on_operators = [line for line in listed.values() if re.match(r"\| \w+ \| (moe_experts|expert_mm)", line)]
    written = f"{len(on_operators)} of the {len(listed)} Mixture-of-Experts architectures in transformers"
    for page in (PAGE, REPOSITORY / "README.md"):
        assert written in " ".join(page.read_text().split()), page


@pytest.mark.parametrize("architecture", in_sweep([*rows(WITHOUT)], ["vitpose_backbone"]))
def test_row_without_the_interface_is_current(current, simulated, architecture):
    from support import coverage

    expected = rows(WITHOUT)[architecture]
    assert expected == str(coverage.row(architecture)), "run scripts/make/make_models_table.py"


def test_every_dense_architecture_is_listed():
    assert list(rows("dense")) == list(tiny_models.DENSE_ARCHITECTURES)


@pytest.mark.parametrize("architecture", in_sweep(tiny_models.architectures(), ALWAYS))
def test_row_is_current(current, simulated, architecture):
    """And whether it is among those whose router is left unchanged."""
    line, report = generator().row(architecture)
    assert rows("experts")[architecture] == line, "run scripts/make/make_models_table.py"
    written = [line for line in lines("routers left unchanged") if line.startswith(f"- {architecture}: ")]
    assert written == generator().unchanged_routers({architecture: report}), (
        "run scripts/make/make_models_table.py"
    )


@pytest.mark.parametrize("architecture", in_sweep(tiny_models.DENSE_ARCHITECTURES, DENSE_ALWAYS))
def test_dense_row_is_current(current, architecture):
    assert rows("dense")[architecture] == generator().dense_row(architecture), (
        "run scripts/make/make_models_table.py"
    )


def test_every_other_causal_model_is_listed_and_right(current):
    assert list(rows("others")) == tiny_models.other_causal()
    assert not [line for line in rows("others").values() if "| no" in line]


@pytest.mark.parametrize("architecture", in_sweep(tiny_models.other_causal(), ["minicpm3", "whisper"]))
def test_row_of_another_causal_model_is_current(current, simulated, architecture):
    assert rows("others")[architecture] == generator().other_row(architecture), (
        "run scripts/make/make_models_table.py"
    )


@pytest.mark.parametrize(
    "architecture",
    in_sweep(
        [*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES], ["inkling", "minimax", "qwen4_exp"]
    ),
)
def test_tokens_behind_a_prompt_are_captured(current, simulated, architecture):
    """Of all: with a bias of relative positions, a cache of its own, windows and pools that fill up."""
    assert lines("tokens that are not captured") == []
    assert generator().uncaptured(architecture) is None


def test_every_model_is_right():
    assert len(rows("experts")) > 60
    for line in rows("experts").values():
        row = line.split(" | ")
        assert row[1].startswith(("moe_experts", "expert_mm")), row
        assert (row[-2], row[-1]) == ("yes", "yes |"), row


def test_every_dense_model_is_right():
    assert len(rows("dense")) >= 20
    for line in rows("dense").values():
        row = line.split(" | ")
        assert row[-4] in ("yes", "-") and (row[-2], row[-1]) == ("yes", "yes |"), row


@pytest.mark.parametrize(
    "architecture",
    in_sweep(sorted({*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES}), ["olmoe"]),
)
def test_row_of_serving_is_current(current, architecture):
    assert rows("serving")[architecture] == generator("make_serving_table").row(architecture), (
        "run scripts/make/make_serving_table.py"
    )


def test_what_mlx_lm_lacks(current):
    """In README, counted with the installed mlx-lm."""
    serving = generator("make_serving_table")
    count, missing = len(tiny_models.architectures()), serving.missing_in_mlx_lm()
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    assert (
        f"{count} of the {len(rows('experts')) + len(rows(WITHOUT))} have transformers' interface of experts."
        in readme
    )
    assert f"mlx-lm {version('mlx-lm')} lacks {len(missing)} of the {count}" in readme
    assert f"It lacks {len(missing)} of the {count}." in PAGE.read_text()
    assert {"qwen3_moe", "mixtral"}.isdisjoint(missing) and "hunyuan_v1_moe" in missing


def test_the_counts_of_the_page_of_speed():
    """Captured and eager as in this table; module by module as the architecture's test allows."""
    page = (REPOSITORY / "docs" / "speed.md").read_text()
    table = re.findall(r"^\| (\w+) \| ([a-z, ]+) \| (\d+) \| (\d+|-) \| (\d+) \|$", page, re.MULTILINE)
    outside = {}
    assert len(table) >= 12
    for name, kind, eager, modules, captured in table:
        counts = re.findall(r"([a-z, ]*?) ?(\d+) / (\d+)", rows("experts")[name].split(" | ")[4])
        assert (kind if kind != "all" else "", eager, captured) in [(k.strip(), *n) for k, *n in counts]
        file = REPOSITORY / "tests" / "models" / "families" / f"test_{name}.py"
        call = re.search(
            r"check_launches\(\s*simulated, NAME, (\{.*?\})(?:, (\{.*?\}))?\s*\)", file.read_text()
        )
        most, of_modules = (ast.literal_eval(each or "{}") for each in call.groups())
        outside[name] = most.get("outside")
        assert modules == str(of_modules.get(kind if kind != "all" else "", "-"))
    assert {*outside.values()} == {2, 3, None} and outside["gemma4"] == 3
    assert "2 more, or 3 in Gemma 4" in " ".join(page.split())
