"""Docstrings, schemas and docs/operators.md say the same."""

import doctest
import inspect
import re
import runpy

import pytest
import torch
from support.operators import MODULES
from support.processes import REPOSITORY

from torch_moe_mps import ops
from torch_moe_mps.ops import OPERATORS, PUBLIC
from torch_moe_mps.ops._registry import WITH_BACKWARD
from torch_moe_mps.ops._samples import packet


@pytest.mark.parametrize("name", OPERATORS)
def test_documentation(name):
    """Help on the function is complete: every argument by name, the result, the errors."""
    function = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    document = inspect.getdoc(function)
    assert document == inspect.cleandoc(packet(name).__doc__)
    assert "Args:" in document and "Raises:" in document
    parameters = [argument.name for argument in packet(name).default._schema.arguments]
    entries = re.findall(r"^ +((?:\w+,\s+)*\w+): ", document.partition("Args:")[2], re.MULTILINE)
    described = {parameter for entry in entries for parameter in re.split(r",\s+", entry)}
    described |= set(re.findall("`(gate_is_logit)`", document))  # stands with the gate that it is about
    assert set(parameters) <= described
    if packet(name).default._schema.returns:
        assert "Returns" in document


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_example(name, capsys):
    """The docstring ends with an example that calls the operator; it prints what the docstring says."""
    document = inspect.getdoc(PUBLIC[name]).partition("\n\nExample:\n")[2]
    test = doctest.DocTestParser().get_doctest(document, {"torch": torch, "ops": ops}, name, None, 0)
    assert any(f"ops.{name}(" in example.source for example in test.examples)
    assert any(example.want for example in test.examples)
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0, capsys.readouterr().out


def test_operators_table_is_current():
    generator = runpy.run_path(str(REPOSITORY / "scripts" / "make" / "make_operators_table.py"))
    written = (REPOSITORY / "docs" / "operators.md").read_text()
    assert written == generator["document"](), "run scripts/make/make_operators_table.py"


def test_operators_table_has_every_public_operator():
    text = (REPOSITORY / "docs" / "operators.md").read_text()
    lines = text.partition("writes this table -->")[2].partition("<!-- end")[0].splitlines()
    rows = [re.split(r" \| ", line.strip("| ")) for line in lines if line.startswith("| [`")]
    links = dict(re.fullmatch(r"\[`(\w+)`\]\(\.\./(.+)\)", row[0]).groups() for row in rows)
    assert sorted(links) == sorted(PUBLIC)
    assert all(row[4].strip() for row in rows), "an operator without a caller says what replaces it"
    for name, link in links.items():
        assert f"\ndef {name}(" in (REPOSITORY / link).read_text()
    reached = {row[0].split("`")[1]: re.findall(r"`(\w+)`", row[3]) for row in rows}
    assert {name: names for name, names in reached.items() if names} == {
        name: [*backward.reads] for name, backward in WITH_BACKWARD.items()
    }
