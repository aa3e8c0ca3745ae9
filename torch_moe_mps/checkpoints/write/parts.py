"""Reads checkpoints of any kind one part at a time: a layer, an embedding, or all the rest.

The model is on the meta device. The weights of a part exist only within `loaded`: as in the checkpoint, or
quantised by a recipe. The converters of transformers and Quantizer read them, like `from_pretrained`, which
keeps all parts.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..._progress import with_progress
from ...models.basics.interface import codes_of, weights_in
from ...models.basics.report import QuantizationReport
from ...models.upstream.models import logging
from ...models.upstream.weights import (
    LoadStateDictConfig,
    convert_and_load_state_dict_in_model,
)
from ...ops._checks import Check
from ..layouts.checking import may_lack
from ..layouts.files import Shards
from ..quantize.importance import Importance
from ..quantize.sizes import bytes_a_token
from ..quantize.target import layer_of, quantizable
from ..quantize.tied import tied_layers, tied_pairs
from ..quantizer import Quantizer, quantizer_for
from ..rows import names_of_keys
from ..source import Source
from ..threads import one_by_one

_CHECK = Check("load")
REST = ""  # the part with everything outside of layers and embeddings


class Parts:
    """A model that has the weights of one part at a time.

    Args:
        recipe: arguments of `accelerate`, by which dense weights are quantised; None leaves them dense.
        importance: for quantisation, as in `accelerate`.

    Attributes:
        model: of transformers, in evaluation mode.
        modules: the names of the layers, of the embeddings and of the output head.

    Raises: ValueError for a checkpoint with another quantisation, or without safetensors files.
    """

    def __init__(
        self,
        source: Source,
        *,
        recipe: Mapping[str, Any] | None = None,
        importance: Importance | None = None,
    ):
        self.model = source.skeleton().eval()
        self.dtype = self.model.dtype
        self._give_buffers()
        self._tied = tied_layers(self.model)
        self._tied_biases = {
            name: other
            for name, other in (getattr(self.model, "all_tied_weights_keys", None) or {}).items()
            if name.endswith(".bias")
        }
        self._quantizer = quantizer_for(source, self.model, source.files, recipe, importance)
        self._conversions = source.conversions(self.model, self._quantizer)
        embeddings = {n for n, target in quantizable(self.model).items() if target.kind == "embeddings"}
        owners = (name.rpartition(".")[0] for name, _ in self.model.named_parameters(remove_duplicate=False))
        result = dict.fromkeys(layer_of(owner) for owner in owners)
        self.modules = [n for n in result if n.rpartition(".")[2].isdigit() or n in embeddings]
        self._keys: dict[str, dict[str, Any]] = defaultdict(dict)
        self._stack = ExitStack()
        if source.gguf is None:
            self._open(source.files)
        else:
            assert self._quantizer is not None
            for name, tensor in self._quantizer.state().items():
                self._keys[self.part_of(name)][name] = tensor
        self._load(REST)

    def _open(self, files: Sequence[str]) -> None:
        """Indexes the tensors of safetensors files by part of the model."""
        for file in files:
            tensors = self._stack.enter_context(safe_open(file, framework="pt"))
            for key, name, _ in names_of_keys(self.model, self._conversions, tensors.keys()):
                self._keys[self.part_of(name)][key] = tensors.get_slice(key)

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def into(self, shards: Shards) -> Iterator[dict[str, Tensor]]:
        """The tensors of each part that the shards do not have; `end` is called for each complete part."""
        parts = dict.fromkeys([REST, *(self.part_of(f"{name}.weight") for name in self.modules)])
        done = shards.done.keys() & parts.keys()
        if self._quantizer is not None:
            self._quantizer.place_empty(self.model, lambda name: self.part_of(f"{name}.weight") in done)
        if self.report is not None:
            for part in done:
                self.report.add_rows(shards.done[part])
        left = [part for part in parts if part not in done]
        for part in with_progress(left, "Converting", "part", len(parts) - len(left)):
            with self.loaded(part) if part != REST else nullcontext():
                yield self._tensors(part)
            rows = [] if self.report is None else self.report.rows()
            shards.end(part, [row for row in rows if self.part_of(f"{row[0]}.weight") == part])

    @property
    def report(self) -> QuantizationReport | None:
        """Report of what was quantised, in the model's order, whatever parts another process wrote."""
        report = None if self._quantizer is None else self._quantizer.report
        if report is not None:
            report.bytes_after = bytes_a_token(self.model)
            place = {name: number for number, (name, _) in enumerate(self.model.named_modules())}
            names = sorted(report.modules, key=lambda name: place.get(name, len(place)))
            report.modules = {name: report.modules[name] for name in names}
        return report

    def part_of(self, name: str) -> str:
        """The part of a parameter or buffer; tied layers are in one part."""
        module = layer_of(name.rpartition(".")[0])
        module = self._tied.get(module, module)
        return module if module in self.modules else REST

    @contextmanager
    def loaded(self, module: str) -> Iterator[nn.Module]:
        """Context where a module's weights are loaded.

        Raises: ValueError for a parameter that the checkpoint lacks, or that cannot be quantised.
        """
        part = self.part_of(f"{module}.weight")
        try:
            self._load(part)
            yield self.model.get_submodule(module)
        finally:
            for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
                if self.part_of(name) == part:
                    place, _, last = name.rpartition(".")
                    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
                    self.model.get_submodule(place)._parameters[last] = empty
            for name, owner in self.model.named_modules():
                if self.part_of(f"{name}.weight") == part:
                    for key, codes in codes_of(owner).items():
                        owner._buffers[key] = torch.empty_like(codes, device="meta")

    def _tensors(self, part: str) -> dict[str, Tensor]:
        """Tensors of a loaded part, except tied and non-persistent ones."""
        model = self.model
        left_out = {*(model._keys_to_ignore_on_save or ()), *self._tied_biases}
        shared = {
            id(tensor)
            for source in self._tied.values()
            for tensor in weights_in(model.get_submodule(source), recurse=False)
        }
        return {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if self.part_of(name) == part
            and name not in left_out
            and not (name.rpartition(".")[0] in self._tied and id(tensor) in shared)
        }

    def _load(self, part: str) -> None:
        """Reads the weights of a part. Raises: ValueError for a tensor that the checkpoint lacks."""
        missing = read_tensors(self.model, self._keys[part], self._conversions, self._quantizer, self.dtype)
        optional = may_lack(self.model)
        for name in sorted(self._tie(missing)):
            if self.part_of(name) == part and not optional(name):
                _CHECK.fail(name, "in the checkpoint", "no such tensor")
        if self._quantizer is not None:
            self._quantizer.place(self.model, lambda name: self.part_of(f"{name}.weight") == part)

    def _tie(self, missing: set[str]) -> set[str]:
        """Shares tensors between tied layers if the checkpoint has only one. Returns: missing names."""
        missing = {*missing}
        for name, other in tied_pairs(self._tied):
            module, source = self.model.get_submodule(name), self.model.get_submodule(other)
            for last, tensor in source._parameters.items():
                if f"{name}.{last}" in missing and f"{other}.{last}" not in missing:
                    module._parameters[last] = tensor
                    missing.remove(f"{name}.{last}")
        for name, source in self._tied_biases.items():
            bias = self.model.get_parameter(source)
            if not bias.is_meta:  # it is outside of layers, where all is kept
                self.model.get_submodule(name.rpartition(".")[0])._parameters["bias"] = bias
                missing.discard(name)
        return missing

    def _give_buffers(self) -> None:
        """Allocates and computes the model's buffers, which are small."""
        for name, buffer in list(self.model.named_buffers()):
            owner, _, last = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[last] = torch.empty_like(buffer, device="cpu")
        self.model.initialize_weights()  # the buffers: parameters have no memory


def read_tensors(
    model: Any,
    tensors: Mapping[str, Any],
    mapping: list[Any],
    reader: Any,
    dtype: torch.dtype,
) -> set[str]:
    """Reads tensors of files, by their names there, into a model on the CPU. Returns: names that they lack.

    Args:
        mapping: transformers' conversions of them.
        reader: the quantizer; None reads dense tensors.

    Raises: ValueError for one of another shape, or that cannot be converted.
    """
    config = LoadStateDictConfig(
        device_map={"": "cpu"},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        hf_quantizer=reader,
        weight_mapping=mapping,
    )
    with one_by_one(isinstance(reader, Quantizer)), _silent():
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    for name, result, expected in info.mismatched_keys:
        _CHECK.fail(name, f"of shape {tuple(expected)}", tuple(result))
    for name, error in info.conversion_errors.items():
        raised = error.partition("\nError")[0].strip().splitlines()[-1]  # transformers' own last line
        raise ValueError(f"moe_mps::load: {name}: {raised}")
    missing: set[str] = info.missing_keys
    return missing


@contextmanager
def _silent() -> Iterator[None]:
    """Hides transformers' progress bar: there would be one for each part."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
