"""scripts/bench/bench_door.py: a stream beside hostile clients."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from bench_door import KINDS
from support import scripted
from support.processes import REPOSITORY

# Kinds that are answered by a model that says nothing and reads 4,096 tokens; the others are refused.
ANSWERED = {
    "numbers": 400, "text": 400, "messages": 400, "string": 200, "escapes": 200, "objects": 200, "deep": 200,
    "tools": 400, "enum": 200, "tokenize": 200,
}  # fmt: skip


@pytest.mark.sweep
def test_hostile_requests_are_what_they_are_called():
    """Large ones are read to where their name says, and refused for the length of the prompt, or answered."""
    found = {}
    with scripted.server() as here:
        for name, kind in KINDS.items():
            if kind.sees or name not in ANSWERED:
                continue
            asked = urllib.request.Request(here.url + kind.path, json.dumps(kind.body(4096)).encode())
            asked.add_header("content-type", "application/json")
            try:
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    found[name] = answer.status
            except urllib.error.HTTPError as error:
                found[name] = error.code
    assert found == ANSWERED


@pytest.mark.sweep
def test_each_kind_has_a_row():
    script = REPOSITORY / "scripts" / "bench" / "bench_door.py"
    command = [sys.executable, str(script), "--seconds", "1", "--kind", "busy", "--kind", "slow"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"^\| (\w+) \| \d+ ms \| \d+ ms \| -?\d+ ms \|$", result.stdout, re.MULTILINE)
    assert rows == ["nobody", "busy", "slow"]
    assert re.search(r"largest delay by a request: -?\d+\.\d\d s, of at most 0.3 s$", result.stdout)
