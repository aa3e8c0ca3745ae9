"""When one process of a pipeline fails, the others end in time with one line that names it."""

import socket
import subprocess
import sys
import time
import warnings

import pytest
import torch
from support import tiny_models
from support.pipeline import launch, start
from support.processes import environment
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.pipeline.exchange import ModelCall
from torch_moe_mps.pipeline.loop import find_loop
from torch_moe_mps.pipeline.peers import PeerError, Timeouts
from torch_moe_mps.pipeline.running import Running
from torch_moe_mps.pipeline.stages import Stage

HOST = socket.gethostname()
CLOSED = "PeerError: moe_mps: rank {} (" + HOST + ") closed its connection"
SURVIVABLE = {
    "other ids": (
        f"PeerError: moe_mps: rank 1 ({HOST}) was called with other inputs than rank 0 ({HOST}): call the",
        CLOSED.format(0),
    ),
    "raises": (CLOSED.format(1), "MemoryError: no memory"),
    "afterwards": (
        "PeerError: moe_mps: the pipeline has ended",
        "PeerError: moe_mps: the pipeline has ended",
    ),
    "stalls": (f"PeerError: moe_mps: rank 1 ({HOST}) did not answer within 2 s", CLOSED.format(0)),
    "other weights": (f"PeerError: moe_mps: rank 1 ({HOST}) has checkpoint ",) * 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    with tiny_models.groups_of_32():
        tiny_models.tiny_model(
            "qwen3_moe", num_hidden_layers=3, mlp_layer_types=["sparse"] * 3
        ).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def outcomes(folder):
    return launch("failing", folder, [name for name in SURVIVABLE if name != "afterwards"])


@pytest.mark.parametrize("failure", SURVIVABLE)
def test_each_process_gets_one_line(outcomes, failure):
    for outcome, line in zip(outcomes, SURVIVABLE[failure], strict=True):
        assert outcome[failure].startswith(line) and "\n" not in outcome[failure]


def test_features_for_layers_of_one_process():
    """What layers get beside the tokens is part of what the processes compare."""
    ids = torch.ones(1, 2, dtype=torch.int64)
    with_features, without, other_ids = (
        ModelCall(1, ids, None, ["features"]),
        ModelCall(1, ids),
        ModelCall(1, ids + 1),
    )
    assert len({with_features.digest, without.digest, other_ids.digest}) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("failure", ["stops", "stops while loading", "dies"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_each_process_ends_when_another_does(folder, failure, culprit):
    """Of three: one that waits for a process that has failed ends, and so do those that wait for it."""
    processes = start("failing", folder, [failure], culprit, processes=3)
    silent, began = processes.pop(culprit), time.monotonic()
    ends = [process.end(60) for process in processes]
    silent.end(0)
    assert time.monotonic() - began < 40
    for code, output, errors in ends:
        assert code == 0, errors[-2000:]
        assert "PeerError: moe_mps: rank" in output
    assert any(f"moe_mps: rank {culprit} ({HOST}) " in output for _, output, _ in ends)


@pytest.mark.sweep
def test_torchrun_leaves_no_process(folder, tmp_path):
    """A rank that raises ends the run; the other says which it was."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys, os\n"
        "from support.pipeline import prompt, rank, staged\n"
        "open(f'{sys.argv[2]}/{rank()}.pid', 'w').write(str(os.getpid()))\n"
        "model = staged(sys.argv[1])\n"
        "assert rank() == 0, 'the end of rank 1'\n"
        "try:\n"
        "    model.generate(prompt(), max_new_tokens=4)\n"
        "except RuntimeError as error:\n"
        "    open(f'{sys.argv[2]}/line', 'w').write(str(error))\n"
        "    raise\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, script, folder, tmp_path], capture_output=True, text=True, timeout=120, env=environment()
    )
    assert run.returncode != 0
    line = tmp_path / "line"  # unless torchrun ended the process before it could write
    assert not line.exists() or line.read_text() in (f"moe_mps: rank 1 ({HOST}) closed its connection",)
    for rank in range(2):
        pid = (tmp_path / f"{rank}.pid").read_text()
        assert subprocess.run(["ps", "-p", pid], capture_output=True, timeout=60).returncode != 0


class Alone:
    """In the place of Peers, for the last of two stages: what arrives is random, until it fails."""

    rank, size, timeouts, fails = 0, 2, Timeouts(), False

    def receive(self, source, kind, call, limit):
        if self.fails:
            raise PeerError("moe_mps: rank 1 (host) closed its connection")
        return [torch.randn(1, 1, 32)]

    def send(self, *args):
        pass

    def flush(self, *args):
        pass

    def failed(self, error):
        pass


@torch.no_grad()
def test_a_failure_while_a_token_is_captured(monkeypatch):
    """It is raised as it is, and nothing is said of the capture."""
    monkeypatch.setenv("MOE_MPS_CAPTURE", "1")
    model = tiny_models.tiny_model("llama", num_hidden_layers=2)
    stage = Stage(0, [1, 1], find_loop(model))
    stage.cut(model)
    torch_moe_mps.accelerate(model.eval())
    Running(model, stage, peers := Alone())
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(3):
        model(token, **cache_argument(model, cache))  # begins with a call that has another kind of cache
    peers.fails = True
    with warnings.catch_warnings(), pytest.raises(PeerError, match="closed its connection"):
        warnings.simplefilter("error")
        model(token, **cache_argument(model, cache))
    peers.fails = False
    assert not captures_of(model).programs
    for _ in range(3):
        model(token, **cache_argument(model, cache))
    (program,) = captures_of(model).programs
    model(token, **cache_argument(model, cache))
    assert captures_of(model).programs == [program]  # it goes on to hold
