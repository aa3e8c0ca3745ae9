"""scripts/bench/bench_agents.py: agents that ask as Codex and Claude Code do, and a server that is killed."""

import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from agents import CLAUDE, CODEX, Agent, Played
from support import scripted, trained
from support.processes import REPOSITORY

CALL = '<tool_call>\n{"name": "tool_3", "arguments": {"cmd": "ls"}}\n</tool_call>'


@pytest.mark.parametrize("shape", [CODEX, CLAUDE])
def test_an_agent_sends_its_conversation_back(shape):
    """With the results of its calls; one that fails or that it leaves is asked again, until it is lost."""
    played, fails = Played(), [2]

    def wait(job):
        fails[0] -= 1
        if fails[0] == 0:
            job.cancel()  # as at the end of a server

    with scripted.server(context=100_000) as here:
        here.says(*[CALL] * 6, "Done.", *[CALL] * 6).wait = wait
        server = SimpleNamespace(port=int(here.url.rpartition(":")[2]), context=100_000, wait=lambda: None)
        agent = Agent(0, shape, server, played, 8, 40.0)
        agent.run()
    assert (len(played.asked), played.again, played.lost, played.conversations) == (8, 1, 0, 1)
    said = [asked.said for asked in played.asked]
    assert (
        said
        == [[("tool_3", '{"cmd": "ls"}')]] * 5 + [[("text", "Done.")]] + [[("tool_3", '{"cmd": "ls"}')]] * 2
    )
    items = [asked.body["input" if shape is CODEX else "messages"] for asked in played.asked]
    for before, after in itertools.pairwise(items):
        assert after[: len(before)] == before and len(after) > len(before)
    count, characters = shape.tools
    assert [len(asked.body["tools"]) for asked in played.asked] == [count] * 8
    assert all(asked.tokens > characters / 40 for asked in played.asked)  # of one character each


@pytest.mark.sweep
def test_nothing_is_wrong_or_lost_in_an_hour():
    """Kills and a full disk among it; few tokens are read again."""
    if trained.smollm2() is None:
        pytest.skip(trained.MISSING)
    script = REPOSITORY / "scripts" / "bench" / "bench_agents.py"
    command = [sys.executable, str(script), "--requests", "12", "--layers", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if "--small-disk" in result.stderr:
        pytest.skip("no disk that may be filled up")
    assert result.returncode == 0, result.stderr
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", result.stdout, re.MULTILINE))
    assert rows["wrong answers"] == rows["lost requests"] == "0"
    assert float(re.search(r"\((.*) %\)", rows["of these read again"])[1]) < 2
