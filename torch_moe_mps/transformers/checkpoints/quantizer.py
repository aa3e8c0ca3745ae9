"""The quantizer "moe_mps" of transformers: loads quantised checkpoints, quantises dense ones while loading.

`register` puts it into transformers' mappings, once these are imported.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...ops._checks import Check
from ..basics.report import QuantizationReport
from ..modules.experts import NAME
from ..upstream.weights import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
    GgufConfig,
    HfQuantizer,
    build_glob_alternation,
    register_quantization_config,
    register_quantizer,
)
from .absent import leave_out
from .gguf.quantizer import GgufQuantizer
from .gguf.reading import Dense, dense_state
from .layouts.dense import DenseLayout
from .layouts.layout import Layout, Section
from .layouts.lifecycle import Lifecycle
from .mlx.reading import MlxLayout
from .others.reading import OthersLayout
from .own.config import FROM_GGUF, QuantizationConfig, is_mlx, is_ours
from .own.reading import OwnLayout
from .quantize.decision import note_exceptions, weights_of
from .quantize.importance import Importance
from .quantize.in_place import refuse_second_method
from .quantize.sizes import bytes_a_token
from .quantize.streaming import QuantizeParameters, Stream
from .quantize.target import Target, present
from .quantize.wanted import Wanted
from .quantize.weights import empty_weight, replace

if TYPE_CHECKING:  # transformers is not complete yet when its quantizers import ours
    from transformers import PreTrainedModel

    from .source import Source

# {method: the package that transformers reads it with}; of other methods it has code of its own.
_PACKAGES = {"awq": "gptqmodel", "compressed-tensors": "compressed_tensors", "gptq": "gptqmodel"}


def _recognise(cls: Any, name: str) -> None:
    """MLX's quantisation and ours name no method, which transformers takes for an error."""
    own = getattr(cls, name)

    def recognised(quantization_config_dict: Any) -> Any:
        return own(_with_method(quantization_config_dict))

    setattr(cls, name, staticmethod(recognised))


def _with_method(stored: Any) -> Any:
    """Adds the method, in place: transformers keeps the dict."""
    if not isinstance(stored, dict):
        return stored
    if is_mlx(stored) or _is_for_us(stored):
        read: dict[str, Any] = {"mlx" if is_mlx(stored) else "other": dict(stored)}
        stored.clear()
        stored.update(quant_method=NAME, **read)
    elif is_ours(stored):
        stored.update(quant_method=NAME)
    return stored


def _is_for_us(stored: dict[str, Any]) -> bool:
    """Whether transformers cannot read the checkpoint of another library here, or only for other GPUs."""
    method = stored.get("quant_method")
    if method not in _PACKAGES:
        return method == "modelopt"  # transformers would take it for a dense checkpoint
    return torch.backends.mps.is_available() or find_spec(_PACKAGES[method]) is None


class Quantizer(Lifecycle, HfQuantizer):
    """Loads quantised weights, or quantises the weights of a dense checkpoint one by one, and accelerates.

    Attributes:
        wanted: the weights still to quantise.
        device: where the model is moved once it is quantised; None if it is there.
        section: of the files that the model is; None is all of them.
    """

    quantization_config: QuantizationConfig
    device: torch.device | None = None
    section: Section | None = None

    def __init__(self, quantization_config: QuantizationConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.layout, self.wanted = Layout(), Wanted()

    @property
    def streams(self) -> bool:
        """Whether the checkpoint is dense, or can be dequantised while it is read."""
        return not self.pre_quantized or self.quantization_config.source is not None

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """A model that is wholly for MPS is quantised on the CPU, where files are mapped instead of read."""
        _check_no_offloading(device_map)
        whole = device_map.get("") if isinstance(device_map, dict) and len(device_map) == 1 else None
        if self.streams and isinstance(whole, str | torch.device) and torch.device(whole).type == "mps":
            self.device = torch.device(whole)
            return {"": torch.device("cpu")}
        return device_map

    def read_header(self, gguf_file: str) -> None:
        """transformers asks quantizers of GGUF files; their tensors are read with the weights."""

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """None for a GGUF file's, which then is transformers' default."""
        return torch.get_default_dtype() if dtype is None else dtype

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Dense]:
        """State of a GGUF file, whose names become the model's."""
        return dense_state(checkpoint_file, model, self._stream().wanted)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Floating-point tensors are never cast to codes; `check_loaded` reports a wrong dtype."""
        if dtype is not None and not dtype.is_floating_point:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        _keep_float32(model)
        config = self.quantization_config
        if self.streams:
            self.layout = DenseLayout(model, config.source)
        else:
            # Its patterns ("scale") fit our names ("scales").
            vars(model)["_get_dtype_plan"] = lambda dtype: {}
            self.layout = layout_of(config, model, kwargs["checkpoint_files"], self.section)
        leave_out(model, self.layout.absent)
        report = QuantizationReport()
        if self.streams or config.wanted is not None:  # a report of the checkpoint's weights is wanted
            weights = weights_of(model, recipe := config.recipe())
            dense, report.skipped, report.sizes, report.notes = weights
            note_exceptions(model, recipe)
            self.wanted, self.report = Wanted(dense), report
            if config.importance is not None:
                report.importance = config.importance.give(model, dense)
        elif config.measured:
            self.report = QuantizationReport(measured=config.measured)
        self.wanted.compare(self.layout.targets, self.report, config.requantize)
        self.make_room(model)
        self._start(model)

    def _start(self, model: nn.Module) -> None:
        self.report = self.layout.start(self.wanted.dense, self.report)
        if self.report is not None:
            self.report.bytes_before = bytes_a_token(model)

    def forget_absent(self, model: nn.Module) -> None:
        """The model was cut: weights that it no longer has are neither read nor quantised."""
        self.wanted.dense = present(model, self.wanted.dense)
        self.layout.forget_absent(model)
        if self.streams:
            self._start(model)

    def _stream(self) -> Stream:
        assert self.layout.stream is not None
        return self.layout.stream

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        stream = self.layout.stream
        return not self.pre_quantized and stream is not None and param_name in stream.wanted

    def get_quantize_ops(self) -> QuantizeParameters:
        return QuantizeParameters(self._stream())

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
        vars(model).pop("_get_dtype_plan", None)
        _check_no_offloading(getattr(model, "hf_device_map", None))
        self.place(model)
        if self.report is not None and self.device is not None:
            model.to(self.device)
        self.close(model)

    def place(self, model: Any, loaded: Callable[[str], bool] = lambda name: True) -> dict[str, Target]:
        stored = super().place(model, loaded)
        self.wanted.quantize(model, stored, loaded, self.report)
        return stored

    def place_empty(self, model: nn.Module, done: Callable[[str], bool]) -> None:
        for name in filter(done, [*self.layout.targets, *self.wanted.dense]):
            target = self.wanted.take(name, self.layout.targets)
            replace(model, target, {name: empty_weight(target, name) for name in target.formats})

    def update_weight_conversions(self, weight_conversions: list, model: nn.Module) -> list:
        return self.layout.conversions(weight_conversions)

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        """Raises: ValueError where transformers would split quantised weights over processes."""
        if getattr(model.config, "distributed_config", None) is not None:
            Check("from_pretrained").fail("tp_size and ep_size", "1 for quantised weights", "more")

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on its layers can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _of_gguf(config: Any, **kwargs: Any) -> HfQuantizer:
    """Quantizer that reads a GGUF file: packed, or quantised again as the config asks."""
    return (Quantizer if isinstance(config, QuantizationConfig) else GgufQuantizer)(config, **kwargs)


def register() -> None:
    """Puts our quantizers into transformers' mappings, and what recognises a config in front of its own."""
    register_quantization_config(NAME)(QuantizationConfig)
    register_quantizer(NAME)(Quantizer)
    AUTO_QUANTIZER_MAPPING[FROM_GGUF["quant_method"]] = _of_gguf
    _recognise(AutoHfQuantizer, "supports_quant_method")
    _recognise(AutoQuantizationConfig, "from_dict")


def _check_no_offloading(device_map: Any) -> None:
    """Raises: ValueError where weights would wait elsewhere: they look as if the checkpoint lacked them."""
    devices = {*map(str, device_map.values())} if isinstance(device_map, dict) else set()
    if len(devices) > 1 and devices & {"cpu", "disk"}:
        got = " and ".join(sorted(devices))
        Check("from_pretrained").fail("device_map", "one that offloads no quantised weights", got)


def _keep_float32(model: Any) -> None:
    """Casts, on the meta device, what transformers keeps in float32: quantised layers take its dtype."""
    plan = model._get_dtype_plan(model.dtype)
    names, _, _ = build_glob_alternation([*plan])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()] if plan else ():
        if names.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def layout_of(
    config: QuantizationConfig, model: Any, files: list[str], section: Section | None = None
) -> Layout:
    """Layout of a quantised checkpoint, by its config.

    Raises: ValueError for tensors, or names in the config, that do not fit the model.
    """
    if config.mlx is not None:
        return MlxLayout(model, files, config.mlx)
    if config.other is not None:
        return OthersLayout(model, files, config.other, section)
    return OwnLayout(model, files, config)


def quantizer_for(
    source: "Source",
    model: nn.Module,
    files: list[str],
    recipe: Mapping[str, Any] | None,
    requantize: bool,
    importance: Importance | None = None,
) -> Lifecycle | None:
    """Quantizer that a checkpoint, dense or quantised, needs; None for none: FP8 without a recipe is dense.

    `model` is on the meta device.

    Raises: ValueError for a checkpoint with a quantisation that holds no other.
    """
    quantization = source.quantization(recipe, requantize, importance)
    if recipe is None and source.stored.get("quant_method") == "fp8":
        return None
    if source.gguf is not None and quantization is None:
        reader = GgufQuantizer(GgufConfig())
        reader.preprocess_model(model, dtype=model.dtype, checkpoint_files=files)
        return reader
    if quantization is None:
        if source.stored and recipe is not None:
            refuse_second_method("quantize", source.stored["quant_method"])
        return None
    return quantizer_of(quantization, source, model, files)


def quantizer_of(
    quantization: Mapping[str, Any],
    source: "Source",
    model: Any,
    files: list[str],
    section: Section | None = None,
) -> Quantizer:
    """Quantizer of a model on the meta device, which may be a section of a checkpoint's files.

    Args:
        quantization: arguments of QuantizationConfig.
    """
    quantizer = Quantizer(QuantizationConfig(**quantization), pre_quantized=bool(source.stored))
    quantizer.section = section
    quantizer.preprocess_model(model, dtype=model.dtype, checkpoint_files=files)
    return quantizer
