"""JetMoe: pairs of tokens and experts keep their order. Against transformers' own code in float64."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import assert_close, generate, in_parts, operators_of, prompt
from support.sweep import in_sweep

import torch_moe_mps
from torch_moe_mps.transformers.capture.classes import captures_of

ROUNDING = 1e-5
IDS = torch.randint(2, 90, (2, 20), generator=torch.Generator().manual_seed(0))
OPERATORS = {"moe_router", "expert_mm", "moe_experts"}


def own_model():
    return tiny_models.tiny_model("jetmoe")


def accelerated(**options):
    model = own_model()
    torch_moe_mps.accelerate(model, **options)
    return model


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    """The logits of IDS."""
    with torch.no_grad():
        return own_model().double()(IDS).logits.float()


@pytest.mark.parametrize("batch", in_sweep((1, 2), (1,)))
def test_tokens_are_one_call_and_right(simulated, exact, batch):
    model = accelerated(capture=True)
    logits, _ = in_parts(model, IDS[:batch], *[1] * 8)
    assert_close(torch.cat(logits, 1), exact[:batch], ROUNDING)
    assert captures_of(model).programs and captures_of(model).reason is None
    assert torch.equal(generate(model, prompt(batch)), generate(own_model(), prompt(batch)))


def test_operators_of_a_prompt_and_restoring(exact):
    model = accelerated()
    results = []
    used = operators_of(lambda: results.extend(in_parts(copy.deepcopy(model), IDS)[0]))
    assert used["moe_router"] == 4 and used["expert_mm"] == 4 and used["moe_experts"] == 2
    assert_close(results[0], exact, ROUNDING)
    torch_moe_mps.restore(model)
    assert not OPERATORS & operators_of(lambda: results.extend(in_parts(model, IDS)[0])).keys()
    assert_close(results[1], exact, ROUNDING)


def own_code_of(path: str):
    def change(model):
        model.get_submodule(path).train()

    return change


def hook_on(path: str):
    def change(model):
        model.get_submodule(path).register_forward_hook(lambda *_: None)

    return change


@pytest.mark.parametrize("run", [own_code_of, hook_on])
@pytest.mark.parametrize(
    "part",
    [
        "mlp",
        "mlp.router",
        "mlp.input_linear",
        "self_attention.experts.router",
        "self_attention.experts.output_linear",
    ],
)
def test_one_part_runs_its_own_code(exact, run, part):
    """The others run operators beside it, or their own code, too."""
    model = accelerated()
    run(f"model.layers.0.{part}")(model)
    results = []
    assert operators_of(lambda: results.extend(in_parts(model, IDS)[0]))["moe_experts"]
    assert_close(results[0], exact, ROUNDING)


def test_router_logits_and_gradients():
    """What the model gives with `output_router_logits`, and gradients of all weights."""
    losses = []
    for model in (own_model(), accelerated()):
        out = model(IDS, labels=IDS, output_router_logits=True)
        out.loss.backward()
        grads = [parameter.grad for _, parameter in sorted(model.named_parameters())]
        with torch.no_grad():
            logits = model(IDS, output_router_logits=True).router_logits
        losses.append([out.loss.detach(), *logits, *grads])
    assert_close(losses[1], losses[0], 1e-4)


def test_experts_that_are_not_known_keep_their_router():
    """A subclass of experts, whose forward may want counts: nothing of its block changes."""

    class Doubled(type(own_model().model.layers[0].mlp.input_linear)):
        def forward(self, inputs, expert_size):
            return 2 * super().forward(inputs, [*expert_size])

    results = []
    for accelerates in (False, True):
        model = own_model()
        model.model.layers[0].mlp.input_linear.__class__ = Doubled
        model.model.layers[1].self_attention.experts.output_linear.__class__ = Doubled
        if accelerates:
            torch_moe_mps.accelerate(model)
        results += in_parts(model, IDS)[0]
    assert_close(results[1], results[0], ROUNDING)
