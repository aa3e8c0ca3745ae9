"""Experts as one object: the stacks that a module reads, and the products with them.

Recognition makes it once, and a module holds it. It has no tensor and no module, which its methods are given:
copies of a module, replicas, and modules with slots of the disk in place of weights share it.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops._activations import POINTWISE, Activation
from ...ops.families.experts import _moe_experts
from ...ops.families.quantized import _moe_experts_quantized
from ...quantization import Format
from .report import Done
from .stacks import PackedStack, Stack
from .state import EMPTY_STATE, STATE

ops = torch.ops.moe_mps

Stacks = tuple[tuple[str, Stack], ...]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Method = Callable[[Callable], Callable]

# Names of stacks in transformers' interface.
GATED, NOT_GATED, SECOND = "gate_up_proj", "up_proj", "down_proj"
# From so many pairs on, those of an expert are put together, so that they read the adapter's factors once.
# Untuned.
_FEW_PAIRS = 64


class ExpertsCode(NamedTuple):
    """Code of a class of experts; an empty one if it dispatches to transformers' implementations.

    Attributes:
        stacks: (projection, Stack) of the parameters that it reads, if it was recognised.
        shapes: (path, shape) of its dense parameters.
        methods: (name, its eager method -> a method that runs the operators); without any, its forward does.
        runs: further operators of these methods, as a router's.
        act_fn: path of the activation; empty for none.
        heard: paths of other modules whose hooks and forwards take part once the experts are packed.
        given: names of the attributes that the module has got.
        numbers: (path, name, value) of whole numbers in attributes; some are sizes, which differ in a trial.
    """

    stacks: Stacks = ()
    shapes: Shapes = ()
    methods: tuple[tuple[str, Method], ...] = ()
    runs: tuple[Done, ...] = ()
    act_fn: str = "act_fn"
    heard: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    numbers: tuple[tuple[str, str, int], ...] = ()

    @property
    def is_recognised(self) -> bool:
        """True for a class without transformers' interface."""
        return bool(self.stacks)

    @property
    def is_of_family(self) -> bool:
        """True if a family knows the class, and the block around it that routes."""
        return bool(self.methods)

    @property
    def entry_points(self) -> tuple[str, ...]:
        """Names of the methods that a block calls."""
        return tuple(name for name, _ in self.methods) or ("forward",)

    @property
    def routes(self) -> bool:
        """True if the module has the router of its experts."""
        return bool(self.runs)

    @property
    def types_of_ids(self) -> tuple[str, ...]:
        """Dtypes of the ids: routers give int64, and blocks of families int32, too."""
        return ("i64", "i32") if self.is_of_family else ("i64",)


class Experts(NamedTuple):
    """Experts of a module: the stacks that it reads, and the products with them.

    Attributes:
        stacks: (projection, stack) of the two matrices.
        has_bias: whether each has a bias, called as the projection, with `_bias`.
        activation: between the matrices, as recognised; None if other code runs there, and for classes with
            transformers' interface, whose activation a trace finds.
        number: of experts; None for the size of the parameters.
        has_identity: whether ids beyond the experts give their input.
        takes_rows: whether the forward takes rows [E * n, H], n for each expert, and no ids.
        can_run_eager: whether the class's eager code reads the stacks that the module has.
        code: of the class.
    """

    stacks: tuple[tuple[str, Stack | PackedStack], ...]
    has_bias: bool
    activation: Activation | None = None
    number: int | None = None
    has_identity: bool = False
    takes_rows: bool = False
    can_run_eager: bool = True
    code: ExpertsCode = ExpertsCode()

    @property
    def projections(self) -> tuple[str, str]:
        """Names of the two matrices, as transformers' interface has them."""
        (first, _), (second, _) = self.stacks
        return first, second

    @property
    def has_gate(self) -> bool:
        return self.stacks[0][0] == GATED

    @property
    def is_packed(self) -> bool:
        return isinstance(self.stacks[0][1], PackedStack)

    @property
    def is_transposed(self) -> bool:
        """True if dense stacks with the names of transformers' interface are [E, input, output]."""
        return not self.has_other_names and self.stacks[0][1].is_transposed

    @property
    def has_other_names(self) -> bool:
        """True if the stacks are dense parameters of other names than transformers' interface has."""
        return any(isinstance(stack, Stack) and stack.names != (name,) for name, stack in self.stacks)

    @property
    def is_one_operator(self) -> bool:
        """True if one operator may compute both matrices: gate and up projections are one tensor."""
        (_, first), (_, second) = self.stacks
        return len(first.names) == 1 and first.is_transposed == second.is_transposed

    @property
    def is_called_with_ids(self) -> bool:
        """True if a forward is called with rows, ids and weights."""
        return not self.takes_rows and not self.code.routes

    @property
    def formats(self) -> dict[str, Format]:
        """{projection: format} of packed experts, of gate and up projections where they differ."""
        packed = [stack for _, stack in self.stacks if isinstance(stack, PackedStack)]
        return {n: f for stack in packed for n, f in zip(stack.names, stack.formats, strict=True)}

    # --- other stacks

    @property
    def eager(self) -> "Experts":
        """These experts with the stacks that the class's eager code reads."""
        return self._replace(stacks=self.code.stacks or self.stacks, can_run_eager=True)

    @property
    def source_stacks(self) -> Stacks:
        """Stacks that the class's eager code reads, of a module that has others with other names by now."""
        return self.code.stacks if self.eager.has_other_names and not self.has_other_names else ()

    def in_interface(self) -> "Experts":
        """These experts with dense parameters that have the names of transformers' interface."""
        stacks = tuple((name, Stack((name,), is_transposed=self.is_transposed)) for name in self.projections)
        return self if stacks == self.stacks else self._replace(stacks=stacks, can_run_eager=False)

    def packed(self, formats: Mapping[str, Format]) -> "Experts":
        """These experts with packed weights.

        Args:
            formats: {projection: format}. If it has "gate_up_proj" and "up_proj", gate and up projections
                are apart.
        """
        first = [name for name in (*self.projections[:1], NOT_GATED) if name in formats]
        both = (tuple(dict.fromkeys(first)), (SECOND,))
        stacks = (PackedStack(n, tuple(map(formats.__getitem__, n)), self.is_transposed) for n in both)
        return self._replace(stacks=tuple(zip(self.projections, stacks, strict=True)), can_run_eager=False)

    # --- tensors of a module

    def stack(self, projection: str) -> Any:
        """The stack of a projection, or of the gate or up projections that are apart."""
        return self.stacks[projection == SECOND][1]

    def matrices(self, module: nn.Module, projection: str) -> list[Tensor]:
        """The dense matrices [E, ., .] of a projection that a forward reads, in parts joined by outputs."""
        stack = self.stack(projection)
        views = stack.matrices(module, self.number)
        return views if stack.is_transposed == self.is_transposed else [view.mT for view in views]

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """The dense parameters of the first matrix, of the second one, and their biases."""
        (_, first), (_, second) = self.stacks
        result: list[Any] = [*first.tensors(module), *second.tensors(module)]
        return [*result, *self.biases(module).values()] if self.has_bias else result

    def parameters(self, module: nn.Module) -> list[Tensor]:
        """The parameters of the experts, dense or packed, without parameters of modules inside."""
        return self.tensors(module) if self.has_other_names else [*module.parameters(recurse=False)]

    def shape(self, module: nn.Module, projection: str) -> tuple[int, int, int]:
        """[experts, outputs, inputs] of the matrices of a projection that a forward reads."""
        stack = self.stack(projection)
        if self.is_packed:
            return stack.shape(module)
        views = stack.matrices(module, self.number)
        count, rows, columns = views[0].shape
        rows, columns = (columns, rows) if stack.is_transposed else (rows, columns)
        return count, rows * len(views), columns

    def dense_shape(self, module: nn.Module, projection: str) -> tuple[int, ...]:
        """Shape of a packed stack in the dense model, with matrices that no forward reads."""
        shapes = dict(self.code.shapes)
        if projection in shapes:
            return shapes[projection]
        count, rows, columns = self.shape(module, projection)
        return (count, columns, rows) if self.is_transposed else (count, rows, columns)

    def transposed(self, module: nn.Module) -> list[Tensor]:
        """The dense parameters [E, input, output] of the matrices."""
        stacks = [stack for _, stack in self.stacks if isinstance(stack, Stack)]
        stacks = [stack for stack in stacks if stack.is_transposed and not stack.is_flat]
        return [tensor for stack in stacks for tensor in stack.tensors(module)]

    def biases(self, module: nn.Module) -> dict[str, Tensor]:
        """Arguments of the operators for the biases, if there are any."""
        if not self.has_bias:
            return {}
        names = zip(("gate_up_bias", "down_bias"), self.projections, strict=True)
        return {argument: getattr(module, f"{name}_bias") for argument, name in names}

    # --- what operators compute

    def multiply(self, module: nn.Module, projection: str, x: Tensor, ids: Tensor) -> Tensor:
        """[T, K, R]: rows [T, C] or [T, K, C] times the matrices of their experts ids [T, K]."""
        return _joined(self._products(module, projection, x, ids, _buckets(module, ids)))

    def combine(
        self,
        module: nn.Module,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        activation: tuple,
        in_steps: bool = False,
        dense: Sequence[Tensor] = (),
    ) -> Tensor:
        """[T, H] -> [T, H]: the weighted sum of the experts' outputs, by one operator.

        Each matrix has an operator of its own in steps, where the module's eager code activates, and where
        gate and up projections are apart.

        Args:
            activation: its fields; empty if the module's eager code activates.
            dense: the `tensors` of the module, if they have been read before.
        """
        if in_steps or not activation or not self.is_one_operator:
            return self._combine_in_steps(module, x, ids, weights, activation)
        options = activation_arguments(activation)
        if self.has_identity:
            options["has_identity"] = True
        (_, first), (_, second) = self.stacks
        if isinstance(first, Stack) and isinstance(second, Stack):
            up, down, *biases = dense or self.tensors(module)
            if self.number is not None:
                (up,), (down,) = first.views([up], self.number), second.views([down], self.number)
            if biases:
                options["gate_up_bias"], options["down_bias"] = biases
            if first.is_transposed:
                options["transposed"] = True
            return _moe_experts(x, weights, ids, up, down, **options)
        if self.has_bias:
            options |= self.biases(module)
        (format,), (down_format,) = first.formats, second.formats  # type: ignore[union-attr]
        options["format"] = format.name
        if down_format is not format:
            options["down_format"] = down_format.name
        packed: tuple[Any, ...] = (*first.tensors(module)[0], *second.tensors(module)[0])
        return _moe_experts_quantized(x, weights, ids, *packed, **options)

    def _combine_in_steps(
        self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, activation: tuple
    ) -> Tensor:
        """`combine` by an operator for each matrix."""
        buckets = _buckets(module, ids)
        rows = self.activated(module, x, ids, activation, buckets)
        outs = _joined(self._products(module, SECOND, rows, ids, buckets))
        if getattr(module, "has_post_expert_norm", False):
            norm: Any = module.post_expert_norm
            outs = norm(outs)
        out: Tensor = ops.moe_weighted_reduce(outs, weights)
        if not self.has_identity:
            return out
        assert self.number is not None
        share = weights.masked_fill(ids < self.number, 0.0).sum(-1, keepdim=True)
        return torch.addcmul(out, x, share.to(x.dtype))

    def activated(
        self, module: nn.Module, x: Tensor, ids: Tensor, activation: tuple, buckets: tuple = ()
    ) -> Tensor:
        """[T, K, I]: what the second matrix of each of a token's experts is multiplied with.

        Args:
            activation: its fields; empty if the module's eager code activates.
            buckets: the pairs by expert, for adapters.
        """
        parts = self._products(module, self.projections[0], x, ids, buckets)
        if activation:
            out: Tensor = ops.expert_activation(_joined(parts), **activation_arguments(activation))
            return out
        if self.has_gate and len(parts) == 1:
            if (apply_gate := getattr(module, "_apply_gate", None)) is not None:
                return apply_gate(parts[0])
            parts = _halves(parts[0], self.activation)
        act_fn: Any = attrgetter(self.code.act_fn)(module)
        return act_fn(parts[0]) * parts[1] if self.has_gate else act_fn(parts[0])

    def _products(
        self, module: nn.Module, projection: str, x: Tensor, ids: Tensor, buckets: tuple
    ) -> list[Tensor]:
        """[T, K, R] of each part of a projection, with bias and adapters."""
        bias = getattr(module, f"{projection}_bias") if self.has_bias else None
        outs: list[Tensor] = self.stack(projection).multiply(module, self.number, x, ids, bias)
        for a, b, experts, scaling in module.__dict__.get(STATE, EMPTY_STATE).adapters.get(projection, ()):
            pairs = {"pair_order": buckets[0], "offsets": buckets[1][: experts + 1]} if buckets else {}
            outs = [ops.expert_lora(outs[0], x, ids, a, b, num_experts=experts, scaling=scaling, **pairs)]
        return outs


def _halves(rows: Tensor, activation: Activation | None) -> list[Tensor]:
    """[gate, up] of rows for an activation. Raises: ValueError for one with limits."""
    if activation is not None and activation.activation not in POINTWISE:
        raise ValueError("moe_mps::accelerate: act_fn of quantised, clamped experts must have no hooks")
    if activation is not None and activation.interleaved:
        return [rows[..., 0::2], rows[..., 1::2]]
    return [*rows.chunk(2, -1)]


def _buckets(module: nn.Module, ids: Tensor) -> tuple:
    """The pairs by expert, where adapters of many pairs read them."""
    adapters = module.__dict__.get(STATE, EMPTY_STATE).adapters
    if not adapters or (ids.numel() < _FEW_PAIRS and not torch.is_grad_enabled()):
        return ()
    most = max(adapter.experts for those in adapters.values() for adapter in those)
    order, offsets = ops.moe_bucket(ids, num_experts=most)
    return order, offsets


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def recognised(
    activation: Activation | None,
    stacks: Stacks,
    number: int,
    shapes: Shapes,
    has_identity: bool = False,
    takes_rows: bool = False,
    **code: Any,
) -> Experts:
    """Experts of a class without transformers' interface.

    Args:
        code: other fields of `ExpertsCode`.
    """
    has_bias = any(name.endswith("_bias") for name, _ in shapes)
    made = ExpertsCode(stacks, shapes, **code)
    return Experts(stacks, has_bias, activation, number, has_identity, takes_rows, code=made)


def activation_arguments(activation: tuple) -> dict[str, Any]:
    """Arguments of the operators for an activation, without defaults: the dispatcher takes time for each."""
    name, alpha, limit, gated, interleaved = activation
    arguments: dict[str, Any] = {}
    if name != "silu":
        arguments["activation"] = name
    if not gated:
        arguments["gated"] = False
    if interleaved:
        arguments["interleaved"] = True
    if alpha is not None:
        arguments["alpha"] = alpha
    if limit is not None:
        arguments["limit"] = limit
    return arguments
