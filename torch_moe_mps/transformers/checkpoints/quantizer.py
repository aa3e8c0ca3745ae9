"""The quantizer "moe_mps" of transformers: loads quantised checkpoints, quantises dense ones while loading.

`register` puts it into transformers' mappings, once these are imported.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter, build_glob_alternation
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import GgufConfig

from ...ops._checks import Check
from ...quantization import Format
from ..basics.report import QuantizationReport
from ..modules.experts import NAME
from ..modules.linears import formats_in
from .absent import leave_out
from .layouts.checking import check_files, check_loaded, check_scales
from .layouts.gguf.quantizer import Dense, GgufQuantizer, dense_state
from .layouts.mlx.reading import Reading
from .layouts.operations import packed_blocks
from .layouts.others.reading import Reading as OthersReading
from .layouts.own.config import FROM_GGUF, QuantizationConfig, is_mlx, is_ours
from .quantize.importance import Importance
from .quantize.in_place import finish_loading, quantize_targets, refuse_second_method
from .quantize.sizes import bytes_a_token, quantized_bytes
from .quantize.streaming import QuantizeParameters, Stream
from .quantize.targets import HasTargets, Target, present, tie_quantized, weights_of
from .quantize.weights import (
    empty_weight,
    replace,
    requantize,
    share,
    store_empty,
    take_stored,
)

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
        return method == "modelopt"  # which transformers would take for a dense checkpoint
    return torch.backends.mps.is_available() or find_spec(_PACKAGES[method]) is None


class Quantizer(HasTargets, HfQuantizer):
    """Loads quantised weights, or quantises the weights of a dense checkpoint one by one, and accelerates.

    Attributes:
        report: the QuantizationReport of what was quantised while loading; None if nothing was.
    """

    quantization_config: QuantizationConfig
    report: QuantizationReport | None = None
    _reading: Reading | OthersReading | None = None  # of a checkpoint in names that are not ours
    _device: torch.device | None = None  # where the model is moved once it is quantised

    def __init__(self, quantization_config: QuantizationConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self._targets = {}
        self._wanted: dict[str, Target] = {}  # what is dense, and is to be quantised
        # What is stored, and is to be quantised in fewer bits: formats, and the dtype of the scales.
        self._again: dict[str, tuple[dict[str, Format], torch.dtype]] = {}

    @property
    def streams(self) -> bool:
        """Whether the checkpoint is dense, or can be dequantised while it is read."""
        return not self.pre_quantized or self.quantization_config.source is not None

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """A model that is wholly for MPS is quantised on the CPU, where files are mapped instead of read."""
        _check_no_offloading(device_map)
        whole = device_map.get("") if isinstance(device_map, dict) and len(device_map) == 1 else None
        if self.streams and isinstance(whole, str | torch.device) and torch.device(whole).type == "mps":
            self._device = torch.device(whole)
            return {"": torch.device("cpu")}
        return device_map

    def read_header(self, gguf_file: str) -> None:
        """transformers asks quantizers of GGUF files; what is stored there is read with the weights."""

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """None is that of a GGUF file, which then is transformers' default."""
        return torch.get_default_dtype() if dtype is None else dtype

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Dense]:
        """Of a GGUF file, whose names become the model's."""
        return dense_state(checkpoint_file, model, self._stream.wanted)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Floating-point tensors are never cast to codes; `check_loaded` reports a wrong dtype."""
        if dtype is not None and not dtype.is_floating_point:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        _keep_float32(model)
        config = self.quantization_config
        if not self.streams:
            self._find_stored(model, kwargs["checkpoint_files"])
        report = QuantizationReport()
        if self.streams or config.wanted is not None:  # of what the checkpoint has
            self._wanted, report.skipped = weights_of(model, config.recipe())
            self.report = report
            if config.importance is not None:
                report.importance = config.importance.give(model, self._wanted)
        elif config.measured:
            self.report = QuantizationReport(measured=config.measured)
        if self.streams:
            report.bytes_before = bytes_a_token(model)
            self._stream = Stream(self._wanted, report)
            return
        self._keep_what_would_not_shrink()
        for target in self._targets.values():
            store_empty(target)
        tie_quantized(model)
        if isinstance(self._reading, OthersReading):  # which may not be able to keep every value
            self.report = self._reading.report = self.report or self._reading.report
        if self.report is not None:
            self.report.bytes_before = bytes_a_token(model)
        if self._reading is None:
            check_files(model, kwargs["checkpoint_files"])

    def _find_stored(self, model: Any, files: list[str]) -> None:
        """Finds what the checkpoint has quantised, and takes from the model what it has nothing of."""
        vars(model)["_get_dtype_plan"] = lambda dtype: {}  # its patterns ("scale") fit our names ("scales")
        if self.quantization_config.mlx is not None:
            self._reading = Reading(model, files, self.quantization_config.mlx)
        elif self.quantization_config.other is not None:
            self._reading = OthersReading(model, files, self.quantization_config.other)
        absent = self.quantization_config.absent if self._reading is None else self._reading.absent
        leave_out(model, absent)
        if self._reading is None:
            self._targets = self.quantization_config.targets(model)
        else:
            self._targets = self._reading.targets

    def _keep_what_would_not_shrink(self) -> None:
        """Of what is stored, leaves in `_wanted` only what is to be quantised again.

        Raises: ValueError if that is nothing although another format was asked for, and nothing is dense.
        """
        asked: set[Format] = set()
        for name in [name for name in self._targets if name in self._wanted]:
            target, wanted = self._targets[name], self._wanted.pop(name)
            weights = {p: getattr(wanted.module, p) for p in wanted.formats}
            smaller = {  # a larger format would not bring back what is lost
                p: format
                for p, format in wanted.formats.items()
                if quantized_bytes(weights[p], format) < quantized_bytes(weights[p], target.formats[p])
            }
            if smaller and self.quantization_config.requantize:
                wanted.formats = smaller
                wanted.check_columns(Check("quantize"))
                target.importance = wanted.importance
                self._again[name] = smaller, wanted.dtype
            elif self.report is not None:
                stored = " and ".join(dict.fromkeys(map(str, target.formats.values())))
                self.report.skipped[name] = f"already {stored}"
                if target.kind != "embeddings":  # which a recipe may give more than the rest
                    asked.update({*wanted.formats.values()} - {*target.formats.values()})
        if asked and self.quantization_config.requantize and not self._wanted and not self._again:
            formats = {str(f) for target in self._targets.values() for f in target.formats.values()}
            stored = " and ".join(sorted(formats))
            got = " and ".join(sorted(map(str, asked)))
            Check("quantize").fail("bits", f"fewer than in the checkpoint, which has {stored}", got)

    def forget_absent(self, model: nn.Module) -> None:
        """The model was cut: what it no longer has is neither read nor quantised."""
        self._wanted = present(model, self._wanted)
        if self.streams:
            self._stream = Stream(self._wanted, self._stream.report)
            self._stream.report.bytes_before = bytes_a_token(model)
            return
        self._targets = present(model, self._targets)
        if self._reading is not None:
            self._reading.forget_absent()

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return not self.pre_quantized and param_name in self._stream.wanted

    def get_quantize_ops(self) -> QuantizeParameters:
        return QuantizeParameters(self._stream)

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
        vars(model).pop("_get_dtype_plan", None)
        _check_no_offloading(getattr(model, "hf_device_map", None))
        self.place(model)
        if self.report is not None:
            if self._device is not None:
                model.to(self._device)
            model.hf_quantizer = self
        finish_loading(model)

    def place(self, model: "PreTrainedModel", loaded: Callable[[str], bool] = lambda name: True) -> None:
        """Gives the modules whose names are `loaded` their quantised weights.

        Raises: ValueError for a weight that cannot be quantised, is missing, or is of a wrong dtype.
        """
        if self.streams:
            self._stream.place(model, loaded)
        if self._reading is not None:
            self._reading.fill_dropped(loaded)
        stored = {name: self._targets.pop(name) for name in filter(loaded, list(self._targets))}
        for target in stored.values():
            take_stored(model, target)
        check_loaded(model, loaded)
        check_scales(model, stored.__contains__)
        self._quantize_again(stored)
        wanted = {name: self._wanted.pop(name) for name in filter(loaded, list(self._wanted))}
        dense = {name: target for name, target in wanted.items() if not formats_in(target.module)}
        if self.report is not None:
            quantize_targets("quantize", model, dense, self.report, progress=False)
        if self._reading is not None or self.quantization_config.source is not None:
            model._weight_conversions = None  # saved under the names of transformers

    def _quantize_again(self, stored: Mapping[str, Target]) -> None:
        """Quantises what is stored in too many bits, tied layers once."""
        again = [name for name in stored if name in self._again]
        words = {name: id(stored[name].module._buffers.get("packed", name)) for name in again}
        sources = {words[name]: name for name in reversed(again)}
        for name, source in [(name, sources[words[name]]) for name in again]:
            formats, dtype = self._again.pop(name)
            assert self.report is not None  # something was asked for
            if source == name:
                self.report.modules[name] = requantize(stored[name], formats, dtype)
            else:
                share(stored[source], stored[name])
                self.report.shared[name] = source

    def place_empty(self, model: nn.Module, done: Callable[[str], bool]) -> None:
        """Gives the modules whose names are `done` quantised weights without memory, and never real ones."""
        for name in filter(done, [*self._targets, *self._wanted]):
            target = self._targets.pop(name, None) or self._wanted.pop(name)
            target.formats |= self._again.pop(name, ({}, None))[0]
            replace(model, target, {name: empty_weight(target, name) for name in target.formats})

    def update_weight_conversions(self, weight_conversions: list, model: nn.Module) -> list:
        if self._reading is not None:
            others = [] if isinstance(self._reading, Reading) else weight_conversions
            return [*self._reading.rows(), *others]
        source = self.quantization_config.source
        if source is None:
            return [*weight_conversions, *self.get_weight_conversions()]
        if source == FROM_GGUF:
            return []
        # transformers has a place for our operation, but only in checkpoints that are not quantised.
        other = AutoHfQuantizer.from_config({**source, "dequantize": True}, pre_quantized=True)
        return self.get_quantize_ops().after(other.update_weight_conversions(weight_conversions, model))

    def get_weight_conversions(self) -> list:
        """Reads MXFP4 blocks, as gpt-oss has them, as packed weights."""
        if not self.pre_quantized or Format(mode="mxfp4") not in self.quantization_config.formats():
            return []
        return [
            WeightConverter(f"{name}_blocks", f"{name}_packed", [packed_blocks()])
            for name in ("gate_up_proj", "down_proj")
        ]

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        """Raises: ValueError where transformers would split quantised weights over processes."""
        if getattr(model.config, "distributed_config", None) is not None:
            Check("from_pretrained").fail("tp_size and ep_size", "1 for quantised weights", "more")

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _of_gguf(config: Any, **kwargs: Any) -> HfQuantizer:
    """What reads a GGUF file: packed, or quantised again as the config asks."""
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


def quantizer_for(
    source: "Source",
    model: nn.Module,
    files: list[str],
    recipe: Mapping[str, Any] | None,
    requantize: bool,
    importance: Importance | None = None,
) -> Quantizer | GgufQuantizer | None:
    """What quantises a checkpoint, or reads it as quantised; None for neither: FP8 without a recipe is dense.

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
    quantizer = Quantizer(QuantizationConfig(**quantization), pre_quantized=bool(source.stored))
    quantizer.preprocess_model(model, dtype=model.dtype, checkpoint_files=files)
    return quantizer
