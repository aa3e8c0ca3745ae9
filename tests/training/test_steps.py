"""Steps of training: the loss of held-out lines, and what is shown of a step."""

import time
from types import SimpleNamespace

import pytest
import torch
from support import tiny_models

from torch_moe_mps.training.examples import Example
from torch_moe_mps.training.steps import _Shown, held_out_loss


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_held_out_loss_is_a_mean_over_tokens(batch):
    """Over those of all lines, in whatever batches these run; in float64, each line alone."""
    model = tiny_models.tiny_model("llama", vocab_size=32)
    drawn = torch.Generator().manual_seed(0)
    examples, losses = [], []
    for number, (length, first) in enumerate(((4, 3), (24, 2), (9, 5))):
        ids = torch.randint(1, 32, (length,), generator=drawn).tolist()
        labels = [-100] * first + ids[first:]
        examples.append(Example(ids, labels, number, "completion", False))
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        losses += [-logs[place - 1, ids[place]].item() for place in range(first, length)]
    assert held_out_loss(model, examples, batch, 0) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_resumed_training_shows_its_own_speed(monkeypatch):
    """500 tokens in 10 seconds are 50 a second, whatever was read before; 5 more steps take as long."""
    lines: list[str] = []
    shown = _Shown(lines.append)
    state = SimpleNamespace(global_step=10, max_steps=20, num_input_tokens_seen=1000, log_history=[{}])
    monkeypatch.setattr(time, "perf_counter", iter((100.0, 110.0)).__next__)
    shown.on_train_begin(None, state, None)
    state.global_step, state.num_input_tokens_seen = 15, 1500
    shown.on_log(None, state, None, {"loss": 1.25})
    assert lines == ["step 15 of 20: loss 1.2500, 50 tokens/s, 0:10 left"]
    assert state.log_history[-1]["tokens_a_second"] == 50
