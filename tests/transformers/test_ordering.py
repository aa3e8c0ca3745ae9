"""Outputs of linear layers that are only reordered become one copy, with the same values."""

import ast
import copy
import types

import pytest
import torch
from support import tiny_models
from support.launches import launches
from support.linear_attention import decoded, layer_of, model_of, step
from support.models import assert_close, eager, output, prompt
from torch import nn

import torch_moe_mps
from torch_moe_mps.transformers.rewriting.program.formulas import is_pure
from torch_moe_mps.transformers.rewriting.program.programs import compile_forward
from torch_moe_mps.transformers.rewriting.program.straightening import straighten
from torch_moe_mps.transformers.rewriting.record import RECORD
from torch_moe_mps.transformers.rewriting.rules import ordering

HEAD = """
def forward(self, x):
    p = self.p(x)
    q = self.q(x)
"""
EACH_ONCE = "return p.flip(-1), q.roll(self.by, -1)"
IN_ORDER = [
    "return p.flip(-1), torch.cat((q, p), -1)",
    "a, b = p.view(*p.shape[:2], 4, 8).split([3, 5], 3); return a.flatten(2), b.flatten(2), q[..., ::2]",
    "a = p.roll(self.by, -1); b = q.repeat_interleave(2, -1); return {'a': a, 'b': b.unflatten(-1, (2, 16))}",
    EACH_ONCE,
]
NOT_IN_ORDER = [
    "return p.flip(1), q.flip(1)",  # another token's values
    "return p.flip(-1) * 2, q.flip(-1)",
    "return p.flip(-1).float(), q.flip(-1).float()",
    "return p.flip(-1) + x, q.flip(-1)",
    "return p.cumsum(-1), q.flip(-1)",
    "return p.flip(-1).transpose(1, 2), q.flip(-1).transpose(1, 2)",
    "return p.flip(-1), q",  # one copy is what the operator would make
    "a = p.flip(-1); b = q.flip(-1); return {'a': a, 'b': b, 'p': p[:, 0]}",  # the outputs are read later
]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q, self.by = nn.Linear(32, 32), nn.Linear(32, 16), 3


def rewritten(module: nn.Module, text: str) -> tuple[types.FunctionType, types.FunctionType, list[str]]:
    """The forward with these statements, the one that `order_outputs` makes of it, and what this one runs."""
    statements = text.replace("return ", "out = ", 1).split("; ")
    tree = ast.parse("".join([HEAD, *(f"    {s}\n" for s in statements), "    return out\n"])).body[0]
    results = tree.body[-2].value
    if isinstance(results, ast.Tuple):  # each is a statement, as in a model's forward
        named = [ast.Assign([ast.Name(f"r{i}", ast.Store())], value) for i, value in enumerate(results.elts)]
        returned = [ast.Name(f"r{i}", ast.Load()) for i in range(len(named))]
        tree.body[-2:] = [*named, ast.Return(ast.Tuple(returned, ast.Load()))]
    own = compile_forward(rewritten, tree)
    program = straighten(module, own)
    ordering.order_outputs(program)
    return own, program.compile(is_pure), [*map(str, program.rewrites)]


def values(result) -> list[torch.Tensor]:
    return list(result.values() if isinstance(result, dict) else result)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("text", IN_ORDER)
def test_one_copy_of_the_same_values(text, bits):
    module = nn.Sequential(Two()).requires_grad_(False)
    if bits:
        torch_moe_mps.accelerate(module, bits=bits, group_size=32)
    own, new, runs = rewritten(module[0], text)
    first = "in order" if bits and text == EACH_ONCE else "index_select"
    assert runs == [first, *(["linear_quantized (p, q)"] if bits else [])]
    for x in (torch.randn(2, 5, 32), torch.randn(1, 1, 32)):
        for result, expected in zip(values(new(module[0], x)), values(own(module[0], x)), strict=True):
            assert result.shape == expected.shape
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", NOT_IN_ORDER)
def test_whatever_else_statements_do_stays(text):
    module = Two().requires_grad_(False)
    own, new, runs = rewritten(module, text)
    x = torch.randn(2, 5, 32)
    assert runs == [] and RECORD not in module.__dict__
    assert all(map(torch.equal, values(new(module, x)), values(own(module, x))))


def test_outputs_of_two_dtypes_keep_theirs():
    module = Two().requires_grad_(False)
    own, new, runs = rewritten(module, IN_ORDER[1])
    module.q.register_forward_hook(lambda _, args, out: out.double())
    x = torch.randn(2, 5, 32)
    assert runs and [r.dtype for r in new(module, x)] == [torch.float32, torch.float32, torch.float64]
    assert all(map(torch.equal, values(new(module, x)), values(own(module, x))))


# Qwen3-Next, whose projections give q, k, v and the gates head by head


def test_copies_of_a_step(simulated):
    model = model_of("qwen3_next", torch.bfloat16).to("mps")
    before = launches(simulated, step(model))
    torch_moe_mps.accelerate(model)
    after = launches(simulated, step(model))
    assert before["clone"] >= 6 and before["cat"] >= 1
    assert (after["clone"], after["cat"], after["index_select"]) == (1, 1, 1)  # the state is cloned


def test_formats_that_differ(simulated):
    """The layers are not joined, but their outputs are; the logits match the rounded weights."""
    with tiny_models.groups_of_32():
        dense = eager(tiny_models.tiny_model("qwen3_next"))
    model = copy.deepcopy(dense)
    torch_moe_mps.accelerate(model, bits=4, group_size=32, overrides={"*in_proj_ba": {"bits": 8}})
    assert layer_of(model).in_proj_ba.format.bits == 8
    twin = tiny_models.dense_twin(dense, model)
    for result, expected in zip(decoded(model)[0], decoded(twin)[0], strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    saved = {name: value for name, value in model.state_dict().items() if "in_proj" in name}
    assert all("order" not in name for name in saved)


def test_adapters_on_the_projections():
    """Put in after acceleration: seen in evaluation, trained by the model's own code."""
    peft = pytest.importorskip("peft")
    model = model_of()
    targets = ["in_proj_qkvz", "in_proj_ba"]
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets)

    def adapted(base):
        torch.manual_seed(0)
        return peft.get_peft_model(base, config).eval()

    expected = output(adapted(copy.deepcopy(model)), prompt())
    torch_moe_mps.accelerate(model)
    model = adapted(model)
    assert_close(output(model, prompt()), expected, 1e-5)
    model.train()(input_ids=prompt(), labels=prompt()).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)
