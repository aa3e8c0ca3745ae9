"""The workflows of GitHub, as far as they can be checked without it."""

import ast
import itertools
import os
import re
import subprocess

import pytest
import shader_sources
import torch
import yaml
from compile_shaders import is_released, part
from macos import SUPPORTED
from support.processes import REPOSITORY
from support.sweep import in_part

from torch_moe_mps._versions import TORCH, TRANSFORMERS, minor, refused
from torch_moe_mps.ops import OPERATORS

FOLDER = REPOSITORY / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
# GitHub's labels of standard runners in November 2026, with the macOS that they run. There is no macos-27:
# xcode-27 runs it (runner-images#14404, #14519).
RUNNERS = {"ubuntu-24.04": None, "macos-15": (15, 0), "macos-26": (26, 0), "xcode-27": (27, 0)}
# When labels ended: jobs that ask for one are never scheduled (runner-images#13518 is the last of these).
ENDED = {"macos-12": "2024-12-03", "macos-13": "2025-12-04", "macos-14": "2026-11-02"}


def jobs(path) -> dict[str, dict]:
    return yaml.safe_load(path.read_text())["jobs"]


def needs_of(job) -> list[str]:
    """The jobs that must end before."""
    needs = job.get("needs", [])
    return [needs] if isinstance(needs, str) else needs


def commands(job: dict) -> str:
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


def of_matrix(job: dict) -> list[dict]:
    """The values of a job's matrix, one dictionary a run."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    rows = matrix.pop("include", [])
    return rows + [{name: value} for name, values in matrix.items() for value in values] or [{}]


def runners(job: dict) -> list[str]:
    """The labels on which a job runs; none for a Mac of ours."""
    label = job["runs-on"]
    if isinstance(label, list):
        assert "self-hosted" in label
        return []
    return [row["runner"] if label == "${{ matrix.runner }}" else label for row in of_matrix(job)]


EVERY = [(path.stem, name, job) for path in WORKFLOWS for name, job in jobs(path).items()]
IDS = [f"{workflow}-{name}" for workflow, name, _ in EVERY]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_jobs_name_exists(path):
    text = path.read_text()
    for script in re.findall(r"scripts/[\w.]*\w", text):
        file = REPOSITORY / script
        assert file.exists() and (file.suffix or os.access(file, os.X_OK)), script
    for file, test in re.findall(r"(tests/[\w/.]*\w)(?:::(\w+))?", text):
        assert (REPOSITORY / file).exists(), file
        assert not test or f"\ndef {test}(" in (REPOSITORY / file).read_text(), test
    for name, job in jobs(path).items():
        assert {*needs_of(job)} <= jobs(path).keys(), name
        assert job["timeout-minutes"] <= 120 and job["runs-on"], name
        used = set(re.findall(r"matrix\.(\w+)", str(job)))
        assert used == {key for row in of_matrix(job) for key in row}, name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), (name, step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@\S+", step.get("uses", "some/action@v1")), (name, step)


def test_permissions_are_the_least():
    """Only the job that publishes can say who it is, and one writes an issue: they run none of our code."""
    allowed = {"release": {"publish": {"id-token": "write"}}, "nightly": {"issue": {"issues": "write"}}}
    allowed["site"] = {"publish": {"pages": "write", "id-token": "write"}}
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
        more = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
        assert more == allowed.get(path.stem, {})
        for name in more:
            assert not re.search("scripts/|torch-moe-mps|python", commands(jobs(path)[name]))
            assert not any("checkout" in step.get("uses", "") for step in jobs(path)[name]["steps"])
    assert commands(jobs(FOLDER / "release.yml")["publish"]) == ""


def test_the_site_is_published_only_where_pages_are():
    """GitHub deploys pages only from a job with this environment, and fails where the settings have none."""
    publish = jobs(FOLDER / "site.yml")["publish"]
    assert publish["if"] == "github.ref == 'refs/heads/main' && vars.PAGES == '1'"
    assert publish["environment"]["name"] == "github-pages"
    assert [step["uses"] for step in publish["steps"]] == ["actions/deploy-pages@v4"]


@pytest.mark.parametrize(("workflow", "name", "job"), EVERY, ids=IDS)
def test_runners_exist(workflow, name, job):
    """A job whose label no runner has is never scheduled, and neither is one that needs it."""
    for label in runners(job):
        assert label in RUNNERS, f"{label} ended on {ENDED.get(label)}"


def test_a_release_is_installed_with_every_torch():
    release = jobs(FOLDER / "release.yml")
    rows = release["install"]["strategy"]["matrix"]["include"]
    assert tuple(row["torch"] for row in rows) == SUPPORTED
    assert (release["install"]["needs"], release["publish"]["needs"]) == ("build", "install")


def test_runners_have_a_macos_that_their_torch_takes():
    rows = jobs(FOLDER / "release.yml")["install"]["strategy"]["matrix"]["include"]
    rows += jobs(FOLDER / "test.yml")["macos"]["strategy"]["matrix"]["include"]
    for row in rows:
        torch = ".".join(row.get("torch", TORCH[0]).split(".")[:2])
        assert refused(torch, RUNNERS[row["runner"]]) is None, row


def test_the_oldest_and_the_newest_transformers_run_all_tests():
    (pinned,) = re.findall("^transformers==(.*)", (REPOSITORY / "tests/requirements.txt").read_text(), re.M)
    rows = of_matrix(jobs(FOLDER / "test.yml")["linux"])
    versions = [minor(row.get("transformers", pinned)) for row in rows]
    assert versions[0] == TRANSFORMERS[0] and {*versions[1:]} == {TRANSFORMERS[-1]}


@pytest.mark.parametrize(("variable", "package"), [("TORCH", "torch"), ("TRANSFORMERS", "transformers")])
def test_a_variable_replaces_a_pinned_version(variable, package):
    def required(**names: str) -> dict[str, str]:
        program = ["bash", "-c", "source scripts/environment.sh; requirements"]
        text = subprocess.run(
            program, cwd=REPOSITORY, env=os.environ | names, capture_output=True, text=True, check=True
        ).stdout
        return dict(re.findall(r"^([\w-]+)==([^;\s]*)", text, re.M))

    plain, changed = required(), required(**{f"{variable}_VERSION": "9.8.7"})
    differs = {name for name in plain if plain[name] != changed.get(name)}
    assert changed[package] == "9.8.7" and differs <= {package, "nvidia-cuda-nvrtc"}


def part_of(day: int, nights: int) -> str:
    """The part that the nightly sweep runs on a day since 1970, by the commands of its step."""
    steps = jobs(FOLDER / "nightly.yml")["sweep"]["steps"]
    (command,) = (step["run"] for step in steps if "PART=" in step.get("run", ""))
    command = command.replace("${{ matrix.nights }}", str(nights)).replace(
        "date +%s", f"echo {day * 86400 + 11_820}"
    )
    program = ["bash", "-ec", command.replace('"$GITHUB_ENV"', "/dev/stdout")]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()


def test_the_nights_run_the_sweep_in_parts():
    """Each test of the sweep in one of ten nights, and each kernel is broken in one of seven."""
    job = jobs(FOLDER / "nightly.yml")["sweep"]
    rows = {row["name"]: row for row in of_matrix(job)}
    assert {name: row["nights"] for name, row in rows.items()} == {"sweep": 10, "kernels": 7}
    assert rows["kernels"]["tests"] == "tests/selfcheck" and "tests" not in rows["sweep"]
    assert 'scripts/test --sweep --part "$PART" ${{ matrix.tests }}' in commands(job)
    tests = [f"tests/selfcheck/test_kernels.py::test_each_kernel[{number}]" for number in range(60)]
    for nights in (7, 10):
        parts = [part_of(20_000 + day, nights).removeprefix("PART=") for day in range(nights)]
        assert sorted(parts) == [f"{part}/{nights}" for part in range(nights)]
        ran = [[test for test in tests if in_part(test, part)] for part in parts]
        assert sorted(itertools.chain(*ran)) == sorted(tests) and all(ran)


def test_a_night_draws_who_is_late():
    """The rooms in which the host and the GPU wait for each other, by the number of the day."""
    job = commands(jobs(FOLDER / "nightly.yml")["own-gpu"])
    assert 'SIMULATED_OWN_GPU=$(($(date +%s) / 86400))" >> "$GITHUB_ENV"' in job
    assert "scripts/test tests/disk tests/serving tests/models/capture" in job
    assert 'os.environ.get("SIMULATED_OWN_GPU"' in (REPOSITORY / "tests/conftest.py").read_text()


@pytest.mark.parametrize("part", ["10/10", "3", "-1/10", "a/b", "0/0"])
def test_a_part_that_is_none(part):
    with pytest.raises(ValueError, match=f"^--part: expected N/M with N below M, as 3/10, got {part}$"):
        in_part("", part)


def test_what_the_gpu_job_decides_by():
    """`check --quick` on macos-15, at its second try; nothing else, and nothing on macos-26."""
    job = jobs(FOLDER / "test.yml")["gpu"]
    assert job["continue-on-error"] == "${{ matrix.runner != 'macos-15' }}"
    decide = [step for step in job["steps"] if "run" in step and not step.get("continue-on-error")]
    checks = [step for step in decide if "check " in step["run"]]
    assert [step["run"].split(" --json")[0] for step in checks] == [".venv/bin/torch-moe-mps check --quick"]
    (first,) = (step for step in job["steps"] if step.get("id") == "quick")
    assert (
        first["run"].split(" --json")[0] == checks[0]["run"].split(" --json")[0]
        and first["continue-on-error"] is True
    )
    assert checks[0]["if"] == "always() && steps.quick.outcome == 'failure'"
    assert not any("scripts/test" in step["run"] for step in decide)


def test_slow_steps_of_the_gpu_job_end_before_it():
    """A quarter of an hour is left for the environment; a job that ends by its limit uploads no reports."""
    job = jobs(FOLDER / "test.yml")["gpu"]
    assert sum(step.get("timeout-minutes", 0) for step in job["steps"]) + 15 <= job["timeout-minutes"]


def fixtures_of(file: str, test: str) -> set[str]:
    """Fixtures that a test takes, those of fixtures in its file too."""
    functions = {
        node.name: {each.arg for each in node.args.args}
        for node in ast.parse((REPOSITORY / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    found, todo = set(), [test]
    while todo:
        new = functions.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def test_the_gpu_job_has_experts_on_the_ssd_on_the_gpu():
    """By a test that a Mac runs on its GPU: neither the CPU's alone nor the simulator's alone."""
    (step,) = (s for s in jobs(FOLDER / "test.yml")["gpu"]["steps"] if "scripts/test" in s.get("run", ""))
    (named,) = re.findall(r"(tests/[\w/.]*\w)::(\w+)", step["run"])
    assert "device" in fixtures_of(*named) and "simulated" not in fixtures_of(*named), named
    assert step["run"].endswith(" -m 'not sweep' -k mps")
    assert 'experts_memory="1GB"' in (REPOSITORY / named[0]).read_text()


ISSUES = """#!/bin/sh
echo "$@" >> calls
[ "$2" = list ] && cat open || true
"""


@pytest.mark.parametrize(
    ("number", "result", "last"),
    [
        ("", "success", "issue list"),
        ("", "failure", "issue create --title Newest transformers and torch --body-file issue.md"),
        ("7", "success", "issue edit 7 --body-file issue.md"),
        ("7", "failure", "issue edit 7 --body-file issue.md"),
    ],
)
def test_a_night_opens_one_issue_or_updates_it(tmp_path, number, result, last):
    """The step's own commands, with a `gh` that notes how it is called."""
    job = jobs(FOLDER / "nightly.yml")["issue"]
    program = commands(job).replace("${{ needs.upstream.result }}", result)
    assert "${{" not in program
    (tmp_path / "gh").write_text(ISSUES)
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "open").write_text(number)
    for name, table in {"upstream main": "wrong: mamba2", "upstream torch": "right"}.items():
        (tmp_path / "tables" / name).mkdir(parents=True)
        (tmp_path / "tables" / name / "upstream.md").write_text(f"{table}\n")
    where = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "3"}
    names = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TITLE": job["env"]["TITLE"]} | where
    subprocess.run(["bash", "-e", "-c", program], cwd=tmp_path, env=names, check=True)
    assert (tmp_path / "calls").read_text().splitlines()[-1].startswith(last)
    body = (tmp_path / "issue.md").read_text()
    assert body.startswith("## upstream main\n\nwrong: mamba2\n## upstream torch\n\nright\nhttps://host/a/b/")


def test_what_is_expected_to_be_red_makes_no_push_red():
    """Registers on M3 and M4."""
    test = jobs(FOLDER / "test.yml")
    assert test["registers"]["continue-on-error"] is True
    assert "continue-on-error" not in test["shaders-first"] | test["shaders"]
    for late in ("shaders", "registers"):
        assert needs_of(test[late]) == ["sources", "shaders-first"]
    for name in test:  # the artifact of each job that compiles is of a job that it waits for
        taken = [step["with"]["name"] for step in test[name]["steps"] if "download" in step.get("uses", "")]
        written = [
            step["with"]["name"]
            for needed in needs_of(test[name])
            for step in test[needed]["steps"]
            if "upload" in step.get("uses", "")
        ]
        assert {*taken} <= {*written}, name


def test_what_a_first_check_compiles_is_known_first():
    """It waits for the sources of these libraries, and not for all sources."""
    test = jobs(FOLDER / "test.yml")
    assert [*test][:2] == ["sources-first", "shaders-first"]
    assert needs_of(test["sources-first"]) == [] and needs_of(test["shaders-first"]) == ["sources-first"]
    assert "shader_sources build/shaders --quick" in commands(test["sources-first"])
    assert "compile_shaders build/shaders --quick" in commands(test["shaders-first"])
    assert "check --first" in commands(test["gpu"])


def test_the_page_says_what_each_job_prints(simulated):
    """A row for each job, with its runners; and the numbers of libraries and operators that there are."""
    page = (REPOSITORY / "RELEASE.md").read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([^|]+) \|", page, re.MULTILINE))
    test = jobs(FOLDER / "test.yml")
    assert [name for name in rows if name in test] == [*test]
    for name, job in test.items():
        assert all(label in rows[name] for label in runners(job)), name
    assert rows["linux"] == f"{len(of_matrix(test['linux']))} of ubuntu-24.04"
    ours = torch.ops.moe_mps
    files = len([*(REPOSITORY / "torch_moe_mps/csrc").rglob("*.mm")])
    assert f"for macOS: {files} files, " in page
    plain, with_tensors = ours._libraries(), ours._libraries(tensor_units=True)
    count = len(plain) + 1  # with the one that measures a GPU
    assert f"`{count + len(with_tensors)} libraries in build/shaders`" in page
    every = [*plain, *with_tensors, "probe_f32"]
    rows = of_matrix(test["shaders"])
    for runner in {row["runner"] for row in rows}:
        parts = [part(row["part"]) for row in rows if row["runner"] == runner]
        assert sorted(itertools.chain(*(every[n::of] for n, of in parts))) == sorted(every)
    of_parts, without = (-(-number // 3) for number in (len(every), count))
    assert f"`{of_parts} of {of_parts} libraries compile`" in page
    assert f"`{without} of {without} libraries compile; those" in page
    first = len(shader_sources.quick_names())
    assert f"`{first} of {first} libraries compile; those" in page
    measured = [*filter(is_released, plain), *(name for name in with_tensors if name.endswith("_bf16"))]
    assert f"kernels of {len(measured)} libraries" in page
    assert (
        f"{len(OPERATORS)} operators have a Metal kernel" in page and f"of {len(plain)} libraries are" in page
    )
