"""Bad arguments: one line that names operator, argument, what was expected and what came."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support.any_calls import Call, Expanded, check_values, outcome
from support.ops import FLOATS, family
from torch import Tensor

from torch_moe_mps.ops import OPERATORS, PUBLIC
from torch_moe_mps.ops._declared import Declared
from torch_moe_mps.ops._registry import DECLARED
from torch_moe_mps.ops._samples import more_samples, packet, sample_arguments

# Of an argument that does not follow another one; the last two are of pointwise and of masks.
ALLOWED = [FLOATS, "int32 or int64", "uint32 or int32"]
ALLOWED += [f"{FLOATS} or int32 or int64", f"bool or {FLOATS} or int32"]


def invalid_arguments(device: str) -> list[tuple[str, str, dict]]:
    """(operator, message, wrong arguments)."""

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    tables = {name: getattr(family(name), f"invalid_{name}", None) for name in OPERATORS}
    return [(name, *case) for name, table in tables.items() if table for case in table(zeros)]


def words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def descriptions(value) -> list[str]:
    """What a message may say of an argument."""
    if not isinstance(value, Tensor):
        return [repr(value)]
    shape = str(tuple(value.shape))
    return [
        words(value.dtype),
        shape,
        f"shape {shape}",
        f"{value.dim()}-D of shape {shape}",
        f"strides {value.stride()}",
    ]


def test_messages(device):
    """On the device and on meta: one line that names the operator and the argument."""
    for where in (device, "meta"):
        good = {name: sample_arguments(name, where, torch.float32) for name in OPERATORS}
        for name, message, changes in invalid_arguments(where):
            with pytest.raises(ValueError) as error:
                packet(name)(**(good[name] | changes))
            whole = f"moe_mps::{name}: {message}"
            got = [text for value in changes.values() for text in descriptions(value)]
            expected = [whole] if ", got " in message else [f"{whole}, got {text}" for text in got]
            assert str(error.value) in expected


class Refusal(NamedTuple):
    """What the message of an error says."""

    argument: str
    expected: str
    got: str


def refusal(name: str, arguments: dict[str, Any], device: str = "cpu", **layouts: Any) -> Refusal | None:
    """On meta, in one line; on the device the values of what is taken are right."""
    contiguous = {n: "contiguous" for n, value in arguments.items() if isinstance(value, Tensor)}
    call = Call(name, arguments, contiguous | layouts, good=False)
    error = outcome(call, "meta").error
    if error is None:
        check_values(call, outcome(call, device))
        return None
    parts = re.fullmatch(rf"ValueError: moe_mps::{name}: (\w+)[^:]* must be (.*), got (.*)", error)
    assert parts, error
    return Refusal(*parts.groups())


def of_other_shapes(value: Tensor) -> list[Tensor]:
    """With a dimension more, with one less, with none; each dimension longer, shorter and empty."""
    shapes = [(1, *value.shape), value.shape[1:], ()]
    for dim, size in enumerate(value.shape):
        sizes = {size + 1, abs(size - 1), 0} - {size}
        shapes += [(*value.shape[:dim], other, *value.shape[dim + 1 :]) for other in sizes]
    return [value.new_zeros(shape) for shape in shapes]


def tensors_of(name: str) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Each tensor of good arguments, by name, and all of them."""
    base = sample_arguments(name, "cpu", torch.float32)
    for changes in ({}, *more_samples(name, "cpu", torch.float32)):
        for argument, value in (changes or base).items():
            if isinstance(value, Tensor):
                yield base | changes, argument, value


@pytest.mark.on("mps")
@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_of_other_dtypes(device, name):
    """The message has those that an argument may be of; they are taken, or another tensor has to follow."""
    kinds = {(argument, value.dtype): (good, value) for good, argument, value in tensors_of(name)}
    for (argument, _), (good, value) in kinds.items():
        _, allowed, _ = refusal(name, good | {argument: value.to(torch.complex64)}, device)
        assert words(value.dtype) in allowed.split(" or ")
        assert allowed in (*ALLOWED, words(value.dtype))
        for dtype in {torch.float32, torch.bfloat16, torch.int16, torch.int32, torch.uint8} - {value.dtype}:
            found = refusal(name, good | {argument: value.to(dtype)}, device)
            if words(dtype) not in allowed.split(" or "):
                assert found == (argument, allowed, words(dtype))
            elif found and "of shape" not in found.expected:
                assert found.argument != argument and found[1:] == (words(dtype), words(value.dtype))


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_of_other_shapes(name):
    """The message names the tensor, or another one that it does not go with, and has that one's shape."""
    for good, argument, value in tensors_of(name):
        for bad in (None, *of_other_shapes(value)):
            arguments = {**good, argument: bad}
            found = refusal(name, arguments)
            if found and ("-D" in found.expected or " = (" in found.expected):
                assert found.got in descriptions(arguments[found.argument])
                assert found.got not in found.expected


@pytest.mark.parametrize("name", OPERATORS)
def test_other_numbers_names_and_strides(name):
    """No number is NaN or out of float32's range; each name stands in the message; no result is expanded."""
    good = sample_arguments(name, "cpu", torch.float32)
    for argument in packet(name).default._schema.arguments:
        kind, value = str(argument.type).removeprefix("Optional[").rstrip("]"), good.get(argument.name)
        for number in (float("nan"), 1e39) if kind == "float" else ():
            found = refusal(name, good | {argument.name: number})
            assert found == (argument.name, "a number in the range of float32", str(number))
        if kind == "str":
            found = refusal(name, good | {argument.name: "other"})
            assert found.argument == argument.name and found.got == "'other'"
            for choice in re.findall(r"\w+", found.expected.partition("one of ")[2]):
                taken = refusal(name, good | {argument.name: choice})
                assert taken is None or taken.expected != found.expected
        for dim in range(value.dim()) if value is not None and argument.name.endswith("_") else ():
            found = refusal(name, good, **{argument.name: Expanded(dim)})
            assert found.argument == argument.name and "expanded (stride-0)" in found.expected


def present(argument: str, kind: str, good: dict[str, Any], declared: Declared) -> Any:
    """A value of an argument, of the shape and dtype that the others ask for."""

    def make(_: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return torch.zeros([1 if size is None else size for size in shape], dtype=dtype or torch.float32)

    if "Tensor" not in kind:
        return next(iter(declared.allowed[argument])) if "str" in kind else 1
    others = {name: value for name, value in good.items() if name != argument}
    return declared.completed(others, [argument], make, {})[argument]


@pytest.mark.parametrize("name", [name for name in OPERATORS if DECLARED[name].dependences])
def test_declared_dependences(name):
    """An argument in a case that it is not for, and left out in the only one that it is for."""
    declared, arguments = DECLARED[name], packet(name).default._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    base = defaults | sample_arguments(name, "cpu", torch.float32)
    samples = [base | changes for changes in ({}, *more_samples(name, "cpu", torch.float32))]
    for dependence in declared.dependences:
        for argument in dependence.arguments:
            kind = next(str(a.type) for a in arguments if a.name == argument)
            expected = f"{'given' if dependence.is_only else 'None'} {dependence.why}"
            refusals = set()
            for good in samples:
                applies = dependence.applies(good)
                if dependence.is_only or applies:
                    value = (
                        None if dependence.is_only and applies else present(argument, kind, good, declared)
                    )
                    refusals.add(refusal(name, good | {argument: value})[:2])
            assert (argument, expected + ", and only then" * dependence.is_only) in refusals


@pytest.mark.parametrize("name", OPERATORS)
def test_beyond_declared_bounds(name):
    """Each size, integer and number that has a bound, one below and one above."""
    base, declared = sample_arguments(name, "cpu", torch.float32), DECLARED[name]
    for argument, shapes, _ in declared.tensors:
        value = base.get(argument)
        for shape in shapes if value is not None else ():
            for size, (sign, bound) in shape.bounds.items() if shape.fits(value.dim()) else ():
                words = (
                    f"{shape.text} with {size} "
                    + (f"between 1 and {bound}", f"at least {bound}")[sign == ">"]
                )
                for beyond in (bound - 1,) if sign == ">" else (0, bound + 1):
                    sizes = [*value.shape]
                    sizes[shape.names.index(size) - len(shape.names)] = beyond
                    found = refusal(name, base | {argument: value.new_zeros(sizes)})
                    assert found == (argument, words, f"{size} = {beyond}")
    for argument, allowed in declared.allowed.items():
        if isinstance(allowed, range):
            for beyond in (allowed[0] - 1, allowed[-1] + 1):
                found = refusal(name, base | {argument: beyond})
                assert found == (argument, f"between {allowed[0]} and {allowed[-1]}", str(beyond))
        elif isinstance(allowed, int | float):
            found = refusal(name, base | {argument: allowed - 1})
            assert found == (argument, f"at least {allowed}", str(allowed - 1))


def test_sparse_tensors():
    """Also where dense ones of the same shape were good before."""
    gate = torch.ones(2, 3)
    for call in (packet("silu_mul_stacked"), PUBLIC["silu_mul_stacked"]):
        for _ in range(2):
            with torch.no_grad():
                call(gate, gate)
            for argument, layout in (("gate", "sparse_coo"), ("up", "sparse_csr")):
                sparse = gate.to_sparse() if layout == "sparse_coo" else gate.to_sparse_csr()
                message = f"moe_mps::silu_mul_stacked: {argument} must be a dense tensor, got {layout}"
                with pytest.raises(ValueError, match=message), torch.no_grad():
                    call(**{"gate": gate, "up": gate, argument: sparse})


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**70])
def test_integers_beyond_64_bits(value):
    expected = f"moe_mps::moe_router_topk_softmax: top_k must be an integer of 64 bits, got {value}"
    with pytest.raises(TypeError) as error:
        PUBLIC["moe_router_topk_softmax"](torch.ones(2, 8), value, norm_topk_prob=True)
    assert str(error.value) == expected
    with pytest.raises(
        TypeError, match="moe_mps::rms_norm: norm_eps must be a number in the range of float32, got"
    ):
        PUBLIC["rms_norm"](torch.ones(2, 8), None, norm_eps=abs(value) ** 17)
