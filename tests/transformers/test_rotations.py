"""Rotations of q and k, at once or one by one, and of a part of the heads of q: each runs the operator."""

import pytest
import torch
from support.models import operators_of
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

from torch_moe_mps.transformers.basics.report import Done
from torch_moe_mps.transformers.install import rewrite


class OneByOne(nn.Module):
    def forward(self, q, k, cos, sin):
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
        q = q.transpose(1, 2)
        k = k.view(2, 3, -1, 16)
        k = apply_rotary_pos_emb(k, cos, sin, unsqueeze_dim=2)
        return q, k.transpose(1, 2)


class WithOtherTables(nn.Module):
    def forward(self, q, k, cos, sin):
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
        k = apply_rotary_pos_emb(k, sin, cos, unsqueeze_dim=2)
        return q, k


class WithTheOther(nn.Module):
    """k is rotated with q's result added."""

    def forward(self, q, k, cos, sin):
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
        scale = q.mean()
        k = apply_rotary_pos_emb(k * scale, cos, sin, unsqueeze_dim=2)
        return q, k


class ChangedBetween(nn.Module):
    def forward(self, q, k, cos, sin):
        sines = sin.clone()
        q = apply_rotary_pos_emb(q, cos, sines, unsqueeze_dim=2)
        for _ in range(2):
            sines *= 2.0
        k = apply_rotary_pos_emb(k, cos, sines, unsqueeze_dim=2)
        return q, k


class ReadBetween(nn.Module):
    """A call that may have effects reads q before k is rotated."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Identity()

    def forward(self, q, k, cos, sin):
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
        q = self.seen(q).mul_(2.0)
        k = apply_rotary_pos_emb(k, cos, sin, unsqueeze_dim=2)
        return q, k


class Unnamed(nn.Module):
    def forward(self, q, k, cos, sin):
        kept, turned = torch.split(q, [8, 16], dim=-1)
        turned, k = apply_rotary_pos_emb_interleave(turned, k, cos, sin)
        return torch.cat((kept, turned), dim=-1) + 0.0, k


class Cut(nn.Module):
    def forward(self, q, k, cos, sin):
        kept, turned = torch.split(q, [8, 16], dim=-1)
        turned, k = apply_rotary_pos_emb_interleave(turned, k, cos, sin)
        q = torch.cat((kept, turned), dim=-1)
        return q, k


class Swapped(nn.Module):
    def forward(self, q, k, cos, sin):
        turned, kept = torch.split(q, [16, 8], dim=-1)
        turned, k = apply_rotary_pos_emb_interleave(turned, k, cos, sin)
        q = torch.cat((turned, kept), dim=-1)
        return q, k


class KeptToo(nn.Module):
    """Parts of q are read once more."""

    def forward(self, q, k, cos, sin):
        kept, before = torch.split(q, [8, 16], dim=-1)
        turned, k = apply_rotary_pos_emb_interleave(before, k, cos, sin)
        q = torch.cat((kept, turned), dim=-1)
        return q, k + kept.sum() + before.mean()


class TurnedToo(nn.Module):
    """The part that turned is read alone."""

    def forward(self, q, k, cos, sin):
        kept, turned = torch.split(q, [8, 16], dim=-1)
        turned, k = apply_rotary_pos_emb_interleave(turned, k, cos, sin)
        q = torch.cat((kept, turned), dim=-1)
        return q, k + turned.sum()


class OfAnother(nn.Module):
    def forward(self, q, k, cos, sin):
        _, turned = torch.split(q, [8, 16], dim=-1)
        other, _ = torch.split(q * 2.0, [8, 16], dim=-1)
        turned, k = apply_rotary_pos_emb_interleave(turned, k, cos, sin)
        q = torch.cat((other, turned), dim=-1)
        return q, k


class Transposed(nn.Module):
    def forward(self, q, k, cos, sin):
        q, k = apply_rotary_pos_emb_interleave(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q, k


class OneTransposed(nn.Module):
    """The one head of k needs no transposition."""

    def forward(self, q, k, cos, sin):
        k = k.view(2, 1, 3, 16)
        q, k = apply_rotary_pos_emb_interleave(q.transpose(1, 2), k, cos, sin)
        return q, k


def tables(heads_first: bool) -> tuple[torch.Tensor, ...]:
    """q, k, cos and sin for 2 x 3 tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 24), (2, 1, 3, 16)) if heads_first else ((2, 3, 4, 16), (2, 3, 1, 16))
    q, k = (torch.randn(shape, generator=generator) for shape in shapes)
    angles = torch.randn(2, 3, 8, generator=generator)
    angles = torch.cat((angles, angles), -1)
    return q, k, angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("cls", "heads_first", "calls"),
    [
        *((cls, False, 2) for cls in (OneByOne, WithOtherTables, WithTheOther, ChangedBetween, ReadBetween)),
        *((cls, True, 1) for cls in (Cut, KeptToo, TurnedToo, Unnamed, Swapped, OfAnother)),
        *((cls, False, 1) for cls in (Transposed, OneTransposed)),
    ],
)
def test_results_are_the_modules_own(cls, heads_first, calls):
    own, fast = cls().eval(), cls().eval()
    assert rewrite(fast) == ([Done("rope")], None)
    results = []
    with torch.no_grad():
        expected = own(*tables(heads_first))
        used = operators_of(lambda: results.append(fast(*tables(heads_first))))
    assert used == {"rope": calls}
    for a, b in zip(results[0], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
