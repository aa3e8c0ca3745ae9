"""What users do to a model, as a state machine: in any order, the model computes what its own code does."""

import copy
import json
import tempfile
from pathlib import Path

import torch
import transformers
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import DynamicCache

import torch_moe_mps
from support import tiny_models
from support.interrupts import interrupted
from support.models import eager, output, prompt, quantize_experts
from torch_moe_mps.models.modules.linears import has_quantized_weights
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.transformers import experts_of

ARCHITECTURES = ("qwen3_moe", "gpt_oss", "gemma4", "deepseek_v3")
TOLERANCE = 2e-5
# Lines of the package until an interrupt: few and many are equally likely.
LINES = st.floats(0, 17).map(lambda power: int(2**power))


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, weight):
        return weight / 2


def double(module, args, result):
    return 2 * result


def assert_close(result: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(expected).all()
    error = (result - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"relative error {error:.2g}"


def assert_most_tokens_agree(result: Tensor, expected: Tensor) -> None:
    """In 16 bit a router may choose another expert for a token, where two are nearly equal."""
    assert result.dtype == expected.dtype and torch.isfinite(result).all()
    errors = (result - expected).float().abs().amax(-1) / expected.float().abs().amax()
    assert errors.median() < 0.06, f"relative error {errors.median():.2g}"


def routers(model) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith(("Router", "TopkRouter"))]


def activations(model) -> list[nn.Module]:
    return [m.act_fn for m in experts_of(model).values() if isinstance(getattr(m, "act_fn", None), nn.Module)]


class ModelMachine(RuleBasedStateMachine):
    """`fast` is what the user does things to; `own` has the same done to it, and always runs its own code.

    Preconditions ask only what the rules so far decide, never `fast`. An interrupt comes after a number of
    lines, and what the process remembers takes fewer lines the second time: the same rules may leave `fast`
    dense once and quantised once. Hypothesis refuses a machine that then offers other rules.
    """

    @initialize(architecture=st.sampled_from(ARCHITECTURES), shared=st.booleans())
    def start(self, architecture, shared):
        transformers.logging.set_verbosity_error()
        with tiny_models.groups_of_32():
            self.own = eager(tiny_models.tiny_model(architecture))
        self.fast = copy.deepcopy(self.own)
        self.neighbour = None
        if shared:
            self.neighbour = type(self.fast)(self.fast.config).eval()
            self.neighbour.config._experts_implementation = "eager"
            self.neighbours_logits = output(self.neighbour, prompt())
        self.hooks: list = []
        self.parametrised = False
        self.replaced = False

    # What the package does

    @rule()
    def accelerate(self):
        torch_moe_mps.accelerate(self.fast)

    @rule()
    def restore(self):
        assert torch_moe_mps.restore(self.fast) is self.fast
        if not self.quantised() and not self.parametrised:
            assert [type(m) for m in self.fast.modules()] == [type(m) for m in self.own.modules()]

    @rule(form=st.sampled_from([(4, 32, "affine"), (8, 32, "affine"), (4, 32, "mxfp4")]))
    def quantize(self, form):
        if self.quantised():
            return
        quantize_experts(self.fast, *form)
        tiny_models.dense_twin(self.own, self.fast)

    @precondition(lambda self: not self.hooks and not self.parametrised and not self.replaced)
    @rule(ours=st.booleans(), interrupt=st.sampled_from(["save", "load", None]), lines=LINES)
    def save_and_load(self, ours, interrupt, lines):
        """Perhaps a first try is interrupted, after which the model computes, and can be saved and loaded."""
        cls = type(self.fast)

        def load():
            if ours or self.quantised():  # transformers' own refuses packed weights
                return torch_moe_mps.from_pretrained(folder, cls)
            return cls.from_pretrained(folder).eval()

        with tempfile.TemporaryDirectory() as folder:
            if interrupt == "save":
                interrupted(lambda: self.fast.save_pretrained(folder), lines)
                self.computes_what_its_own_code_does()
            self.fast.save_pretrained(folder)
            if interrupt == "load":
                interrupted(load, lines)
                self.computes_what_its_own_code_does()
            self.fast = load()
        for name, module in self.own.named_modules():  # a checkpoint does not have them
            for attribute in ("norm_topk_prob", "limit", "alpha", "top_k"):
                if attribute in vars(module):
                    setattr(self.fast.get_submodule(name), attribute, vars(module)[attribute])

    @rule(action=st.sampled_from(["accelerate", "restore", "quantize", "quantize all"]), lines=LINES)
    def interrupt(self, action, lines):
        """The model still computes: see the invariant. The other rules show that work can go on."""
        actions = {
            "accelerate": lambda: torch_moe_mps.accelerate(self.fast),
            "restore": lambda: torch_moe_mps.restore(self.fast),
            "quantize": lambda: quantize_experts(self.fast, 4, 32),
            "quantize all": lambda: torch_moe_mps.accelerate(self.fast, 8, 32),
        }
        if "quantize" in action and (self.quantised() or self.parametrised):
            return
        interrupted(actions[action], lines)
        tiny_models.dense_twin(self.own, self.fast)

    # What users do

    @rule()
    def through_bfloat16(self):
        """Weights that are rounded, in a model that computes in bfloat16 for a while."""
        kept = [[buffer.clone() for buffer in model.buffers()] for model in (self.fast, self.own)]
        for model in (self.fast, self.own):
            model.to(torch.bfloat16)
        tiny_models.dense_twin(self.own, self.fast)
        assert_most_tokens_agree(output(self.fast, prompt()), output(self.own, prompt()))
        for model, buffers in zip((self.fast, self.own), kept, strict=True):
            model.to(torch.float32)
            for buffer, value in zip(model.buffers(), buffers, strict=True):  # loading makes them again
                buffer.copy_(value)
        tiny_models.dense_twin(self.own, self.fast)

    @rule()
    def autocast(self):
        with torch.autocast("cpu", torch.bfloat16):
            assert_most_tokens_agree(output(self.fast, prompt()), output(self.own, prompt()))

    @precondition(lambda self: not self.hooks and not self.parametrised)
    @rule(accelerate_first=st.booleans())
    def share_a_layer(self, accelerate_first):
        """A second model that shares its first layer with this one: both stay right if either changes."""
        expected = output(self.own, prompt())
        other = copy.deepcopy(self.own)
        if accelerate_first:
            torch_moe_mps.accelerate(other)
        other.model.layers[0] = self.fast.model.layers[0]
        for change in (lambda model: None, torch_moe_mps.accelerate, torch_moe_mps.restore):
            change(other)
            assert_close(output(other, prompt()), expected)
            self.computes_what_its_own_code_does()

    @rule()
    def save_another_of_the_same_config(self):
        """It is dense, whatever this one is; each is saved as what it is.

        A restored model has transformers' own class, of which every model is saved as its config says.
        """
        other = type(self.fast)(self.fast.config)
        as_config = self.quantised() and type(self.fast) is type(self.own)
        for model, quantised in ((other, as_config), (self.fast, self.quantised())):
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                stored = json.loads(Path(folder, "config.json").read_text())
                assert quantised == ("quantization_config" in stored)

    @precondition(lambda self: not self.parametrised)
    @rule()
    def deepcopy(self):
        removable = len(self.hooks)
        while self.hooks:
            self.unhook()
        self.fast = copy.deepcopy(self.fast)
        for _ in range(removable and 1):
            self.hook_activation()

    @precondition(lambda self: not self.hooks)
    @rule()
    def hook_activation(self):
        pairs = zip(activations(self.fast), activations(self.own), strict=True)
        for module in [m for pair in pairs for m in pair][:2]:
            self.hooks.append(module.register_forward_hook(double))

    @precondition(lambda self: not self.hooks)
    @rule()
    def hook_router(self):
        def first(module, args, result):
            return None

        for model in (self.fast, self.own):
            self.hooks += [router.register_forward_hook(first) for router in routers(model)]

    @precondition(lambda self: self.hooks)
    @rule()
    def unhook(self):
        while self.hooks:
            self.hooks.pop().remove()

    @rule(name=st.sampled_from(["norm_topk_prob", "limit", "alpha", "top_k"]))
    def change_attribute(self, name):
        for model in (self.fast, self.own):
            for module in [*routers(model), *experts_of(model).values()]:
                value = getattr(module, name, None)
                if isinstance(value, bool):
                    setattr(module, name, not value)
                elif isinstance(value, int):
                    setattr(module, name, 3 - value % 2)
                elif isinstance(value, float):
                    setattr(module, name, 0.5 + value / 2)

    @precondition(lambda self: not self.parametrised and routers(self.own))
    @rule()
    def parametrise(self):
        for model in (self.fast, self.own):
            for router in routers(model):
                if isinstance(getattr(router, "weight", None), nn.Parameter):
                    parametrize.register_parametrization(router, "weight", Halved())
                    self.parametrised = True

    @rule()
    def train_and_back(self):
        self.fast.train()
        self.fast.eval()

    @rule(implementation=st.sampled_from(["eager", "moe_mps", "batched_mm"]))
    def choose_implementation(self, implementation):
        if not self.quantised():
            self.fast.set_experts_implementation(implementation)

    @rule()
    def replace_a_norm(self):
        self.replaced = True
        for model in (self.fast, self.own):
            for module in model.modules():
                norm = module._modules.get("post_attention_layernorm")
                if norm is not None:
                    generator = torch.Generator().manual_seed(1)
                    other = nn.LayerNorm(norm.weight.shape[0], bias=False, dtype=norm.weight.dtype)
                    other.weight.data.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.5)
                    module.post_attention_layernorm = other
                    break

    def quantised(self) -> bool:
        return any(map(has_quantized_weights, self.fast.modules()))

    def tokens(self, model) -> Tensor:
        """The logits of single tokens after a prompt."""
        cache = DynamicCache(config=model.config)
        first, *others = prompt().split([5, 1, 1, 1, 1], 1)
        output(model, first, **cache_argument(model, cache), use_cache=True)
        return torch.cat(
            [output(model, t, **cache_argument(model, cache), use_cache=True) for t in others], 1
        )

    @invariant()
    def computes_what_its_own_code_does(self):
        if not hasattr(self, "fast"):
            return
        assert_close(output(self.fast, prompt()), output(self.own, prompt()))
        if self.neighbour is not None:
            assert torch.allclose(output(self.neighbour, prompt()), self.neighbours_logits, atol=1e-4)
            assert not hasattr(self.neighbour.config, "quantization_config")


class TokenMachine(ModelMachine):
    """The same with tokens after the prompt, the third of which is captured where nothing forbids it."""

    @invariant()
    def says_the_same_tokens(self):
        if hasattr(self, "fast"):
            assert_close(self.tokens(self.fast), self.tokens(self.own))
