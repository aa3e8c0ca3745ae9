"""The public operators: their signatures for type checkers, and one meaning for each argument's name."""

import importlib.util
import inspect
import re
import sys
import tomllib
from collections import defaultdict

import pytest
import torch
from support.processes import REPOSITORY

import torch_moe_mps
from torch_moe_mps.ops import FAMILIES, OPERATORS, PUBLIC
from torch_moe_mps.ops._registry import PUBLIC_FOR
from torch_moe_mps.ops._samples import packet, sample_arguments


def arguments_of(name: str) -> dict[str, str]:
    """Types by name, with None or without."""
    arguments = packet(name).default._schema.arguments
    return {each.name: re.sub(r"Optional\[(.*)\]", r"\1", str(each.type)) for each in arguments}


def vocabulary() -> dict[str, str]:
    """The table of arguments in docs/operators.md: types by name."""
    text = (REPOSITORY / "docs" / "operators.md").read_text()
    table = text.partition("| argument | type | meaning |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \| (\w+) \| .+ \|$", table, re.MULTILINE)
    names = [(name, kind) for named, kind in rows for name in re.findall(r"`(\w+)`", named)]
    assert len(names) == len(dict(names)), "an argument stands twice in the table"
    return dict(names)


def test_one_name_has_one_meaning():
    """Every argument of a public operator is in the table, whose row it follows in all of them."""
    kinds = defaultdict(set)
    for name in OPERATORS:
        for argument, kind in arguments_of(name).items():
            kinds[argument].add(kind)
    assert {name for name, types in kinds.items() if len(types) > 1} == set()
    used = {argument: kind for name in PUBLIC for argument, kind in arguments_of(name).items()}
    assert vocabulary() == used


def test_a_prefix_names_the_part():
    """norm_eps is that of rms_norm, and so on."""
    norm = arguments_of("rms_norm").keys() | {"norm_v", "norm_topk_prob"}
    for name in PUBLIC:
        assert {argument for argument in arguments_of(name) if argument.startswith("norm_")} <= norm, name
    router = arguments_of("moe_router")
    experts = arguments_of("_moe_experts_quantized")
    del router["ids_dtype"]  # experts choose for themselves
    assert {name: experts[name] for name in router} == router


def test_arguments_stand_in_one_order():
    """What is computed with, what a router chose, the weight, its format, the bias."""
    order = ["x", "topk_weights", "topk_ids", "packed", "scales", "zeros", "format", "bias"]
    for name in PUBLIC:
        shared = [argument for argument in arguments_of(name) if argument in order]
        if "packed" in shared:
            assert shared == [argument for argument in order if argument in shared], name
        names = [*arguments_of(name)]
        for first, second in (("expert_out", "topk_weights"), ("topk_weights", "topk_ids")):
            if {first, second} <= {*names}:
                assert names.index(first) < names.index(second), name
        if "topk_ids" in names and "x" in names:
            assert names[names.index("x") + 1].startswith("topk_"), name


def test_only_tensors_go_without_their_names():
    """Except top_k of routers, as k of torch.topk does."""
    for name in PUBLIC:
        by_place = [each for each in packet(name).default._schema.arguments if not each.kwarg_only]
        others = {each.name for each in by_place if "Tensor" not in str(each.type)}
        assert others <= ({"top_k"} if "routing" in name or name.startswith("moe_") else set()), name


def test_public_operators_have_few_arguments():
    """What one dispatch of a decode step joins to an operator is an argument of a private one."""
    assert {name for name in PUBLIC if len(arguments_of(name)) > 16} == set()


@pytest.mark.parametrize(
    ("public", "private"),
    {
        "cached_attention": "_cached_attention",
        "gated_delta_rule_": "_gated_delta_rule_",
        "sample": "_sample_with_flags",
    }.items(),
)
def test_a_private_form_goes_on_from_the_public_one(public, private):
    """The same arguments in the same order, with the same defaults, then others that have defaults."""
    some, all_of_them = (packet(name).default._schema.arguments for name in (public, private))
    for one, other in zip(some, all_of_them, strict=False):
        assert (one.name, str(one.type), one.default_value) == (
            other.name,
            str(other.type),
            other.default_value,
        )
    assert all(argument.has_default_value() for argument in all_of_them[len(some) :])


def test_public_operators_are_flat():
    """The registration says which they are, and what users call them for."""
    assert PUBLIC.keys() == {name for name in OPERATORS if not name.startswith("_")} == PUBLIC_FOR.keys()
    for name, function in PUBLIC.items():
        assert getattr(torch_moe_mps.ops, name) is function
    ours = [name for name in OPERATORS if name.endswith(("_backward", "_transposed"))]
    assert ours and all(name.startswith("_") for name in ours)
    assert {name for module in FAMILIES.values() for name in module.CALLS} == {*OPERATORS}


def test_mypy_checks_calls():
    """scripts/lint does, in tests/typed: right calls, and wrong ones that must be errors of their codes."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tests/typed" in settings["files"] and settings["warn_unused_ignores"] is True
    assert '"$PYTHON" -m mypy ;;' in (REPOSITORY / "scripts" / "lint").read_text()
    calls = (REPOSITORY / "tests" / "typed" / "calls_of_operators.py").read_text()
    assert calls.count("# type: ignore[") > 5


def test_a_number_for_a_dtype_is_an_error():
    """torch reads numbers as dtypes without a check where a schema has a dtype: 99 would end the process."""
    for name in OPERATORS:
        assert "ScalarType" not in str(packet(name).default._schema)
    for number in (99, -1):
        with pytest.raises(RuntimeError, match="dtype"):
            torch.ops.moe_mps.router_logits(torch.ones(2, 4), torch.ones(3, 4), dtype=number)


@pytest.mark.parametrize("name", [name for name in PUBLIC if {"dtype", "ids_dtype"} & {*arguments_of(name)}])
def test_dtypes_are_torchs(name):
    """A function takes them, and a name as its schema does; another one is an error of one line."""
    given = sample_arguments(name, "cpu", torch.bfloat16)
    (argument,) = {"dtype", "ids_dtype"} & {*arguments_of(name)}
    wanted = torch.int64 if argument == "ids_dtype" else torch.float32
    results = [PUBLIC[name](**given | {argument: each}) for each in (wanted, str(wanted).partition(".")[2])]
    one, other = (each[-1] if isinstance(each, tuple) else each for each in results)
    assert one.dtype == wanted and torch.equal(one, other)
    message = f"moe_mps::{name}: {argument} must be one of .*, got 'int8'"
    with pytest.raises(ValueError, match=message) as error:
        PUBLIC[name](**given | {argument: torch.int8})
    assert "\n" not in str(error.value)


def test_functions_have_the_schemas_arguments():
    for name, function in PUBLIC.items():
        assert [*inspect.signature(function).parameters] == [*arguments_of(name)]


def test_no_module_has_the_name_of_an_operator():
    """`torch_moe_mps.ops.attention` is the function alone: families are modules of a package beside it."""
    modules = {
        name.rpartition(".")[2] for name in sys.modules if re.fullmatch(r"torch_moe_mps\.ops\.\w+", name)
    }
    assert modules & {*PUBLIC} == set() and "families" in modules
    for name in FAMILIES:
        assert importlib.util.find_spec(f"torch_moe_mps.ops.{name}") is None
