"""Agents that `launch` starts: programs of the tests, which ask as the real ones do, and note it."""

import json
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request

import pytest
from support import scripted, serving
from support.processes import environment

from torch_moe_mps.commands import main
from torch_moe_mps.commands.launch import _AGENTS

# Asks for a chat at the URL, and for the model, that it was given, and notes all that it was told.
AGENT = """#!{python}
import json, os, re, signal, sys, time, urllib.request
words, told = sys.argv[1:], dict(os.environ)
if "OPENCODE_CONFIG_CONTENT" in told:
    config = json.loads(told["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    url = config["provider"][provider]["options"]["baseURL"]
elif "ANTHROPIC_BASE_URL" in told:
    url, model = told["ANTHROPIC_BASE_URL"] + "/v1", told["ANTHROPIC_MODEL"]
else:
    url, model = re.search('base_url="(.*?)"', " ".join(words))[1], words[words.index("-m") + 1]
body = {{"model": model, "messages": [{{"role": "user", "content": "hello"}}], "max_tokens": 5}}
key = told.get("MOE_MPS_API_KEY", "none")
headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + key}}
request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
json.dump({{"words": words, "told": told, "url": url, "answer": answer}}, open({output!r}, "w"))
if words[-1:] == ["waits"]:
    print("waits", flush=True)
    time.sleep(60)
sys.exit(7)
"""


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Puts a program in the place of each agent. Returns: what reads its notes."""
    output = tmp_path / "told.json"
    (tmp_path / "bin").mkdir()
    for name in _AGENTS:
        program = tmp_path / "bin" / name
        program.write_text(AGENT.format(python=sys.executable, output=str(output)))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return lambda: json.loads(output.read_text())


@pytest.mark.parametrize("name", _AGENTS)
def test_the_server_that_runs_is_asked(name, agent, capsys):
    """And goes on; the exit code is the agent's."""
    with scripted.server() as here:
        here.says("yes")
        port = here.url.rpartition(":")[2].partition("/")[0]
        assert main(["launch", name, "--port", port, "--", "exec", "--json", "a question"]) == 7
        told = agent()
        assert told["words"][-3:] == ["exec", "--json", "a question"] and told["answer"] == "yes"
        assert main(["launch", name, here.served.name, "--port", port]) == 7
    assert f"{here.served.name} answers at http://localhost:{port}/v1\n" in capsys.readouterr().err
    variables = {key for key in told["told"] if key.startswith(("ANTHROPIC", "OPENCODE", "CLAUDE_CODE_DIS"))}
    assert bool(variables) == (name != "codex")
    if name == "codex":  # whose options are TOML
        options = [
            word for before, word in zip(told["words"], told["words"][1:], strict=False) if before == "-c"
        ]
        read = [tomllib.loads(option) for option in options]
        assert read[0] == {"model_provider": "torch-moe-mps"} and read[2] == {"model_context_window": 4096}
        provider = {"name": "torch-moe-mps", "base_url": told["url"], "wire_api": "responses"}
        assert read[1]["model_providers"]["torch-moe-mps"] == provider
    if name == "opencode":  # which shortens a conversation that has more tokens than context less output
        (provider,) = json.loads(told["told"]["OPENCODE_CONFIG_CONTENT"])["provider"].values()
        assert provider["models"][here.served.name]["limit"] == {"context": 4096, "output": 1024}


@pytest.mark.slow("a server in a process of its own")
def test_a_server_runs_as_long_as_the_agent(printable, agent, monkeypatch, tmp_path):
    """At another port than one that is taken; with a key; the same answer as that of `generate`."""
    monkeypatch.setenv("MOE_MPS_API_KEY", "secret")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert (
            main(["launch", "codex", str(printable), "--port", port, "--device", "cpu", "--prompt-disk", "0"])
            == 7
        )
    told = agent()
    assert 'env_key="MOE_MPS_API_KEY"' in " ".join(told["words"]) and f":{port}/" not in told["url"]
    assert told["answer"] == serving_text(printable)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(told["url"] + "/models")


def serving_text(folder) -> str:
    with serving.client_of(folder, key="secret") as client:
        answer = client.chat.completions.create(model="m", messages=serving.said("hello"), max_tokens=5)
    return answer.choices[0].message.content


@pytest.mark.sweep
def test_the_end_of_launch_ends_both(printable, agent, tmp_path):
    """As by a window that is closed, while the agent works."""
    command = [sys.executable, "-m", "torch_moe_mps", "launch", "claude", str(printable), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--", "waits"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP
    finally:
        process.kill()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(agent()["url"] + "/models")


def test_what_is_wrong_is_one_line(agent, tmp_path, refused, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = refused("launch", "codex", "--port", port)
    assert error == f"no server answers at port {port}: name a MODEL, which one is started for"
    (tmp_path / "bin" / "opencode").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    error = refused("launch", "opencode", tmp_path)
    assert error == "opencode is not installed: `npm install -g opencode-ai` brings it"


@pytest.mark.sweep
def test_a_server_that_does_not_start_is_one_line(agent, tmp_path, refused, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    error = refused("launch", "codex", tmp_path / "model", progress=True)
    assert error.startswith("the server has ended: ") and "error: " not in error
