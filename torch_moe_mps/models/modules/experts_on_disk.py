"""Experts whose weights are slots of a pool, which reads them from the disk as tokens need them."""

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ...disk.file import Layer, dtype_of
from ...disk.pool import Counters, ExpertPool, Pools
from ...ops.families.slots import slots_lock
from ..basics.interface import ON_DISK, experts_on_disk
from ..basics.state import UntrackedState
from ..basics.tensors import ABOUT, Deferred
from ..graphs.tracing import LeftAlone
from ..upstream.reach import hold_reach
from .experts import NAME

ops = torch.ops.moe_mps


class OnDisk(UntrackedState):
    """The pool of a module, whose weights are the pool's slots.

    Attributes:
        key: of the file, which tells the weights.
        pools: of the model's experts, or of its embeddings.
    """

    def __init__(self, pool: ExpertPool, pools: Pools):
        self.pool, self.pools, self.key = pool, pools, pool.reader.file.fingerprint
        self._reach = hold_reach("peft")

    def ready(self, module: nn.Module, ids: Tensor) -> tuple[nn.Module, Tensor]:
        """The module with the weights of some experts in memory, and the rows of those for the ids.

        The slots of few tokens are read while the GPU waits; for many tokens, all experts are read.

        Raises: OSError, ValueError for a disk that cannot be read; LeftAlone if it would have to be, where a
            call is captured.
        """
        if ids.numel() <= self.pool.size:
            return module, ops._expert_slots(ids, self.pool.number)
        if isinstance(ids, FakeTensor):
            raise LeftAlone("its tokens may need more experts than have slots")
        needed = None
        if ids.numel() < self.pool.about.experts:
            needed = {*ids.flatten().tolist()} & {*range(self.pool.about.experts)}
            if len(needed) <= self.pool.size:
                return module, ops._expert_slots(ids, self.pool.number)
        staging, number = self.pools.staging, self.pools.layers.index(self.pool)
        assert staging is not None
        staging.read(number, needed)
        return _with_weights(module, transposed(self.pool.about, staging.tensors[number])), ids

    def refuse(self, why: str) -> NoReturn:
        """Raises: ValueError that names the module."""
        raise ValueError(f"moe_mps::experts_memory: {self.pool.about.name} is on the disk: {why}")

    def __deepcopy__(self, memo: dict) -> Any:
        self.refuse("load another one for a copy")

    def __reduce__(self) -> Any:
        self.refuse("it cannot be saved")


class Unreadable(Deferred):
    """Weight in a state dict whose rows are on the disk: its shape, dtype and device; all else is refused.

    Adapters are saved from state dicts with such weights, which they leave out.
    """

    on_disk: OnDisk

    @staticmethod
    def of(on_disk: OnDisk, name: str) -> Any:
        about, device = on_disk.pool.about, on_disk.pool.tensors[name].device
        shape = transposed(about, {name: on_disk.pool.tensors[name]})[name].shape[1:]
        attributes: dict[str, Any] = {"on_disk": on_disk, "_is_hf_initialized": True}
        return Unreadable.made(
            (about.experts, *shape), dtype_of(about.tensors[name][0]), device, **attributes
        )

    def elements(self) -> NoReturn:
        self.on_disk.refuse("it cannot be saved or copied")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ABOUT:
            next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).elements()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _refuse_to_save(
    on_disk: OnDisk, module: nn.Module, state: dict[str, Any], prefix: str, about: Any
) -> None:
    """Hook of state dicts: the weights in it refuse to be saved."""
    for name in on_disk.pool.tensors:
        state[f"{prefix}{name}"] = Unreadable.of(on_disk, name)


def transposed(layer: Layer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer in the layout of its module, or the other way round."""
    return {n: t.mT if n in layer.transposed else t for n, t in tensors.items()}


def put_on_disk(module: nn.Module, on_disk: OnDisk) -> None:
    """Keeps the weights of a module in its pool: `to` and state dicts refuse them."""

    def _apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for tensor in on_disk.pool.tensors.values():
            empty = tensor.new_empty(0)  # no view: a function may give its memory another place
            if (moved := function(empty)).device != empty.device or moved.dtype != empty.dtype:
                on_disk.refuse("its device and dtype are those that from_pretrained was given")
        return module

    vars(module)[ON_DISK], vars(module)["_apply"] = on_disk, _apply
    # A partial, so that pickle meets `on_disk`, and is refused.
    module.register_state_dict_post_hook(partial(_refuse_to_save, on_disk))


def put_table_on_disk(module: nn.Module, on_disk: OnDisk) -> None:
    """Makes an embedding gather its rows from the disk; as many ids as its pool has slots at a time."""
    put_on_disk(module, on_disk)
    forward = module.forward

    def gathered(ids: Tensor) -> Tensor:
        parts = ids.flatten().split(on_disk.pool.size)
        with slots_lock:
            rows = [forward(ops._expert_slots(part, on_disk.pool.number)) for part in parts]
        return torch.cat(rows).view(*ids.shape, rows[0].shape[-1])

    vars(module)["forward"] = gathered


def expert_pools(model: nn.Module) -> Pools | None:
    """The pools of a model whose experts are on the disk; None for any other."""
    every = (on_disk.pools for _, on_disk in experts_on_disk(model))
    return next((pools for pools in every if pools.staging is not None), None)


def reads_of(model: nn.Module) -> dict[str, Counters]:
    """Reads of a model from the disk: of "experts", of "embeddings"."""
    every = [on_disk.pools for _, on_disk in experts_on_disk(model)]
    return {"embeddings" if pools.staging is None else "experts": pools.counters for pools in every}


def keep_whole(model: nn.Module, experts: Sequence[nn.Module]) -> None:
    """Makes a model refuse what its experts on the disk refuse, before anything of it is changed."""
    reference = weakref.ref(model)

    def _apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for each in experts:
            each._apply(function)
        model: Any = reference()
        return type(model)._apply(model, function, recurse)

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        raise ValueError("moe_mps::experts_memory: a model whose experts are on the disk cannot be saved")

    def set_experts_implementation(asked: str | dict[str, str]) -> None:
        model: Any = reference()
        known = {NAME, *model.get_experts_implementation().values()}
        if others := {*(asked.values() if isinstance(asked, dict) else [asked])} - known:
            expected = f'"{NAME}" where experts are on the disk'
            got = ", ".join(sorted(map(repr, others)))
            raise ValueError(
                f"moe_mps::experts_memory: the experts implementation must be {expected}, got {got}"
            )
        type(model).set_experts_implementation(model, asked)

    vars(model).update(_apply=_apply, save_pretrained=save_pretrained)
    if expert_pools(model) is not None:
        vars(model)["set_experts_implementation"] = set_experts_implementation


def _with_weights(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """A module that shares everything with another but for some weights."""
    other: Any = object.__new__(type(module))
    other.__dict__ = copy.copy(module.__dict__)
    give_weights(other, tensors)
    return other


def give_weights(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Gives a module weights in place of those with these names: codes are buffers."""
    parameters = {n: p for n, p in module._parameters.items() if n not in tensors}
    buffers = {n: b for n, b in module._buffers.items() if n not in tensors}
    for name, tensor in tensors.items():
        weight: Any = nn.Parameter(tensor, requires_grad=False) if tensor.is_floating_point() else tensor
        weight._is_hf_initialized = True
        (parameters if isinstance(weight, nn.Parameter) else buffers)[name] = weight
    module.__dict__.update(_parameters=parameters, _buffers=buffers)
