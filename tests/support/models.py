"""Running tiny models: prompts, results, and how close they must be."""

import inspect
import linecache
import sys
import textwrap
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from support import tiny_models
from support.experts_on_disk import same
from torch_moe_mps.checkpoints.in_place import quantize_model
from torch_moe_mps.checkpoints.quantize.recipe import requested_recipe
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

# Architectures whose class here has no generate: their logits or hidden states are compared.
NO_GENERATE = {"diffusion_gemma", "muse_spark", "openai_privacy_filter", "qwen3_omni_moe"}


NEW_TOKENS = 12


def stored(*modules: nn.Module) -> list[torch.Tensor]:
    """What modules save: parameters and codes, shared ones once."""
    tensors = (tensor for module in modules for tensor in module.state_dict(keep_vars=True).values())
    return [*{id(tensor): tensor for tensor in tensors}.values()]


def prompt(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(2, 90, (batch, length), generator=torch.Generator().manual_seed(7))


def quantize_experts(model, bits, group_size, mode="affine", **overrides):
    """Quantises experts alone, as `accelerate` does before it replaces modules. Returns: the report."""
    recipe = requested_recipe(
        bits, group_size, mode, linear_bits=None, embedding_bits=None, overrides=overrides
    )
    return quantize_model(model, recipe, progress=False)


def eager(model):
    model.set_experts_implementation("eager")
    return model


def output(model, ids: torch.Tensor, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **inputs)[0]


def in_parts(
    model, ids: torch.Tensor, *sizes: int, cache=None, tells_positions=False
) -> tuple[list[torch.Tensor], Any]:
    """The logits of a prompt and of parts of these sizes that follow it, and the cache that they share."""
    logits, sizes = [], [ids.shape[1] - sum(sizes), *sizes]
    with torch.no_grad():
        places = torch.arange(ids.shape[1])[None].to(ids.device).split(sizes, 1)
        for part, place in zip(ids.split(sizes, 1), places, strict=True):
            given = {"position_ids": place} if tells_positions else {}
            out = model(input_ids=part, **cache_argument(model, cache), use_cache=True, **given)
            logits.append(out[0].float().cpu())
            cache = cache_among(out, cache)
    return logits, cache


class Conversation:
    """Tokens after a prompt, each the likeliest after the one before."""

    def __init__(self, model: nn.Module, cache=None, batch: int = 1, length: int = 9, **inputs) -> None:
        self.model, self.inputs = model, inputs
        self.cache = DynamicCache(config=model.config) if cache is None else cache
        self.token = prompt(batch, length).to(model.device)
        self.tokens(1)

    def tokens(self, count: int) -> list[torch.Tensor]:
        logits = []
        for _ in range(count):
            out = self.model(
                self.token, **cache_argument(self.model, self.cache), use_cache=True, **self.inputs
            )
            logits.append(out.logits.cpu())
            self.token = out.logits[:, -1:].argmax(-1)
        return logits


def same_answers(resident, model, tokens: int = 3) -> None:
    """Asserts that logits of a prompt, and of tokens one by one, have the same bits."""
    a, b = Conversation(resident), Conversation(model)
    assert torch.equal(a.token, b.token)
    for mine, other in zip(a.tokens(tokens), b.tokens(tokens), strict=True):
        assert same(mine, other)
    assert same(resident(prompt()).logits, model(prompt()).logits)


def generate(model, ids: torch.Tensor, **options) -> torch.Tensor:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(input_ids=ids, **options)


def assert_close(result: Any, expected: Any, tolerance: float) -> None:
    """Of two tensors, or of sequences of them: the largest difference beside the largest number."""
    if not isinstance(expected, torch.Tensor):
        for each, own in zip(result, expected, strict=True):
            assert_close(each, own, tolerance)
        return
    assert result.dtype == expected.dtype and result.shape == expected.shape
    assert torch.isfinite(expected).all()
    error = (result.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


class CountOperators(TorchDispatchMode):
    """Counts the calls of moe_mps operators by name."""

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}
        self.others: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "moe_mps":
            name = function._schema.name.partition("::")[2]
            self.counts[name] = self.counts.get(name, 0) + 1
        else:
            self.others.add(function._schema.name.partition("::")[2])
        return function(*args, **(kwargs or {}))


def operators_of(call) -> dict[str, int]:
    with CountOperators() as mode:
        call()
    return mode.counts


def tiny(architecture: str, **overrides):
    with tiny_models.groups_of_32():
        return eager(tiny_models.tiny_model(architecture, **overrides))


def rewritten(module: nn.Module):
    """The forward that `accelerate` gave a module, beneath the one that sees whether it applies."""
    return inspect.getclosurevars(type(module).forward).nonlocals["rewritten"]


def edit_forward(module: nn.Module, old: str, new: str) -> None:
    """Gives a module a subclass whose forward has `new` in the place of `old`, with source."""
    cls = type(module)
    source = textwrap.dedent(inspect.getsource(cls.forward))
    assert old in source
    source = source.replace(old, new)
    name = f"<edited {cls.__name__}: {new}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict = {}
    exec(compile(source, name, "exec"), vars(sys.modules[cls.__module__]), scope)
    module.__class__ = type(cls.__name__, (cls,), {"forward": scope["forward"], "__module__": cls.__module__})
