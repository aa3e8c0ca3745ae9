"""Which models can be cut between their layers, from calls of their code."""

import pytest
import torch
from support import tiny_models
from torch import nn
from transformers import LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from torch_moe_mps.pipeline.loop import CannotBeCut, find_loop
from torch_moe_mps.pipeline.stages import Elsewhere, Stage


class Layer(nn.Module):
    """Returns the hidden states, made from these and another tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, hidden, other=None):
        return hidden * self.weight if other is None else hidden * self.weight + other


class Pair(Layer):
    def forward(self, hidden, other=None):
        return super().forward(hidden, other), hidden.argmax(-1, keepdim=True)


class Single(Layer):
    def forward(self, hidden):
        return (super().forward(hidden),)


class InList(Layer):
    def forward(self, hidden):
        return [super().forward(hidden)]


class Sharing(Layer):
    """Reads what the first layer put into a dictionary."""

    def forward(self, hidden, shared):
        return hidden + shared.setdefault("first", hidden * self.weight)


class Folding(Layer):
    """Reads what the first layer made of its weight."""

    def forward(self, hidden, shared):
        return hidden * shared.setdefault("factors", self.weight + 1)


class Masking(Layer):
    """Reads what the first layer made, of which any other would make the same."""

    def forward(self, hidden, shared):
        return hidden * shared.setdefault("mask", torch.arange(32, device=hidden.device) > 3)


class Writing(Layer):
    """Adds to what earlier layers have written into a tensor."""

    def forward(self, hidden, table):
        table[0] += (hidden * self.weight).sum()
        return hidden + table


class NeedsIds(Layer):
    def forward(self, hidden, ids):
        return hidden + ids.unsqueeze(-1)


def changed(run, layer=Layer):
    """A model with three such layers, which `run` calls with hidden states and ids."""

    def forward(self, input_ids=None, inputs_embeds=None, cache=None, use_cache=None):
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return BaseModelOutputWithPast(run(self, hidden, input_ids), cache)

    model = tiny_models.tiny_model("llama")
    model.model.__class__ = type("Changed", (LlamaModel,), {"forward": forward})
    model.model.layers = nn.ModuleList([layer(), layer(), layer()])
    return model


def in_turn(layers, hidden, *others):
    for layer in layers:
        hidden = layer(hidden, *others)
    return hidden


def plain(self, hidden, ids):
    return in_turn(self.layers, hidden)


def hands_on_indices(self, hidden, ids):
    index = None
    for layer in self.layers:
        hidden, index = layer(hidden, index)
        hidden, index = hidden * 2, index + 1
    return hidden


def takes_elements(self, hidden, ids):
    for layer in self.layers:
        hidden = layer(hidden)[0]
    return hidden


def reads_shapes(self, hidden, ids):
    like = torch.zeros_like(hidden) + hidden.new_ones(hidden.shape[1], 1)
    return in_turn(self.layers, hidden, like.to(hidden))


def reads_embeddings(self, hidden, ids):
    return in_turn(self.layers, hidden, hidden.mean(-1, keepdim=True))


def returns_embeddings(self, hidden, ids):
    return hidden + plain(self, hidden, ids)


def finds_ids(self, hidden, ids):
    if ids is None:
        ids = (hidden @ self.embed_tokens.weight.T).argmax(-1)
    return reads_ids(self, hidden, ids)


def asks_for_ids(self, hidden, ids):
    return reads_ids(self, hidden, ids.abs())


def reads_ids(self, hidden, ids):
    return in_turn(self.layers, hidden, ids)


def hands_on_sums(self, hidden, ids):
    total = hidden * 0
    for layer in self.layers:
        hidden, total = layer(hidden, total), total + hidden
    return hidden


def collects(self, hidden, ids):
    collected = []
    for layer in self.layers:
        hidden = layer(hidden)
        collected.append(hidden)
    return sum(collected)


def shares(self, hidden, ids):
    return in_turn(self.layers, hidden, {})


def gives_a_table(self, hidden, ids):
    return in_turn(self.layers, hidden, torch.zeros(32, device=hidden.device))


def calls_twice(self, hidden, ids):
    for layer in self.layers:
        hidden = layer(layer(hidden))
    return hidden


def leaves_out_one(self, hidden, ids):
    return in_turn(self.layers[:2], hidden)


def reads_a_value(self, hidden, ids):
    return plain(self, hidden, ids) if hidden.sum() > 0 else hidden


@pytest.mark.parametrize(
    ("run", "layer", "results"),
    [
        (plain, Layer, None),
        (takes_elements, Single, 1),
        (hands_on_indices, Pair, 2),
        (shares, Masking, None),
    ],
)
def test_what_can_be_cut(run, layer, results):
    """A stand-in gives what has the form of a layer's results."""
    model = changed(run, layer)
    loop = find_loop(model)
    assert (loop.base, loop.layers, loop.results) == ("model", "model.layers", results)
    assert not loop.uses_embeddings and not loop.convolving
    Stage(1, [2, 1], loop).cut(model)
    hidden = model.model(torch.zeros(2, 4, dtype=torch.long)).last_hidden_state
    assert hidden.shape == (2, 4, 32) and type(model.model.layers[0]) is layer


@pytest.mark.parametrize(
    ("run", "layer", "line"),
    [
        (hands_on_sums, Layer, "has a layer 2 that reads what layer 0 has returned"),
        (shares, Sharing, "has a layer 1 that reads what layer 0 has kept"),
        (shares, Folding, "has a layer 1 that reads what layer 0 has kept"),
        (gives_a_table, Writing, "has a layer 1 that reads what layer 0 has kept"),
        (collects, Layer, "returns what follows from layer 0"),
        (calls_twice, Layer, "does not call each layer once, in their order"),
        (leaves_out_one, Layer, "does not call each layer once, in their order"),
        (plain, InList, "has layers that do not return tensors, but list"),
        (reads_a_value, Layer, "does not run on shapes alone: "),
    ],
)
def test_what_cannot_be_cut(run, layer, line):
    with pytest.raises(CannotBeCut, match=f"^Changed {line}"):
        find_loop(changed(run, layer))


def test_layers_that_are_not_as_in_the_model():
    model = changed(plain)
    model.model.layers[1].layer_idx = 2
    with pytest.raises(CannotBeCut, match="the layers of LlamaForCausalLM are not numbered as in the model"):
        find_loop(model)
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(CannotBeCut, match="Changed has no list of layers"):
        find_loop(model)


@pytest.mark.parametrize(
    ("run", "layer", "uses_embeddings"),
    [
        (reads_shapes, Layer, False),
        (reads_embeddings, Layer, True),
        (returns_embeddings, Layer, True),
        (reads_ids, NeedsIds, False),  # which fails without ids
        (finds_ids, NeedsIds, True),
        (asks_for_ids, NeedsIds, True),  # what it would do with embeddings is not known
    ],
)
def test_values_of_embeddings_beside_hidden_states(run, layer, uses_embeddings):
    assert find_loop(changed(run, layer)).uses_embeddings == uses_embeddings


class Windowed(Layer):
    attention_type, window = "full_attention", 4


class Sliding(Windowed):
    attention_type = "sliding_attention"  # which the model reads of a layer, wherever it is


def test_stand_ins_have_the_values_of_their_layer_and_its_class():
    model = changed(plain, Sliding)
    loop, layer = find_loop(model), model.model.layers[1]
    layer.window = 8
    here = Elsewhere(layer, 1, loop)
    assert (here.attention_type, here.window, here.index) == ("sliding_attention", 8, 1)
    assert here.forward.__func__ is Elsewhere.forward


@pytest.mark.parametrize(
    ("architecture", "options", "results", "uses_embeddings", "convolving"),
    [
        ("qwen3_moe", {}, None, False, set()),
        ("zaya", {}, 2, False, {0, 1}),
        ("qwen3_next", {}, None, False, {0}),
        ("gemma4", {"hidden_size_per_layer_input": 8}, None, True, set()),
    ],
)
def test_architectures(architecture, options, results, uses_embeddings, convolving):
    loop = find_loop(tiny_models.tiny_model(architecture, **options))
    assert (loop.results, loop.uses_embeddings) == (results, uses_embeddings)
    assert loop.convolving == convolving


SHARED = {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "hidden_size_per_layer_input": 8}


@pytest.mark.parametrize(
    ("architecture", "options", "line"),
    [
        ("inkling2", {}, "Inkling2TextModel returns what follows from layer 0"),
        (
            "gemma4",
            SHARED | {"layer_types": ["sliding_attention", "full_attention"] * 2},
            "Gemma4TextModel has a layer 2 that reads what layer 0 has kept",
        ),
        ("muse_spark", {}, "MuseSparkTextModel has no output head for tokens"),
    ],
)
def test_architectures_that_cannot_be_cut(architecture, options, line):
    with pytest.raises(CannotBeCut, match=line):
        find_loop(tiny_models.tiny_model(architecture, **options))
