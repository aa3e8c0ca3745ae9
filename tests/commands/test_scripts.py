"""The scripts start from a clone, by the commands that the pages print."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import LEAVE, REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
SHELL = sorted(path for path in SCRIPTS.rglob("*") if path.is_file() and not path.suffix)
IN_PYTHON = sorted(path for path in SCRIPTS.rglob("*.py") if '"__main__"' in path.read_text())
SED = re.compile(r"\bsed (?:-\w+ )*'([^']*)'")
# Those that take seconds -> the page that they write a part of, and the mark in front of it.
QUICK = {
    "make_gguf_table": ("docs/gguf.md", "<!-- scripts/make/"),
    "make_operators_table": ("docs/operators.md", "<!-- scripts/make/"),
    "models_page": ("docs/models.md", "# Models"),
}
# Each of the commands in a fork of a process that has imported what takes seconds. Its path has nothing of
# the tests: a script finds them itself.
STARTS = """
import gc, json, os, runpy, sys
gc.disable()
import numpy, peft, torch, transformers, torch_moe_mps
gc.freeze()
gc.enable()
results = []
for path, module, arguments in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        code = 1
        try:
            sys.argv, sys.path[:1] = [module, *arguments], path.split(":")
            if module.endswith(".py"):
                runpy.run_path(module, run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            code = error.code or 0
            if isinstance(code, str):
                print(code)
                code = 1
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with open(read) as said:
        text = said.read()
    results.append((os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text))
print(json.dumps(results))
"""


def new_clone(root: Path) -> Path:
    """A tree with the repository's files, and no environment: its scripts and what they write are copies."""
    for path in REPOSITORY.iterdir():
        if path.name not in ("scripts", "docs", "tests") and not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    shutil.copytree(SCRIPTS, root / "scripts", symlinks=True)
    shutil.copytree(REPOSITORY / "docs", root / "docs")
    (root / "tests").mkdir()
    for path in (REPOSITORY / "tests").iterdir():
        if path.name != "pinned":
            (root / "tests" / path.name).symlink_to(path)
    shutil.copytree(REPOSITORY / "tests" / "pinned", root / "tests" / "pinned")
    return root


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MOE_MPS_"))}


def behind(script: Path, clone: Path) -> tuple[str, str] | None:
    """(folders on the path, script or module) of what a shell script hands its arguments to."""
    found = re.search(
        r'^(?:PYTHONPATH=(\S+) )?exec \S+ (?:-m )?(\S+) "\$@"$', script.read_text(), re.MULTILINE
    )
    if found is None:
        return None
    folders, program = found.groups()
    own = [str((clone / program).parent)] if program.endswith(".py") else []
    own += [str(clone / folder) for folder in (folders or "").split(":") if folder]
    return ":".join(own), str(clone / program) if program.endswith(".py") else program


@pytest.mark.slow("imports what the scripts do, once for all")
def test_scripts_in_python(tmp_path_factory):
    """Each says what it does. Those that take seconds write the pages as they are; one asks for another."""
    clone, other = (new_clone(tmp_path_factory.mktemp("clone")) for _ in range(2))
    behind_shell = list(filter(None, (behind(path, clone) for path in SHELL)))
    started = {program for _, program in behind_shell}
    files = [clone / path.relative_to(REPOSITORY) for path in IN_PYTHON]
    alone = [(str(path.parent), str(path)) for path in files if str(path) not in started]
    helps = [(*program, ("--help",)) for program in (*alone, *behind_shell)]
    for page, mark in QUICK.values():
        text, mark, rest = (clone / page).read_text().partition(mark)
        begin, end, behind_table = rest.partition("<!-- end")
        (clone / page).write_text(text + mark + begin.partition("\n")[0] + "\n" + end + behind_table)
    runs = [(str(clone / "scripts/make"), str(clone / f"scripts/make/{name}.py"), ()) for name in QUICK]
    used_by = other / "tests/pinned/used_by.txt"
    used_by.write_text(re.sub(r"^rms_norm: .*\n", "", used_by.read_text(), flags=re.MULTILINE))
    asks = (str(other / "scripts/make"), str(other / "scripts/make/make_operators_table.py"), ())

    command = [sys.executable, "-c", STARTS + LEAVE, json.dumps([*helps, *runs, asks])]
    result = subprocess.run(command, capture_output=True, text=True, env=variables(), cwd=clone)
    assert result.returncode == 0, result.stderr
    *results, last = map(tuple, json.loads(result.stdout.splitlines()[-1]))
    for (_, program, _), (code, said) in zip(helps, results[: len(helps)], strict=True):
        assert code == 0 and said.startswith("usage: ") and "-h, --help" in said, (program, said)
        assert len(said.splitlines()) > 5, (program, said)
    for (name, (page, _)), (code, said) in zip(QUICK.items(), results[len(helps) :], strict=True):
        assert code == 0, said
        assert (clone / page).read_text() == (REPOSITORY / page).read_text(), name
    assert last == (
        1,
        "make_operators_table: tests/pinned/used_by.txt must have each operator, got no rms_norm: "
        "run scripts/make/make_used_by.py first\n",
    )


# `scripts/new` for an operator, for an architecture without a family, and for wrong names; then pytest.
NEW_AND_TESTS = """
import runpy, sys
import pytest

def new(*arguments):
    sys.argv = ["scripts/new.py", *arguments]
    try:
        runpy.run_path("scripts/new.py", run_name="__main__")
    except SystemExit as ended:
        return ended.code

tests = sys.argv[1:]
for name in ("rms_norm", "norms", "Halved"):
    assert new("operator", name) == 1
assert new("family", "dbrx") == 1
assert new("operator", "halved") == 0
assert new("family", "olmoe") == 0
if code := pytest.main(tests):
    sys.exit(code)
"""


@pytest.mark.slow("starts a script and the tests of an operator and of a family in a new process")
def test_an_operator_and_a_family_are_added_as_the_page_says(tmp_path):
    """scripts/new lays both out, and their tests pass as they are. The host and the shader would take minutes
    to build anew, so the operator's calls run on the CPU."""
    clone = new_clone(tmp_path)
    (clone / "torch_moe_mps").unlink()
    copied = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(REPOSITORY / "torch_moe_mps", clone / "torch_moe_mps", ignore=copied)
    for folder in ("tests/support", "tests/ops", "tests/models"):
        (clone / folder).unlink()
        shutil.copytree(REPOSITORY / folder, clone / folder, ignore=copied)
    environment = variables() | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}

    names = ("operators", "documentation", "any_arguments", "halved")
    files = [f"tests/ops/test_{name}.py" for name in names] + ["tests/models/families/test_olmoe.py"]
    chosen = ["-q", "-k", "(halved or olmoe) and not mps", "-m", "not sweep", *files]
    command = [sys.executable, "-c", NEW_AND_TESTS + LEAVE, *chosen]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=clone)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr.splitlines()[:4] == [
        "scripts/new: NAME must be new, got rms_norm: tests/pinned/used_by.txt has this operator",
        "scripts/new: NAME must be new, got norms: torch_moe_mps/ops/families/norms.py exists",
        "scripts/new: NAME must be lower-case letters, digits and _, got 'Halved'",
        "scripts/new: NAME must be new, got dbrx: torch_moe_mps/models/families/dbrx/__init__.py exists",
    ]
    link = r"\[`halved`\]\(\.\./torch_moe_mps/ops/families/halved\.py\)"
    row = rf"\| {link} \| Half of each element \| what users call it for \|  \| in models "
    assert re.search(row, (clone / "docs/operators.md").read_text())
    rows = re.findall(
        r'^    "(\w+)",$', (clone / "torch_moe_mps/transformers/wiring.py").read_text(), re.MULTILINE
    )
    assert "olmoe" in rows and rows == sorted(rows)
    assert '"halved", ' in (clone / "torch_moe_mps/csrc/metal/library.mm").read_text()
    for file in re.findall(r"^wrote   (\S+)$", result.stdout, re.MULTILINE):
        assert "NEW_ONE" not in (clone / file).read_text(), file
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 9, result.stdout


# What installs is replaced: packages of the system, which take longer than those of Python.
INSTALLS = """
make_toolchain() { sleep 0.3; [ -z "${REFUSED:-}" ] || fail "the simulator needs packages"; touch toolchain; }
make_environment() { PYTHON=./python; cat <(echo "ls toolchain") > "$PYTHON"; chmod +x "$PYTHON"; }
"""


@pytest.mark.parametrize("script", ["test", "upstream"])
def test_the_toolchain_is_there_before_it_is_used(script, tmp_path):
    """A script waits for it, and ends with its error. What runs beside changes bash's `$!`."""
    clone = new_clone(tmp_path)
    with open(clone / "scripts" / "environment.sh", "a") as file:
        file.write(INSTALLS)

    def run(**more: str) -> subprocess.CompletedProcess:
        command = [str(clone / "scripts" / script), "tests/a_test.py"]
        return subprocess.run(command, capture_output=True, text=True, env=variables() | more, timeout=60)

    refused = run(REFUSED="1")
    assert refused.returncode == 1 and refused.stderr == "error: the simulator needs packages\n"
    assert run().stdout == "toolchain\n"


def test_seds_programs_are_also_those_of_macos():
    """BSD's takes no bracket behind a substitution's flags."""
    programs = [p for path in (*SHELL, SCRIPTS / "environment.sh") for p in SED.findall(path.read_text())]
    assert len(programs) > 0 and not [p for p in programs if re.search(r"s/[^/]*/[^/]*/\w*}", p)]


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_help_installs_nothing(script, tmp_path):
    """Without an environment it is the comment at the script's head; `demo` needs no package for its own."""
    clone = new_clone(tmp_path)
    command = [str(clone / script.relative_to(REPOSITORY)), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, env=variables(), timeout=60)
    assert result.returncode == 0 and len(result.stdout) > 60 and not result.stderr, result
    head = re.search(r"\A#!.*\n# (.*)", script.read_text())[1]
    assert result.stdout.startswith((head, "usage: ")) and not (clone / ".venv").exists()
