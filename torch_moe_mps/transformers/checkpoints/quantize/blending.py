"""Mean squares of experts, blended because each token is routed to only some of them."""

from torch import Tensor

# The mean of all counts as so many tokens of each.
PRIOR = 32


def blended(sums: Tensor, counts: Tensor) -> Tensor | None:
    """Sums of squares [n, C] of n matrices of a layer, and their tokens [n], as means; None without tokens.

    Those with few tokens take much of the mean of all; those without take it whole.
    """
    total = counts.sum()
    if not bool(total > 0):
        return None
    if len(sums) == 1:
        return sums / counts[:, None]
    return (sums + PRIOR * sums.sum(0) / total) / (counts[:, None] + PRIOR)
