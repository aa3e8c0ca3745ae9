"""Which loops over layers can be cut, from their code."""

import pytest
import torch
from support import tiny_models
from torch import nn

from torch_moe_mps.transformers.pipeline.loop import CannotBeCut, read_loop
from torch_moe_mps.transformers.pipeline.stages import layers_of


class Layer(nn.Module):
    shares = False

    def forward(self, x, shared=None, index=None, extra=None):
        if self.shares:
            shared["keys"] = x
        return x + 1


class Base(nn.Module):
    first_shared = 9

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.table = Table()
        self.embed_tokens = nn.Embedding(5, 3)


class Table(nn.Module):
    def forward(self, x, positions):
        return positions.to(x.dtype)


class Plain(Base):
    def forward(self, input_ids):
        inputs_embeds = self.embed_tokens(input_ids)
        hidden = inputs_embeds
        table = self.table(hidden, torch.arange(inputs_embeds.shape[1]))
        for layer in self.layers[: self.first_shared]:
            hidden = layer(hidden, extra=table)
        return hidden


class HandsOnIndices(Base):
    def forward(self, inputs_embeds):
        hidden, index = inputs_embeds, None
        for i, layer in enumerate(self.layers):
            if i == self.first_shared:
                hidden, index = hidden[:1], index[:1]
            hidden, index = layer(hidden, index=index)
            hidden = hidden * 2
        return hidden


class HandsOnAnother(Base):
    def forward(self, inputs_embeds):
        hidden = inputs_embeds
        total = hidden * 0
        for layer in self.layers:
            new = layer(hidden, extra=total)
            total = total + hidden
            hidden = new
        return hidden


class Collects(Base):
    def forward(self, inputs_embeds):
        hidden, sums = inputs_embeds, 0
        for layer in self.layers:
            hidden = layer(hidden)
            if hidden.requires_grad:
                sums = sums + hidden.sum()
        return hidden, sums


class Shares(Base):
    def forward(self, inputs_embeds):
        hidden, shared = inputs_embeds, {}
        for layer in self.layers:
            hidden = layer(hidden, shared=shared)
        return hidden


class CallsTwice(Base):
    def forward(self, inputs_embeds):
        hidden = inputs_embeds
        for layer in self.layers:
            hidden = layer(layer(hidden))
        return hidden


class ReadsEmbeddings(Base):
    def forward(self, input_ids):
        inputs_embeds = self.embed_tokens(input_ids)
        hidden = inputs_embeds
        extra = inputs_embeds.mean(-1)
        for layer in self.layers:
            hidden = layer(hidden, extra=extra)
        return hidden


class NoLoop(Base):
    def forward(self, inputs_embeds):
        return self.layers[1](self.layers[0](inputs_embeds))


def test_a_loop_that_hands_on_hidden_states():
    loop = read_loop(Plain())
    assert (loop.layers, loop.results, loop.passed) == ("layers", ["hidden"], {"hidden": 0})
    assert not loop.uses_embeddings


def test_all_that_a_layer_returns_can_be_handed_on():
    loop = read_loop(HandsOnIndices())
    assert loop.results == ["hidden", "index"] and loop.passed == {"hidden": 0, "index": "index"}


def test_a_branch_that_attributes_rule_out_does_not_count():
    model = HandsOnIndices()
    model.first_shared = 1
    assert read_loop(model).results == ["hidden", "index"]  # both come from a layer after the branch
    model = Shares()
    assert read_loop(model).results == ["hidden"]
    model.layers[1].shares = True
    with pytest.raises(CannotBeCut, match="write into shared, which later ones read"):
        read_loop(model)


@pytest.mark.parametrize(
    ("cls", "line"),
    [
        (HandsOnAnother, "hands on total beside what layers return"),
        (Collects, "hands on sums beside what layers return"),
        (CallsTwice, "does not call each layer once"),
        (NoLoop, "has no loop over its layers"),
    ],
)
def test_what_cannot_be_cut(cls, line):
    with pytest.raises(CannotBeCut, match=line):
        read_loop(cls())


def test_values_of_embeddings_beside_hidden_states():
    assert read_loop(ReadsEmbeddings()).uses_embeddings


@pytest.mark.parametrize(
    ("architecture", "results", "uses_embeddings"),
    [
        ("qwen3_moe", 1, False),
        ("deepseek_v4", 1, False),
        ("hy_v4", 2, False),
        ("zaya", 2, False),
        ("qwen4_exp", 1, True),
        ("llama", 1, False),
    ],
)
def test_architectures(architecture, results, uses_embeddings):
    _, loop, _ = layers_of(tiny_models.tiny_model(architecture))
    assert len(loop.results) == results == len(loop.passed)
    assert loop.uses_embeddings == uses_embeddings


@pytest.mark.parametrize(
    ("architecture", "line"),
    [
        ("inkling2", "hands on block_states beside what layers return"),
        ("muse_spark", "MuseSparkTextModel has no output head for tokens"),
    ],
)
def test_architectures_that_cannot_be_cut(architecture, line):
    with pytest.raises(CannotBeCut, match=line):
        layers_of(tiny_models.tiny_model(architecture))
