"""Builds of host code: what is kept, and what does not compile, with the compiler's message."""

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
from simulator import build, build_device


def test_builds_are_cached_by_content(tmp_path):
    folder = tmp_path / "a folder #1 of $HOME"  # which make's format escapes
    folder.mkdir()
    source, header = folder / "a.mm", folder / "a.h"
    source.write_text('#import <Foundation/Foundation.h>\n#include "a.h"\nint value() { return NUMBER; }\n')
    libraries = []
    for number in (1, 2, 1):
        header.write_text(f"#define NUMBER {number}\n")
        libraries.append(build_device.build_library("cached", [source]))
    assert libraries[0] == libraries[2] != libraries[1]
    assert libraries[1].exists()


def test_paths_hold_where_the_folder_is_a_link(tmp_path, monkeypatch):
    """The compiler runs where the link leads to, so its way up is not that of the link."""
    folder = Path(build_device.__file__).resolve().parent
    linked = types.ModuleType("linked")
    linked.__path__ = [str(tmp_path / "deep" / "linked")]
    (tmp_path / "deep").mkdir()
    Path(linked.__path__[0]).symlink_to(folder)
    for name in ("linked", "linked.build", "linked.build_device", "linked.errors"):
        monkeypatch.setitem(sys.modules, name, linked)  # removed behind the test
        if name != "linked":
            del sys.modules[name]
    module = importlib.import_module("linked.build_device")
    unit = tmp_path / "unit.mm"
    assert (folder / module.local(unit)).resolve() == unit


def test_host_code_that_does_not_compile_shows_the_message(tmp_path):
    source = tmp_path / "broken.mm"
    source.write_text("#import <Metal/Metal.h>\nvoid f(id<MTLBuffer> buffer) { return buffer.size; }\n")
    with pytest.raises(build_device.BuildError, match=r"compiling broken.mm failed:\n.*broken.mm:2:"):
        build_device.build_library("broken", [source])


def test_host_code_that_sends_what_nobody_declares_does_not_compile(tmp_path):
    source = tmp_path / "unknown.mm"
    source.write_text("""
        #import <Metal/Metal.h>
        void end(id<MTLComputeCommandEncoder> encoder) { [encoder endEncodingNow]; }
        void name(id anything) { [anything setLabel:nil]; }
        void make() { [NSString stringFromNowhere]; }
        void measure(NSString* text) { [text lengthOfAll]; }
    """)
    with pytest.raises(build_device.BuildError) as error:
        build_device.build_library("unknown", [source])
    found = re.findall(r"error: (\w+ method '\S+') not found", str(error.value))
    assert found == [
        "instance method '-endEncodingNow'",
        "instance method '-setLabel:'",
        "class method '+stringFromNowhere'",
        "instance method '-lengthOfAll'",
    ]


def test_missing_tools_are_named(monkeypatch):
    build.tool.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        build_device.BuildError, match=r"the simulator needs clang\+\+-19: apt-get install clang-19 "
    ):
        build_device.check_tools()
