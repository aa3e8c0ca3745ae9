"""FSDP2 (`fully_shard`), which changes the classes of modules and shards parameters."""

import subprocess
import sys

import pytest
import torch.distributed as dist
import transformers
from support.processes import REPOSITORY, environment
from support.sharding import check_fully_shard
from support.sweep import in_sweep

transformers.logging.set_verbosity_error()
ARCHITECTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.fixture
def group():
    """A process group with only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES[:2], ARCHITECTURES[:1]))
def test_one_process(group, architecture):
    check_fully_shard(architecture, "modules")


@pytest.mark.sweep
def test_two_processes():
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*launch, REPOSITORY / "tests/support/sharding.py", *ARCHITECTURES]
    worker = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment())
    assert worker.returncode == 0, worker.stderr[-3000:]
