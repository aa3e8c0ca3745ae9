"""Reasons for which a linear layer or an embedding stays dense.

Something uses an attribute that a quantised layer lacks, or the layer is too small, or a router's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...models.basics.interface import count_of, experts_of
from ...models.basics.state import original_class
from ...models.graphs.patterns import match
from ...models.modules.traced import Input, path_of, trace
from ...models.trials.comparing import agrees, tried
from ...models.trials.memory import apart
from ...models.trials.replicas import bare_replica
from ..absent import around_text
from .target import is_conv1d
from .weight_uses import use_of_weight, weights_written_by

# Layers with fewer outputs than this save no bytes: the gate of a shared expert has one.
SMALLEST = 16


class Reasons:
    """Reasons for which layers of a model stay dense."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.routers = routers_of(model)
        self.adapted = tuple(f"{n}." for n, m in model.named_modules() if hasattr(m, "get_base_layer"))
        self.towers = tuple(f"{name}." for name in _towers(model))
        self.written = set().union(*(weights_written_by(cls) for cls in {*map(type, model.modules())}))

    def of(self, name: str, module: nn.Module) -> str | None:
        """Why a layer stays dense unless it is asked for by name; None if it does not."""
        if module in self.routers:
            return "it feeds a router"
        if name.startswith(self.adapted):
            return "it is under an adapter of PEFT"
        if self._is_small(name, module):
            return f"it has an output of width {module.out_features} only"
        if name.startswith(self.towers):
            return "it is not in the language model"
        return self.needs(name, module)

    def _is_small(self, name: str, module: nn.Module) -> bool:
        """True if a layer has few outputs and no larger sibling with the same input.

        With such a one it runs in one dispatch. A layer with as many outputs as inputs may be its input.
        """
        if not isinstance(module, nn.Linear) or module.out_features >= SMALLEST:
            return False
        around = self.model.get_submodule(name.rpartition(".")[0]).children()
        linears = (other for other in around if isinstance(other, nn.Linear) and other not in self.routers)
        return not any(
            SMALLEST <= other.out_features != other.in_features == module.in_features for other in linears
        )

    def needs(self, name: str, module: nn.Module) -> str | None:
        """Why a layer must stay dense; routers and small layers need not."""
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return "a hook is on it"
        if hasattr(module, "parametrizations") or not isinstance(module.weight, nn.Parameter):
            return "its weight is computed by a parametrisation"
        is_plain = _is_plain(module) if isinstance(module, nn.Embedding) else _is_plain_linear(module)
        if not is_plain:
            return f"{original_class(module).__name__} has code of its own"
        if any(f".{name}".endswith(f".{written}") for written in self.written):
            return "the code around it writes to its weight"
        parent, _, child = name.rpartition(".")
        around: type = type(self.model.get_submodule(parent))
        if (reason := use_of_weight(around, child)) is not None:
            return reason
        if child in (getattr(self.model, "_keep_in_fp32_modules", None) or ()):
            return "it stays in float32" if self.model.dtype == torch.float16 else None
        return None


def groups_of(module: nn.Module) -> int | None:
    """The number of groups of a layer whose rows are a matrix for each group of its inputs; None for others.

    Its forward has to give out[..., g, :] = weight[g] @ x[..., g, :] for random numbers.
    """
    groups = getattr(module, "n_groups", None)
    is_own = isinstance(module, nn.Linear) and type(module) is not nn.Linear and module.bias is None
    if not is_own or not isinstance(groups, int) or groups < 1:
        return None
    probe, generator = bare_replica(module), torch.Generator().manual_seed(0)
    with apart():
        weight, x = (torch.rand(s, generator=generator) - 0.5 for s in ((groups, 3, 5), (2, 4, groups, 5)))
        vars(probe).pop("weight", None)  # stands for one that is read from a checkpoint
        vars(probe).update(_parameters={"weight": weight.flatten(0, 1), "bias": None})
        probe.in_features, probe.out_features = 5, 3 * groups
        expected = torch.einsum("btgc,grc->btgr", x, weight)
        return groups if agrees(tried(probe, x), expected) else None


def _is_plain_linear(module: Any) -> bool:
    """True if the forward is nn.Linear's, or a grouped linear's."""
    cls = original_class(module)
    if cls is nn.Linear or is_conv1d(module):
        return True
    if cls.__module__.startswith("torch."):  # nn.MultiheadAttention, for one, reads the weight
        return False
    return cls.forward is nn.Linear.forward or groups_of(module) is not None


def _is_plain(embedding: nn.Embedding) -> bool:
    """True if the forward is an embedding lookup, scaled or not."""
    if type(embedding).forward is nn.Embedding.forward:
        return embedding.max_norm is None
    traced = trace(embedding, Input((2, 3), torch.long))
    found = traced and match("embedding(WEIGHT, IDS, PADDING) * FACTOR", traced.result)
    if not traced or not found or found["IDS"] is not traced.inputs[0]:
        return False
    return isinstance(found["FACTOR"], int | float) or path_of(found["FACTOR"]) is not None


def _towers(model: Any) -> Iterator[str]:
    """Submodels beside the language model: vision, audio."""
    try:
        around, text = around_text(model)
    except (NotImplementedError, AttributeError):
        return
    readers = {id(m) for part in _encoder_and_decoder(model) if _reads_tokens(part) for m in part.modules()}
    models = {name for name, module in model.named_modules() if hasattr(module, "base_model_prefix")}
    for name in models - around:
        inside = text != "" and name.startswith(f"{text}.")
        if not inside and id(model.get_submodule(name)) not in readers:
            yield name


def _encoder_and_decoder(model: Any) -> list[Any]:
    """The two parts of a model that is both; none of any other."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return []
    return [part for part in (model.get_encoder(), model.get_decoder()) if part is not model]


def _reads_tokens(model: Any) -> bool:
    """True if the inputs of an encoder or a decoder are token ids."""
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (NotImplementedError, AttributeError):
        return False


def routers_of(model: nn.Module) -> set[nn.Module]:
    """The linear layers that compute the ids of experts.

    They are in a part of the block that has an output for each expert, or one more for none.
    """
    result: set[nn.Module] = set()
    every = experts_of(model)
    inside = {module for experts in every.values() for module in experts.modules()}  # some route themselves
    for name, experts in every.items():
        block, _, last = name.rpartition(".")
        count = count_of(experts)
        for child, part in model.get_submodule(block).named_children():
            linears = [m for m in part.modules() if isinstance(m, nn.Linear) and m not in inside]
            outputs = {linear.out_features for linear in linears}
            other = child == last or "attn" in child or "shared" in child  # they may be as wide
            if not other and outputs & {count, count + 1}:
                result.update(linears)
    for module in model.modules():  # experts that are modules of their own
        lists = [len(child) for child in module.children() if isinstance(child, nn.ModuleList)]
        result.update(c for c in module.children() if isinstance(c, nn.Linear) and c.out_features in lists)
    return result
