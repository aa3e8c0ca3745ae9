"""Cached prefixes of a model whose adapters are switched: each is for the adapters that computed it."""

import peft
import pytest
import torch
from support import tiny_models
from support.models import eager
from transformers import GenerationConfig

import torch_moe_mps
from torch_moe_mps.models.caches.prompt_cache import fingerprint
from torch_moe_mps.serving.engine.engine import Engine
from torch_moe_mps.serving.engine.job import Job
from torch_moe_mps.serving.prefix_cache import disk as disk_module
from torch_moe_mps.serving.prefix_cache.disk import Disk
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

IDS = torch.randint(2, 90, (1, 40), generator=torch.Generator().manual_seed(0))


def with_two_adapters():
    model = eager(tiny_models.tiny_model("llama"))
    torch.manual_seed(0)
    how = {"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=64, **how)).eval()
    adapted.add_adapter("b", peft.LoraConfig(r=4, lora_alpha=64, **how))
    torch_moe_mps.accelerate(adapted)
    return adapted


def turned(adapted, scale: float) -> None:
    for module in adapted.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["b"] = scale


CHANGES = {
    "b": lambda adapted: adapted.set_adapter("b"),
    "b at another scale": lambda adapted: turned(adapted, -8.0),
    "none": lambda adapted: adapted.base_model.disable_adapter_layers(),
    "b again": lambda adapted: adapted.base_model.enable_adapter_layers(),
    "the first": lambda adapted: adapted.set_adapter("default"),
}


def in_a_batch(model, prompts: PrefixCache) -> list[int]:
    tokens: list[int] = []
    config = GenerationConfig(max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    batch = Engine(model, prompts, 2)
    batch.submit(Job({"input_ids": IDS}, config, tokens.append, lambda reason: None))
    while batch.has_work:
        batch.step()
    return tokens


@pytest.mark.slow("answers with and without kept prompts, with five states of its adapters")
def test_an_answer_is_that_of_the_active_adapter():
    """Twice each: the second time its own prompt is kept. A file of another state is of another model."""
    adapted = with_two_adapters()
    model, prompts, names = adapted.get_base_model(), PrefixCache(1 << 30), []
    expected = [in_a_batch(model, prompts)]
    names.append(fingerprint(model))
    for change in CHANGES.values():
        change(adapted)
        expected.append(in_a_batch(model, PrefixCache(0)))
        names.append(fingerprint(model))
        assert in_a_batch(model, prompts) == expected[-1] == in_a_batch(model, prompts)
        assert len(prompts.kept) == 1
    assert expected[0] == expected[5] and len({*map(tuple, expected)}) == 4
    assert names[0] == names[5] and names[1] != names[2] and len({*names}) == 4


def test_an_answer_that_began_with_another_adapter_is_not_kept():
    adapted = with_two_adapters()
    model, prompts = adapted.get_base_model(), PrefixCache(1 << 30)
    batch = Engine(model, prompts, 2)
    config = GenerationConfig(max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    for _ in range(2):
        batch.submit(Job({"input_ids": IDS}, config, lambda token: False, lambda reason: None))
    batch.step()
    adapted.set_adapter("b")
    while batch.has_work:
        batch.step()
    right = in_a_batch(model, PrefixCache(1 << 30))
    assert in_a_batch(model, prompts) == right


@pytest.mark.parametrize("restarts", [False, True])
def test_another_adapter_of_the_same_name_and_scale_has_prompts_of_its_own(restarts, tmp_path, monkeypatch):
    """In memory and on the disk, in the same process and behind a restart."""
    monkeypatch.setattr(disk_module, "BLOCK", 16)
    adapted = with_two_adapters()
    first, second = (peft.get_peft_model_state_dict(adapted, adapter_name=name) for name in ("default", "b"))
    first = {name: tensor.clone() for name, tensor in first.items()}
    model, disk = adapted.get_base_model(), Disk(tmp_path, 1 << 30)
    prompts, answers = PrefixCache(1 << 30, disk=disk), []
    for weights in (first, second, first):
        peft.set_peft_model_state_dict(adapted, weights, adapter_name="default")
        if restarts:
            prompts.close()
            disk = Disk(tmp_path, 1 << 30)
            prompts = PrefixCache(1 << 30, disk=disk)
        answers.append(in_a_batch(model, PrefixCache(0)))
        assert in_a_batch(model, prompts) == answers[-1]
        while prompts.is_storing:
            prompts.store()
    assert answers[0] == answers[2] != answers[1]
    assert disk.hits == 1  # the first one's own, behind the other
    prompts.close()
