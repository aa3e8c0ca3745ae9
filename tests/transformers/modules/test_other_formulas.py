"""Modules that rules replace: as they are, and with one thing changed in their code, which they then run."""

import copy

import pytest
import torch
from support.models import assert_close, edit_forward, in_parts, tiny
from support.sweep import rows_in_sweep

import torch_moe_mps

CONFIGS = {
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "minimax": {"layer_types": ["full_attention", "linear_attention"]},
}
# The classes whose forwards are edited, and the operators that run in their place.
CLASSES = {
    **dict.fromkeys(("DeepseekV4HyperConnection", "HYV4HyperConnection"), "hyper_connection"),
    **dict.fromkeys(("KimiLinearDeltaAttention", "NemotronHMamba2Mixer"), "linear_attention_"),
    **{"MiniMaxLightningAttention": "linear_attention_", "JambaMambaMixer": "selective_scan_"},
}
# Architecture, class, a part of its forward, and what stands there instead.
CASES = [
    ("deepseek_v4", "DeepseekV4HyperConnection", "2 * torch.sigmoid(", "3 * torch.sigmoid("),
    ("deepseek_v4", "DeepseekV4HyperConnection", "comb.sum(dim=-1, keepdim", "comb.sum(dim=-2, keepdim"),
    ("hy_v4", "HYV4HyperConnection", "post_b) + self.hc_eps", "post_b) - self.hc_eps * 1000"),
    ("kimi_linear", "KimiLinearDeltaAttention", "torch.sigmoid(self.b_proj", "2 * torch.sigmoid(self.b_proj"),
    ("kimi_linear", "KimiLinearDeltaAttention", "self.forget_gate(hidden", "0.5 * self.forget_gate(hidden"),
    ("nemotron_h", "NemotronHMamba2Mixer", "D=self.D,", "D=-self.D,"),
    ("nemotron_h", "NemotronHMamba2Mixer", "B = B.view(", "B = -B.view("),
    ("jamba", "JambaMambaMixer", "z=gate,", "z=-gate,"),
    ("jamba", "JambaMambaMixer", "dt_softplus=True", "dt_softplus=False"),
    ("minimax", "MiniMaxLightningAttention", "F.sigmoid(self.output_gate(", "F.silu(self.output_gate("),
]
FIRST = {case[1]: case for case in reversed(CASES)}  # of each class
IDS = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("architecture", "name", "old", "new"), rows_in_sweep(CASES, FIRST.values()))
def test_another_formula_keeps_its_own_code(architecture, name, old, new):
    model = tiny(architecture, **CONFIGS.get(architecture, {}))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # those that are near 0 or 1
            parameter.data += 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(3))
    edited = copy.deepcopy(model)
    paths = {path for path, module in edited.named_modules() if type(module).__name__ == name}
    for path in paths:
        edit_forward(edited.get_submodule(path), old, new)
    for each in (model, edited):
        report = torch_moe_mps.accelerate(each)
        runs = {row.name for row in report.rows if CLASSES[name] in str(row.replaced_by)} & paths
        assert runs == (paths if each is model else set())
        forgets = architecture == "jamba" and each is model  # Mamba-1's own code, in front of several tokens
        steps = (1, 1, 1, 1) if forgets else (1, 3)
        expected, _ = in_parts(torch_moe_mps.restore(copy.deepcopy(each)), IDS, *steps)
        assert_close(torch.cat(in_parts(each, IDS, 1, 3)[0], 1), torch.cat(expected, 1), 1e-5)
