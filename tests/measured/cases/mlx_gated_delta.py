"""What mlx-lm dispatches for the gated delta rule: gated_delta_kernel of models/gated_delta.py, 0.32.2.

Its caller has normed q and k, with the scale in q, and made decays and beta; the state is [B, Hv, Dv, Dk].
"""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest import mock

from .fused import Delta
from .mlx_launch import Launch, ints

HEADERS = ("mlx_lm/gated_delta.h",)
TYPES = {"f16": "half", "bf16": "bfloat", "f32": "float"}
# As mlx.fast.metal_kernel writes it: inputs in order, a number by reference, outputs, attributes.
SIGNATURE = """\
#include <metal_stdlib>
using namespace metal;
template <typename InT, typename StT, int Dk, int Dv, int Hk, int Hv>
[[kernel]] void gated_delta_step(
    device const InT* q [[buffer(0)]], device const InT* k [[buffer(1)]], device const InT* v [[buffer(2)]],
    device const float* g [[buffer(3)]], device const InT* beta [[buffer(4)]],
    device const StT* state_in [[buffer(5)]], constant int& T [[buffer(6)]], device InT* y [[buffer(7)]],
    device StT* state_out [[buffer(8)]], uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
"""


def module() -> ModuleType | None:
    """The installed models/gated_delta.py, without the rest of its package."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "models" / "gated_delta.py"
    found = importlib.util.spec_from_file_location("gated_delta", path)
    assert isinstance(found, ModuleSpec) and found.loader
    loaded = importlib.util.module_from_spec(found)
    found.loader.exec_module(loaded)
    return loaded


def source() -> str | None:
    """The kernel for heads of 128 without a mask; None without mlx-lm."""
    loaded = module()
    if loaded is None:
        return None
    here, made = mock.patch.object, mock.Mock()
    with here(loaded.mx.metal, "is_available", lambda: True), here(loaded.mx.fast, "metal_kernel", made):
        loaded._make_gated_delta_packed_kernel()
    arguments = made.call_args.kwargs
    names = *arguments["input_names"], *arguments["output_names"]
    assert names == ("q", "k", "v", "g", "beta", "state_in", "T", "y", "state_out"), names
    return f"{SIGNATURE}{arguments['source']}}}\n"


def has_kernel(case: Delta) -> bool:
    return case.width == 128 and not case.is_wide


def gated_delta_step(case: Delta) -> Launch:
    sizes = f"{case.width}, {case.width}, {case.key_heads}, {case.heads}"
    arrays = {name: name for name in ("q", "k", "v", "g", "beta", "state_in", "state_out")}
    return Launch(
        HEADERS,
        f"gated_delta_step<{TYPES[case.dtype]}, float, {sizes}>",
        (1, case.width // 16, case.heads),
        (32, 2, 1),
        {**arrays, "T": ints(case.tokens), "y": "result0"},
    )
