"""Formulas, and what they match in a recorded graph."""

import torch
from support.graphs import recorded
from support.values import numbers as random

from torch_moe_mps.models.graphs.patterns import match

ops = torch.ops.moe_mps


def test_formulas():
    def function(x):
        y = torch.softmax((x * 2.0).to(torch.float64).view(2, 4), -1)
        return x + y.float().view(8)

    (*_, total) = (n for n in recorded(function, random(8)).nodes if n.op == "call_function")
    found = match("_softmax(X * 2.0, -1, False) + Y", total)
    assert found["X"] is found["Y"] and found["X"].op == "placeholder"
    assert match("Y + _softmax(X * 2.0, -1, False)", total) == found
    for other in ("_softmax(X * 3.0, -1, False) + Y", "_softmax(X * 2.0, 0, False) + Y", "X - Y", "X + X"):
        assert match(other, total) is None
