"""The quantizer "moe_mps" of transformers: loads quantised checkpoints, quantises dense ones while loading.

`torch_moe_mps.from_pretrained` puts the quantisation that it finds into the config of a model.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ..models.basics.report import QuantizationReport
from ..models.modules.experts import NAME
from ..models.modules.linears import formats_in
from ..models.upstream.weights import (
    AUTO_QUANTIZER_MAPPING,
    HfQuantizer,
    build_glob_alternation,
    register_quantization_config,
    register_quantizer,
)
from ..ops._checks import Check
from .absent import leave_out
from .gguf.reading import DequantizedGguf, GgufLayout
from .in_place import finish_loading, quantize_targets, refuse_dequantizing, refuse_second_method
from .layouts.checking import check_scales
from .layouts.converters import QuantizeParameters
from .layouts.layout import Layout, Section
from .layouts.streaming import StreamingLayout
from .mlx.reading import MlxLayout
from .own.config import QuantizationConfig
from .own.reading import OwnLayout
from .quantize.decision import drop_packed, weights_of
from .quantize.importance import Importance
from .quantize.sizes import bytes_a_token
from .quantize.target import Target, present
from .quantize.tied import tie_quantized
from .quantize.weights import empty_weight, replace, store_empty
from .stacks import conversions_to_save, of_stacks, settle_stacks
from .third_party.reading import ThirdPartyLayout
from .threads import one_by_one, threads_crash

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .source import Source


class Quantizer(HfQuantizer):
    """Loads quantised weights, or quantises the weights of a dense checkpoint one by one, and accelerates.

    Attributes:
        layout: the part of the checkpoint still to read.
        report: the weights quantised or packed while loading; None for none.
        wanted: {name: target} of the checkpoint's dense weights that are still to quantise.
        device: where the model is moved once it is quantised; None if it is there.
        section: of the files that the model is; None is all of them.
    """

    quantization_config: QuantizationConfig
    layout: Layout
    report: QuantizationReport | None = None
    device: torch.device | None = None
    section: Section | None = None

    def __init__(self, quantization_config: QuantizationConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized |= quantization_config.gguf is not None
        self.layout = Layout()
        self.wanted: dict[str, Target] = {}

    @property
    def streams(self) -> bool:
        """True if weights are quantised while the checkpoint is read."""
        config = self.quantization_config
        return not self.pre_quantized or config.dequantized_gguf is not None or config.wanted is not None

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """Device map for loading: a model for MPS alone is quantised on the CPU, where files are mapped."""
        _check_no_offloading(device_map)
        if (
            self.quantization_config.gguf is not None
            and device_map is None
            and torch.backends.mps.is_available()
        ):
            return {"": torch.device("mps")}  # the default of transformers for GGUF
        whole = device_map.get("") if isinstance(device_map, dict) and len(device_map) == 1 else None
        if self.streams and isinstance(whole, str | torch.device) and torch.device(whole).type == "mps":
            self.device = torch.device(whole)
            return {"": torch.device("cpu")}
        return device_map

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The requested dtype, or transformers' default for None, as of a GGUF file."""
        return torch.get_default_dtype() if dtype is None else dtype

    def state(self) -> dict[str, Any]:
        """State of a GGUF file, whose names become the model's."""
        return self.layout.state()

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Floating-point tensors are never cast to codes; `check_loaded` reports a wrong dtype."""
        if dtype is not None and not dtype.is_floating_point:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        """Chooses the layout of the checkpoint and the modules to quantise, before any weight is read."""
        _keep_float32(model)
        settle_stacks(model)
        config = self.quantization_config
        if not self.pre_quantized:
            file = config.dequantized_gguf
            self.layout = StreamingLayout(model) if file is None else DequantizedGguf(model, file)
        else:
            # Its patterns ("scale") fit our names ("scales").
            vars(model)["_get_dtype_plan"] = lambda dtype: {}
            self.layout = layout_of(config, model, kwargs["checkpoint_files"], self.section)
        leave_out(model, self.layout.absent)
        report = QuantizationReport()
        if self.streams:
            weights = weights_of(model, config.recipe())
            self.wanted, report.skipped, report.sizes, report.notes = weights
            self.report = report
            self.layout.drop_float8(self.wanted)
            drop_packed(self.wanted, self.layout.targets, report, config.may_leave)
            if config.importance is not None:
                report.importance = config.importance.assign(model, self.wanted)
        for target in self.layout.targets.values():
            store_empty(target)
        tie_quantized(model)
        self._reading = one_by_one(threads_crash())  # ends with this object where loading fails
        self._reading.__enter__()
        self._start(model)

    def _start(self, model: nn.Module) -> None:
        self.report = self.layout.start(self.wanted, self.report)
        if self.report is not None:
            self.report.bytes_before = self.layout.dense_bytes or bytes_a_token(model)

    def forget_absent(self, model: nn.Module) -> None:
        """Drops weights that the model no longer has."""
        self.wanted = present(model, self.wanted)
        self.layout.forget_absent(model)
        if self.streams:
            self._start(model)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """True for a dense weight that is quantised once it is read."""
        wanted = self.layout.wanted if isinstance(self.layout, StreamingLayout) else {}
        return not self.pre_quantized and param_name in wanted

    def get_quantize_ops(self) -> QuantizeParameters:
        assert isinstance(self.layout, StreamingLayout)
        return self.layout.operation

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
        """Installs the quantised weights and moves the model to its device."""
        vars(model).pop("_get_dtype_plan", None)
        _check_no_offloading(getattr(model, "hf_device_map", None))
        self.place(model)
        self.layout.warn()
        if self.report is not None and self.device is not None:
            model.to(self.device)
        self.close(model)

    def place(self, model: Any, loaded: Callable[[str], bool] = lambda name: True) -> None:
        """Installs the quantised weights of the `loaded` modules.

        Raises: ValueError for a weight that cannot be quantised, is missing, of a wrong dtype or not finite.
        """
        self.layout.finish(loaded)
        stored = self.layout.install(model, loaded)
        self.layout.check(model, loaded)
        check_scales(model, stored.__contains__)
        if self.layout.has_other_names:
            model._weight_conversions = conversions_to_save(model)
        dense = {name: self.wanted.pop(name) for name in filter(loaded, [*self.wanted])}
        if self.report is not None:
            left = {name: target for name, target in dense.items() if not formats_in(target.module)}
            quantize_targets(model, left, self.report, progress=False)

    def close(self, model: Any) -> None:
        """Ends loading, once the model has all its weights."""
        self._reading.__exit__(None, None, None)
        del self._reading
        if self.report is not None:
            model.hf_quantizer = self
        self.layout = Layout()
        finish_loading(model)

    def _dequantize(self, model: Any, dtype: Any = None) -> NoReturn:
        refuse_dequantizing()

    def place_empty(self, model: nn.Module, done: Callable[[str], bool]) -> None:
        """Gives the `done` modules quantised weights on the meta device, in place of real ones."""
        for name in filter(done, [*self.layout.targets, *self.wanted]):
            target = self.layout.targets.pop(name, None) or self.wanted.pop(name)
            replace(model, target, {name: empty_weight(target, name) for name in target.formats})

    def update_weight_conversions(self, weight_conversions: list, model: nn.Module) -> list:
        return self.layout.conversions([*of_stacks(model), *weight_conversions])

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        """Raises: ValueError where transformers would split quantised weights over processes."""
        if getattr(model.config, "distributed_config", None) is not None:
            Check("from_pretrained").fail("tp_size and ep_size", "1 for quantised weights", "more")

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters on quantised layers can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def register() -> None:
    """Registers the quantizer and its config with transformers."""
    if NAME not in AUTO_QUANTIZER_MAPPING:  # this module was loaded again
        register_quantization_config(NAME)(QuantizationConfig)
        register_quantizer(NAME)(Quantizer)


def _check_no_offloading(device_map: Any) -> None:
    """Raises: ValueError where weights would wait elsewhere: they look as if the checkpoint lacked them."""
    devices = {*map(str, device_map.values())} if isinstance(device_map, dict) else set()
    if len(devices) > 1 and devices & {"cpu", "disk"}:
        got = " and ".join(sorted(devices))
        Check("from_pretrained").fail("device_map", "one that offloads no quantised weights", got)


def _keep_float32(model: Any) -> None:
    """Casts parameters that transformers keeps in float32, on the meta device."""
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
    if config.gguf is not None:
        return GgufLayout(model, config.gguf)
    if config.mlx is not None:
        return MlxLayout(model, files, config.mlx)
    if config.other is not None:
        return ThirdPartyLayout(model, files, config.other, section)
    return OwnLayout(model, files, config)


def quantizer_for(
    source: "Source",
    model: nn.Module,
    files: list[str],
    recipe: Mapping[str, Any] | None,
    importance: Importance | None = None,
) -> Quantizer | None:
    """Quantizer that a checkpoint, dense or quantised, needs; None for none.

    Args:
        model: on the meta device.

    Raises: ValueError for a checkpoint with a quantisation that holds no other.
    """
    quantization = source.quantization(recipe, importance)
    if quantization is None and source.stored:
        refuse_second_method(source.stored["quant_method"])
    return None if quantization is None else quantizer_of(quantization, source, model, files)


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
