"""Compiled Metal libraries are read, and the cost model counts what Apple's compiler made of a kernel."""

import struct

import pytest
from simulator import build, metallib
from simulator.apple.air import AirLowering, flow_of
from simulator.apple.static import block_classes, loops, macs, main_loop
from simulator.testing import linux_only

pytestmark = linux_only


def library(kernels: dict[str, bytes]) -> bytes:
    """A compiled Metal library of those functions."""
    entries, bitcode = b"", b""
    for name, code in kernels.items():
        fields = {b"NAME": name.encode() + b"\0", b"MDSZ": struct.pack("<Q", len(code))}
        fields[b"OFFT"] = struct.pack("<3Q", 0, 0, len(bitcode))
        tagged = b"".join(tag + struct.pack("<H", len(value)) + value for tag, value in fields.items())
        entries += struct.pack("<I", len(tagged) + 8) + tagged + b"ENDT"
        bitcode += code
    functions = struct.pack("<I", len(kernels)) + entries
    begin = 88 + len(functions)
    sizes = struct.pack("<9Q", begin + len(bitcode), 88, len(functions), 0, 0, 0, 0, begin, len(bitcode))
    return b"MTLB" + struct.pack("<HHHHI", 0x8001, 2, 7, 0x81, 14) + sizes + functions + bitcode


def test_libraries_inside_of_a_program(tmp_path):
    """Names of classes begin as a library does; of two functions of one name the last is taken."""
    program = tmp_path / "program"
    older, newer = library({"a": b"1", "b": b"22"}), library({"long_name": b"333", "b": b"4444", "c": b""})
    program.write_bytes(b"code MTLBuffer" + older + b"MTLBlit" + newer + b"more code")
    assert metallib.kernels(program) == {"a": b"1", "b": b"4444", "long_name": b"333", "c": b""}
    assert metallib.kernels(program, "^(a|long)") == {"a": b"1", "long_name": b"333"}


# Sums in a loop of 8 columns, from device memory times a scale, if a function constant says so; the other way
# is a product of matrices.
AIR = """
target datalayout = "e-p:64:64:64-n8:16:32"
target triple = "air64_v27-apple-macosx15.0.0"
@_ZL5plain.3 = internal unnamed_addr addrspace(2) global i8 undef, align 1
@_Z5plain.MTL_FC_INIT_7_b = internal addrspace(2) externally_initialized constant i8 undef
@sums = internal addrspace(3) global [32 x float] undef, align 4
declare <4 x float> @air.convert.f.v4f32.f.v4f16(<4 x half>) #0
declare float @air.convert.f.f32.u.i8(i8) #0
declare float @air.dot.v4f32(<4 x float>, <4 x float>) #0
declare float @air.simd_sum.f32(float) #0
declare void @air.wg.barrier(i32, i32)
declare void @air.simdgroup_matrix_8x8_multiply_accumulate.v64f32(<64 x float>)
define void @rows(ptr addrspace(1) noundef "air-buffer-no-alias" %0, ptr addrspace(1) %1,
    ptr addrspace(2) noundef align 4 dereferenceable(4) %2, i32 %3) {
  %5 = load i8, ptr addrspace(2) @_ZL5plain.3, align 1
  %6 = icmp eq i8 %5, 0
  br i1 %6, label %7, label %8
7:
  call void @air.simdgroup_matrix_8x8_multiply_accumulate.v64f32(<64 x float> undef)
  ret void
8:
  %9 = load i32, ptr addrspace(2) %2, align 4
  br label %10
10:
  %11 = phi i32 [ %3, %8 ], [ %27, %10 ]
  %12 = phi float [ 0.0, %8 ], [ %26, %10 ]
  %13 = zext i32 %11 to i64
  %14 = getelementptr inbounds <4 x half>, ptr addrspace(1) %0, i64 %13
  %15 = load <4 x half>, ptr addrspace(1) %14, align 8
  %16 = tail call <4 x float> @air.convert.f.v4f32.f.v4f16(<4 x half> %15) #0
  %17 = tail call fast float @air.dot.v4f32(<4 x float> %16, <4 x float> %16) #0
  %18 = getelementptr inbounds i8, ptr addrspace(1) %1, i64 %13
  %19 = load i8, ptr addrspace(1) %18, align 1
  %20 = tail call float @air.convert.f.f32.u.i8(i8 zeroext %19) #0
  %21 = fmul float %17, %20
  %22 = getelementptr inbounds [32 x float], ptr addrspace(3) @sums, i64 0, i64 %13
  store float %21, ptr addrspace(3) %22, align 4
  tail call void @air.wg.barrier(i32 2, i32 1)
  %23 = load float, ptr addrspace(3) @sums, align 4
  %24 = fadd float %23, %12
  %25 = call float @air.simd_sum.f32(float %24) #0
  %26 = fadd float %25, %24
  %27 = add i32 %11, 32
  %28 = icmp ult i32 %27, %9
  br i1 %28, label %10, label %29
29:
  store float %26, ptr addrspace(1) %1, align 4
  ret void
}
attributes #0 = { nounwind readnone }
"""


def test_instructions_of_apples_compiler():
    flow = flow_of(AIR, "rows", {7: 1})
    classes = block_classes(flow, AirLowering(flow, native=False))
    assert sorted(map(len, loops(flow.function))) == [1]
    assert main_loop(flow.function, classes) == {
        **{"devload": 2, "tgstore": 1, "tgload": 1, "barrier": 1},  # four halves are one load
        **{"fmul": 2, "fma": 3},  # the scalar product, and the scale
        **{"convert": 1, "fadd": 2, "simdsum": 1, "iadd": 1, "branch": 1},
    }
    assert macs(main_loop(flow.function, classes)) == 5
    assert sum(block["devstore"] for block in classes) == 1


@pytest.mark.parametrize(("plain", "products"), [(0, 1), (1, 0)])
def test_function_constants_choose(plain, products):
    flow = flow_of(AIR, "rows", {7: plain})
    classes = block_classes(flow, AirLowering(flow, native=False))
    assert sum(block["mma32"] for block in classes) == products and len(loops(flow.function)) == plain


def test_unknown_function_is_refused():
    flow = flow_of(AIR.replace("air.wg.barrier", "air.unheard_of"), "rows", {7: 1})
    with pytest.raises(ValueError, match=r"a function of AIR without a cost: .*air\.unheard_of"):
        block_classes(flow, AirLowering(flow, native=False))


def test_bitcode_is_read(tmp_path):
    source, code = tmp_path / "a.ll", tmp_path / "a.bc"
    source.write_text("define i32 @f() {\n  ret i32 7\n}\n")
    build.run([build.tool("llvm-as"), source, "-o", code], "assembling")
    texts = metallib.assembly({"f": code.read_bytes(), "again": code.read_bytes()})
    assert list(texts) == ["f", "again"] and all("ret i32 7" in text for text in texts.values())
    assert metallib.assembly({}) == {}
