"""The self-check takes every branch of the shaders, and notices kernels that are wrong at real sizes."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.faults import with_faults
from support.processes import REPOSITORY

from torch_moe_mps.ops import OPERATORS
from torch_moe_mps.ops._formats import FORMATS
from torch_moe_mps.ops._samples import OF_HEADS
from torch_moe_mps.selfcheck import calls, once
from torch_moe_mps.selfcheck.compare import compare

SHADERS = REPOSITORY / "torch_moe_mps" / "shaders"
AFFINE = FORMATS["affine4_32"]
# (file, line of the source, what the condition never is): why.
NEVER = {
    (
        "matmul/down.h",
        "if (m >= count) continue;",
        True,
    ): "pairs come in twos while two are left, kFewPairs of them",
    (
        "matmul/epilogue.h",
        "if (column >= params.outputs) return;",
        True,
    ): "no valid `order` has such a number",
}


def checks_of(names, dtype: torch.dtype) -> list[once.CallsToCheck]:
    return once.checks_of(calls.subjects(names, [dtype], [AFFINE]))


def compared(check: once.CallsToCheck):
    """The calls, and what is wrong with each."""
    with contextlib.closing(check.calls()) as made:
        for call in made:
            yield call, compare(call)


def never_taken(simulated, folder: Path, names, dtypes) -> set[tuple[str, str, bool]]:
    """What conditions that these operators' kernels evaluate never are; all results are right."""
    from simulator.coverage import Coverage

    coverage = Coverage()
    with simulated.intercepted(coverage):
        for dtype in dtypes:
            for check in checks_of(names, dtype):
                for call, finding in compared(check):
                    assert finding is None, (check.label, call, finding)
    outcomes = coverage.outcomes(folder)
    assert len(outcomes) > 20
    missing = [outcome for outcome, count in outcomes.items() if not count]
    lines = {file: (SHADERS / file).read_text().splitlines() for file in {each.file for each in missing}}
    return {(each.file, lines[each.file][each.line - 1].strip(), each.taken) for each in missing}


@pytest.mark.sweep  # runs all calls of the self-check, counting branches
def test_every_branch(simulated, tmp_path):
    """With one format of weights, in float32 and in 16 bits."""
    dtypes = (torch.float32, torch.float16)
    assert never_taken(simulated, tmp_path, OPERATORS, dtypes) == NEVER.keys()


def test_branches_of_combining(simulated, tmp_path):
    """One family for every change: the others take minutes."""
    names = ["silu_mul_stacked", "weighted_sum_residual_norm_stacked_"]
    missing = never_taken(simulated, tmp_path, names, [torch.float32])
    without_weights = ("combine.h", "if (weighted)", False)  # of the transposed products of experts
    assert {line for line in missing if line[0] == "combine.h"} == {without_weights}


@pytest.mark.slow("counts the branches of all calls of a family")
def test_branches_of_tiles(simulated, tmp_path):
    """Branches of blocks are those of all attention."""
    missing = never_taken(simulated, tmp_path, ["_seal_tiles_", "_tiled_attention"], [torch.float32])
    assert not {line for line in missing if line[0] in ("attention/tiles.h", "attention/seal.h")}


class Fault(NamedTuple):
    """`text` of a shader becomes `wrong`. `at_size`: only calls at real sizes, or with odd values, notice."""

    operator: str
    text: str
    wrong: str
    at_size: bool = True


NORM_AGAIN = "    x.input = row.normed(x, params);\n    squares += row.add"
INPUTS = "input_row(pairs.v[m], params) * params.inputs"
TILE_INPUTS = "input_row(pairs.at(pair), params) * params.inputs"
SINK = "load_one(sinks, params.sinks_dtype, head)"
LOW_WORD = "words.v[max(word - 1, 0)]"
ROUTER_ROW = "const ulong row = ulong(group) * simdgroups + simdgroup;\n  if (row >= params.rows)"
ADDED = "narrow<T>(widen(load<N>(residual + column)) + sum)"
KEY = "const uint key = tile + place.first_key() + 8 * n;"
SLICES = "for (uint i = lane; i < params.slices; i += kSimdWidth) sum"
CAPPED = "params.softcap * precise::tanh(x / params.softcap)"
FAULTS = {
    "rows of sums over 6,144": Fault(
        "weighted_sum_residual_norm_stacked_", ADDED, ADDED.replace("+ sum", "- sum")
    ),
    "rows of norms over 8,192": Fault("rms_norm", NORM_AGAIN, NORM_AGAIN.replace("+=", "-=")),
    "rows of layer norms over 8,192": Fault(
        "layer_norm",
        "sum = add_dot(sum, widen(row.normed(row.columns(column), params)), ones);",
        "sum = 0.0f;",
    ),
    "gated delta rule behind token 128": Fault(
        "gated_delta_rule_", "float(next[1]));", "float(next[1])) * (first + t < 128 ? 1.0f : 0.0f);"
    ),
    "tokens that are pending": Fault(
        "_gated_delta_rule_", "scaled = k_scale * written;\n  }", "scaled = written;\n  }", at_size=False
    ),
    "tokens of a selective scan that are pending": Fault(
        "selective_scan_", "rows[t * width + 2 * k", "rows[0 * width + 2 * k", at_size=False
    ),
    "positions that are pending": Fault(
        "causal_conv1d_update_", "params.keep != 0 ? count :", "params.keep != 0 ? 0 :", at_size=False
    ),
    "scans behind token 64": Fault(
        "selective_scan_",
        "first < params.tokens; first += kS",
        "first < min(params.tokens, 64u); first += kS",
    ),
    "windows over 65,536 keys": Fault("cached_attention", "int(params.window)", "int(ushort(params.window))"),
    "keys behind 65,536": Fault(
        "cached_attention", "start + ulong(tile) * stride", "start + ulong(ushort(tile)) * stride"
    ),
    "masks behind key 65,536": Fault(
        "cached_attention", KEY, KEY.replace("= ", "= ushort(").replace(";", ");")
    ),
    "streams over 4,096 columns": Fault(
        "_hyper_connection",
        SLICES,
        "for (uint i = lane; i < min(params.slices, kSimdWidth); i += kSimdWidth) sum",
    ),
    "an offset of x in 16 bits": Fault("linear_quantized", INPUTS, f"uint(ushort({INPUTS}))"),
    "an offset of x in 16 bits, in tiles": Fault(
        "linear_quantized", TILE_INPUTS, f"uint(ushort({TILE_INPUTS}))"
    ),
    "shares of a normed token's squares": Fault("linear_quantized", "squares.v[0] = sums.at(R, 0);", ""),
    "shares of a token's inputs": Fault("_mlp_quantized", "dots.v[r][0] = sums.at(r, 0)", ""),
    "the last element of a count": Fault(
        "silu_mul_stacked", "first + width && i < params.count", "first + width && i + 1 < params.count"
    ),
    "low bits of scores": Fault("_index_topk", "return bits ^ (", "return (bits & ~255u) ^ ("),
    "large scores with a soft cap": Fault("cached_attention", CAPPED, f"clamp({CAPPED}, -15.0f, 15.0f)"),
    "large sinks": Fault("cached_attention", SINK, f"min({SINK}, 20.0f)"),
    "masks of the lowest half": Fault("cached_attention", "? -65504.0f :", "? -70000.0f :"),
    "experts over 64": Fault("moe_bucket", "digit < upper_digits", "digit < min(upper_digits, 1u)"),
    "pairs of several runs": Fault(
        "moe_bucket", "uint place = start + before[bucket];", "uint place = start;"
    ),
    "slots over 32": Fault("weighted_sum_stacked", "row * count + base + lane)", "row * count + lane)"),
    "streams over 1,024 columns": Fault(
        "_hyper_connection", "4 * (group.x * kHyperThreads + thread", "4 * (thread"
    ),
    "heads over 256 elements": Fault("rope", "if (pair != first) x = load_pairs<N>(head, from);", ""),
    "windows of many tokens": Fault(
        "_pool_window_", "uint i = 1; i < params.parts", "uint i = 2; i < params.parts"
    ),
    "routers of 256 rows": Fault("moe_router", ROUTER_ROW, ROUTER_ROW.replace(" + simdgroup;", ";")),
    "a zero with a sign": Fault("moe_router", "as_type<uint>(x == 0.0f ? 0.0f : x)", "as_type<uint>(x)"),
    "codes in the highest bits": Fault(
        "linear_quantized", LOW_WORD, f"({LOW_WORD} & 0x7fffffffu)", at_size=False
    ),
}


def test_every_fault_changes_a_shader():
    assert {fault.operator for fault in FAULTS.values()} <= {*OPERATORS}
    shaders = "".join(file.read_text() for file in SHADERS.rglob("*.h"))
    assert not [name for name, fault in FAULTS.items() if fault.text not in shaders]


@pytest.mark.sweep  # of real sizes
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_at_real_sizes(simulated, name):
    fault = FAULTS[name]
    subject = next(s for s in calls.subjects([fault.operator], [torch.float32], [AFFINE]) if not s.given)
    with simulated.intercepted(with_faults({fault.text: fault.wrong})):
        seen = {check.label: [f for _, f in compared(check) if f] for check in once.checks_of([subject])}
    plain, at_size = seen[str(subject)], seen[f"{subject} at size"]
    assert (at_size and not plain) if fault.at_size else plain, seen


def test_what_a_first_use_takes():
    """Of one dtype, format and width of heads: what does not fit into 3 seconds waits for the next time."""
    heads = {name: [(128, 128)] for name in OF_HEADS}
    subjects = calls.subjects(OPERATORS, [torch.bfloat16], [AFFINE], heads, [()])
    count = of_arguments = 0
    for check in once.checks_of(subjects):
        with contextlib.closing(check.calls()) as made:
            for call in made:
                tensors = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
                count, of_arguments = count + 1, of_arguments + sum(t.nbytes for t in tensors)
    assert count <= 800 and of_arguments < 125e6, (count, of_arguments)
