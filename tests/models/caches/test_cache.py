"""The cache that grows in place against transformers' own, bit for bit, and what it copies and holds."""

import copy
import pickle
import random
import warnings

import pytest
import torch
from support.memory import Memory
from support.models import assert_close, eager, in_parts
from support.sweep import in_sweep
from support.tiny_models import other_causal, other_model, tiny_model
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLSparseCacheLayer

import torch_moe_mps
from torch_moe_mps.models.caches import buffer, layers
from torch_moe_mps.models.caches.cache import QuantizedCache, grow_cache
from torch_moe_mps.models.caches.classes import growing_class
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument

PLAIN = [
    (DynamicLayer, {}),
    (DynamicIndexedLayer, {}),
    (MiniMaxM3VLSparseCacheLayer, {}),
    (LinearAttentionAndFullAttentionLayer, {}),
    *((DynamicSlidingWindowLayer, {"sliding_window": window}) for window in (1, 2, 7, 100, 600)),
    (LinearAttentionAndSlidingWindowAttentionLayer, {"sliding_window": 7}),
]
NEW_TOKENS = [1, 1, 1, 2, 5, 80, 300]
OF_INDEXER = ("indexer_keys", "indexer_position_ids", "idx_keys")


class Pair:
    """A plain layer and one that grows in place, which get the same calls, and what a user took of it.

    With `bits`, the plain one gets the numbers that the codes of the other stand for.
    """

    def __init__(self, cls, arguments, seed, bits=None):
        self.plain, self.growing = cls(**arguments), cls(**arguments)
        self.bits, self.heads = bits, 1 + seed % 2  # a single one may be latents
        self.growing.__class__ = growing_class(cls, bits)
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.batch = 2
        self.arguments = arguments
        self.others, self.taken = [], []
        records = hasattr(cls, "activate_past_recording") and not hasattr(cls, "update_conv_state")
        if records and self.random.random() < 0.5:
            self.both(lambda layer: layer.activate_past_recording())

    def both(self, call):
        """The results of a call of each, or the class of the error that it raises."""
        results = []
        for layer in (self.plain, self.growing):
            try:
                results.append(call(layer))
            except RuntimeError as error:
                results.append(str(error))
        return results

    def update(self, most=NEW_TOKENS[-1]):
        tokens = self.random.choice([number for number in NEW_TOKENS if number <= most])
        widths = (16, 8) if self.bits is None else (192, 64)
        shapes = [(self.batch, self.heads, tokens, width) for width in widths]
        states = [torch.randn(shape, generator=self.generator) for shape in shapes]
        exact = states if self.bits is None else [rounded(tensor) for tensor in states]
        plain = self.plain.update(*exact)
        growing = self.growing.update(*states)
        assert all(map(torch.equal, plain, growing))
        assert all(isinstance(tensor, QuantizedStates) == (self.bits is not None) for tensor in growing)
        if hasattr(self.plain, "update_indexer"):
            keys = torch.randn(self.batch, tokens, 3, generator=self.generator)
            assert torch.equal(*self.both(lambda layer: layer.update_indexer(keys)))
            positions = torch.randint(99, (3, self.batch, tokens), generator=self.generator)
            assert torch.equal(*self.both(lambda layer: behind_positions(layer, positions)))
        if hasattr(self.plain, "update_index"):
            keys = torch.randn(self.batch, 1, tokens, 3, generator=self.generator)
            assert torch.equal(*self.both(lambda layer: layer.update_index(keys)))

    def crop(self):
        if self.plain.get_seq_length() > 4:
            count = -self.random.randrange(4)
            plain, growing = self.both(lambda layer: layer.crop(count))
            assert plain == growing

    def reorder(self):
        order = torch.randint(0, self.batch, (self.batch,), generator=self.generator)
        self.both(lambda layer: layer.reorder_cache(order) if layer.is_initialized else None)

    def repeat(self):
        if self.plain.get_seq_length() and self.batch < 8:
            self.both(lambda layer: layer.batch_repeat_interleave(2))
            self.batch *= 2

    def select(self):
        if self.plain.get_seq_length() and self.batch > 2:
            self.both(lambda layer: layer.batch_select_indices(torch.tensor([2, 0])))
            self.batch = 2

    def move(self):
        self.both(lambda layer: (layer.offload(), layer.prefetch()) if layer.is_initialized else None)

    def reset(self):
        if self.random.random() < 0.3:
            self.both(lambda layer: layer.reset())
            self.batch = 2

    def save(self):
        copied = copy.deepcopy(self.growing) if self.random.random() < 0.5 else None
        saved = pickle.dumps(self.growing)
        self.growing = copied or pickle.loads(saved)
        if self.bits is None:
            assert b"torch_moe_mps" not in saved and type(self.growing) is type(self.plain)
            self.growing.__class__ = growing_class(type(self.plain))

    def take(self):
        """A user keeps a tensor of the layer, a slice or a copy of it."""
        of_indexer = (getattr(self.growing, name, None) for name in OF_INDEXER)
        for tensor in (self.growing.keys, self.growing.values, *of_indexer):
            if tensor is not None and tensor.dim() > 1 and self.random.random() < 0.5:
                first = self.random.randrange(tensor.shape[-2] + 1)
                parts = [tensor, tensor[..., first:, :], copy.copy(tensor), tensor.detach()]
                part = self.random.choice(parts)
                self.taken.append((part, part.clone()))

    def share(self):
        """A user gives another layer the tensors of this one, and goes on with either."""
        if not self.plain.is_initialized:
            return
        shared = []
        for layer in (self.plain, self.growing):
            other = type(self.plain)(**self.arguments)
            other.__class__ = type(layer)
            vars(other).update(vars(layer))
            shared.append(other)
        self.others.append((*shared, self.batch))
        self.switch()

    def switch(self):
        if self.others:
            place = self.random.randrange(len(self.others))
            here = self.plain, self.growing, self.batch
            (self.plain, self.growing, self.batch), self.others[place] = self.others[place], here

    def check(self):
        assert all(torch.equal(tensor, before) for tensor, before in self.taken)
        assert self.plain.get_seq_length() == self.growing.get_seq_length()
        assert self.plain.get_mask_sizes(3) == self.growing.get_mask_sizes(3)
        for name in ("keys", "values", *OF_INDEXER):
            plain, growing = (getattr(layer, name, None) for layer in (self.plain, self.growing))
            assert (plain is None) == (growing is None)
            assert plain is None or torch.equal(plain, growing)


def behind_positions(layer, new):
    """Keeps positions as Qwen4 does."""
    held = layer.indexer_position_ids
    layer.indexer_position_ids = new if held is None else torch.cat([held, new], dim=-1)
    return layer.indexer_position_ids


def rounded(states):
    """The values of states after rounding to 8 bits."""
    quantized = QuantizedStates.empty(states, states.shape[2])
    quantized.write(0, states)
    return quantized.elements()


SEEDS = in_sweep(range(8), (0,))


def each_layer(test):
    """Every class of layers, with several seeds, in 16 and in 8 bits."""
    names = {"ids": lambda value: getattr(value, "__name__", str(value))}
    test = pytest.mark.parametrize(("cls", "arguments"), PLAIN, **names)(torch.no_grad()(test))
    return pytest.mark.parametrize("bits", [None, 8])(pytest.mark.parametrize("seed", SEEDS)(test))


@each_layer
def test_a_layer_does_what_the_plain_one_does(cls, arguments, seed, bits):
    pair = Pair(cls, arguments, seed, bits)
    others = [pair.crop, pair.reorder, pair.repeat, pair.select, pair.move, pair.reset, pair.save]
    for _ in range(50):
        pair.random.choice([pair.update] * 7 + others)()
        pair.check()


@each_layer
def test_what_shares_memory_with_a_layer_stays_as_it_is(cls, arguments, seed, bits):
    """Other layers with the same tensors, and tensors, slices and copies that a user took."""
    pair = Pair(cls, arguments, seed, bits)
    others = [pair.take, pair.share, pair.switch, pair.crop, pair.crop, pair.reorder, pair.select]
    for _ in range(40):
        pair.random.choice([lambda: pair.update(5)] * 6 + others)()
        pair.check()


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("bits", [None, 8])
@torch.no_grad()
def test_a_torch_that_counts_otherwise(monkeypatch, more, bits):
    """What was taken from a cache stays as it is: where torch's count is not known, all is copied."""
    assert buffer.COUNTS_HOLDERS
    counted = torch._C._storage_Use_Count
    monkeypatch.setattr(torch._C, "_storage_Use_Count", lambda address: counted(address) + more)
    monkeypatch.setattr(buffer, "COUNTS_HOLDERS", buffer.counts_holders())
    layer = growing_class(DynamicLayer, bits)()
    layer.update(*one_token(width=32))
    layer.update(*one_token(width=32))
    taken = layer.keys if bits is None else layer.keys.packed
    before, place = taken.clone(), taken.data_ptr()
    layer.crop(-1)
    layer.update(*one_token(width=32))
    now = layer.keys if bits is None else layer.keys.packed
    assert torch.equal(taken, before) and now.data_ptr() != place


def test_a_torch_without_the_count(monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert buffer.counts_holders() is False


def test_quantised_states_are_not_changed_unseen():
    states = QuantizedStates.empty(torch.zeros(1, 1, 2, 32), 2)
    with pytest.raises(RuntimeError, match="keys and values in 8 bits must be left as they are, got aten"):
        states.copy_(torch.ones(1, 1, 2, 32))
    assert states.zero_() is states and not states.elements().any()


@pytest.mark.parametrize("window", [None, 1025])
@torch.no_grad()
def test_only_new_tokens_are_quantised(window):
    """In about half of the memory, and without a copy."""
    cls = DynamicLayer if window is None else DynamicSlidingWindowLayer
    layer = growing_class(cls, 8)(**({} if window is None else {"sliding_window": window}))
    states = [torch.randn(1, 2, 5000, 128, dtype=torch.bfloat16) for _ in range(2)]
    layer.update(*states)
    kept_tokens, room = (5000, 5000 // 16) if window is None else (1024, 128)
    dense = sum(tensor.nbytes for tensor in states) // 5000 * (kept_tokens + room)
    parts = [part for kept in (layer.keys, layer.values) for part in (kept.packed, kept.scales, kept.zeros)]
    assert sum(part.untyped_storage().nbytes() for part in parts) < 0.52 * dense
    token = [torch.randn(1, 2, 1, 128, dtype=torch.bfloat16) for _ in range(2)]
    addresses = [part.untyped_storage().data_ptr() for part in parts]
    with Memory() as memory:
        layer.update(*token)
    parts = [part for kept in (layer.keys, layer.values) for part in (kept.packed, kept.scales, kept.zeros)]
    assert [part.untyped_storage().data_ptr() for part in parts] == addresses and memory.written < 10_000


@torch.no_grad()
def test_quantised_states_stay_so_when_copied_or_moved(device):
    """To another device and back, by slices of tokens, and by deepcopy, which copies a tensor once."""
    states = torch.randn(2, 2, 5, 64, generator=torch.Generator().manual_seed(0)).to(device)
    kept = QuantizedStates.empty(states, 5)
    kept.write(0, states)
    expected = kept.elements().cpu()
    one, other = copy.deepcopy([kept, kept])
    assert one is other and one.packed.data_ptr() != kept.packed.data_ptr()
    moved = kept.to("cpu")
    for same in (one, moved, moved.to(device), kept.to(states.dtype), kept.clone(), kept.detach()):
        assert type(same) is QuantizedStates and torch.equal(same.elements().cpu(), expected)
    assert moved.device.type == "cpu" and kept.to("meta").packed.device.type == "meta"
    assert torch.equal(kept[:, :, 2:4].elements().cpu(), expected[:, :, 2:4])
    half = kept.to(torch.float16)
    assert type(half) is torch.Tensor and torch.equal(half.cpu(), expected.half())
    assert kept.nbytes == sum(part.nbytes for part in (kept.packed, kept.scales, kept.zeros))


@torch.no_grad()
def test_what_cannot_be_quantised_stays_dense():
    """A width that no group divides."""
    layer = growing_class(DynamicLayer, 8)()
    with pytest.warns(
        UserWarning, match="heads of multiples of 32; keys of 64 and values of 24 elements stay"
    ):
        keys, values = layer.update(torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 24))
    assert type(keys) is type(values) is torch.Tensor


def one_token(batch=1, heads=2, width=64):
    return torch.randn(batch, heads, 1, width), torch.randn(batch, heads, 1, width)


@pytest.mark.parametrize("window", [None, 512])
@torch.no_grad()
def test_a_token_is_written_alone(window):
    """Also after a crop, which a window does not allow."""
    layer = growing_class(DynamicSlidingWindowLayer if window else DynamicLayer)(
        **({"sliding_window": window} if window else {})
    )
    layer.update(torch.randn(1, 2, 3000, 64), torch.randn(1, 2, 3000, 64))
    states = [one_token() for _ in range(20)]
    with Memory() as memory:
        for key, value in states:
            layer.update(key, value)
            layer.update(key, value)
            if not window:
                layer.crop(-1)
    assert memory.written == 40 * 2 * 2 * 64 * 4


@torch.no_grad()
def test_nothing_is_done_where_no_token_is_removed(monkeypatch):
    """generate() asks for that after each token."""
    for plain in (DynamicLayer, DynamicIndexedLayer):
        layer = growing_class(plain)()
        layer.update(*one_token())
        if plain is DynamicIndexedLayer:
            layer.update_indexer(torch.randn(1, 1, 32))
        monkeypatch.setattr(layers, "in_buffer_of", None)
        before = dict(vars(layer))
        layer.crop(0)
        assert all(value is before[name] for name, value in vars(layer).items())
        monkeypatch.undo()


@torch.no_grad()
def test_values_without_elements():
    """GLM-5's rotary part where it has no dimensions: tokens are counted all the same."""
    layer = growing_class(DynamicLayer)()
    for tokens in (3, 1, 2):
        _, values = layer.update(torch.randn(1, 2, tokens, 8), torch.empty(1, 1, tokens, 0))
    assert values.shape == (1, 1, 6, 0)


@pytest.mark.parametrize("window", [None, 1024])
@torch.no_grad()
def test_memory_stays_under_five_quarters(window):
    """16 layers, every second one with a window if there is one, from 4,000 to 5,200 tokens."""
    classes = [DynamicLayer, DynamicLayer] if window is None else [DynamicLayer, DynamicSlidingWindowLayer]
    arguments = {} if window is None else {"sliding_window": window}
    layers = [growing_class(classes[i % 2])(**(arguments if i % 2 else {})) for i in range(16)]
    with Memory() as memory:
        for layer in layers:
            layer.update(torch.empty(1, 1, 4000, 16), torch.empty(1, 1, 4000, 16))
        memory.peak = memory.held()
        for tokens in range(4100, 5200, 100):
            for layer in layers:
                layer.update(torch.empty(1, 1, 100, 16), torch.empty(1, 1, 100, 16))
            needed = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
            assert memory.peak <= 1.25 * needed, (tokens, memory.peak / needed)


def test_a_prompt_leaves_only_its_window():
    layer = growing_class(DynamicSlidingWindowLayer)(sliding_window=64)
    with torch.no_grad():
        layer.update(torch.randn(1, 2, 5000, 8), torch.randn(1, 2, 5000, 8))
    assert layer.keys.untyped_storage().nbytes() <= 2 * 2 * 64 * 8 * 4


def test_a_gradient_finds_the_states_it_saved():
    layer = growing_class(DynamicLayer)()
    states = [torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(4)]
    keys, values = layer.update(*states[:2])
    loss = (keys * values).sum()
    layer.update(*states[2:])
    loss.backward()
    assert torch.equal(states[0].grad, states[1].detach())


def test_a_cache_in_8_bits_says_that_gradients_keep_it_in_16():
    layer = growing_class(DynamicLayer, 8)()
    states = torch.randn(1, 2, 3, 64)
    with torch.no_grad():
        layer.update(states, states)
    with pytest.warns(UserWarning, match="with gradients on, a cache with kv_bits=8 holds 16 bits"):
        keys, _ = layer.update(states, states)
    assert torch.equal(keys, torch.cat([rounded(states), states], 2))
    with torch.no_grad():
        assert isinstance(layer.update(states, states)[0], QuantizedStates)


def test_training_with_a_cache_in_8_bits_is_refused():
    model = tiny_model("qwen3_moe", head_dim=32)
    torch_moe_mps.accelerate(model, kv_bits=8)
    ids = torch.arange(1, 9)[None]
    with pytest.raises(ValueError, match="kv_bits=8 must hold keys and values without gradients, got some"):
        model(input_ids=ids, labels=ids, **cache_argument(model, DynamicCache(config=model.config)))
    model(input_ids=ids, labels=ids).loss.backward()  # a decoder's own cache holds what it is given
    assert all(p.grad is not None for p in model.model.layers[0].self_attn.parameters())


def test_memory_of_inference_mode_is_left_alone():
    layer = growing_class(DynamicLayer)()
    with torch.inference_mode():
        first = one_token()
        layer.update(*first)
    second = one_token()
    with torch.no_grad():
        keys, _ = layer.update(*second)
    assert torch.equal(keys, torch.cat([first[0], second[0]], 2))


GENERATION = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_next"])
def test_generate_gives_the_same_tokens(architecture):
    """The same model with and without the cache that grows: the same scores, bit for bit."""
    model = tiny_model(architecture, sliding_window=8)
    torch_moe_mps.accelerate(model)
    decoder = next(m for m in model.modules() if grow_cache in m._forward_pre_hooks.values())
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    hooks = decoder._forward_pre_hooks.copy()
    for name, options in GENERATION.items():
        if name == "lookup" and architecture == "qwen3_next":
            continue  # transformers refuses it for states that cannot be cropped
        rows = ids[:1] if name == "lookup" else ids
        results = []
        for active in (True, False):
            decoder._forward_pre_hooks.clear()
            decoder._forward_pre_hooks.update(hooks if active else {})
            torch.manual_seed(1)
            results.append(
                model.generate(
                    rows,
                    attention_mask=torch.ones_like(rows),
                    max_new_tokens=8,
                    output_scores=True,
                    return_dict_in_generate=True,
                    **options,
                )
            )
            layers = cache_among(results[-1]).layers
            grown = [type(layer).__name__.startswith("Growing") for layer in layers]
            assert any(grown) if active else not any(grown)
        ours, plain = results
        assert torch.equal(ours.sequences, plain.sequences), name
        assert all(map(torch.equal, ours.scores, plain.scores)), name


@pytest.mark.parametrize("architecture", in_sweep(["lfm2_moe", "lfm3"], ["lfm2_moe"]))
def test_generate_takes_drafts_back_from_states(simulated, architecture):
    """Of models whose states transformers can crop; it refuses drafts for all others."""
    make = other_model if architecture in other_causal() else tiny_model
    model = eager(make(architecture))
    ids, widths = torch.arange(24)[None] % 4 + 9, []
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **settings)
    torch_moe_mps.accelerate(model.to("mps"))
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    found = model.generate(ids.to("mps"), prompt_lookup_num_tokens=3, **settings)
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    assert_close(torch.cat(found.logits).cpu(), torch.cat(expected.logits), 1e-4)
    drafts, accepted = sum(widths) - ids.shape[1] - len(widths) + 1, 16 - len(widths)
    assert drafts > accepted > 0


class OwnCache(DynamicCache):
    """A cache of a user's."""


@torch.no_grad()
def test_other_caches_are_left_alone():
    model = tiny_model("qwen3_moe")
    torch_moe_mps.accelerate(model)
    ids = torch.randint(3, 90, (1, 5))
    own = OwnCache(config=model.config)
    static = StaticCache(config=model.config, max_cache_len=16)
    for cache in (own, static):
        before = [type(layer) for layer in cache.layers]
        model(ids, **cache_argument(model, cache))
        assert [type(layer) for layer in cache.layers] == before


@torch.no_grad()
def test_restore_leaves_the_next_cache_alone():
    model = tiny_model("qwen3_moe")
    hooks = [dict(m._forward_pre_hooks) for m in model.modules()]
    for _ in range(2):
        torch_moe_mps.accelerate(model)
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == 1
    torch_moe_mps.restore(model)
    assert [dict(m._forward_pre_hooks) for m in model.modules()] == hooks


# 8 bits ------------------------------------------------------------------------------------------------


def steps(model, ids, cache=None):
    """The logits of a prompt, of three tokens and of one, and the cache."""
    logits, cache = in_parts(model, ids, 3, 1, cache=cache or DynamicCache(config=model.config))
    return torch.cat(logits, 1), cache


IDS = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))


WIDE = {"head_dim": 64}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32}


@pytest.mark.parametrize(("architecture", "heads"), [("gpt_oss", WIDE), ("deepseek_v3", LATENT)])
def test_a_model_with_a_cache_in_8_bits(device, architecture, heads):
    """Close to 16 bits; an option, a class of cache and the model's own code give the same."""
    model = tiny_model(architecture, **heads).to(device)
    ids = IDS.to(device)
    torch_moe_mps.accelerate(model)
    exact, _ = steps(model, ids)
    by_class, cache = steps(model, ids, QuantizedCache(model.config))
    assert any(isinstance(layer.keys, QuantizedStates) for layer in cache.layers)
    torch_moe_mps.accelerate(model, kv_bits=8)
    logits, cache = steps(model, ids)
    assert torch.equal(logits, by_class)
    errors = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < errors.median() < 0.02  # near ties between experts fall either way
    torch_moe_mps.accelerate(model)
    assert torch.equal(steps(model, ids)[0], logits)
    own, _ = steps(torch_moe_mps.restore(model), ids, QuantizedCache(model.config))
    errors = (own - logits).norm(dim=-1) / logits.norm(dim=-1)
    assert errors.median() < 1e-3  # where a number is rounded to another code
    torch_moe_mps.accelerate(model, kv_bits=16)
    assert torch.equal(steps(model, ids)[0], exact)


def test_the_kernels_of_a_cache_in_8_bits(simulated):
    """One for the keys and one for the values of a layer, and the attention that reads them, windows too."""
    model = tiny_model("gpt_oss", sliding_window=8, **WIDE).to("mps")
    torch_moe_mps.accelerate(model, kv_bits=8)
    _, cache = steps(model, IDS.to("mps"))
    with torch.no_grad(), simulated.trace() as commands:
        model(IDS[:, :1].to("mps"), **cache_argument(model, cache))
    kernels = [line.split()[0] for line in str(commands).splitlines() if " grid " in line]
    assert kernels.count("write_cache_quantized_f32") == 2 * len(cache.layers)
    assert kernels.count("attention8_64_affine8_f32") == len(cache.layers)


def test_a_static_cache_in_8_bits_is_refused():
    """Compiled decode has 16 bits."""
    model = tiny_model("qwen3_moe", **WIDE)
    torch_moe_mps.accelerate(model, kv_bits=8)
    options = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 2}
    with pytest.raises(RuntimeError, match=r"kv_bits=8 needs a DynamicCache, .* got a StaticCache; accel"):
        model.generate(IDS[:1], pad_token_id=0, **options)
    torch_moe_mps.accelerate(model, kv_bits=16)
    assert model.generate(IDS[:1], pad_token_id=0, **options).shape == (1, 22)


@pytest.mark.parametrize("bits", [8, 4])
def test_caches_that_stay_as_they_are_are_said(bits):
    """One of a user's, and those that are offloaded, whose layers would lose their room."""
    model = tiny_model("qwen3_moe", **WIDE)
    torch_moe_mps.accelerate(model, kv_bits=bits)
    decoder = next(m for m in model.modules() if grow_cache in m._forward_pre_hooks.values())
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    for cache, name in (
        (OwnCache(config=model.config), "OwnCache"),
        (offloaded, "an offloaded DynamicCache"),
    ):
        before = [type(layer) for layer in cache.layers]
        with pytest.warns(
            UserWarning, match=f"{bits} is not for {name}, which keeps keys and values as they"
        ):
            grow_cache(decoder, (), cache_argument(decoder, cache))
        assert [type(layer) for layer in cache.layers] == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cache in (QuantizedCache(model.config, bits), DynamicCache(config=model.config), None):
            grow_cache(decoder, (), cache_argument(decoder, cache))


@pytest.mark.parametrize("function", [torch_moe_mps.accelerate, torch_moe_mps.from_pretrained])
def test_other_bits_are_refused(function):
    model = "missing" if function is torch_moe_mps.from_pretrained else tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match=r"^moe_mps::\w+: kv_bits must be 4, 'k4v2', 8 or 16, got 3$"):
        function(model, kv_bits=3)
