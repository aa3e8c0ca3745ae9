"""Caches of tiles of 4 and 2 bits against dense attention to rounded numbers, and all that a cache can do."""

import copy
import pickle

import pytest
import torch
from support.models import assert_close
from support.sweep import in_sweep
from support.tiles import TILE, WIDE, Oracle, rounded, tiny_model_of
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import torch_moe_mps
from torch_moe_mps._limits import KV_FORMATS
from torch_moe_mps.models.attention.attention import Scores, attend
from torch_moe_mps.models.attention.visible import ALL_KEYS, Visible
from torch_moe_mps.models.caches import cache as cache_file
from torch_moe_mps.models.caches import growing
from torch_moe_mps.models.caches.batched import BatchedCache
from torch_moe_mps.models.caches.classes import growing_class
from torch_moe_mps.models.caches.draft_cache import DraftCache
from torch_moe_mps.models.caches.parts import CachePart
from torch_moe_mps.models.caches.prefix_state import PrefixState, empty_cache
from torch_moe_mps.models.caches.tiled import MOST_DENSE, SPARE, TiledLayer
from torch_moe_mps.models.caches.tiled_states import TiledStates
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_argument

BITS = (4, "k4v2")
IDS = torch.randint(2, 90, (2, 900), generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:torch_moe_mps. kv_bits=.* is for layers that hold")


def model_of(architecture: str, bits=4, **sizes):
    model = tiny_model_of(architecture, WIDE, max_position_embeddings=2048, **sizes)
    if bits is not None:
        torch_moe_mps.accelerate(model, kv_bits=bits)
    return model


@torch.no_grad()
def read(model, cache, pieces, start: int = 0, ids=IDS[:1]) -> torch.Tensor:
    """The logits of all tokens of some pieces."""
    logits = []
    for size in pieces:
        given = ids[:, start : start + size]
        logits.append(model(input_ids=given, **cache_argument(model, cache), use_cache=True).logits)
        start += size
    return torch.cat(logits, 1)


def layers_of(cache) -> list[TiledLayer]:
    return [layer for layer in cache.layers if isinstance(layer, TiledLayer)]


@pytest.mark.slow("three ways through 700 tokens, and NumPy's")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_logits_are_those_of_rounded_tiles(architecture, bits, monkeypatch):
    """Whatever calls the tokens come in: all at once, in pieces, and one by one over three tiles' bounds."""
    count = 700
    own = model_of(architecture, None)
    with torch.no_grad():
        dense = own(IDS[:1, :count], use_cache=False).logits
        Oracle(own, bits, monkeypatch)
        expected = own(IDS[:1, :count], use_cache=False).logits
    model = model_of(architecture, bits)
    for pieces in ([count], [100, 300, 1, 1, 250, 48], [300, *[1] * 400]):
        cache = empty_cache(model)
        logits = read(model, cache, pieces)
        assert layers_of(cache) == cache.layers
        # A number between two codes may take either.
        assert distance(logits, expected) < min(1e-3, distance(dense, expected) / 20)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.slow("two ways through 400 tokens, and NumPy's")
@torch.no_grad()
def test_a_cache_that_knows_no_windows(monkeypatch):
    """Its layers, which the first call makes, hold all tokens in tiles; attention shows those of windows."""
    own = tiny_model_of("gpt_oss", sliding_window=150, max_position_embeddings=2048)
    Oracle(own, 4, monkeypatch)
    expected = own(IDS[:1, :430], use_cache=False).logits
    model = tiny_model_of("gpt_oss", sliding_window=150, max_position_embeddings=2048)
    torch_moe_mps.accelerate(model, kv_bits=4)
    for pieces in ([250, 180], [200, 200, *[1] * 30]):
        cache = DynamicCache()
        logits = read(model, cache, pieces)
        assert layers_of(cache) == cache.layers
        assert distance(logits, expected) < 1e-3


def layer_of(bits=4) -> TiledLayer:
    return growing_class(DynamicLayer, bits)()


def states_of(tokens: int, widths=(64, 32), heads=2, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, tokens, width, generator=generator) for width in widths]


def some(states, start: int, count: int):
    return [part[:, :, start : start + count] for part in states]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("heads", [2, 1])
@torch.no_grad()
def test_what_a_layer_holds(heads, bits):
    """Latents lie side by side, as one head's keys and values of other widths do."""
    layer, states = layer_of(bits), states_of(1000, heads=heads)
    key_bits, value_bits = (4, 4) if bits == 4 else (4, 2)
    held = [rounded(states[0], key_bits, False), rounded(states[1], value_bits, True)]
    if heads == 1:
        held = [*rounded(torch.cat(states, -1), key_bits, False).split((64, 32), 3)]
    done = 0
    for count in (300, 1, 90, 500, *[1] * 109):
        read = layer.update(*some(states, done, count))
        done += count
        own = (done - 1) // TILE * TILE
        assert layer.get_seq_length() == done and layer.get_mask_sizes(2) == (done + 2, 0)
        for found, exact, from_codes in zip(read, states, held, strict=True):
            assert type(found) is TiledStates and found.shape == exact[:, :, :done].shape
            elements = found.elements()
            assert torch.equal(elements[:, :, :TILE], exact[:, :, : min(TILE, done)])
            assert torch.equal(elements[:, :, own:], exact[:, :, own:done])
            if count > 1 or done == 1000:
                assert_close(elements[:, :, TILE:own], from_codes[:, :, TILE:own].float(), 1e-6)
        assert layer.keys.shape[2] <= MOST_DENSE
    assert (layer.value_tiles is None) == (heads == 1)


@torch.no_grad()
def test_memory_is_bounded():
    """At most MOST_DENSE tokens lie as they are, whatever came; the tiles have a sixteenth to spare."""
    layer, states = layer_of(), [part.bfloat16() for part in states_of(9000, (128, 128))]
    layer.update(*some(states, 0, 8000))
    for token in range(8000, 9000):
        layer.update(*some(states, token, 1))
        dense = [part.untyped_storage().nbytes() for part in (layer.keys, layer.values)]
        assert max(dense) <= MOST_DENSE * 2 * 128 * 2
    tiles = sum(part.untyped_storage().nbytes() for part in (layer.key_tiles, layer.value_tiles))
    assert tiles <= 0.285 * 1.07 * sum(part.nbytes for part in states)


@pytest.mark.parametrize(("bits", "share"), [(4, 0.275), ("k4v2", 0.21)])
def test_what_a_sequence_takes(bits, share):
    """The memory that a server plans with holds for any length: tokens' shares of tiles, and dense tokens."""
    model = tiny_model_of("qwen3_moe", head_dim=128, max_position_embeddings=2048).bfloat16()
    torch_moe_mps.accelerate(model, kv_bits=bits)
    for length in (100, 300, 900):
        cache = empty_cache(model)
        read(model, cache, (length - 2, 1, 1))
        state = PrefixState(cache, {})
        token, beside = state.rates(length)
        assert share - 0.01 < token / (2 * 2 * 2 * 128 * 2) < share  # layers, keys and values, heads
        planned = beside + token * (length + growing.spare_for(length))
        assert sum(state.count_storages().values()) <= planned


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [255, 256, 257, 384, 640, 641])
@torch.no_grad()
def test_tokens_that_are_taken_back(length, bits):
    """Drafts over the bound of a tile leave no trace, up to a whole tile of them."""
    states, others = states_of(900), states_of(900, seed=1)
    for wrong in (1, 5, 128):
        drafted, plain = layer_of(bits), layer_of(bits)
        for layer in (drafted, plain):
            layer.update(*some(states, 0, 200))
            for token in range(200, length):
                layer.update(*some(states, token, 1))
        drafted.update(*some(others, 0, wrong))
        drafted.crop(-wrong)
        done = length
        for count in (3, 130, *[1] * 20):
            pairs = zip(
                *(layer.update(*some(states, done, count)) for layer in (drafted, plain)), strict=True
            )
            assert all(torch.equal(one.elements(), two.elements()) for one, two in pairs)
            done += count
        assert torch.equal(drafted.key_tiles, plain.key_tiles)


@torch.no_grad()
def test_the_cache_of_a_drafter():
    """Its drafts are taken back from tiles as from other layers, over the bound of one, too."""
    cache, plain = DynamicCache(), layer_of()
    cache.layers.append(layer_of())
    drafter, states, others = DraftCache(cache), states_of(400), states_of(400, seed=1)
    for layer in (*cache.layers, plain):
        layer.update(*some(states, 0, 90))
    for start in range(90, 360, 3):
        drafter.reserve(8)
        held = cache.layers[0].keys.untyped_storage().data_ptr()
        cache.layers[0].update(*some(others, start, 8))
        assert cache.layers[0].keys.untyped_storage().data_ptr() == held
        drafter.take_back(8)
        new = some(states, start, 3)
        for one, two in zip(cache.layers[0].update(*new), plain.update(*new), strict=True):
            assert torch.equal(one.elements(), two.elements())


@pytest.mark.parametrize("options", [{"lookahead": ALL_KEYS}, {"indices": True}, {}])
@torch.no_grad()
def test_what_attention_to_tiles_lacks_reads_their_elements(options):
    """Tokens that see later ones, chosen keys, and keys that share tiles with values of another width."""
    heads = 2 if options else 1
    layer, states = layer_of(), states_of(400, heads=heads)
    keys, values = layer.update(*states)
    query = torch.randn(1, 2 * heads, 3, 64, generator=torch.Generator().manual_seed(5))
    if "indices" in options:
        options = {"indices": torch.arange(7, 390, 5, dtype=torch.int32).expand(1, 1, 3, -1)}
    visible = Visible(**options)
    found = attend(query, keys, values, visible, Scores(0.2))
    scores = query.double() @ keys.elements().double().repeat_interleave(2, 1).mT * 0.2
    seen = torch.ones(3, 400, dtype=torch.bool)
    if "indices" in options:
        seen = torch.zeros(3, 400, dtype=torch.bool).index_fill(1, options["indices"][0, 0, 0].long(), True)
    elif not options:
        seen = seen.tril(397)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = weights @ values.elements().double().repeat_interleave(2, 1)
    assert_close(found, expected.transpose(1, 2).float(), 1e-5)


@torch.no_grad()
def test_a_crop_further_back():
    """Between two tiles, and in tile 0, it is exact; elsewhere tokens of the last tile are as its codes have
    them, and `longest` says so.
    """
    states = states_of(1200)
    held = rounded(states[0], 4, False).float()
    for length in (0, 1, 100, 128, 129, 256, 300, 512, 1000, 1100):
        layer, plain = layer_of(), layer_of()
        layer.update(*some(states, 0, 1200))
        exact = layer.longest(length) == length
        assert exact == (length <= TILE or length % TILE == 0 or length >= 1024)
        assert layer.longest(length) in (length, length // TILE * TILE)
        layer.crop(length - 1200)
        assert layer.get_seq_length() == length
        if length:
            plain.update(*some(states, 0, length))
        read, expected = (each.update(*some(states, 1100, 20))[0].elements() for each in (layer, plain))
        if not exact:
            own = length // TILE * TILE
            expected[:, :, own:length] = held[:, :, own:length]
        assert_close(read, expected, 1e-6)


@torch.no_grad()
def test_batches_copies_and_pickles():
    """Beams, rows that are repeated and chosen, a layer that is copied, moved and saved."""
    states, order = states_of(700, batch=3), torch.tensor([2, 0, 0])
    changes = {
        "reorder": (lambda layer: layer.reorder_cache(order), lambda part: part[order]),
        "repeat": (lambda layer: layer.batch_repeat_interleave(2), lambda part: part.repeat_interleave(2, 0)),
        "select": (lambda layer: layer.batch_select_indices(torch.tensor([1])), lambda part: part[1:2]),
        "move": (lambda layer: (layer.offload(), layer.prefetch()), lambda part: part),
    }
    for change, expected in changes.values():
        layer, plain = layer_of(), layer_of()
        layer.update(*some(states, 0, 400))
        change(layer)
        plain.update(*(expected(part) for part in some(states, 0, 400)))
        for source in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert type(source) is type(layer)
            twin = copy.deepcopy(plain)
            for start, count in ((400, 1), (401, 250)):
                new = [expected(part) for part in some(states, start, count)]
                for one, two in zip(source.update(*new), twin.update(*new), strict=True):
                    assert torch.equal(one.elements(), two.elements())
    layer.reset()
    assert layer.get_seq_length() == 0
    assert torch.equal(layer.update(*some(states, 0, 9))[0].elements(), states[0][:, :, :9])


@torch.no_grad()
def test_layers_that_share_memory():
    """Two conversations go on from one: neither sees the other's tokens or tiles."""
    first, second = layer_of(), layer_of()
    states, others = states_of(600), states_of(600, seed=1)
    first.update(*some(states, 0, 250))
    second.__class__, second.__dict__ = type(first), dict(vars(first))
    plain = [layer_of(), layer_of()]
    for layer in plain:
        layer.update(*some(states, 0, 250))
    for start in range(0, 300, 10):
        for layer, twin, source in ((first, plain[0], states), (second, plain[1], others)):
            new = some(source, 250 + start, 10)
            for one, two in zip(layer.update(*new), twin.update(*new), strict=True):
                assert torch.equal(one.elements(), two.elements())


def test_gradients():
    """With gradients on a layer holds 16 bits from there on; tiles stay what they are."""
    layer, states = layer_of(), states_of(800)
    with torch.no_grad():
        before = layer.update(*some(states, 0, 700))[0].elements()
    with pytest.warns(UserWarning, match="with gradients on, a cache with kv_bits=4 holds 16 bits"):
        keys, _ = layer.update(*some(states, 700, 10))
    assert type(keys) is torch.Tensor
    assert torch.equal(keys[:, :, :700], before) and torch.equal(keys[:, :, 700:], states[0][:, :, 700:710])
    with pytest.raises(ValueError, match="kv_bits=4 must hold keys and values without gradients"):
        layer.update(*(part.requires_grad_() for part in some(states, 710, 1)))
    with torch.no_grad():
        assert type(layer.update(*some(states, 710, 90))[0]) is TiledStates


@torch.no_grad()
def test_widths_that_no_tile_has():
    layer = layer_of("k4v2")
    with pytest.warns(
        UserWarning, match="kv_bits='k4v2' is for heads of multiples of 32; keys of 64 and value"
    ):
        keys, values = layer.update(*states_of(9, (64, 24)))
    assert type(keys) is type(values) is torch.Tensor and not isinstance(layer, TiledLayer)


def test_what_holds_more_bits():
    """Layers with a window hold 8 bits, which is said once."""
    cache_file._warn_of_more_bits.cache_clear()
    model = model_of("gpt_oss", 4, layer_types=["sliding_attention", "full_attention"], sliding_window=24)
    with pytest.warns(
        UserWarning, match="kv_bits=4 is for layers that hold the keys and values of all"
    ) as told:
        for _ in range(2):
            cache = empty_cache(model)
            read(model, cache, [300])
    assert len([line for line in told if "is for layers that hold" in str(line.message)]) == 1
    assert [getattr(layer, "bits", None) for layer in cache.layers] == [8, 4]


@pytest.mark.slow("generates with beams")
@torch.no_grad()
def test_generate_with_beams_and_padding():
    """A beam's score is that of its tokens read at once; a row beside a padded one has its tokens alone."""
    model = model_of("qwen3_moe")
    given = {
        "max_new_tokens": 8,
        "length_penalty": 1.0,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    beams = model.generate(
        IDS[:1, :380], num_beams=3, return_dict_in_generate=True, output_scores=True, **given
    )
    ids = beams.sequences
    logits = read(model, empty_cache(model), [387], ids=ids)[:, 379:].log_softmax(-1)
    score = logits.gather(2, ids[:, 380:, None]).mean()
    assert_close(beams.sequences_scores, score[None], 1e-5)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[0, :40] = 0
    padded = model.generate(IDS[:, :300], attention_mask=mask, **given)
    alone = model.generate(IDS[1:, :300], **given)
    assert torch.equal(padded[1:], alone)


@pytest.mark.slow("generates with drafts of transformers")
@torch.no_grad()
def test_drafts_of_generate():
    """transformers looks its drafts up in the prompt, and crops the cache behind wrong ones."""
    model, ids = model_of("qwen3_moe"), IDS[:1, :31].repeat(1, 12)
    given = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=5, **given), model.generate(ids, **given))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("architecture", in_sweep(["qwen3_moe", "deepseek_v3", "gpt_oss"], ["deepseek_v3"]))
@pytest.mark.slow("reads parts of 700 tokens and goes on from them")
def test_prefixes_and_files(architecture, bits, tmp_path):
    """A cache that went on is cut where that is exact; written in blocks of two tiles, it is read whole."""
    model = model_of(architecture, bits)
    cache, end, more = empty_cache(model), 700, (3, 1, 1)
    read(model, cache, (512, 180, *[1] * 8))
    state = PrefixState(cache, {})
    assert state.step == TILE
    lengths = {90: 90, 200: 128, 250: 128, 256: 256, 300: 300, 699: 699}
    assert {tokens: state.longest(tokens) for tokens in lengths} == lengths
    joined = PrefixState(empty_cache(model), {}).joining(end)
    snapshot = state.snapshot(end)
    for first, last in ((0, 256), (256, 512), (512, end)):
        (tmp_path / "x").write_bytes(snapshot.end(first, last).begun_copy().to_bytes("x"))
        joined.add(CachePart.read(tmp_path / "x", "x"), last)
    for tokens, pieces in ((256, (256,)), (512, (512,)), (end, (512, 180, *[1] * 8))):
        fresh = empty_cache(model)
        read(model, fresh, pieces)
        expected = read(model, fresh, more, tokens)
        for whole in (cache, joined.cache):
            cut = PrefixState(whole, {}).cut(tokens).cache
            assert cut.get_seq_length() == tokens
            assert torch.equal(read(model, cut, more, tokens), expected)
    assert torch.equal(read(model, cache, (200,), end), read(model, joined.cache, (200,), end))


@torch.no_grad()
def test_static_caches_are_refused():
    model = model_of("qwen3_moe", "k4v2")
    with pytest.raises(
        RuntimeError, match=r"kv_bits='k4v2' needs a DynamicCache, .* got a StaticCache; accel"
    ):
        model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=8))
    torch_moe_mps.accelerate(model, kv_bits=16)
    cache = DynamicCache(config=model.config)
    read(model, cache, [300])
    assert not layers_of(cache) and SPARE < MOST_DENSE


@pytest.mark.slow("captures tokens, beside others that run module by module")
@pytest.mark.parametrize("bits", in_sweep(BITS, ["k4v2"]))
@pytest.mark.parametrize("architecture", in_sweep(["qwen3_moe", "deepseek_v3", "gpt_oss"], ["qwen3_moe"]))
@torch.no_grad()
def test_captured_tokens(architecture, bits):
    """Over four bounds. What a tile and the dense tokens' buffer need is done in front of a program."""
    model, pieces = model_of(architecture, bits), (250, *[1] * 400)
    expected = read(model, empty_cache(model), pieces)
    torch_moe_mps.accelerate(model, capture=True)
    cache, start, reasons, logits = empty_cache(model), 0, [], []
    for size in pieces:
        logits.append(read(model, cache, (size,), start))
        start += size
        reasons.append(captures_of(model).reason)
    assert_close(torch.cat(logits, 1), expected, 1e-5)
    assert reasons.count(None) > 385
    assert len(captures_of(model).programs) <= 4
    assert layers_of(cache)[-1].left_out == TILE


@pytest.mark.slow("captures steps of three sequences")
@torch.no_grad()
def test_captured_steps_of_several_sequences():
    """Each has its own tiles; logits are those of the sequence alone."""
    model, steps, lengths = model_of("qwen3_moe"), 270, (300, 270, 381)
    torch_moe_mps.accelerate(model, capture=True)
    rows, expected, talks = BatchedCache(model), [], []
    for number, length in enumerate(lengths):
        ids = IDS[:1].roll(7 * number)
        expected.append(read(model, empty_cache(model), (length, *[1] * steps), ids=ids)[:, length:])
        cache = empty_cache(model)
        read(model, cache, (length,), ids=ids)
        rows.admit(cache, length)
        talks.append(ids[:, length : length + steps])
    reasons, expected = [], torch.cat(expected)
    for step, token in enumerate(torch.cat(talks).split(1, 1)):
        out = model(input_ids=token, **cache_argument(model, rows.cache), **rows.arguments())
        rows.advance()
        reasons.append(captures_of(model).reason)
        assert_close(out.logits[:, 0], expected[:, step], 1e-5)
    assert reasons.count(None) > steps - 16


@pytest.mark.slow("prompts of more than two tiles in the simulator")
@pytest.mark.parametrize("bits", in_sweep(BITS, ["k4v2"]))
@pytest.mark.parametrize("architecture", in_sweep(["qwen3_moe", "deepseek_v3", "gpt_oss"], ["deepseek_v3"]))
@torch.no_grad()
def test_on_mps(architecture, bits, simulated):
    """Logits are those on the CPU, of a prompt, a piece and tokens; all of it runs on the kernels."""
    kinds = ["full_attention"] if architecture == "gpt_oss" else None
    model = model_of(architecture, bits, num_hidden_layers=1, layer_types=kinds)
    pieces = (270, 50, *[1] * 3)
    expected = read(model, empty_cache(model), pieces)
    torch_moe_mps.accelerate(torch_moe_mps.restore(model).to("mps"), kv_bits=bits, check=False)
    with simulated.trace() as encoded:
        logits = read(model, empty_cache(model), pieces, ids=IDS[:1].to("mps"))
    assert_close(logits.cpu(), expected, 1e-4)
    kernels = [line.split()[0] for line in str(encoded).splitlines()]
    attention = {name for name in kernels if name.startswith(("tiles", "attention"))} - {
        "attention_merge_f32"
    }
    key_bits, value_bits = (4, 4) if architecture == "deepseek_v3" else KV_FORMATS[bits]
    assert all(f"_k{key_bits}v{value_bits}_" in name for name in attention)
    assert len(attention) == 2  # of prompts, and of few tokens
    assert any(name.startswith("seal_tiles") for name in kernels)


@pytest.mark.slow("captures a token in the simulator")
@torch.no_grad()
def test_captured_tokens_on_mps(simulated):
    """The bound of a tile is passed by a captured token, after the kernel that quantises the tile before."""
    pieces = (250, *[1] * 12)
    model = model_of("qwen3_moe", num_hidden_layers=1)
    expected = read(model, empty_cache(model), pieces)
    torch_moe_mps.accelerate(torch_moe_mps.restore(model).to("mps"), kv_bits=4, check=False, capture=True)
    cache, start, reasons, logits = empty_cache(model), 0, [], []
    for size in pieces:
        with simulated.trace() as encoded:
            logits.append(read(model, cache, (size,), start, IDS[:1].to("mps")).cpu())
        start += size
        reasons.append(captures_of(model).reason)
    assert_close(torch.cat(logits, 1), expected, 1e-4)
    kernels = [line.split()[0] for line in str(encoded).splitlines()]
    of_cache = [name for name in kernels if name.startswith(("rope", "tiles", "copy", "write"))]
    assert of_cache == ["rope_f32", "tiles8_64_k4v4_f32"]  # a token is written where it is turned
    assert [number for number, reason in enumerate(reasons) if reason is None] == [3, 4, 5, 6, 9, 10, 11, 12]
