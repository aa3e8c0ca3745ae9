"""GGUF files in several parts, as the package `gguf` writes them: they are one file, and each is checked."""

import shutil
import struct
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from support.experts_on_disk import same
from support.gguf_files import write_file
from support.models import prompt
from transformers import GgufConfig

from torch_moe_mps import from_pretrained
from torch_moe_mps._text import split_gguf
from torch_moe_mps.checkpoints import on_disk
from torch_moe_mps.checkpoints.source import Source, read_tokenizer
from torch_moe_mps.commands import main
from torch_moe_mps.commands.places import place_of
from torch_moe_mps.models.modules.experts_on_disk import expert_pools

KINDS = ("q4_k", "q6_k", "q5_k")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The first of four parts; a file with the same tensors lies next to them."""
    folder = tmp_path_factory.mktemp("parts")
    for split in (0, 9):
        first = write_file(folder / "model.gguf", "qwen3moe", KINDS, tokenizer=True, split=split)
    assert first.name == "model-00001-of-00004.gguf"
    return first


@pytest.fixture
def parts(written, tmp_path) -> list[Path]:
    """Copies of the parts."""
    return [Path(shutil.copy(path, tmp_path)) for path in sorted(written.parent.glob("model-*"))]


def part_of(first: Path, number: int) -> str:
    return str(first.with_name(f"model-{number:05}-of-00004.gguf"))


def logits(path: str, **options) -> torch.Tensor:
    with torch.no_grad():
        return from_pretrained(path, device_map="cpu", **options)(prompt()).logits


@pytest.mark.slow("loads four models")
def test_parts_are_one_file(written, monkeypatch):
    """By the name of any of them; also where experts are read from the parts as tokens need them."""
    expected = logits(str(written.with_name("model.gguf")))
    assert same(logits(part_of(written, 1)), expected)
    assert same(logits(part_of(written, 3)), expected)
    monkeypatch.setattr(on_disk, "slots_in", lambda layers, memory: 3)
    model = from_pretrained(part_of(written, 2), device_map="cpu", experts_memory="1GB")
    opened = {Path(path).name for path in expert_pools(model).layers[0].reader.file.opened}
    assert len(opened) > 1 and opened <= {f"model-{number:05}-of-00004.gguf" for number in range(2, 5)}
    with torch.no_grad():
        assert same(model(prompt()).logits, expected)
    assert not [*written.parent.glob(f"*{on_disk.NAME}")]


def test_what_else_reads_parts(written, capsys):
    names = part_of(written, 2), str(written.with_name("model.gguf"))
    of_parts, whole = (read_tokenizer(*split_gguf(name), False) for name in names)
    assert of_parts.get_vocab() == whole.get_vocab() and "ab" in whole.get_vocab()
    assert main(["fit", part_of(written, 3)]) == 0
    assert "Qwen3MoeForCausalLM" in capsys.readouterr().out
    assert Source(part_of(written, 4), {}).files == [part_of(written, number) for number in range(1, 5)]


def test_parts_on_the_hub(written, monkeypatch):
    """All are downloaded, by the name of any, and the one that the Hub lacks is named."""
    asked = []

    def download(name, file, revision, **how):
        asked.append(file)
        if "00003" in file and len(asked) > 4:
            raise EntryNotFoundError(file)
        return str(written.with_name(file))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    name = f"org/name-GGUF:{Path(part_of(written, 2)).name}"
    assert place_of(name, None, weights=True) == str(written)
    assert asked == [f"model-{number:05}-of-00004.gguf" for number in range(1, 5)]
    with pytest.raises(ValueError, match=r"GGUF on the Hub has no file model-00003-of-00004\.gguf"):
        place_of(name, None, weights=True)


def test_transformers_dequantises_one_part(written):
    expected = "part where transformers dequantises it, got 4 parts"
    with pytest.raises(ValueError, match=expected):
        from_pretrained(part_of(written, 1), quantization_config=GgufConfig(dequantize=True))


def number_in(path: Path, key: str, number: int, code: str) -> None:
    """Gives a key of a file another number."""
    data = bytearray(path.read_bytes())
    place = data.index(key.encode()) + len(key) + 4
    data[place : place + struct.calcsize(code)] = struct.pack(code, number)
    path.write_bytes(data)


def missing(parts: list[Path]) -> str:
    parts[2].unlink()
    return r"00003-of-00004\.gguf is missing, part 3 of 4$"


def missing_first(parts: list[Path]) -> str:
    parts[0].unlink()
    return r"00001-of-00004\.gguf is missing, part 1 of 4$"


def twice(parts: list[Path]) -> str:
    shutil.copy(parts[1], parts[2])
    return r"00003-of-00004\.gguf is damaged .*\(split\.no must be 2, by the name of the file, got 1\)$"


def swapped(parts: list[Path]) -> str:
    second, third = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(third)
    parts[2].write_bytes(second)
    return r"00002-of-00004\.gguf is damaged .*\(split\.no must be 1, by the name of the file, got 2\)$"


def of_another_count(parts: list[Path]) -> str:
    number_in(parts[3], "split.count", 5, "<H")
    return r"00004-of-00004\.gguf is damaged .*\(split\.count must be 4, by the name of the file, got 5\)$"


def of_another_model(parts: list[Path]) -> str:
    put_from_llama(parts, 2)
    return r"00004-of-00004\.gguf is damaged .*\(blk\.1\.attn_output\.weight must be among .* got it twice\)$"


def of_another_architecture(parts: list[Path]) -> str:
    """A part whose tensors no other part has."""
    put_from_llama(parts, 1)
    return r"^moe_mps::gguf: blk\.0\.ffn_gate\.weight must be of a name that Qwen3MoeForCausalLM has .* got a"


def put_from_llama(parts: list[Path], number: int) -> None:
    """Puts a part of another file in place of the one with the same number; both have as many parts."""
    (folder := parts[0].parent / "other").mkdir()
    write_file(folder / "model.gguf", "llama", KINDS, split=9)
    shutil.copy(folder / parts[number].name, parts[number])


def of_other_tensors(parts: list[Path]) -> str:
    number_in(parts[0], "split.tensors.count", 26, "<i")
    return r"all parts must have 26 tensors by split\.tensors\.count, got 27\)$"


def cut(parts: list[Path]) -> str:
    parts[2].write_bytes(parts[2].read_bytes()[:-40])
    return r"00003-of-00004\.gguf is damaged or not in GGUF \(blk\..* ends at byte \d+ of \d+\)$"


def another_file(parts: list[Path]) -> str:
    parts[1].write_bytes(b"{}" * 40)
    return r"00002-of-00004\.gguf is damaged .*\(the file must begin with b'GGUF', got b'\{\}\{\}'\)$"


@pytest.mark.parametrize(
    "change",
    [
        *(missing, missing_first, twice, swapped, of_another_count, of_other_tensors),
        *(of_another_model, of_another_architecture, cut, another_file),
    ],
)
def test_a_part_that_is_wrong(parts, change):
    """In one line, before anything is loaded."""
    expected = change(parts)
    with pytest.raises((ValueError, OSError), match=expected) as raised:
        from_pretrained(str(parts[3]), device_map="cpu")
    assert "\n" not in str(raised.value)


def test_a_part_of_another_name(parts):
    """The names of the others follow from the name of one."""
    parts[0].rename(renamed := parts[0].with_name("whole.gguf"))
    with pytest.raises(ValueError, match=r"split\.count must be 1, by the name of the file, got 4\)$"):
        from_pretrained(str(renamed), device_map="cpu")


def test_the_only_part(written, tmp_path):
    path = shutil.copy(written.with_name("model.gguf"), tmp_path / "model-00001-of-00001.gguf")
    assert Source(str(path), {}).files == [str(path)]
