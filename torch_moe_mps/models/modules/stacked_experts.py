"""Experts without transformers' interface: stacks of matrices, recognised by what their forward computes.

A trial runs the module's own code on a small replica: sizes that are equal stay equal, all others are apart.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops._activations import POINTWISE, SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT, Activation
from ..basics.experts import Experts, Method, Shapes, recognised
from ..basics.interface import KIND, forget, get_experts, recognised_code
from ..basics.stacks import Stack
from ..basics.state import Unsupported, original_class, restore_class, subclass
from ..trials.comparing import agrees, tried
from ..trials.draws import eager, normal
from ..trials.forms import first_form
from ..trials.replicas import bare_replica, random_parameter
from .experts import REFUSED, experts_forward, rows_forward
from .linears import QuantizedLinear

_TOKENS, _TOP_K = 6, 2
_SHAPE = 2, 3  # the same tokens in sequences
_BEYOND = 2, 1, 0  # how many ids beyond the experts a forward may take
_MOST_NUMBERS = 8
# Sizes of a replica: experts, further rows of the first stack, hidden and intermediate sizes.
_SMALL = (3, 4, 5, 6, 8), (0, 1, 2, 3), (8, 6, 10, 12, 16, 20), (6, 8, 10, 12, 16, 20, 3, 4, 5)
FIRST, SECOND = ("gate_up_proj", "up_proj"), "down_proj"


class Sizes(NamedTuple):
    """Sizes of stacks: experts, more matrices of the first stack, hidden, intermediate, halves of gates.

    A flat stack has the matrices of experts one below the other.
    """

    experts: int
    others: int
    hidden: int
    inner: int
    halves: int
    is_flat: bool = False

    def numbers(self) -> tuple[int, ...]:
        """All sizes that a forward or a shape may have."""
        experts, others, hidden, inner, halves, is_flat = self
        further = [others] * bool(others) + [experts * inner] * is_flat
        return experts, experts + others, hidden, inner, halves * inner, *further


def recognise_stacks(module: nn.Module) -> Experts | None:
    """Experts of a module with two stacks of matrices; None for any other module.

    Raises: Unsupported with the reason if no operator computes the same.
    """
    if (known := recognised_code(module)) is not None and known.is_of_family:
        return None
    shapes = dense_shapes(module)
    if sum(len(shape) == 3 and min(shape) > 1 for _, shape in shapes) < 2:  # RWKV's factors are of [1, 1, H]
        return None
    first, takes_rows = _first_stack(shapes), _takes_rows(module)
    layouts = [
        (transposed, sizes) for transposed in (False, True) if (sizes := sizes_of(shapes, first, transposed))
    ]
    if not layouts:
        raise Unsupported("the shapes of its stacks do not follow each other")
    forms = [
        recognised(activation, _stacks(first, transposed), sizes.experts, shapes, has_identity, takes_rows)
        for has_identity in ((False,) if takes_rows else (False, True))
        for transposed, sizes in layouts
        for activation in (*_activations(module, first == FIRST[0]), *own_activation(module))
    ]
    form: Experts | None = first_form(module, forms, _begin, layouts[0][1], takes_rows)
    if form is None:
        raise Unsupported("its forward is none of the operators' forms of experts")
    return form


def _first_stack(shapes: Shapes) -> str:
    """The name of the first of two stacks. Raises: Unsupported for other names than transformers has."""
    first = next((name for name in FIRST if name in dict(shapes)), None)
    if first is None or SECOND not in dict(shapes):
        raise Unsupported(f"its stacks of matrices are called {', '.join(name for name, _ in shapes)}")
    return first


def _takes_rows(module: nn.Module) -> bool:
    """True for a forward of rows, False for one of rows, ids and weights. Raises: Unsupported for another."""
    inputs = _inputs(original_class(module).forward)
    if len(inputs) not in (1, 3):
        raise Unsupported(f"its forward takes {', '.join(inputs)}, not rows, ids and weights")
    return len(inputs) == 1


def _stacks(first: str, is_transposed: bool) -> tuple[tuple[str, Stack], ...]:
    return tuple((name, Stack((name,), is_transposed=is_transposed)) for name in (first, SECOND))


def own_activation(module: nn.Module) -> tuple[None, ...]:
    """None in place of an activation, to be tried last, for experts that are known: any of their own."""
    return () if recognised_code(module) is None else (None,)


def _inputs(forward: Callable) -> list[str]:
    """The names of a forward's arguments."""
    return [*inspect.signature(forward).parameters][1:]


def dense_shapes(module: nn.Module) -> Shapes:
    """Paths and shapes of a module's parameters; of recognised experts as their own code reads them."""
    if (known := recognised_code(module)) is not None:
        return known.shapes
    return tuple((name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None)


def sizes_of(shapes: Shapes, first: str, is_transposed: bool) -> Sizes | None:
    """The sizes of two stacks, if their shapes fit."""
    one, other = dict(shapes)[first], dict(shapes)[SECOND]
    if len(one) != 3 or len(other) != 3:
        return None
    experts, hidden, inner = (other[0], *(other[:0:-1] if is_transposed else other[1:]))
    halves = 2 if first == FIRST[0] else 1
    rows = (halves * inner, hidden)
    fits = one[1:] == (rows[::-1] if is_transposed else rows) and one[0] >= experts
    return Sizes(experts, one[0] - experts, hidden, inner, halves) if fits else None


def _activations(module: nn.Module, is_gated: bool) -> Iterator[Activation]:
    """Activations to try: those with limits have numbers that the module has."""
    numbers = [value for value in vars(module).values() if type(value) in (int, float)]
    numbers = [float(value) for value in dict.fromkeys(numbers) if value > 0 and math.isfinite(value)]
    numbers = numbers[:_MOST_NUMBERS]
    for interleaved in (False, True) if is_gated else (False,):
        for name in POINTWISE:
            yield Activation(name, gated=is_gated, interleaved=interleaved)
        if is_gated:
            for name, limit in itertools.product(("silu_clamped", "silu_capped"), numbers):
                yield Activation(name, limit=limit, interleaved=interleaved)
            pairs = itertools.product({*numbers, SWIGLU_OAI_ALPHA}, {*numbers, SWIGLU_OAI_LIMIT})
            for alpha, limit in sorted(pairs):
                yield Activation("swiglu_oai", alpha, limit, interleaved=interleaved)


# --- the trial


def _begin(module: nn.Module, sizes: Sizes, takes_rows: bool) -> Callable[[Experts], bool] | None:
    """Runs a small replica's own code. Returns: form -> whether it gives the same."""
    small, smaller = small_sizes(sizes)
    replica = small_replica(module, smaller)
    if takes_rows:
        rows = normal(small.experts * _TOKENS, small.hidden)
        ids, weights = torch.arange(small.experts).repeat_interleave(_TOKENS), torch.ones(len(rows), 1)
        expected = eager(replica)(rows)
        return functools.partial(_agrees, replica, small.experts, rows, ids[:, None], weights, expected)
    x, weights = normal(_TOKENS, small.hidden), normal(_TOKENS, _TOP_K)
    for beyond in _BEYOND:
        count = small.experts + small.others + beyond
        chosen = torch.randperm(count)[: max(_TOP_K, count - 1)]  # one is of no token
        ids = torch.stack([chosen[torch.randperm(len(chosen))[:_TOP_K]] for _ in range(_TOKENS)])
        if (expected := tried(eager(replica), x, ids, weights)) is not None:
            return functools.partial(_agrees, replica, small.experts, x, ids, weights, expected)
    return None


def _agrees(
    replica: nn.Module,
    number: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expected: Tensor,
    form: Experts,
) -> bool:
    return agrees(tried_form(form._replace(number=number), replica, x, ids, weights), expected)


def tried_form(form: Experts, replica: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[T, H] -> [T, H]: the weighted sum of a replica's experts, by a form with as many experts."""
    return form.combine(replica, x, ids, weights, tuple(form.activation or ()))


def beside_replica(
    module: nn.Module,
    sizes: Sizes,
    ours: Callable[..., Any],
    experts: int = 0,
    inputs: Callable[[Any, Sizes], tuple[Tensor, ...]] = lambda _, small: (normal(*_SHAPE, small.hidden),),
    own: Callable[..., Any] = lambda replica, *given: eager(replica)(*given),
) -> Callable[[Any], bool]:
    """Runs a small replica's own code. Returns: form -> whether the operators give the same.

    Args:
        ours: (form, replica, *inputs) -> the result of the operators.
        experts: how many a replica has at least.
        inputs: (replica, its sizes) -> random inputs; hidden states without.
        own: (replica, *inputs) -> the result of the own code; its forward's without.
    """
    small, smaller = small_sizes(sizes, experts)
    replica = small_replica(module, smaller)
    given = inputs(replica, small)
    expected = own(replica, *(each.clone() for each in given))
    return lambda form: agrees(ours(form, replica, *given), expected)


def small_sizes(sizes: Sizes, experts: int = 0) -> tuple[Sizes, dict[int, int]]:
    """Small sizes, at least so many experts, and {size: small one}: equal where a module's are equal.

    Raises: Unsupported for none.
    """
    numbers = sizes.numbers()
    for candidate in itertools.product(*_SMALL):
        small = Sizes(*candidate, sizes.halves, sizes.is_flat)
        if bool(small.others) != bool(sizes.others) or small.experts < experts:
            continue
        pairs = {*zip(numbers, small.numbers(), strict=True)}
        if len(pairs) == len({*numbers}) == len({*small.numbers()}):
            return small, dict(pairs)
    raise Unsupported("there is no small module with sizes like its own")


def small_replica(module: nn.Module, smaller: dict[int, int]) -> Any:
    """A module of the same class with smaller sizes: random parameters, numbers that are sizes replaced."""
    replica = bare_replica(module)
    restore_class(replica, KIND)
    for name, value in vars(replica).items():
        if type(value) is int and value in smaller:
            vars(replica)[name] = smaller[value]
    for name, parameter in module._parameters.items():
        if parameter is None:
            replica.register_parameter(name, None)
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _small_child(child, smaller)
    for path, shape in dense_shapes(module):
        owner, _, name = path.rpartition(".")
        parameter = random_parameter([smaller.get(size, size) for size in shape])
        replica.get_submodule(owner).register_parameter(name, parameter)
    return replica


def shapes_below(module: nn.Module, paths: Iterable[str]) -> Shapes | None:
    """(path, shape) of dense parameters below a module; None if one is missing."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    shapes |= dict(dense_shapes(module))
    return tuple((path, shapes[path]) for path in paths) if shapes.keys() >= {*paths} else None


def _small_child(child: nn.Module, smaller: dict[int, int]) -> nn.Module:
    if type(child) is not QuantizedLinear:
        return small_replica(child, smaller)
    columns, rows = (smaller.get(size, size) for size in (child.in_features, child.out_features))
    result = nn.Linear(columns, rows, bias=child.bias is not None)
    for name, parameter in [*result._parameters.items()]:
        result._parameters[name] = None if parameter is None else random_parameter(parameter.shape)
    return result


# --- the class


def run_operators(module: nn.Module) -> bool:
    """Makes recognised experts run the operators, as those with transformers' interface do.

    Returns: False for experts with that interface, whose config names the implementation that runs.
    """
    known = recognised_code(module)
    if known is not None:
        restore_class(module, KIND)
        cls: Any = type(module)
        module.__class__ = _class_with_operators(cls, known.methods)
    return known is not None


def restore_experts(module: nn.Module) -> None:
    """Makes recognised experts run eager code again, if it reads their weights, and forgets them."""
    if recognised_code(module) is not None and get_experts(module).can_run_eager:
        restore_class(module, KIND)
        forget(module)


@functools.cache
def _class_with_operators(
    original: type[nn.Module], methods: tuple[tuple[str, Method], ...] = ()
) -> type[nn.Module]:
    """The subclass of a class of experts that runs the operators: in its forward, or in these methods."""
    makers = dict(methods) or {"forward": _forward}
    members = {name: _method(original, name, make(getattr(original, name))) for name, make in makers.items()}
    again = functools.partial(_class_with_operators, methods=methods)
    return subclass(original, KIND, again, **members)


def _method(original: type[nn.Module], name: str, ours: Callable) -> Callable:
    """A method that runs `ours`, and whatever its class has in its place once somebody has patched that."""
    own = getattr(original, name)

    @functools.wraps(own)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (now := getattr(original, name)) is own:
            return ours(self, *args, **kwargs)
        if not get_experts(self).can_run_eager:
            raise ValueError(f"{REFUSED.format(type(self).__name__)}, got another {name} of its class")
        return now(self, *args, **kwargs)

    return method


def _forward(own: Callable) -> Callable:
    """The forward of experts whose class has one of rows, or of rows, ids and weights."""
    names = _inputs(own)
    ours: Callable = rows_forward if len(names) == 1 else experts_forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        return ours(self, *(given[name] for name in names))

    return forward
