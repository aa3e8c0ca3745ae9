"""Quantised checkpoints with one thing wrong: loading names it, or the logits are right; never silence."""

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support.models import output, prompt, tiny
from support.sweep import in_sweep

import torch_moe_mps

transformers.logging.set_verbosity_error()

ERRORS = (ValueError, RuntimeError, OSError, SafetensorError)
FORMATS = (
    *("affine2_32", "affine3_32", "affine8_32", "affine5_32", "affine0_32", "affine4_64", "affine4_128"),
    *("affine4_16", "affine", "affine4_32", "mxfp4", "mxfp8", "nvfp4", "other", "", None, 4),
)
# Another dtype that a tool may have written.
OTHER_DTYPES = {
    torch.float32: (torch.int32, torch.float16, torch.bfloat16),
    torch.int32: (torch.float32, torch.uint8, torch.int64),
    torch.uint8: (torch.float32, torch.int32),
}


class Mutation(NamedTuple):
    """`apply` changes tensors and config; an error contains `name`."""

    label: str
    name: str
    apply: Callable[[dict, dict], None]


class Checkpoint(NamedTuple):
    folder: object
    logits: torch.Tensor


FORMS = [(4, 32, "affine"), (4, 32, "mxfp4")]


@pytest.fixture(scope="module", params=in_sweep(FORMS, FORMS[:1]), ids=str)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    model = tiny("qwen3_moe")
    torch_moe_mps.quantize_experts(model, *request.param, progress=False)
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return Checkpoint(folder, output(model, prompt()))


def tensor_mutations(name: str, tensor: torch.Tensor) -> Iterator[Mutation]:
    leaf = name.rpartition("layers.")[2].partition(".")[2] or name  # the report joins equal layers

    def to(dtype):
        return lambda tensors, config: tensors.update({name: tensor.to(dtype)})

    def reshaped(change):
        return lambda tensors, config: tensors.update({name: change(tensor).contiguous()})

    yield Mutation("dropped", leaf, lambda tensors, config: tensors.pop(name))
    yield Mutation("renamed", leaf, lambda tensors, config: tensors.update({f"{name}_": tensors.pop(name)}))
    yield Mutation("shorter", leaf, reshaped(lambda t: t[..., :-1]))
    yield Mutation("fewer rows", leaf, reshaped(lambda t: t[: t.shape[0] // 2]))
    yield Mutation("flat", leaf, reshaped(lambda t: t.flatten()[:-1]))
    for dtype in OTHER_DTYPES[tensor.dtype]:
        yield Mutation(f"as {dtype}", leaf, to(dtype))


def config_mutations(stored: dict) -> Iterator[Mutation]:
    """Every value of the quantisation config, and values of the model config that a tensor contradicts."""

    def quantization(**changes):
        return lambda tensors, config: config["quantization_config"].update(changes)

    for key, values in {
        "library": ("other", None),
        "quant_method": ("moe_mps",),
        "modules": (
            *({}, {"nothing": {}}, {"model.layers.0.mlp.experts": 5}, [1], "all", None),
            *({"model.layers.*.mlp.experts": format} for format in FORMATS),
        ),
    }.items():
        for value in values:
            if value != stored["quantization_config"].get(key):
                yield Mutation(f"{key} = {value!r}", "", quantization(**{key: value}))
    sizes = ("hidden_size", "moe_intermediate_size", "num_local_experts", "num_hidden_layers", "vocab_size")
    assert stored.keys() >= set(sizes)
    for key in sizes:
        yield Mutation(
            f"{key} doubled", "", lambda tensors, config, key=key: config.update({key: 2 * config[key]})
        )


class Messages(logging.Handler):
    """What transformers logs: its error about shapes points to a report in the log."""

    def __init__(self):
        super().__init__()
        self.text = ""

    def emit(self, record):
        self.text += record.getMessage()


def outcome(folder) -> torch.Tensor | str:
    """The logits of a checkpoint, or all messages about why there are none."""
    messages = Messages()
    transformers.logging.set_verbosity_warning()
    transformers.logging.add_handler(messages)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    except ERRORS as error:
        return f"{error}\n{messages.text}"
    finally:
        transformers.logging.remove_handler(messages)
        transformers.logging.set_verbosity_error()
    return output(model.eval(), prompt())


def check(checkpoint: Checkpoint, mutation: Mutation, folder) -> str | None:
    """What is wrong with the outcome, None for nothing."""
    shutil.copytree(checkpoint.folder, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    mutation.apply(tensors, config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    result = outcome(folder)
    if isinstance(result, str):
        return None if mutation.name in result else f"{mutation.name} is not named: {result[:200]}"
    error = (result - checkpoint.logits).abs().max() / checkpoint.logits.abs().max()
    return None if error < 0.05 else f"logits off by {error:.2g}"


def run(checkpoint: Checkpoint, mutations: Iterator[Mutation], folder) -> None:
    faults = {}
    for number, mutation in enumerate(mutations):
        fault = check(checkpoint, mutation, folder / str(number))
        shutil.rmtree(folder / str(number))
        if fault is not None:
            faults[f"{mutation.name} {mutation.label}"] = fault
    assert not faults, "\n".join(f"{label}: {fault}" for label, fault in faults.items())


def test_tensors_of_a_layer(checkpoint, tmp_path):
    tensors = load_file(checkpoint.folder / "model.safetensors")
    of_layer = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp" in name}
    assert len(of_layer) >= 5
    mutations = (m for item in of_layer.items() for m in tensor_mutations(*item))
    run(checkpoint, itertools.islice(mutations, 0, None, 3), tmp_path)


@pytest.mark.sweep
def test_every_tensor(checkpoint, tmp_path):
    tensors = load_file(checkpoint.folder / "model.safetensors")
    run(checkpoint, (m for item in tensors.items() for m in tensor_mutations(*item)), tmp_path)


@pytest.mark.parametrize("step", in_sweep((1, 3), (3,)))
def test_values_of_the_config(checkpoint, tmp_path, step):
    stored = json.loads((checkpoint.folder / "config.json").read_text())
    run(checkpoint, itertools.islice(config_mutations(stored), 0, None, step), tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 100, 2000, -1])
def test_truncated_files(checkpoint, tmp_path, kept):
    shutil.copytree(checkpoint.folder, tmp_path, dirs_exist_ok=True)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:kept])
    assert isinstance(outcome(tmp_path), str)


def test_our_loader_refuses_what_transformers_only_warns_of(tmp_path):
    """A dense checkpoint that lacks a tensor."""
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"^moe_mps::from_pretrained: model.layers.1.mlp.gate.weight must be in"
    ):
        torch_moe_mps.from_pretrained(str(tmp_path))
