"""Expert parallelism over two processes (gloo): the logits of one process that runs the model's own code."""

import subprocess
import sys

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager, output, prompt
from support.processes import environment

transformers.logging.set_verbosity_error()

WORKER = """
import sys
import torch
import torch.distributed as dist
import transformers
from torch.profiler import profile
from transformers.distributed import DistributedConfig

import torch_moe_mps
from torch_moe_mps.transformers import is_experts

folder = sys.argv[1]
parallel = DistributedConfig(tp_size=2, ep_size=2)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=parallel).eval()
report = torch_moe_mps.accelerate(model)
assert all(row.replaced_by for row in report.rows if row.kind == "experts"), str(report)
assert {module.num_experts for module in model.modules() if is_experts(module)} == {4}
with torch.no_grad(), profile() as profiled:
    logits = model(input_ids=torch.load(f"{folder}/ids.pt")).logits
assert "moe_mps::moe_experts" in {event.key for event in profiled.key_averages()}
torch.save(logits, f"{folder}/logits{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_two_processes_give_the_logits_of_one(architecture, tmp_path):
    """Each process holds half of the experts and all of the rest; DeepSeek-V3 has a shared expert."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    model = eager(tiny_models.tiny_model(architecture))
    expected = output(model, prompt())
    model.save_pretrained(tmp_path)
    torch.save(prompt(), tmp_path / "ids.pt")
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    worker = subprocess.run(
        [*command, tmp_path / "worker.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert worker.returncode == 0, worker.stderr[-3000:]
    for rank in range(2):
        assert_close(torch.load(tmp_path / f"logits{rank}.pt"), expected, 1e-5)
