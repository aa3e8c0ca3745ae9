"""The mask of causal attention without memory, beside transformers' own."""

import gc
import weakref

import pytest
import torch
from support import tiny_models
from support.models import output
from transformers import DynamicCache, GptOssConfig, StaticCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    padding_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

import torch_moe_mps
from torch_moe_mps.models.attention.attention import NAME
from torch_moe_mps.models.attention.causal_mask import CausalMask
from torch_moe_mps.models.attention.mask_functions import order_of, window_of_last
from torch_moe_mps.models.graphs.tracing import Recorder
from torch_moe_mps.models.upstream.calls import cache_argument

CONFIG = GptOssConfig(
    num_hidden_layers=2, sliding_window=6, num_attention_heads=2, num_key_value_heads=1, head_dim=4
)


def no_cache(config):
    return None


def masks(past, tokens, create, cache=None, implementation=NAME, **options):
    """Ours and that of transformers' eager attention, of tokens behind others."""
    made = []
    for name in (implementation, "eager"):
        config = GptOssConfig(**{**CONFIG.to_dict(), "attn_implementation": name})
        config._attn_implementation = name
        held = DynamicCache(config=config) if cache is None else cache(config)
        for layer in range(2 if past else 0):
            held.update(*(torch.zeros(2, 1, past, 4) for _ in range(2)), layer)
        made.append(
            create(
                config,
                torch.zeros(2, tokens, 8),
                options.get("attention_mask"),
                **cache_argument(create, held),
                **{name: value for name, value in options.items() if name != "attention_mask"},
            )
        )
    return made


@pytest.mark.parametrize("create", [create_causal_mask, create_sliding_window_causal_mask])
@pytest.mark.parametrize("past", [0, 3, 5, 20])
def test_elements(create, past):
    for tokens in (2, 6, 9):
        ours, own = masks(past, tokens, create)
        assert type(ours) is CausalMask and ours._elements is None
        assert (ours.shape, ours.dtype, ours.device) == (own.shape, own.dtype, own.device)
        assert ours.seen == own.shape[3]
        for start, stop in ((0, tokens), (-1, None), (1, tokens), (0, -1)):
            part = ours[:, :, start:stop, :]
            assert type(part) is CausalMask and part._elements is None
            assert part.hides_nothing == bool((own[:, :, start:stop] == 0).all())
            assert torch.equal(part + 0.0, own[:, :, start:stop])
        of_indexer = ours[:, 0, :, :]
        assert type(of_indexer) is CausalMask and of_indexer._elements is None
        assert torch.equal(of_indexer + 0.0, own[:, 0]) and torch.equal(
            of_indexer[:, 1:] + 0.0, own[:, 0, 1:]
        )
        assert type(ours[0]) is torch.Tensor and torch.equal(ours[0], own[0])
        assert torch.equal(torch.cat([ours[..., 1:], ours], -1), torch.cat([own[..., 1:], own], -1))


@pytest.mark.parametrize("tokens", [2, 5, 13])
def test_two_sides(tokens):
    """An encoder's windows: with padding, in the words of eager and of sdpa; their slices are elements."""
    create = create_bidirectional_sliding_window_mask
    rows = padded((0, tokens, 0), (tokens // 2, tokens - tokens // 2, 0))
    for shown in (None, rows):
        ours, own = masks(0, tokens, create, no_cache, attention_mask=shown)
        if own is None:  # a window that hides nothing
            assert tokens < 6 and ours is None
            continue
        assert type(ours) is CausalMask and (ours.window, ours.lookahead) == (7, 6)
        assert torch.equal(ours + 0.0, own)
        for start, stop in ((0, tokens), (-1, None), (1, tokens)):
            part = ours[:, :, start:stop]
            assert (type(part) is CausalMask) == (start == 0)
            assert torch.equal(part + 0.0, own[:, :, start:stop])
    ours, own = masks(0, tokens, create, no_cache, and_mask_function=lambda batch, head, q, k: k != 1)
    assert type(ours) is torch.Tensor and torch.equal(ours, own)


def function_of(function, tokens, keys):
    """Which keys tokens see, by the function itself."""
    q, k = torch.tensor([*tokens])[:, None], torch.tensor([*keys])
    return function(torch.tensor(0), torch.tensor(0), q, k).expand(len(tokens), len(keys))


def test_functions_of_masks():
    """Windows and orders are read from their functions, whatever they consist of; nothing else is."""
    tokens, keys = range(4, 20), range(2, 20)
    near, reach = sliding_window_overlay(5), sliding_window_bidirectional_overlay(3)

    def first(batch, head, q, k):
        return k - 2 < float("inf")

    for function, order in (
        (causal_mask_function, (None, 0)),
        (and_masks(near, causal_mask_function), (5, 0)),
        (and_masks(reach, bidirectional_mask_function), (4, 3)),
        (or_masks(and_masks(near, causal_mask_function), and_masks(causal_mask_function, first)), (None, 0)),
        (lambda b, h, q, k: (q - k > -2) & (k >= q - 3), (4, 1)),
        (lambda b, h, q, k: (k <= q) & (k >= 2) & (q < 20), (None, 0)),
    ):
        assert order_of(function, tokens, keys) == order
        window, lookahead = order
        distance = torch.tensor([*tokens])[:, None] - torch.tensor([*keys])
        seen = (distance >= -lookahead) & (distance < (99 if window is None else window))
        assert torch.equal(function_of(function, tokens, keys), seen)
    table = torch.ones(20, dtype=torch.bool)
    for function in (
        bidirectional_mask_function,
        or_masks(near, reach),
        and_masks(causal_mask_function, lambda b, h, q, k: k < 19),
        lambda b, h, q, k: (k <= q) & (k > 2),
        lambda b, h, q, k: (k <= q) & (q > 5),
        lambda b, h, q, k: k != 3,
        lambda b, h, q, k: k <= q if b == 0 else k <= q + 1,
        lambda b, h, q, k: (k <= q) and (k >= 0),
        lambda b, h, q, k: k * 2 <= q,
        lambda b, h, q, k: k // 4 == q // 4,
        lambda b, h, q, k: k <= torch.tensor(3),
        padding_mask_function(table[None]),
        lambda b, h, q, k: True,
    ):
        assert order_of(function, tokens, keys) is None


def test_static_caches():
    """Keys behind the last token hold nothing yet."""
    for past, tokens in ((0, 4), (3, 4), (0, 9), (8, 3)):
        for create in (create_causal_mask, create_sliding_window_causal_mask):
            ours, own = masks(past, tokens, create, lambda config: StaticCache(config, max_cache_len=12))
            assert type(ours) is CausalMask and torch.equal(ours + 0.0, own)


def test_one_token():
    """A mask as the model's own attention gets it, which tells that the token sees all keys."""
    for past in (0, 3, 20):
        for create in (create_causal_mask, create_sliding_window_causal_mask):
            ours, own = masks(past, 1, create)
            assert ours.hides_nothing and torch.equal(ours + 0.0, own) and (own == 0).all()


@pytest.mark.parametrize("past", [0, 3, 20])
def test_one_token_sees_no_more_for_what_is_joined_to_the_order(past):
    """As models with images ask: their blocks end before the token, or with it."""
    blocks, window = torch.zeros(2, past + 1, dtype=torch.long), sliding_window_overlay(4)
    known = [
        {"block_sequence_ids": blocks},
        {"or_mask_function": blockwise_overlay(blocks)},
        {"or_mask_function": blockwise_overlay(blocks), "and_mask_function": window},
        {"and_mask_function": and_masks(window, sliding_window_overlay(3), causal_mask_function)},
        {"and_mask_function": lambda b, h, q, k: k > q - 3},
    ]
    others = [
        {"or_mask_function": lambda b, h, q, k: k == 1, "and_mask_function": or_masks(window, window)},
        {"and_mask_function": lambda b, h, q, k: k != 1},
        {"and_mask_function": or_masks(window, lambda b, h, q, k: k == 0)},
    ]
    for options in (*known, *others):
        ours, own = masks(past, 1, create_causal_mask, **options)
        assert type(ours) is (CausalMask if options in known else torch.Tensor)
        assert torch.equal(ours + 0.0, own)


def padded(*rows):
    """A 2D mask. Rows are the numbers of padded tokens on the left, of tokens, and of padded ones."""
    counts = [torch.tensor(row) for row in rows]
    return torch.stack([torch.tensor([0, 1, 0]).repeat_interleave(count) for count in counts])


@pytest.mark.parametrize(
    "mask",
    [
        padded((2, 11, 0), (0, 13, 0)),
        padded((0, 5, 8), (0, 13, 0)),  # on the right
        padded((4, 8, 1), (1, 11, 1)),
        padded((12, 1, 0), (13, 0, 0)),  # a row of nothing else
        padded((0, 11, 0), (2, 9, 0)),  # shorter: the rest is padding
    ],
)
@pytest.mark.parametrize("past", [0, 3, 12])
def test_padding(mask, past):
    """A range of keys for each row, of which slices keep what they see."""
    for create in (create_causal_mask, create_sliding_window_causal_mask):
        static = [lambda config: StaticCache(config, max_cache_len=15)] * (past < 12)  # no mask of one token
        for cache in (None, *static):
            ours, own = masks(past, 13 - past, create, cache, attention_mask=mask)
            if ours is None:
                assert past == 12 and (own == 0).all()  # the padding is before the window
                continue
            assert type(ours) is CausalMask and torch.equal(ours + 0.0, own)
            assert torch.equal(ours[:, :, -1:] + 0.0, own[:, :, -1:])


def test_the_ranges_of_a_batch_are_made_once():
    """As generate asks in every step, with a token more; they are held as long as the model's config."""
    config = GptOssConfig(**CONFIG.to_dict())
    config._attn_implementation = NAME

    def key_range(config, tokens):
        mask = padded((4, tokens - 4, 0), (0, tokens, 0))
        return create_causal_mask(config, torch.zeros(2, tokens, 8), mask, None).key_range

    first = key_range(config, 12)
    assert key_range(config, 13) is first and first.tolist() == [[4, 2**31 - 1], [0, 2**31 - 1]]
    held = weakref.ref(first)
    del first
    gc.collect()
    assert held() is not None and key_range(config, 14) is held()
    del config
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.tensor([[1] * 13, [0, 1, 1, 0] + [1] * 9])},
        {"and_mask_function": lambda b, h, q, k: k % 2 == 0},
        {"or_mask_function": lambda b, h, q, k: k == 12},
        {"block_sequence_ids": torch.tensor([[-1] * 4 + [0] * 9] * 2)},
    ],
)
def test_more_than_order(options):
    """transformers' own masks where something else hides keys, or shows more."""
    for create in (create_causal_mask, create_sliding_window_causal_mask):
        ours, own = masks(3, 10, create, **options)
        assert type(ours) is torch.Tensor and torch.equal(ours, own)


def test_models_that_read_the_mask_get_one():
    """Also where a token sees all keys."""
    for past, tokens in ((3, 10), (3, 1), (0, 1)):
        ours, own = masks(past, tokens, create_causal_mask, allow_is_causal_skip=False)
        assert type(ours) is CausalMask and torch.equal(ours + 0.0, own)


def test_padding_that_is_none():
    ours, own = masks(3, 10, create_causal_mask, attention_mask=torch.ones(2, 13, dtype=torch.int64))
    assert type(ours) is CausalMask and ours.key_range is None and torch.equal(ours + 0.0, own)


def test_packed_sequences():
    config = GptOssConfig(**CONFIG.to_dict())
    config._attn_implementation = NAME
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    mask = create_causal_mask(config, torch.zeros(1, 5, 8), None, None, position_ids=positions)
    assert type(mask) is torch.Tensor and (mask[0, 0, 3, :3] < 0).all()


def test_chunks():
    config = GptOssConfig(**CONFIG.to_dict())
    config._attn_implementation, config.attention_chunk_size = NAME, 6
    mask = create_chunked_causal_mask(config, torch.zeros(1, 9, 8), None, None)
    assert type(mask) is torch.Tensor and mask[0, 0, 6, 5] < 0


def test_a_model_on_meta_takes_a_mask():
    """As with the model's own code: nothing reads the mask's values."""
    model = tiny_models.tiny_model("gemma2").to("meta")
    model.set_attn_implementation("eager")
    ids = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    for accelerated in (False, True):
        if accelerated:
            torch_moe_mps.accelerate(model)
        assert output(model, ids, attention_mask=torch.ones_like(ids)).shape == (
            2,
            5,
            model.config.vocab_size,
        )


def test_blocks_that_are_none():
    """As Gemma 4 Unified asks for each token, beside a window: what a recorded call fills is known."""

    def ids(first, behind, *changes):
        made = torch.nn.functional.pad(torch.full((1, 1), first), (0, 3), value=behind)
        for change in changes:
            made[:, 1:2].copy_(change) if isinstance(change, torch.Tensor) else made.add_(change)
        made[:, :1].copy_(made[:, 3:])
        return made

    window = sliding_window_causal_mask_function(4)
    for make, expected in (
        (lambda: ids(-1, -1), (4,)),
        (lambda: ids(-1, -2, torch.full((1, 1), -3)), (4,)),
        (lambda: ids(-1, 0), None),
        (lambda: ids(0, -1), None),
        (lambda: ids(-1, -1, torch.full((1, 1), 2)), None),
        (lambda: ids(-1, -1, torch.arange(1)), None),
        (lambda: ids(-1, -1, 2), None),
        (lambda: torch.zeros(1, 4, dtype=torch.long), None),
    ):
        known = Recorder().run(lambda: window_of_last(or_masks(window, blockwise_overlay(make()))))  # noqa: B023
        assert known == expected
        assert window_of_last(or_masks(window, blockwise_overlay(make()))) is None  # it may be anything
