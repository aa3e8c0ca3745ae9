"""The quantizer "moe_mps" of transformers: loads quantised checkpoints, quantises dense ones while loading.

torch_moe_mps_autoload decides which checkpoints of plain `from_pretrained` come here.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from torch_moe_mps_autoload import GGUF_FAMILIES, NAME, PACKAGES, is_for_us, stored_in

from ...ops._checks import Check
from ...quantization import Format
from ..basics.report import QuantizationReport
from ..modules.linears import formats_in
from ..upstream.models import cached_file
from ..upstream.weights import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    HfQuantizer,
    build_glob_alternation,
    get_gguf_kernel,
    is_gguf_arch_supported,
)
from .absent import leave_out
from .gguf.file import read_checked
from .gguf.header import header_of, widths_in
from .gguf.reading import GgufLayout
from .layouts.checking import check_scales
from .layouts.dense import DenseLayout
from .layouts.layout import Layout, Section
from .mlx.reading import MlxLayout
from .others.reading import OthersLayout
from .others.schemes import METHODS
from .own.config import FROM_GGUF, QuantizationConfig, is_mlx, is_ours
from .own.reading import OwnLayout
from .quantize.decision import drop_packed, weights_of
from .quantize.importance import Importance
from .quantize.in_place import (
    finish_loading,
    quantize_targets,
    refuse_dequantizing,
    refuse_second_method,
)
from .quantize.sizes import bytes_a_token
from .quantize.streaming import QuantizeParameters, one_by_one, threads_crash
from .quantize.target import Target, present
from .quantize.tied import tie_quantized
from .quantize.weights import empty_weight, replace, store_empty

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .source import Source

_LOCK = threading.RLock()  # while transformers' mapping has our reader of GGUF files
# {method: why a checkpoint of it is read by this package, where transformers has code for it}
_WHY = {
    "fp8": "transformers would turn it into 16 bits here",
    "mxfp4": "transformers would turn it into 16 bits here",
    **{method: f"transformers would need {package}" for method, package in PACKAGES.items()},
}


def get_hf_quantizer(
    own: Callable[..., Any], config: Any, asked: Any, *args: Any, gguf_file: Any = None, **kwargs: Any
) -> Any:
    """Result of transformers' function `own`, which meets a checkpoint of ours as one of our method."""
    kwargs["gguf_file"] = gguf_file
    stored = stored_in(config)
    if gguf_file is not None:
        if is_for_us(None, None, gguf_file):
            asked = _for_gguf(config, asked, gguf_file)
        with _reading_gguf() if isinstance(asked, QuantizationConfig) else contextlib.nullcontext():
            return own(config, asked, *args, **kwargs)
    if isinstance(stored, dict) and (read := _read_by_us(stored, asked)) is not None:
        stored.clear()  # in place: transformers keeps the dict
        stored.update(read)
        if "wanted" in read:
            asked = None  # transformers would refuse a second config
    return own(config, asked, *args, **kwargs)


def _read_by_us(stored: dict[str, Any], asked: Any) -> dict[str, Any] | None:
    """The arguments of QuantizationConfig for a quantised checkpoint; None leaves it to transformers."""
    method = stored.get("quant_method", "")
    if method in METHODS and isinstance(asked, QuantizationConfig):
        return _as_ours(stored) | {"wanted": asked.arguments(), "importance": asked.importance}
    if not is_for_us(stored, None if is_ours(asked) else asked):
        return None
    if (why := _WHY.get(method)) is not None:
        print(f"torch_moe_mps: the {method} checkpoint stays packed: {why}", file=sys.stderr)
    return _as_ours(stored)


def _for_gguf(config: Any, asked: Any, gguf_file: str) -> Any:
    """The quantization_config for a GGUF file on a Mac: ours, for what transformers does not keep packed."""
    if config._name_or_path:
        commit = getattr(config, "_commit_hash", None)
        path = cached_file(config._name_or_path, gguf_file, _commit_hash=commit)
        config.update(widths_in(header_of(path)))
        architecture = read_checked(path)[0]["general.architecture"]
        knows = architecture not in GGUF_FAMILIES and is_gguf_arch_supported(architecture)
        if knows and get_gguf_kernel() is not False:
            return asked
    leaves = isinstance(asked, QuantizationConfig) or getattr(asked, "dequantize", False)
    return asked if leaves else QuantizationConfig(gguf=True)


@contextlib.contextmanager
def _reading_gguf() -> Iterator[None]:
    """Inside the block, transformers takes our quantizer for GGUF files."""
    method = FROM_GGUF["quant_method"]
    with _LOCK:
        before = AUTO_QUANTIZER_MAPPING[method]
        AUTO_QUANTIZER_MAPPING[method] = Quantizer
        try:
            yield
        finally:
            AUTO_QUANTIZER_MAPPING[method] = before


def _as_ours(stored: dict[str, Any]) -> dict[str, Any]:
    """The arguments of QuantizationConfig for the quantisation in a config, with our method."""
    if is_mlx(stored):
        return {"quant_method": NAME, "mlx": dict(stored)}
    if is_ours(stored) or stored["quant_method"] == NAME:
        return {**stored, "quant_method": NAME}
    if stored["quant_method"] == "mxfp4":
        return {"quant_method": NAME, **Format(mode="mxfp4").to_dict()}
    return {"quant_method": NAME, "other": dict(stored)}


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
        self.pre_quantized |= quantization_config.gguf
        self.layout = Layout()
        self.wanted: dict[str, Target] = {}

    @property
    def streams(self) -> bool:
        """True if weights are quantised while the checkpoint is read."""
        config = self.quantization_config
        return not self.pre_quantized or config.source is not None or config.wanted is not None

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """Device map for loading: a model for MPS alone is quantised on the CPU, where files are mapped."""
        _check_no_offloading(device_map)
        if self.quantization_config.gguf and device_map is None and torch.backends.mps.is_available():
            return {"": torch.device("mps")}  # the default of transformers for GGUF
        whole = device_map.get("") if isinstance(device_map, dict) and len(device_map) == 1 else None
        if self.streams and isinstance(whole, str | torch.device) and torch.device(whole).type == "mps":
            self.device = torch.device(whole)
            return {"": torch.device("cpu")}
        return device_map

    def read_header(self, gguf_file: str) -> None:
        """transformers asks quantizers of GGUF files; their tensors are read with the weights."""

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The requested dtype, or transformers' default for None, as of a GGUF file."""
        return torch.get_default_dtype() if dtype is None else dtype

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Any]:
        """State of a GGUF file, whose names become the model's."""
        return self.layout.state(checkpoint_file)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Floating-point tensors are never cast to codes; `check_loaded` reports a wrong dtype."""
        if dtype is not None and not dtype.is_floating_point:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        _keep_float32(model)
        config = self.quantization_config
        if not self.pre_quantized or config.source is not None:
            self.layout = DenseLayout(model, config.source == FROM_GGUF)
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
        wanted = self.layout.wanted if isinstance(self.layout, DenseLayout) else {}
        return not self.pre_quantized and param_name in wanted

    def get_quantize_ops(self) -> QuantizeParameters:
        assert isinstance(self.layout, DenseLayout)
        return self.layout.operation

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
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
            model._weight_conversions = None  # saved under the names of transformers
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
        return self.layout.conversions(weight_conversions)

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
    """Puts our quantizer into transformers' mappings, under our own name."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = QuantizationConfig
    AUTO_QUANTIZER_MAPPING[NAME] = Quantizer


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
    if config.gguf:
        return GgufLayout(model, files[0])
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
