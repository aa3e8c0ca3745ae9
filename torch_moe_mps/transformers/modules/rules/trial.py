"""Helpers to recognise functions and modules by running them on random numbers."""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...._faults import raise_fault
from ...basics.bounded import Bounded
from ...basics.reads import depends_on
from ...basics.report import Done
from ...basics.state import STATE, original_class
from ...caches.held import HeldPools
from ...caches.in_layers import InLayers
from ...upstream.caches import LinearAttentionLayer


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Tensors made without a device are on the CPU, where the generators of random ones are."""
    is_default = torch.get_default_device().type == "cpu"  # else a mode is asked in each call of torch
    with contextlib.nullcontext() if is_default else torch.device("cpu"):
        yield


def tried(function: Callable, *arguments: Any, **options: Any) -> Any:
    """The result of a function of the model; None if it raises, as for arguments that it does not know.

    Its random numbers are the same each time.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # not those of devices, whose state would stay
            return function(*arguments, **options)
    except torch.AcceleratorError:  # the GPU has failed
        raise
    except Exception:  # it is not ours: any error may come of it
        return None


class LinearCache(InLayers):
    """A cache of one layer, with so many states of each kind, for linear attention of any model."""

    def __init__(self, states: int = 1) -> None:
        super().__init__()
        self.layers = [LinearAttentionLayer(states)]

    def states(self) -> list[Tensor]:
        (layer,) = self.layers
        result = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return [state for state in result if state is not None]


_verdicts = Bounded(256)  # {what modules have in common: what a trial gave, in a tuple}
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_DIRECTIONS = 4  # so that queries and keys differ in more than their length
LEAST_HEADS = 2  # enough to tell an indexer's relu from nothing: one head's keys come in the same order
_OF_MODULES = {*vars(nn.Module()), STATE}
_OF_NO_FORWARD = {"layer_idx", "_is_hf_initialized"}  # modules that compute the same may differ in these


def verdict(module: nn.Module, function: Callable, *arguments: Any, apart: Sequence[str] = ()) -> Any:
    """Result of `tried` for function(module, *arguments), once for all modules that are alike.

    The module's forward then rests on what they have in common, but for the attributes `apart`.
    """
    key = function, arguments, _common(module, apart)
    result = _verdicts.get(key)
    if result is None:
        result = (tried(function, module, *arguments),)
        raise_fault()
        _verdicts[key] = result
    for part in module.modules():
        numbers = () if hasattr(part, "out_features") else _attributes(part)
        plain = (name for name, value in numbers if isinstance(value, (*_PLAIN, tuple)))
        for name in (*(name for name in plain if name not in apart), *part._modules):
            depends_on(part, name)
    return result[0]


class Forms(NamedTuple):
    """Forms in which a module may compute.

    Attributes:
        forms: in the order in which they are tried.
        holds: form -> whether the module computes so.
    """

    forms: Iterable[Any]
    holds: Callable[[Any], bool]


def first_form(module: nn.Module, make: Callable[..., Forms], *arguments: Any) -> Any:
    """The first of make(module, *arguments) that holds, or None: tried once for modules that are alike."""
    return verdict(module, _first_form, make, *arguments)


def _first_form(module: nn.Module, make: Callable[..., Forms], *arguments: Any) -> Any:
    made = make(module, *arguments)
    return next((form for form in made.forms if tried(made.holds, form)), None)


@dataclass(frozen=True)
class Tried:
    """A rule for modules that a trial recognises.

    Attributes:
        may_be: module -> whether it has what `forward` reads.
        forward: runs in place of the module's own.
        trial: (module, forward) -> whether both give the same.
        operators: that `forward` runs.
        apart: attributes in which modules that compute the same may differ.
    """

    may_be: Callable[[nn.Module], bool]
    forward: Callable
    trial: Callable[[Any, Callable], bool]
    operators: tuple[Done, ...]
    apart: tuple[str, ...] = ()

    def __call__(self, module: nn.Module) -> tuple[Callable, list[Done]] | None:
        """(forward, what it runs), or None."""
        return (self.forward, [*self.operators]) if self.matches(module) else None

    def matches(self, module: nn.Module) -> bool:
        return self.may_be(module) and bool(verdict(module, self.trial, self.forward, apart=self.apart))


def made_alike(module: nn.Module, usual: nn.Module) -> bool:
    """Whether a module has the classes and attributes of another one; its linear layers may be any."""
    own, others = (dict(item.named_modules()) for item in (module, usual))
    if own.keys() != others.keys():
        return False
    for path, other in others.items():
        held = dict(_attributes(own[path]))
        same = all(_described(held.get(name)) == _described(value) for name, value in _attributes(other))
        if not hasattr(other, "out_features") and not (
            same and original_class(own[path]) is original_class(other)
        ):
            return False
    return True


def _common(module: nn.Module, apart: Sequence[str] = ()) -> tuple:
    """Key of modules whose forwards compute the same: classes, shapes and other attributes of all parts."""
    return tuple(
        (
            path,
            original_class(part),
            original_class(part).forward,
            *((name, _described(value)) for name, value in _attributes(part) if name not in apart),
            *((name, _described(value)) for name, value in (part._parameters | part._buffers).items()),
        )
        for path, part in module.named_modules()
    )


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module itself that its forward may rest on, in order."""
    return sorted(var for var in vars(module).items() if var[0] not in _OF_MODULES | _OF_NO_FORWARD)


def _described(value: Any, is_inside: bool = False) -> Any:
    """A value that is equal for equal attributes; of an object, as a config, its own plain ones count."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, tuple | list | dict):
        values = value.items() if isinstance(value, dict) else value
        return type(value), *(_described(item, is_inside) for item in values)
    if isinstance(value, _PLAIN):
        return type(value), value
    if callable(value) and isinstance(value, Hashable):  # functions and classes
        return value
    own = () if is_inside else sorted(vars(value).items()) if hasattr(value, "__dict__") else ()
    return type(value), *((name, _described(item, True)) for name, item in own)


def bare_twin(module: nn.Module) -> Any:
    """A module of the same class with the same attributes, without parameters, buffers and children.

    `copy.copy` would rewrite the copy of a rewritten module, and both would share one state.
    """
    cls: Any = original_class(module)
    twin = cls.__new__(cls)
    nn.Module.__init__(twin)
    vars(twin).update({name: value for name, value in vars(module).items() if name not in _OF_MODULES})
    return twin.eval()


def width_of(twin: nn.Module, run: Callable[[Tensor], Any]) -> int:
    """Elements of a token that a module takes: the first width of its layers with which it runs.

    Args:
        run: calls it with [1, 1, width].
    """
    widths = [getattr(part, name, 0) for name in ("in_features", "in_channels") for part in twin.modules()]
    runs = (width for width in widths if width and tried(run, torch.zeros(1, 1, width)) is not None)
    return next(runs)


class FewDirections(nn.Module):
    """A linear layer of the same sizes whose output depends on few directions of its input."""

    def __init__(self, layer: Any):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.directions = torch.randn(layer.in_features, _DIRECTIONS) * layer.in_features**-0.5
        self.rows = torch.randn(_DIRECTIONS, layer.out_features)
        self.bias = None if layer.bias is None else torch.randn(layer.out_features)

    @property
    def weight(self) -> Tensor:
        return (self.directions @ self.rows).T

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.directions @ self.rows
        return out if self.bias is None else out + self.bias


def twin_of(module: Any, **attributes: Any) -> Any:
    """A module of the same class on the CPU: random parameters, the same buffers, other attributes."""
    if hasattr(module, "out_features"):
        return FewDirections(module)
    twin = bare_twin(module)
    for name, parameter in module._parameters.items():
        twin.register_parameter(name, None if parameter is None else _random(parameter.shape))
    for name, buffer in module._buffers.items():
        value = None if buffer is None else buffer.detach().cpu()
        twin.register_buffer(
            name, value.float() if value is not None and value.is_floating_point() else value
        )
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else twin_of(child)
    vars(twin).update(attributes)
    return twin


def _random(shape: Sequence[int]) -> nn.Parameter:
    """About 1 for rows; of matrices so that products have the size of what they multiply."""
    values = torch.rand(shape) + 0.25 if len(shape) < 2 else torch.randn(shape) * shape[-1] ** -0.5
    return nn.Parameter(values, requires_grad=False)


def agrees(a: object, b: object, rtol: float = 1e-5) -> bool:
    """Whether two results are tensors that are equal up to rounding, or as many of them; None is in both.

    Sums round as their largest parts do, so what is near 0 may differ by as much of the largest value.
    """
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(
            x is y is None or agrees(x, y, rtol) for x, y in zip(a, b, strict=True)
        )
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    if a.shape != b.shape or a.dtype != b.dtype or not b.is_floating_point():
        return False
    values = b[b.isfinite()].abs()
    largest = max(1.0, values.max().item()) if values.numel() else 1.0
    return torch.allclose(a, b, rtol, 1e-5 * largest)


def has_parts(module: nn.Module, layers: Iterable[str], numbers: Iterable[str]) -> bool:
    """Whether a module has layers and numbers of these names."""
    own = all(isinstance(module._modules.get(name), nn.Module) for name in layers)
    return own and all(isinstance(getattr(module, name, None), int | float) for name in numbers)


def numbers(*shape: int) -> Tensor:
    """Random ones about 0, the same for each shape."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.5


def untied(q: Tensor, k: Tensor) -> Tensor:
    """[B, T]: for which tokens at most one key has no head with a score above zero.

    relu leaves of others the score 0, and which of equal scores comes first is open.

    Args:
        q: [B, T, H, D].
        k: [B, S, D].
    """
    scores = torch.einsum("bthd,bsd->bths", q, k).relu().sum(2)
    return (scores == 0).sum(-1) < 2


class HeldKeys(HeldPools):
    """A cache of one layer that is its own layer: it holds an indexer's keys and has no room for more."""

    def __init__(self, keys: Tensor, layer_idx: int = 0):
        self.keys, self.layers = keys, {layer_idx: self}

    @property
    def indexer_keys(self) -> Tensor:
        return self.keys

    def get_seq_length(self) -> int:
        return self.keys.shape[-2]

    def update_indexer(self, keys: Tensor, layer_idx: int = 0) -> Tensor:
        self.keys = torch.cat((self.keys, keys), -2)
        return self.keys

    def index_slots(self, new: Tensor) -> None:
        return None

    def pools_of(self, count: int, rate: int, pool: Callable[[int, int], Tensor]) -> Tensor:
        return pool(0, count)

    indexed = get_seq_length
