"""Arguments that belong together: a parameter that is a NamedTuple, an argument of the schema for each field.

    def mlp(x: Tensor, gate_up: Weight, *, norm: InputNorm, shared: Weight | None = None) -> Tensor

has the arguments x, gate_up_packed, gate_up_scales, gate_up_biases, norm_weight, norm_eps, ...
Fields keep their names; fields of a `prefixed` class follow the parameter's name. Defaults are the fields'. A
group that may be None has arguments that are None by default, and is None where all are.
"""

import inspect
import types
import typing
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

_EMPTY = inspect.Parameter.empty
_PREFIXED: set[type] = set()
Made = TypeVar("Made", bound=type)


def prefixed(group: Made) -> Made:
    """Marks a class whose arguments begin with the name of the parameter."""
    _PREFIXED.add(group)
    return group


class Group(NamedTuple):
    """Attributes:
    make: its `_make`, from values in the order of the fields.
    values: gives its fields' values, at least two, from all arguments by name.
    may_be_none: the function gets None where all arguments are.
    """

    make: Callable[[Any], Any]
    values: Callable[[dict[str, Any]], tuple[Any, ...]]
    may_be_none: bool


class Grouped:
    """A function's parameters, and the arguments that its groups consist of.

    Attributes:
        signature: of the arguments.
        alone: arguments that belong to no group.
    """

    def __init__(self, function: Callable):
        own = inspect.signature(function)
        self.groups: dict[str, Group] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += self._arguments(parameter)
        self.signature = own.replace(parameters=parameters)
        self.alone = [name for name in self.signature.parameters if name in own.parameters]

    def _arguments(self, parameter: inspect.Parameter) -> list[inspect.Parameter]:
        cases = typing.get_args(parameter.annotation) or (parameter.annotation,)
        make: Any = next((case for case in cases if hasattr(case, "_field_defaults")), None)
        if make is None:
            return [parameter]
        may_be_none = types.NoneType in cases
        prefix = f"{parameter.name}_" if make in _PREFIXED else ""
        names = tuple(f"{prefix}{field}" for field in make._fields)
        self.groups[parameter.name] = Group(make._make, itemgetter(*names), may_be_none)
        arguments = []
        for name, (field, kind) in zip(names, typing.get_type_hints(make).items(), strict=True):
            default = None if may_be_none else make._field_defaults.get(field, _EMPTY)
            annotation = kind | None if may_be_none else kind
            arguments.append(inspect.Parameter(name, parameter.kind, default=default, annotation=annotation))
        return arguments

    def gathered(self, given: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, with the arguments of groups."""
        if not self.groups:
            return given
        made = {name: given[name] for name in self.alone if name in given}
        for parameter, (make, values_of, may_be_none) in self.groups.items():
            values = values_of(given)
            is_none = may_be_none and all(value is None for value in values)
            made[parameter] = None if is_none else make(values)
        return made
