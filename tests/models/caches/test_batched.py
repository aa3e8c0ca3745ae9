"""Conversations that join and leave a batch: each has the logits that it has alone."""

import random
import statistics

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager
from support.sweep import in_sweep
from torch.utils._python_dispatch import TorchDispatchMode

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.models.attention.attention import NAME
from torch_moe_mps.models.caches.batched import BatchedCache, NotBatchable
from torch_moe_mps.models.caches.prompt_cache import new_cache
from torch_moe_mps.models.caches.quantized_states import QuantizedStates
from torch_moe_mps.models.capture import replay
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.trials.batching import reason_for_order
from torch_moe_mps.models.upstream.calls import cache_among, cache_argument
from torch_moe_mps.transformers.deferrable import deferrable_layers, forgets_states

# They give no logits of text.
OTHERS = {"diffusion_gemma", "muse_spark", "qwen3_omni_moe", "openai_privacy_filter"}
# Caches without rows that could come and go.
REFUSED = {"unlimited_ocr": "a UnlimitedOcrDynamicReferenceSlidingWindowLayer cannot be batched"}
ARCHITECTURES = sorted(
    {*tiny_models.architectures(), *tiny_models.DENSE_ARCHITECTURES} - OTHERS - REFUSED.keys()
)
# Where the norm of a head whose values nearly cancel amplifies any rounding, that of a lone row, too.
AMPLIFY = ("qwen3_next",)
# Models of recurrent states alone, whose caches count no tokens; experts that are recognised by trial.
ARCHITECTURES += ["mamba", "falcon_mamba", "mamba2", "dbrx", "jetmoe", "llama4", "longcat_flash", "step3p7"]


def own_model(architecture: str, **changed):
    """The model of `model_of` with transformers' own code."""
    with tiny_models.groups_of_32():
        return eager(tiny_models.tiny_model(architecture, **changed))


def model_of(architecture: str, device: str = "cpu", **options):
    changed = {"sliding_window": 6} if architecture == "gpt_oss" else {}  # it moves on within a conversation
    changed |= {"head_dim": 32} if options.get("kv_bits") == 8 or architecture == "mamba2" else {}
    model = own_model(architecture, **changed).to(device)
    torch_moe_mps.accelerate(model, **options)
    if architecture != "qwen4_exp":  # its own code knows two
        model.set_attn_implementation(NAME)
    return model


def logits_of(model, talk: "Talk") -> list[torch.Tensor]:
    """Those for the tokens of a conversation, of a model alone."""
    cache, token, logits = None, talk.ids, []
    for chosen in talk.logits:
        out = model(input_ids=token, **cache_argument(model, cache), use_cache=True)
        cache, token = cache_among(out), chosen.argmax(-1)[:, None]
        logits.append(out.logits[:, -1])
    return logits


class Talk:
    """A conversation alone, and how far it has come among others: what is generated is the likeliest."""

    def __init__(self, model, number: int, tokens: int):
        generator = torch.Generator().manual_seed(number)
        length = (3, 20, 9, 40, 5, 14)[number % 6]
        self.ids = torch.randint(2, 90, (1, length), generator=generator).to(model.device)
        self.logits, self.done = [], 1
        cache, token = new_cache(model), self.ids
        for _ in range(tokens):
            out = model(input_ids=token, **cache_argument(model, cache), use_cache=True)
            self.logits.append(out.logits[:, -1].cpu())
            token = out.logits[:, -1:].argmax(-1)

    def cache(self, model):
        """That of the prompt."""
        cache = new_cache(model)
        model(input_ids=self.ids, **cache_argument(model, cache), use_cache=True)
        return cache

    @property
    def token(self) -> int:
        return self.tokens(1)[0]

    def tokens(self, count: int) -> list[int]:
        """So many of the next ones."""
        return [int(logits.argmax()) for logits in self.logits[self.done - 1 :][:count]]


class Batch:
    """Talks in rows; each token is compared.

    Attributes:
        seen: the logits of rows, by talk and token.
    """

    def __init__(self, model, tolerance: float = 1e-5):
        self.model, self.tolerance = model, tolerance
        self.rows, self.talks = BatchedCache(model, deferrable_layers(model)), []
        self.needs_order = reason_for_order(model) is not None
        self.seen: dict[Talk, dict[int, torch.Tensor]] = {}

    def join(self, talk: Talk) -> None:
        self.rows.admit(talk.cache(self.model), talk.ids.shape[1])
        self.talks.append(talk)

    def leave(self, row: int) -> None:
        self.rows.finish(row)
        self.talks[row] = self.talks[-1]
        self.talks.pop()

    def step(self) -> None:
        tokens = torch.tensor([[talk.token] for talk in self.talks]).to(self.model.device)
        others = self.rows.arguments()  # which may move the cache
        out = self.model(input_ids=tokens, **cache_argument(self.model, self.rows.cache), **others)
        self.rows.advance()
        for talk, logits in zip(self.talks, out.logits[:, -1].cpu(), strict=True):
            assert_close(logits[None], talk.logits[talk.done], self.tolerance)
            self.seen.setdefault(talk, {})[talk.done] = logits.clone()
            talk.done += 1
            assert int(logits.argmax()) == talk.token

    def verify(self, tokens: int, right: list[int]) -> None:
        """Computes so many tokens of each talk, of which so many are right: the others are taken back."""
        speculative = [talk.tokens(count) for talk, count in zip(self.talks, right, strict=True)]
        ids = torch.tensor([own + [7] * (tokens - len(own)) for own in speculative]).to(self.model.device)
        others = self.rows.arguments(tokens)
        if self.rows.are_states:
            self.rows.hold()
        out = self.model(input_ids=ids, **cache_argument(self.model, self.rows.cache), **others)
        self.rows.advance(tokens)
        for talk, logits, count in zip(self.talks, out.logits.cpu(), right, strict=True):
            for place in range(count):
                assert_close(logits[None, place], talk.logits[talk.done + place], self.tolerance)
        if min(right) < tokens:
            self.rows.take_back([tokens - count for count in right])
        for talk, count in zip(self.talks, right, strict=True):
            talk.done += count

    def verify_some(self, chance: random.Random) -> None:
        """Verifies tokens of which some are right, as many of each talk as the model can take back."""
        left = [len(talk.logits) - talk.done for talk in self.talks]
        tokens = chance.randint(2, 5)
        right = [min(chance.randint(0, tokens), most) for most in left]
        if self.rows.are_states:
            right = [count if count == tokens else 0 for count in right]
        if self.needs_order:
            right = [min(right)] * len(right)
        self.verify(tokens, right)

    def run(self, talks: list[Talk], most: int, seed: int = 0, verifies: bool = False) -> None:
        """All talks to their ends, in an order by chance."""
        chance, waiting = random.Random(seed), [*talks]
        while waiting or self.talks:
            if waiting and len(self.talks) < most and (not self.talks or chance.random() < 0.5):
                self.join(waiting.pop(0))
                continue
            if verifies and chance.random() < 0.6:
                self.verify_some(chance)
            else:
                self.step()
            for row in reversed(range(len(self.talks))):
                talk = self.talks[row]
                if talk.done == len(talk.logits) or chance.random() < 0.05:
                    self.leave(row)


@pytest.mark.slow("six conversations, alone and together")
@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("deepseek_v32", "qwen3_next", "qwen4_exp")))
@torch.no_grad()
def test_each_row_is_as_alone(architecture):
    model = model_of(architecture)
    talks = [Talk(model, number, 2 + number % 5 * 3) for number in range(6)]
    Batch(model, 3e-5 if architecture in AMPLIFY else 1e-5).run(talks, 4)


@pytest.mark.slow("six conversations, alone and together")
@pytest.mark.parametrize("architecture", in_sweep(ARCHITECTURES, ("gpt_oss", "qwen3_next", "deepseek_v4")))
@torch.no_grad()
def test_rows_lose_tokens_of_their_own_number(architecture):
    """Each is as alone, and goes on alone, with others that join and leave."""
    model = model_of(architecture)
    if forgets_states(model):
        pytest.skip("it does not read several tokens behind a cache rightly")
    talks = [Talk(model, number, 6 + number % 5 * 3) for number in range(6)]
    batch = Batch(model, 1e-4 if architecture in AMPLIFY else 1e-5)
    batch.run(talks, 4, verifies=True)


@pytest.mark.slow("three models, 27 conversations")
@torch.no_grad()
def test_a_row_behind_the_others_goes_on_alone():
    """Its tokens lie in their order again: of windows, latents, an indexer's keys and 8 bits."""
    for architecture, options in (
        ("gpt_oss", {}),
        ("deepseek_v32", {}),
        ("qwen3_moe", {"kv_bits": 8}),
    ):
        model = model_of(architecture, **options)
        talks, batch = [Talk(model, number, 16) for number in (0, 1, 2)], Batch(model)
        for talk in talks:
            batch.join(talk)
        for right in ([4, 1, 2], [0, 3, 1], [4, 0, 4]):  # the first row has three tokens of its prompt
            batch.verify(4, right)
        assert batch.rows.lengths == [3 + 8, 20 + 4, 9 + 7]
        for row, talk in enumerate(talks):
            cache = batch.rows.alone(row)
            out = model(torch.tensor([[talk.token]]), **cache_argument(model, cache), use_cache=True)
            assert_close(out.logits[:, -1], talk.logits[talk.done], 1e-5)
            keys = cache.layers[-1].keys
            alone = talk.cache(model)
            tokens = torch.tensor([[int(x.argmax()) for x in talk.logits[: talk.done]]])
            model(tokens, **cache_argument(model, alone), use_cache=True)
            others = alone.layers[-1].keys
            if isinstance(keys, QuantizedStates):
                keys, others = keys.elements(), others.elements()
            torch.testing.assert_close(keys, others, atol=2e-2 if options else 1e-5, rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", AMPLIFY)
@torch.no_grad()
def test_amplified_roundings_are_those_of_alone(architecture):
    """A row is as far from transformers' own code in float64 as its conversation alone, and as its own code
    in float32.
    """
    model, own = model_of(architecture), own_model(architecture)
    talks = [Talk(model, number, 2 + number % 5 * 3) for number in range(8)]
    batch = Batch(model, 3e-5)
    batch.run(talks, 4)
    plain = [logits_of(own, talk) for talk in talks]
    exact = [logits_of(own.double(), talk) for talk in talks]
    rows, alone, float32 = [], [], []
    for talk, plain_logits, exact_logits in zip(talks, plain, exact, strict=True):
        for token, row in batch.seen[talk].items():
            expected = exact_logits[token]
            size = expected.abs().max()
            for distances, logits in (
                (rows, row), (alone, talk.logits[token]), (float32, plain_logits[token])
            ):  # fmt: skip
                distances.append(float((logits - expected).abs().max() / size))
    assert len(rows) > 30 and max(rows) < 2e-5
    assert max(rows) <= 3 * min(max(alone), max(float32))  # one near a tie may be as far by chance
    assert statistics.median(rows) <= 1.5 * min(statistics.median(alone), statistics.median(float32))


@torch.no_grad()
def test_rows_of_8_bits():
    model = model_of("qwen3_moe", kv_bits=8)
    talks = [Talk(model, number, 4 + number) for number in range(4)]
    assert isinstance(talks[0].cache(model).layers[0].keys, QuantizedStates)
    Batch(model).run(talks, 3)


@torch.no_grad()
def test_a_row_goes_on_alone():
    """What leaves is a conversation that others may begin with."""
    model = model_of("gpt_oss")
    talks, batch = [Talk(model, number, 8) for number in (1, 2, 3)], Batch(model)
    for talk in talks:
        batch.join(talk)
    for _ in range(3):
        batch.step()
    for row, talk in enumerate(talks):
        cache = batch.rows.alone(row)
        assert cache.get_seq_length() == talk.ids.shape[1] + 3
        out = model(torch.tensor([[talk.token]]), **cache_argument(model, cache), use_cache=True)
        assert_close(out.logits[:, -1], talk.logits[talk.done], 1e-5)
    batch.step()  # nothing of the batch was changed


class Moved(TorchDispatchMode):
    """Counts the bytes that are copied, of all tensors or of floating-point ones alone."""

    def __init__(self, of_floats: bool = False):
        super().__init__()
        self.bytes, self.of_floats = 0, of_floats

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        if name in ("copy_", "clone", "cat", "index_put_", "index", "index_select", "zero_", "new_zeros"):
            made = args[0] if name.endswith("_") else result
            self.bytes += made.nbytes if made.is_floating_point() or not self.of_floats else 0
        return result


@torch.no_grad()
def test_a_join_moves_one_row():
    """Where there is a spare row, and the others are as long. Larger memory has as many rows."""
    model = model_of("qwen3_moe")
    first, second, third = (Talk(model, number, 1) for number in (3, 1, 2))
    batch = Batch(model)
    batch.join(first)
    batch.join(second)
    batch.join(third)  # makes room for four
    batch.rows.reserve(batch.rows._left + 1)
    cache = Talk(model, 1, 1).cache(model)
    row = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    with Moved() as moved:
        for layer, one in zip(batch.rows.cache.layers, cache.layers, strict=True):
            assert len(layer.keys) == 3 and len(one.keys) == 1
        batch.rows.admit(cache, 20)
    marks = 4 * (batch.rows._places._context + 64)  # which tokens are hidden, and the positions
    assert row <= moved.bytes <= 1.1 * row + marks
    with Moved() as moved:
        batch.rows.finish(3)
    assert moved.bytes <= marks


@torch.no_grad()
def test_a_row_that_loses_more_moves_as_many_tokens():
    """None where all lose as many. A window moves with its row, by a copy in between."""
    for architecture, moved_tokens in (("qwen3_moe", [3, 3]), ("gpt_oss", [2 * 5, 3])):
        model = model_of(architecture)
        talks, batch = [Talk(model, number, 9) for number in (1, 2)], Batch(model)
        for talk in talks:
            batch.join(talk)
        layers = batch.rows.cache.layers
        token = [sum(x[:1, :, :1].nbytes for x in (layer.keys, layer.values)) for layer in layers]
        for lost, expected in (
            ([2, 2], 0),
            ([0, 3], sum(n * own for n, own in zip(moved_tokens, token, strict=True))),
        ):
            model(torch.full((2, 4), 9), past_key_values=batch.rows.cache, **batch.rows.arguments(4))
            batch.rows.advance(4)
            with Moved(of_floats=True) as moved:  # not positions and masks
                batch.rows.take_back(lost)
            assert moved.bytes == expected


# Models whose states lag, by how these take tokens in: the delta rule, a decay for each channel, Mamba-2, a
# convolution alone, Mamba-2 beside keys, and a convolution and values beside keys.
LAGGING = ("qwen3_next", "kimi_linear", "granitemoehybrid", "lfm2_moe", "zamba2")


@pytest.mark.parametrize("architecture", in_sweep(LAGGING, ("lfm2_moe",)))
@torch.no_grad()
def test_a_rollback_moves_no_state(architecture):
    """Nor does what comes before and behind it: of a row that loses more, keys move alone.

    A window moves whole, by a copy in between.
    """
    model = model_of(architecture)
    talks, batch = [Talk(model, number, 9) for number in (1, 2)], Batch(model)
    for talk in talks:
        batch.join(talk)
    rows = batch.rows
    assert not rows.are_states
    *_, last = held = [each for each in rows.cache.layers if getattr(each, "keys", None) is not None]
    keys = sum(x[:1, :, :1].nbytes for each in held for x in (each.keys, each.values))
    for right, lost in (([2, 2], 0), ([4, 1], 3), ([1, 1], 0)):
        tokens = [talk.tokens(count) + [7] * (4 - count) for talk, count in zip(talks, right, strict=True)]
        with Moved(of_floats=True) as moved:  # not positions, masks and how many tokens are right
            arguments = rows.arguments(4)
        model(torch.tensor(tokens), **cache_argument(model, rows.cache), **arguments)
        with moved:
            rows.advance(4)
            rows.take_back([4 - count for count in right])
        lost = 2 * rows.lengths[1] if lost and last.needs_order else lost
        assert moved.bytes == lost * keys
        for talk, count in zip(talks, right, strict=True):
            talk.done += count
    batch.step()


@pytest.mark.parametrize("architecture", in_sweep(LAGGING, ("qwen3_next",)))
@torch.no_grad()
def test_a_row_alone_has_taken_its_tokens_in(architecture):
    """Some are pending in rows that lag: the copy of one is a plain cache, and the rows go on."""
    model = model_of(architecture)
    talks, batch = [Talk(model, number, 9) for number in (1, 2, 3)], Batch(model, 3e-5)
    for talk in talks[:2]:
        batch.join(talk)
    kinds = [type(layer) for layer in talks[2].cache(model).layers]
    batch.verify(4, [3, 1])
    for row, talk in enumerate(talks[:2]):
        cache = batch.rows.alone(row)
        assert [*map(type, cache.layers)] == kinds and not hasattr(cache.layers[0], "uncommitted")
        out = model(torch.tensor([[talk.token]]), **cache_argument(model, cache), use_cache=True)
        assert_close(out.logits[:, -1], talk.logits[talk.done], 3e-5)
    batch.join(talks[2])  # beside rows with tokens that are pending
    batch.verify(3, [1, 2, 3])
    batch.leave(0)
    batch.step()


@torch.no_grad()
def test_a_rollback_of_states_that_do_not_lag_moves_none():
    """Where all rows roll back: what was held in front of the step takes the place of the states.

    Of several, each gets its own back.
    """
    model = model_of("lfm2_moe")
    batch = Batch(model)
    rows = batch.rows = BatchedCache(model)  # none may lag
    batch.join(Talk(model, 1, 9))
    rows.hold()
    model(torch.full((1, 4), 9), past_key_values=rows.cache, **rows.arguments(4))
    rows.advance(4)
    with Moved() as moved:
        rows.take_back([4])
    assert moved.bytes == 0
    batch.step()
    batch.join(Talk(model, 2, 9))
    batch.verify(4, [4, 0])
    batch.step()


@torch.no_grad()
def test_positions_behind_images():
    """Of each row, as far from its number of tokens as when it joined."""
    model = model_of("qwen3_moe")
    rows = BatchedCache(model)
    for number, tokens, moved in ((1, 20, -3), (2, 9, 0)):
        rows.admit(Talk(model, number, 1).cache(model), tokens, moved)
    assert rows.arguments()["position_ids"].tolist() == [[17], [9]]
    assert rows.arguments(2)["position_ids"].tolist() == [[17, 18], [9, 10]]
    rows.advance(2)
    rows.admit(Talk(model, 2, 1).cache(model), 9, 4)
    assert rows.arguments()["position_ids"].tolist() == [[19], [11], [13]]
    rows.finish(1)
    assert rows.arguments()["position_ids"].tolist() == [[19], [13]]


@pytest.mark.slow("captures three programs, and runs 80 tokens")
@torch.no_grad()
def test_no_recapture_while_rows_come_and_go(monkeypatch):
    monkeypatch.setenv(_environment.CAPTURE, "1")
    captured, own = [], replay.Captures._record

    def counted(self, model, forward, reading, kind):
        captured.extend(reading.numbers[1:2] if reading.numbers[1] == 1 else [])  # short prompts are others
        return own(self, model, forward, reading, kind)

    monkeypatch.setattr(replay.Captures, "_record", counted)
    model = model_of("qwen3_moe")
    talks = [Talk(model, number, 12) for number in range(6)]
    batch, chance = Batch(model, 2e-5), random.Random(1)

    def join(talk: Talk) -> None:
        talk.done = 1
        batch.join(talk)

    # A row alone, several, and one that is left behind the place of a longer one.
    for longest, shorter in ((3, 0), (1, 4)):
        join(talks[longest])
        for _ in range(4):
            batch.step()
        join(talks[shorter])
        for _ in range(4):
            batch.step()
        batch.leave(0)
        for _ in range(3):
            batch.step()
        batch.leave(0)
    before = len(captured)
    for _ in range(50):
        if batch.talks and (len(batch.talks) == 6 or chance.random() < 0.5):
            batch.leave(chance.randrange(len(batch.talks)))
        else:
            join(chance.choice([talk for talk in talks if talk not in batch.talks]))
        if batch.talks and all(talk.done < len(talk.logits) for talk in batch.talks):
            batch.step()
    assert len(captured) == before <= 4
    assert captures_of(model).reason is None


@pytest.mark.parametrize("architecture", [*REFUSED])
@torch.no_grad()
def test_caches_without_rows_say_so(architecture):
    model = own_model(architecture)
    torch_moe_mps.accelerate(model)
    rows, ids = BatchedCache(model), torch.arange(1, 7)[None]
    cache = cache_among(model(ids, use_cache=True))
    with pytest.raises(NotBatchable, match=REFUSED[architecture]):
        rows.admit(cache, 6)
    assert len(rows) == 0 and rows.cache is None


@torch.no_grad()
def test_a_cache_with_more_tokens_than_its_sequence_is_refused():
    """As of layers that a model calls twice for a token: its masks would be shorter than the keys."""
    model = own_model("qwen3_moe")
    torch_moe_mps.accelerate(model)
    rows, cache = BatchedCache(model), new_cache(model)
    model(torch.arange(1, 7)[None], **cache_argument(model, cache), use_cache=True)
    with pytest.raises(NotBatchable, match="a DynamicLayer holds 6 tokens of a sequence of 3"):
        rows.admit(cache, 3)
    rows.admit(cache, 6)
