"""Changes of eager code are noticed: a module runs it, or gives what it gives."""

import pytest
from support import mutants
from support.sweep import in_sweep

ARCHITECTURES = (
    *("bamba", "granitemoehybrid", "nemotron_h", "zamba2", "kimi_linear", "qwen3_next", "jamba"),
    *("deepseek_v4", "minimax_m3_vl", "qwen4_exp", "deepseek_v32", "hy_v4"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3"),
)
IN_EACH, OFTEN = 10, 1


@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("nemotron_h",)))
def test_changes_are_noticed(architecture, monkeypatch, request):
    count = IN_EACH if request.config.getoption("markexpr") == "sweep" else OFTEN
    found = [*mutants.tried(architecture, count, monkeypatch)]
    assert len(found) == count and not {str(mutant): missed for mutant, missed in found if missed}
