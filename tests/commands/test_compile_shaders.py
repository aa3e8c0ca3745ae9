"""scripts/macos/shader_sources, compile_shaders and apple_registers, with stand-ins for Apple's tools."""

import importlib
import itertools
import json
import re
import struct
import subprocess
import sys

import compile_shaders
import flatbuffers
import pytest
import registers
import torch
from simulator.build import tool


@pytest.fixture
def sources(simulated):
    return importlib.import_module("shader_sources")


def stand_in(monkeypatch, tool, *commands: str) -> None:
    for command in commands:
        monkeypatch.setattr(registers, command, (sys.executable, str(tool)))


def folder_of(tmp_path, **libraries: dict):
    """A folder as shader_sources writes it: {library: what is not as usual in its entry}."""
    entries = {}
    for name, changes in libraries.items():
        (tmp_path / f"{name}.metal").write_text(name)
        entries[name] = {
            "file": f"{name}-0.metallib",
            "tensor_units": False,
            "quick": False,
            "kernels": {f"{name}_k": 0},
        } | changes
    (tmp_path / "libraries.json").write_text(json.dumps(entries))
    return tmp_path


# Sources -----------------------------------------------------------------------------------------------


def test_sources_need_no_other_file(sources, tmp_path):
    names = sources.names()
    assert len(names) == len({*names}) > 150
    assert {"norms_f16", "bucket_i64", "quantized_mxfp4_bf16", "tensor_units_dense_f16", "probe_f32"} <= {
        *names
    }
    some = ["norms_bf16", "bucket_i64", "tensor_units_dense_f16"]
    sources.write(tmp_path / "new", some)
    for name in some:
        text = (tmp_path / "new" / f"{name}.metal").read_text()
        assert not re.search(r'#include\s+"', text)
        assert text.startswith("#define MOE_DTYPE ") and "[[kernel]]" in text
    listed = json.loads((tmp_path / "new" / "libraries.json").read_text())
    assert [*listed] == some and [entry["tensor_units"] for entry in listed.values()] == [False, False, True]
    assert [entry["quick"] for entry in listed.values()] == [True, True, False]
    for name, entry in listed.items():
        assert entry["file"] == torch.ops.moe_mps._library_file(name)
        assert re.fullmatch(r"[a-z0-9_]+-[0-9a-f]{16}\.metallib", entry["file"])
    lines = torch.ops.moe_mps._pipelines("norms_bf16")  # as Metal lists the kernels
    assert {line.split()[0] for line in lines} == {*listed["norms_bf16"]["kernels"]}
    assert {*listed["norms_bf16"]["kernels"].values()} == {512}  # as norms.metal declares


# Compiling ---------------------------------------------------------------------------------------------


def test_a_folder_without_a_list_is_refused(tmp_path):
    with pytest.raises(
        SystemExit, match=r"must be a folder that scripts/macos/shader_sources wrote: .*No such file"
    ):
        compile_shaders.main([str(tmp_path)])


def test_tensor_units_need_a_later_language(tmp_path, capsys, monkeypatch):
    compiler = tmp_path / "compiler.py"
    compiler.write_text("import sys; sys.exit(f'{sys.argv[1:]}')\n")
    stand_in(monkeypatch, compiler, "COMPILER")
    folder = folder_of(tmp_path, norms_f16={}, tensor_units_dense_f16={"tensor_units": True})
    monkeypatch.setattr(compile_shaders, "sdk_version", lambda: 26)
    assert compile_shaders.main([str(folder)]) == 1
    dense, units, *_ = re.split("^(?=tensor_units)", capsys.readouterr().out, flags=re.MULTILINE)
    assert "'-std=metal3.1'" in dense and "'-std=metal4.0'" in units
    monkeypatch.setattr(compile_shaders, "sdk_version", lambda: 15)
    assert [*compile_shaders.listed(folder)] == ["norms_f16"]


def test_refused_source(tmp_path, capsys, monkeypatch):
    compiler = tmp_path / "compiler.py"
    compiler.write_text(
        "import pathlib, sys\n"
        "if 'rope_f16' in sys.argv[1]: sys.exit('rope.h:7: error: no such type')\n"
        "pathlib.Path(sys.argv[3]).touch()\n"
    )
    stand_in(monkeypatch, compiler, "COMPILER", "LINKER")
    assert compile_shaders.main([str(folder_of(tmp_path, norms_f16={}, rope_f16={}))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"norms_f16 +ok", lines[0])
    assert re.fullmatch(r"rope_f16 +FAILED: rope.h:7: error: no such type", lines[1])
    assert lines[-1] == "1 of 2 libraries compile; those for tensor units need the SDK of macOS 26"
    assert (tmp_path / "norms_f16.air").exists()


def test_sources_of_the_quick_ones(sources, tmp_path, monkeypatch, capsys):
    """Those that `check --quick` compiles, among them all of `check --first`; or every library."""
    asked = {}
    monkeypatch.setattr(sources, "write", lambda folder, every: asked.update({folder: every}))
    assert sources.main([str(tmp_path), "--quick"]) == sources.main([str(tmp_path / "all")]) == 0
    quick, every = asked[tmp_path], asked[tmp_path / "all"]
    few = {"norms_bf16", "bucket_i64", "quantized_affine4_64_bf16", "quantized_prompts_mxfp4_bf16"}
    assert few < {*quick} and not any(name.endswith("_f16") or "tensor" in name for name in quick)
    assert every == sources.names() and {*quick} < {*every}
    assert capsys.readouterr().out.splitlines()[0] == f"{len(quick)} libraries in {tmp_path}"


def test_parts_and_the_quick_ones(tmp_path, capsys, monkeypatch):
    """Parts have all libraries once; a part that is none is refused."""
    tool = tmp_path / "tool.py"
    tool.write_text("")
    stand_in(monkeypatch, tool, "COMPILER")
    names = [f"norms{n}_f16" for n in range(5)]
    folder = folder_of(tmp_path, **{name: {"quick": name == "norms3_f16"} for name in names})

    def compiled(*options: str) -> list[str]:
        assert compile_shaders.main([str(folder), *options]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]]

    assert compiled("--quick") == ["norms3_f16"]
    parts = [compiled("--part", f"{n}/3") for n in range(3)]
    assert [len(each) for each in parts] == [2, 2, 1] and sorted(itertools.chain(*parts)) == names
    for wrong in ("3/3", "a", "-1/3"):
        with pytest.raises(SystemExit):
            compile_shaders.main([str(folder), f"--part={wrong}"])


def test_a_release_has_the_libraries_of_bfloat16(tmp_path, capsys, monkeypatch):
    """Under the names by which the package finds them; the linker's message fails it."""
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import pathlib, sys\n"
        "if 'norms_bf16.air' in sys.argv[1] and 'wrong' in sys.argv[3]: sys.exit('no such symbol')\n"
        "pathlib.Path(sys.argv[3]).write_bytes(pathlib.Path(sys.argv[1]).read_bytes())\n"
    )
    stand_in(monkeypatch, tool, "COMPILER", "LINKER")
    some = {name: {} for name in ("norms_bf16", "norms_f16", "routing_8_f32", "tensor_units_dense_bf16")}
    folder = folder_of(tmp_path, **some)
    assert compile_shaders.main([str(folder), "--release", str(tmp_path / "made")]) == 0
    made = {path.name: path.read_text() for path in (tmp_path / "made").iterdir()}
    assert made == {f"{name}-0.metallib": name for name in ("norms_bf16", "routing_8_f32")}
    assert compile_shaders.main([str(folder), "--release", str(tmp_path / "wrong")]) == 1
    assert "FAILED: no such symbol" in capsys.readouterr().out


# Registers ---------------------------------------------------------------------------------------------


def metadata(registers: int, spilled: int) -> bytes:
    """What Apple's back end says of a kernel, as far as it is known; written by the flatbuffers library."""
    builder = flatbuffers.Builder()
    builder.StartObject(20)
    builder.PrependUint32Slot(0, registers, 0)
    builder.PrependUint8Slot(3, 7, 0)
    builder.PrependUint32Slot(14, spilled, 0)
    builder.PrependUint16Slot(15, 513, 0)
    kernel = builder.EndObject()
    builder.StartObject(2)
    builder.PrependUOffsetTRelativeSlot(0, kernel, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def binary(folder, content: bytes, section: str = "__GPU_METADATA") -> bytes:
    """A Mach-O file that clang has made, with this section among others."""
    (folder / "content").write_bytes(content)
    source = folder / "file.s"
    source.write_text(f'.text\n nop\n.section __DATA,{section}\n .incbin "{folder / "content"}"\n')
    command = [tool("clang"), "-target", "arm64-apple-macos14", "-c", source, "-o", folder / "file.o"]
    subprocess.run(list(map(str, command)), check=True)
    return (folder / "file.o").read_bytes()


@pytest.mark.parametrize(("count", "spilled"), [(96, 0), (128, 176), (0, 0), (70_000, 300)])
def test_registers_are_read(tmp_path, count, spilled):
    made = binary(tmp_path, metadata(count, spilled))
    assert registers.use_of(made) == (count, spilled)
    universal = struct.pack(">8I", 0xCAFEBABE, 1, 1, 2, 64, len(made), 4, 0)[:28].ljust(64, b"\0") + made
    assert registers.use_of(universal) == (count, spilled)


def test_other_files_are_refused(tmp_path):
    """A message says what came, so that the first run on a Mac shows what Apple writes."""
    for content, message in (
        (
            binary(tmp_path, metadata(1, 1), "__other"),
            "must have a section __GPU_METADATA, got __text, __other",
        ),
        (binary(tmp_path, b"\0\0"), "must be a FlatBuffer, got 2 bytes"),
        (b"\x7fELF" + bytes(60), "must be a Mach-O file of 64 bits, got magic 0x464c457f"),
        (b"", "must write a Mach-O file, got 0 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            registers.use_of(content)
    builder = flatbuffers.Builder()
    builder.StartObject(1)
    builder.Finish(builder.EndObject())
    with pytest.raises(ValueError, match="must have field 0 in its root, got none"):
        registers.use_of(binary(tmp_path, bytes(builder.Output())))


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Apple's tools: the back end spills a kernel "deep" on the M4, and refuses a kernel "odd" on the M1."""
    for count, spilled, name in ((90, 0, "plain"), (96, 16, "deep")):
        made = binary(tmp_path, metadata(count, spilled))
        (tmp_path / name).write_bytes(made)
    tool = tmp_path / "tool.py"
    tool.write_text(
        "import json, pathlib, sys\n"
        "arguments = sys.argv[1:]\n"
        "if arguments[0] == '-arch':\n"
        "    _, architecture, _, target, asked, library = arguments\n"
        "    (pipeline,) = json.loads(pathlib.Path(asked).read_text())['pipelines']['compute_pipelines']\n"
        "    name, threads = pipeline['compute_function'], pipeline['max_total_threads_per_threadgroup']\n"
        "    assert pathlib.Path(library).exists() and threads == (256 if name == 'deep' else 384)\n"
        "    if (name, architecture) == ('odd', 'applegpu_g13s'): sys.exit('no function\\nodd')\n"
        "    spills = (name, architecture) == ('deep', 'applegpu_g16s')\n"
        f"    made = pathlib.Path({str(tmp_path)!r}, 'deep' if spills else 'plain')\n"
        "    pathlib.Path(target).write_bytes(made.read_bytes())\n"
        "else:\n"
        "    target = arguments[arguments.index('-o') + 1]\n"
        "    pathlib.Path(target).write_text('made')\n"
    )
    stand_in(monkeypatch, tool, "COMPILER", "LINKER", "BACK_END")


def test_table_of_registers(tools, tmp_path, capsys):
    apple_registers = importlib.import_module("apple_registers")
    folder = folder_of(tmp_path, norms_bf16={}, norms_f16={})
    table = tmp_path / "table.json"
    assert apple_registers.main([str(folder), "--json", str(table)]) == 0
    assert json.loads(table.read_text())["norms_bf16"]["norms_bf16_k"]["M4"] == {
        "registers": 90,
        "spilled": 0,
    }
    folder_of(
        tmp_path, norms_bf16={"kernels": {"deep": 256, "odd": 0}}, quantize_bf16={"kernels": {"deep": 256}}
    )
    assert apple_registers.main([str(folder), "--json", str(table)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (deep, *_) = (line for line in lines if line.startswith("deep "))
    assert deep.split() == ["deep", "256", "90", "90", "90", "96+16", "90"]
    failed = [line for line in lines if line.startswith("FAILED")]
    assert failed == [
        "FAILED: deep spills 16 bytes a thread on M4",  # not of quantize_bf16, which no token runs
        "FAILED: odd on M1: no function; odd",
    ]
    assert lines[-1].startswith("3 kernels of 2 libraries, 2 failures.")
