"""Copies, pickles and checkpoints of accelerated models."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from support import tiny_models
from support.models import assert_close, eager, operators_of, output, prompt

import torch_moe_mps

transformers.logging.set_verbosity_error()


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "gemma4"])
def test_copies_are_accelerated(architecture):
    model = tiny_models.tiny_model(architecture)
    torch_moe_mps.accelerate(model)
    expected, used = output(model, prompt()), operators_of(lambda: output(model, prompt()))
    for copied in (copy.deepcopy, through_pickle, through_torch_save):
        twin = copied(model)
        assert operators_of(lambda: output(twin, prompt())) == used != {}  # noqa: B023
        assert torch.equal(output(twin, prompt()), expected)
        torch_moe_mps.restore(twin)
        assert operators_of(lambda: output(twin, prompt())) == {}  # noqa: B023
        assert operators_of(lambda: output(model, prompt())) == used


def test_state_dict_is_unchanged():
    model = tiny_models.tiny_model("gemma4")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch_moe_mps.accelerate(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "moe_mps" not in str(model.config.to_dict())


def test_sharded_and_tied_checkpoint(tmp_path):
    model = eager(tiny_models.tiny_model("qwen3_moe", tie_word_embeddings=True))
    expected = output(model, prompt())
    torch_moe_mps.accelerate(model)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(tmp_path, low_cpu_mem_usage=True, device_map="cpu").eval()
    torch_moe_mps.accelerate(loaded)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_close(output(loaded, prompt()), expected, 1e-5)
