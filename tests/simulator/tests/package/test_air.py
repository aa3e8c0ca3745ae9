"""Apple's compilation of public kernels, in macOS wheels, beside what the simulator and its model assume."""

import re

import pytest
import torch
from measured.air import front_end, tensor_units
from simulator import shader_library
from simulator.errors import BuildError
from simulator.testing import linux_only

pytestmark = [linux_only, pytest.mark.sweep]  # wheels of 150 MB are downloaded

# Our IR over AIR, in slots of the main loop. Where it is not 1, addresses differ, or what is fused.
RATIOS = {
    "fp_qmv_fast": 0.99,
    "affine_qmm_t": 0.98,
    "gemv": 1.17,
    "gemv_wide": 0.97,
    "sdpa_vector_2pass_1": 1.06,
}


def compiled(module, wheel):
    try:
        return module.compiled(wheel())
    except BuildError as error:
        pytest.skip(f"no wheel to read: {error}")


@pytest.fixture(scope="module")
def mlx():
    return compiled(front_end, front_end.wheel)


@pytest.mark.parametrize("kernel", front_end.KERNELS, ids=lambda kernel: kernel.name)
def test_front_end(simulated, mlx, kernel):
    """The cost model's instructions of a kernel are those of Apple's front end."""
    ratio = front_end.ours(kernel).slots_per_mac / front_end.apples(kernel, mlx).slots_per_mac
    assert ratio == pytest.approx(RATIOS.get(kernel.template.partition("<")[0], 1.0), abs=0.006)


@pytest.fixture(scope="module")
def torchs():
    return compiled(tensor_units, tensor_units.torchs)


def test_precedents_of_operands(torchs):
    """AIR has those of float16, and the store; those of bfloat16 are in llama.cpp's source alone."""
    known = {"torch": torchs, "MLX": compiled(tensor_units, tensor_units.mlxs)}
    known = {whose: tensor_units.functions(air) for whose, air in known.items()}
    for function, (whose, kernel) in tensor_units.PRECEDENTS.items():
        if whose == "llama.cpp":
            assert not any(function in functions for functions in known.values())
        else:
            assert known[whose][function][0] == kernel


DESCRIPTOR = re.compile(
    r"cooperative_tensor_init\(i32 \S+ 2, i32 (\S+), i32 (\S+), i32 (\S+), i8 (.), i8 (.), i8 (.), i32 (.),"
)


def descriptor(air: str) -> tuple[int, ...]:
    """The fields of the one product of a kernel, in Apple's order."""
    (fields,) = set(DESCRIPTOR.findall(air))
    return tuple(map(int, fields))


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        ("int_mm_mpp_64_64_4", "64, 64"),
        ("scaled_mm_mpp_half", "32, 32, 32, false, false, false, Descriptor::mode::multiply_accumulate"),
    ],
)
def test_descriptor(torchs, kernel, arguments):
    """Its defaults, and the number of the mode that adds."""
    source = f"""
        #include <metal_stdlib>
        #include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
        using namespace metal;
        typedef mpp::tensor_ops::matmul2d_descriptor Descriptor;
        kernel void fields(device int* out [[buffer(0)]]) {{
          constexpr Descriptor d({arguments});
          out[0] = d.m; out[1] = d.n; out[2] = d.k;
          out[3] = d.transpose_left; out[4] = d.transpose_right; out[5] = d.relaxed_precision;
          out[6] = int(d.matmul_mode);
        }}"""
    out = torch.zeros(7, dtype=torch.int32)
    shader_library(source).launch("fields", {0: out}, (1,), (1,))
    assert tuple(out.tolist()) == descriptor(torchs[kernel])


@pytest.mark.parametrize("transposed", ["nn", "nt", "tn", "tt"])
def test_order_of_a_descriptors_fields(torchs, transposed):
    air = torchs[f"grouped_mm_cols_mpp_{transposed}_half_bm64_bn256"]
    assert descriptor(air)[:5] == (64, 256, -1, transposed[0] == "t", transposed[1] == "t")


ELEMENT = re.compile(
    r'(%\d+) = getelementptr inbounds %"struct\.metal::array\S+, ptr (%\d+), i64 0, i32 0, i64 (\d)'
)
TENSOR = re.compile(r"@air\.init_strided_private_tensor\.i32\.\w+\(.*, i16 2, .*(%\d+), [^%]*(%\d+), i8 \d\)")


def tensors(air: str) -> list[tuple[list[str], ...]]:
    """Sizes and strides of each tensor of two dimensions that is made, in order."""
    stored = {at: value for value, at in re.findall(r"store i32 (\S+), ptr (%\d+),", air)}
    values = {(array, i): stored[at] for at, array, i in ELEMENT.findall(air) if at in stored}
    arrays = dict(re.findall(r"(%\d+) = bitcast ptr (%\d+) to ptr", air))
    return [
        tuple([values[arrays[name], i] for i in "01"] for name in (sizes, strides))
        for sizes, strides in TENSOR.findall(air)
    ]


def test_sizes_begin_with_the_innermost(torchs):
    """So that the inputs of a product are the first size of a left operand, and of a right one that is
    transposed, as in the simulator."""
    assert tensors(torchs["scaled_mm_mpp_half"]) == [(["32", "32"], ["1", "32"])] * 2
    for name, left_inputs, right_inputs in (("nn", 0, 1), ("nt", 0, 0), ("tn", 1, 1), ("tt", 1, 0)):
        (left, _), (right, _), _ = tensors(torchs[f"grouped_mm_cols_mpp_{name}_half_bm64_bn256"])
        assert left[left_inputs] == right[right_inputs]
        assert left[1 - left_inputs] != right[1 - right_inputs]
    for left, right in tensor_units.ours("affine4_64_f16").products:
        assert left.columns == right.columns


def test_slices_hold_their_extents(torchs):
    """A slice of a tensor_inline is one, too, in the simulator as in AIR."""
    names = re.findall(r"_ZN5metal6tensorI\w+?extents\w+?NS_\d+(tensor_[a-z]+)", torchs["int_mm_mpp_64_64_4"])
    assert "air.slice_private_tensor" in torchs["int_mm_mpp_64_64_4"] and set(names) == {"tensor_inline"}
