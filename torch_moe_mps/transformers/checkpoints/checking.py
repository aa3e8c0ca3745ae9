"""Checks that a quantised checkpoint has everything that the model needs."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import nn

from ...ops._checks import ACTIVATION_DTYPES, Check
from ...quantization import TENSORS, Format, QuantizedWeight
from ..interface import formats_of, is_experts, is_quantized
from .weights import quantized_names

if TYPE_CHECKING:  # transformers is not complete yet when its quantizers import ours
    from transformers import PreTrainedModel


def check_shapes(model: nn.Module, files: Sequence[str] | None) -> None:
    """Raises: ValueError for a tensor in the files whose shape differs from the model's."""
    state = model.state_dict()
    for file in files or ():
        if not file.endswith(".safetensors"):
            continue
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(state.keys() & set(tensors.keys())):
                shape, found = tuple(state[name].shape), tuple(tensors.get_slice(name).get_shape())
                if found != shape:
                    Check("from_pretrained").fail(name, f"of shape {shape}", f"{found} in {file}")


def check_loaded(model: "PreTrainedModel", loaded: Callable[[str], bool]) -> None:
    """Checks the modules whose names are `loaded`.

    Raises: ValueError for a tensor that the checkpoint lacks, or has in a wrong dtype.

    transformers leaves missing tensors uninitialised, or fills them with random values, and only logs their
    names. A head that is not part of the saved model may be new.
    """
    check = Check("from_pretrained")
    whole = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    optional = [
        re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    ]
    base = set(model.base_model.modules())
    for path, module in model.named_modules():
        if not loaded(path):
            continue
        required = whole or module in base
        dtypes = _dtypes_of(module)
        for name, tensor in _stored(module):
            argument = f"{path}.{name}".lstrip(".")
            missing = not getattr(tensor, "_is_hf_initialized", False)
            if missing and required and not any(pattern.search(argument) for pattern in optional):
                check.fail(argument, "in the checkpoint", "no such tensor")
            if name in dtypes:
                check.dtype(argument, tensor, dtypes[name])
            elif isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
                check.fail(argument, "of a floating-point dtype", str(tensor.dtype).removeprefix("torch."))


def _dtypes_of(module: nn.Module) -> dict[str, tuple[torch.dtype, ...]]:
    """{name of a quantised tensor: its possible dtypes}; the matrices of experts have a format each."""
    if is_experts(module) and is_quantized(module):
        formats = formats_of(module)
    else:
        format = getattr(module, "format", None)
        formats = {"weight": format} if isinstance(format, Format) else {}
    names = ((quantized_names(parameter), _dtypes(format)) for parameter, format in formats.items())
    return {
        name: dtypes[part]
        for ours, dtypes in names
        for name, part in zip(ours, TENSORS, strict=True)
        if part in dtypes
    }


def _dtypes(format: Format) -> dict[str, tuple[torch.dtype, ...]]:
    """{"packed", "scales" or "biases": the dtypes that are allowed}."""
    weight = QuantizedWeight.empty((1, 1024), torch.float32, torch.device("meta"), format)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {"packed": (torch.int32,)}
    for part, tensor in zip(TENSORS, weight, strict=True):
        if tensor is not None and part != "packed":
            dtypes[part] = ACTIVATION_DTYPES if tensor.dtype.is_floating_point else (tensor.dtype,)
    return dtypes


def _stored(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module that a checkpoint has."""
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer
