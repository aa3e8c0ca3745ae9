"""Dense checkpoints in parts: a layer, an embedding or the output head is read when it is needed.

The model is on the meta device, except for its buffers and small parameters; the weights of a part exist
only within `loaded`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from ...ops._checks import Check
from .config import is_mlx
from .loading import class_for
from .targets import kinds_of, tied_layers

_CHECK = Check("load")
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


class LayerwiseCheckpoint:
    """A model that has the weights of one part at a time.

    Args:
        source: a folder, or a name on the Hub: a dense checkpoint, or one in FP8.
        device: where the loaded part is.
        model_class: of transformers; the Auto class of a model that generates text unless given.
        trust_remote_code: run the code in the checkpoint, for a type of model that transformers lacks.

    Attributes:
        model: of transformers, in evaluation mode.
        parts: {name of a module: names of its parameters} of layers, and of embeddings and the output head.

    Raises: ValueError for a checkpoint that is quantised otherwise, or that has no safetensors files.
    """

    def __init__(
        self,
        source: str,
        device: str | torch.device = "cpu",
        model_class: type[PreTrainedModel] | None = None,
        trust_remote_code: bool = False,
    ):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        stored = vars(config).pop("quantization_config", None)
        if stored and (is_mlx(stored) or stored.get("quant_method") != "fp8"):
            _CHECK.fail(str(source), "a dense checkpoint, or one in FP8", "one that is quantised already")
        self.model, self.device = _without_weights(config, device, model_class, trust_remote_code), device
        self._conversions = get_model_conversion_mapping(self.model)
        if stored:
            dequantizer = AutoHfQuantizer.from_config({**stored, "dequantize": True}, pre_quantized=True)
            self._conversions = dequantizer.update_weight_conversions(self._conversions, self.model)
        self._tied = tied_layers(self.model)
        embeddings = {name for name, (kind, _) in kinds_of(self.model).items() if kind == "embeddings"}
        parts = defaultdict(list)
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            parts[_part_of_parameter(name)].append(name)
        self.parts = {part: names for part, names in parts.items() if _is_layer(part) or part in embeddings}
        self._keys: dict[str, dict[str, Any]] = defaultdict(dict)
        self._stack = ExitStack()
        for file in checkpoint_files(source):
            tensors = self._stack.enter_context(safe_open(file, framework="pt"))
            for key, name in self._names(tensors.keys()):
                self._keys[_part_of_parameter(name)][key] = tensors.get_slice(key)
        for part in parts.keys() - self.parts.keys():
            self._load(part, parts[part])

    def __enter__(self) -> "LayerwiseCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _names(self, keys: list[str]) -> Iterator[tuple[str, str]]:
        """(key in a file, parameter of the model that it belongs to)."""
        renamings = [c for c in self._conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in self._conversions if isinstance(c, WeightConverter)]
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        for key in keys:
            name = rename_source_key(key, renamings, converters, prefix, state)[0]
            if name not in state and key in state:
                name = key
            yield key, name

    @contextmanager
    def loaded(self, part: str) -> Iterator[nn.Module]:
        """Within, the module has its weights.

        Raises: ValueError for a parameter that the checkpoint lacks.
        """
        source = self._tied.get(part, part)
        source = source if source in self._keys else part
        try:
            self._load(source, self.parts[source])
            module = self.model.get_submodule(part)
            if source != part:
                module.weight = self.model.get_submodule(source).weight
            yield module
        finally:
            for name in {*self.parts[part], *self.parts[source]}:
                self._set(name, torch.empty_like(self.model.get_parameter(name), device="meta"))

    def _load(self, part: str, names: list[str]) -> None:
        config = LoadStateDictConfig(
            device_map={"": self.device}, dtype=self.model.dtype, weight_mapping=self._conversions
        )
        with _silent():
            convert_and_load_state_dict_in_model(self.model, self._keys[part], config)
        for name in names:
            if self.model.get_parameter(name).is_meta:
                _CHECK.fail(name, "in the checkpoint", "no such tensor")

    def _set(self, name: str, value: torch.Tensor) -> None:
        owner, _, last = name.rpartition(".")
        self.model.get_submodule(owner)._parameters[last] = nn.Parameter(value, requires_grad=False)


def check_files(source: str) -> None:
    """Checks that the files of a local folder are complete; see `checkpoint_files`."""
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} has no config.json")
        checkpoint_files(source)


def checkpoint_files(source: str) -> list[Path]:
    """The safetensors files of a folder or of a name on the Hub.

    Raises: ValueError, with its name, for a file that is missing or truncated, and for no file.
    """
    if not Path(source).is_dir():
        source = snapshot_download(source, allow_patterns=["*.json", "*.safetensors"])
    folder = Path(source)
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        files = [folder / name for name in _named_in(index)]
    if not files:
        raise ValueError(f"{folder} has no safetensors files")
    for file in files:
        if not file.exists():
            raise ValueError(f"{index} names {file.name}, which is missing")
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is truncated or no safetensors file: {error}") from None
    return files


def _named_in(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is truncated or has no weight_map in JSON") from None


def part_of(module: str) -> str:
    """The layer that contains a module, or the module itself."""
    layer = _LAYER.match(module)
    return layer[1] if layer else module


def _part_of_parameter(name: str) -> str:
    return part_of(name.rpartition(".")[0])


def _is_layer(part: str) -> bool:
    return part.rpartition(".")[2].isdigit()


def _without_weights(
    config: Any, device: str | torch.device, model_class: type[PreTrainedModel] | None, trusted: bool
) -> PreTrainedModel:
    """A model with buffers but no parameters."""
    with torch.device("meta"):
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        if model_class is None:
            model = class_for(config).from_config(config, dtype=dtype, trust_remote_code=trusted)
        else:
            model = model_class._from_config(config, dtype=dtype)
    for name, buffer in list(model.named_buffers()):
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = torch.empty_like(buffer, device=device)
    model.initialize_weights()  # the buffers: parameters have no memory
    return model.eval()


@contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' progress bar: there would be one for each part."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
