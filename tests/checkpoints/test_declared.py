"""What a file declares is what is loaded: with one thing changed it is refused, or its logits are the same.

Each tensor is dropped, cut, repeated and turned into another dtype, others are put beside it, and each key of
the quantisation in the config gets other values, one at a time.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.checkpoints import changed, fp8_blocks, mxfp4_blocks
from support.declared import Change, assert_declared
from support.models import output, prompt, quantize_experts
from support.other_libraries import (
    E4M3,
    AutoRound,
    Awq,
    CompressedTensors,
    Fp4,
    Fp8,
    Gptq,
    Int8,
    Library,
    together,
    write,
)

import torch_moe_mps
from torch_moe_mps.checkpoints.mlx.writing import save_mlx

SIZES = {"num_hidden_layers": 1, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2}


def of(writer, architecture: str = "qwen3_moe", stacked: bool = False) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write(folder, writer, architecture, **SIZES)
        if stacked:
            with changed(folder / "model.safetensors") as tensors:
                stacks = together(tensors, architecture)
                tensors.clear()
                tensors.update(stacks)

    return make


def tiny(architecture: str = "qwen3_moe"):
    with tiny_models.groups_of_32(), tiny_models.sizes(**SIZES):
        return tiny_models.tiny_model(architecture)


def of_mlx(mode: str, bits: int, group: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        model = tiny()
        torch_moe_mps.accelerate(model, bits=bits, group_size=group, mode=mode, check=False)
        save_mlx(model, folder, model.config.to_dict())

    return make


def of_ours(mode: str, bits: int, group: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        model = tiny()
        quantize_experts(model, bits, group, mode)
        model.save_pretrained(folder)

    return make


# {layout: what writes it}
LAYOUTS = {
    "int4": of(CompressedTensors()),
    "int4 asymmetric": of(CompressedTensors(symmetric=False)),
    "int4, stacked": of(CompressedTensors(), stacked=True),
    "int8 of channels": of(Int8()),
    "awq": of(Awq()),
    "gptq": of(Gptq()),
    "gptq v2, asymmetric": of(Gptq(version=2, symmetric=False)),
    "mxfp4": of(Fp4("compressed-tensors", 32)),
    "nvfp4": of(Fp4("compressed-tensors", 16, 2.0**-3)),
    "nvfp4 of modelopt": of(Fp4("modelopt", 16, 0.0003)),
    "fp8 of rows": of(Fp8("compressed-tensors", "weight_scale", "row", False)),
    "fp8 of modelopt": of(Fp8("modelopt", "weight_scale", None, True)),
    "fp8 of blocks": of(Fp8("fp8", "weight_scale_inv", (32, 32), False)),
    "fp8 of blocks, stacked": of(Fp8("fp8", "weight_scale_inv", (32, 32), False), stacked=True),
    "W4A16_ASYM": of(Library("W4A16_ASYM", 32)),
    "W8A8": of(Library("W8A8")),
    "FP8_BLOCK": of(Library("FP8_BLOCK")),
    "MXFP8A16": of(Library("MXFP8A16")),
    "fp8 of transformers": lambda folder: fp8_blocks(tiny(), folder),
    "mxfp4 of gpt-oss": lambda folder: mxfp4_blocks(tiny("gpt_oss"), folder),
    "auto-round": of(AutoRound("auto_gptq", Gptq())),
    "mlx": of_mlx("affine", 4, 32),
    "mlx mxfp4": of_mlx("mxfp4", 4, 32),
    "ours": of_ours("affine", 4, 32),
    "ours mxfp4": of_ours("mxfp4", 4, 32),
}
# What any of them may have, and what tools write in its place.
DTYPES = (torch.float32, torch.float16, torch.int32, torch.int8, torch.uint8, E4M3, torch.float8_e5m2)


def of_tensor(name: str, tensor: torch.Tensor) -> Iterator[Change]:
    def to(made: torch.Tensor):
        return lambda tensors, config: tensors.update({name: made.contiguous()})

    module, _, part = name.rpartition(".")
    yield Change(f"{name} dropped", module, lambda tensors, config: tensors.pop(name))
    yield Change(
        f"{name} renamed", "", lambda tensors, config: tensors.update({f"{name}_": tensors.pop(name)})
    )
    for dim in range(tensor.dim()):
        yield Change(f"{name} cut along {dim}", part, to(tensor.narrow(dim, 0, tensor.shape[dim] - 1)))
        yield Change(f"{name} of half {dim}", part, to(tensor.narrow(dim, 0, tensor.shape[dim] // 2)))
        yield Change(f"{name} twice along {dim}", part, to(torch.cat((tensor, tensor), dim)))
        if tensor.shape[dim] > 1:
            yield Change(f"{name} one of {dim}", part, to(tensor.narrow(dim, 0, 1)))
    yield Change(f"{name} flat", part, to(tensor.flatten()))
    for dtype in DTYPES:
        if dtype != tensor.dtype:
            # Integers in place of a dense weight are codes: its scales may be what is missing.
            yield Change(f"{name} as {dtype}", module.rpartition(".")[2], to(tensor.float().to(dtype)))


def of_value(value: Any) -> Iterator[tuple[str, Any]]:
    """Other values of a key."""
    if isinstance(value, bool):
        yield "other", not value
    elif isinstance(value, int | float):
        yield from (
            (str(other), other) for other in (2 * value, value // 2, value - 1, value + 1, -1, 0, "4", None)
        )
    elif isinstance(value, str):
        words = ("gptq", "gptq_v2", "gemv", "channel", "tensor", "group", "int", "float", "static", "",
                 "int-quantized", "pack-quantized", "float-quantized", "NVFP4", "FP8", "e5m2",
                 "affine4_64", "affine8_32", "affine3_32", "affine", "nvfp4")  # fmt: skip
        yield from ((word, word) for word in words if word != value)
        yield from (("None", None), ("4", 4))
    elif isinstance(value, list):
        yield from (("[]", []), ("reversed", value[::-1]), ("shorter", value[:-1]), ("None", None), ("3", 3))
        yield from ((f"{n} doubled", [*value[:n], 2 * one, *value[n + 1 :]]) for n, one in enumerate(value))
    elif value is None:
        yield from ((str(other), other) for other in (True, 1, 64, [64, 64], "x"))


def of_config(stored: dict, path: tuple = ()) -> Iterator[Change]:
    for key, value in stored.items():
        own = (*path, key)
        yield Change(
            f"{'.'.join(own)} dropped", "", lambda tensors, config, own=own: _at(config, own).pop(own[-1])
        )
        others = [("{}", {}), ("None", None)] if isinstance(value, dict) else of_value(value)
        for label, other in others:
            yield Change(
                f"{'.'.join(own)} = {label}",
                "",
                lambda tensors, config, own=own, other=other: _at(config, own).update({own[-1]: other}),
            )
        if isinstance(value, dict):
            yield from of_config(value, own)


def _at(config: dict, path: tuple) -> dict:
    for key in path[:-1]:
        config = config[key]
    return config


def quantization_of(config: dict) -> dict:
    return config["quantization_config" if "quantization_config" in config else "quantization"]


def changes(folder: Path, every: bool) -> Iterator[Change]:
    """Those of each kind of tensor in a checkpoint, or of all tensors, and of the config."""
    tensors, seen = load_file(folder / "model.safetensors"), set()
    for name, tensor in tensors.items():
        kind = ("experts" in name, name.rpartition(".")[2], tensor.dtype)
        if every or kind not in seen:
            yield from of_tensor(name, tensor)
        if kind not in seen and "layers" in name:
            beside = f"{name}_2"
            yield Change(
                f"{beside} added", "", lambda t, c, new=beside, one=tensor: t.update({new: one.clone()})
            )
        seen.add(kind)
    with changed(folder / "config.json") as config:
        yield from of_config(copy.deepcopy(quantization_of(config)))


def logits(folder: Path) -> torch.Tensor:
    return output(torch_moe_mps.from_pretrained(folder, dtype=torch.float32, check=False), prompt(1, 5))


def check(make: Callable[[Path], None], folder: Path, every: bool, least: int, step: int = 1) -> None:
    make(folder)
    expected, tensors = logits(folder), load_file(folder / "model.safetensors")
    config_file = folder / "config.json"
    kept = config_file.read_text()

    def of_changed(change: Change) -> torch.Tensor:
        own = dict(tensors)
        config_file.write_text(kept)
        with changed(config_file) as config:
            stored = quantization_of(config)
            change.apply(own, stored)
            if "quantization" in config and "quantization_config" in config:
                config["quantization"] = stored
        own = {name: tensor.contiguous() for name, tensor in own.items()}
        save_file(own, folder / "model.safetensors", {"format": "pt"})
        return logits(folder)

    assert_declared([*changes(folder, every)][::step], of_changed, expected, 0.02, least)


@pytest.mark.slow("a checkpoint is loaded for each change")
@pytest.mark.parametrize("layout", ["gptq v2, asymmetric", "ours"])
def test_some_things_changed(layout, tmp_path):
    check(LAYOUTS[layout], tmp_path, every=False, least=20, step=4)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_thing_changed(layout, tmp_path):
    check(LAYOUTS[layout], tmp_path, every=False, least=80)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_thing_changed_in_every_tensor(layout, tmp_path):
    check(LAYOUTS[layout], tmp_path, every=True, least=150)


def test_one_dense_expert(tmp_path):
    """Its matrix is no part of a stack of codes: one line names it, where transformers writes five."""
    fp8_blocks(tiny(), tmp_path)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    with changed(tmp_path / "model.safetensors") as tensors:
        tensors.pop(f"{name}_scale_inv")
        tensors[name] = tensors[name].to(torch.bfloat16)
    with pytest.raises(ValueError) as error:
        torch_moe_mps.from_pretrained(tmp_path)
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    expected = (
        f"moe_mps::load: {name} must be quantised as the other matrices of {stack} are, got a dense one"
    )
    assert str(error.value) == expected
