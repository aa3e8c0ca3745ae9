"""Declarations of an operator's tensors, one line each:

    topk_ids[..., K<=64]:id x[..., H]|[..., K, H] bias[E, N] gate[...]|[..., 1] -> [..., K, N]:x

Names in brackets are symbolic sizes: the first tensor binds a size, and all others must agree. `_` is any
size, `...` any leading dimensions, `...*K` the product of those and K, `|` separates alternative shapes.
After the colon is the dtype: a key of DTYPES, another argument's name, "any", or "ids_dtype", which that
argument says; without one it is one of the three activation dtypes. After the arrow are the results, by shape
and dtype or as the name of an argument. A result's size may also be an integer argument.

Except on mps, activations, masks and what is declared as float32 may be float64: references compute in it. If
the first tensor is, results that are declared as float32 are float64.
"""

import math
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from ._checks import ACTIVATION_DTYPES, ID_DTYPES, NAMED_DTYPES, PACKED_DTYPES, Check, is_of_shape

DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "": ACTIVATION_DTYPES,
    "id": (*ID_DTYPES.values(),),
    "number": (*ACTIVATION_DTYPES, *ID_DTYPES.values()),
    "mask": (torch.bool, *ACTIVATION_DTYPES, torch.int32),
    "packed": PACKED_DTYPES,
    "float32": (torch.float32,),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
}
WITH_DOUBLES = ("", "float32", "mask")  # keys of these that take float64, too
_TENSOR = re.compile(r"(\w*)((?:\|?\[[^\]]*\])*)(?::(\w+))?")
_BETWEEN = re.compile(r" (?![^\[]*\])")  # tensors
_SIZE = re.compile(r"([^<>]+)(?:([<>])=(\d+))?")


class Shape:
    """A symbolic shape."""

    def __init__(self, text: str):
        sizes = [_SIZE.fullmatch(size) for size in text.split(", ") if size]
        result = [size.groups() for size in sizes if size is not None]
        self.bounds = {name: (sign, int(bound)) for name, sign, bound in result if sign}
        names = [name for name, *_ in result]
        self.text = f"[{', '.join(names)}]"
        self.leads = names[:1] == ["..."]
        self.names = names[self.leads :]

    def fits(self, rank: int) -> bool:
        return rank >= len(self.names) if self.leads else rank == len(self.names)

    def numbers(self, sizes: dict[str, Any], shape: Sequence[int]) -> tuple[int, ...]:
        """Sizes of the symbolic names; unbound names are bound to those of `shape`."""
        split = len(shape) - len(self.names)
        leading = sizes.setdefault("...", tuple(shape[:split])) if self.leads else ()
        return (*leading, *map(lambda name, size: _size(name, sizes, size), self.names, shape[split:]))

    def result(self, sizes: dict[str, Any]) -> tuple[int, ...]:
        return (*(sizes["..."] if self.leads else ()), *(_size(name, sizes, None) for name in self.names))

    def check_bounds(self, check: Check, argument: str) -> None:
        for name, (sign, bound) in self.bounds.items():
            size = check.sizes[name]
            if not (size >= bound if sign == ">" else 1 <= size <= bound):
                allowed = f"at least {bound}" if sign == ">" else f"between 1 and {bound}"
                check.fail(argument, f"{self.text} with {name} {allowed}", f"{name} = {size}")


def _size(name: str, sizes: dict[str, Any], own: int | None) -> Any:
    if name.isdigit():
        return int(name)
    if "*" not in name:
        return own if name == "_" else sizes.setdefault(name, own)
    factors = [sizes.get(item) for item in name.split("*")]
    if None in factors:
        return own
    return math.prod(math.prod(each) if isinstance(each, tuple) else each for each in factors)


_CASE = r'((?:with|without|unless|beside) (\w+)(?:="(\w+)")?)'
_DEPENDENCE = re.compile(rf"([\w ]+) (only|not) {_CASE}(?: \((.+)\))?")


class Dependence:
    """A rule for optional arguments: required in one case only (`only`), or forbidden in it (`not`).

    Examples: 'gate only with norm_weight', 'g only unless decay="log"', 'mask not beside indices'. A text in
    brackets replaces the case in the error.
    """

    def __init__(self, text: str):
        match = _DEPENDENCE.fullmatch(text)
        assert match, text
        names, kind, case, self.other, self.value, text = match.groups()
        self.arguments, self.is_only, self.why = names.split(), kind == "only", text or case
        self.is_inverted = case.startswith(("without", "unless"))

    def applies(self, given: dict[str, Any]) -> bool:
        other = given[self.other]
        holds = other == self.value if self.value else other is not None and other is not False
        return holds != self.is_inverted

    def check(self, check: Check, given: dict[str, Any]) -> None:
        asked = {name: given[name] for name in self.arguments}
        (check.only if self.is_only else check.none)(self.why, self.applies(given), **asked)


class Declared:
    """A parsed declaration, and the allowed values of other arguments.

    Attributes:
        line, texts: the declaration and the dependences, as they were written.
        tensors: (argument, shapes, dtype) of each.
        results: (argument or "", shapes, dtype) of each; None if the line says nothing of results.
        allowed: of other arguments: names, a range of integers, or the least number.
        dependences: of arguments on others.
    """

    def __init__(self, line: str, allowed: dict[str, Any], dependences: Sequence[str] = ()):
        self.line, self.texts = line, dependences
        arguments, arrow, results = line.partition("->")
        self.tensors = tensors_in(arguments)
        self.results = tensors_in(results) if arrow else None
        self.allowed = allowed
        self.dependences = [Dependence(text) for text in dependences]

    def of(self, arguments: Container[str]) -> "Declared":
        """The declaration of an operator that has these of the arguments."""
        texts, arrow, results = self.line.partition(" ->")
        tensors = [text for text in _BETWEEN.split(texts) if re.split(r"\W", text)[0] in arguments]
        allowed = {name: what for name, what in self.allowed.items() if name in arguments}
        rules = [
            text
            for text, rule in zip(self.texts, self.dependences, strict=True)
            if rule.other in arguments and any(name in arguments for name in rule.arguments)
        ]
        return Declared(" ".join(tensors) + arrow + results, allowed, rules)

    def check(self, check: Check, given: dict[str, Any]) -> None:
        """Refuses arguments whose dtype, shape, value or combination is not the declared one."""
        self._check_tensors(check, given)
        self._check_values(check, given)
        for dependence in self.dependences:
            dependence.check(check, given)

    def _check_tensors(self, check: Check, given: dict[str, Any]) -> None:
        for argument, shapes, kind in self.tensors:
            tensor = given[argument]
            if tensor is None:
                continue
            if kind != "any" and not (kind in WITH_DOUBLES and _is_double(tensor)):
                check.dtype(argument, tensor, _dtypes(kind, given))
            if shapes:
                _check_shape(check, argument, tensor, shapes)

    def _check_values(self, check: Check, given: dict[str, Any]) -> None:
        doubles = any(_is_double(given[argument]) for argument, *_ in self.tensors)
        names = [name for name, dtype in NAMED_DTYPES.items() if doubles or dtype in ACTIVATION_DTYPES]
        for argument, allowed in ({"dtype": names} | self.allowed).items():
            value = given.get(argument)
            if value is None:
                continue
            if isinstance(allowed, range):
                check.between(argument, value, allowed[0], allowed[-1])
            elif isinstance(value, str):
                check.choice(argument, value, allowed)
            elif value < allowed:
                check.fail(argument, f"at least {allowed}", value)

    def sizes_of(self, given: dict[str, Any]) -> dict[str, Any]:
        """{symbolic name: size} bound by the tensors among some arguments."""
        sizes: dict[str, Any] = {}
        for argument, shapes, _ in self.tensors:
            tensor: Any = given.get(argument)
            for shape in shapes if tensor is not None else ():
                learnt = dict(sizes)
                if shape.fits(tensor.dim()) and is_of_shape(tensor, shape.numbers(learnt, tensor.shape)):
                    sizes = learnt
                    break
        return sizes

    def completed(
        self,
        given: dict[str, Any],
        wanted: Sequence[str],
        make: Callable[[str, tuple[int, ...], torch.dtype | None], Tensor],
        sizes: dict[str, Any],
    ) -> dict[str, Any]:
        """Arguments `given`, completed by those `wanted` that are declared.

        `make` gets an argument, a shape, the first that it may have, and a dtype, None for any of the three
        of activations. Sizes that no argument has come from `sizes`.
        """
        made, known = dict(given), sizes | self.sizes_of(given)
        for argument, shapes, kind in self.tensors:
            if argument in wanted and argument not in given:
                known_kind = made.get(kind) is not None or (kind != "" and kind in DTYPES)
                dtype = _dtypes(kind, made)[0] if known_kind else None
                made[argument] = make(argument, shapes[0].result(known), dtype)
        return made

    def misfits(self, base: dict[str, Any], changes: dict[str, Any]) -> list[str]:
        """Tensors of valid arguments that no longer match after changes to others."""
        known, names = self.sizes_of(changes), []
        for argument, shapes, _ in self.tensors:
            tensor = base.get(argument)
            if tensor is None or argument in changes or not shapes:
                continue
            fitting = [shape for shape in shapes if shape.fits(tensor.dim())]
            if not any(is_of_shape(tensor, shape.numbers(dict(known), tensor.shape)) for shape in fitting):
                names.append(argument)
        return names

    def outputs(self, check: Check, given: dict[str, Any]) -> Any:
        first, sizes = given[self.tensors[0][0]], {**given, **check.sizes}
        made = []
        for name, shapes, kind in self.results or ():
            if name:
                made.append(given[name].new_empty(given[name].shape))
                continue
            dtype = first.dtype if kind == "float32" and _is_double(first) else _dtypes(kind, given)[0]
            made.append(first.new_empty(shapes[0].result(sizes), dtype=dtype))
        return made[0] if len(made) == 1 else tuple(made) or None


def tensors_in(line: str) -> list[tuple[str, list[Shape], str]]:
    result = [_TENSOR.fullmatch(text) for text in _BETWEEN.split(line.strip()) if text]
    assert all(result), line
    return [
        (name, [Shape(text) for text in re.findall(r"\[(.*?)\]", shapes)], kind or "")
        for name, shapes, kind in (item.groups() for item in result if item is not None)
    ]


def _is_double(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype == torch.float64 and tensor.device.type != "mps"


def _dtypes(kind: str, given: dict[str, Any]) -> tuple[torch.dtype, ...]:
    if kind in DTYPES:
        return DTYPES[kind]
    if kind == "ids_dtype":
        return (ID_DTYPES[given[kind]],)
    return ACTIVATION_DTYPES if given[kind] is None else (given[kind].dtype,)


def _check_shape(check: Check, argument: str, tensor: Tensor, shapes: list[Shape]) -> None:
    """Binds the sizes of a tensor to the first shape that fits.

    Raises: ValueError that names the shapes which the argument may have.
    """
    wanted = []
    for shape in shapes:
        if not shape.fits(tensor.dim()):
            continue
        sizes = dict(check.sizes)
        numbers = shape.numbers(sizes, tensor.shape)
        if is_of_shape(tensor, numbers):
            check.sizes = sizes
            return shape.check_bounds(check, argument)
        wanted.append(f"{shape.text} = {numbers}")
    if wanted:
        check.fail(argument, f"of shape {' or '.join(wanted)}", tuple(tensor.shape))
    ranks = dict.fromkeys(f"{'at least ' * shape.leads}{len(shape.names)}-D" for shape in shapes)
    check.fail(argument, " or ".join(ranks), f"{tensor.dim()}-D of shape {tuple(tensor.shape)}")
