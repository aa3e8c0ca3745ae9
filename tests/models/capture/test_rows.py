"""The number of rows of a captured batch is a symbol: rows may come and go, padded or not."""

import copy

import pytest
import torch
from support import tiny_models
from support.models import assert_close, eager, generate, prompt
from transformers import DynamicCache

import torch_moe_mps
from torch_moe_mps.models.attention import causal_mask
from torch_moe_mps.models.attention.attention import NAME
from torch_moe_mps.models.basics.state import state_in
from torch_moe_mps.models.capture import replay
from torch_moe_mps.models.capture.classes import captures_of
from torch_moe_mps.models.upstream.calls import cache_argument

pytestmark = pytest.mark.usefixtures("captured")


@pytest.fixture
def count_captures(monkeypatch):
    """The calls that were captured."""
    captured, own = [], replay.Captures._record

    def counted(self, model, forward, reading, kind):
        program = own(self, model, forward, reading, kind)
        captured.append(reading.numbers[:2])
        return program

    monkeypatch.setattr(replay.Captures, "_record", counted)
    return captured


def model_of(architecture: str, device: str, **options):
    with tiny_models.groups_of_32():
        model = eager(tiny_models.tiny_model(architecture)).to(device)
    torch_moe_mps.accelerate(model, **options)
    model.set_attn_implementation(NAME)
    return model


def not_captured(model):
    other = copy.deepcopy(model)
    for module in other.modules():
        state_in(module).captures = None
    return other


def tokens(model, rows: int, padding: int, count: int = 4) -> list[torch.Tensor]:
    """Logits of some tokens behind a prompt of several rows, the first of which is padded."""
    ids = prompt(rows, 5 + count).to(model.device)
    shown = torch.ones_like(ids)
    shown[0, :padding] = 0
    cache, logits = DynamicCache(config=model.config), []
    for part in (slice(0, 5), *(slice(n, n + 1) for n in range(5, 5 + count))):
        mask = {"attention_mask": shown[:, : part.stop]} if padding else {}
        out = model(ids[:, part], **cache_argument(model, cache), use_cache=True, **mask)
        logits.append(out.logits.cpu())
    return logits[1:]


@pytest.mark.slow("two programs are captured, each of which takes a second")
@pytest.mark.on("cpu")
@torch.no_grad()
def test_two_programs_for_two_to_sixteen_rows(device, count_captures):
    """Eight rows of a model with eight experts are not taken for experts."""
    model = model_of("qwen3_moe", device)
    for rows in (8, 2, 3, 16):
        tokens(model, rows, 2)
    assert captures_of(model).reason is None
    assert_close(tokens(model, 5, 2), tokens(not_captured(model), 5, 2), 2e-5)
    assert len(count_captures) <= 2, count_captures


@pytest.mark.slow("two programs are captured, each of which takes a second")
@torch.no_grad()
def test_passes_take_rows(count_captures):
    """The parts of joined matrices, and outputs in another order, of any number of rows."""
    model = model_of("qwen3_next", "cpu", bits=4, group_size=32)
    for rows in (4, 2):
        tokens(model, rows, 0)
    assert captures_of(model).reason is None
    assert_close(tokens(model, 7, 0), tokens(not_captured(model), 7, 0), 2e-5)
    assert len(count_captures) <= 2, count_captures


@pytest.mark.slow("a token is recorded twice, of three rows")
@torch.no_grad()
def test_a_mask_that_layers_read_takes_no_token_more():
    """Linear attention multiplies by its elements: the fourth is captured, as where no layer reads them."""
    model = model_of("qwen3_next", "cpu")
    tokens(model, 3, 2)
    assert captures_of(model).reason is None and len(captures_of(model).programs) == 1
    assert_close(tokens(model, 3, 2), tokens(not_captured(model), 3, 2), 2e-5)
    assert captures_of(model).reason is None and len(captures_of(model).programs) == 1


@pytest.mark.slow("four answers of generate(), of which one captures its tokens")
def test_the_masks_of_generate_are_read_once(monkeypatch):
    """Each token has a mask of its own, which shows it: on mps, to read it takes as long as the token."""
    model = model_of("qwen3_moe", "cpu")
    ids = prompt(3, 6)
    shown = torch.ones_like(ids)
    shown[1, :3] = 0
    expected = generate(not_captured(model), ids, attention_mask=shown, max_new_tokens=12)
    read, own = [], causal_mask.key_ranges
    monkeypatch.setattr(causal_mask, "key_ranges", lambda *given: read.append(given) or own(*given))
    counts = []
    for new in (6, 6, 12):
        read.clear()
        result = generate(model, ids, attention_mask=shown, max_new_tokens=new, min_new_tokens=new)
        counts.append(len(read))
    assert counts[1] == counts[2]
    assert torch.equal(result, expected)
    assert captures_of(model).reason is None
