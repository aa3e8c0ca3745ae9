"""Linear layers and embeddings with quantised weights, in place of nn.Linear and nn.Embedding."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...ops._decoded import with_decoded_weights
from ...ops.families.linear import embedding_quantized, linear_quantized
from ...quantization import TENSORS, Format, QuantizedWeight
from ..basics.interface import codes_of, formats_of, is_experts, is_quantized
from ..basics.logits import are_wide
from ..basics.tensors import ABOUT, Deferred
from ..upstream.reach import hold_reach

ops = torch.ops.moe_mps


def _needs_dense(name: str) -> AttributeError:
    return AttributeError(
        f"moe_mps: a weight must be dense for .{name}, got a quantised one; resize, tune or train first, "
        "and quantise then"
    )


class LazyWeight:
    """The `weight` of a quantised layer: shape, dtype, device and elements, but no tensor to compute with.

    Elements are dequantised on access: weight[7] reads one row.
    """

    def __init__(self, layer: "QuantizedLayer"):
        self._layer = layer

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._layer.rows, self._layer.columns))

    @property
    def dtype(self) -> torch.dtype:
        return self._layer._like.dtype

    @property
    def device(self) -> torch.device:
        return self._layer.packed.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _needs_dense(name)

    def __getitem__(self, index: Any) -> Tensor:
        first, *others = index if isinstance(index, tuple) else (index,)
        if first is None or first is Ellipsis:
            return self._layer.dequantized(slice(None))[index]
        if isinstance(first, int):
            within: tuple = (0, *others)
            return self._layer.dequantized(slice(first, first + 1 or None))[within]
        within = (slice(None), *others)
        return self._layer.dequantized(first)[within]


class HeadWeight(Deferred):
    """The LazyWeight of an output head as a tensor, which autograd functions that compute losses save."""

    weight: LazyWeight

    @staticmethod
    def of(weight: LazyWeight) -> "HeadWeight":
        head_weight: HeadWeight = HeadWeight.made(
            tuple(weight.shape), weight.dtype, weight.device, weight=weight
        )
        return head_weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        head_weight = next(item for item in (*args, *(kwargs or {}).values()) if isinstance(item, HeadWeight))
        if func is Tensor.__getitem__:
            return head_weight.weight[args[1]]
        raise _needs_dense(func.__self__.__name__ if func.__name__ == "__get__" else func.__name__)

    @classmethod
    def without_elements(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd saves it
            return cls.of(args[0].weight)
        raise _needs_dense(func.overloadpacket.__name__)


class QuantizedLayer(nn.Module):
    """A quantised matrix [rows, columns].

    Attributes:
        packed: [rows, columns * bits / 32], int32: the words of the format, a buffer.
        scales, biases: [rows, columns / group_size], parameters where they are numbers, in the dtype of the
            model, and buffers where they are codes; biases are None where the format has none.
        format: how they are read.
    """

    packed: Tensor
    scales: Tensor
    biases: Tensor | None
    _like: Tensor

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype):
        super().__init__()
        self.format = weight.format
        for name, tensor in zip(TENSORS, weight, strict=True):
            hold(self, name, tensor)
        self._reach = hold_reach("peft")
        # An empty tensor that keeps the dtype of the dense weight and is moved and cast with the module.
        self.register_buffer(
            "_like", torch.empty(0, dtype=dtype, device=weight.packed.device), persistent=False
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLayer":
        """Moves codes as parameters are moved, in place: layers that share them go on doing so."""
        all_codes = codes_of(self)
        for name, codes in all_codes.items():
            moved = fn(codes)
            if torch._has_compatible_shallow_copy_type(codes, moved):
                codes.data = moved
            else:
                all_codes[name] = moved
            del self._buffers[name]
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(all_codes)
        return self

    @property
    def rows(self) -> int:
        return self.packed.shape[0]

    @property
    def columns(self) -> int:
        return self.format.columns(self.packed.shape[1])

    @property
    def weight(self) -> Any:
        return LazyWeight(self)

    def dequantized(self, rows: slice | Tensor) -> Tensor:
        """Some rows of the matrix, in the dtype of the dense weight."""
        weight = QuantizedWeight(self.packed, self.scales, self.biases, self.format)
        return weight.values(rows).to(self._like.dtype)


def formats_in(module: nn.Module) -> dict[str, Format]:
    """{name of the dense parameter: format} of a quantised layer or quantised experts; else nothing."""
    if isinstance(module, QuantizedLayer):
        return {"weight": module.format}
    return formats_of(module) if is_experts(module) and is_quantized(module) else {}


def has_quantized_weights(module: nn.Module) -> bool:
    return bool(formats_in(module))


def hold(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Registers a tensor of a quantised weight: numbers as a parameter, codes as a buffer."""
    module._parameters.pop(name, None)
    module._buffers.pop(name, None)
    if tensor is None or tensor.is_floating_point():
        module.register_parameter(name, None if tensor is None else _parameter(tensor))
    else:
        module.register_buffer(name, as_codes(tensor))


_CODES = WeakIdKeyDictionary()  # {parameter that loading made: its codes}


def as_codes(tensor: Tensor) -> Tensor:
    """Codes without the Parameter that loading needs: one object for all layers that share them."""
    if not isinstance(tensor, nn.Parameter):
        return tensor
    if tensor not in _CODES:
        codes: Any = tensor.detach()
        codes._is_hf_initialized = getattr(tensor, "_is_hf_initialized", False)
        _CODES[tensor] = codes
    return _CODES[tensor]


def _parameter(tensor: Tensor) -> nn.Parameter:
    """A parameter; a given parameter stays the same object, because tied layers share it."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


class QuantizedLinear(QuantizedLayer):
    """nn.Linear on `torch.ops.moe_mps.linear_quantized`; gradients reach its input and its bias.

    Attributes: as of QuantizedLayer with out_features rows and in_features columns, and `bias`
        [out_features] or None.
        is_head: True if it gives a model's logits, which `wide_logits` asks for in float32.
    """

    bias: Tensor | None
    is_head = False

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, bias: Tensor | None = None):
        super().__init__(weight, dtype)
        self.register_parameter("bias", None if bias is None else _parameter(bias))

    @property
    def weight(self) -> Any:
        return HeadWeight.of(LazyWeight(self)) if self.is_head else LazyWeight(self)

    @property
    def in_features(self) -> int:
        return self.columns

    @property
    def out_features(self) -> int:
        return self.rows

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        packed, scales, biases, bias = self.weights()
        wide = self.is_head and not torch.compiler.is_compiling() and are_wide()
        dtype = torch.float32 if wide else None
        compute = partial(
            linear_quantized, x, packed, scales, biases, format=self.format.name, bias=bias, dtype=dtype
        )
        return with_decoded_weights(compute, self, packed, scales, biases) if packed.is_cpu else compute()

    def weights(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """packed, scales, biases and bias, faster than by attributes of the module."""
        codes, numbers = self._buffers, self._parameters
        packed = codes.get("packed")
        scales = numbers.get("scales") if "scales" in numbers else codes.get("scales")
        if packed is None or scales is None:  # not registered, as FSDP leaves them
            return self.packed, self.scales, self.biases, self.bias
        biases = numbers["biases"] if "biases" in numbers else codes["biases"]
        return packed, scales, biases, numbers["bias"]

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, {bias=}, {self.format}"


class OrderedLinear(QuantizedLinear):
    """A QuantizedLinear whose weight takes the elements of its input in another order.

    Attributes:
        order: [in_features], int32: column c of the weight is multiplied by x[..., order[c]].
    """

    order: Tensor

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, bias: Tensor | None, order: Tensor):
        super().__init__(weight, dtype, bias)
        hold(self, "order", order)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(-1, self.order))

    def dequantized(self, rows: slice | Tensor) -> Tensor:
        return super().dequantized(rows).index_select(-1, self.order.argsort())


class GroupedLinear(QuantizedLinear):
    """A QuantizedLinear of several matrices, row after row, each for one group of the inputs.

    Attributes:
        n_groups: the matrices are [n_groups, out_features / n_groups, in_features].
        group_ids: [n_groups], int32: what `torch.ops.moe_mps.expert_qmm` calls them.
    """

    group_ids: Tensor

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, groups: int):
        super().__init__(weight, dtype)
        self.n_groups = groups
        ids = torch.arange(groups, dtype=torch.int32, device=weight.packed.device)
        self.register_buffer("group_ids", ids, persistent=False)

    def product(self, x: Tensor) -> Tensor:
        """[..., n_groups, in_features] -> [..., n_groups, out_features / n_groups]"""
        weights = self.weights()[:3]
        stacks = [None if each is None else each.unflatten(0, (self.n_groups, -1)) for each in weights]
        rows = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        ids = self.group_ids.expand(len(rows), -1)
        compute = partial(ops.expert_qmm, rows, ids, *stacks, format=self.format.name)
        out = with_decoded_weights(compute, self, *weights) if x.is_cpu else compute()
        return out.view(*x.shape[:-1], out.shape[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, n_groups={self.n_groups}"


class QuantizedEmbedding(QuantizedLayer):
    """nn.Embedding on `torch.ops.moe_mps.embedding_quantized`, for inference.

    Attributes: as of QuantizedLayer with num_embeddings rows and embedding_dim columns; `padding_idx`; and
        `scale`, by which rows are multiplied in the dtype of the model, or None.
    """

    scale: Tensor | None

    def __init__(
        self,
        weight: QuantizedWeight,
        dtype: torch.dtype,
        padding_idx: int | None = None,
        scale: Tensor | None = None,
    ):
        super().__init__(weight, dtype)
        self.padding_idx = padding_idx
        if scale is None:
            self.scale = None  # not a buffer, because offloading expects no buffer to be None
        else:
            self.register_buffer("scale", scale, persistent=False)

    @property
    def num_embeddings(self) -> int:
        return self.rows

    @property
    def embedding_dim(self) -> int:
        return self.columns

    def forward(self, ids: Tensor) -> Tensor:
        dtype, weight = self._like.dtype, (self.packed, self.scales, self.biases)
        out = embedding_quantized(ids, *weight, format=self.format.name, dtype=dtype)
        return out if self.scale is None else out * self.scale.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format}"
