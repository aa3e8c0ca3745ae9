"""One token of real models on GPUs of 10 to 80 cores: simdgroups a core, and keys of the busiest core."""

import pytest
import torch
from support.pinned import assert_pinned

pytestmark = pytest.mark.on("mps")
CORES = (10, 20, 40, 60, 80)
# {model: (its matrices, (heads, heads of keys, width of a head))}: (name, rows, inputs) in a layer. Those of
# "q k v" and "gate up" norm their inputs.
MODELS = {
    "Qwen3-30B-A3B": ((("q k v", 5120, 2048), ("o", 2048, 4096)), (32, 4, 128)),
    "Qwen3-235B-A22B": ((("q k v", 9216, 4096), ("o", 4096, 8192)), (64, 4, 128)),
    "Mixtral 8x7B": ((("q k v", 6144, 4096), ("o", 4096, 4096)), (32, 8, 128)),
    "gpt-oss-20b": ((("q k v", 5120, 2880), ("o", 2880, 4096)), (64, 8, 64)),
    "GLM-4.5-Air": ((("q k v", 14336, 4096), ("o", 4096, 12288)), (96, 8, 128)),
    "OLMoE-1B-7B": ((("q k v", 6144, 2048), ("o", 2048, 2048)), (16, 16, 128)),
    "Qwen3-4B": (
        (("q k v", 6144, 2560), ("o", 2560, 4096), ("gate up", 19456, 2560), ("down", 2560, 9728)),
        (32, 8, 128),
    ),
    "Gemma 3 4B": (
        (("q k v", 4096, 2560), ("o", 2560, 2048), ("gate up", 20480, 2560), ("down", 2560, 10240)),
        (8, 4, 256),
    ),
    "Llama 3.2 1B": (
        (("q k v", 3072, 2048), ("o", 2048, 2048), ("gate up", 16384, 2048), ("down", 2048, 8192)),
        (32, 8, 64),
    ),
    "Llama 3.1 8B": (
        (("q k v", 6144, 4096), ("o", 4096, 4096), ("gate up", 28672, 4096), ("down", 4096, 14336)),
        (32, 8, 128),
    ),
}
KEYS = (2048, 4096, 8192, 16384)


def simdgroups_of_core(name: str, rows: int, inputs: int, cores: int) -> float:
    normed = name in ("q k v", "gate up")
    plan = torch.ops.moe_mps._plan_linear(1, rows, name == "gate up", cores, inputs=inputs, normed=normed)
    _, _, grid, _, threads, *_ = plan.replace(",", "").split()
    return int(grid.split("x")[0]) * int(threads) / 32 / cores


@pytest.mark.pinned
def test_simdgroups_of_a_core(simulated):
    lines = []
    for model, (matrices, _) in MODELS.items():
        for name, rows, inputs in matrices:
            counts = [simdgroups_of_core(name, rows, inputs, cores) for cores in CORES]
            lines.append(f"{model}, {name}: {' '.join(f'{count:.1f}' for count in counts)}\n")
            assert min(counts) >= 12, (model, name)
    assert_pinned("plans", "simdgroups of a core", "".join(lines))


@pytest.mark.pinned
def test_keys_of_the_busiest_core(simulated):
    """Over those of an even share."""
    lines = []
    for model, (_, (heads, key_heads, width)) in MODELS.items():
        for keys in KEYS:
            shares = []
            for cores in CORES:
                plan = torch.ops.moe_mps._plan_attention(1, 1, heads, key_heads, keys, width, width, cores)
                chunks, blocks, groups = map(int, plan.split()[2].split("x"))
                chunk = int(plan.split()[-3])
                busiest = -(-chunks * blocks * groups // cores) * chunk
                shares.append(busiest * cores / (keys * blocks * groups))
            lines.append(f"{model}, {keys} keys: {' '.join(f'{share:.2f}' for share in shares)}\n")
    assert_pinned("plans", "keys of the busiest core", "".join(lines))
