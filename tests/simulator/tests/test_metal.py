"""What the simulator declares of Metal, compared with Apple's: metal.json."""

import ctypes
import functools
import re
import subprocess
from collections.abc import Iterator

import pytest
from simulator import apple_metal, build_device
from simulator.build import tool
from simulator.testing import linux_only

pytestmark = linux_only
HEADER = (build_device.HERE / "metal" / "include" / "Metal" / "Metal.h").read_text()
ENUMS = dict(re.findall(r"^typedef enum (MTL\w+) : \w+ \{([^}]*)\}", HEADER, re.M))
CONSTANTS = {name for text in ENUMS.values() for name in re.findall(r"MTL\w+", text)}
STRUCTS = re.findall(r"^typedef struct \{[^}]*\} (MTL\w+);", HEADER, re.M)
OF_EVERY_OBJECT = {"init", "respondsToSelector:"}
CLASSES = re.findall(r"^@interface (MTL\w+)", HEADER, re.M)
PROTOCOLS = re.findall(r"^@protocol (MTL\w+) *<", HEADER, re.M)


class Method(ctypes.Structure):
    _fields_ = (("selector", ctypes.c_void_p), ("types", ctypes.c_char_p))


def encodings(name: str) -> Iterator[tuple[str, str]]:
    """(selector, types) that the compiler gave the methods of a class or a protocol."""
    library = ctypes.CDLL(str(build_device.device_library()))
    count = ctypes.c_uint()
    for function in ("objc_getProtocol", "objc_getClass", "class_copyMethodList", "method_getName"):
        getattr(library, function).restype = ctypes.c_void_p
    library.sel_getName.restype = library.method_getTypeEncoding.restype = ctypes.c_char_p
    library.protocol_copyMethodDescriptionList.restype = ctypes.POINTER(Method)
    library.class_copyMethodList.restype = ctypes.POINTER(ctypes.c_void_p)

    def pointer(value: int | None) -> ctypes.c_void_p:
        assert value is not None, f"the runtime does not know {name}"
        return ctypes.c_void_p(value)

    if name in PROTOCOLS:
        protocol = pointer(library.objc_getProtocol(name.encode()))
        methods = library.protocol_copyMethodDescriptionList(protocol, True, True, ctypes.byref(count))
        for method in methods[: count.value]:
            yield library.sel_getName(pointer(method.selector)).decode(), method.types.decode()
        return
    methods = library.class_copyMethodList(pointer(library.objc_getClass(name.encode())), ctypes.byref(count))
    for method in map(pointer, methods[: count.value]):
        selector = library.sel_getName(pointer(library.method_getName(method)))
        yield selector.decode(), library.method_getTypeEncoding(method).decode()


def differences(name: str, methods: dict[str, str]) -> list[str]:
    """Of methods from Apple's, a line each."""
    apples = apple_metal.methods_of(name)
    found = []
    for selector, types in methods.items():
        if selector not in apples.keys() | OF_EVERY_OBJECT:
            found.append(f"{name} has no {selector}")
        elif apples.get(selector, "") not in ("", apple_metal.plain(types)):
            found.append(f"{name} {selector}: {apples[selector]}, not {apple_metal.plain(types)}")
    return found


@pytest.mark.parametrize("name", [*CLASSES, *PROTOCOLS])
def test_methods(simulated, name):
    assert name in apple_metal.table()["classes"]
    assert differences(name, dict(encodings(name))) == []


def test_a_method_that_is_not_apples(simulated):
    methods = dict(encodings("MTLBuffer")) | {"contents": "@16@0:8", "newNothing": "@16@0:8"}
    assert differences("MTLBuffer", methods) == [
        "MTLBuffer contents: ^v, not @",
        "MTLBuffer has no newNothing",
    ]
    assert differences("MTLSharedEvent", {"notifyListener:atValue:block:": "v40@0:8@16q24@?32"}) == [
        "MTLSharedEvent notifyListener:atValue:block:: v@Q@?, not v@q@?"
    ]


@functools.cache
def compiled() -> dict[str, str]:
    """{constant: its value; enumeration or structure: its types} of the header, as the compiler has them."""
    lines = ["#include <Metal/Metal.h>"]
    lines += [f'extern "C" const long long _{name} = {name};' for name in CONSTANTS]
    lines += [f'extern "C" const char _{name}[] = @encode(__underlying_type({name}));' for name in ENUMS]
    lines += [f'extern "C" const char _{name}[] = @encode({name});' for name in STRUCTS]
    command = [tool("clang++"), *build_device.host_flags(), "-x", "objective-c++", "-S", "-emit-llvm"]
    run = subprocess.run(
        [*command, "-o", "-", "-"],
        input="\n".join(lines),
        text=True,
        capture_output=True,
        check=True,
        cwd=build_device.HERE,
    )
    found = re.findall(r'^@_(MTL\w+) = .*constant (?:i64 (-?\d+)|\[.*\] c"(.*?)\\00")', run.stdout, re.M)
    return {name: number or apple_metal.plain(types) for name, number, types in found}


def wrong(apples: dict) -> list[str]:
    """Constants, enumerations and structures of the header that differ from Apple's."""
    expected = {name: str(apples["constants"].get(name, "none")) for name in CONSTANTS}
    expected |= {name: apples["types"].get(name, "none") for name in ENUMS}
    expected |= {name: apples["structs"].get(name, "none") for name in STRUCTS}
    assert compiled().keys() == expected.keys()
    return sorted(name for name, value in compiled().items() if value != expected[name])


def test_constants(simulated):
    """Their values, and the sizes and signs of their types; fields of structures."""
    apples = apple_metal.table()
    assert wrong(apples) == []
    planted = apples | {
        "constants": apples["constants"] | {"MTLCommandBufferErrorTimeout": 3},
        "types": apples["types"] | {"MTLGPUFamily": "Q"},
        "structs": apples["structs"] | {"MTLSize": "{?=III}"},
    }
    assert wrong(planted) == ["MTLCommandBufferErrorTimeout", "MTLGPUFamily", "MTLSize"]
