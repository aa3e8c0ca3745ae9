"""`torch-moe-mps report`: phases in processes of their own, all in one file."""

import json
import zipfile

import pytest
import torch

from torch_moe_mps.commands import main, report


@pytest.fixture
def phases(monkeypatch, tmp_path):
    """Runs these phases where a GPU is said to be; gives the report's files."""

    def run(*made: report.Phase, options: tuple[str, ...] = ()) -> tuple[int, dict[str, str]]:
        monkeypatch.setattr(report, "is_available", lambda: True)
        monkeypatch.setattr(report, "phases", lambda model: iter(made))
        code = main(["report", "--output", str(tmp_path / "out.zip"), *options])
        with zipfile.ZipFile(tmp_path / "out.zip") as file:
            return code, {name: file.read(name).decode() for name in file.namelist()}

    return run


def phase(name: str, code: str, minutes: float = 1, **environment: str) -> report.Phase:
    return report.Phase(name, ("-c", code, "{json}"), minutes, environment)


def test_each_phase_leaves_what_it_had(phases, capsys):
    """One that fails, one that aborts and one that takes too long leave the others, and what they wrote."""
    write = (
        "import sys, os, pathlib, time\n"
        "pathlib.Path(sys.argv[1]).write_text('{}')\n"
        "print('begun', flush=True)\n"
    )
    code, files = phases(
        phase("good", write + "print(os.environ['SETTING'])", SETTING="7"),
        phase("bad one", "print('so far'); raise SystemExit('no such model')"),
        phase("aborted", write + "os.abort()"),
        phase("slow", write + "time.sleep(60)", minutes=1 / 60),
    )
    assert code == 1
    summary = {name: entry["outcome"] for name, entry in json.loads(files["summary.json"]).items()}
    assert summary == {
        "good": "done",
        "bad one": "failed: no such model (exit code 1)",
        "aborted": "failed: begun (exit code -6)",
        "slow": "ended after 0 minutes",
    }
    assert files["good.txt"] == "begun\n7\n" and files["bad_one.txt"] == "so far\nno such model\n"
    assert {name for name in files if name.endswith(".json")} == {
        *("good.json", "aborted.json", "slow.json", "summary.json")
    }
    out, err = capsys.readouterr()
    assert "[2/4] bad one failed: no such model" in err and "Please attach" in out


def test_what_is_left_out(phases, capsys):
    nothing = [phase(name, "pass") for name in ("quick", "bench", "bench without capture", "check")]
    code, files = phases(*nothing, options=("--without", "bench,check"))
    assert code == 0 and [*json.loads(files["summary.json"])] == ["quick"]
    code, files = phases(
        phase("a", "import time; time.sleep(2)"), phase("b", "pass"), options=("--minutes", "0.01")
    )
    assert code == 1
    assert json.loads(files["summary.json"])["b"]["outcome"] == "left out: no time"
    assert main(["report", "--without", "chek"]) == 1
    assert "--without must be some of a, b, got 'chek'" in capsys.readouterr().err


def test_ctrl_c_leaves_what_is_known(phases, monkeypatch):
    made = report.executed

    def interrupted(each, *others):
        if each.name == "b":
            raise KeyboardInterrupt
        return made(each, *others)

    monkeypatch.setattr(report, "executed", interrupted)
    code, files = phases(phase("a", "print(1)"), phase("b", "pass"))
    assert code == 130 and files["a.txt"] == "1\n" and [*json.loads(files["summary.json"])] == ["a"]


def test_names_of_the_user_stay_out(phases):
    _, files = phases(phase("a", "print('/some/where/of/mine/file.txt')"))
    assert files["a.txt"] == ".../file.txt\n"


def test_phases_are_commands():
    """Each parses, and those with a model follow the quick check."""
    from torch_moe_mps.commands.arguments import parser

    made = list(report.phases("some/model"))
    names = [each.name for each in made]
    assert names[:3] == ["quick", "probe", "answer"] and names[-1] == "large"
    assert {"bench without capture", "experts"} < {*names} and len({*names}) == len(names)
    without_model = ["quick", "probe", "disk", "check", "large"]
    assert [each.name for each in report.phases(None)] == without_model
    assert sum(each.minutes for each in made) <= 120
    for each in made:
        if each.command[1] == "torch_moe_mps":
            parser().parse_args(each.command[2:])


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(report, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main(["report"]) == 2
    assert "no Apple GPU here" in capsys.readouterr().out
