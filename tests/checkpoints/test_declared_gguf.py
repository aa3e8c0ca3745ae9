"""What a GGUF file declares is what is loaded: with one change it is refused, or its logits are the same.

Each tensor is dropped, renamed, cut, repeated and said to be of another type, others are put beside it, and
each key that tells a shape gets other values, one at a time.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.declared import Change, assert_declared
from support.gguf_blocks import type_of
from support.gguf_files import FIRST_LOADER, class_of, of_architecture, write, write_file
from support.models import output, prompt
from support.sweep import covering

import torch_moe_mps

SECOND_LOADER = ("qwen35", "qwen35moe", "lfm2", "gpt-oss", "dbrx")
# Keys that tensors have the shapes of; with another value of any other, the file is that of another model.
SHAPES = (
    "block_count", "embedding_length", "feed_forward_length", "head_count", "head_count_kv", "key_length",
    "vocab_size", "expert_count", "ssm.inner_size", "ssm.conv_kernel", "shortconv.l_cache",
)  # fmt: skip
# Queries, keys and values of as many heads are one matrix: any number of heads fits it.
JOINED = ("bloom", "gpt2", "falcon")
Tensors = dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]  # bytes [..., bytes of a row], or numbers


def read(path: Path) -> tuple[Tensors, dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return {t.name: (np.array(t.data), t.tensor_type) for t in reader.tensors}, keys


def rewrite(path: Path, tensors: Tensors, keys: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    kinds = {int: writer.add_int32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for name, value in keys.items():
        if name != "general.architecture":
            kinds[type(value)](name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_tensor(name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> Iterator[Change]:
    def to(made: np.ndarray, other: gguf.GGMLQuantizationType = kind):
        return lambda tensors, keys: tensors.update({name: (made, other)})

    if name != "output.weight":  # without it, the format says, the head is the embedding
        yield Change(f"{name} dropped", "", lambda tensors, keys: tensors.pop(name))
        yield Change(
            f"{name} renamed", name, lambda tensors, keys: tensors.update({f"{name}_": tensors.pop(name)})
        )
    yield Change(
        f"{name} added", f"{name}_2", lambda tensors, keys: tensors.update({f"{name}_2": (data, kind)})
    )
    block = gguf.GGML_QUANT_SIZES[kind][1] if data.dtype == np.uint8 else 1
    for dim in range(data.ndim):
        step = block if dim == data.ndim - 1 else 1
        sizes = {data.shape[dim] - step, data.shape[dim] // step // 2 * step, step} - {data.shape[dim], 0}
        for size in sorted(sizes):
            yield Change(f"{name} {size} of {dim}", name, to(data.take(range(size), dim)))
        yield Change(f"{name} twice along {dim}", name, to(np.concatenate((data, data), dim)))
    if data.ndim > 1:
        yield Change(f"{name} flat", name, to(data.reshape(-1)))
    values = gguf.dequantize(data, kind)
    yield Change(f"{name} in float32", name, to(values, gguf.GGMLQuantizationType.F32))
    yield Change(
        f"{name} of integers", name, to(np.rint(values).astype(np.int32), gguf.GGMLQuantizationType.I32)
    )


def of_key(name: str, value: Any) -> Iterator[Change]:
    def to(made: Any):
        return lambda tensors, keys: keys.update({name: made})

    yield Change(f"{name} dropped", "", lambda tensors, keys: keys.pop(name))
    if isinstance(value, int):
        for other in (2 * value, value // 2, value - 1, value + 1, -1, 0, "4", 0.5):
            yield Change(f"{name} = {other!r}", "", to(other))


def changes(tensors: Tensors, keys: dict[str, Any], every: bool) -> Iterator[Change]:
    """Those of each kind of tensor, or of all, and of the keys of shapes."""
    seen = set()
    for name, (data, kind) in tensors.items():
        part = ("exps" in name, data.ndim, kind)
        if every or part not in seen:
            yield from of_tensor(name, data, kind)
        seen.add(part)
    for name, value in keys.items():
        if name.endswith(SHAPES):
            joined = name.startswith(JOINED) and name.endswith("head_count")
            yield from [*of_key(name, value)][: 1 if joined else None]


def logits(path: Path, cls: Any) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch_moe_mps.from_pretrained(path, cls, device_map="cpu", dtype=torch.float32, check=False)
    ids = prompt(1, 5)
    if model.config.is_encoder_decoder:
        with torch.no_grad():
            return model(ids, decoder_input_ids=ids).logits
    return output(model, ids)


def check(architecture: str, folder: Path, every: bool, least: int, step: int = 1) -> None:
    path = folder / "model.gguf"
    if architecture in FIRST_LOADER:
        stored, keys, matrices, _ = of_architecture(architecture, "q8_0")
        write(path, stored, keys, matrices)
    else:
        write_file(path, architecture, ("q8_0",) * 3)
    cls = class_of(architecture)
    expected, (tensors, keys) = logits(path, cls), read(path)
    numbers = itertools.count()

    def of_changed(change: Change) -> torch.Tensor:
        own, own_keys = dict(tensors), dict(keys)
        change.apply(own, own_keys)
        made = folder / f"{next(numbers)}.gguf"  # whoever maps a file may keep it open
        rewrite(made, own, own_keys)
        try:
            return logits(made, cls)
        finally:
            made.unlink()

    assert_declared([*changes(tensors, keys, every)][::step], of_changed, expected, 1e-3, least)


@pytest.mark.slow("a file is loaded for each change")
def test_some_things_changed(tmp_path):
    check("qwen3_moe", tmp_path, every=False, least=10, step=4)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", (*FIRST_LOADER, *SECOND_LOADER))
def test_one_thing_changed(architecture, tmp_path):
    check(architecture, tmp_path, every=False, least=40)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", (*FIRST_LOADER, *SECOND_LOADER))
def test_one_thing_changed_in_every_tensor(architecture, tmp_path):
    check(architecture, tmp_path, every=True, least=100)


@pytest.mark.parametrize("kind", ["q5_1", "q6_k", "f16"])
def test_another_type_in_the_header(tmp_path, kind):
    """Its bytes would be read as other values; tensors lie one behind the other."""
    path = write_file(tmp_path / "model.gguf", "llama", ("q8_0",) * 3)
    data = path.read_bytes()
    for name in (b"blk.0.attn_k.weight", sorted(t.name for t in gguf.GGUFReader(path).tensors)[-1].encode()):
        place = data.index(name) + len(name) + 4 + 2 * 8
        number = type_of(kind) if kind != "f16" else gguf.GGMLQuantizationType.F16
        path.write_bytes(data[:place] + int(number).to_bytes(4, "little") + data[place + 4 :])
        with pytest.raises(ValueError, match=r"^moe_mps::gguf: [^\n]*model\.gguf[^\n]*$"):
            torch_moe_mps.from_pretrained(path, check=False)


def test_attention_without_heads(tmp_path):
    stored, keys, matrices, _ = of_architecture("mistral", "q8_0")
    path = write(tmp_path / "model.gguf", stored, keys | {"attention.head_count": 0}, matrices)
    with pytest.raises(ValueError, match=r"llama\.attention\.head_count must be at least 1, got 0"):
        torch_moe_mps.from_pretrained(path, check=False)


@pytest.mark.parametrize(
    ("architecture", "changed"), covering(("bloom", "falcon"), ("output.weight", "token_embd.weight"))
)
def test_a_head_of_another_type_than_the_embedding(tmp_path, architecture, changed):
    """Their models tie both; a file that has both in it may have one packed and one in float32."""
    stored, made, matrices, _ = of_architecture(architecture, "q8_0")
    path, cls = write(tmp_path / "model.gguf", stored, made, matrices), class_of(architecture)
    expected, (tensors, keys) = logits(path, cls), read(path)
    tensors[changed] = gguf.dequantize(*tensors[changed]), gguf.GGMLQuantizationType.F32
    rewrite(tmp_path / "changed.gguf", tensors, keys)
    torch.testing.assert_close(logits(tmp_path / "changed.gguf", cls), expected, rtol=1e-3, atol=1e-4)
