"""Steps of training: the loss of held-out lines."""

import pytest
import torch
from support import tiny_models

from torch_moe_mps.training.examples import Example
from torch_moe_mps.training.steps import held_out_loss


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
