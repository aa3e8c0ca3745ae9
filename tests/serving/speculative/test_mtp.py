"""Drafts of a model's own layers for it: those that transformers' code gives, from a cache that is kept."""

from argparse import Namespace

import pytest
import torch
from support import tiny_models
from support.jobs import octets_of
from support.models import eager
from support.mtp import drafted, with_mtp
from support.speculative import Answered, Partly, prompts, settings
from support.sweep import in_sweep
from transformers.modeling_layers import MtpModel

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.commands import main
from torch_moe_mps.commands.speculative import drafts_of
from torch_moe_mps.models.caches.draft_cache import DraftCache
from torch_moe_mps.models.caches.tiled import TiledLayer
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.serving.engine.drafter import DraftedSequence
from torch_moe_mps.serving.engine.drafting import Drafting
from torch_moe_mps.serving.engine.memory import Memory
from torch_moe_mps.serving.engine.width import Width
from torch_moe_mps.serving.prefix_cache.memory import PrefixCache
from torch_moe_mps.serving.speculative.mtp import Mtp
from torch_moe_mps.serving.speculative.prompt_lookup import Lookup
from torch_moe_mps.transformers.mtp.steps import mtp_steps

pytestmark = pytest.mark.slow("two models, and each step's drafts by transformers' code")
MODELS = [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 2), ("mellum", 1)]
MODELS += [(uncounted, 1) for uncounted in ("qwen3_next", "qwen3_5", "qwen3_5_moe")]
OFTEN = (("glm4_moe", 2), ("mellum", 1))  # several layers, and one with a window


@pytest.fixture(scope="module", params=in_sweep(MODELS, OFTEN), ids=lambda model: f"{model[0]}-{model[1]}")
def models(request, tmp_path_factory):
    """(accelerated, transformers' own, its MTP layers)"""
    folder = tmp_path_factory.mktemp("mtp")
    architecture, layers = request.param
    with with_mtp(architecture, folder, layers) as cls:
        model, own = (cls.from_pretrained(folder).eval() for _ in range(2))
        for each in (model, own):
            each.generation_config.eos_token_id = None
        if architecture.startswith("qwen"):  # transformers' code takes it from there
            text = own.config.get_text_config()
            text.num_mtp_layers, text.mtp_layer_types = layers, ["full_attention"] * layers
        torch_moe_mps.accelerate(model)
        yield model, own, MtpModel.from_pretrained(own).eval()


class Watched(Partly):
    """Drafts answers that are known in part, and asks another source for the same rows.

    Attributes:
        seen: the tokens of a row and what the other one drafted.
    """

    def __init__(self, source, prompts, answers):
        super().__init__(prompts, answers)
        self.source, self.seen = source, []
        self.computed, self.left, self.states = source.computed, source.left, source.states

    def draft(self, rows):
        for row, found in zip(rows, self.source.draft(rows), strict=True):
            self.seen.append(([*row.tokens], found))
        return super().draft(rows)


def test_drafts_are_those_of_transformers(models):
    """Where some drafts held before, or none; in the turn behind an answer, too."""
    model, own, layers = models
    source, many = Mtp(model, 1 << 30), prompts(2)[:1]
    plain = Answered(model, many, [settings(14)])
    turn = torch.cat((many[0], torch.tensor(plain.answers[0]), torch.tensor([3, 4, 5])))
    for ids in (many[0], turn):
        (answer,) = Answered(model, [ids], [settings(14)]).answers
        watched = Watched(source, [ids], [answer])
        found = Answered(model, [ids], [settings(14)], watched, width=5)
        assert found.answers == [answer] and len(watched.seen) > 2
        assert found.batch.drafts.drafting.accepted > 2
        for tokens, drafts in watched.seen:
            assert drafts and drafts == drafted(own, layers, tokens, len(drafts))


def test_answers_are_those_without_drafts(models):
    """Of several conversations, drawn ones, too."""
    model, _, _ = models
    many = prompts(3)
    configs = [settings(7), settings(12, do_sample=True), settings(14)]
    plain = Answered(model, many, configs, most=2, seeds=[1, 2, 3])
    for drafts in ("mtp", ["lookup", "mtp"]):
        found = Answered(model, many, configs, drafts, most=2, width=3, seeds=[1, 2, 3])
        assert found.answers == plain.answers
        assert found.batch.drafts.drafting.accepted + found.batch.drafts.drafting.rejected > 12


def test_a_model_without_such_layers_is_one_line():
    model = eager(tiny_models.tiny_model("qwen3_moe"))
    torch_moe_mps.accelerate(model)
    with pytest.raises(ValueError, match=r"mtp must be for .* MTP layers, got a qwen3_moe without them"):
        Answered(model, prompts(1), [settings(2)], "mtp")
    assert not drafts_of(Namespace(speculative=None), model, "", "cpu", PrefixCache(0)).states


def test_they_are_asked_by_default(models):
    """By chat and serve; look-up has the first word, and is all that is asked where it is named."""
    model, _, _ = models
    for wanted, states in ((None, (-1,)), ("mtp", (-1,)), ("lookup", ())):
        drafts = drafts_of(Namespace(speculative=wanted), model, "", "cpu", PrefixCache(0))
        assert drafts.states == states


@pytest.mark.parametrize("models", [("glm4_moe", 2)], indirect=True, ids=["glm4_moe"])
def test_they_are_in_the_memory_plan(models):
    """Weights, caches of a conversation, and prompts that are kept."""
    model, _, layers = models
    source, config = Mtp(model, 1 << 30), model.config
    drafts = Drafting(model, [Lookup(), source], Width(2))
    own = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    more = sum(weight.nbytes for weight in layers.layers.parameters())
    beside = sum(buffer.nbytes for buffer in layers.layers.buffers())
    assert Memory(model, beside=drafts.modules).weights == own + more + beside > own
    row = DraftedSequence([1 + n % 50 for n in range(101)], 101)
    assert drafts.held(row) == 0 and drafts.layers == 2
    drafts.computed([row], [0], torch.randn(1, 100, config.hidden_size), [100])
    token = 2 * config.num_key_value_heads * model.model.layers[0].self_attn.head_dim * 4
    waiting = 2 * config.hidden_size * 4  # a state for each layer, whose next token is not known
    assert drafts.held(row) == (99 + 98) * token + waiting
    drafts.left(row)
    (kept,) = source.prompts.kept
    assert drafts.shrink(1 << 20) == (1 << 20) - octets_of(kept) and source.prompts.kept == [kept]
    assert drafts.shrink(100) == 100 and not source.prompts.kept


@pytest.mark.parametrize("models", [("mellum", 1)], indirect=True, ids=["mellum"])
def test_their_calls_are_captured(models, monkeypatch):
    """Once: a second answer captures nothing more."""
    model, _, _ = models
    monkeypatch.setenv(_environment.CAPTURE, "1")
    torch_moe_mps.accelerate(model)
    many = prompts(1)
    (answer,) = Answered(model, many, [settings(40)]).answers
    source, captured = Mtp(model, 1 << 30), []
    for _ in range(2):
        found = Answered(model, many, [settings(40)], Watched(source, many, [answer]), width=3)
        assert found.answers == [answer]
        captures = [captures_of(part) for part in (model, *source._steps)]
        captured.append([{id(program.match) for program in each.programs} for each in captures])
        assert all(each.reason is None for each in captures)
    assert captured[0] == captured[1] and [*map(len, captured[0])] == [1, 3]


def test_layers_that_no_config_counts(tmp_path):
    """Qwen3-Next's are counted in the checkpoint; `convert` makes what a model has that quantises them."""
    folder, quantised = tmp_path / "own", tmp_path / "four"
    with with_mtp("qwen3_next", folder):
        assert main(["convert", str(folder), str(quantised), "--bits", "4", "--group-size", "32"]) == 0
        loaded = torch_moe_mps.from_pretrained(folder, bits=4, group_size=32)
        models = loaded, torch_moe_mps.from_pretrained(quantised)
        (expected,), (found,) = (mtp_steps(each, torch_moe_mps.accelerate) for each in models)
        assert not hasattr(loaded.config, "num_mtp_layers")
    expected, found = (each.layers.layers.state_dict() for each in (expected, found))
    assert found.keys() == expected.keys() and sum(name.endswith("packed") for name in found) > 5
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_caches_of_tiles(tmp_path, monkeypatch):
    """The layers that draft hold tiles, too, from which wrong drafts are taken back over the bound of one."""
    tiled, own = list[bool](), DraftCache.take_back

    def take_back(self, tokens, layer=None):
        tiled.extend(isinstance(each, TiledLayer) for each in self._layers(layer))
        own(self, tokens, layer)

    monkeypatch.setattr(DraftCache, "take_back", take_back)
    ids = torch.randint(2, 90, (380,), generator=torch.Generator().manual_seed(0))
    with with_mtp("glm4_moe", tmp_path, 1, head_dim=32) as cls:
        model = cls.from_pretrained(tmp_path).eval()
        torch_moe_mps.accelerate(model, kv_bits=4)
        (answer,) = Answered(model, [ids], [settings(14)]).answers
        watched = Watched(Mtp(model, 1 << 30), [ids], [answer])
        assert Answered(model, [ids], [settings(14)], watched, width=4).answers == [answer]
    assert len(watched.seen) > 2 and tiled and all(tiled)
