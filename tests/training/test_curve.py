"""The picture of a loss: its points lie where the losses say."""

import re

from torch_moe_mps.training.curve import loss_curve


def points(picture: str) -> list[tuple[float, float]]:
    (path,) = re.findall(r'points="([^"]+)"', picture)
    return [(float(x), float(y)) for x, _, y in (pair.partition(",") for pair in path.split())]


def test_points_are_proportional():
    """Twice the step is twice as far to the right, twice the fall twice as far down."""
    (x0, y0), (x1, y1), (x2, y2) = points(loss_curve("t", [(0, 3.0), (5, 2.0), (10, 0.0)]))
    assert abs((x2 - x0) - 2 * (x1 - x0)) < 0.3 and abs((y2 - y0) - 3 * (y1 - y0)) < 0.5
    assert x0 < x1 < x2 and y0 < y1 < y2


def test_losses_that_are_equal():
    (_, y0), (_, y1) = points(loss_curve("t", [(1, 2.0), (2, 2.0)]))
    assert y0 == y1
