"""The workflows of GitHub, as far as they can be checked without it."""

import os
import re

import pytest
import yaml
from macos import SUPPORTED
from support.processes import REPOSITORY

from torch_moe_mps._versions import TORCH, refused

FOLDER = REPOSITORY / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))


def jobs(path) -> dict[str, dict]:
    return yaml.safe_load(path.read_text())["jobs"]


def commands(job: dict) -> str:
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_jobs_name_exists(path):
    text = path.read_text()
    for script in re.findall(r"scripts/[\w.]*\w", text):
        file = REPOSITORY / script
        assert file.exists() and (file.suffix or os.access(file, os.X_OK)), script
    for name, job in jobs(path).items():
        assert {*([job["needs"]] if "needs" in job else [])} <= jobs(path).keys(), name
        assert job["timeout-minutes"] <= 120 and job["runs-on"], name
        used = set(re.findall(r"matrix\.(\w+)", str(job)))
        matrix = job.get("strategy", {}).get("matrix", {})
        assert used == {*matrix, *(key for row in matrix.get("include", ()) for key in row)} - {"include"}, (
            name
        )
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), (name, step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@\S+", step.get("uses", "some/action@v1")), (name, step)


def test_permissions_are_the_least():
    """Only the job that publishes can say who it is, and it runs none of our code."""
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
        more = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
        assert more == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})
    assert commands(jobs(FOLDER / "release.yml")["publish"]) == ""


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
        assert refused(torch, (int(row["runner"].removeprefix("macos-")), 0)) is None, row


def test_a_release_brings_compiled_shaders():
    """Of the folder that the compiler wrote, and each job that installs the wheel compares their keys."""
    release = jobs(FOLDER / "release.yml")
    compiled, built = re.findall(r"build/\w+", commands(release["build"]))
    assert compiled == built and f"compile_shaders --release {compiled}" in commands(release["build"])
    assert "check_load.py" in commands(release["install"])


def test_apples_compiler_and_gpu_are_asked():
    """Every shader is compiled; what a hosted GPU answers is kept, and fails nothing."""
    test = jobs(FOLDER / "test.yml")
    assert "scripts/compile_shaders" in commands(test["macos"])
    gpu = test["gpu"]
    assert gpu["continue-on-error"] is True
    assert "torch-moe-mps check" in commands(gpu)
    (kept,) = (step for step in gpu["steps"] if "upload-artifact" in step.get("uses", ""))
    assert kept["with"]["path"] == "moe_mps_report.json" and "always()" in kept["if"]
