"""The check that the host code builds for macOS, and that this check finds the faults it is for."""

import re
import sys
from pathlib import Path

import pytest
import torch

if sys.platform == "darwin":
    pytest.skip("a Mac builds the extension itself", allow_module_level=True)

import macos
from simulator import build, build_device
from simulator.errors import BuildError


@pytest.fixture
def check(tmp_path):
    """The faults of one source text."""

    def run(text: str) -> list[str]:
        source = tmp_path / "source.mm"
        source.write_text("#import <Metal/Metal.h>\n" + text)
        return macos.check(macos.DEFAULT, [source]).faults

    return run


@pytest.mark.sweep
def test_the_package():
    result = macos.check(macos.DEFAULT)
    assert result.faults == []
    assert result.files >= 8 and result.bound > 40 and result.selectors > 10
    assert str(result).startswith(f"torch {macos.DEFAULT} for macOS: {result.files} files, ")


def test_right_code_passes(check):
    assert not check("""
        #include <string>
        namespace at::mps { class MPSStream; MPSStream* getCurrentMPSStream(); }
        void* stream() { return at::mps::getCurrentMPSStream(); }
        void encode(id<MTLComputeCommandEncoder> encoder, id<MTLBuffer> grid) {
          [encoder dispatchThreadgroupsWithIndirectBuffer:grid
                                     indirectBufferOffset:4
                                    threadsPerThreadgroup:MTLSizeMake(1, 1, 1)];
        }
        std::string text(NSError* error) { return [[error localizedDescription] UTF8String]; }
    """)


def test_symbol_that_torch_does_not_export_is_found(check):
    faults = check("""
        namespace at::mps { class MPSStream; MPSStream* getStreamOfNobody(); }
        void* stream() { return at::mps::getStreamOfNobody(); }
    """)
    assert faults == ["no library of torch defines at::mps::getStreamOfNobody()"]


def test_c_symbol_that_nobody_defines_is_found(check):
    faults = check('extern "C" int moe_mps_nothing(void); int f() { return moe_mps_nothing(); }')
    assert faults == ["no library of torch defines _moe_mps_nothing"]


def included(file: Path) -> set[str]:
    """The headers in <> that a file includes, itself or by headers of its own."""
    found = set()
    for name in re.findall(r'^#(?:include|import) (["<]\S+)[">]', file.read_text(), re.MULTILINE):
        found |= {name[1:]} if name[0] == "<" else included(file.parent / name[1:])
    return found


SOURCES = sorted(macos.SOURCES.rglob("*.mm"))
TORCHS = re.compile(r"#include <((?:ATen|torch)/\S+)>")


def test_every_precompiled_header_is_included_somewhere():
    precompiled = set(TORCHS.findall(build_device.PRECOMPILED.read_text()))
    assert precompiled and precompiled <= set().union(*map(included, SOURCES))


@pytest.mark.sweep
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_source_includes_what_it_uses(source, tmp_path):
    """With those of the precompiled headers that it includes; every other build has all of them."""
    own = included(source)
    lines = build_device.PRECOMPILED.read_text().splitlines(keepends=True)
    header = tmp_path / "own.h"
    header.write_text("".join(l for l in lines if not (found := TORCHS.match(l)) or found[1] in own))
    command = [build.tool("clang++"), *build_device.host_flags()]
    cache = build.cache_directory("device")
    command += build_device.precompiled(command, torch.__version__, cache, header)
    build_device.run([*command, "-fsyntax-only", source], f"compiling {source.name}")


def test_selector_that_apple_does_not_have_is_found(check):
    faults = check("""
        @protocol Wrong
        - (void)dispatchThreadgroup:(MTLSize)grid threadsPerGroup:(MTLSize)threads;
        @end
        void encode(id<Wrong> encoder) {
          [encoder dispatchThreadgroup:MTLSizeMake(1, 1, 1) threadsPerGroup:MTLSizeMake(1, 1, 1)];
        }
    """)
    assert faults == ["selector dispatchThreadgroup:threadsPerGroup: is not Apple's"]


def test_class_that_apple_does_not_have_is_found(check):
    faults = check("""
        @interface MTLCompilerSettings : NSObject
        @end
        id make() { return [MTLCompilerSettings new]; }
    """)
    assert faults == ["class MTLCompilerSettings is not Apple's"]


def declared_selectors(text: str) -> set[str]:
    """The methods and property accessors of an Objective-C header."""
    selectors = set()
    for method in re.findall(r"^[-+] \([^;]*?\)(\w[^;]*);", text, re.MULTILINE):
        parts = re.findall(r"(\w+):", method)
        selectors.add("".join(part + ":" for part in parts) if parts else method.strip())
    for attributes, name in re.findall(r"^@property(\([^)]*\))?[^;]*?(\w+);", text, re.MULTILINE):
        selectors.add(name)
        if "readonly" not in attributes:
            selectors.add(f"set{name[0].upper()}{name[1:]}:")
    return selectors


def test_every_selector_of_our_metal_header_is_apples():
    """So that host code which compiles against it sends nothing that Apple does not have."""
    declared = declared_selectors((build_device.HERE / "metal/include/Metal/Metal.h").read_text())
    assert len(declared) > 25 and "setFastMathEnabled:" in declared
    assert declared - macos.metal_cpp_names()[0] == set()


def test_method_that_is_not_declared_does_not_compile(check):
    with pytest.raises(BuildError, match="instance method '-endEncodingNow' not found"):
        check("void end(id<MTLComputeCommandEncoder> encoder) { [encoder endEncodingNow]; }")
