"""scripts/compile_shaders.py, with a stand-in for Apple's compiler."""

import importlib.util
import re
import sys

import pytest
import torch
from support.processes import REPOSITORY


@pytest.fixture
def script(simulated):
    path = REPOSITORY / "scripts" / "compile_shaders.py"
    spec = importlib.util.spec_from_file_location("compile_shaders", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sources_need_no_other_file(script, tmp_path):
    sources = script.write_sources(tmp_path / "new")
    names = {path.stem for path in sources}
    assert len(names) == len(sources) > 50 and {"norms_f16", "bucket_i64", "quantized_mxfp4_bf16"} <= names
    for source in sources:
        text = source.read_text()
        assert not re.search(r'#include\s+"', text)
        assert text.startswith("#define MOE_DTYPE ") and "[[kernel]]" in text


def test_tensor_units_need_a_later_language(script, tmp_path, capsys, monkeypatch):
    compiler = tmp_path / "compiler.py"
    compiler.write_text("import sys; sys.exit(f'{sys.argv[1:]}')\n")
    monkeypatch.setattr(script, "COMPILER", (sys.executable, str(compiler)))
    monkeypatch.setattr(script, "sdk_version", lambda: 26)
    sources = {path.stem: path for path in script.write_sources(tmp_path / "new")}
    assert "'-std=metal4.0'" in script.compile_source(sources["tensor_units_dense_f16"])
    assert "'-std=metal3.1'" in script.compile_source(sources["norms_f16"])
    monkeypatch.setattr(script, "sdk_version", lambda: 15)
    assert not {path.stem for path in script.write_sources(tmp_path / "old")} & {"tensor_units_dense_f16"}


def stand_in(script, monkeypatch, tool, names: list[str]) -> None:
    """For the compiler and the linker, and sources of these names."""
    for command in ("COMPILER", "LINKER"):
        monkeypatch.setattr(script, command, (sys.executable, str(tool)))
    monkeypatch.setattr(script, "write_sources", lambda folder: [folder / f"{name}.metal" for name in names])


def test_refused_source(script, tmp_path, capsys, monkeypatch):
    compiler = tmp_path / "compiler.py"
    compiler.write_text(
        "import pathlib, sys\n"
        "if 'rope_f16' in sys.argv[1]: sys.exit('rope.h:7: error: no such type')\n"
        "pathlib.Path(sys.argv[3]).touch()\n"
    )
    stand_in(script, monkeypatch, compiler, ["norms_f16", "rope_f16"])
    assert script.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"norms_f16 +ok", lines[0])
    assert re.fullmatch(r"rope_f16 +FAILED: rope.h:7: error: no such type", lines[1])
    assert lines[-1] == "1 of 2 libraries compile; those for tensor units need the SDK of macOS 26"
    assert (tmp_path / "norms_f16.air").exists()


def test_a_release_has_the_libraries_of_bfloat16(script, tmp_path, capsys, monkeypatch):
    """Under the names by which the package finds them; the linker's message fails it."""
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import pathlib, sys\n"
        "if 'norms_bf16.air' in sys.argv[1] and 'wrong' in sys.argv[3]: sys.exit('no such symbol')\n"
        "pathlib.Path(sys.argv[3]).write_bytes(pathlib.Path(sys.argv[1]).read_bytes())\n"
    )
    some = ["norms_bf16", "norms_f16", "routing_f32", "tensor_units_dense_bf16"]
    stand_in(script, monkeypatch, tool, some)
    for name in some:
        (tmp_path / f"{name}.metal").write_text(name)
    assert script.main([str(tmp_path), "--release", str(tmp_path / "made")]) == 0
    made = {path.name: path.read_text() for path in (tmp_path / "made").iterdir()}
    names = torch.ops.moe_mps._library_file
    assert made == {names(name): name for name in ("norms_bf16", "routing_f32")}
    assert all(re.fullmatch(r"[a-z0-9_]+-[0-9a-f]{16}\.metallib", name) for name in made)
    assert script.main([str(tmp_path), "--release", str(tmp_path / "wrong")]) == 1
    assert "FAILED: no such symbol" in capsys.readouterr().out
