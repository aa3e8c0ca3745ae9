"""Tokens of a deferred state update: arguments, and steps that are compared with one token at a time."""

import torch


def pending(d, tokens, before, behind, dtype):
    """Tokens that are pending, some of which are right."""
    if not d.flag():
        return {"pending_": None, "counts": None, "keep": False}
    room = d.one(8, 5, max(1, min(tokens, 8)))
    counts = torch.randint(0, room + 1, (before[0], 1), generator=d.generator).int()
    keep = tokens <= room and d.flag()
    return {
        "pending_": d.values(*before, room, *behind, dtype=dtype, scale=0.25),
        "counts": counts,
        "keep": keep,
    }


class Steps:
    """Some steps of 4 tokens each, of which some hold in each of two rows: what the operators give for them,
    and what they give where all tokens that hold come one by one."""

    counts = ((4, 0), (2, 4), (1, 3))

    def __init__(self, device):
        self.device = device
        self.counted = [
            torch.tensor(counts, dtype=torch.int32, device=device)[:, None] for counts in self.counts
        ]

    def run(self, states, pending, call):
        """call(states, step, row, tokens, **pending) -> results of the tokens."""
        none = torch.zeros(2, 1, dtype=torch.int32, device=self.device)
        found, before = [], none
        for step, counts in enumerate(self.counted):
            found.append(call(states, step, slice(None), 4, pending_=pending, counts=before, keep=True))
            before = counts
        last = call(states, len(self.counts), slice(None), 1, pending_=pending, counts=before)
        return [*found, last]

    def check(self, states, pending, call, tolerance=0.0):
        alone = [state.clone() for state in states]
        found = self.run(states, pending, call)
        for row in range(2):
            own = [state[row : row + 1] for state in alone]
            for step, counts in enumerate((*self.counts, (1, 1))):
                for token in range(counts[row]):
                    right = call(own, step, slice(row, row + 1), slice(token, token + 1))
                    result = found[step][row : row + 1, token : token + 1]
                    torch.testing.assert_close(result, right, rtol=0.0, atol=tolerance)
            for state, one in zip(states, own, strict=True):
                torch.testing.assert_close(state[row : row + 1], one, rtol=0.0, atol=tolerance)
