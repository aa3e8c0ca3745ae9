"""Loading, quantising and converting the MTP layers of a checkpoint.

Each is an instance of the model's layer class and quantised like its last layer.
"""

import copy
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from ..models.basics.interface import experts_of
from ..models.basics.state import state_in, state_of
from ..models.modules.linears import formats_in
from ..models.upstream.weights import WeightRenaming, seen_with
from ..ops._checks import Check
from ..quantization import Format
from .layouts.files import checkpoint_files, tensors_in
from .layouts.layout import Section
from .own.config import is_ours
from .quantize.decision import weights_of
from .quantize.recipe import Recipe, requested_recipe
from .quantize.sizes import quantized_sizes, total_bytes
from .quantize.target import Target
from .quantizer import Quantizer, quantizer_of
from .source import Source
from .third_party.schemes import METHODS
from .write.parts import read_tensors

# Models whose configs do not say how many of these layers there are: they are counted in a checkpoint. Their
# attention is full.
_UNCOUNTED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OF_QWEN, _NUMBERED = re.compile(r"^mtp\."), re.compile(r"^mtp\.layers\.(\d+)\.")
_CHECK = Check("load")
_FP8, _BITS_OF_FP8 = "fp8", 8
MTP = "mtp"  # the entry of a checkpoint's quantisation with the formats of these layers


class _Section:
    """The MTP section of a checkpoint, loaded like any other model.

    Args:
        model: the main model, possibly without weights; its config has the number of MTP layers.
        source: the checkpoint.
        recipe: for dense weights, and FP8 weights that get fewer bits; other quantised weights are unchanged.

    Raises: ValueError for an unsupported quantisation, and tensors that do not fit.
    """

    def __init__(self, model: Any, source: str, recipe: Recipe):
        self._dtype, self._found = model.dtype, _found(source, model)
        self._layers, about, packed = _without_memory(model), _about(source, model), _packed_in(source)
        if packed:
            about.stored["modules"] = packed
        self._mapping = _of_converted(model) if packed else _of_makers(self._layers, model)
        wanted = _arguments(recipe, about.stored, self._layers)
        quantization = about.quantization(wanted)
        self._quantizer: Quantizer | None = None
        if quantization is not None:
            files, section = [*map(str, self._found.files)], Section(self._found.names, self._mapping)
            quantization["may_leave"] = True
            self._quantizer = quantizer_of(quantization, about, self._layers, files, section)
            self._mapping = self._quantizer.update_weight_conversions(self._mapping, self._layers)

    @property
    def is_dense(self) -> bool:
        return self._quantizer is None

    def read(self) -> Any:
        """transformers' module of the MTP layers, with weights, on the CPU."""
        with ExitStack() as stack:
            tensors: dict[str, Any] = {}
            for file, names in self._found.files.items():
                opened = stack.enter_context(safe_open(file, framework="pt"))
                tensors |= {name: opened.get_slice(name) for name in names}
            how = self._mapping, self._quantizer, self._dtype
            missing = read_tensors(self._layers, tensors, *how)
        if self._quantizer is not None:
            self._quantizer.place(self._layers)  # says what is missing, too
        elif missing:
            _CHECK.fail(f"{min(missing)} of the MTP layers", "in the checkpoint", "no such tensor")
        self._layers.requires_grad_(False)
        # Tensors that no checkpoint has are without elements: they stand for a dtype.
        self._layers._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
        return self._layers

    def nbytes(self) -> int:
        """Bytes of the MTP layers, computed without loading them."""
        if self._quantizer is not None:
            self._quantizer.place_empty(self._layers, lambda name: True)
        return sum(tensor.nbytes for tensor in self._layers.state_dict().values())


def _about(source: str, model: Any) -> Source:
    """The checkpoint's config, whose quantisation applies to the MTP layers, too.

    Raises: ValueError for an unsupported quantisation.
    """
    stored, config = PreTrainedConfig.get_config_dict(source)[0], PreTrainedConfig()
    config.quantization_config, config.quantization = (
        stored.get(name) for name in ("quantization_config", "quantization")
    )
    about = Source(source, {"config": config}, type(model))
    if is_ours(about.stored) and not about.stored.get(MTP):
        about.stored = {}  # they are dense
    method = about.stored.get("quant_method")
    if about.stored and not is_ours(about.stored) and method not in METHODS:
        expected = f"dense, or quantised by {', '.join(METHODS)} or this package"
        got = f"those of {'MLX' if 'mlx' in about.stored else method}"
        raise ValueError(f"moe_mps::speculative: MTP layers must be {expected} in {source}, got {got}")
    return about


def note_folder(model: Any, folder: str) -> None:
    """Stores the folder of a model's revision on it; transformers stores only the Hub name."""
    if folder != model.config.name_or_path and Path(folder).is_dir():
        state_of(model).folder = folder


def checkpoint_of(model: Any) -> str:
    """Folder of a model's checkpoint, or its Hub name if only transformers loaded it."""
    noted = state_in(model).folder
    name: str = model.config.name_or_path
    return name if noted is None or not Path(noted).is_dir() else noted


def _arguments(recipe: Recipe, stored: Mapping[str, Any], layers: Any) -> dict[str, Any] | None:
    """Recipe as arguments of `accelerate`; None without one, or if FP8 already has as few bits."""
    usual, is_fp8 = recipe.experts or recipe.linears, stored.get("quant_method") == _FP8
    if usual is None or is_ours(stored) or (is_fp8 and usual.bits >= _BITS_OF_FP8):
        return None
    linears = None if recipe.linears is None else recipe.linears.to_dict()
    dense = {} if recipe.experts or not experts_of(layers) else {"*.experts.*": None}
    return usual.to_dict() | {"linear_bits": linears, "overrides": dense}


def recipe_of_last_layer(model: Any) -> Recipe:
    """The formats of a model's last layer."""
    formats = _formats(model.get_decoder().layers[-1])
    return Recipe(formats.get("experts"), formats.get("linears"))


def _packed_in(source: str) -> dict[str, str]:
    """{name: format} of quantised MTP weights in a checkpoint of this package."""
    stored = PreTrainedConfig.get_config_dict(source)[0].get("quantization_config")
    found: dict[str, str] = stored.get(MTP, {}) if is_ours(stored) else {}
    return found


def _without_memory(model: Any) -> Any:
    """transformers' module of the MTP layers on the meta device, in the model's dtype."""
    from ..models.upstream import MtpModel

    with torch.device("meta"):
        result = MtpModel(model, model.config.get_text_config().num_mtp_layers).eval()
    result.embed_tokens = result.shared_head = result.rotary_emb = None
    for attribute in ("quantization_config", "quantization"):
        vars(result.config).pop(attribute, None)
    return result.to(model.dtype)


def _of_makers(layers: Any, model: Any) -> list[Any]:
    """transformers' conversions for the original names of MTP tensors."""
    mapping: list[Any] = layers.get_weight_conversions(seen_with(model, _weight_conversions=None))
    return mapping


def _of_converted(model: Any) -> list[Any]:
    """The conversions of tensors as `converted_mtp` names them."""
    layers = range(model.config.get_text_config().num_mtp_layers)
    return [WeightRenaming(f"^{re.escape(_prefix(model, n))}", f"layers.{n}.") for n in layers]


def _prefix(model: Any, layer: int) -> str:
    """Prefix of names of a quantised layer's tensors: transformers takes them for such a layer's."""
    from ..models.upstream import MtpModel

    names = MtpModel.get_mtp_weights_regex(model)
    number = model.config.get_text_config().num_hidden_layers + layer
    known = (f"model.layers.{number}.", f"mtp.layers.{layer}.", f"model.mtp.layers.{layer}.")
    return next(prefix for prefix in known if names.search(f"{prefix}mtp_block.x"))


def _formats(layer: Any) -> dict[str, Any]:
    """{kind of weights: the format that most of them have}"""
    experts = [*experts_of(layer).values()]
    kinds: dict[str, Counter[Any]] = {"experts": Counter(), "linears": Counter()}
    for module in layer.modules():
        kinds["experts" if module in experts else "linears"].update(formats_in(module).values())
    return {kind: result.most_common(1)[0][0] for kind, result in kinds.items() if result}


def mtp_tensors(source: str, model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these layers by their names in a checkpoint.

    There are none in a GGUF file, and of a model for which transformers knows no names of them.
    """
    for file, names in _found(source, model).files.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                yield name, tensors.get_tensor(name)


def converted_mtp(source: str, model: Any, packed: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these layers for a checkpoint of a model that is quantised.

    Args:
        packed: takes what `_packed_in` gives of that checkpoint. Layers that a source has quantised stay so.
    """
    model, before = _counted(model, source), _packed_in(source)
    section = _Section(model, source, recipe_of_last_layer(model))
    if before or section.is_dense:
        packed.update(before)
        yield from mtp_tensors(source, model)
        return
    layers = section.read()
    for name, module in layers.named_modules():
        for parameter, format in formats_in(module).items():
            packed[name if parameter == "weight" else f"{name}.{parameter}"] = str(format)
    for name, tensor in layers.layers.state_dict().items():
        layer, _, rest = name.partition(".")
        yield f"{_prefix(model, int(layer))}{rest}", tensor


def planned_mtp(source: str, model: Any) -> tuple[int, int]:
    """Bytes of these layers in a checkpoint, and in its conversion by `converted_mtp`.

    Args:
        model: without weights, as it will be quantised.
    """
    before = sum(_found(source, model).sizes.values())
    section = _Section(_counted(model, source), source, recipe_of_last_layer(model))
    return before, before if _packed_in(source) or section.is_dense else section.nbytes()


def read_mtp(model: Any) -> Any:
    """transformers' module of these layers of a loaded model, on the CPU, quantised as its last layer."""
    source = checkpoint_of(model)
    return _Section(_counted(model, source), source, recipe_of_last_layer(model)).read()


def left_out_mtp(source: str, model: Any) -> str | None:
    """Why a conversion has none of these layers of a checkpoint that has some; None where it has."""
    try:
        _about(source, model)
    except ValueError as error:
        return str(error)
    return None


def empty_mtp(model: Any, source: str) -> Any:
    """transformers' module of these layers without memory; None where a checkpoint has none.

    Where its weights are not here, its config says how many there are.
    """
    from ..models.upstream import MtpModel

    config = model.config.get_text_config()
    is_here = Path(source).is_file() or any(Path(source).glob("*.safetensors"))
    if is_here and not _found(source, model).sizes:
        return None
    if not is_here:
        try:
            MtpModel.get_mtp_weights_regex(model)
        except (TypeError, ValueError):  # transformers knows no names of them
            return None
        is_of_mlx = "quantization" in PreTrainedConfig.get_config_dict(source)[0]
        if is_of_mlx or not getattr(config, "num_mtp_layers", 0) or not _has_sizes(config):
            return None
    return _without_memory(_counted(model, source) if is_here else model)


def last_layer(model: Any, targets: Iterable[Target]) -> Recipe:
    """The formats that the last layer of a model has with these targets."""
    last = f".layers.{model.config.get_text_config().num_hidden_layers - 1}."
    kinds: dict[bool, Counter[Format]] = {True: Counter(), False: Counter()}
    for target in targets:
        if last in f"{target.name}.":
            kinds[target.kind == "experts"].update(target.formats.values())
    experts, linears = (next((f for f, _ in kinds[kind].most_common(1)), None) for kind in (True, False))
    return Recipe(experts, linears)


def bytes_of_mtp(layers: Any, model: Any, targets: Iterable[Target]) -> int:
    """Bytes of these layers beside a model with these targets."""
    asked = _arguments(last_layer(model, targets), {}, layers)
    exact = None if asked is None else requested_recipe(**asked)
    targets = weights_of(layers, exact or Recipe(None)).targets.values()
    return total_bytes(layers.layers, quantized_sizes(targets))


def has_mtp(model: Any, source: str | None = None) -> bool:
    """True if a checkpoint has such layers, by default the model's, and transformers knows their names."""
    return bool(_found(checkpoint_of(model) if source is None else source, model).sizes)


def require_mtp(model: Any) -> None:
    """Raises: ValueError for a model whose checkpoint has no such layers."""
    if not has_mtp(model):
        expected = "a model whose checkpoint has MTP layers"
        got = f"a {model.config.model_type} without them"
        raise ValueError(f"moe_mps::speculative: mtp must be for {expected}, got {got}")


class _Found(NamedTuple):
    """The tensors of these layers in a checkpoint.

    Attributes:
        names: what their names look like.
        files: {a file of the checkpoint: {name of a tensor of theirs in it: its bytes}}
    """

    names: re.Pattern[str] = re.compile("$.")
    files: Mapping[Path, Mapping[str, int]] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """{name of a tensor: its bytes}"""
        return {name: size for names in self.files.values() for name, size in names.items()}


def _found(source: str, model: Any) -> _Found:
    """The tensors that a checkpoint has of the MTP layers for a model."""
    from ..models.upstream import MtpModel

    config = model.config.get_text_config()
    known = getattr(config, "num_mtp_layers", 0) or config.model_type in _UNCOUNTED
    known = known and model._keys_to_ignore_on_load_unexpected and _has_sizes(config)
    if not known or not source or Path(source).is_file():
        return _Found()
    try:
        names = MtpModel.get_mtp_weights_regex(model)
    except ValueError:  # the known ones are of larger models
        return _Found()
    if config.model_type in _UNCOUNTED:  # their models of text ignore images, too
        names = _OF_QWEN
    times = {file.name: file.stat().st_mtime_ns for file in sorted(Path(source).glob("*.safetensors*"))}
    return _read_headers(source, names, tuple(times.items()))


def _has_sizes(config: Any) -> bool:
    """False for a model whose layers differ in sizes, where its config has none of these layers' own."""
    return not config.is_heterogeneous or getattr(config, "mtp_per_layer_config", None) is not None


@functools.lru_cache(maxsize=8)
def _read_headers(source: str, names: re.Pattern[str], times: tuple[tuple[str, int], ...]) -> _Found:
    """Result of `_found`, read once as long as files are of these times."""
    files: dict[Path, dict[str, int]] = {file: {} for file in checkpoint_files(source)}
    for file, name, dtype, shape in tensors_in(map(str, files)):
        if names.search(name):
            files[Path(file)][name] = prod(shape) * _bits_of(dtype) // 8
    return _Found(names, files)


def _bits_of(dtype: str) -> int:
    """Bits of an element, by what safetensors calls its dtype."""
    number = re.search(r"\d+", dtype)
    return 8 if number is None else int(number[0])


def _counted(model: Any, source: str) -> Any:
    """The model as transformers' code of these layers takes it: its config says how many there are."""
    if model.config.get_text_config().model_type not in _UNCOUNTED:
        return model
    names = _found(source, model).sizes
    numbers = {int(found[1]) for name in names if (found := _NUMBERED.match(name))}
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = len(numbers), ["full_attention"] * len(numbers)
    return seen_with(model, config=config)


def config_of_mtp(model: Any) -> Any:
    """The config of the layers of a model that draft."""
    return _counted(model, checkpoint_of(model)).config.get_mtp_config()
