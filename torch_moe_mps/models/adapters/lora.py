"""LoRA beside quantised weights: the layers that PEFT puts around linears and experts.

PEFT keeps the factors of a stack of E experts as two matrices, with which its files are written: A [r E, in],
row e r + i is row i of expert e, and B [out, r E], column i E + e is column i of expert e. In memory B lies
column after column, so that a token reads only its experts' columns; files have rows.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from peft import LoraConfig
from peft.tuners.lora import layer
from peft.utils import get_peft_model_state_dict, load_peft_weights
from torch import Tensor, nn

from ...ops._checks import ACTIVATION_DTYPES
from ...ops.families.lora import MAX_RANK
from ..basics.guards import is_observed
from ..basics.interface import get_experts, is_transposed
from ..basics.state import ExpertAdapter, state_of
from ..modules.linears import GroupedLinear, QuantizedLinear, has_quantized_weights

ops = torch.ops.moe_mps

_INITIAL = (True, False, "gaussian")  # others decompose the dense weight


@contextmanager
def quiet() -> Iterator[None]:
    """Without two warnings of PEFT: of names that transformers gives up, and of ranks of target_parameters.

    It heeds such ranks, but looks for their names among modules.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        ignored = "The following (rank|alpha)_pattern keys did not match any targeted module"
        warnings.filterwarnings("ignore", ignored, RuntimeWarning)
        yield


def refuse(what: str, expected: str, came: object) -> NoReturn:
    raise ValueError(f"moe_mps: {what} must be {expected}, got {came}")


def check_config(config: LoraConfig) -> None:
    """Refuses what PEFT computes of a dense weight.

    Raises: ValueError that names the option of LoraConfig.
    """
    if config.init_lora_weights not in _INITIAL:
        refuse(
            "init_lora_weights over a quantised weight", "True, False or 'gaussian'", config.init_lora_weights
        )
    if config.use_dora:
        refuse("use_dora over a quantised weight", "False", True)


def check_trained_whole(config: Any, model: Any) -> None:
    """Refuses copies of quantised modules, and tokens of a quantised embedding, that an adapter trains.

    Raises: ValueError that names the option of LoraConfig, and the module that must be loaded dense.
    """
    tokens = getattr(config, "trainable_token_indices", None)
    if tokens is not None and not isinstance(tokens, dict):
        embedding = model.get_input_embeddings()
        tokens = [name for name, module in model.named_modules() if module is embedding]
    asked = {
        "modules_to_save": getattr(config, "modules_to_save", None) or (),
        "trainable_token_indices": tokens or (),
    }
    for option, ends in asked.items():
        for name, module in model.named_modules():
            if name.endswith(tuple(ends)) and any(map(has_quantized_weights, module.modules())):
                expected = f"of dense modules (keep=[{name!r}] loads this one dense)"
                refuse(option, expected, f"{name}, which is quantised")


class QuantizedLoraLinear(layer.Linear):
    """PEFT's LoRA over a QuantizedLinear. PEFT looks for "Linear" in the name of the class."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any
    ) -> None:
        check_config(config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        active = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        if self.disable_adapters or not self._is_inference(x, active, kwargs):
            return super().forward(x, *args, **kwargs)
        out = self.base_layer(x, *args, **kwargs)
        for item in active:
            a, b = self.lora_A[item].weight, self.lora_B[item].weight
            out = ops.linear_lora(out, x, a, b, scaling=self.scaling[item])
        return out

    def _is_inference(self, x: Tensor, active: list[str], kwargs: dict[str, Any]) -> bool:
        """True if nothing but the sums of the active adapters is asked for, without gradients."""
        if self.training or torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return False
        if kwargs or self.merged or x.dtype not in ACTIVATION_DTYPES:
            return False
        return not any(
            item in self.lora_variant
            or self.lora_bias[item]
            or self.r[item] > MAX_RANK
            or is_observed(self.lora_A[item], self.lora_B[item])
            for item in active
        )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        _refuse_merging(self.get_base_layer())


class StackParameter:
    """The shape, dtype and device of a quantised stack, which PEFT asks the parameter in its place for."""

    requires_grad = False
    ndim = 3

    def __init__(self, experts: Any, projection: str):
        self.shape = torch.Size(get_experts(experts).dense_shape(experts, projection))
        self.device = getattr(experts, f"{projection}_packed").device
        self.dtype = _dtype_of(experts)


def _dtype_of(experts: nn.Module) -> torch.dtype:
    """The dtype of the dense weights, where quantised experts have a tensor in it; else float32."""
    tensors = (tensor for tensor in experts._parameters.values() if tensor is not None)
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _put_in_columns(factor: Any, *_: Any) -> None:
    factor.weight.data = factor.weight.data.t().contiguous().t()


def _say_in_rows(_: nn.Module, state: dict[str, Tensor], prefix: str, *__: Any) -> None:
    """Makes the tensor that is saved contiguous, as safetensors wants it."""
    state[f"{prefix}weight"] = state[f"{prefix}weight"].contiguous()


class ParamWrapper(layer.ParamWrapper):
    """PEFT's LoRA of a stack of experts over quantised experts: by its factors, never by their product.

    PEFT asks wrappers for the name of their class, which is its own.
    """

    def get_param(self) -> Any:
        return StackParameter(self.get_base_layer(), self.parameter_name)

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any
    ) -> None:
        check_config(config)
        if r > MAX_RANK:
            refuse("r over quantised experts", f"at most {MAX_RANK}", r)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        factor = self.lora_B[adapter_name]
        _put_in_columns(factor)
        factor.register_load_state_dict_post_hook(_put_in_columns)
        factor.register_state_dict_post_hook(_say_in_rows)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Output of the layer beneath, whose experts add the factors of the active adapters."""
        self._check_forward_args(x, *args, **kwargs)
        active = (
            []
            if self.disable_adapters
            else [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        )
        if not active:
            return self.base_layer(x, *args, **kwargs)
        state = state_of(self.get_base_layer())
        before = state.adapters
        state.adapters = before | {self.parameter_name: [*map(self._adapter, active)]}
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            state.adapters = before

    def _adapter(self, name: str) -> ExpertAdapter:
        """The factors of an adapter: the first takes the input.

        PEFT takes stacks [E, input, output] for [E, output, input] where their module has no `is_transposed`:
        its A then gives the output.
        """
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        experts: int = self.num_experts
        base = self.get_base_layer()
        if is_transposed(base) and not getattr(base, "is_transposed", False):
            rows = b.t().unflatten(0, (-1, experts)).transpose(0, 1).flatten(0, 1)
            a, b = rows, a.unflatten(0, (experts, -1)).transpose(0, 1).flatten(0, 1).t()
        return ExpertAdapter(a, b, experts, self.scaling[name])

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        _refuse_merging(self.get_base_layer())


def check_stored(adapter: str, model: Any) -> None:
    """Refuses an adapter of another model, whose unmatched tensors PEFT would drop, and one with NaN.

    Args:
        adapter: a folder, or a name on the Hub.
        model: of PEFT, with the adapter's layers.

    Raises: ValueError that names a tensor.
    """
    tensors = load_peft_weights(adapter, device="cpu")
    stored, wanted = (
        {name: tuple(tensor.shape) for name, tensor in found.items() if "lora_" in name}
        for found in (tensors, get_peft_model_state_dict(model))
    )
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            expected = f"{name} {wanted[name]}" if name in wanted else f"without {name}"
            refuse("an adapter of this model", expected, stored.get(name, "none"))
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            refuse(f"{name} of an adapter", "of finite numbers", "NaN or infinity")


def _refuse_merging(base: nn.Module) -> NoReturn:
    expected = (
        "over a dense weight to be merged (load the adapter on the dense model, merge, and quantise then)"
    )
    refuse("an adapter", expected, f"one over {type(base).__name__}")


def wrapped_linear(
    target: nn.Module, base: QuantizedLinear, adapter: str, config: Any, **kwargs: Any
) -> nn.Module:
    """The LoRA layer over a quantised linear layer.

    Raises: ValueError for a layer whose matrix is several.
    """
    if isinstance(base, GroupedLinear):
        refuse("target_modules", "layers with one matrix", f"a {type(base).__name__} of {base.n_groups}")
    return QuantizedLoraLinear(target, adapter, config=config, **kwargs)
