"""A user's objects stay as they were: the model, its configs and caches."""

import argparse
import copy
import pickle
import threading

import peft
import pytest
import torch
from support import serving as letters
from support import tiny_models
from support.jobs import Asked
from support.models import eager, prompt
from torch import nn
from transformers import DynamicCache, GenerationConfig, Trainer, TrainingArguments

import torch_moe_mps
from torch_moe_mps.commands import serving
from torch_moe_mps.commands.arguments import parser
from torch_moe_mps.commands.bench import Bench
from torch_moe_mps.models.upstream.calls import cache_argument
from torch_moe_mps.serving.engine.defaults import choice
from torch_moe_mps.serving.engine.loop import EngineThread
from torch_moe_mps.serving.http.answer import Token
from torch_moe_mps.serving.http.preparing import prepare
from torch_moe_mps.serving.http.request import Chat, Request
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache

IDS = prompt(1, 9)
SETTINGS = {"max_new_tokens": 3, "pad_token_id": 0, "do_sample": False}

# Facts that transformers' Trainer changes: it seeds torch, and sets checkpoints of gradients up, with hooks
# that let inputs ask for gradients, and without a cache in the config.
OF_TRAINER = {"random numbers", "gradient_checkpointing", "_gradient_checkpointing_func", "config"}
OF_TRAINER |= {"_forward_hooks", "_require_grads_hook", "_require_grads_hooks"}


def model_of(architecture: str = "qwen3_moe") -> nn.Module:
    model = eager(tiny_models.tiny_model(architecture).eval())
    torch_moe_mps.accelerate(model)
    return model


def facts(model: nn.Module) -> dict[str, object]:
    """What somebody may have put onto a model, its modules and its configs, by name."""
    found: dict[str, object] = {"random numbers": torch.get_rng_state().tolist()}
    for name, module in model.named_modules():
        found[f"class of {name}"] = type(module)
        found |= {f"{name}.{key}": plain(value) for key, value in vars(module).items()}
    found["config"], found["settings"] = model.config.to_dict(), vars(copy.deepcopy(model.generation_config))
    return found


def plain(value: object) -> object:
    """A value that can be compared: dictionaries by what they hold, all else by identity."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def by_batch(model):
    configs = [GenerationConfig(**SETTINGS), GenerationConfig(**SETTINGS | {"do_sample": True})]
    before = copy.deepcopy(configs)
    for seed in (1, None):
        torch_moe_mps.generate_batch(model, [*IDS.expand(2, -1)], configs, seed=seed, progress=False)
    assert [*map(vars, configs)] == [*map(vars, before)]


def by_engine(model):
    engine, asked = EngineThread(model, PrefixCache(1 << 20), 2), Asked(IDS, 1)
    asked.job.config = GenerationConfig(**SETTINGS)
    engine.submit(asked.job)
    assert asked.done.wait(60)
    engine.close()


def with_drafts(model):
    torch_moe_mps.generate_batch(
        model, [*IDS.expand(2, -1)], GenerationConfig(**SETTINGS), speculative="lookup", progress=False
    )


def by_bench(model):
    options = argparse.Namespace(prompt=4, max_tokens=2, turn=2, depth=[4], repeats=1)
    [*Bench(model, options).rows()]


def by_importance(model):
    torch_moe_mps.collect_importance(model, torch.arange(512) % 97, progress=False)


@pytest.mark.parametrize("call", [by_batch, by_engine, with_drafts, by_bench, by_importance])
def test_a_model_is_as_it_was(call, tmp_path):
    model = model_of()
    expected, before = model.generate(IDS, **SETTINGS), facts(model)
    call(*(model, tmp_path)[: call.__code__.co_argcount])
    found = changed(before, facts(model))
    assert found == {}
    pickle.dumps(model)
    twin = copy.deepcopy(model)
    assert twin.prepare_inputs_for_generation.__self__ is twin
    assert torch.equal(twin.generate(IDS, **SETTINGS), expected)


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_the_model_of_a_command_is_as_it_was_loaded(command, tmp_path, monkeypatch):
    loaded, own = [], serving.load

    def load(*given):
        model = own(*given)
        loaded.append((model, facts(model)))
        return model

    monkeypatch.setattr(serving, "load", load)
    folder, ended = letters.chat_checkpoint(tmp_path / "model"), threading.Event()
    options = parser().parse_args([command, str(folder), "--device", "cpu"])
    with serving.served_by(options) as served:
        chat = Chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
        request = Request([chat], "messages", choice({"max_new_tokens": 3, "do_sample": True}))
        events = []

        def show(number, event):
            events.append(event)
            if not isinstance(event, Token):
                ended.set()

        prepare(served, request, show).submit(served.generator)
        assert ended.wait(60) and isinstance(events[0], Token)
    ((model, before),) = loaded
    assert changed(before, facts(model)) == {}


def test_a_model_without_its_trained_adapter_is_as_it_was(tmp_path):
    """But for what transformers' Trainer leaves in it."""
    model = model_of()
    expected, before = model.generate(IDS, **SETTINGS), facts(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        gradient_checkpointing=True,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
    )
    Trainer(adapted, arguments, train_dataset=[{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}]).train()
    twin = adapted.unload().eval()
    found = changed(before, facts(model))
    assert twin is model and {name.rpartition(".")[2] for name in found} <= OF_TRAINER, [*found]
    assert torch.equal(model.generate(IDS, **SETTINGS), expected)


def test_answers_without_a_seed_are_drawn_by_chance():
    """Whatever numbers torch's own generator would draw, which stays as it is."""
    model, answers = model_of(), []
    settings = {"max_new_tokens": 16, "pad_token_id": 0, "do_sample": True, "top_k": 0}
    for _ in range(2):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        answers += torch_moe_mps.generate_batch(model, [IDS[0]], GenerationConfig(**settings), progress=False)
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*answers)


def changed(before: dict[str, object], after: dict[str, object]) -> dict[str, object]:
    return {
        key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)
    }


@pytest.mark.parametrize("call", [by_batch, with_drafts])
def test_positions_of_images_stay(call):
    """What a model that reads images knows of the prompt that it read last."""
    model = model_of("qwen3_vl_moe")
    expected = model.generate(IDS, **SETTINGS)
    turning = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    for module in turning:
        module.rope_deltas = torch.tensor([[-3]])
    before = facts(model)
    call(model)
    assert turning and changed(before, facts(model)) == {}
    assert torch.equal(model.generate(IDS, **SETTINGS), expected)


def test_accelerate_is_undone():
    """All that `accelerate` changes is the model's own again."""
    model = eager(tiny_models.tiny_model("qwen3_moe").eval())
    before = facts(model)
    torch_moe_mps.accelerate(model)
    by_batch(model)
    torch_moe_mps.restore(model)
    assert changed(before, facts(model)) == {}


def test_a_cache_of_the_users_is_given_back_whole():
    """The next token behind it is the one that the model has without any cache."""
    model = model_of("qwen3_next")
    torch_moe_mps.generate_batch(model, [IDS[0]], GenerationConfig(**SETTINGS), progress=False)
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        model.generate(IDS, **cache_argument(model, cache), **SETTINGS)
        assert cache._is_user_defined
        torch_moe_mps.restore(model)
