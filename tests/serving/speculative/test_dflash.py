"""Drafts of an assistant that makes a block of tokens: those of all states at once."""

import copy

import pytest
import torch
from support import tiny_models
from support.dflash import LAYERS, MASK, assistant_of
from support.launches import name_of_cache
from support.models import eager
from support.speculative import Answered, Partly, prompts, settings

import torch_moe_mps
from torch_moe_mps import _environment
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.serving.speculative.dflash import DFlash

DFlashCache = pytest.importorskip("transformers.cache_utils").DFlashCache


@pytest.fixture(scope="module")
def models():
    """(accelerated, transformers' own, assistant)"""
    own, model = (eager(tiny_models.tiny_model("qwen3_moe")) for _ in range(2))
    torch_moe_mps.accelerate(model)
    return model, own, assistant_of(model)


class Watched(Partly):
    """Drafts answers that are known in part, and asks another source for the same rows.

    Attributes:
        seen: the tokens of a row, of how many the states were computed, and what the other one drafted.
    """

    def __init__(self, source, prompts, answers):
        super().__init__(prompts, answers)
        self.source, self.seen = source, []
        self.computed, self.states = source.computed, source.states

    def draft(self, rows):
        for row in rows:
            end = self.source._read[row].end
            self.seen.append(([*row.tokens], end, self.source.draft([row])[0]))
        return super().draft(rows)


@torch.no_grad()
def drafted(own, assistant, tokens: list[int], end: int, count: int) -> list[int]:
    """A block behind the states of the first tokens, which are read at once."""
    out = own(torch.tensor([tokens[:end]]), use_cache=False, output_hidden_states=True)
    states = torch.cat([out.hidden_states[layer + 1] for layer in LAYERS], -1)
    size = assistant.config.block_size
    block = [*tokens[end:], *[MASK] * size][:size]
    cache = DFlashCache(config=assistant.config)
    cache.set_previous_accepted_tokens(end)
    embedded = own.get_input_embeddings()(torch.tensor([block]))
    given = {name_of_cache(assistant): cache}
    made = assistant(embedded, context_hidden_states=states, **given)
    places = slice(len(tokens) - end, len(tokens) - end + count)
    return own.lm_head(made.last_hidden_state[:, places]).argmax(-1)[0].tolist()


LONG = [[torch.randint(2, 90, (n,), generator=torch.Generator().manual_seed(1))] for n in (70, 130)]


@pytest.mark.slow("answers of two models, and each step's drafts by transformers' code")
@pytest.mark.parametrize(
    ("many", "new", "is_accelerated"),
    [(prompts(2), 14, True), (LONG[0], 8, False), (LONG[1], 8, True)],
    ids=[5, 70, 130],
)
def test_drafts_are_those_of_transformers(models, many, new, is_accelerated):
    """Where some held before, or none, beyond the assistant's window; answers are those without.

    Prompts longer than the window are read at once: the window behind a block that is taken back is that in
    front of it.
    """
    model, own, assistant = models
    asked, configs = assistant, [settings(new)] * len(many)
    plain = Answered(model, many, configs)
    if is_accelerated:
        asked = copy.deepcopy(assistant)
        assert "attention" in str(torch_moe_mps.accelerate(asked))
    watched = Watched(DFlash(model, asked), many, plain.answers)
    found = Answered(model, many, configs, watched, width=4)
    assert found.answers == plain.answers and len(watched.seen) > (8 if len(many) > 1 else 1)
    assert len(many) == 1 or found.batch.drafts.drafting.accepted > 4
    for tokens, end, drafts in watched.seen:
        assert drafts and drafts == drafted(own, assistant, tokens, end, len(drafts))


@pytest.mark.slow("answers of a model and an assistant")
def test_answers_are_those_without_drafts(models):
    """Of several conversations, drawn ones, too; what it is asked for is what `drafts` takes."""
    model, _, assistant = models
    many = prompts(3)
    configs = [settings(10), settings(15, do_sample=True), settings(20)]
    plain = Answered(model, many, configs, most=2, seeds=[1, 2, 3])
    found = Answered(model, many, configs, assistant, most=2, width=3, seeds=[1, 2, 3])
    assert found.answers == plain.answers
    assert found.batch.drafts.drafting.accepted + found.batch.drafts.drafting.rejected > 20


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 64}, {"target_layer_ids": [0, 40]}, {"mask_token_id": 10**6}]
)
def test_the_assistant_of_another_model_is_one_line(models, sizes):
    model, _, _ = models
    with pytest.raises(ValueError, match=r"an assistant must be of a model of \d+ layers, .* got [^\n]*$"):
        DFlash(model, assistant_of(model, **sizes))


@pytest.mark.slow("captures an assistant's blocks")
def test_blocks_are_captured(models, monkeypatch):
    """However long: one program behind one state, one behind several. A second answer captures no more."""
    model, own, _ = models
    monkeypatch.setenv(_environment.CAPTURE, "1")
    assistant, many = assistant_of(model, block_size=16), prompts(1)
    asked = copy.deepcopy(assistant)
    torch_moe_mps.accelerate(asked)
    (answer,) = Answered(model, many, [settings(40)]).answers
    source, captured = DFlash(model, asked), []
    for _ in range(2):
        watched = Watched(source, many, [answer])
        assert Answered(model, many, [settings(40)], watched, width=3).answers == [answer]
        for tokens, end, drafts in watched.seen:
            assert drafts == drafted(own, assistant, tokens, end, len(drafts))
        captured.append({id(program.match) for program in captures_of(source._step).programs})
    assert captured[0] == captured[1] and len(captured[0]) == 2
    assert captures_of(source._step).reason is None
