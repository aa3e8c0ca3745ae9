"""The check that the host code builds for macOS, and that this check finds the faults it is for."""

import re
import sys
from pathlib import Path

import pytest

if sys.platform == "darwin":
    pytest.skip("a Mac builds the extension itself", allow_module_level=True)

import macos
from simulator import build_device
from simulator.errors import BuildError


@pytest.fixture
def check(tmp_path):
    """The faults of one source text."""

    def run(text: str) -> list[str]:
        source = tmp_path / "source.mm"
        source.write_text("#import <Metal/Metal.h>\n" + text)
        return macos.check(macos.DEFAULT, [source]).faults

    return run


@pytest.mark.slow("all host code is compiled for macOS")
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
# The header of each name in std:: that the host code uses. The standard has those of <iterator> in those of
# containers, too.
STANDARD = {
    "algorithm": "all_of any_of clamp copy copy_n equal fill_n find find_if max min min_element remove "
    "replace",
    "array": "array",
    "atomic": "atomic",
    "bit": "bit_ceil",
    "chrono": "chrono",
    "cmath": "llround",
    "condition_variable": "condition_variable",
    "cstddef": "ptrdiff_t size_t",
    "cstdint": "int64_t",
    "cstdlib": "free",
    "cstring": "memcmp memcpy strstr",
    "deque": "deque",
    "exception": "current_exception exception_ptr rethrow_exception",
    "fstream": "ifstream",
    "functional": "function",
    "future": "promise shared_future",
    "initializer_list": "initializer_list",
    "iomanip": "setfill setw",
    "iterator": "next prev",
    "limits": "numeric_limits",
    "list": "list",
    "map": "less map",
    "memory": "enable_shared_from_this make_shared make_unique shared_ptr unique_ptr weak_ptr",
    "mutex": "lock_guard mutex recursive_mutex unique_lock",
    "optional": "nullopt optional",
    "set": "set",
    "sstream": "hex istringstream ostringstream",
    "string": "getline stod stof stoi stoll string to_string",
    "string_view": "string_view",
    "system_error": "generic_category system_error",
    "thread": "this_thread thread",
    "tuple": "forward_as_tuple get make_tuple tie tuple",
    "type_traits": "decay_t is_trivially_copyable_v void_t",
    "unordered_map": "unordered_map unordered_multimap",
    "unordered_set": "unordered_set",
    "utility": "exchange forward index_sequence index_sequence_for make_index_sequence move pair",
    "vector": "begin end erase_if size vector",
}
HEADERS = {name: header for header, names in STANDARD.items() for name in names.split()}


def test_every_precompiled_header_is_included_somewhere():
    precompiled = set(TORCHS.findall(build_device.PRECOMPILED.read_text()))
    assert precompiled and precompiled <= set().union(*map(included, SOURCES))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_source_includes_what_it_uses(source):
    """A Mac compiles each alone. Here several are one unit, behind precompiled headers, and by libstdc++."""
    text, headers = source.read_text(), included(source)
    names = {*re.findall(r"\bstd::([a-z_0-9]+)", text)}
    assert names <= HEADERS.keys()  # STANDARD lacks the header of one
    standard = {HEADERS[name] for name in names}
    operators = {f"ATen/ops/{name}.h" for name in re.findall(r"\bat::([a-z_0-9]+)\(", text)}
    elsewhere = {"ATen/ops/get_overlap_status.h", "ATen/ops/infer_size_dimvector.h"}  # no operators
    assert (standard | operators) - elsewhere - headers == set()


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
