"""Layers of transformers' caches: what they hold, by which names, and what their methods do."""

import inspect

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, Qwen3Config, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

CONFIG = Qwen3Config(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=8, head_dim=4
)


def states(tokens: int, first: int = 0) -> torch.Tensor:
    """[1, 2, tokens, 4], whose elements say which token they are of."""
    return torch.arange(first, first + tokens).float()[None, None, :, None].expand(1, 2, tokens, 4)


def of_tokens(held: torch.Tensor) -> list[float]:
    return held[0, 0, :, 0].tolist()


def test_an_empty_layer_is_not_initialised():
    layer = DynamicLayer()
    assert (layer.keys, layer.values, layer.is_initialized) == (None, None, False)
    layer.lazy_initialization(states(3), states(3))
    assert layer.is_initialized and layer.keys.numel() == layer.values.numel() == 0 and layer.keys.dim() == 1


def test_a_layer_holds_keys_and_values():
    layer = DynamicLayer()
    assert [of_tokens(part) for part in layer.update(states(3), states(3))] == [[0, 1, 2]] * 2
    layer.update(states(2, 3), states(2, 3), **{"kwargs": None} if takes_kwargs(layer.update) else {})
    assert of_tokens(layer.keys) == of_tokens(layer.values) == [0, 1, 2, 3, 4]
    assert layer.get_seq_length() == 5 and layer.get_mask_sizes(1) == (6, 0)
    layer.crop(-2)
    assert of_tokens(layer.keys) == [0, 1, 2]
    layer.reorder_cache(torch.tensor([0, 0]))
    assert layer.keys.shape == (2, 2, 3, 4)
    layer.batch_select_indices(torch.tensor([1]))
    layer.batch_repeat_interleave(3)
    assert layer.values.shape == (3, 2, 3, 4)
    layer.reset()
    assert layer.get_seq_length() == 0


def takes_kwargs(method) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(method).parameters.values())


def test_attributes_of_layers():
    """No more than these: a captured token and a kept prompt ask for the state of a layer by attributes."""
    layers = {
        "DynamicLayer": (DynamicLayer(), set()),
        "DynamicSlidingWindowLayer": (
            DynamicSlidingWindowLayer(sliding_window=4),
            {"sliding_window", "cumulative_length", "_sliding_window_tensor", "record_past"},
        ),
        "DynamicIndexedLayer": (
            DynamicIndexedLayer(),
            {"indexer_keys", "is_indexer_initialized", "indexer_position_ids"},
        ),
    }
    for name, (layer, more) in layers.items():
        layer.update(states(3), states(3))
        known = {"keys", "values", "is_initialized", "device", "dtype"} | more
        assert vars(layer).keys() - {"dtype"} == known - {"dtype"}, name


def test_a_window_holds_one_key_less_than_it_has():
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    keys, _ = layer.update(states(6), states(6))
    assert of_tokens(keys) == [0, 1, 2, 3, 4, 5] and of_tokens(layer.keys) == [3, 4, 5]
    assert layer.cumulative_length == layer.get_seq_length() == 6
    keys, _ = layer.update(states(1, 6), states(1, 6))
    assert of_tokens(keys) == [3, 4, 5, 6] and of_tokens(layer.keys) == [4, 5, 6]
    assert layer.get_mask_sizes(1) == (4, 4)


def test_a_window_records_its_past():
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    layer.activate_past_recording()
    assert layer.record_past
    layer.update(states(6), states(6))
    assert of_tokens(layer.keys)[-3:] == [3, 4, 5] and len(of_tokens(layer.keys)) == 6


def test_an_indexed_layer_holds_keys_of_an_indexer():
    layer = DynamicIndexedLayer()
    assert (layer.indexer_keys, layer.is_indexer_initialized) == (None, False)
    layer.update(states(3), states(3))
    assert layer.update_indexer(torch.ones(1, 3, 4)).shape == (1, 3, 4)
    assert layer.update_indexer(torch.ones(1, 2, 4)).shape == (1, 5, 4) == layer.indexer_keys.shape


def test_a_linear_layer_holds_states_by_number():
    layer = LinearAttentionLayer()
    assert isinstance(layer, LinearAttentionCacheLayerMixin)
    assert layer.conv_states == layer.recurrent_states == {0: None} and layer.has_previous_state == {0: False}
    layer.update_recurrent_state(torch.ones(1, 2))
    layer.update_conv_state(torch.ones(1, 3, 4))
    assert torch.equal(layer.recurrent_states[0], torch.ones(1, 2)) and layer.conv_states[0].shape == (
        1,
        3,
        4,
    )
    first = layer.conv_states[0]
    layer.update_conv_state(torch.zeros(1, 3, 1))
    assert layer.conv_states[0] is first and first[0, 0].tolist() == [1, 1, 1, 0]  # written in place


def test_a_cache_holds_layers():
    cache = DynamicCache(config=CONFIG)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2 and cache.offloading is False
    cache.update(states(3), states(3), 0)
    assert cache.get_seq_length() == 3 and cache.get_seq_length(1) == 0 and cache.get_query_offset() == 3
    assert isinstance(cache, Cache) and isinstance(cache.layers[0], CacheLayerMixin)
    other = DynamicCache()
    other.update(states(3), states(3), 1)  # which makes the layers up to it
    assert len(other.layers) == 2


def test_a_cache_of_a_decoder_behind_an_encoder():
    cache = EncoderDecoderCache(DynamicCache(config=CONFIG), DynamicCache(config=CONFIG))
    assert type(cache.self_attention_cache) is type(cache.cross_attention_cache) is DynamicCache
    assert cache.is_updated == {0: False, 1: False} or cache.is_updated == {}


def test_a_static_cache_says_what_it_is():
    cache = StaticCache(CONFIG, 8)
    assert cache.is_compileable is True and len(cache.layers) == 2


@pytest.mark.parametrize("name", ["offload", "prefetch", "reset", "crop", "reorder_cache"])
def test_a_layer_without_a_cache_has_all_methods(name):
    assert callable(getattr(DummyLayer, name))
