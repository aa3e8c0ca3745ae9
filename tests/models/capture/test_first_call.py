"""A program that is wrong or raises is dropped with one warning, and the same token runs module by module."""

import json
import warnings

import pytest
import torch
from support.capturing import assert_equal, pair
from support.models import Conversation

import torch_moe_mps.transformers  # noqa: F401  # it fills the table of passes
from torch_moe_mps.models.capture import first_call
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.graphs import passes
from torch_moe_mps.models.graphs.tracing import VALUE
from torch_moe_mps.ops import _registry
from torch_moe_mps.selfcheck import machine

pytestmark = pytest.mark.usefixtures("captured")

ATEN = torch.ops.aten


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """Makes a pair whose first calls the self-check watches, as on a Mac that has passed nothing yet."""
    monkeypatch.setattr(machine, "cache_file", lambda: tmp_path / "passed.json")

    def talks(architecture):
        model, own = pair(architecture, "cpu")
        monkeypatch.setattr(_registry, "before_first_call", lambda name, given: None)
        return model, Conversation(model), Conversation(own)

    return talks


@pytest.fixture
def broken(monkeypatch):
    """Lets a pass change the last call of an operator in each recording."""

    def install(operator, change):
        def broken_pass(graph, *_, **__):
            change(*[node for node in graph.nodes if node.target is operator][-1:])

        monkeypatch.setattr(passes, "PASSES", (broken_pass,))

    return install


def subtract(node):
    node.target = ATEN.sub.Tensor


def without_a_matrix(node):
    node.args = (node.args[0], node.args[0])


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
def test_a_wrong_program_is_dropped(architecture, checked, broken, tmp_path):
    """Recurrent states of the second model were advanced once: its next tokens have the same bits, too."""
    broken(ATEN.add.Tensor, subtract)
    model, mine, theirs = checked(architecture)
    with pytest.warns(UserWarning, match="captured token failed.*the logits .* differ") as said:
        assert_equal(mine.tokens(9), theirs.tokens(9))
    assert [str(w.message).startswith("torch_moe_mps: a captured token failed") for w in said].count(
        True
    ) == 1
    assert not captures_of(model).programs and "differ" in captures_of(model).reason
    assert not [*tmp_path.iterdir()]


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
def test_the_first_call_is_compared_once(architecture, checked, monkeypatch, tmp_path):
    monkeypatch.setattr(passes, "PASSES", ())
    compared = []
    compare = first_call.FirstCall.compare
    monkeypatch.setattr(
        first_call.FirstCall, "compare", lambda *given: compared.append(given[0].label) or compare(*given)
    )
    for _ in range(2):  # the second model finds the label in the machine's file
        model, mine, theirs = checked(architecture)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="torch_moe_mps")
            assert_equal(mine.tokens(9), theirs.tokens(9))
        assert captures_of(model).programs and captures_of(model).reason is None
    assert len(compared) == 1 and json.loads((tmp_path / "passed.json").read_text())["passed"] == compared


@torch.no_grad()
def test_a_program_that_raises_is_dropped(broken):
    """Without the self-check, too."""
    broken(ATEN.mm.default, without_a_matrix)
    model, own = pair("qwen3_moe", "cpu")
    mine, theirs = Conversation(model), Conversation(own)
    with pytest.warns(UserWarning, match="tokens run module by module from now on: RuntimeError") as said:
        assert_equal(mine.tokens(9), theirs.tokens(9))
    assert [str(w.message).startswith("torch_moe_mps: a captured token failed") for w in said].count(
        True
    ) == 1
    assert not captures_of(model).programs


@torch.no_grad()
def test_a_program_that_has_written_raises(broken):
    """Its states were advanced: module by module they would be advanced twice."""
    broken(ATEN.mm.default, without_a_matrix)
    model, _ = pair("qwen3_next", "cpu")
    mine = Conversation(model)
    mine.tokens(2)
    with pytest.raises(RuntimeError, match="aten::mm, an operator of a captured token"):
        mine.tokens(1)


@torch.no_grad()
def test_states_are_copies_in_the_first_call(checked, broken):
    broken(ATEN.mm.default, without_a_matrix)
    _, mine, theirs = checked("qwen3_next")
    with pytest.warns(UserWarning, match="tokens run module by module from now on: RuntimeError"):
        assert_equal(mine.tokens(9), theirs.tokens(9))


@torch.no_grad()
def test_an_error_of_the_call_stays_the_calls(broken, monkeypatch):
    """Memory that is not there is no fault of the program."""

    def no_memory(*_):
        raise RuntimeError("MPS backend out of memory")

    model, _ = pair("qwen3_moe", "cpu")
    mine = Conversation(model)
    mine.tokens(4)
    captures = captures_of(model)
    (program,) = captures.programs
    captures.programs = [program._replace(run=no_memory)]
    with pytest.raises(RuntimeError, match="out of memory"):
        mine.tokens(1)
    captures.programs = [program]
    mine.tokens(1)
    assert captures.reason is None


@pytest.mark.parametrize(("error", "dtype"), [(0.005, torch.float32), (0.1, torch.bfloat16)])
def test_the_bound_is_that_of_the_dtypes_in_the_program(error, dtype, tmp_path, monkeypatch):
    """`generate` asks for logits in float32, also of a model in bfloat16."""
    monkeypatch.setattr(machine, "cache_file", lambda: tmp_path / "passed.json")
    graph = torch.fx.Graph()
    graph.placeholder("x").meta[VALUE] = torch.zeros(1, 2, dtype=dtype)
    first, logits = first_call.FirstCall(graph), torch.tensor([[3.0, 4.0]])
    assert "differ by" in first.compare((logits * (1 + 3 * error),), (logits,))
    assert "shape" in first.compare((logits[:, :1],), (logits,))
    assert "differ" in first.compare((torch.tensor([[3.0, torch.nan]]),), (logits,))
    assert not first.has_passed
    assert first.compare((logits * (1 + error),), (logits,)) is None and first.has_passed
    assert first_call.FirstCall(graph).has_passed
