"""The weights of a model that can be quantised: experts, linear layers and embeddings.

A weight stays dense, with a reason, if something uses an attribute that a quantised layer lacks.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ....ops._checks import Check
from ....quantization import TENSORS, Format
from ...basics.interface import Experts, experts_of, is_quantized, projections
from ...basics.state import original_class
from ...graphs.nodes import tensor_of
from ...graphs.patterns import match, uncast
from ...modules.rules.trial import agrees, bare_twin, on_the_cpu, tried
from ...modules.traced import Input, Sizes, everywhere, path_of, remembered, trace
from ..absent import around_text
from .recipe import Recipe
from .weight_uses import weights_read_by, weights_written_by

# Layers with fewer outputs than this save no bytes: the gate of a shared expert has one.
SMALLEST = 16
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")


@dataclass
class Target:
    """A module whose weights can be quantised.

    Attributes:
        kind: "experts", "linears" or "embeddings".
        formats: {parameter: format} of those that are. Where gate and up projections of experts have two,
            "gate_up_proj" means the gate's, and "up_proj" has its own.
        has_order: whether a linear layer is an OrderedLinear once it is quantised.
        importance: {parameter: float32 [matrices, C]} where it is known what they multiply.
    """

    name: str
    module: nn.Module
    kind: str
    formats: dict[str, Format] = field(default_factory=dict)
    has_order: bool = False
    importance: dict[str, Tensor] = field(default_factory=dict)

    @property
    def experts(self) -> Experts:
        """The module of a target of kind "experts"."""
        return cast(Experts, self.module)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that can be quantised."""
        return projections(self.module) if self.kind == "experts" else ("weight",)

    def path(self, parameter: str) -> str:
        """Name that recipes have for a parameter: the matrices of experts have names of their own."""
        return f"{self.name}.{parameter}" if self.kind == "experts" else self.name

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights while they are dense."""
        return getattr(self.module, self.parameters[0]).dtype

    @property
    def is_split(self) -> bool:
        """Whether the gate projections of experts have another format than their up projections."""
        return self.kind == "experts" and self.experts.has_gate and "up_proj" in self.formats

    def dense(self, parameter: str) -> Tensor:
        """The dense tensor of what has a format: the rows of gates, or of up projections, if they differ."""
        if self.is_split and parameter in ("gate_up_proj", "up_proj"):
            halves = self.experts.gate_up_proj.chunk(2, -1 if self.experts.is_transposed else -2)
            return halves[parameter == "up_proj"]
        return getattr(self.module, parameter)

    def rows_first(self, weight: Tensor) -> Tensor:
        """The view [E, output, input] of a dense parameter; E is 1 for a layer."""
        if self.kind != "experts":
            return weight.unsqueeze(0)
        return weight.mT if self.experts.is_transposed else weight

    def check_columns(self, check: Check) -> None:
        """Raises: ValueError for weights whose rows are not made of whole groups."""
        for parameter, format in self.formats.items():
            columns = self.rows_first(self.dense(parameter)).shape[-1]
            if columns % format.multiple != 0:
                expected = f"of an input dimension that is a multiple of {format.multiple} for {format}"
                check.fail(f"{self.name}.{parameter}", expected, columns)


# {format in blocks of 256: the bits of its values in groups}: with scales about as many as those of the types
# that llama.cpp takes in its place, of 4.5 (Q4_0), 5.5 (Q5_0), 6 (Q5_1) and 8.5 bits (Q8_0).
IN_GROUPS = {"q2_k": 4, "q3_k": 4, "iq4_xs": 4, "q4_k": 5, "q5_k": 6, "q6_k": 8}


class Weights(NamedTuple):
    """{name: target} of the weights that a recipe quantises, and {name: reason} of those that stay dense."""

    targets: dict[str, Target]
    dense: dict[str, str]


def weights_of(model: nn.Module, recipe: Recipe) -> Weights:
    """The one decision what is quantised, and to what: in place, while a checkpoint is read, for its plan.

    Modules that share a weight, or will once transformers has tied it, are one: a pattern that fits the name
    of one of them is for all, and the weight counts once.

    Raises: ValueError for a pattern of the recipe that fits nothing.
    """
    result = Weights({}, {})
    every = quantizable(model)
    recipe.check_patterns(paths_of(every))
    together = _together(model, every)
    recipe = recipe.of_sizes(_sizes(every, together))
    reasons = Reasons(model)
    for name, target in every.items():
        alike = [every[other] for other in together.get(name, [name]) if other in every]
        kind = "embeddings" if any(other.kind == "embeddings" for other in alike) else target.kind
        wanted = {p: recipe.format_of([other.path(p) for other in alike], kind) for p in target.parameters}
        target.formats = {parameter: format for parameter, format in wanted.items() if format is not None}
        target.formats = {part: _fitting(target, part, format) for part, format in target.formats.items()}
        reason = None if target.kind == "experts" else reasons.of(name, target.module)
        if reason is None and len(target.formats) < len(wanted):
            reason = "kept by the recipe"
        if reason is None and target.kind != "experts":
            weight: Any = target.module.weight
            reason = _does_not_fit(weight, target.formats["weight"])
        if reason is None:
            result.targets[name] = target
        else:
            result.dense[name] = reason
    _drop_half_shared(together, result)
    return result


def _sizes(every: Mapping[str, Target], together: Mapping[str, list[str]]) -> Counter[str]:
    """How many weights of each kind can be quantised; shared ones once."""
    sizes: Counter[str] = Counter()
    counted: set[str] = set()
    for name, target in every.items():
        if name not in counted:
            counted.update(together.get(name, ()))
            sizes[target.kind] += sum(weight.numel() for weight in target.module.parameters(recurse=False))
    return sizes


def quantizable(model: nn.Module) -> dict[str, Target]:
    """All experts, linear layers and embeddings by their names, in the model's order, without formats."""
    experts, result = experts_of(model), {}
    inside = tuple(f"{name}." for name in experts)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if name in experts:
            result[name] = Target(name, module, "experts")
        elif name.startswith(inside):
            continue
        elif isinstance(module, nn.Embedding) or (module is head and isinstance(module, nn.Linear)):
            result[name] = Target(name, module, "embeddings")
        elif isinstance(module, nn.Linear):
            result[name] = Target(name, module, "linears")
    return result


def paths_of(targets: Mapping[str, Target]) -> list[str]:
    """Names that recipes have for all parameters that can be quantised."""
    return [target.path(parameter) for target in targets.values() for parameter in target.parameters]


def _fitting(target: Target, parameter: str, format: Format) -> Format:
    """The format, or one in groups where rows are not made of its blocks, as llama.cpp does it."""
    if format.mode not in IN_GROUPS or (target.kind == "experts" and is_quantized(target.experts)):
        return format
    columns = target.rows_first(target.dense(parameter)).shape[-1]
    if columns % format.multiple == 0 or columns % 32 != 0:
        return format
    return Format(IN_GROUPS[format.mode], 64 if columns % 64 == 0 else 32)


def _does_not_fit(weight: Tensor, format: Format) -> str | None:
    if weight.shape[-1] % format.multiple != 0:
        return f"its input dimension {weight.shape[-1]} is no multiple of {format.multiple}"
    if not weight.is_floating_point() or weight.element_size() not in (2, 4):
        return f"its weight is {weight.dtype}"
    return None


class Reasons:
    """Why a linear layer or an embedding of a model stays dense."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.routers = routers_of(model)
        self.adapted = tuple(f"{n}." for n, m in model.named_modules() if hasattr(m, "get_base_layer"))
        self.towers = tuple(f"{name}." for name in _towers(model))
        self.written = set().union(*(weights_written_by(cls) for cls in {*map(type, model.modules())}))

    def of(self, name: str, module: nn.Module) -> str | None:
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
        """Whether a layer has few outputs, and no larger layer beside it that may have the same input.

        With such a one it runs in one launch. A layer with as many outputs as inputs may be what it reads.
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
        if (reason := weights_read_by(around).get(child)) is not None:
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
    twin = bare_twin(module)
    with on_the_cpu():
        weight, x = torch.rand(groups, 3, 5) - 0.5, torch.rand(2, 4, groups, 5) - 0.5
        vars(twin).pop("weight", None)  # what stands for one that is read from a checkpoint
        vars(twin).update(_parameters={"weight": weight.flatten(0, 1), "bias": None})
        twin.in_features, twin.out_features = 5, 3 * groups
        expected = torch.einsum("btgc,grc->btgr", x, weight)
        return groups if agrees(tried(twin, x), expected) else None


def _is_plain_linear(module: Any) -> bool:
    """Whether the forward is nn.Linear's, or that of groups of inputs."""
    cls = original_class(module)
    if cls is nn.Linear:
        return True
    if cls.__module__.startswith("torch."):  # as of nn.MultiheadAttention, which reads the weight
        return False
    return cls.forward is nn.Linear.forward or _computes_linear(module) or groups_of(module) is not None


@remembered
def _computes_linear(module: Any) -> bool:
    """Whether the forward of a subclass gives x @ weight.T + bias, and reads nothing else."""

    def ask(sizes: Sizes, dtype: torch.dtype) -> bool | None:
        traced = trace(module, Input((*sizes, module.in_features), dtype), weights=dtype)
        bound = None if traced is None else match("linear(X, WEIGHT, BIAS)", traced.result)
        if traced is None or bound is None or uncast(bound["X"]) is not traced.inputs[0]:
            return None
        weight, bias = bound["WEIGHT"], bound["BIAS"]
        names = path_of(weight), None if bias is None else path_of(bias)
        if names != ("weight", None if module.bias is None else "bias"):
            return None
        out, own = tensor_of(traced.result), tensor_of(weight)
        same = (own.shape, own.stride()) == (module.weight.shape, module.weight.stride())
        dtypes = {own.dtype, out.dtype}  # a formula looks through casts
        return (same and dtypes == {dtype} and out.shape == (*sizes, module.out_features)) or None

    return everywhere(ask) or False


def _is_plain(embedding: nn.Embedding) -> bool:
    """Whether the forward is the lookup, or the lookup times a number or a tensor of the module."""
    if type(embedding).forward is nn.Embedding.forward:
        return embedding.max_norm is None
    traced = trace(embedding, Input((2, 3), torch.long))
    found = traced and match("embedding(WEIGHT, IDS, PADDING) * FACTOR", traced.result)
    if not traced or not found or found["IDS"] is not traced.inputs[0]:
        return False
    return isinstance(found["FACTOR"], int | float) or path_of(found["FACTOR"]) is not None


def _towers(model: Any) -> Iterator[str]:
    """The models inside a model that are not its language model: vision, audio."""
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
    if not getattr(model.config, "is_encoder_decoder", False):
        return []
    return [part for part in (model.get_encoder(), model.get_decoder()) if part is not model]


def _reads_tokens(model: Any) -> bool:
    """Whether the input of an encoder or a decoder are ids of tokens, not pictures or sounds."""
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (NotImplementedError, AttributeError):
        return False


def _drop_half_shared(together: Mapping[str, list[str]], found: Weights) -> None:
    """A weight that several modules share is quantised only if all of them are targets in the same format."""
    for names in together.values():
        formats = [found.targets[n].formats if n in found.targets else None for n in names]
        if any(f != formats[0] for f in formats):
            for name in names:
                if found.targets.pop(name, None) is not None:
                    other = next(n for n in names if n != name)
                    found.dense[name] = f"it shares its weight with {other}, which is not quantised alike"


def _sharing(model: nn.Module, targets: Mapping[str, Target]) -> list[list[str]]:
    """The names of modules that have the weight of a target in common."""
    parts = [target.module._parameters.get(p) for target in targets.values() for p in target.parameters]
    weights = {id(weight) for weight in parts if weight is not None}
    owners: dict[int, dict[str, None]] = defaultdict(dict)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if id(parameter) in weights:
                owners[id(parameter)][name] = None
    return [list(names) for names in owners.values() if len(names) > 1]


def _together(model: nn.Module, every: Mapping[str, Target]) -> dict[str, list[str]]:
    """{name: all names, in the model's order} of modules that share a weight, or that transformers ties."""
    names = {id(module): name for name, module in model.named_modules()}
    aliases = {alias: names[id(m)] for alias, m in model.named_modules(remove_duplicate=False)}
    groups: list[set[str]] = []
    pairs = [{aliases.get(n, n) for n in pair} for pair in tied_layers(model).items()]
    for new in [*map(set, _sharing(model, every)), *pairs]:
        new = new.union(*(group for group in groups if group & new))
        groups = [group for group in groups if not group & new] + [new]
    order = {name: place for place, name in enumerate(names.values())}
    ordered = [sorted(group, key=lambda name: order.get(name, -1)) for group in groups if len(group) > 1]
    return {name: group for group in ordered for name in group}


def shared_weights(model: nn.Module, targets: Mapping[str, Target]) -> dict[str, list[str]]:
    """{name: names of other targets} that have the same tensor as their weight."""
    groups = [[n for n in names if n in targets] for names in _sharing(model, targets)]
    return {name: [n for n in names if n != name] for names in groups for name in names}


def tie_quantized(model: nn.Module) -> None:
    """Makes transformers tie the tensors of quantised layers if it tied their weights."""
    for part in model.modules():
        for attribute in ("_tied_weights_keys", "all_tied_weights_keys"):
            tied = getattr(part, attribute, None)
            if isinstance(tied, Mapping):
                changed = dict(_tied_tensors(part, tied))
                if changed != tied:
                    setattr(part, attribute, changed)


def _tied_tensors(model: nn.Module, tied: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    everything = model.named_modules(remove_duplicate=False)
    # While a checkpoint is loaded, layers of torch have the tensors.
    layers = {f"{name}.weight": m for name, m in everything if getattr(m, "packed", None) is not None}
    for target, source in tied.items():
        if target in layers and source in layers:
            for part in TENSORS:
                if getattr(layers[source], part, None) is not None:
                    yield target.removesuffix("weight") + part, source.removesuffix("weight") + part
        else:
            yield target, source


def tied_layers(model: nn.Module) -> dict[str, str]:
    """{name: name} of the modules whose weight transformers ties: the first takes it from the second."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        target.removesuffix(".weight"): source.removesuffix(".weight")
        for target, source in tied.items()
        if target.endswith(".weight") and source.endswith(".weight")
    }


def tied_pairs(tied: Mapping[str, str]) -> list[tuple[str, str]]:
    """The names of modules that share a weight, in both orders, from `tied_layers` of the dense model."""
    return [both for pair in tied.items() for both in (pair, pair[::-1])]


_Targets = dict[str, Target]


def add_tied(pairs: Iterable[tuple[str, str]], every: _Targets, targets: _Targets) -> None:
    """Adds to `targets` those of `every` whose weight a checkpoint has under the other name of a pair."""
    for name, other in pairs:
        if other in targets and name in every and name not in targets:
            every[name].formats = dict(targets[other].formats)
            targets[name] = every[name]


def layer_of(module: str) -> str:
    """The layer that contains a module, or the module itself."""
    layer = _LAYER.match(module)
    return layer[1] if layer else module


def present(model: nn.Module, targets: Mapping[str, Target]) -> dict[str, Target]:
    """The targets that a model still has after parts of it were replaced."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: target for name, target in targets.items() if modules.get(name) is target.module}


# Routers


def routers_of(model: nn.Module) -> set[nn.Module]:
    """The linear layers that compute the ids of experts.

    They are in a part of the block that has an output for each expert, or one more for none.
    """
    result: set[nn.Module] = set()
    for name, experts in experts_of(model).items():
        block, _, last = name.rpartition(".")
        projection = projections(experts)[1]
        count = getattr(experts, f"{projection}_packed" if is_quantized(experts) else projection).shape[0]
        for child, part in model.get_submodule(block).named_children():
            linears = [module for module in part.modules() if isinstance(module, nn.Linear)]
            outputs = {linear.out_features for linear in linears}
            other = child == last or "attn" in child or "shared" in child  # which may be as wide
            if not other and outputs & {count, count + 1}:
                result.update(linears)
    for module in model.modules():  # experts that are modules of their own
        lists = [len(child) for child in module.children() if isinstance(child, nn.ModuleList)]
        result.update(c for c in module.children() if isinstance(c, nn.Linear) and c.out_features in lists)
    return result
