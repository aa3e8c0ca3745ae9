"""Recipes by measurement: the choice, the errors that it rests on, and how much memory measuring takes."""

import itertools
import json

import numpy as np
import pytest
import torch
import transformers
from support import tiny_models
from support.checkpoints import fp8_blocks
from support.models import prompt, tiny

import torch_moe_mps
from torch_moe_mps.quantization import Format, dequantize, quantize
from torch_moe_mps.transformers.checkpoints import budget
from torch_moe_mps.transformers.checkpoints.budget import FormatCost, choose, measured_recipe
from torch_moe_mps.transformers.checkpoints.parts import Parts

transformers.logging.set_verbosity_error()

FOUR, SIX = (Format(bits, 32, "affine") for bits in (4, 6))


def choices(generator: np.random.Generator, levels: int) -> list[FormatCost]:
    """Bytes that rise, errors that mostly fall."""
    sizes = np.cumsum(generator.integers(1, 9, levels)).tolist()
    errors = np.sort(generator.random(levels))[::-1] + 0.05 * generator.random(levels)
    return [FormatCost(FOUR, size, float(error)) for size, error in zip(sizes, errors, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_no_better_choice_by_more_than_one_step(seed):
    """Greedy on convex hulls is at most one step of one item worse than the best of all choices."""
    generator = np.random.default_rng(seed)
    items = [choices(generator, 4) for _ in range(5)]
    limit = int(generator.integers(sum(i[0].nbytes for i in items), sum(i[-1].nbytes for i in items) + 2))
    chosen = choose(items, limit)
    assert sum(c.nbytes for c in chosen) <= limit
    every = (c for c in itertools.product(*items) if sum(choice.nbytes for choice in c) <= limit)
    best = min(sum(choice.error for choice in c) for c in every)
    largest = max(i[0].error - min(c.error for c in i) for i in items)
    found = sum(c.error for c in chosen)
    assert best - 1e-12 <= found <= best + largest


def test_the_most_error_a_byte_first():
    items = [
        [FormatCost(FOUR, 4, 1.0), FormatCost(SIX, 6, 0.9)],
        [FormatCost(FOUR, 4, 1.0), FormatCost(SIX, 6, 0.5)],
        [FormatCost(FOUR, 40, 1.0), FormatCost(SIX, 60, 0.1)],
    ]
    for limit, expected in (
        (48, [4, 4, 4]),
        (50, [4, 6, 4]),
        (52, [6, 6, 4]),
        (71, [6, 6, 4]),
        (72, [6] * 3),
    ):
        assert [c.format.bits for c in choose(items, limit)] == expected
    with pytest.raises(ValueError, match="budget must be 48 bytes or more, got 47"):
        choose(items, 47)


def errors_of(model, ids, name: str, format: Format) -> float:
    """By the definition: layer 1 in float32 with one weight replaced by what its codes stand for."""
    layer, seen = model.model.layers[1], []
    hook = layer.register_forward_hook(lambda *a: seen.append(a[-1]))
    weight = model.get_parameter(
        f"{name}.weight" if name.endswith("_proj") and "experts" not in name else name
    )
    dense = weight.data.clone()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
        weight.copy_(dequantize(*quantize(dense, **format.to_dict()), **format.to_dict()))
        model(input_ids=ids, use_cache=False)
        weight.copy_(dense)
    hook.remove()
    expected, rounded = (t.double() for t in seen)
    return float((rounded - expected).square().sum() / expected.square().sum())


def found_errors(monkeypatch, *arguments, **options) -> tuple[dict, dict]:
    kept = []
    measure = budget._measure
    with monkeypatch.context() as patch:
        patch.setattr(budget, "_measure", lambda *a: kept.append(measure(*a)) or kept[0])
        return measured_recipe(*arguments, **options), kept[0]


@pytest.mark.parametrize("where", [pytest.param("memory", marks=pytest.mark.sweep), "checkpoint"])
def test_errors_are_those_of_the_definition(where, tmp_path, monkeypatch):
    model, ids = tiny("qwen3_moe"), prompt(2, 16)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    options = {"group_size": 32, "bits": (4, 6), "progress": False}
    if where == "memory":
        recipe, errors = found_errors(monkeypatch, model, ids, 7.5, **options)
    else:
        with Parts(str(tmp_path)) as checkpoint:
            recipe, errors = found_errors(monkeypatch, checkpoint, ids, 7.5, **options)
            assert all(p.is_meta for n, p in checkpoint.model.named_parameters() if n != "model.norm.weight")
    names = ["self_attn.q_proj", "self_attn.o_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for name in (f"model.layers.1.{name}" for name in names):
        for format in (FOUR, SIX):
            expected = errors_of(model, ids, name, format)
            assert errors[name][format] == pytest.approx(expected, rel=1e-3)
    assert {"model.embed_tokens", "lm_head"} < errors.keys()
    recipe = json.loads(json.dumps(recipe))
    loaded = torch_moe_mps.from_pretrained(str(tmp_path), **recipe)
    entries = [e for entries in loaded.hf_quantizer.report.modules.values() for e in entries]
    bits = 8 * sum(e.quantized_bytes for e in entries) / sum(e.dense_bytes / 4 for e in entries)
    assert {e.format.bits for e in entries} == {4, 6} and 7.2 < bits <= 7.5
    torch_moe_mps.accelerate(model, **recipe)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_tied_layers_have_one_format(tmp_path):
    with tiny_models.groups_of_32():
        model = tiny_models.tiny_model("qwen3_moe", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    with Parts(str(tmp_path)) as checkpoint:
        recipe = measured_recipe(checkpoint, prompt(), 6.5, 32, (3, 4, 6), progress=False)
    assert recipe == measured_recipe(model, prompt(), 6.5, 32, (3, 4, 6), progress=False)
    loaded = torch_moe_mps.from_pretrained(str(tmp_path), **recipe)
    assert loaded.lm_head.packed is loaded.model.embed_tokens.packed


@pytest.mark.one_schedule
def test_errors_on_a_device_are_those_on_the_cpu(device, tmp_path, monkeypatch):
    """The parts of the checkpoint are read to the device and run there."""
    model = tiny("qwen3_moe")
    model.save_pretrained(tmp_path)
    options = {"group_size": 32, "bits": (4, 6), "progress": False}
    recipe, errors = found_errors(monkeypatch, model, prompt(), 6.5, **options)
    with Parts(str(tmp_path), device) as checkpoint:
        ids = prompt().to(device)
        again, found = found_errors(monkeypatch, checkpoint, ids, 6.5, **options)
    assert again == recipe and len(set(recipe["overrides"].values()) | {recipe["bits"]}) == 2
    assert found.keys() == errors.keys()
    for name, of_formats in errors.items():
        assert found[name] == pytest.approx(of_formats, rel=1e-3), name


def test_fp8_is_measured_as_what_it_stands_for(tmp_path):
    """The weights are those of transformers, whose scales are not rounded on the way."""
    fp8_blocks(tiny("qwen3_moe").to(torch.bfloat16), tmp_path)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with Parts(str(tmp_path)) as checkpoint:
        for name in checkpoint.modules:
            with checkpoint.loaded(name) as module:
                for parameter, values in module.named_parameters():
                    assert torch.equal(values, dense.get_parameter(f"{name}.{parameter}")), (name, parameter)
        recipe = measured_recipe(checkpoint, prompt(), 5.0, 32, (3, 4, 6), progress=False)
    assert recipe == measured_recipe(dense, prompt(), 5.0, 32, (3, 4, 6), progress=False)


def test_quantised_checkpoints_are_one_line(tmp_path):
    model = tiny("qwen3_moe")
    torch_moe_mps.accelerate(model, 4, 32)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="must be a dense checkpoint, or one in FP8, got one that is quantised"
    ):
        Parts(str(tmp_path))


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", tiny_models.architectures())
def test_every_architecture(architecture, tmp_path):
    model = tiny(architecture)
    model.save_pretrained(tmp_path)
    with Parts(str(tmp_path), model_class=type(model)) as checkpoint:
        recipe = measured_recipe(checkpoint, prompt(), 7.5, 32, (3, 4, 8), progress=False)
    torch_moe_mps.from_pretrained(str(tmp_path), type(model), **recipe)
