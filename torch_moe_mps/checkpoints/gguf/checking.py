"""Checks that a GGUF file has the tensors that its metadata declares, with their shapes and types.

transformers leaves missing weights random, drops unknown tensors, and lets halves of joined matrices
broadcast.
"""

import math
import re
import warnings
from collections.abc import Iterator

from transformers import PreTrainedModel

from ...ops._checks import Check
from ..absent import beside_text
from ..layouts.checking import may_lack
from .file import GgufFile
from .header import header_of

_CHECK = Check("gguf")
_INTEGERS = ("I8", "I16", "I32", "I64")
# Tensors that are no weights: factors of rotary embeddings, which the config has (rope.py), and of inputs.
_BESIDE = re.compile(r"(^|\.)(rope_freqs|rope_factors_(long|short)|attn_rot_embd)\.|\.input_scale$")
_BLOCK = re.compile(r"(?:^|.*\.)blk\.(\d+)\.")
_OUTSIDE = re.compile(r"output\.|cls\.")  # heads, which a model of another class does not have


def check_declared(file: GgufFile, model: PreTrainedModel, path: str) -> None:
    """Checks the tensors of a file against the meta model made of its metadata.

    Raises: ValueError, before any value is read, for an unknown or missing tensor, a wrong shape, or an
        integer type.
    """
    _check_surplus(file, model, path)
    state = model.state_dict()
    for name in _needed(model):
        if name not in file.parts:
            _CHECK.fail(name, "in the file", "no such tensor")
    for name, tensors in file.parts.items():
        for tensor in tensors:
            if tensor.kind in _INTEGERS:
                _CHECK.fail(tensor.name, "of floating-point numbers or blocks", tensor.kind.lower())
        expected = tuple(state[name].shape)
        if _shape_in_model(file, name) != expected:
            shapes = " and ".join(str(tensor.shape) for tensor in tensors)
            names = " and ".join(tensor.name for tensor in tensors)
            whole = "of the shape" if len(tensors) == 1 else "two halves"
            _CHECK.fail(names, f"{whole} that makes {name} {expected}", shapes)


def _check_surplus(file: GgufFile, model: PreTrainedModel, path: str) -> None:
    """Checks for tensors without a parameter; blocks that were cut, or are MTP layers, may have some.

    Warns of MTP layers, which are left out.
    """
    metadata = header_of(path).metadata
    count = metadata.get(f"{metadata['general.architecture']}.block_count")
    further = metadata.get(f"{metadata['general.architecture']}.nextn_predict_layers", 0)
    placed = {tensor.name for tensors in file.parts.values() for tensor in tensors}
    blocks = {_block(name) for name in placed}
    has_head = model.get_output_embeddings() is not None
    if isinstance(count, int) and further:
        _warn_of_further(file, count - further)
    for tensor in file.tensors:
        block = _block(tensor.name)
        is_cut = block is not None and block not in blocks and isinstance(count, int) and block < count
        other_head = not has_head and _OUTSIDE.match(tensor.name)
        if not (tensor.name in placed or is_cut or other_head or _BESIDE.search(tensor.name)):
            expected = f"of a name that {type(model).__name__} has in the blocks that the file declares"
            _CHECK.fail(tensor.name, expected, f"a tensor {tensor.shape}")


def _warn_of_further(file: GgufFile, first: int) -> None:
    """Warns of blocks from a first one on, which predict further tokens, and which the class has not."""
    numbers = ((tensor.name, _block(tensor.name)) for tensor in file.tensors)
    names = [name for name, block in numbers if block is not None and block >= first]
    if names:
        warnings.warn(
            f"torch_moe_mps: {len(names)} tensors of the GGUF file predict further tokens and are left out: "
            f"{names[0]}, ...",
            stacklevel=5,
        )


def _block(name: str) -> int | None:
    match = _BLOCK.match(name)
    return None if match is None else int(match[1])


def _needed(model: PreTrainedModel) -> Iterator[str]:
    """Names of the tensors that a file must have.

    These are all but a new head, tied weights, computed ones, and those of a vision tower.
    """
    optional, towers = may_lack(model), tuple(f"{part}." for part in beside_text(model))
    tied = {*(getattr(model, "all_tied_weights_keys", None) or ())}
    base = set(model.base_model.modules()) | {model.get_output_embeddings()}
    for name in model.state_dict():
        owner = model.get_submodule(name.rpartition(".")[0])
        if owner in base and name not in tied and not optional(name) and not name.startswith(towers):
            yield name


def _shape_in_model(file: GgufFile, name: str) -> tuple[int, ...] | None:
    """Shape of a parameter as transformers makes it; None if it cannot, or would repeat values."""
    shape = file.shape(name)
    values = sum(math.prod(tensor.shape) for tensor in file.parts[name])
    return shape if shape is not None and math.prod(shape) == values else None
